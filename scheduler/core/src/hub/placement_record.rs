//! Record of the leader's decisions on placements in the store: written after each change, and again after a failure.

use std::time::{Duration, Instant};

use super::PERSIST_RETRY;

/// Minimum interval of the writes while decisions are pending. Ten thousand of them are decided in hundreds of steps, and each write
/// has all that are known.
const PENDING_INTERVAL: Duration = Duration::from_secs(1);

/// Progress of the record.
#[derive(Debug, Default)]
pub(super) struct PlacementRecord {
    /// Revision of the decisions in the store; 0 before the first write of this term.
    written: u64,
    write: RecordWrite,
    /// Time of the last attempt.
    begun: Option<Instant>,
}

#[derive(Debug, Default)]
enum RecordWrite {
    #[default]
    Idle,
    InFlight {
        revision: u64,
    },
    RetryAt(Instant),
}

impl PlacementRecord {
    /// Returns whether the decisions of this revision must be written now, and begins the write. While others are pending, it is
    /// called again soon.
    pub(super) fn begin(&mut self, revision: u64, has_pending: bool, now: Instant) -> bool {
        let waits = match self.write {
            RecordWrite::Idle => false,
            RecordWrite::InFlight { .. } => true,
            RecordWrite::RetryAt(at) => now < at,
        };
        let waits_for_others = has_pending && self.begun.is_some_and(|begun| now < begun + PENDING_INTERVAL);
        if waits || waits_for_others || revision == self.written {
            return false;
        }
        self.begun = Some(now);
        self.write = RecordWrite::InFlight { revision };
        true
    }

    /// Records that the store has the decisions.
    pub(super) fn persisted(&mut self) {
        if let RecordWrite::InFlight { revision } = self.write {
            self.written = revision;
        }
        self.write = RecordWrite::Idle;
    }

    /// Records that the outcome of the write is unknown or a failure.
    pub(super) fn failed(&mut self, now: Instant) {
        self.write = RecordWrite::RetryAt(now + PERSIST_RETRY);
    }

    /// Returns the time of the next attempt, if one is due later.
    pub(super) fn next_due(&self) -> Option<Instant> {
        match self.write {
            RecordWrite::RetryAt(at) => Some(at),
            RecordWrite::Idle | RecordWrite::InFlight { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;

    #[test]
    fn changed_decisions_are_written_once_and_again_after_a_failure() {
        let (mut record, now) = (PlacementRecord::default(), some_instant());
        assert!(!record.begin(0, false, now), "no deployment states a placement");
        assert!(record.begin(1, false, now) && !record.begin(2, false, now));
        record.failed(now);
        assert_eq!(record.next_due(), Some(now + PERSIST_RETRY));
        assert!(!record.begin(2, false, now) && record.begin(2, false, now + PERSIST_RETRY));
        record.persisted();
        assert!(!record.begin(2, false, now) && record.begin(3, false, now));
        assert_eq!(record.next_due(), None);
    }

    #[test]
    fn while_decisions_are_pending_they_are_written_once_a_second() {
        let (mut record, now) = (PlacementRecord::default(), some_instant());
        assert!(record.begin(1, true, now), "the first ones at once");
        record.persisted();
        assert!(!record.begin(2, true, now));
        assert!(record.begin(2, true, now + PENDING_INTERVAL));
        record.persisted();
        assert!(record.begin(3, false, now + PENDING_INTERVAL), "all are decided");
    }
}
