//! Watching the hub's route table: the long-poll request, and which response is accepted. Gateways and spokes use the
//! same protocol, each with its own timeouts and its own snapshot file.
//!
//! A reader that has a table names its generation in the request, which also acknowledges that it runs this table
//! ([`crate::rollout`]). A reader without a table does not name itself, because it runs none yet. A reader that shuts
//! down in order deregisters, so that a change of a residency policy does not wait until the reader has timed out.

use std::time::Duration;

use regions::{Generation, RouteTable};

use crate::bound::{self, AcceptedGeneration, RejectedGeneration};
use scheduler_api::WireError;
use scheduler_api::reader::Reader;
use scheduler_api::route::RouteTableV1;

/// Timeout of the deregistration. If no hub receives it, the reader times out at the hub.
pub const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(1);

/// Reason for rejecting a table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableRejected {
    /// An entry of the table is invalid.
    #[error("{0}")]
    Unreadable(#[from] WireError),
    /// Its generation is not newer than the current one, or is higher than a hub can have published.
    #[error("{0}")]
    Generation(#[from] RejectedGeneration),
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

/// Converts the offered table and checks that it may replace the current one (invariant 5, Monotone plans).
/// `since_1970` is the local wall-clock time.
///
/// # Errors
///
/// The reason for the rejection; the current table stays.
pub fn accept_table(
    offered: RouteTableV1,
    held: Option<AcceptedGeneration>,
    since_1970: Duration,
) -> Result<RouteTable, TableRejected> {
    let table = RouteTable::try_from(offered)?;
    bound::accept(table.generation, held, since_1970)?;
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(epoch: u64, number: u64) -> Generation {
        Generation { epoch, number }
    }

    #[test]
    fn only_a_table_of_a_higher_generation_is_accepted() {
        let check = |offered: Generation, after: Option<Generation>, expected: bool| {
            let table = RouteTable { generation: offered, ..RouteTable::empty() };
            let held = after.map(|generation| AcceptedGeneration { generation, age: Duration::ZERO });
            let found = accept_table(RouteTableV1::from(&table), held, Duration::from_secs(1));
            assert_eq!(found.is_ok(), expected, "{offered} after {after:?}");
        };
        check(at(1, 7), None, true);
        check(at(1, 8), Some(at(1, 7)), true);
        check(at(2, 1), Some(at(1, 7)), true);
        for after in [at(1, 7), at(1, 8), at(2, 0)] {
            check(at(1, 7), Some(after), false);
        }
        check(at(1, u64::MAX), None, false);
        check(at(u64::MAX, 1), Some(at(1, 7)), false);
        let unreadable = RouteTableV1 { version: 9, ..RouteTableV1::from(&RouteTable::empty()) };
        assert!(matches!(accept_table(unreadable, None, Duration::ZERO), Err(TableRejected::Unreadable(_))));
    }

    #[test]
    fn a_reader_with_a_table_names_itself_and_its_generation() {
        let reader = "spoke/aws/us-east-1/00000000000000ff".parse().unwrap();
        let wait = Duration::from_secs(5);
        assert_eq!(watch_path(None, &reader, wait), "/v1/routes?wait_ms=5000");
        assert_eq!(
            watch_path(Some(at(1, 4)), &reader, wait),
            "/v1/routes?after=1.4&reader=spoke/aws/us-east-1/00000000000000ff&wait_ms=5000"
        );
        assert_eq!(deregister_path(&reader), "/v1/readers/spoke/aws/us-east-1/00000000000000ff");
    }
}
