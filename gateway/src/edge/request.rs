//! Admitted request: the immutable input of all later steps.

use super::admission::AdmissionPermit;
use super::region_states::RoutingContext;
use super::router::Route;
use crate::relay::ForwardedHeaders;
use crate::request_body::BufferedBody;
use crate::respond::Rejection;
use gateway_core::circuit::Permille;
use gateway_core::endpoint;
use gateway_core::keys::Digest;
use gateway_core::latency::SizeClass;
use gateway_core::residency::{AllowedRegions, Residency};
use gateway_core::tenant::{Cost, Tenant};
use gateway_core::trail::PolicyVersion;
use regions::ModelRevision;
use regions::geography::GeoPoint;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::set::{RegionIndex, RegionSet};
use replica_api::priority::Priority;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Admitted, resolved and routed request.
pub(super) struct Request {
    pub(super) id: String,
    pub(super) arrived: Instant,
    pub(super) timeout: Duration,
    pub(super) client: Option<GeoPoint>,
    pub(super) tenant: Arc<Tenant>,
    pub(super) deployment: DeploymentName,
    /// Effective priority.
    pub(super) priority: Priority,
    /// The client requested another priority.
    pub(super) priority_changed: bool,
    pub(super) cost: Cost,
    /// Effective residency policy: that of the deployment, narrowed by that of the tenant and by the header of the request.
    pub(super) residency: Residency,
    /// Allowed regions. The request is sent to no other region.
    pub(super) allowed: AllowedRegions,
    /// Policy and allowed regions with the generation of their route table, as of admission.
    pub(super) policy: Arc<PolicyVersion>,
    /// Residency of the request's own header, applied to newer tables as well.
    pub(super) requested_residency: ResidencyPolicy,
    /// API key of the request; `None` if it was authenticated with a token.
    pub(super) key: Option<Digest>,
    /// Arrival in milliseconds since 1970; like `tls_ended_here` (TLS was terminated by this gateway), for its receipts.
    pub(super) at_ms: u64,
    pub(super) tls_ended_here: bool,
    /// Regions that had registered for its deployment when the route table was published.
    pub(super) registered: RegionSet,
    /// Model revision of the deployment according to the table.
    pub(super) revision: Option<ModelRevision>,
    /// Required model revision of the response, because other parts of the request were computed with it.
    pub(super) required: Option<ModelRevision>,
    /// Its deployment may be scaled to zero.
    pub(super) may_sleep: bool,
    /// Path of the endpoint at a replica.
    pub(super) path: &'static str,
    pub(super) headers: ForwardedHeaders,
    pub(super) body: BufferedBody,
    /// Draw of the request, made once, so that decisions about it agree.
    pub(super) target_draw: Permille,
    /// Routing decision.
    pub(super) route: Route,
    /// Admission to the pool of the region that it is sent to first, for as long as it is in flight.
    pub(super) _admission: Option<AdmissionPermit>,
}

impl Request {
    /// Returns a request for a part of the inputs of this one, with its own body, cost, draw and route. Everything else is the
    /// same, above all the allowed regions. Its response must be of the model revision `required`, if one is given.
    pub(super) fn part(
        &self,
        body: BufferedBody,
        cost: Cost,
        (target_draw, route): (Permille, Route),
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
            requested_residency: self.requested_residency.clone(),
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
            target_draw,
            route,
            // The whole request was admitted for all of its parts.
            _admission: None,
        }
    }

    /// Returns whether the request spills over to `region`.
    pub(super) fn spills_over_to(&self, region: RegionIndex) -> bool {
        self.route.spillover == Some(region)
    }

    /// Returns the properties of the request that routing decisions use.
    pub(super) fn routing_context(&self) -> RoutingContext<'_> {
        self.part_routing_context(self.cost, self.target_draw)
    }

    /// Returns the same properties for a part of the request.
    pub(super) fn part_routing_context(&self, cost: Cost, target_draw: Permille) -> RoutingContext<'_> {
        RoutingContext {
            deployment: &self.deployment,
            priority: self.priority,
            size: SizeClass::of(cost.tokens),
            target_draw,
            uses_engine: endpoint::uses_engine(self.path),
        }
    }
}

/// Reason for which a request was not forwarded.
pub(super) enum ForwardError {
    Rejected(Rejection),
    ClientDisconnected,
}

impl From<Rejection> for ForwardError {
    fn from(refusal: Rejection) -> ForwardError {
        ForwardError::Rejected(refusal)
    }
}
