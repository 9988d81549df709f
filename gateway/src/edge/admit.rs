//! From a request's head and body to what the decision hangs on: who asks, for what, for how long, and who may see it.

use super::account::Account;
use super::forward::{Edge, NotForwarded};
use super::known::About;
use super::refusals::{
    bad_token, no_bulk, no_model_field, no_model_named, no_region_permitted, not_let_in, residency_too_long,
    unknown_model, unreadable_ask, unreadable_body,
};
use super::shedding::{Place, Wants, Way, left};
use super::view::{RoutedDeployment, Terms, View};
use super::watch::{chance, chances};
use crate::intake::{Body, NoBody};
use crate::names;
use crate::relay::Crossing;
use crate::respond::Refusal;
use gateway_core::body::{self, BodySummary};
use gateway_core::circuit::Permille;
use gateway_core::endpoint::{self, ForwardTarget, ModelField};
use gateway_core::jwt;
use gateway_core::keys::{Credential, Digest, KeyRing};
use gateway_core::latency::SizeClass;
use gateway_core::memory::BodyOwner;
use gateway_core::priority::{NoBulk, Priority};
use gateway_core::request_options::{OptionHeaders, RequestOptions};
use gateway_core::residency::{AllowedRegions, Residency};
use gateway_core::tenant::{Cost, Tenant};
use gateway_core::trail::PolicyVersion;
use http::header::{AUTHORIZATION, CONTENT_LENGTH};
use pingora::protocols::http::ServerSession;
use rand::Rng;
use regions::ModelRevision;
use regions::geography::GeoPoint;
use regions::id::DeploymentName;
use regions::residency::ResidencyPolicy;
use regions::set::{RegionIndex, RegionSet};
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// The largest body that is read on the thread of its connection: at some 0.3 to 2 GB/s, less than a millisecond.
const READ_AT_ONCE_BYTES_MAX: usize = 256 << 10;
/// Bytes of a body that are free of charge.
const FREE_BODY_BYTES: usize = 4 << 10;

/// The longest request identifier that is taken from a client.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// A request that is let in, understood, and routed somewhere.
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
    pub(super) crossing: Crossing,
    pub(super) body: Body,
    /// Drawn once, so that whoever is asked for it is chosen alike everywhere.
    pub(super) chance: Permille,
    /// Where it comes from, as a plan has it: this gateway's place, or the region nearest to a client whose place is known.
    pub(super) origin: RegionIndex,
    /// The region that was drawn by the plan's weights.
    pub(super) drawn: Option<RegionIndex>,
    /// The region that is asked before all others that may be.
    pub(super) first: Option<RegionIndex>,
    /// It is the overflow of a nearer one.
    pub(super) overflow: bool,
    /// Its room where it would go first, for as long as it is under way.
    pub(super) _place: Option<Place>,
}

/// A tenant, and what proved it.
pub(super) struct Authenticated {
    pub(super) tenant: Arc<Tenant>,
    pub(super) key: Option<Digest>,
}

impl Request {
    /// A request for some of the inputs of this one: with another body and another cost, asked of `first` before others,
    /// and in everything else the same, the regions that may see it before all.
    /// Its answer must be of the model revision that is `required`.
    pub(super) fn piece(
        &self,
        body: Body,
        cost: Cost,
        first: RegionIndex,
        required: Option<ModelRevision>,
    ) -> Request {
        assert!(self.allowed.contains(first), "a piece goes where the whole may go (invariant 1, Residency)");
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
            crossing: self.crossing.clone(),
            body,
            // Its way is its own.
            chance: chance(),
            origin: self.origin,
            // Pieces are spread by the room that there is.
            drawn: None,
            first: Some(first),
            overflow: false,
            // The whole has the room of all its pieces.
            _place: None,
        }
    }

    /// Whether `region` has offered to take it from a nearer one.
    pub(super) fn overflows_to(&self, region: RegionIndex) -> bool {
        self.overflow && self.first == Some(region)
    }

    /// What of it its way hangs on.
    pub(super) fn about(&self) -> About<'_> {
        let (size, chance) = (SizeClass::of(self.cost.tokens), self.chance);
        About {
            deployment: &self.deployment,
            priority: self.priority,
            size,
            chance,
            uses_engine: endpoint::uses_engine(self.path),
        }
    }
}

impl Edge {
    /// Authenticates the request: the tenant, and its key unless it was a token.
    pub(super) fn tenant(&self, session: &ServerSession, ring: &KeyRing) -> Result<Authenticated, Refusal> {
        let authorization = session.get_header(AUTHORIZATION).map(http::HeaderValue::as_bytes);
        let keys = [single(session, headers::API_KEY)?, single(session, headers::X_API_KEY)?];
        let credential = Credential::of_request(authorization, keys).map_err(not_let_in)?;
        match ring.tenant(&credential) {
            Ok(tenant) => Ok(Authenticated { tenant: tenant.clone(), key: Some(credential.digest) }),
            Err(_) if !self.tokens.none() && jwt::has_token_shape(credential.secret) => {
                let tenant = self.tokens.tenant(&credential, ring, SystemTime::now()).map_err(bad_token)?;
                Ok(Authenticated { tenant, key: None })
            }
            Err(problem) => Err(not_let_in(problem)),
        }
    }

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
        self.room_at_the_head(target, view, &tenant, &ask, declared_length(session), arrived)?;
        let body =
            self.intake.body(session, self.owner(session, &tenant)).await.map_err(|none| match none {
                NoBody::Refused(_, refusal) => NotForwarded::Refused(refusal),
                NoBody::ClientGone => NotForwarded::ClientGone,
            })?;
        let reading = self.body_of(target, &body, &tenant).await;
        let reading = reading.map_err(|refusal| refusal.having_processed(body.bytes.len()))?;
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
        let ([chance, leaves, draw], left) = (chances(), left(ask.timeout, arrived));
        let planned = self.planned.borrow().clone();
        let way = Way {
            view,
            routed,
            allowed: **allowed,
            client: ask.client,
            chance,
            draw,
            place: self.place,
            weights: planned.as_deref(),
        };
        let wants = Wants { tenant: &tenant, residency, priority, tokens: cost.tokens, left, chance: leaves };
        let room = self.room(&way, &wants)?;
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
            registered: *registered,
            revision: *revision,
            required: None,
            may_sleep: deployment.scaling.min == 0,
            path: target.path,
            crossing: Crossing::of(session, &[(headers::PRIORITY, priority.as_str())]),
            body,
            chance,
            origin: room.origin,
            drawn: room.drawn,
            first: room.overflow,
            overflow: room.overflow.is_some(),
            _place: room.place,
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
        body: &Body,
        tenant: &Tenant,
    ) -> Result<BodySummary, Refusal> {
        if target.model == ModelField::Bodiless {
            return Ok(BodySummary::default());
        }
        let reading = if body.bytes.len() <= READ_AT_ONCE_BYTES_MAX {
            body::read(&body.bytes)
        } else {
            let bytes = body.bytes.clone();
            self.intake.cpu.run(Some(tenant.index), move || body::read(&bytes)).await
        };
        reading.map_err(unreadable_body)
    }

    fn ask(&self, session: &ServerSession) -> Result<RequestOptions, Refusal> {
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
fn least_tokens(body: &Body) -> u64 {
    Cost::at_least(body.bytes.len().saturating_sub(FREE_BODY_BYTES) as u64).tokens
}

fn peer(session: &ServerSession) -> Option<SocketAddr> {
    session.client_addr().and_then(|address| address.as_inet()).copied()
}

/// The deployment that a request is for: the one that its path names, or its body, or, where its ecosystem has no name
/// for one, the only one that its tenant may use.
fn asked_for<'a>(
    target: ForwardTarget<'_>,
    in_body: Option<String>,
    view: &'a View,
    tenant: &Tenant,
) -> Result<&'a RoutedDeployment, Refusal> {
    let named = target.deployment.map(str::to_owned).or(in_body);
    match (named, target.model) {
        (Some(name), _) => view.deployment(&name, tenant).ok_or_else(|| unknown_model(&name, view, tenant)),
        (None, ModelField::Required) => Err(no_model_field()),
        (None, ModelField::Optional | ModelField::Bodiless) => {
            view.only_deployment(tenant).ok_or_else(|| no_model_named(target.path, view, tenant))
        }
    }
}

/// The client's identifier if it can stand in a header and a log line, else a new one.
pub(super) fn request_id(session: &ServerSession) -> String {
    let given = header(session, headers::REQUEST_ID).and_then(|value| std::str::from_utf8(value).ok());
    let usable = |id: &&str| {
        (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
    };
    match given.filter(usable) {
        Some(id) => id.to_owned(),
        None => format!("req-{:032x}", rand::rng().random::<u128>()),
    }
}

/// The length that a request declares; of one that declares none nothing is known but that it has some.
pub(super) fn declared_length(session: &ServerSession) -> u64 {
    let declared = session
        .get_header(CONTENT_LENGTH)
        .map(http::HeaderValue::as_bytes)
        .and_then(|value| std::str::from_utf8(value).ok());
    declared.and_then(|length| length.parse().ok()).unwrap_or(0)
}

pub(super) fn header<'a>(session: &'a ServerSession, name: &'static str) -> Option<&'a [u8]> {
    session.get_header(names::name(name)).map(|value| value.as_bytes())
}

/// Headers that say who asks or what the body is: of two values, each reader could take another.
const ONCE: [&str; 6] =
    ["authorization", "api-key", "x-api-key", "content-type", "expect", "idempotency-key"];

/// Refuses a request in which one of them stands more than once.
pub(super) fn none_repeated(session: &ServerSession) -> Result<(), Refusal> {
    let headers = &session.req_header().headers;
    match ONCE.iter().find(|name| headers.get_all(**name).iter().nth(1).is_some()) {
        Some(name) => Err(repeated(name)),
        None => Ok(()),
    }
}

fn repeated(name: &'static str) -> Refusal {
    let message = format!("The header '{name}' is there more than once; send it once.");
    Refusal::new(ErrorCode::InvalidHeader, message).of(name)
}

/// A header that may be there once: of two, each could be the one that was meant, and for residency the narrower
/// would be lost.
fn single<'a>(session: &'a ServerSession, name: &'static str) -> Result<Option<&'a [u8]>, Refusal> {
    let given = header(session, name);
    if given.is_some() && session.req_header().headers.get_all(name).iter().count() > 1 {
        return Err(repeated(name));
    }
    Ok(given)
}
