//! Changes between the last published route tables, which a hub sends instead of whole tables
//! ([`scheduler_api::route::changes`]).
//!
//! A hub keeps the encoded changes from each table to the next one, the same for all readers, and nothing for a single
//! reader. A reader that has one of the last tables receives the changes since then; every other one, the whole table.

use std::collections::VecDeque;
use std::sync::Arc;

use regions::Generation;
use scheduler_api::route::changes::CHANGES_MAX;

/// Maximum bytes of all kept changes. Those of one deployment in one region are some 150 bytes; the changes of a table
/// that alone exceed it are not kept.
pub const CHANGES_BYTES_MAX: usize = 1 << 20;

/// Changes between the last tables, oldest first, each from the table before.
#[derive(Clone, Debug, Default)]
pub struct TableHistory {
    steps: VecDeque<Step>,
    bytes: usize,
}

/// Changes of one table.
#[derive(Clone, Debug)]
struct Step {
    base: Generation,
    encoded: Arc<[u8]>,
}

impl TableHistory {
    /// Adds the encoded changes from the table of generation `base` to the newest one, and removes the oldest ones
    /// beyond the limits. With `None`, the newest table cannot be expressed as changes, and all earlier ones are removed.
    pub fn push(&mut self, base: Generation, encoded: Option<Vec<u8>>) {
        let Some(encoded) = encoded else {
            *self = TableHistory::default();
            return;
        };
        self.bytes += encoded.len();
        self.steps.push_back(Step { base, encoded: encoded.into() });
        while self.steps.len() > CHANGES_MAX || self.bytes > CHANGES_BYTES_MAX {
            let Some(removed) = self.steps.pop_front() else { break };
            self.bytes -= removed.encoded.len();
        }
    }

    /// Returns the encoded changes from the table of this generation to the newest one, in the order in which they are
    /// applied. `None` if they are not kept, or have more than `bytes_max` bytes.
    pub fn since(&self, generation: Generation, bytes_max: usize) -> Option<impl Iterator<Item = &[u8]>> {
        let first = self.steps.iter().position(|step| step.base == generation)?;
        let each = self.steps.range(first..).map(|step| &*step.encoded);
        let bytes: usize = each.clone().map(<[u8]>::len).sum();
        (bytes <= bytes_max).then_some(each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generation(number: usize) -> Generation {
        Generation { epoch: 1, number: number as u64 }
    }

    /// Returns a history of `count` changes of `len` bytes, from generation 0.
    fn history(count: usize, len: usize) -> TableHistory {
        let mut history = TableHistory::default();
        for number in 0..count {
            history.push(generation(number), Some(vec![number as u8; len]));
        }
        history
    }

    fn since(history: &TableHistory, number: usize) -> Option<Vec<u8>> {
        let found = history.since(generation(number), usize::MAX)?;
        Some(found.map(|encoded| encoded[0]).collect())
    }

    #[test]
    fn a_reader_of_one_of_the_last_tables_gets_the_changes_since_then() {
        let history = history(3, 10);
        assert_eq!(since(&history, 0), Some(vec![0, 1, 2]));
        assert_eq!(since(&history, 2), Some(vec![2]));
        assert_eq!(since(&history, 3), None, "the newest table has no changes");
        let other_epoch = Generation { epoch: 2, number: 1 };
        assert!(history.since(other_epoch, usize::MAX).is_none());
        assert!(history.since(generation(1), 20).is_some());
        assert!(history.since(generation(1), 19).is_none(), "the whole table is shorter");
    }

    #[test]
    fn limits_of_kept_changes_are_enforced() {
        assert_eq!(since(&history(CHANGES_MAX, 1), 0).map(|all| all.len()), Some(CHANGES_MAX));
        let one_more = history(CHANGES_MAX + 1, 1);
        assert_eq!(since(&one_more, 0), None);
        assert_eq!(since(&one_more, 1).map(|all| all.len()), Some(CHANGES_MAX));

        let half = CHANGES_BYTES_MAX / 2;
        assert_eq!(since(&history(2, half), 0), Some(vec![0, 1]));
        assert_eq!(since(&history(2, half + 1), 0), None);
        assert_eq!(since(&history(2, half + 1), 1), Some(vec![1]));
        let too_large = history(2, CHANGES_BYTES_MAX + 1);
        assert_eq!((since(&too_large, 1), too_large.bytes), (None, 0));
    }

    #[test]
    fn a_table_that_cannot_be_expressed_as_changes_ends_the_history() {
        let mut history = history(2, 1);
        history.push(generation(2), None);
        assert_eq!((since(&history, 1), since(&history, 2)), (None, None));
        history.push(generation(3), Some(vec![3]));
        assert_eq!((since(&history, 2), since(&history, 3)), (None, Some(vec![3])));
    }
}
