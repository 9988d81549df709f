//! Deployments that this region must not accept, by the newest route table.
//!
//! A request carries its residency policy, and the ingress checks that first. But its sender used the table that *it*
//! had: a gateway that is disconnected from the hub continues with an old table. A narrowed residency is therefore
//! enforced here as well, by the region that is no longer allowed. A table that announces a wider residency is
//! sufficient to accept requests under it (see [`crate::rollout`]).
//!
//! A deployment that is not in the table is not checked here: the gateway may have a newer table.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use regions::{Catalogue, DeploymentName, RegionId, ResidencyPolicy, RouteTable};

use crate::rollout::accepted_residency;

/// Deployments whose requests are forbidden in this region, and the age of the policies.
#[derive(Debug, Default)]
pub(super) struct ResidencyState {
    forbidden: BTreeSet<DeploymentName>,
    /// Policies of the deployments with a condition.
    locked: BTreeMap<DeploymentName, ResidencyPolicy>,
    /// Time of the last confirmation of the table by a hub, and the maximum age.
    pub(super) confirmed: Option<(Instant, Duration)>,
    /// Number of rejected tables: invalid, or not newer than the current one.
    pub(super) rejected: u64,
}

impl ResidencyState {
    /// Applies the policies of `table` for `region`. A region that is missing in the catalogue is allowed nothing.
    pub(super) fn apply_route_table(&mut self, table: &RouteTable, region: &RegionId, catalogue: &Catalogue) {
        let here = catalogue.index_of(region);
        let permitted = |name: &DeploymentName| {
            let accepted = accepted_residency(table, name).map(|accepted| accepted.permitted(catalogue));
            accepted.zip(here).is_some_and(|(accepted, here)| accepted.contains(here))
        };
        self.forbidden = table.deployments.keys().filter(|name| !permitted(name)).cloned().collect();
        let accepted = |name: &DeploymentName| Some((name.clone(), accepted_residency(table, name)?.clone()));
        let is_locked = |(_, policy): &(_, ResidencyPolicy)| *policy != ResidencyPolicy::Anywhere;
        self.locked = table.deployments.keys().filter_map(accepted).filter(is_locked).collect();
    }

    pub(super) fn forbids(&self, deployment: &DeploymentName) -> bool {
        self.forbidden.contains(deployment)
    }

    pub(super) fn policy(&self, deployment: &DeploymentName) -> Option<&ResidencyPolicy> {
        self.locked.get(deployment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::{Generation, Widening, parse_deployments};

    #[test]
    fn a_deployment_that_the_table_allows_only_elsewhere_is_forbidden_unless_announced() {
        let catalogue = Catalogue::builtin();
        let text = "[[deployment]]\nname = \"m\"\ntask = \"embed\"\nmodel = \"pypi://m\"\n\
                    engine = { kind = \"cpu\", precision = \"f32\" }\nresidency = { allow = [\"eu\"] }";
        let deployment = parse_deployments(text, &catalogue).unwrap().remove(0);
        let mut table = RouteTable::empty();
        table.deployments.insert(deployment.name.clone(), deployment.clone());
        let forbids = |table: &RouteTable, region: &str, name: &str| {
            let mut policy = ResidencyState::default();
            policy.apply_route_table(table, &region.parse().unwrap(), &catalogue);
            policy.forbids(&name.parse().unwrap())
        };
        assert!(!ResidencyState::default().forbids(&deployment.name), "before the first table");
        assert!(!forbids(&table, "gcp/europe-west4", "m") && forbids(&table, "aws/us-east-1", "m"));
        assert!(!forbids(&table, "aws/us-east-1", "unlisted"));
        let mut policy = ResidencyState::default();
        policy.apply_route_table(&table, &"gcp/europe-west4".parse().unwrap(), &catalogue);
        assert_eq!(policy.policy(&deployment.name), Some(&deployment.residency));
        assert_eq!(policy.policy(&"unlisted".parse().unwrap()), None);
        assert!(forbids(&table, "mars/base-1", "m"), "the region is not in the catalogue");
        let announced = Widening { to: "eu,us".parse().unwrap(), since: Generation { epoch: 1, number: 1 } };
        table.widening.insert(deployment.name, announced);
        assert!(!forbids(&table, "aws/us-east-1", "m") && forbids(&table, "oci/ap-tokyo-1", "m"));
    }
}
