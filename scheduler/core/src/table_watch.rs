//! Watching the hub's route table: the long-poll request and its timeouts. Gateways and spokes use the same protocol.
//!
//! A reader that has a table names its generation in the request, which also acknowledges that it runs this table
//! ([`crate::rollout`]). A reader without a table does not name itself, because it runs none yet. A reader that shuts
//! down in order deregisters, so that a change of a residency policy does not wait until the reader has timed out.

use std::time::Duration;

use scheduler_api::reader::Role;

/// Timeout of the deregistration of a reader or a spoke. If no hub receives it, the reader times out at the hub, and the
/// lease of the spoke expires.
pub const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeouts of one long poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongPoll {
    /// Time for which the hub may hold the request while the table does not change.
    pub wait: Duration,
    /// Additional time for the response.
    pub grace: Duration,
}

impl LongPoll {
    /// Returns the time after which the request fails.
    pub fn timeout(self) -> Duration {
        self.wait + self.grace
    }
}

/// Returns the timeouts of the next poll.
///
/// The polls of a spoke are short, because each response is also the hub's heartbeat: no replica is terminated while
/// the hub is silent. A gateway with several hubs polls them for a shorter time than a single one, so that a hub that
/// hangs delays a change, such as the revocation of an API key, by less than 2 s, and for the shortest time before its
/// first table, without which it can serve no request.
pub fn long_poll(role: Role, hubs: usize, has_table: bool) -> LongPoll {
    let (wait_ms, grace_ms) = match (role, hubs, has_table) {
        (Role::Spoke, _, _) => (5_000, 3_000),
        (Role::Gateway, 1, _) => (20_000, 5_000),
        (Role::Gateway, _, true) => (1_000, 800),
        (Role::Gateway, _, false) => (500, 1_000),
    };
    LongPoll { wait: Duration::from_millis(wait_ms), grace: Duration::from_millis(grace_ms) }
}

/// Returns whether a response without a table is a failure of the hub: a gateway without a table serves no request, and
/// another hub may have one.
pub fn requires_table(role: Role, hubs: usize, has_table: bool) -> bool {
    role == Role::Gateway && hubs > 1 && !has_table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_polls_for_a_shorter_time_where_another_hub_may_respond() {
        let ms = |role, hubs, has_table| {
            let LongPoll { wait, grace } = long_poll(role, hubs, has_table);
            (wait.as_millis(), grace.as_millis(), requires_table(role, hubs, has_table))
        };
        for has_table in [false, true] {
            assert_eq!(ms(Role::Gateway, 1, has_table), (20_000, 5_000, false));
            for hubs in [1, 3] {
                assert_eq!(ms(Role::Spoke, hubs, has_table), (5_000, 3_000, false));
            }
        }
        assert_eq!(ms(Role::Gateway, 3, false), (500, 1_000, true));
        assert_eq!(ms(Role::Gateway, 2, true), (1_000, 800, false));
    }
}
