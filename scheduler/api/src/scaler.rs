//! Scaler lease of a region: which of its spokes starts and stops replicas.
//!
//! The lease is a key of the hub's store under the lease of a spoke. It ends with that lease, or when the spoke drains,
//! and the next spoke that registers or keeps its lease alive gets it. Each holder has a higher *epoch* than the one
//! before, so that a spoke recognizes an exchange of a former holder.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Epoch of a scaler lease; a later holder has a higher one. **The order of the fields is the order of epochs.**
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScalerEpoch {
    /// Epoch of the hub's store, whose revisions start again when it is replaced.
    pub store: u64,
    /// Revision of the store at which the key of the lease was created.
    pub revision: u64,
}

/// Scaler lease of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalerLease {
    /// Spoke that holds it.
    pub boot_id: u64,
    /// Its epoch.
    pub epoch: ScalerEpoch,
}

/// Epoch in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScalerEpochV1 {
    /// Epoch of the hub's store.
    pub store: u64,
    /// Revision of the store at which the key of the lease was created.
    pub revision: u64,
}

/// Scaler lease in the response to a registration or a keep-alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScalerLeaseV1 {
    /// Random number drawn at the start of the spoke that holds it.
    pub boot_id: u64,
    /// Its epoch.
    pub epoch: ScalerEpochV1,
}

impl From<ScalerEpoch> for ScalerEpochV1 {
    fn from(ScalerEpoch { store, revision }: ScalerEpoch) -> ScalerEpochV1 {
        ScalerEpochV1 { store, revision }
    }
}

impl From<ScalerEpochV1> for ScalerEpoch {
    fn from(ScalerEpochV1 { store, revision }: ScalerEpochV1) -> ScalerEpoch {
        ScalerEpoch { store, revision }
    }
}

impl From<ScalerLease> for ScalerLeaseV1 {
    fn from(ScalerLease { boot_id, epoch }: ScalerLease) -> ScalerLeaseV1 {
        ScalerLeaseV1 { boot_id, epoch: epoch.into() }
    }
}

impl From<ScalerLeaseV1> for ScalerLease {
    fn from(ScalerLeaseV1 { boot_id, epoch }: ScalerLeaseV1) -> ScalerLease {
        ScalerLease { boot_id, epoch: epoch.into() }
    }
}

impl fmt::Display for ScalerEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.store, self.revision)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_are_ordered_by_the_store_and_then_by_the_revision() {
        let of = |store, revision| ScalerEpoch { store, revision };
        assert!([of(0, 9), of(0, 10), of(1, 1), of(1, 2)].is_sorted_by(|a, b| a < b));
        assert_eq!(of(1, 42).to_string(), "1.42");
    }
}
