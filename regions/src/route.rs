//! The route table: what a gateway needs to know of the fleet to serve without asking anybody.
//!
//! The hub publishes it; a gateway installs it if its generation is higher than the one it has, keeps it on disk and
//! serves from it for as long as nobody brings a newer one. It says where regions are reached and what was ready there
//! when they last registered. It does *not* say who is healthy: that is what a gateway hears from the regions themselves,
//! five times a second.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use crate::catalogue::Catalogue;
use crate::deployment::Deployment;
use crate::id::{DeploymentName, RegionId, TenantId};
use crate::identity::ServedRevision;
use crate::residency::ResidencyPolicy;
use crate::set::RegionSet;
use crate::tenant::TenantRules;

/// How new a table is. It only rises at each reader: a lower one is refused, whoever sends it.
///
/// The epoch is raised when the store was restored from a backup and its numbers may start again from lower ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation {
    /// Of the store.
    pub epoch: u64,
    /// Of the table, within the epoch.
    pub number: u64,
}

/// A text that is no generation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a generation: write epoch.number, such as 1.42")]
pub struct GenerationError(String);

/// Where each region is reached, and what is deployed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteTable {
    /// How new it is.
    pub generation: Generation,
    /// The regions that have registered.
    pub regions: BTreeMap<RegionId, RegionRoute>,
    /// What there is to serve.
    pub deployments: BTreeMap<DeploymentName, Deployment>,
    /// Those whose residency will be wider, once everybody has heard of it.
    pub widening: BTreeMap<DeploymentName, Widening>,
    /// The model revision that each deployment is served with; a deployment is missing until its first replica has
    /// reported one. `None` in a table of a hub that does not know of revisions.
    pub revisions: Option<BTreeMap<DeploymentName, ServedRevision>>,
    /// Who may come in; nothing where nobody has applied any, and every gateway goes by its own file.
    pub tenants: Option<Tenants>,
}

/// Who may come in at a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tenants {
    /// All of them.
    pub all: BTreeMap<TenantId, TenantRules>,
    /// Those whose residency will be wider, once everybody has heard of it.
    pub widening: BTreeMap<TenantId, Widening>,
}

/// A residency that is announced: requests are not sent under it yet, and are taken already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Widening {
    /// What it will be.
    pub to: ResidencyPolicy,
    /// The first table that said so.
    pub since: Generation,
}

/// One region of a route table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionRoute {
    /// Where gateways reach its spoke.
    pub endpoint: SocketAddr,
    /// What had a ready replica there when the region last said so.
    pub deployments: BTreeSet<DeploymentName>,
    /// Its operator empties it: what may go elsewhere goes elsewhere.
    pub draining: bool,
}

impl RouteTable {
    /// The table of somebody who has heard of nothing; every published one supersedes it.
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

    /// The regions that have registered, as a set. One that this catalogue does not know cannot be judged by the residency policy,
    /// and is left out.
    pub fn routed(&self, catalogue: &Catalogue) -> RegionSet {
        self.regions.keys().filter_map(|region| catalogue.index_of(region)).collect()
    }

    /// The regions that are being drained, as a set.
    pub fn draining(&self, catalogue: &Catalogue) -> RegionSet {
        let draining = self.regions.iter().filter(|(_, route)| route.draining);
        draining.filter_map(|(region, _)| catalogue.index_of(region)).collect()
    }

    /// The revision that a deployment is served with, if one is pinned.
    pub fn revision(&self, deployment: &DeploymentName) -> Option<&ServedRevision> {
        self.revisions.as_ref()?.get(deployment)
    }

    /// The regions in which a deployment has a ready replica, as a set.
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

/// A number in plain digits; the standard parser would take a sign too.
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
    fn a_generation_is_read_back_as_it_was_written() {
        let newest = Generation { epoch: u64::MAX, number: u64::MAX };
        assert_eq!(generation(&newest.to_string()), newest);
        for text in ["", "1", "1.", ".1", "1.2.3", "+1.2", "-1.2", "1.18446744073709551616"] {
            assert!(text.parse::<Generation>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_region_that_the_catalogue_does_not_know_is_in_no_set() {
        let catalogue = Catalogue::builtin();
        let minilm: DeploymentName = "minilm".parse().unwrap();
        let ready = RegionRoute {
            endpoint: "127.0.0.1:1".parse().unwrap(),
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
