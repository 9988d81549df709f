//! A request at the edge, from its head to its answer.

use super::account::Account;
use super::admit::{Request, declared_length, none_repeated};
use super::allowances::Taken;
use super::attempts::Answered;
use super::cors;
use super::explain::Explanations;
use super::models;
use super::policy_clock::PolicyClock;
use super::refusals::{no_receipt, no_table_yet, not_served, unknown_model};
use super::scatter::Room;
use super::table::Current;
use super::tenants::Tenants;
use super::watch::Watch;
use super::weights::{Demands, Planned};
use crate::compress;
use crate::config::EdgeConfig;
use crate::events::Times;
use crate::intake::Intake;
use crate::listener::{AfterAnswer, Door};
use crate::metrics::{Asked, EdgeMetrics, Ending};
use crate::names;
use crate::openapi;
use crate::receipts::{Promise, Recorder};
use crate::relay;
use crate::respond::{self, Refusal};
use crate::tokens::Tokens;
use crate::upstream::{Answer, Upstream};
use gateway_core::decimal;
use gateway_core::endpoint::Endpoint;
use gateway_core::timing::RegionTiming;
use http::header::CONTENT_ENCODING;
use pingora::protocols::http::ServerSession;
use regions::set::RegionIndex;
use replica_core::wire::error::Fault;
use replica_core::wire::headers;
use std::sync::Arc;
use std::time::Instant;
use supervision::request::{Panicked, contain};
use tokio::sync::watch;

/// The door that clients come to.
pub(super) struct Edge {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) tokens: Arc<Tokens>,
    pub(super) tenants: Arc<Tenants>,
    pub(super) views: watch::Receiver<Current>,
    /// How old what they say may be.
    pub(super) policy_clock: Arc<PolicyClock>,
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
        let served = contain(self.serve(session, &mut account)).await;
        let after = match served {
            Err(Panicked(reason)) => {
                tracing::error!(request = account.id, reason, "request panicked");
                let begun = session.response_written().is_some();
                let after = respond::panicked(session, &[(headers::REQUEST_ID, account.id.as_str())]).await;
                let ending = Ending::as_told(session);
                account.ending = if begun { ending.broken_off() } else { ending };
                after
            }
            Ok(Ok(after)) => after,
            Ok(Err(NotForwarded::ClientGone)) => {
                account.ending = Ending::ClientGone;
                AfterAnswer::Close
            }
            Ok(Err(NotForwarded::Refused(refusal))) => {
                let attempts = account.trail.count().to_string();
                let parts = Some(account.trail.parts()).filter(|parts| *parts > 1).map(|n| n.to_string());
                let receipt = account.receipt().map(|id| id.text());
                let mut extra =
                    vec![(headers::REQUEST_ID, account.id.as_str()), (headers::ATTEMPTS, &attempts)];
                extra.extend(parts.as_deref().map(|parts| (headers::PARTS, parts)));
                extra.extend(receipt.as_deref().map(|id| (headers::RECEIPT, id)));
                let cors = self.cors(session);
                extra.extend(cors.iter().map(|(name, value)| (*name, value.as_str())));
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
        let path = session.req_header().uri.path().to_owned();
        if let Some(preflight) = self.preflight(session, &path) {
            let after = cors::answer(session, &preflight, &account.id).await;
            account.ending = Ending::as_told(session);
            return Ok(after);
        }
        let head = session.req_header();
        let endpoint = Endpoint::of(head.method.as_str(), &path).map_err(not_served)?;
        account.asked = Asked::of(&endpoint);
        none_repeated(session)?;
        if endpoint == Endpoint::OpenApi {
            // It says nothing about tenants: nobody is asked for a key.
            return self.described(session, account).await;
        }
        let view = self.views.borrow().clone();
        let keys = view.as_ref().map_or_else(|| self.tenants.before_any_table(), |view| view.keys.clone());
        let authenticated = self.tenant(session, &keys)?;
        let tenant = authenticated.tenant.clone();
        account.tenant = Some(tenant.clone());
        let view = view.ok_or_else(no_table_yet)?;
        match endpoint {
            Endpoint::OpenApi => self.described(session, account).await,
            Endpoint::Models => self.listed(session, models::list(&view, &tenant), account).await,
            Endpoint::InfinityModels => {
                self.listed(session, models::list_for_infinity(&view, &tenant), account).await
            }
            Endpoint::Model(id) => {
                let found = view.deployment(id, &tenant).ok_or_else(|| unknown_model(id, &view, &tenant))?;
                self.listed(session, models::one(&found.deployment), account).await
            }
            Endpoint::Computed(target) => {
                // Who cannot pay is told before the body is read.
                let entered = self.tenants.allowances.enter(&tenant, declared_length(session))?;
                let read = self.read(session, target, &view, authenticated, account).await;
                let request = match read {
                    Err(NotForwarded::Refused(refusal)) if refusal.code.fault() == Fault::Capacity => {
                        entered.leave();
                        return Err(refusal.into());
                    }
                    Err(NotForwarded::Refused(refusal)) => {
                        entered.processed(&refusal);
                        return Err(refusal.into());
                    }
                    read => read?,
                };
                // Its size could not be told from what was sent, so to have been refused for it is not free.
                let is_packed = session.get_header(CONTENT_ENCODING).is_some();

                account.admitted(&request);
                account.promise = self.promise(&request)?;
                let mut taken = entered.charge(&request.tenant, request.cost, is_packed)?;
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

    /// Answers with the description of the API.
    async fn described(
        &self,
        session: &mut ServerSession,
        account: &mut Account<'_>,
    ) -> Result<AfterAnswer, NotForwarded> {
        self.listed(session, openapi::document().to_vec(), account).await
    }

    /// Answers with what the edge knows by itself.
    async fn listed(
        &self,
        session: &mut ServerSession,
        body: Vec<u8>,
        account: &mut Account<'_>,
    ) -> Result<AfterAnswer, NotForwarded> {
        let after = self.local(session, body, &account.id).await;
        account.ending = Ending::as_told(session);
        Ok(after)
    }

    async fn local(&self, session: &mut ServerSession, body: Vec<u8>, id: &str) -> AfterAnswer {
        let cors = self.cors(session);
        let mut extra = vec![(headers::REQUEST_ID, id)];
        extra.extend(cors.iter().map(|(name, value)| (*name, value.as_str())));
        respond::ok(session, body, &extra).await
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
        let timing = timing.gateway_header(times.to_head, waited);
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
        if request.priority_changed {
            extra.push((headers::PRIORITY, request.priority.as_str()));
        }
        extra.extend(receipt.as_deref().map(|id| (headers::RECEIPT, id)));
        let cors = self.cors(session);
        extra.extend(cors.iter().map(|(name, value)| (*name, value.as_str())));
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
