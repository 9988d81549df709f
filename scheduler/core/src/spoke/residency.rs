//! What this region must not take, by the newest route table that it has heard of.
//!
//! A request brings the residency that it travels under, and the door reads that first. But whoever sent it decided by the table
//! that *it* had: a gateway that is cut off from the hub goes on with the old one for as long as that lasts. So a residency
//! that has become narrower is held here as well, by the region that it no longer permits. A table that announces a wider one
//! is enough to take what comes under it (see [`crate::rollout`]).
//!
//! A deployment that the table does not name is none of its business: the gateway may have a newer one.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use regions::{Catalogue, DeploymentName, RegionId, RouteTable};

use crate::rollout::accepted_residency;

/// Deployments whose requests must not be seen here.
#[derive(Debug, Default)]
pub(super) struct ResidencyState {
    forbidden: BTreeSet<DeploymentName>,
    /// When a hub last confirmed the table, and for how long that is good.
    pub(super) confirmed: Option<(Instant, Duration)>,
    /// Tables that could not be read, or were no newer than the one in hand.
    pub(super) refused: u64,
}

impl ResidencyState {
    /// Takes that of `table` for `region`. A catalogue that does not know the region permits nothing there.
    pub(super) fn apply_route_table(&mut self, table: &RouteTable, region: &RegionId, catalogue: &Catalogue) {
        let here = catalogue.index_of(region);
        let permitted = |name: &DeploymentName| {
            let accepted_residency = accepted_residency(table, name).map(|accepted_residency| accepted_residency.permitted(catalogue));
            accepted_residency.zip(here).is_some_and(|(accepted_residency, here)| accepted_residency.contains(here))
        };
        self.forbidden = table.deployments.keys().filter(|name| !permitted(name)).cloned().collect();
    }

    pub(super) fn forbids(&self, deployment: &DeploymentName) -> bool {
        self.forbidden.contains(deployment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::{Generation, Widening, parse_deployments};

    #[test]
    fn what_the_table_permits_elsewhere_only_is_forbidden_unless_it_announces_otherwise() {
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
        assert!(!forbids(&table, "aws/us-east-1", "unheard-of"));
        assert!(forbids(&table, "mars/base-1", "m"), "nothing is known of its policy");
        let announced = Widening { to: "eu,us".parse().unwrap(), since: Generation { epoch: 1, number: 1 } };
        table.widening.insert(deployment.name, announced);
        assert!(!forbids(&table, "aws/us-east-1", "m") && forbids(&table, "oci/ap-tokyo-1", "m"));
    }
}
