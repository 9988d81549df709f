//! Content that nothing refers to any more, until it is erased.
//!
//! An object has the payloads or the results of many jobs. It is deleted when none of them is left; until then the parts of the
//! removed ones are overwritten. In a bucket that replaces the whole object, so the parts of some seconds are overwritten
//! together: the jobs of an object were submitted at the same time and often end at about the same time.

use crate::batch::id::{BatchId, UploadId};
use crate::job::{DurableJobId, StoredRange, UnixMillis};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

/// Parts that wait, some 32 bytes each. Further ones are dropped: their content stays until their object is deleted.
pub const PARTS_MAX: usize = 400_000;
/// While as many parts wait, nothing is removed because of its retention: the store is slower than jobs end, or cannot be reached.
/// The rest is for what clients delete and cancel.
pub const RETENTION_PARTS_MAX: usize = PARTS_MAX / 2;

/// Objects that [`ErasureQueue::take_due`] looks at, and owners that [`PendingRemovals::take_removed`] does. Each runs while no other
/// operation on the queue does, for a millisecond.
const EXAMINED_MAX: usize = 4096;

/// Erasure of a part of an object, or of a whole one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Erasure {
    /// An object that no job refers to any more.
    Delete(u64),
    /// Parts without a job, of an object that has others.
    Overwrite(u64, Vec<StoredRange>),
}

/// Owner of stored content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ContentOwner {
    /// A job has a payload and a result.
    Job(DurableJobId),
    /// A batch has the lines that it has written.
    Batch(BatchId),
    /// An uploaded file has its segments.
    Upload(UploadId),
}

/// Content whose removal was appended to the log and may not be applied yet. After a failed append some of its records, or all
/// of them, may be applied later, so the content is erased when the queue does not have it any more. Each part is content of the
/// queue until then, which limits their number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PendingRemovals {
    parts: BTreeMap<ContentOwner, BTreeSet<StoredRange>>,
    /// Last owner that was looked at.
    last: Option<ContentOwner>,
}

impl PendingRemovals {
    /// Adds parts of an owner.
    pub fn add(&mut self, owner: ContentOwner, parts: impl IntoIterator<Item = StoredRange>) {
        self.parts.entry(owner).or_default().extend(parts);
    }

    /// Removes parts of an owner that are erased without waiting, because their removal was applied.
    pub fn forget(&mut self, owner: ContentOwner, parts: &[StoredRange]) {
        if let Some(pending) = self.parts.get_mut(&owner) {
            for part in parts {
                pending.remove(part);
            }
            if pending.is_empty() {
                self.parts.remove(&owner);
            }
        }
    }

    /// Returns the number of calls of [`Self::take_removed`] after which each owner was looked at.
    pub fn turns(&self) -> usize {
        self.parts.len().div_ceil(EXAMINED_MAX)
    }

    /// Removes and returns the parts that their owners, of which `stored` returns the parts, do not have any more. Of many
    /// owners each call looks at some: while the log fails, content stays that clients try to delete again and again.
    pub fn take_removed<I: IntoIterator<Item = StoredRange>>(
        &mut self,
        stored: impl Fn(ContentOwner) -> I,
    ) -> Vec<StoredRange> {
        let after = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        let first = self.last.into_iter().flat_map(|last| self.parts.range(..=last));
        let in_turn = self.parts.range((after, Bound::Unbounded)).chain(first);
        let examined: Vec<_> = in_turn.take(EXAMINED_MAX).map(|(owner, _)| *owner).collect();
        self.last = examined.last().copied();
        let mut removed = Vec::new();
        for owner in examined {
            let Some(parts) = self.parts.get_mut(&owner) else { continue };
            let stored: BTreeSet<_> = stored(owner).into_iter().collect();
            removed.extend(parts.difference(&stored));
            parts.retain(|part| stored.contains(part));
            if parts.is_empty() {
                self.parts.remove(&owner);
            }
        }
        if self.parts.is_empty() {
            self.last = None;
        }
        removed
    }
}

/// Erasures that wait.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ErasureQueue {
    /// Parts of each object, and the time at which the first was added.
    objects: BTreeMap<u64, (UnixMillis, BTreeSet<StoredRange>)>,
    parts: usize,
    /// Parts that were dropped.
    dropped: u64,
    /// First object that the next search looks at.
    next: u64,
}

impl ErasureQueue {
    /// Adds parts that nothing refers to, each once. Those above [`PARTS_MAX`] are dropped.
    pub fn add(&mut self, parts: impl IntoIterator<Item = StoredRange>, now: UnixMillis) {
        for part in parts.into_iter().filter(|part| part.length > 0) {
            if self.objects.get(&part.object).is_some_and(|(_, parts)| parts.contains(&part)) {
                continue;
            }
            if self.parts >= PARTS_MAX {
                self.dropped += 1;
                continue;
            }
            self.objects.entry(part.object).or_insert_with(|| (now, BTreeSet::new())).1.insert(part);
            self.parts += 1;
        }
    }

    /// Adds an erasure again that has failed.
    pub fn add_failed(&mut self, erasure: Erasure, now: UnixMillis) {
        match erasure {
            // The sweep of objects that nothing refers to deletes it.
            Erasure::Delete(_) => {}
            Erasure::Overwrite(_, parts) => self.add(parts, now),
        }
    }

    /// Whether so many parts wait that nothing more is removed because of its retention.
    pub fn delays_retention(&self) -> bool {
        self.parts >= RETENTION_PARTS_MAX
    }

    /// Returns the number of parts that were dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Whether no part waits.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Removes and returns what is to be erased now: objects that are not used any more, and parts that have waited for `delay`. Of
    /// many objects each call looks at some.
    pub fn take_due(
        &mut self,
        delay: Duration,
        now: UnixMillis,
        is_used: impl Fn(u64) -> bool,
    ) -> Vec<Erasure> {
        let is_due = |object: u64, since: UnixMillis| !is_used(object) || since.after(delay) <= now;
        let in_turn = self.objects.range(self.next..).chain(self.objects.range(..self.next));
        let examined: Vec<_> = in_turn
            .take(EXAMINED_MAX)
            .map(|(object, (since, _))| (*object, is_due(*object, *since)))
            .collect();
        self.next = examined.last().map_or(0, |(object, _)| object.saturating_add(1));
        let due = examined.into_iter().filter(|(_, is_due)| *is_due);
        let mut erasures = Vec::new();
        for (object, _) in due {
            let Some((_, parts)) = self.objects.remove(&object) else { continue };
            self.parts -= parts.len();
            erasures.push(match is_used(object) {
                true => Erasure::Overwrite(object, parts.into_iter().collect()),
                false => Erasure::Delete(object),
            });
        }
        erasures
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn part(object: u64, offset: u64) -> StoredRange {
        StoredRange { object, offset, length: 1 }
    }

    #[test]
    fn parts_are_overwritten_together_and_an_object_without_a_job_is_deleted_at_once() {
        let mut queue = ErasureQueue::default();
        let delay = Duration::from_secs(10);
        let at = |seconds: u64| UnixMillis(1000 * seconds);
        let empty = StoredRange { length: 0, ..part(3, 0) };
        queue.add([part(1, 0), part(2, 0), empty], at(0));
        queue.add([part(1, 5)], at(9));
        assert_eq!(queue.take_due(delay, at(9), |object| object == 1), [Erasure::Delete(2)]);
        assert_eq!(queue.take_due(delay, at(9), |_| true), []);
        let both = Erasure::Overwrite(1, vec![part(1, 0), part(1, 5)]);
        let due = queue.take_due(delay, at(10), |_| true);
        assert_eq!(due.as_slice(), std::slice::from_ref(&both));
        assert!(queue.is_empty());
        queue.add_failed(both, at(10));
        queue.add_failed(Erasure::Delete(7), at(10));
        assert_eq!(queue.take_due(delay, at(11), |_| false), [Erasure::Delete(1)]);
        assert!(queue.is_empty() && queue.parts == 0);
    }

    #[test]
    fn content_is_removed_when_its_owner_does_not_have_it_any_more() {
        let id = |number| DurableJobId::new(UnixMillis(1), number);
        let (job, batch) = (ContentOwner::Job(id(1)), ContentOwner::Batch(BatchId(id(1))));
        let mut removals = PendingRemovals::default();
        removals.add(job, [part(1, 0), part(1, 5)]);
        removals.add(job, [part(1, 5)]);
        removals.add(batch, [part(2, 0)]);
        assert_eq!(removals.take_removed(|_| [part(1, 0), part(1, 5), part(2, 0)]), []);
        assert_eq!(removals.take_removed(|_| [part(1, 0), part(2, 0), part(3, 0)]), [part(1, 5)]);
        let of_batch = |owner| (owner == batch).then_some(part(2, 0));
        assert_eq!(removals.take_removed(of_batch), [part(1, 0)]);
        assert_eq!(removals.take_removed(|_| None), [part(2, 0)]);
        assert_eq!(removals, PendingRemovals::default());
    }

    #[test]
    fn a_part_waits_once_however_often_it_is_added() {
        let mut queue = ErasureQueue::default();
        queue.add([part(1, 0), part(1, 0), part(1, 5)], UnixMillis(0));
        queue.add([part(1, 5)], UnixMillis(1));
        assert_eq!(queue.parts, 2);
        let both = Erasure::Overwrite(1, vec![part(1, 0), part(1, 5)]);
        assert_eq!(queue.take_due(Duration::ZERO, UnixMillis(1), |_| true), [both]);
        assert!(queue.is_empty() && queue.parts == 0);

        let job = ContentOwner::Job(DurableJobId::new(UnixMillis(1), 1));
        let mut removals = PendingRemovals::default();
        removals.add(job, [part(1, 0), part(1, 5)]);
        removals.forget(job, &[part(1, 5), part(2, 0)]);
        assert_eq!(removals.take_removed(|_| None), [part(1, 0)], "the other one was erased at once");
        removals.add(job, [part(1, 0)]);
        removals.forget(job, &[part(1, 0)]);
        assert_eq!(removals.turns(), 0);
    }

    #[test]
    fn each_owner_of_many_is_looked_at_in_turn() {
        let owners = 2 * EXAMINED_MAX as u64 + 1;
        let owner = |number: u64| ContentOwner::Job(DurableJobId::new(UnixMillis(number), 0));
        let mut removals = PendingRemovals::default();
        (1..=owners).for_each(|number| removals.add(owner(number), [part(number, 0)]));
        assert_eq!(removals.turns(), 3);
        // Only the last one has been removed.
        let looked_at = Cell::new(0);
        let stored = |of: ContentOwner| {
            looked_at.set(looked_at.get() + 1);
            let ContentOwner::Job(id) = of else { panic!("{of:?}") };
            let number = id.submitted().0;
            (number < owners).then(|| part(number, 0))
        };
        let turns: Vec<_> = (0..3).map(|_| removals.take_removed(stored)).collect();
        assert_eq!(turns, [vec![], vec![], vec![part(owners, 0)]]);
        assert_eq!(looked_at.get(), 3 * EXAMINED_MAX);
        assert_eq!(removals.take_removed(|_| None).len(), EXAMINED_MAX);
    }

    #[test]
    fn each_object_of_many_is_looked_at_in_turn() {
        let mut queue = ErasureQueue::default();
        let objects = 3 * EXAMINED_MAX as u64;
        queue.add((0..objects).map(|object| part(object, 0)), UnixMillis(0));
        let later = Duration::from_secs(1);
        // The last one is the only one that is not used.
        let take =
            |queue: &mut ErasureQueue| queue.take_due(later, UnixMillis(0), |object| object != objects - 1);
        assert_eq!((take(&mut queue), take(&mut queue)), (Vec::new(), Vec::new()));
        assert_eq!(take(&mut queue), [Erasure::Delete(objects - 1)]);
        let mut erased = 0;
        for _ in 0..3 {
            erased += queue.take_due(Duration::ZERO, UnixMillis(0), |_| true).len() as u64;
        }
        assert_eq!((erased, queue.is_empty()), (objects - 1, true));
    }

    #[test]
    fn parts_above_the_limit_are_dropped_and_half_of_it_delays_the_retention() {
        let mut queue = ErasureQueue::default();
        let parts = |range: std::ops::Range<usize>| range.map(|offset| part(1, offset as u64));
        queue.add(parts(0..RETENTION_PARTS_MAX - 1), UnixMillis(0));
        assert!(!queue.delays_retention());
        queue.add([part(2, 0)], UnixMillis(0));
        assert!(queue.delays_retention());
        queue.add(parts(RETENTION_PARTS_MAX..PARTS_MAX), UnixMillis(0));
        assert_eq!((queue.parts, queue.dropped()), (PARTS_MAX, 0));
        queue.add([part(2, 1), part(3, 0)], UnixMillis(0));
        assert_eq!((queue.parts, queue.dropped()), (PARTS_MAX, 2));
        queue.take_due(Duration::ZERO, UnixMillis(0), |_| false);
        assert!(!queue.delays_retention() && queue.is_empty(), "its two objects are deleted");
    }
}
