//! The route table as requests need it: names resolved, policy worked out, once per table instead of once per request.

use gateway_core::keys::KeyRing;
use gateway_core::residency::{AllowedRegions, Residency};
use gateway_core::tenant::Tenant;
use gateway_core::trail::PolicyVersion;
use regions::ModelRevision;
use regions::catalogue::Catalogue;
use regions::deployment::Deployment;
use regions::id::DeploymentName;
use regions::residency::{PolicyError, ResidencyPolicy};
use regions::route::{Generation, RouteTable};
use regions::set::{RegionIndex, RegionSet};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use supervision::Mutex;

/// A route table, worked out for one catalogue.
pub(crate) struct View {
    pub(crate) generation: Generation,
    /// Who may come in under it.
    pub(crate) keys: Arc<KeyRing>,
    /// The regions of the table that the catalogue knows.
    pub(crate) routed: RegionSet,
    /// Of these, those that their operators empty.
    pub(crate) draining: RegionSet,
    regions: BTreeMap<RegionIndex, SocketAddr>,
    deployments: BTreeMap<DeploymentName, RoutedDeployment>,
}

/// Where a deployment may be served and where it is.
pub(crate) struct RoutedDeployment {
    generation: Generation,
    pub(crate) deployment: Deployment,
    /// The model revision that it is served with, by the table.
    pub(crate) revision: Option<ModelRevision>,
    /// The regions that its residency permits and that its list, if it has one, names.
    pub(crate) allowed: AllowedRegions,
    /// The regions that had registered for it when the table was made: a replica is ready there, or would be for whoever asks.
    pub(crate) registered: RegionSet,
    /// For requests that ask for nothing narrower, by their tenant's place; worked out when the first one comes.
    terms: Mutex<BTreeMap<usize, Terms>>,
}

/// The residency policy that a request travels under, and how it is written.
#[derive(Clone)]
pub(crate) struct Terms {
    /// As it is written, and of which table it is.
    pub(crate) policy: Arc<PolicyVersion>,
    /// The regions that may see it. Nothing is sent to any other.
    pub(crate) allowed: AllowedRegions,
}

impl RoutedDeployment {
    /// Those of a request of `tenant` that asks for `asked`: the deployment's, narrowed by both.
    ///
    /// # Errors
    ///
    /// When the three together are longer than a policy may be.
    pub(crate) fn terms(
        &self,
        tenant: &Tenant,
        asked: &ResidencyPolicy,
        catalogue: &Catalogue,
    ) -> Result<Terms, PolicyError> {
        if *asked != ResidencyPolicy::Anywhere {
            return self.narrowed(&tenant.residency.narrow(asked), catalogue);
        }
        if let Some(known) = self.terms.lock().get(&tenant.index) {
            return Ok(known.clone());
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

    fn is_for(&self, tenant: &Tenant) -> bool {
        tenant.may_use(&self.deployment.name)
    }
}

impl View {
    /// Works out `table`. A region that the catalogue does not know is left out: without its jurisdictions no residency policy can
    /// be checked for it.
    pub(crate) fn new(table: &RouteTable, catalogue: &Catalogue, keys: Arc<KeyRing>) -> View {
        let mut regions = BTreeMap::new();
        for (id, route) in &table.regions {
            match catalogue.index_of(id) {
                Some(index) => drop(regions.insert(index, route.endpoint)),
                None => {
                    tracing::warn!(region = %id, "the route table has a region that the catalogue does not know")
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
        let (routed, draining) = (table.routed(catalogue), table.draining(catalogue));
        View { generation: table.generation, keys, routed, draining, regions, deployments }
    }

    /// The same routes for other tenants.
    pub(crate) fn for_tenants(&self, keys: Arc<KeyRing>) -> View {
        let routed = |routed: &RoutedDeployment| RoutedDeployment {
            generation: routed.generation,
            allowed: routed.allowed,
            revision: routed.revision,
            registered: routed.registered,
            // What was worked out for a tenant's residency may be out of date.
            terms: Mutex::independent(BTreeMap::new()),
            deployment: routed.deployment.clone(),
        };
        let deployments = self.deployments.iter().map(|(name, it)| (name.clone(), routed(it))).collect();
        let View { generation, keys: _, routed, draining, ref regions, deployments: _ } = *self;
        View { generation, keys, routed, draining, regions: regions.clone(), deployments }
    }

    /// The deployment of this name, if there is one for this tenant.
    pub(crate) fn deployment(&self, name: &str, tenant: &Tenant) -> Option<&RoutedDeployment> {
        self.deployments.get(name).filter(|routed| routed.is_for(tenant))
    }

    /// The deployment that this tenant may use, if there is one and no other.
    pub(crate) fn only_deployment(&self, tenant: &Tenant) -> Option<&RoutedDeployment> {
        let mut usable = self.deployments.values().filter(|routed| routed.is_for(tenant));
        usable.next().filter(|_| usable.next().is_none())
    }

    /// All of them, for whoever looks at the table itself.
    pub(super) fn all(&self) -> impl Iterator<Item = &RoutedDeployment> {
        self.deployments.values()
    }

    /// Those that this tenant may use.
    pub(crate) fn deployments_for(&self, tenant: &Tenant) -> impl Iterator<Item = &Deployment> {
        self.usable_by(tenant).map(|routed| &routed.deployment)
    }

    /// The same, with where they may be served.
    pub(crate) fn usable_by(&self, tenant: &Tenant) -> impl Iterator<Item = &RoutedDeployment> {
        self.deployments.values().filter(|routed| routed.is_for(tenant))
    }

    /// All of them; for operators.
    pub(crate) fn deployments(&self) -> impl Iterator<Item = &Deployment> {
        self.deployments.values().map(|routed| &routed.deployment)
    }

    pub(crate) fn address(&self, region: RegionIndex) -> Option<SocketAddr> {
        self.regions.get(&region).copied()
    }

    pub(crate) fn regions(&self) -> impl Iterator<Item = (RegionIndex, SocketAddr)> {
        self.regions.iter().map(|(region, address)| (*region, *address))
    }
}
