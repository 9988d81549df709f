//! Named invariants, as functions: decisions assert them, property tests check them after each step, and tests violate
//! them on purpose.

use crate::set::{RegionIndex, RegionSet};

/// Violated invariant: a region was selected that may not see the request. A defect: report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("region {} of the catalogue was selected but may not see the request", .0.as_usize())]
pub struct ResidencyViolation(pub RegionIndex);

/// **Residency**: no byte of a request reaches a region outside its allowed set.
///
/// # Errors
///
/// The first of the selected regions that is not allowed.
pub fn check_residency(
    allowed: &RegionSet,
    selected: impl IntoIterator<Item = RegionIndex>,
) -> Result<(), ResidencyViolation> {
    match selected.into_iter().find(|region| !allowed.contains(*region)) {
        Some(region) => Err(ResidencyViolation(region)),
        None => Ok(()),
    }
}
