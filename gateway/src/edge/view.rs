//! Route table prepared for requests: names resolved and policies computed once per table instead of once per request.

use gateway_core::keys::KeyRing;
use gateway_core::residency::{AllowedRegions, Residency};
use gateway_core::tenant::Tenant;
use gateway_core::trail::PolicyVersion;
use regions::catalogue::Catalogue;
use regions::deployment::Deployment;
use regions::id::{DeploymentName, InstanceName};
use regions::residency::{PolicyError, ResidencyPolicy};
use regions::route::{Generation, RouteTable};
use regions::set::{RegionIndex, RegionSet};
use regions::{HostPort, ModelRevision};
use std::collections::BTreeMap;
use std::sync::Arc;
use supervision::Mutex;

/// Route table resolved against one catalogue.
pub(crate) struct View {
    pub(crate) generation: Generation,
    /// API keys and tenants that are accepted under the table.
    pub(crate) keys: Arc<KeyRing>,
    /// Regions of the table that are in the catalogue.
    pub(crate) routed: RegionSet,
    /// Those of them that are draining.
    pub(crate) draining: RegionSet,
    instances: BTreeMap<RegionIndex, BTreeMap<InstanceName, HostPort>>,
    deployments: BTreeMap<DeploymentName, RoutedDeployment>,
    /// Orders of the deployments that have one; separate, so that a lookup costs the other deployments nothing.
    orders: BTreeMap<DeploymentName, Arc<[RegionIndex]>>,
}

/// Deployment with its allowed and its registered regions.
pub(crate) struct RoutedDeployment {
    generation: Generation,
    pub(crate) deployment: Deployment,
    /// Model revision of the deployment according to the table.
    pub(crate) revision: Option<ModelRevision>,
    /// Regions that its residency permits and that its region list, if it has one, contains.
    pub(crate) allowed: AllowedRegions,
    /// Regions that had registered for it when the table was published: a replica is ready there, or would be started on
    /// request.
    pub(crate) registered: RegionSet,
    /// Terms of requests without a narrower residency of their own, by tenant index; computed for the first such request.
    terms: Mutex<BTreeMap<usize, Terms>>,
}

/// Residency policy of a request with the regions that it allows.
#[derive(Clone)]
pub(crate) struct Terms {
    /// Text of the policy and generation of its table.
    pub(crate) policy: Arc<PolicyVersion>,
    /// Allowed regions. The request is sent to no other region.
    pub(crate) allowed: AllowedRegions,
}

impl RoutedDeployment {
    /// Returns the terms of a request of `tenant` with the residency `requested`: the policy of the deployment, narrowed by
    /// that of the tenant and by `requested`.
    ///
    /// # Errors
    ///
    /// When the three policies together exceed the length limit of a policy.
    pub(crate) fn terms(
        &self,
        tenant: &Tenant,
        requested: &ResidencyPolicy,
        catalogue: &Catalogue,
    ) -> Result<Terms, PolicyError> {
        if *requested != ResidencyPolicy::Anywhere {
            return self.narrowed(&tenant.residency.narrow(requested), catalogue);
        }
        if let Some(cached) = self.terms.lock().get(&tenant.index) {
            return Ok(cached.clone());
        }
        let terms = self.narrowed(&tenant.residency, catalogue)?;
        self.terms.lock().insert(tenant.index, terms.clone());
        Ok(terms)
    }

    fn narrowed(&self, narrower: &ResidencyPolicy, catalogue: &Catalogue) -> Result<Terms, PolicyError> {
        let residency = Residency::of(&self.deployment.residency.narrow_checked(narrower)?);
        let allowed = self.allowed.narrowed(narrower, catalogue);
        let policy = PolicyVersion { generation: self.generation, residency, allowed: *allowed };
        Ok(Terms { policy: Arc::new(policy), allowed })
    }

    fn is_usable_by(&self, tenant: &Tenant) -> bool {
        tenant.may_use(&self.deployment.name)
    }
}

impl View {
    /// Resolves `table`. A region that is not in the catalogue is left out: no residency policy can be checked without its
    /// jurisdictions.
    pub(crate) fn new(table: &RouteTable, catalogue: &Catalogue, keys: Arc<KeyRing>) -> View {
        let mut instances = BTreeMap::new();
        for (id, route) in &table.regions {
            match catalogue.index_of(id) {
                Some(index) => drop(instances.insert(index, route.instances.clone())),
                None => {
                    // It receives no requests of this gateway. Give the gateway the `catalogue` of the hub.
                    tracing::warn!(region = %id, "region of the route table ignored because it is not in the catalogue")
                }
            }
        }
        let routed = |deployment: &Deployment| RoutedDeployment {
            generation: table.generation,
            allowed: AllowedRegions::of(deployment, catalogue),
            revision: table.revision(&deployment.name).map(|served| served.current),
            registered: table.serving(&deployment.name, catalogue),
            terms: Mutex::independent(BTreeMap::new()),
            deployment: deployment.clone(),
        };
        let deployments =
            table.deployments.iter().map(|(name, entry)| (name.clone(), routed(entry))).collect();
        let ordered = table.deployments.iter().filter(|(_, deployment)| !deployment.order.is_empty());
        let orders =
            ordered.map(|(name, deployment)| (name.clone(), deployment.ordered_regions(catalogue).into()));
        let (orders, generation) = (orders.collect(), table.generation);
        let (routed, draining) = (table.routed(catalogue), table.draining(catalogue));
        View { generation, keys, routed, draining, instances, deployments, orders }
    }

    /// Returns the same routes with other tenants.
    pub(crate) fn for_tenants(&self, keys: Arc<KeyRing>) -> View {
        let routed = |routed: &RoutedDeployment| RoutedDeployment {
            generation: routed.generation,
            allowed: routed.allowed,
            revision: routed.revision,
            registered: routed.registered,
            // Cached terms depend on the residency of the tenants, which may have changed.
            terms: Mutex::independent(BTreeMap::new()),
            deployment: routed.deployment.clone(),
        };
        let deployments = self.deployments.iter().map(|(name, it)| (name.clone(), routed(it))).collect();
        let View { generation, keys: _, routed, draining, ref instances, deployments: _, ref orders } = *self;
        let (instances, orders) = (instances.clone(), orders.clone());
        View { generation, keys, routed, draining, instances, deployments, orders }
    }

    /// Returns the deployment of this name if it exists and the tenant may use it.
    pub(crate) fn deployment(&self, name: &str, tenant: &Tenant) -> Option<&RoutedDeployment> {
        self.deployments.get(name).filter(|routed| routed.is_usable_by(tenant))
    }

    /// Returns the deployment that this tenant may use, if there is exactly one.
    pub(crate) fn only_deployment(&self, tenant: &Tenant) -> Option<&RoutedDeployment> {
        let mut usable = self.deployments.values().filter(|routed| routed.is_usable_by(tenant));
        usable.next().filter(|_| usable.next().is_none())
    }

    /// Returns the order of a deployment's regions; `None` if it is routed to the nearest region.
    pub(super) fn order(&self, deployment: &DeploymentName) -> Option<&Arc<[RegionIndex]>> {
        self.orders.get(deployment)
    }

    /// Returns all deployments, independent of tenants.
    pub(super) fn all(&self) -> impl Iterator<Item = &RoutedDeployment> {
        self.deployments.values()
    }

    /// Returns the deployments that this tenant may use.
    pub(crate) fn deployments_for(&self, tenant: &Tenant) -> impl Iterator<Item = &Deployment> {
        self.usable_by(tenant).map(|routed| &routed.deployment)
    }

    /// Returns the deployments that this tenant may use, with their regions.
    pub(crate) fn usable_by(&self, tenant: &Tenant) -> impl Iterator<Item = &RoutedDeployment> {
        self.deployments.values().filter(|routed| routed.is_usable_by(tenant))
    }

    /// Returns all deployments; for operators.
    pub(crate) fn deployments(&self) -> impl Iterator<Item = &Deployment> {
        self.deployments.values().map(|routed| &routed.deployment)
    }

    /// Returns the regions.
    pub(crate) fn regions(&self) -> impl Iterator<Item = RegionIndex> {
        self.instances.keys().copied()
    }

    /// Returns the address of a spoke of `region`, before its instances are followed.
    pub(crate) fn address(&self, region: RegionIndex) -> Option<&HostPort> {
        self.instances.get(&region)?.values().next()
    }

    /// Returns the spoke instances of all regions, with their addresses.
    pub(crate) fn instances(&self) -> impl Iterator<Item = (RegionIndex, &InstanceName, &HostPort)> {
        let each = self.instances.iter();
        each.flat_map(|(region, all)| all.iter().map(|(name, address)| (*region, name, address)))
    }
}
