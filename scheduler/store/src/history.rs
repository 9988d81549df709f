//! Recent events, which watches read.
//!
//! A watch has no queue of its own that could overflow: it stores the revision up to which it has read, and reads on
//! from here. A watch that falls too far behind gets an error. Whole revisions are stored or discarded, never a part of
//! one.

use std::collections::VecDeque;

use crate::model::{Event, KeyRange, WatchError};

/// Maximum number of stored revisions: a quarter of an hour of a region that changes ten times a second.
pub(crate) const REVISIONS_MAX: usize = 10_000;
/// Maximum bytes of stored values: four of the largest possible values.
pub(crate) const BYTES_MAX: usize = 64 << 20;

/// Recent events.
#[derive(Debug)]
pub(crate) struct History {
    /// Latest revision.
    revision: u64,
    /// All revisions after this one are stored.
    compacted: u64,
    revisions: VecDeque<RevisionEvents>,
    bytes: usize,
}

/// Changes at one revision.
#[derive(Debug)]
struct RevisionEvents {
    events: Vec<Event>,
    bytes: usize,
}

impl History {
    /// Creates an empty history of a store at this revision.
    pub(crate) fn starting_at(revision: u64) -> History {
        History { revision, compacted: revision, revisions: VecDeque::new(), bytes: 0 }
    }

    /// Adds the changes of the next revision.
    pub(crate) fn push(&mut self, events: Vec<Event>) {
        let size = |event: &Event| match event {
            Event::Put(entry) => entry.value.len(),
            Event::Delete { .. } => 0,
        };
        let bytes = events.iter().map(size).sum();
        self.revision += 1;
        assert!(
            events.iter().all(|event| event.revision() == self.revision),
            "revisions are added once and in order"
        );
        self.bytes += bytes;
        self.revisions.push_back(RevisionEvents { events, bytes });
        while self.revisions.len() > REVISIONS_MAX || self.bytes > BYTES_MAX {
            let oldest = self.revisions.pop_front().expect("a history over its limit is not empty");
            self.bytes -= oldest.bytes;
            self.compacted += 1;
        }
    }

    /// Returns the events of these keys from revision `from` on, possibly none, and the revision to continue from.
    pub(crate) fn read(&self, keys: &KeyRange, from: u64) -> Result<(Vec<Event>, u64), WatchError> {
        if from <= self.compacted {
            return Err(WatchError::Compacted { oldest: self.compacted + 1 });
        }
        if from > self.revision + 1 {
            return Err(WatchError::FutureRevision { from, revision: self.revision });
        }
        let read = (from - self.compacted - 1) as usize;
        let events = self.revisions.iter().skip(read).flat_map(|revision| &revision.events);
        let matching = events.filter(|event| keys.contains(event.key()));
        Ok((matching.cloned().collect(), self.revision + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::KeyValue;

    fn put(key: &str, revision: u64, bytes: usize) -> Event {
        let value = vec![0; bytes].into();
        Event::Put(KeyValue {
            key: key.to_owned(),
            value,
            create_revision: revision,
            mod_revision: revision,
            lease: None,
        })
    }

    fn keys(read: Result<(Vec<Event>, u64), WatchError>) -> Result<Vec<String>, WatchError> {
        read.map(|(events, _)| events.iter().map(|event| event.key().to_owned()).collect())
    }

    #[test]
    fn a_reader_continues_where_it_stopped_and_gets_only_its_prefix() {
        let mut history = History::starting_at(5);
        assert_eq!(history.read(&"a/".into(), 6), Ok((vec![], 6)));
        history.push(vec![put("a/1", 6, 1), put("b/1", 6, 1)]);
        history.push(vec![Event::Delete { key: "a/1".to_owned(), revision: 7 }]);
        let (events, next) = history.read(&"a/".into(), 6).unwrap();
        assert_eq!((events.len(), next), (2, 8));
        assert_eq!(keys(history.read(&"a/".into(), 7)), Ok(vec!["a/1".to_owned()]));
        assert_eq!(history.read(&"b/".into(), 7), Ok((vec![], 8)));
    }

    #[test]
    fn reads_outside_the_history_are_errors() {
        let mut history = History::starting_at(5);
        assert_eq!(history.read(&"".into(), 5), Err(WatchError::Compacted { oldest: 6 }));
        assert_eq!(history.read(&"".into(), 7), Err(WatchError::FutureRevision { from: 7, revision: 5 }));
        for revision in 6..6 + REVISIONS_MAX as u64 {
            history.push(vec![put("a", revision, 1)]);
        }
        assert_eq!(keys(history.read(&"".into(), 6)).map(|all| all.len()), Ok(REVISIONS_MAX));
        history.push(vec![put("a", 6 + REVISIONS_MAX as u64, 1)]);
        assert_eq!(history.read(&"".into(), 6), Err(WatchError::Compacted { oldest: 7 }));
        assert_eq!(keys(history.read(&"".into(), 7)).map(|all| all.len()), Ok(REVISIONS_MAX));
    }

    #[test]
    fn large_values_discard_whole_older_revisions() {
        let mut history = History::starting_at(0);
        history.push(vec![put("a", 1, BYTES_MAX / 2), put("b", 1, 1)]);
        history.push(vec![put("c", 2, BYTES_MAX / 2 - 1)]);
        assert_eq!(keys(history.read(&"".into(), 1)), Ok(vec!["a".into(), "b".into(), "c".into()]));
        history.push(vec![put("d", 3, 1)]);
        assert_eq!(history.read(&"".into(), 1), Err(WatchError::Compacted { oldest: 2 }));
        assert_eq!(keys(history.read(&"".into(), 2)), Ok(vec!["c".into(), "d".into()]));
    }
}
