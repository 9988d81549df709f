//! A request at the edge, from its head to its answer.

use super::account::Account;
use super::admit::{Request, declared_length};
use super::allowances::Taken;
use super::attempts::Answered;
use super::explain::Explanations;
use super::refusals::{no_receipt, no_table_yet, not_served};
use super::scatter::Room;
use super::table::Current;
use super::tenants::Tenants;
use super::view::View;
use super::watch::Watch;
use super::weights::{Demands, Planned};
use crate::compress;
use crate::config::EdgeConfig;
use crate::events::Times;
use crate::intake::Intake;
use crate::listener::{AfterAnswer, Door};
use crate::metrics::{Asked, EdgeMetrics, Ending};
use crate::names;
use crate::receipts::{Promise, Recorder};
use crate::relay;
use crate::respond::{self, Refusal};
use crate::tokens::Tokens;
use crate::upstream::{Answer, Upstream};
use gateway_core::decimal;
use gateway_core::endpoint::Endpoint;
use gateway_core::tenant::Tenant;
use gateway_core::timing::RegionTiming;
use pingora::protocols::http::ServerSession;
use regions::set::RegionIndex;
use replica_core::wire::error::Fault;
use replica_core::wire::headers;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::watch;

/// The door that clients come to.
pub(super) struct Edge {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) tokens: Arc<Tokens>,
    pub(super) tenants: Arc<Tenants>,
    pub(super) views: watch::Receiver<Current>,
    /// What the hub plans for this gateway.
    pub(super) planned: watch::Receiver<Planned>,
    pub(super) demands: Arc<Demands>,
    /// Where it stands.
    pub(super) place: RegionIndex,
    pub(super) watch: Arc<Watch>,
    pub(super) upstream: Arc<Upstream>,
    pub(super) intake: Arc<Intake>,
    /// Room for requests that are computed in pieces.
    pub(super) scattering: Arc<Room>,
    pub(super) metrics: Arc<EdgeMetrics>,
    pub(super) explanations: Arc<Explanations>,
    pub(super) recorder: Option<Recorder>,
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
        let mut account = Account::open(self, session, arrived);
        let after = match self.serve(session, &mut account).await {
            Ok(after) => after,
            Err(NotForwarded::ClientGone) => {
                account.ending = Ending::ClientGone;
                AfterAnswer::Close
            }
            Err(NotForwarded::Refused(refusal)) => {
                let attempts = account.trail.count().to_string();
                let receipt = account.receipt().map(|id| id.text());
                let mut extra =
                    vec![(headers::REQUEST_ID, account.id.as_str()), (headers::ATTEMPTS, &attempts)];
                extra.extend(receipt.as_deref().map(|id| (headers::RECEIPT, id)));
                let after = respond::refuse(session, &refusal, &extra).await;
                account.ending = Ending::as_told(session);
                after
            }
        };
        account.measure(session);
        after
    }
}

impl Edge {
    async fn serve(
        &self,
        session: &mut ServerSession,
        account: &mut Account<'_>,
    ) -> Result<AfterAnswer, NotForwarded> {
        let head = session.req_header();
        let path = head.uri.path().to_owned();
        let endpoint = Endpoint::of(head.method.as_str(), &path).map_err(not_served)?;
        account.asked = Asked::of(&endpoint);
        let view = self.views.borrow().clone();
        let keys = view.as_ref().map_or_else(|| self.tenants.before_any_table(), |view| &view.keys);
        let tenant = self.tenant(session, keys)?;
        account.tenant = Some(tenant.clone());
        let view = view.ok_or_else(no_table_yet)?;
        match endpoint {
            Endpoint::Models => {
                let after = models(session, &view, &tenant, &account.id).await;
                account.ending = Ending::as_told(session);
                Ok(after)
            }
            Endpoint::Computed(target) => {
                // Who cannot pay is told before the body is read.
                let entered = self.tenants.allowances.enter(&tenant, declared_length(session))?;
                let read = self.read(session, target, &view, &account.id, tenant, account.arrived).await;
                let request = match read {
                    Err(NotForwarded::Refused(refusal)) if refusal.code.fault() == Fault::Capacity => {
                        entered.leave();
                        return Err(refusal.into());
                    }
                    read => read?,
                };
                account.admitted(&request, view.generation);
                account.promise = self.promise(&request)?;
                let mut taken = entered.charge(&request.tenant, request.cost)?;
                if let Some(cut) = self.cut(&request, &view).await? {
                    return self.scatter(session, &request, &view, cut, &mut taken, account).await;
                }
                let answered = tokio::select! {
                    biased;
                    answered = self.go(&request, &view, &mut account.trail) => answered?,
                    () = relay::client_gone(session) => return Err(NotForwarded::ClientGone),
                };
                Ok(self.relay(session, &request, &mut taken, answered, account).await)
            }
        }
    }

    /// A place for the receipts of a request that must not go without.
    fn promise(&self, request: &Request) -> Result<Option<Promise>, Refusal> {
        let locked = request.residency.is_locked();
        match self.recorder.as_ref().filter(|recorder| locked && recorder.required()) {
            Some(recorder) => recorder.promise().map(Some).ok_or_else(no_receipt),
            None => Ok(None),
        }
    }

    pub(super) async fn relay(
        &self,
        session: &mut ServerSession,
        request: &Request,
        taken: &mut Taken,
        answered: Answered,
        account: &mut Account<'_>,
    ) -> AfterAnswer {
        let Answered { answer, region, waited } = answered;
        let timing = RegionTiming::parse(text(&answer, headers::SERVER_TIMING).unwrap_or_default());
        let times = Times { to_head: request.arrived.elapsed(), waited, region: timing };
        account.answered = Some((region, times));
        if answer.head.status.is_success() {
            account.tokens = text(&answer, headers::TOKENS).and_then(|tokens| tokens.parse().ok());
            taken.used(account.tokens);
        }
        let timing = timing.at_the_edge(times.to_head, waited);
        let region = self.config.catalogue.region(region).id.as_str();
        let attempts = decimal::text(|text| decimal::push(text, account.trail.count() as u64));
        let receipt = account.receipt().map(|id| id.text());
        let left = taken.headers();
        let mut extra = vec![
            (headers::REQUEST_ID, request.id.as_str()),
            (headers::REGION, region),
            (headers::ATTEMPTS, &attempts),
            (headers::SERVER_TIMING, &timing),
        ];
        if request.lane_changed {
            extra.push((headers::LANE, request.lane.as_str()));
        }
        extra.extend(receipt.as_deref().map(|id| (headers::RECEIPT, id)));
        extra.extend(left.iter().map(|(name, value)| (*name, value.as_str())));
        let answer = compress::pack(session, answer, self.config.gzip_answers_from).await;
        let after = relay::outward(session, answer, &self.upstream, &extra).await;
        account.ending = match after {
            AfterAnswer::Reuse => Ending::as_told(session),
            AfterAnswer::Close => Ending::as_told(session).broken_off(),
        };
        after
    }
}

/// A header of a region's answer.
fn text<'a>(answer: &'a Answer, name: &'static str) -> Option<&'a str> {
    answer.head.headers.get(names::name(name))?.to_str().ok()
}

async fn models(session: &mut ServerSession, view: &View, tenant: &Tenant, id: &str) -> AfterAnswer {
    let data: Vec<_> = view
        .deployments_for(tenant)
        .map(|deployment| serde_json::json!({"id": deployment.name.as_str(), "object": "model", "created": 0, "owned_by": "meridian"}))
        .collect();
    let body = serde_json::json!({"object": "list", "data": data}).to_string();
    respond::ok(session, body.into_bytes(), &[(headers::REQUEST_ID, id)]).await
}
