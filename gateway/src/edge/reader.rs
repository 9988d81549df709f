//! Reads a request: headers and body, deployment, cost, priority, allowed regions; then routes and admits it.

use super::admission::{AdmissionControl, left};
use super::auth::Authenticated;
use super::refusals::{
    bulk_not_permitted, invalid_body, invalid_option, no_model_field, no_model_named, no_region_permitted,
    residency_too_long, unknown_model,
};
use super::region_monitor::random_draws;
use super::region_states::RoutingContext;
use super::request::{ForwardError, Request};
use super::request_context::RequestContext;
use super::request_head::{declared_length, peer, single};
use super::router::{RequestDemand, Routable, Router};
use super::view::{RoutedDeployment, Terms, View};
use crate::config::EdgeConfig;
use crate::relay::ForwardedHeaders;
use crate::request_body::{BodyError, BodyReader, BufferedBody};
use crate::respond::Rejection;
use gateway_core::body::{self, BodySummary};
use gateway_core::endpoint::{self, ForwardTarget, ModelField};
use gateway_core::latency::SizeClass;
use gateway_core::memory::BodyOwner;
use gateway_core::priority::NoBulk;
use gateway_core::request_options::{OptionHeaders, RequestOptions};
use gateway_core::tenant::{Cost, Tenant};
use pingora::protocols::http::ServerSession;
use replica_api::headers;
use std::sync::Arc;

/// Limit on the bytes of a body that is parsed on the thread of its connection: less than a millisecond at 0.3 to 2
/// GB/s.
const INLINE_READ_BYTES_MAX: usize = 256 << 10;
/// Bytes of a body that are not charged as tokens.
const FREE_BODY_BYTES: usize = 4 << 10;

/// Reader of client requests: from head and body to an admitted [`Request`].
pub(super) struct RequestReader {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) body_reader: Arc<BodyReader>,
    pub(super) router: Arc<Router>,
    pub(super) admission: Arc<AdmissionControl>,
}

impl RequestReader {
    /// Reads a request, makes its routing decision and admits it.
    pub(super) async fn read(
        &self,
        session: &mut ServerSession,
        target: ForwardTarget<'_>,
        view: &View,
        authenticated: Authenticated,
        context: &RequestContext<'_>,
    ) -> Result<Request, ForwardError> {
        let Authenticated { tenant, key } = authenticated;
        let (id, arrived) = (&context.id, context.arrived);
        let options = self.options(session)?;
        self.admission.check_head(target, view, &tenant, &options, declared_length(session), arrived)?;
        let body =
            self.body_reader.body(session, self.owner(session, &tenant)).await.map_err(
                |none| match none {
                    BodyError::Rejected(_, refusal) => ForwardError::Rejected(refusal),
                    BodyError::ClientDisconnected => ForwardError::ClientDisconnected,
                },
            )?;
        let summary = self.body_of(target, &body, &tenant).await;
        let summary = summary.map_err(|refusal| refusal.with_processed(body.bytes.len()))?;
        let cost = Cost { inputs: summary.inputs, tokens: summary.tokens.max(min_tokens(&body)) };
        let priority = tenant
            .priorities
            .priority(options.priority, cost.inputs)
            .map_err(|NoBulk| bulk_not_permitted(&tenant))?;
        let routed = requested_deployment(target, summary.model, view, &tenant)?;
        let RoutedDeployment { deployment, revision, registered, .. } = routed;
        let terms = routed.terms(&tenant, &options.residency, &self.config.catalogue);
        let terms = terms.map_err(|error| residency_too_long(&deployment.name, &tenant, &error))?;
        let Terms { policy, allowed } = &terms;
        let residency = &policy.residency;
        if allowed.is_empty() {
            let of_deployment = *routed.allowed;
            return Err(no_region_permitted(
                &tenant,
                deployment,
                of_deployment,
                &options.residency,
                &self.config.catalogue,
            )
            .into());
        }
        let ([target_draw, leave_draw, draw], left) = (random_draws(), left(options.timeout, arrived));
        let (size, uses_engine) = (SizeClass::of(cost.tokens), endpoint::uses_engine(target.path));
        let routing =
            RoutingContext { deployment: &deployment.name, priority, size, target_draw, uses_engine };
        let (client, registered) = (options.client, *registered);
        let routable = Routable { view, routing, allowed: **allowed, registered, client };
        let demand = RequestDemand { residency, tokens: cost.tokens, left, draw, leave_draw };
        let mut route = self.router.route(&routable, &demand);
        let admission = self.admission.admit(&routable, &demand, &tenant, &mut route)?;
        let Terms { policy, allowed } = terms;
        Ok(Request {
            id: id.to_owned(),
            arrived,
            timeout: options.timeout,
            client: options.client,
            tenant,
            deployment: deployment.name.clone(),
            priority,
            priority_changed: options.priority.is_some_and(|requested| requested != priority),
            cost,
            residency: policy.residency.clone(),
            allowed,
            policy,
            requested_residency: options.residency,
            key,
            at_ms: context.at_ms,
            tls_ended_here: context.tls_ended_here,
            registered,
            revision: *revision,
            required: None,
            may_sleep: deployment.scaling.min == 0,
            path: target.path,
            headers: ForwardedHeaders::of(session, &[(headers::PRIORITY, priority.as_str())]),
            body,
            target_draw,
            route,
            _admission: admission,
        })
    }

    /// Owner of the memory of the body. It excludes the connection of a trusted peer, which carries requests of many
    /// clients.
    fn owner(&self, session: &ServerSession, tenant: &Tenant) -> BodyOwner {
        let connection = peer(session).filter(|peer| !self.config.trusted_peers.contains(&peer.ip()));
        BodyOwner { tenant: Some(tenant.index), connection }
    }

    /// Reads model and cost from the body; the default for a request without one.
    async fn body_of(
        &self,
        target: ForwardTarget<'_>,
        body: &BufferedBody,
        tenant: &Tenant,
    ) -> Result<BodySummary, Rejection> {
        if target.model == ModelField::Bodiless {
            return Ok(BodySummary::default());
        }
        let summary = if body.bytes.len() <= INLINE_READ_BYTES_MAX {
            body::read(&body.bytes)
        } else {
            let bytes = body.bytes.clone();
            self.body_reader.cpu.run(Some(tenant.index), move || body::read(&bytes)).await
        };
        summary.map_err(invalid_body)
    }

    /// Parses the request headers that set options.
    fn options(&self, session: &ServerSession) -> Result<RequestOptions, Rejection> {
        let trusted = peer(session).is_some_and(|peer| self.config.trusted_peers.contains(&peer.ip()));
        let option_headers = OptionHeaders {
            timeout_ms: single(session, headers::TIMEOUT_MS)?,
            residency: single(session, headers::RESIDENCY)?,
            priority: single(session, headers::PRIORITY)?,
            client_geo: single(session, headers::CLIENT_GEO)?.filter(|_| trusted),
        };
        RequestOptions::read(option_headers, &self.config.catalogue).map_err(invalid_option)
    }
}

/// Minimum cost of a body in tokens by its size, so that a large body without model input is charged for its parsing.
fn min_tokens(body: &BufferedBody) -> u64 {
    Cost::at_least(body.bytes.len().saturating_sub(FREE_BODY_BYTES) as u64).tokens
}

/// Deployment of a request: the one named by its path or its body or, where the API of its ecosystem has no model
/// field, the only deployment that the tenant may use.
fn requested_deployment<'a>(
    target: ForwardTarget<'_>,
    model_in_body: Option<String>,
    view: &'a View,
    tenant: &Tenant,
) -> Result<&'a RoutedDeployment, Rejection> {
    let named = target.deployment.map(str::to_owned).or(model_in_body);
    match (named, target.model) {
        (Some(name), _) => view.deployment(&name, tenant).ok_or_else(|| unknown_model(&name, view, tenant)),
        (None, ModelField::Required) => Err(no_model_field()),
        (None, ModelField::Optional | ModelField::Bodiless) => {
            view.only_deployment(tenant).ok_or_else(|| no_model_named(target.path, view, tenant))
        }
    }
}
