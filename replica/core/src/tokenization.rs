//! Order in which texts are tokenized.
//!
//! A *job* is the texts of one request; workers take it in *chunks* of a few kilobytes. One short text must not wait
//! behind a request of two thousand texts, or behind one of a megabyte. Three rules, in this order:
//!
//! 1. A *huge* text, which is a chunk by itself and occupies its worker for long, is taken only while another worker
//!    remains for the rest (if there is more than one). So one worker stays responsive, whatever the number of
//!    megabytes.
//! 2. Jobs that fit into one chunk go before longer ones, which approximates shortest job first. Among equals it is
//!    first come, first served.
//! 3. Every fourth turn belongs to the long jobs, round robin, so that a flood of short jobs does not starve them.
//!
//! Exact shortest-job-first would need the cost of a text before it is tokenized, and starves long jobs; plain round
//! robin makes a short job wait for one chunk of every open backfill.

use std::collections::VecDeque;

/// Bytes of text that a worker takes at a time: about a millisecond of work.
pub const CHUNK_BYTES: usize = 8 << 10;
/// A text of more bytes than this occupies a worker for at least ten milliseconds.
pub const HUGE_BYTES: usize = 64 << 10;
/// One turn in this many belongs to long jobs while short ones are queued.
pub const LONG_JOB_INTERVAL: u32 = 4;

/// Size class of a job, by its next chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum JobSize {
    /// The rest of the job fits into one chunk.
    Short,
    /// The rest is more than one chunk.
    Long,
    /// The next text is longer than [`HUGE_BYTES`].
    Huge,
}

impl JobSize {
    /// Returns the size of a job whose next text has `next` bytes and which has `left` bytes in all, the next text
    /// included.
    pub fn of(next: usize, left: usize) -> JobSize {
        if next > HUGE_BYTES {
            JobSize::Huge
        } else if left > CHUNK_BYTES {
            JobSize::Long
        } else {
            JobSize::Short
        }
    }
}

/// Jobs that are queued for a worker.
#[derive(Debug)]
pub struct TokenizationQueue<J> {
    short: VecDeque<J>,
    long: VecDeque<J>,
    huge: VecDeque<J>,
    /// Turns since a long job had one.
    since_long: u32,
    huge_running: usize,
    huge_running_max: usize,
}

impl<J> TokenizationQueue<J> {
    /// Creates a queue for this number of workers.
    pub fn new(workers: usize) -> TokenizationQueue<J> {
        TokenizationQueue {
            short: VecDeque::new(),
            long: VecDeque::new(),
            huge: VecDeque::new(),
            since_long: 0,
            huge_running: 0,
            huge_running_max: workers.saturating_sub(1).max(1),
        }
    }

    /// Adds a job whose next chunk is of this size.
    pub fn push(&mut self, job: J, size: JobSize) {
        match size {
            JobSize::Short => self.short.push_back(job),
            JobSize::Long => self.long.push_back(job),
            JobSize::Huge => self.huge.push_back(job),
        }
    }

    /// Takes the next job; `None` if no queued job may start. Each job of [`JobSize::Huge`] must be ended with
    /// [`Self::finish_huge`].
    pub fn take(&mut self) -> Option<(J, JobSize)> {
        let huge_allowed = self.huge_running < self.huge_running_max && !self.huge.is_empty();
        let long_waits = huge_allowed || !self.long.is_empty();
        let long_is_due = long_waits && self.since_long + 1 >= LONG_JOB_INTERVAL;
        if !self.short.is_empty() && !long_is_due {
            self.since_long = if long_waits { self.since_long + 1 } else { 0 };
            return Some((self.short.pop_front()?, JobSize::Short));
        }
        self.since_long = 0;
        // A huge text takes one turn of its worker at any time, and only some workers may have one: it goes first.
        if huge_allowed {
            self.huge_running += 1;
            return Some((self.huge.pop_front()?, JobSize::Huge));
        }
        Some((self.long.pop_front()?, JobSize::Long))
    }

    /// Ends a turn of [`JobSize::Huge`].
    pub fn finish_huge(&mut self) {
        assert!(self.huge_running > 0, "a huge job that ends has started");
        self.huge_running -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(queue: &mut TokenizationQueue<u32>, most: usize) -> Vec<u32> {
        std::iter::from_fn(|| queue.take().map(|(job, _)| job)).take(most).collect()
    }

    #[test]
    fn the_size_of_a_job_is_that_of_its_next_chunk() {
        assert_eq!(JobSize::of(1, CHUNK_BYTES), JobSize::Short);
        assert_eq!(JobSize::of(1, CHUNK_BYTES + 1), JobSize::Long);
        assert_eq!(JobSize::of(HUGE_BYTES, HUGE_BYTES), JobSize::Long);
        assert_eq!(JobSize::of(HUGE_BYTES + 1, HUGE_BYTES + 1), JobSize::Huge);
    }

    #[test]
    fn short_jobs_go_first_and_long_ones_have_every_fourth_turn() {
        let mut queue = TokenizationQueue::new(2);
        (100..102).for_each(|job| queue.push(job, JobSize::Long));
        (0..7).for_each(|job| queue.push(job, JobSize::Short));
        assert_eq!(order(&mut queue, 9), [0, 1, 2, 100, 3, 4, 5, 101, 6]);
        assert_eq!(queue.take(), None);
    }

    #[test]
    fn a_short_job_waits_for_one_turn_of_long_jobs() {
        let mut queue = TokenizationQueue::new(2);
        (100..200).for_each(|job| queue.push(job, JobSize::Long));
        assert_eq!(order(&mut queue, 3), [100, 101, 102]);
        queue.push(0, JobSize::Short);
        assert_eq!(order(&mut queue, 1), [0]);
    }

    #[test]
    fn one_worker_is_reserved_for_jobs_that_are_not_huge() {
        let mut queue = TokenizationQueue::new(3);
        (100..110).for_each(|job| queue.push(job, JobSize::Huge));
        assert_eq!(order(&mut queue, 9), [100, 101], "two of three workers");
        queue.push(1, JobSize::Long);
        queue.push(0, JobSize::Short);
        assert_eq!(order(&mut queue, 9), [0, 1]);
        queue.finish_huge();
        assert_eq!(queue.take(), Some((102, JobSize::Huge)));
        assert_eq!(queue.take(), None);
    }

    #[test]
    fn a_single_worker_takes_huge_texts() {
        let mut queue = TokenizationQueue::new(1);
        queue.push(100, JobSize::Huge);
        assert_eq!(queue.take(), Some((100, JobSize::Huge)));
    }

    #[test]
    fn huge_texts_do_not_starve_among_short_ones() {
        let mut queue = TokenizationQueue::new(2);
        queue.push(100, JobSize::Huge);
        (0..9).for_each(|job| queue.push(job, JobSize::Short));
        assert_eq!(order(&mut queue, 4), [0, 1, 2, 100]);
    }
}
