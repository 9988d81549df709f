//! Admitted request: what every later step needs, and nothing that it may change.

use super::admission::AdmissionPermit;
use super::known::About;
use super::router::Route;
use crate::relay::ForwardedHeaders;
use crate::request_body::BufferedBody;
use crate::respond::Rejection;
use gateway_core::circuit::Permille;
use gateway_core::endpoint;
use gateway_core::keys::Digest;
use gateway_core::latency::SizeClass;
use gateway_core::priority::Priority;
use gateway_core::residency::{AllowedRegions, Residency};
use gateway_core::tenant::{Cost, Tenant};
use gateway_core::trail::PolicyVersion;
use regions::ModelRevision;
use regions::geography::GeoPoint;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::set::{RegionIndex, RegionSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request that is let in, resolved, and routed somewhere.
pub(super) struct Request {
    pub(super) id: String,
    pub(super) arrived: Instant,
    pub(super) timeout: Duration,
    pub(super) client: Option<GeoPoint>,
    pub(super) tenant: Arc<Tenant>,
    pub(super) deployment: DeploymentName,
    /// The priority that it travels in.
    pub(super) priority: Priority,
    /// It asked for another.
    pub(super) priority_changed: bool,
    pub(super) cost: Cost,
    /// The residency policy it travels under: the deployment's, narrowed by its own header.
    pub(super) residency: Residency,
    /// The regions that may see it. Nothing is sent to any other.
    pub(super) allowed: AllowedRegions,
    /// Both, and of which route table they are: what it was admitted under.
    pub(super) policy: Arc<PolicyVersion>,
    /// Policy of the request's own header, to be applied to a newer table as well.
    pub(super) asked: ResidencyPolicy,
    /// The key that it was authenticated with; none where that was a token.
    pub(super) key: Option<Digest>,
    /// When it arrived, in milliseconds since 1970, and whether TLS ended here: for its receipts.
    pub(super) at_ms: u64,
    pub(super) tls_ended_here: bool,
    /// The regions that had registered for it when the route table was made.
    pub(super) registered: RegionSet,
    /// The model revision that the deployment is served with, by the table.
    pub(super) revision: Option<ModelRevision>,
    /// The one that the answer must be of: other parts of it are already.
    pub(super) required: Option<ModelRevision>,
    /// Its deployment may have no replica at all while nobody asks for it.
    pub(super) may_sleep: bool,
    /// As a replica serves it.
    pub(super) path: &'static str,
    pub(super) headers: ForwardedHeaders,
    pub(super) body: BufferedBody,
    /// Draw of the request, made once, so that decisions about it agree.
    pub(super) chance: Permille,
    /// Routing decision.
    pub(super) route: Route,
    /// Admission to the pool of the region that it is sent to first, for as long as it is in flight.
    pub(super) _admission: Option<AdmissionPermit>,
}

impl Request {
    /// Request for a part of the inputs of this one: with its own body, cost, draw and route, and in everything else the same,
    /// above all in the regions that may see it. Its response must be of the model revision `required`, if one is given.
    pub(super) fn part(
        &self,
        body: BufferedBody,
        cost: Cost,
        (chance, route): (Permille, Route),
        required: Option<ModelRevision>,
    ) -> Request {
        let is_allowed = route.targets().all(|target| self.allowed.contains(target.region));
        assert!(is_allowed, "a part is sent where the whole may be sent (invariant 1, Residency)");
        Request {
            id: self.id.clone(),
            arrived: self.arrived,
            timeout: self.timeout,
            client: self.client,
            tenant: self.tenant.clone(),
            deployment: self.deployment.clone(),
            priority: self.priority,
            priority_changed: self.priority_changed,
            cost,
            residency: self.residency.clone(),
            allowed: self.allowed,
            policy: self.policy.clone(),
            asked: self.asked.clone(),
            key: self.key,
            at_ms: self.at_ms,
            tls_ended_here: self.tls_ended_here,
            registered: self.registered,
            revision: self.revision,
            required,
            may_sleep: self.may_sleep,
            path: self.path,
            headers: self.headers.clone(),
            body,
            chance,
            route,
            // The whole was admitted for all of its parts.
            _admission: None,
        }
    }

    /// Whether the request spills over to `region`.
    pub(super) fn spills_over_to(&self, region: RegionIndex) -> bool {
        self.route.spillover == Some(region)
    }

    /// Properties of the request that decisions about it use.
    pub(super) fn about(&self) -> About<'_> {
        self.about_part(self.cost, self.chance)
    }

    /// Properties of a part of the request.
    pub(super) fn about_part(&self, cost: Cost, chance: Permille) -> About<'_> {
        About {
            deployment: &self.deployment,
            priority: self.priority,
            size: SizeClass::of(cost.tokens),
            chance,
            uses_engine: endpoint::uses_engine(self.path),
        }
    }
}

/// Reason for which a request was not forwarded.
pub(super) enum NotForwarded {
    Refused(Rejection),
    ClientGone,
}

impl From<Rejection> for NotForwarded {
    fn from(refusal: Rejection) -> NotForwarded {
        NotForwarded::Refused(refusal)
    }
}
