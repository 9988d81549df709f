//! Reasons for which a region cannot be chosen, and constraints that no set of regions meets.

use regions::AcceleratorType;
use regions::accelerator::millionths_to_text;

/// Reason why a region cannot be chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementRejection {
    /// **Residency** does not permit it.
    #[error("the residency of the deployment does not permit it")]
    Residency,
    /// It has no spoke.
    #[error("it has no registered spoke")]
    Unregistered,
    /// Its spokes are gone.
    #[error("its spokes do not renew their leases")]
    Lapsed,
    /// It is being drained.
    #[error("it is being drained")]
    Draining,
    /// It lacks the engine.
    #[error("it does not have the engine of the deployment")]
    Engine,
    /// No process starts replicas there.
    #[error("it has no replica of the deployment, and its spokes start none ([scaling] in spoke.toml)")]
    StartsNone,
    /// It lacks the accelerators.
    #[error("it offers none of the accelerators that the placement states")]
    Accelerator,
    /// It has too few accelerators.
    #[error(
        "it has {count} of `{accelerator}`, and the deployment has at least {min} replicas in each region"
    )]
    AcceleratorCount {
        /// The type of which it has most.
        accelerator: AcceleratorType,
        /// Number of them.
        count: u32,
        /// Minimum number of replicas.
        min: u32,
    },
    /// It has no price, so `max_cost` could not be kept.
    #[error("its price is unknown, and the placement states max_cost")]
    Price,
}

/// Constraint that no set of regions meets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Infeasible {
    /// Too few regions are eligible.
    #[error(
        "{eligible} of {candidates} regions can run it, and the placement requires {min_regions}; lower \
         min_regions, or widen residency or accelerator"
    )]
    Regions {
        /// Number of eligible regions.
        eligible: usize,
        /// Number of candidates.
        candidates: usize,
        /// Required number.
        min_regions: u32,
    },
    /// Too few regions are eligible, and with prices there would be enough.
    #[error(
        "{eligible} regions that can run it have a price, {unpriced} have none, and the placement requires \
         {min_regions} and states max_cost; remove max_cost, or give the regions a `cost` or accelerators with prices in \
         the catalogue"
    )]
    Prices {
        /// Number of eligible regions.
        eligible: usize,
        /// Number of regions that only the missing price excludes.
        unpriced: usize,
        /// Required number.
        min_regions: u32,
    },
    /// All eligible regions together cannot hold enough replicas after a loss.
    #[error(
        "after the loss of the largest, all eligible regions hold {after_loss} replicas, and the placement \
         requires {min_replicas}; lower min_replicas, raise scaling.max, or permit more regions"
    )]
    Replicas {
        /// Replicas that they can hold.
        after_loss: u64,
        /// Required number.
        min_replicas: u32,
    },
    /// The cheapest set costs too much.
    #[error(
        "the cheapest regions cost {} per hour, and the placement permits {}; raise max_cost, or lower \
         min_regions, min_replicas or scaling.min",
        millionths_to_text(*cheapest), millionths_to_text(*max_cost)
    )]
    Cost {
        /// Cost of the cheapest set per hour, in millionths.
        cheapest: u64,
        /// Permitted cost, in millionths.
        max_cost: u64,
    },
}

impl Infeasible {
    /// Returns the key of the constraint in `[deployment.placement]`.
    pub fn key(&self) -> &'static str {
        match self {
            Infeasible::Regions { .. } => "min_regions",
            Infeasible::Replicas { .. } => "min_replicas",
            Infeasible::Prices { .. } | Infeasible::Cost { .. } => "max_cost",
        }
    }
}
