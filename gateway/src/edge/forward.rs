//! A request at the edge, from its head to its answer.

use super::admit::{Request, declared_length, request_id};
use super::allowances::{Allowances, Taken};
use super::attempts::Answered;
use super::refusals::{no_table_yet, not_served};
use super::table::Current;
use super::view::View;
use super::watch::Watch;
use crate::config::EdgeConfig;
use crate::intake::Intake;
use crate::listener::{AfterAnswer, Door};
use crate::relay;
use crate::respond::{self, Refusal};
use crate::tokens::Tokens;
use crate::upstream::Upstream;
use gateway_core::endpoint::Endpoint;
use gateway_core::tenant::Tenant;
use gateway_core::timing::RegionTiming;
use gateway_core::trail::Trail;
use pingora::protocols::http::ServerSession;
use replica_core::wire::error::Fault;
use replica_core::wire::headers;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{Semaphore, watch};

/// The door that clients come to.
pub(super) struct Edge {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) tokens: Arc<Tokens>,
    pub(super) allowances: Allowances,
    pub(super) views: watch::Receiver<Current>,
    pub(super) watch: Arc<Watch>,
    pub(super) upstream: Upstream,
    pub(super) intake: Intake,
    /// Room for requests that are computed in pieces.
    pub(super) scattering: Semaphore,
}

/// Why a request is not served by a region.
pub(super) enum NotForwarded {
    Refused(Refusal),
    ClientGone,
}

impl From<Refusal> for NotForwarded {
    fn from(refusal: Refusal) -> NotForwarded {
        NotForwarded::Refused(refusal)
    }
}

impl Door for Edge {
    async fn answer(&self, session: &mut ServerSession) -> AfterAnswer {
        let arrived = Instant::now();
        let id = request_id(session);
        let mut trail = Trail::default();
        let end = self.serve(session, &id, arrived, &mut trail).await;
        trail.close(Instant::now());
        match end {
            Ok(after) => after,
            Err(NotForwarded::ClientGone) => AfterAnswer::Close,
            Err(NotForwarded::Refused(refusal)) => {
                tracing::info!(id, code = refusal.code.as_str(), attempts = trail.count(), "refused");
                let attempts = trail.count().to_string();
                let extra = [(headers::REQUEST_ID, id.as_str()), (headers::ATTEMPTS, attempts.as_str())];
                respond::refuse(session, &refusal, &extra).await
            }
        }
    }
}

impl Edge {
    async fn serve(
        &self,
        session: &mut ServerSession,
        id: &str,
        arrived: Instant,
        trail: &mut Trail,
    ) -> Result<AfterAnswer, NotForwarded> {
        let head = session.req_header();
        let path = head.uri.path().to_owned();
        let endpoint = Endpoint::of(head.method.as_str(), &path).map_err(not_served)?;
        let tenant = self.tenant(session)?;
        let view = self.views.borrow().clone().ok_or_else(no_table_yet)?;
        match endpoint {
            Endpoint::Models => Ok(models(session, &view, &tenant, id).await),
            Endpoint::Computed(target) => {
                // Who cannot pay is told before the body is read.
                let entered = self.allowances.enter(&tenant, declared_length(session))?;
                let read = self.read(session, target, &view, id, tenant, arrived).await;
                let request = match read {
                    Err(NotForwarded::Refused(refusal)) if refusal.code.fault() == Fault::Capacity => {
                        entered.leave();
                        return Err(refusal.into());
                    }
                    read => read?,
                };
                let mut taken = self.allowances.charge(&request.tenant, entered, request.cost)?;
                if let Some(cut) = self.cut(&request, &view).await? {
                    return self.scatter(session, &request, &view, cut, &mut taken, trail).await;
                }
                let answered = tokio::select! {
                    biased;
                    answered = self.go(&request, &view, trail) => answered?,
                    () = relay::client_gone(session) => return Err(NotForwarded::ClientGone),
                };
                Ok(self.relay(session, &request, &mut taken, answered, trail.count()).await)
            }
        }
    }

    pub(super) async fn relay(
        &self,
        session: &mut ServerSession,
        request: &Request,
        taken: &mut Taken<'_>,
        answered: Answered,
        attempts: usize,
    ) -> AfterAnswer {
        let Answered { answer, region, waited } = answered;
        let region = self.config.catalogue.region(region).id.as_str();
        let status = answer.head.status.as_u16();
        let told = answer.head.headers.get(headers::SERVER_TIMING).and_then(|value| value.to_str().ok());
        let timing =
            RegionTiming::parse(told.unwrap_or_default()).at_the_edge(request.arrived.elapsed(), waited);
        if answer.head.status.is_success() {
            let tokens = answer.head.headers.get(headers::TOKENS);
            taken.used(tokens.and_then(|value| value.to_str().ok()?.parse().ok()));
        }
        let attempts_text = attempts.to_string();
        let left = self.allowances.headers(&request.tenant);
        let mut extra = vec![
            (headers::REQUEST_ID, request.id.as_str()),
            (headers::REGION, region),
            (headers::ATTEMPTS, &attempts_text),
            (headers::SERVER_TIMING, &timing),
        ];
        if request.lane_changed {
            extra.push((headers::LANE, request.lane.as_str()));
        }
        extra.extend(left.iter().map(|(name, value)| (*name, value.as_str())));
        let after = relay::outward(session, answer, &self.upstream, &extra).await;
        let (tenant, deployment) = (request.tenant.id.as_str(), request.deployment.as_str());
        let took_ms = request.arrived.elapsed().as_secs_f64() * 1e3;
        tracing::info!(id = request.id, tenant, deployment, region, status, attempts, took_ms, "served");
        after
    }
}

async fn models(session: &mut ServerSession, view: &View, tenant: &Tenant, id: &str) -> AfterAnswer {
    let data: Vec<_> = view
        .deployments_for(tenant)
        .map(|deployment| serde_json::json!({"id": deployment.name.as_str(), "object": "model", "created": 0, "owned_by": "meridian"}))
        .collect();
    let body = serde_json::json!({"object": "list", "data": data}).to_string();
    respond::ok(session, body.into_bytes(), &[(headers::REQUEST_ID, id)]).await
}
