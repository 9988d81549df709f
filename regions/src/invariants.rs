//! Named invariants, as functions. Production code asserts them on each decision, property tests check them after each
//! step, and a test violates them on purpose.

use crate::selection::Candidate;
use crate::set::{RegionIndex, RegionSet};

/// A selected region that may not see the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("region {} of the catalogue was selected but may not see the request", .0.as_usize())]
pub struct ResidencyViolation(pub RegionIndex);

/// **Residency**: no byte of a request reaches a region outside its allowed set.
pub fn check_residency(allowed: &RegionSet, chosen: &[Candidate]) -> Result<(), ResidencyViolation> {
    match chosen.iter().find(|candidate| !allowed.contains(candidate.region)) {
        Some(candidate) => Err(ResidencyViolation(candidate.region)),
        None => Ok(()),
    }
}
