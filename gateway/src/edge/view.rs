//! The route table as requests need it: names resolved, law worked out, once per table instead of once per request.

use gateway_core::keys::KeyRing;
use gateway_core::lawful::{Law, Residency};
use gateway_core::tenant::Tenant;
use regions::catalogue::Catalogue;
use regions::deployment::Deployment;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::route::{Generation, RouteTable};
use regions::set::{RegionIndex, RegionSet};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

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
    deployments: BTreeMap<DeploymentName, Lawful>,
}

/// Where a deployment may be served and where it is.
pub(crate) struct Lawful {
    pub(crate) deployment: Deployment,
    /// The regions that its residency permits and that its list, if it has one, names.
    pub(crate) allowed: Law,
    /// The regions that had registered for it when the table was made: a replica is ready there, or would be for whoever asks.
    pub(crate) registered: RegionSet,
    /// For requests that ask for nothing narrower, by their tenant's place; worked out when the first one comes.
    terms: Mutex<BTreeMap<usize, Terms>>,
}

/// The law that a request travels under, and how it is written.
#[derive(Clone)]
pub(crate) struct Terms {
    pub(crate) residency: Residency,
    /// The regions that may see it. Nothing is sent to any other.
    pub(crate) allowed: Law,
}

impl Lawful {
    /// Those of a request of `tenant` that asks for `asked`: the deployment's, narrowed by both.
    pub(crate) fn terms(&self, tenant: &Tenant, asked: &ResidencyPolicy, catalogue: &Catalogue) -> Terms {
        if *asked != ResidencyPolicy::Anywhere {
            return self.narrowed(&tenant.residency.narrow(asked), catalogue);
        }
        let mut terms = self.terms.lock().expect("no decision panics while it holds the lock");
        terms.entry(tenant.place).or_insert_with(|| self.narrowed(&tenant.residency, catalogue)).clone()
    }

    fn narrowed(&self, narrower: &ResidencyPolicy, catalogue: &Catalogue) -> Terms {
        Terms {
            residency: Residency::of(&self.deployment.residency.narrow(narrower)),
            allowed: self.allowed.narrowed(narrower, catalogue),
        }
    }

    fn is_for(&self, tenant: &Tenant) -> bool {
        tenant.may_use(&self.deployment.name)
    }
}

impl View {
    /// Works out `table`. A region that the catalogue does not know is left out: without its jurisdictions nothing could
    /// lawfully be sent there.
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
        let lawful = |deployment: &Deployment| Lawful {
            allowed: Law::of(deployment, catalogue),
            registered: table.serving(&deployment.name, catalogue),
            terms: Mutex::default(),
            deployment: deployment.clone(),
        };
        let deployments =
            table.deployments.iter().map(|(name, entry)| (name.clone(), lawful(entry))).collect();
        let (routed, draining) = (table.routed(catalogue), table.draining(catalogue));
        View { generation: table.generation, keys, routed, draining, regions, deployments }
    }

    /// The deployment of this name, if there is one for this tenant.
    pub(crate) fn deployment(&self, name: &str, tenant: &Tenant) -> Option<&Lawful> {
        self.deployments.get(name).filter(|lawful| lawful.is_for(tenant))
    }

    /// The deployment that this tenant may use, if there is one and no other.
    pub(crate) fn only_deployment(&self, tenant: &Tenant) -> Option<&Lawful> {
        let mut usable = self.deployments.values().filter(|lawful| lawful.is_for(tenant));
        usable.next().filter(|_| usable.next().is_none())
    }

    /// Those that this tenant may use.
    pub(crate) fn deployments_for(&self, tenant: &Tenant) -> impl Iterator<Item = &Deployment> {
        self.lawful_for(tenant).map(|lawful| &lawful.deployment)
    }

    /// The same, with where they may be served.
    pub(crate) fn lawful_for(&self, tenant: &Tenant) -> impl Iterator<Item = &Lawful> {
        self.deployments.values().filter(|lawful| lawful.is_for(tenant))
    }

    /// All of them; for operators.
    pub(crate) fn deployments(&self) -> impl Iterator<Item = &Deployment> {
        self.deployments.values().map(|lawful| &lawful.deployment)
    }

    pub(crate) fn address(&self, region: RegionIndex) -> Option<SocketAddr> {
        self.regions.get(&region).copied()
    }

    pub(crate) fn regions(&self) -> impl Iterator<Item = (RegionIndex, SocketAddr)> {
        self.regions.iter().map(|(region, address)| (*region, *address))
    }
}
