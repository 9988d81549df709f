//! Following the hub's route table: what is asked, and which answer is taken. Gateways and spokes do it alike, each with its
//! own patience and its own disk.
//!
//! Whoever asks names the table that it has, and so says that it runs it ([`crate::rollout`]). Whoever has none says nothing of
//! itself: it runs none yet. Whoever ends in order says so, and a change of a residency policy need not wait until it has been silent
//! for long enough.

use std::time::Duration;

use regions::{Generation, RouteTable};

use crate::bound::{self, Held, Rejected};
use crate::rollout::Reader;
use crate::wire::WireError;
use crate::wire::route::RouteTableV1;

/// How long taking one's leave may take. If no hub hears it, silence says the same later.
pub const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);

/// Why a table is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    /// One of its entries cannot be right.
    #[error("{0}")]
    Unreadable(#[from] WireError),
    /// Its generation is not the next of the one in hand, or none that a hub can have published.
    #[error("{0}")]
    Generation(#[from] Rejected),
}

/// The path and query of the question for whatever follows the table in hand, to be held for so long if there is none.
pub fn question(after: Option<Generation>, reader: &Reader, wait: Duration) -> String {
    let has = after.map(|after| format!("after={after}&reader={reader}&")).unwrap_or_default();
    format!("/v1/routes?{has}wait_ms={}", wait.as_millis())
}

/// The path at which a reader that goes takes its leave (`DELETE`): nobody waits for it any longer.
pub fn farewell(reader: &Reader) -> String {
    format!("/v1/readers/{reader}")
}

/// The table that was offered, if it is taken in the place of the one in hand (invariant 5, Monotone plans).
/// `since_1970` is the time by the clock here.
///
/// # Errors
///
/// Why it is not; the one in hand stays.
pub fn taken(
    offered: RouteTableV1,
    held: Option<Held>,
    since_1970: Duration,
) -> Result<RouteTable, NotTaken> {
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
    fn only_a_table_of_a_higher_generation_is_taken() {
        let check = |offered: Generation, after: Option<Generation>, expected: bool| {
            let table = RouteTable { generation: offered, ..RouteTable::empty() };
            let held = after.map(|generation| Held { generation, age: Duration::ZERO });
            let found = taken(RouteTableV1::from(&table), held, Duration::from_secs(1));
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
        assert!(matches!(taken(unreadable, None, Duration::ZERO), Err(NotTaken::Unreadable(_))));
    }

    #[test]
    fn whoever_has_a_table_says_which_and_who_it_is() {
        let reader = "spoke/aws/us-east-1/00000000000000ff".parse().unwrap();
        let wait = Duration::from_secs(5);
        assert_eq!(question(None, &reader, wait), "/v1/routes?wait_ms=5000");
        assert_eq!(
            question(Some(at(1, 4)), &reader, wait),
            "/v1/routes?after=1.4&reader=spoke/aws/us-east-1/00000000000000ff&wait_ms=5000"
        );
        assert_eq!(farewell(&reader), "/v1/readers/spoke/aws/us-east-1/00000000000000ff");
    }
}
