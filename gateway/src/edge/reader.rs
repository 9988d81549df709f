//! Reads a request: headers and body, deployment, cost, priority, allowed regions; then routes and admits it.

use super::account::Account;
use super::admission::{AdmissionControl, left};
use super::auth::Authenticated;
use super::known::About;
use super::refusals::{
    no_bulk, no_model_field, no_model_named, no_region_permitted, residency_too_long, unknown_model,
    unreadable_ask, unreadable_body,
};
use super::request::{NotForwarded, Request};
use super::request_head::{declared_length, peer, single};
use super::router::{RequestDemand, Routable, Router};
use super::view::{RoutedDeployment, Terms, View};
use super::watch::chances;
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
use replica_core::wire::headers;
use std::sync::Arc;

/// The largest body that is read on the thread of its connection: at some 0.3 to 2 GB/s, less than a millisecond.
const READ_AT_ONCE_BYTES_MAX: usize = 256 << 10;
/// Bytes of a body that are free of charge.
const FREE_BODY_BYTES: usize = 4 << 10;

/// Reader of client requests: from head and body to an admitted [`Request`].
pub(super) struct RequestReader {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) body_reader: Arc<BodyReader>,
    pub(super) router: Arc<Router>,
    pub(super) admission: Arc<AdmissionControl>,
}

impl RequestReader {
    /// Reads everything that the decision hangs on.
    pub(super) async fn read(
        &self,
        session: &mut ServerSession,
        target: ForwardTarget<'_>,
        view: &View,
        authenticated: Authenticated,
        account: &Account<'_>,
    ) -> Result<Request, NotForwarded> {
        let Authenticated { tenant, key } = authenticated;
        let (id, arrived) = (&account.id, account.arrived);
        let ask = self.ask(session)?;
        self.admission.check_head(target, view, &tenant, &ask, declared_length(session), arrived)?;
        let body =
            self.body_reader.body(session, self.owner(session, &tenant)).await.map_err(
                |none| match none {
                    BodyError::Rejected(_, refusal) => NotForwarded::Refused(refusal),
                    BodyError::ClientDisconnected => NotForwarded::ClientGone,
                },
            )?;
        let reading = self.body_of(target, &body, &tenant).await;
        let reading = reading.map_err(|refusal| refusal.with_processed(body.bytes.len()))?;
        let cost = Cost { inputs: reading.inputs, tokens: reading.tokens.max(least_tokens(&body)) };
        let priority =
            tenant.priorities.priority(ask.priority, cost.inputs).map_err(|NoBulk| no_bulk(&tenant))?;
        let routed = asked_for(target, reading.model, view, &tenant)?;
        let RoutedDeployment { deployment, revision, registered, .. } = routed;
        let terms = routed.terms(&tenant, &ask.residency, &self.config.catalogue);
        let terms = terms.map_err(|error| residency_too_long(&deployment.name, &tenant, &error))?;
        let Terms { policy, allowed } = &terms;
        let residency = &policy.residency;
        if allowed.is_empty() {
            let of_deployment = *routed.allowed;
            return Err(no_region_permitted(
                &tenant,
                deployment,
                of_deployment,
                &ask.residency,
                &self.config.catalogue,
            )
            .into());
        }
        let ([chance, leave_draw, draw], left) = (chances(), left(ask.timeout, arrived));
        let (size, uses_engine) = (SizeClass::of(cost.tokens), endpoint::uses_engine(target.path));
        let about = About { deployment: &deployment.name, priority, size, chance, uses_engine };
        let (client, registered) = (ask.client, *registered);
        let routable = Routable { view, about, allowed: **allowed, registered, client };
        let demand = RequestDemand { residency, tokens: cost.tokens, left, draw, leave_draw };
        let mut route = self.router.route(&routable, &demand);
        let admission = self.admission.admit(&routable, &demand, &tenant, &mut route)?;
        let Terms { policy, allowed } = terms;
        Ok(Request {
            id: id.to_owned(),
            arrived,
            timeout: ask.timeout,
            client: ask.client,
            tenant,
            deployment: deployment.name.clone(),
            priority,
            priority_changed: ask.priority.is_some_and(|asked| asked != priority),
            cost,
            residency: policy.residency.clone(),
            allowed,
            policy,
            asked: ask.residency,
            key,
            at_ms: account.at_ms,
            tls_ended_here: account.tls_ended_here,
            registered,
            revision: *revision,
            required: None,
            may_sleep: deployment.scaling.min == 0,
            path: target.path,
            headers: ForwardedHeaders::of(session, &[(headers::PRIORITY, priority.as_str())]),
            body,
            chance,
            route,
            _admission: admission,
        })
    }

    /// Owner of the body's memory. A trusted peer's connection carries the requests of many.
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
        let reading = if body.bytes.len() <= READ_AT_ONCE_BYTES_MAX {
            body::read(&body.bytes)
        } else {
            let bytes = body.bytes.clone();
            self.body_reader.cpu.run(Some(tenant.index), move || body::read(&bytes)).await
        };
        reading.map_err(unreadable_body)
    }

    fn ask(&self, session: &ServerSession) -> Result<RequestOptions, Rejection> {
        let trusted = peer(session).is_some_and(|peer| self.config.trusted_peers.contains(&peer.ip()));
        let asked = OptionHeaders {
            timeout_ms: single(session, headers::TIMEOUT_MS)?,
            residency: single(session, headers::RESIDENCY)?,
            priority: single(session, headers::PRIORITY)?,
            client_geo: single(session, headers::CLIENT_GEO)?.filter(|_| trusted),
        };
        RequestOptions::read(asked, &self.config.catalogue).map_err(unreadable_ask)
    }
}

/// The least that a body costs, whatever it is made of: who sends megabytes that no model reads pays for their reading.
fn least_tokens(body: &BufferedBody) -> u64 {
    Cost::at_least(body.bytes.len().saturating_sub(FREE_BODY_BYTES) as u64).tokens
}

/// The deployment that a request is for: the one that its path names, or its body, or, where its ecosystem has no name
/// for one, the only one that its tenant may use.
fn asked_for<'a>(
    target: ForwardTarget<'_>,
    in_body: Option<String>,
    view: &'a View,
    tenant: &Tenant,
) -> Result<&'a RoutedDeployment, Rejection> {
    let named = target.deployment.map(str::to_owned).or(in_body);
    match (named, target.model) {
        (Some(name), _) => view.deployment(&name, tenant).ok_or_else(|| unknown_model(&name, view, tenant)),
        (None, ModelField::Required) => Err(no_model_field()),
        (None, ModelField::Optional | ModelField::Bodiless) => {
            view.only_deployment(tenant).ok_or_else(|| no_model_named(target.path, view, tenant))
        }
    }
}
