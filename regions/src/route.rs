//! Route table: the state of the fleet that a gateway needs in order to serve requests without the hub.
//!
//! The hub publishes it. A gateway installs a table with a higher generation than its own, keeps it on disk, and serves
//! from it until a newer one arrives. It contains the endpoints of the regions and the deployments that were ready there
//! at their last registration. It does *not* contain health: gateways receive that from the regions themselves, five
//! times a second.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use crate::address::HostPort;
use crate::catalogue::Catalogue;
use crate::deployment::Deployment;
use crate::id::{DeploymentName, InstanceName, RegionId, TenantId};
use crate::identity::ServedRevision;
use crate::residency::ResidencyPolicy;
use crate::set::RegionSet;
use crate::tenant::{ApiKey, KeyDigest, TenantRules};

/// Version of a route table. It only rises at each reader: a table with a lower one is rejected, regardless of the sender.
///
/// The epoch is raised when the store was restored from a backup and its numbers may start again at lower ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation {
    /// Epoch of the store.
    pub epoch: u64,
    /// Number of the table within the epoch.
    pub number: u64,
}

/// Error for a text that is not the generation of a route table or plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a generation: write epoch.number, such as 1.42")]
pub struct GenerationError(String);

/// Endpoints of all regions, and the deployments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteTable {
    /// Version of the table.
    pub generation: Generation,
    /// Registered regions.
    pub regions: BTreeMap<RegionId, RegionRoute>,
    /// Deployments of the fleet.
    pub deployments: BTreeMap<DeploymentName, Deployment>,
    /// Deployments whose residency policy will be wider once every process has this table.
    pub widening: BTreeMap<DeploymentName, Widening>,
    /// The model revision that each deployment is served with; a deployment is missing until its first replica has
    /// reported one. `None` in a table of a hub that does not support revisions.
    pub revisions: Option<BTreeMap<DeploymentName, ServedRevision>>,
    /// Tenants that were applied to the hub. `None` if there are none: then each gateway uses its own tenants file.
    pub tenants: Option<Tenants>,
}

/// Tenants of the fleet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tenants {
    /// Rules of all tenants.
    pub all: BTreeMap<TenantId, TenantRules>,
    /// Tenants whose residency policy will be wider once every process has this table.
    pub widening: BTreeMap<TenantId, Widening>,
    /// Keys that operators created, beside those of the rules.
    pub keys: BTreeMap<KeyDigest, ApiKey>,
}

/// Announced widening of a residency policy. Gateways do not send requests under the wider policy yet; regions already
/// accept them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Widening {
    /// Future policy.
    pub to: ResidencyPolicy,
    /// Generation of the first table with this announcement.
    pub since: Generation,
}

/// Maximum number of spoke instances of one region: enough for the connections of a thousand gateways, and few
/// enough that each of them polls all.
pub const MAX_INSTANCES: usize = 16;

/// One region of a route table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionRoute {
    /// Address of each spoke instance. All of them serve the same replicas.
    pub instances: BTreeMap<InstanceName, HostPort>,
    /// Deployments that had a ready replica at the last report of an instance.
    pub deployments: BTreeSet<DeploymentName>,
    /// Whether an operator drains the region: requests are sent to other allowed regions if there are any.
    pub draining: bool,
}

impl RouteTable {
    /// Returns the table of a process that has not received one; every published table supersedes it.
    pub fn empty() -> RouteTable {
        let generation = Generation { epoch: 0, number: 0 };
        RouteTable {
            generation,
            regions: BTreeMap::new(),
            deployments: BTreeMap::new(),
            widening: BTreeMap::new(),
            revisions: None,
            tenants: None,
        }
    }

    /// Returns the registered regions. A region that is missing in the catalogue is left out, because no residency
    /// policy can be applied to it.
    pub fn routed(&self, catalogue: &Catalogue) -> RegionSet {
        self.regions.keys().filter_map(|region| catalogue.index_of(region)).collect()
    }

    /// Returns the regions that are being drained.
    pub fn draining(&self, catalogue: &Catalogue) -> RegionSet {
        let draining = self.regions.iter().filter(|(_, route)| route.draining);
        draining.filter_map(|(region, _)| catalogue.index_of(region)).collect()
    }

    /// Returns the revision that a deployment is served with, if one is pinned.
    pub fn revision(&self, deployment: &DeploymentName) -> Option<&ServedRevision> {
        self.revisions.as_ref()?.get(deployment)
    }

    /// Returns the regions in which a deployment has a ready replica.
    pub fn serving(&self, deployment: &DeploymentName, catalogue: &Catalogue) -> RegionSet {
        self.regions
            .iter()
            .filter(|(_, route)| route.deployments.contains(deployment))
            .filter_map(|(region, _)| catalogue.index_of(region))
            .collect()
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch, self.number)
    }
}

impl FromStr for Generation {
    type Err = GenerationError;

    fn from_str(text: &str) -> Result<Generation, GenerationError> {
        let parts = text.split_once('.').and_then(|(epoch, number)| Some((digits(epoch)?, digits(number)?)));
        match parts {
            Some((epoch, number)) => Ok(Generation { epoch, number }),
            None => Err(GenerationError(text.chars().take(64).collect())),
        }
    }
}

/// Parses a number of plain digits; `u64::from_str` would also accept a sign.
fn digits(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generation(text: &str) -> Generation {
        text.parse().unwrap()
    }

    #[test]
    fn generations_are_ordered_by_epoch_and_then_by_number() {
        let ascending = ["0.0", "0.9", "0.10", "1.0", "1.1", "2.0"].map(generation);
        assert!(ascending.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn a_generation_round_trips_through_its_text_form() {
        let newest = Generation { epoch: u64::MAX, number: u64::MAX };
        assert_eq!(generation(&newest.to_string()), newest);
        for text in ["", "1", "1.", ".1", "1.2.3", "+1.2", "-1.2", "1.18446744073709551616"] {
            assert!(text.parse::<Generation>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_region_missing_in_the_catalogue_is_in_no_set() {
        let catalogue = Catalogue::builtin();
        let minilm: DeploymentName = "minilm".parse().unwrap();
        let ready = RegionRoute {
            instances: BTreeMap::from([("a".parse().unwrap(), "127.0.0.1:1".parse().unwrap())]),
            deployments: BTreeSet::from([minilm.clone()]),
            draining: false,
        };
        let bare = RegionRoute { deployments: BTreeSet::new(), draining: true, ..ready.clone() };
        let mut table = RouteTable::empty();
        for (region, route) in
            [("aws/us-east-1", ready.clone()), ("gcp/europe-west4", bare), ("mars/base-1", ready)]
        {
            table.regions.insert(region.parse().unwrap(), route);
        }
        let names = |set: RegionSet| {
            set.iter().map(|index| catalogue.region(index).id.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names(table.routed(&catalogue)), ["aws/us-east-1", "gcp/europe-west4"]);
        assert_eq!(names(table.serving(&minilm, &catalogue)), ["aws/us-east-1"]);
        assert_eq!(names(table.draining(&catalogue)), ["gcp/europe-west4"]);
    }
}
