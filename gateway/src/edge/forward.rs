//! A request at the edge, from its head to its answer.

use super::allowances::{Allowances, Taken};
use super::refusals::{
    deadline_passed, in_words, no_model_field, no_model_named, no_table_yet, not_let_in, not_served,
    unknown_model, unreadable_ask, unreadable_body,
};
use super::table::Current;
use super::view::{Lawful, View};
use super::watch::Watch;
use crate::config::EdgeConfig;
use crate::intake::{Body, Intake, NoBody};
use crate::listener::{AfterAnswer, Door};
use crate::relay::{self, Crossing};
use crate::respond::{self, Refusal};
use crate::upstream::{Answer, Upstream};
use gateway_core::ask::{Ask, Headers};
use gateway_core::body::{self, Reading};
use gateway_core::endpoint::{Endpoint, ModelField, Target};
use gateway_core::outcome::Failure;
use gateway_core::plan::{RequestPlan, Step};
use gateway_core::tenant::{Cost, Tenant};
use gateway_core::timing::RegionTiming;
use pingora::protocols::http::ServerSession;
use rand::Rng;
use regions::geography::GeoPoint;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::selection::{self, Query, Selection};
use regions::set::{RegionIndex, RegionSet};
use replica_core::wire::error::{ErrorCode, Remedy};
use replica_core::wire::headers;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The least and the most that a connection to a region may take to open; between them, two round trips and a bit.
const CONNECT_MIN: Duration = Duration::from_millis(100);
const CONNECT_MAX: Duration = Duration::from_millis(400);
/// The longest request identifier that is taken from a client.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// The door that clients come to.
pub(super) struct Edge {
    pub(super) config: Arc<EdgeConfig>,
    pub(super) allowances: Allowances,
    pub(super) views: watch::Receiver<Current>,
    pub(super) watch: Arc<Watch>,
    pub(super) upstream: Upstream,
    pub(super) intake: Intake,
}

/// A request that is let in, understood, and lawful somewhere.
struct Request {
    id: String,
    arrived: Instant,
    timeout: Duration,
    client: Option<GeoPoint>,
    tenant: Arc<Tenant>,
    deployment: DeploymentName,
    cost: Cost,
    /// The law it travels under: the deployment's, narrowed by its own header.
    residency: ResidencyPolicy,
    /// The regions that may see it. Nothing is sent to any other.
    allowed: RegionSet,
    /// The regions that had registered a ready replica when the route table was made.
    registered: RegionSet,
    /// As a replica serves it.
    path: &'static str,
    crossing: Crossing,
    body: Body,
}

/// How an attempt's answer came about.
struct Answered {
    answer: Answer,
    region: RegionIndex,
    waited: Duration,
}

/// Why a request is not served by a region.
enum NotForwarded {
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
        let mut attempts = 0;
        let end = self.serve(session, &id, arrived, &mut attempts).await;
        match end {
            Ok(after) => after,
            Err(NotForwarded::ClientGone) => AfterAnswer::Close,
            Err(NotForwarded::Refused(refusal)) => {
                tracing::info!(id, code = refusal.code.as_str(), attempts, "refused");
                let attempts = attempts.to_string();
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
        attempts: &mut u32,
    ) -> Result<AfterAnswer, NotForwarded> {
        let head = session.req_header();
        let path = head.uri.path().to_owned();
        let endpoint = Endpoint::of(head.method.as_str(), &path).map_err(not_served)?;
        let tenant = self.config.keys.tenant(header(session, "authorization")).map_err(not_let_in)?.clone();
        let view = self.views.borrow().clone().ok_or_else(no_table_yet)?;
        match endpoint {
            Endpoint::Models => Ok(models(session, &view, &tenant, id).await),
            Endpoint::Computed(target) => {
                let request = self.read(session, target, &view, id, tenant, arrived).await?;
                let mut taken = self.allowances.take(&request.tenant, request.cost)?;
                let answered = tokio::select! {
                    biased;
                    answered = self.go(&request, &view, attempts) => answered?,
                    () = relay::client_gone(session) => return Err(NotForwarded::ClientGone),
                };
                Ok(self.relay(session, &request, &mut taken, answered, *attempts).await)
            }
        }
    }

    /// Reads everything that the decision hangs on.
    async fn read(
        &self,
        session: &mut ServerSession,
        target: Target<'_>,
        view: &View,
        id: &str,
        tenant: Arc<Tenant>,
        arrived: Instant,
    ) -> Result<Request, NotForwarded> {
        let ask = self.ask(session)?;
        let body = self.intake.body(session).await.map_err(|none| match none {
            NoBody::Refused(refusal) => NotForwarded::Refused(refusal),
            NoBody::ClientGone => NotForwarded::ClientGone,
        })?;
        let reading = body_of(target, &body)?;
        let cost = Cost { inputs: reading.inputs, tokens: reading.tokens };
        let Lawful { deployment, allowed, registered } = asked_for(target, reading.model, view, &tenant)?;
        let narrower = tenant.residency.narrow(&ask.residency);
        let allowed = allowed.intersect(narrower.permitted(&self.config.catalogue));
        let residency = deployment.residency.narrow(&narrower);
        if allowed.is_empty() {
            let message = format!(
                "No region may serve '{}' under the residency '{residency}', which is that of the deployment, of the \
                 tenant '{}' and of {} together; widen the last or leave it out.",
                deployment.name,
                tenant.id,
                headers::RESIDENCY
            );
            return Err(Refusal::new(ErrorCode::RegionNotPermitted, message).of(headers::RESIDENCY).into());
        }
        Ok(Request {
            id: id.to_owned(),
            arrived,
            timeout: ask.timeout,
            client: ask.client,
            tenant,
            deployment: deployment.name.clone(),
            cost,
            residency,
            allowed,
            registered: *registered,
            path: target.path,
            crossing: Crossing::of(session),
            body,
        })
    }

    fn ask(&self, session: &ServerSession) -> Result<Ask, Refusal> {
        let peer = session.client_addr().and_then(|address| address.as_inet()).map(|address| address.ip());
        let trusted = peer.is_some_and(|peer: IpAddr| self.config.trusted_peers.contains(&peer));
        let asked = Headers {
            timeout_ms: single(session, headers::TIMEOUT_MS)?,
            residency: single(session, headers::RESIDENCY)?,
            client_geo: single(session, headers::CLIENT_GEO)?.filter(|_| trusted),
        };
        Ask::read(asked, &self.config.catalogue).map_err(unreadable_ask)
    }

    /// The regions that could take the request, best first, and why the others cannot.
    fn choose(&self, request: &Request, view: &View) -> Selection {
        let now = Instant::now();
        let known = self.watch.known();
        // A region knows its replicas better than the table, for which it registered some time ago.
        let mut serving = RegionSet::empty();
        for region in view.routed.iter() {
            let reported = known.fleet.serves(region, &request.deployment);
            if reported.unwrap_or(request.registered.contains(region)) {
                serving.insert(region);
            }
        }
        selection::select(&Query {
            considered: view.routed,
            allowed: request.allowed,
            routed: view.routed,
            serving,
            health: &|region| known.fleet.health(region, &request.deployment),
            rtt: &|region| match request.client {
                Some(place) => known.latency.prior_from(place, region),
                None => known.latency.estimate(region, now),
            },
        })
    }

    /// Goes from region to region until one answers.
    async fn go(&self, request: &Request, view: &View, attempts: &mut u32) -> Result<Answered, NotForwarded> {
        // Heard from before the choice is made, so that no loss falls between the two.
        let mut bell = self.watch.bell();
        let selection = self.choose(request, view);
        let order = selection.order.iter().map(|candidate| candidate.region).collect();
        let mut plan = RequestPlan::new(order, request.arrived + request.timeout);
        let mut step = plan.start(Instant::now());
        let mut held = None;
        loop {
            let region = match step {
                Step::Send { region, attempt } => {
                    *attempts = attempt;
                    region
                }
                Step::Relay => return Ok(held.take().expect("a plan relays what an attempt has brought")),
                Step::NobodyReachable => return Err(self.nobody_reachable(request, view, &selection).into()),
                Step::DeadlinePassed => return Err(deadline_passed(request.timeout).into()),
            };
            let failure = match self.attempt(request, view, &plan, region, &mut bell).await {
                Ok(answered) if !says_elsewhere(&answered.answer) => {
                    self.watch.answered(region);
                    return Ok(answered);
                }
                Ok(answered) => {
                    held = Some(answered);
                    Failure::Elsewhere
                }
                Err(failure) => failure,
            };
            tracing::debug!(id = request.id, region = region.as_usize(), ?failure, "an attempt failed");
            step = self.watch.failed(&mut plan, region, failure, &request.deployment);
        }
    }

    /// One attempt, ended by its answer, by the deadline, or by the loss of the region.
    async fn attempt(
        &self,
        request: &Request,
        view: &View,
        plan: &RequestPlan,
        region: RegionIndex,
        bell: &mut watch::Receiver<()>,
    ) -> Result<Answered, Failure> {
        assert!(
            request.allowed.contains(region),
            "a request is sent only where it is allowed (invariant 1, Lawful)"
        );
        let address = view.address(region).ok_or(Failure::Unreachable)?;
        let begun = Instant::now();
        let left = plan.left(begun);
        let (left_ms, attempt) = (left.as_millis().max(1).to_string(), plan.attempts().to_string());
        let residency = request.residency.to_string();
        let mut extra = vec![
            (headers::REQUEST_ID, request.id.as_str()),
            (headers::DEPLOYMENT, request.deployment.as_str()),
            (headers::TENANT, request.tenant.id.as_str()),
            (headers::TIMEOUT_MS, &left_ms),
            (headers::ATTEMPT, &attempt),
        ];
        if request.residency != ResidencyPolicy::Anywhere {
            extra.push((headers::RESIDENCY, &residency));
        }
        let head = request.crossing.head(request.path, &request.body.bytes, &extra);
        let connect =
            (2 * self.watch.known().latency.estimate(region, begun)).clamp(CONNECT_MIN, CONNECT_MAX);
        let _in_flight = self.watch.in_flight(region);
        let asked = self.upstream.ask(address, connect, head, request.body.bytes.clone());
        let lost = async {
            while bell.changed().await.is_ok() {
                if self.watch.gives_up(plan, region, &request.deployment) {
                    return;
                }
            }
        };
        tokio::select! {
            biased;
            answer = asked => answer.map(|answer| Answered { answer, region, waited: begun.elapsed() }),
            () = lost => Err(Failure::Lost),
            () = tokio::time::sleep(left) => Err(Failure::DeadlinePassed),
        }
    }

    async fn relay(
        &self,
        session: &mut ServerSession,
        request: &Request,
        taken: &mut Taken<'_>,
        answered: Answered,
        attempts: u32,
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
        extra.extend(left.iter().map(|(name, value)| (*name, value.as_str())));
        let after = relay::outward(session, answer, &self.upstream, &extra).await;
        let (tenant, deployment) = (request.tenant.id.as_str(), request.deployment.as_str());
        let took_ms = request.arrived.elapsed().as_secs_f64() * 1e3;
        tracing::info!(id = request.id, tenant, deployment, region, status, attempts, took_ms, "served");
        after
    }

    fn nobody_reachable(&self, request: &Request, view: &View, selection: &Selection) -> Refusal {
        let catalogue = &self.config.catalogue;
        let tried = selection.order.iter().map(|candidate| candidate.region);
        let named = |region: RegionIndex| catalogue.region(region).id.to_string();
        let mut allowed: Vec<_> = tried.clone().map(|region| format!("{} (tried)", named(region))).collect();
        for (region, _) in view.regions().filter(|(region, _)| request.allowed.contains(*region)) {
            if let Some(reason) = selection.refused.reason(region) {
                allowed.push(format!("{} ({})", named(region), in_words(reason)));
            }
        }
        let places = if allowed.is_empty() { "none has registered".to_owned() } else { allowed.join(", ") };
        Refusal::new(
            ErrorCode::NoCapacityInAllowedRegions,
            format!(
                "No region that may serve '{}' under the residency '{}' can be reached: {places}. Try again shortly; \
                 other regions were not asked.",
                request.deployment, request.residency
            ),
        )
    }
}

/// What the body says; a request without one says nothing.
fn body_of(target: Target<'_>, body: &Body) -> Result<Reading, Refusal> {
    match target.model {
        ModelField::Required | ModelField::Optional => body::read(&body.bytes).map_err(unreadable_body),
        ModelField::Bodiless => Ok(Reading::default()),
    }
}

/// The deployment that a request is for: the one that its path names, or its body, or, where its ecosystem has no name
/// for one, the only one that its tenant may use.
fn asked_for<'a>(
    target: Target<'_>,
    in_body: Option<String>,
    view: &'a View,
    tenant: &Tenant,
) -> Result<&'a Lawful, Refusal> {
    let named = target.deployment.map(str::to_owned).or(in_body);
    match (named, target.model) {
        (Some(name), _) => view.deployment(&name, tenant).ok_or_else(|| unknown_model(&name, view, tenant)),
        (None, ModelField::Required) => Err(no_model_field()),
        (None, ModelField::Optional | ModelField::Bodiless) => {
            view.only_deployment(tenant).ok_or_else(|| no_model_named(target.path, view, tenant))
        }
    }
}

/// The region's own word that another region could do what it cannot.
fn says_elsewhere(answer: &Answer) -> bool {
    let code =
        answer.head.headers.get(headers::ERROR).and_then(|value| ErrorCode::parse(value.to_str().ok()?));
    answer.head.status.is_server_error() && code.is_some_and(|code| code.remedy() == Remedy::Elsewhere)
}

/// The client's identifier if it can stand in a header and a log line, else a new one.
fn request_id(session: &ServerSession) -> String {
    let given = header(session, headers::REQUEST_ID).and_then(|value| std::str::from_utf8(value).ok());
    let usable = |id: &&str| {
        (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
    };
    match given.filter(usable) {
        Some(id) => id.to_owned(),
        None => format!("req-{:032x}", rand::rng().random::<u128>()),
    }
}

fn header<'a>(session: &'a ServerSession, name: &str) -> Option<&'a [u8]> {
    session.get_header(name).map(|value| value.as_bytes())
}

/// A header that may be there once: of two, each could be the one that was meant, and for residency the narrower
/// would be lost.
fn single<'a>(session: &'a ServerSession, name: &'static str) -> Result<Option<&'a [u8]>, Refusal> {
    if session.req_header().headers.get_all(name).iter().count() > 1 {
        return Err(
            Refusal::new(ErrorCode::InvalidHeader, format!("{name} is there more than once.")).of(name)
        );
    }
    Ok(header(session, name))
}

async fn models(session: &mut ServerSession, view: &View, tenant: &Tenant, id: &str) -> AfterAnswer {
    let data: Vec<_> = view
        .deployments_for(tenant)
        .map(|deployment| serde_json::json!({"id": deployment.name.as_str(), "object": "model", "created": 0, "owned_by": "meridian"}))
        .collect();
    let body = serde_json::json!({"object": "list", "data": data}).to_string();
    respond::ok(session, body.into_bytes(), &[(headers::REQUEST_ID, id)]).await
}
