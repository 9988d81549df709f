//! Regions whose queue may store a job or a file.
//!
//! A job waits in the queue of a region until a replica can compute it, so the region needs no ready replica when the job is
//! accepted: the deployment may be scaled to zero, or its replicas may be restarting. Where the deployment is does matter for the
//! order, because a job is computed sooner where a replica is ready.

use regions::set::RegionSet;

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
}

impl JobRegions {
    /// Returns the regions of which the nearest stores the job: those that serve the deployment, else those to which it is
    /// assigned, else any. Regions that are down are used if all others are, and draining ones if all others of these drain.
    pub fn eligible(&self) -> RegionSet {
        let JobRegions { with_queue, serving, registered, draining, down } = *self;
        let up = or_all(with_queue.minus(down), with_queue);
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
            };
            assert_eq!(
                regions.eligible().iter().collect::<Vec<_>>(),
                set(expected).iter().collect::<Vec<_>>(),
                "{why}"
            );
        }
    }
}
