//! Regions whose queue may store a job or a file.
//!
//! A job waits in the queue of a region until a replica can compute it, so the region needs no ready replica when the job is
//! accepted: the deployment may be scaled to zero, or its replicas may be restarting. Where the deployment is does matter for the
//! order, because a job is computed sooner where a replica is ready.
//!
//! Each region knows the idempotency keys of its own queue. A repeated submission must therefore reach the region of the first
//! one, although load and health may have changed the order of the regions since ([`KeyedSubmissions`]).

use crate::circuit::Permille;
use crate::keys::Digest;
use regions::id::TenantId;
use regions::set::{RegionIndex, RegionSet};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Time for which the region of a submission is remembered at least, unless there are too many of them. Clients repeat a lost
/// submission within seconds to minutes.
const REMEMBERED: Duration = Duration::from_mins(10);
/// Maximum entries of a generation, of some 50 bytes each. When it is reached, the older generation is dropped.
const GENERATION_ENTRIES_MAX: usize = 16_384;

/// Idempotency key that a client gave a submission or an upload, as a hash of it and of the tenant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SubmissionKey(Digest);

impl SubmissionKey {
    /// Returns the key of a tenant's request. `path` is that of the collection, since a key of a job and one of a file are distinct.
    pub fn new(tenant: &TenantId, path: &str, key: &str) -> SubmissionKey {
        SubmissionKey(Digest::of(format!("{tenant}\n{path}\n{key}").as_bytes()))
    }

    /// Returns the draw of the request from the shares of a traffic plan: the same at every gateway.
    pub fn draw(&self) -> Permille {
        let [first, second, ..] = *self.0.as_bytes();
        Permille::new(u16::from_be_bytes([first, second]) % 1000)
    }
}

/// Regions to which the recent submissions with an idempotency key were sent, in two generations: when the newer one is full or
/// old, it replaces the older one.
#[derive(Default)]
pub struct KeyedSubmissions {
    newer: BTreeMap<SubmissionKey, RegionIndex>,
    older: BTreeMap<SubmissionKey, RegionIndex>,
    /// Time at which `newer` was begun.
    begun: Option<Instant>,
}

impl KeyedSubmissions {
    /// Returns the region to which the last submission with this key was sent.
    pub fn region(&self, key: &SubmissionKey) -> Option<RegionIndex> {
        self.newer.get(key).or_else(|| self.older.get(key)).copied()
    }

    /// Records that a submission is sent to a region. The region of an earlier one is kept if it is among those `with_queue`, which
    /// are not down: a request with another residency policy that uses the key by mistake does not change where the first one is found.
    pub fn record(&mut self, key: SubmissionKey, region: RegionIndex, with_queue: RegionSet, now: Instant) {
        let earlier = self.region(&key).filter(|earlier| with_queue.contains(*earlier));
        let age = self.begun.map(|begun| now.saturating_duration_since(begun));
        if self.newer.len() >= GENERATION_ENTRIES_MAX || age.is_none_or(|age| age >= REMEMBERED) {
            self.older = std::mem::take(&mut self.newer);
            self.begun = Some(now);
        }
        self.newer.insert(key, earlier.unwrap_or(region));
    }
}

/// Regions with a queue that residency allows, and what is known about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobRegions {
    /// Allowed regions of the route table with a queue.
    pub with_queue: RegionSet,
    /// Regions with a ready replica of the deployment, or which would start one on demand.
    pub serving: RegionSet,
    /// Regions to which the route table assigns the deployment.
    pub registered: RegionSet,
    /// Regions that are being drained.
    pub draining: RegionSet,
    /// Regions that are down.
    pub down: RegionSet,
    /// Region to which an earlier request with the same idempotency key was sent.
    pub earlier: Option<RegionIndex>,
}

impl JobRegions {
    /// Returns the regions of which the nearest stores the job: that of the earlier request unless it is down, else those that
    /// serve the deployment, else those to which it is assigned, else any. Regions that are down are used if all others are, and
    /// draining ones if all others of these drain.
    pub fn eligible(&self) -> RegionSet {
        let JobRegions { with_queue, serving, registered, draining, down, earlier } = *self;
        let up = or_all(with_queue.minus(down), with_queue);
        if let Some(earlier) = earlier.filter(|region| up.contains(*region)) {
            return [earlier].into_iter().collect();
        }
        let eligible = or_all(up.intersect(serving), or_all(up.intersect(registered), up));
        or_all(eligible.minus(draining), eligible)
    }
}

/// Returns the first set unless it is empty.
fn or_all(preferred: RegionSet, all: RegionSet) -> RegionSet {
    if preferred.is_empty() { all } else { preferred }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::set::RegionIndex;

    fn set(regions: &[usize]) -> RegionSet {
        regions.iter().map(|region| RegionIndex::new(*region).unwrap()).collect()
    }

    #[test]
    fn a_job_needs_a_queue_and_prefers_regions_that_compute_it() {
        for (with_queue, serving, registered, draining, down, expected, why) in [
            (&[0, 1, 2][..], &[1][..], &[1, 2][..], &[][..], &[][..], &[1][..], "a ready replica"),
            (&[0, 1, 2], &[3], &[1, 2], &[], &[], &[1, 2], "no replica is ready"),
            (&[0, 1], &[], &[], &[], &[], &[0, 1], "the deployment is not assigned yet"),
            (&[0, 1], &[1], &[0, 1], &[], &[1], &[0], "its region is down"),
            (&[0, 1], &[1], &[1], &[], &[0, 1], &[1], "all are down"),
            (&[0, 1, 2], &[1, 2], &[], &[1], &[], &[2], "one drains"),
            (&[0, 1], &[1], &[], &[1], &[], &[1], "the only one that computes it drains"),
            (&[], &[1], &[1], &[], &[], &[], "no queue"),
        ] {
            let regions = JobRegions {
                with_queue: set(with_queue),
                serving: set(serving),
                registered: set(registered),
                draining: set(draining),
                down: set(down),
                earlier: None,
            };
            assert_eq!(
                regions.eligible().iter().collect::<Vec<_>>(),
                set(expected).iter().collect::<Vec<_>>(),
                "{why}"
            );
        }
    }

    #[test]
    fn a_repeated_submission_goes_to_the_region_of_the_first_one_unless_that_is_down() {
        for (allowed, down, earlier, expected) in [
            (&[0, 1, 2][..], &[][..], 2, &[2][..]),
            (&[0, 1, 2], &[2], 2, &[0, 1]),
            (&[0, 1, 2], &[0, 1, 2], 2, &[2]),
            // Residency comes first.
            (&[0, 1], &[], 2, &[0, 1]),
        ] {
            let regions = JobRegions {
                with_queue: set(allowed),
                // No replica is ready there, and the region drains.
                serving: set(&[0, 1]),
                registered: set(&[0, 1, 2]),
                draining: set(&[2]),
                down: set(down),
                earlier: RegionIndex::new(earlier),
            };
            assert_eq!(
                regions.eligible().iter().collect::<Vec<_>>(),
                set(expected).iter().collect::<Vec<_>>(),
                "{regions:?}"
            );
        }
    }

    fn key(number: usize) -> SubmissionKey {
        SubmissionKey::new(&"a".parse().unwrap(), "/v1/async", &number.to_string())
    }

    #[test]
    fn the_region_of_a_key_is_remembered_for_ten_minutes_and_within_a_bound() {
        let (start, region) = (crate::some_instant(), RegionIndex::new(3).unwrap());
        let mut submissions = KeyedSubmissions::default();
        assert_eq!(submissions.region(&key(0)), None);
        submissions.record(key(0), region, set(&[3]), start);
        submissions.record(key(1), region, set(&[3]), start + REMEMBERED);
        assert_eq!(submissions.region(&key(0)), Some(region));
        submissions.record(key(2), region, set(&[3]), start + 2 * REMEMBERED);
        assert_eq!(submissions.region(&key(0)), None);
        assert_eq!(submissions.region(&key(1)), Some(region));

        for number in 0..3 * GENERATION_ENTRIES_MAX {
            submissions.record(key(number), region, set(&[3]), start + 2 * REMEMBERED);
        }
        assert!(submissions.newer.len() + submissions.older.len() <= 2 * GENERATION_ENTRIES_MAX);
        assert_eq!(submissions.region(&key(3 * GENERATION_ENTRIES_MAX - 1)), Some(region));
    }

    #[test]
    fn the_region_of_the_first_submission_is_kept_unless_it_is_down() {
        let [first, second] = [1, 2].map(|index| RegionIndex::new(index).unwrap());
        let (now, mut submissions) = (crate::some_instant(), KeyedSubmissions::default());
        submissions.record(key(0), first, set(&[1, 2]), now);
        submissions.record(key(0), second, set(&[1, 2]), now);
        assert_eq!(submissions.region(&key(0)), Some(first));
        submissions.record(key(0), second, set(&[2]), now);
        assert_eq!(submissions.region(&key(0)), Some(second));
    }

    #[test]
    fn keys_of_tenants_and_paths_are_distinct_and_their_draws_are_even() {
        let of = |tenant: &str, path| SubmissionKey::new(&tenant.parse().unwrap(), path, "k");
        assert!(of("a", "/v1/files") != of("b", "/v1/files"));
        assert!(of("a", "/v1/files") != of("a", "/v1/async"));
        let below_half = (0..2000).filter(|number| key(*number).draw() < Permille::new(500)).count();
        assert!((900..1100).contains(&below_half), "{below_half}");
    }
}
