//! Watching the hub's route table: the long-poll request and its timeouts. Gateways and spokes use the same protocol.
//!
//! A reader that has a table names its generation in the request, which also acknowledges that it runs this table
//! ([`crate::rollout`]). A reader without a table does not name itself, because it runs none yet. A reader that shuts
//! down in order deregisters, so that a change of a residency policy does not wait until the reader has timed out.

use std::time::Duration;

use regions::Generation;

use scheduler_api::reader::{Reader, Role};

/// Timeout of the deregistration. If no hub receives it, the reader times out at the hub.
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
/// hangs is detected sooner, and for the shortest time before its first table, without which it can serve no request.
pub fn long_poll(role: Role, hubs: usize, has_table: bool) -> LongPoll {
    let (wait_ms, grace_ms) = match (role, hubs, has_table) {
        (Role::Spoke, _, _) => (5_000, 3_000),
        (Role::Gateway, 1, _) => (20_000, 5_000),
        (Role::Gateway, _, true) => (4_000, 1_000),
        (Role::Gateway, _, false) => (500, 1_000),
    };
    LongPoll { wait: Duration::from_millis(wait_ms), grace: Duration::from_millis(grace_ms) }
}

/// Returns whether a response without a table is a failure of the hub: a gateway without a table serves no request, and
/// another hub may have one.
pub fn requires_table(role: Role, hubs: usize, has_table: bool) -> bool {
    role == Role::Gateway && hubs > 1 && !has_table
}

/// Returns the path and query of the long poll for a table newer than `after`; the hub holds the request for up to
/// `wait`.
pub fn watch_path(after: Option<Generation>, reader: &Reader, wait: Duration) -> String {
    let has = after.map(|after| format!("after={after}&reader={reader}&")).unwrap_or_default();
    format!("/v1/routes?{has}wait_ms={}", wait.as_millis())
}

/// Returns the path at which a reader deregisters (`DELETE`); after that no rollout waits for it.
pub fn deregister_path(reader: &Reader) -> String {
    format!("/v1/readers/{reader}")
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
        assert_eq!(ms(Role::Gateway, 2, true), (4_000, 1_000, false));
    }

    #[test]
    fn a_reader_with_a_table_names_itself_and_its_generation() {
        let reader = "spoke/aws/us-east-1/00000000000000ff".parse().unwrap();
        let wait = Duration::from_secs(5);
        assert_eq!(watch_path(None, &reader, wait), "/v1/routes?wait_ms=5000");
        assert_eq!(
            watch_path(Some(Generation { epoch: 1, number: 4 }), &reader, wait),
            "/v1/routes?after=1.4&reader=spoke/aws/us-east-1/00000000000000ff&wait_ms=5000"
        );
        assert_eq!(deregister_path(&reader), "/v1/readers/spoke/aws/us-east-1/00000000000000ff");
    }
}
