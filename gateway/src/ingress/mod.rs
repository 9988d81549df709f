//! The regional ingress: the door of a region, and the only way to its replicas.
//!
//! It holds the residency policy a second time: a request carries the residency under which it travels, and a region that is not part
//! of it refuses before it has read the body. It asks [`Spoke`] which replica, passes the request on ([`attempts`]), and
//! answers each edge's question for a report. `Spoke` is shared with the agent that speaks to the hub; neither waits for
//! the other. What the ingress's own requests have seen of each replica it keeps beside it ([`replicas`]), and shows at
//! `/status`. Requests that find no replica ready wait here for the one that is started for them ([`hold`]).

mod arrival;
mod attempts;
mod follow;
mod hold;
mod operations;
mod probe;
mod replicas;
mod scrape;

use crate::config::Timeouts;
use crate::hop::{Credentials, Doorkeeper};
use crate::intake::{BodyLimits, Intake, NoBody};
use crate::listener::{AfterAnswer, Door, Leave, Listener};
use crate::metrics::{Ending, IngressMetrics, ListenerMetrics};
use crate::receipts::{NoReceipt, ReceiptsConfig, ReceiptsError, Recorder};
use crate::relay::{self, Crossing};
use crate::respond::{self, Refusal};
use crate::upstream::Upstream;
use arrival::Arrival;
use attempts::Passing;
use gateway_core::endpoint;
use gateway_core::memory::BodyOwner;
use gateway_core::receipt::entry::Role;
use gateway_core::residency::AllowedRegions;
use gateway_core::timing;
use hold::Hold;
use operations::Operators;
use pingora::protocols::http::ServerSession;
use regions::ModelRevision;
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, RegionId};
use regions::residency::ResidencyPolicy;
use regions::set::RegionIndex;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;
use replicas::{Replicas, chance};
use scheduler_core::spoke::hold::HELD_MAX;
use scheduler_core::spoke::{GATEWAYS_MAX, Question, RevisionAsked, Spoke, Whose};
use scheduler_core::wire::report::{ExchangeRequestV1, ReportV1};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use supervision::health::Health;
use supervision::task::supervise;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

/// How long a request may take when whoever sends it does not say.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// How long an ingress that is told to stop still takes requests, while its reports say that it is draining: three
/// reports, so that every edge has heard it.
const LAME_DUCK: Duration = Duration::from_millis(700);
/// How long the last receipts may take to reach the disk after that.
const LAST_RECEIPTS: Duration = Duration::from_secs(5);
/// Connections of edges that are open at once: as many as there may be requests that are held, each of which has one; a report
/// from each gateway that there may be, so that full lines crowd out nobody's word; and as many requests under way as a door
/// without any lines had. At about 20 KiB each that is 320 MiB.
const CONNECTIONS_MAX: usize = 16_384;
const _: () = assert!(CONNECTIONS_MAX > HELD_MAX + GATEWAYS_MAX, "reports have room beside all who are held");
/// Bytes of JSON text a token, roughly; a first estimate of what a request costs, before anybody has tokenized it.
const BYTES_PER_TOKEN: u64 = 4;

/// What an ingress needs to know.
pub struct IngressConfig {
    /// Where edges connect.
    pub listen: SocketAddr,
    /// The region whose door this is.
    pub region: RegionId,
    /// Clouds and regions.
    pub catalogue: Arc<Catalogue>,
    /// How receipts are kept, if they are.
    pub receipts: Option<ReceiptsConfig>,
    /// What the door shows to edges and whom it believes; without it, it is open and in the clear.
    pub tls: Option<Arc<Credentials>>,
    /// Where operators connect, in the clear; without it, where edges do.
    pub operations: Option<SocketAddr>,
    /// Between this door and whoever starts replicas.
    pub signals: Signals,
}

/// How the door of a region and whoever starts replicas for it wake each other; neither asks whether there is news.
#[derive(Clone, Debug, Default)]
pub struct Signals {
    /// Rung by the door: a request waits for a deployment that has no replica.
    pub wake: Arc<Notify>,
    /// Rung by whoever starts them: replicas have come or gone, or what `Spoke` knows of those that are ordered is different.
    pub changed: Arc<Notify>,
}

/// Why an ingress cannot run.
#[derive(Debug, thiserror::Error)]
pub enum IngressError {
    /// The region is in no catalogue.
    #[error("region \"{0}\" is not in the catalogue, so nothing is known of its policy")]
    UnknownRegion(RegionId),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose another port or stop whoever has it")]
    Bind {
        /// Which.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Receipts cannot be kept.
    #[error("{0}")]
    Receipts(#[from] ReceiptsError),
    /// TLS cannot be set up.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    /// The threads for large bodies cannot be started.
    #[error("the threads for large bodies cannot be started: {0}")]
    Threads(#[source] io::Error),
    /// The client that asks replicas for their status cannot be made.
    #[error("the HTTP client for replicas cannot be made: {0}")]
    Client(#[from] reqwest::Error),
}

/// Runs an ingress until `shutdown`, then drains. Calls `ready` once, when edges can connect.
///
/// # Errors
///
/// When the region is unknown or the address cannot be bound. Nothing that happens later ends it.
pub async fn run(
    config: IngressConfig,
    spoke: Arc<Mutex<Spoke>>,
    shutdown: impl Future<Output = ()>,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), IngressError> {
    let IngressConfig { listen, region, signals, catalogue, receipts, tls, operations } = config;
    let here = catalogue.index_of(&region).ok_or_else(|| IngressError::UnknownRegion(region.clone()))?;
    let bind = async |address| {
        Listener::bind(address).await.map_err(|source| IngressError::Bind { address, source })
    };
    let metrics = IngressMetrics::new();
    let doorkeeper = tls.clone().map(|shown| Doorkeeper::with(shown, metrics.refused.clone())).transpose()?;
    let listener = bind(listen).await?.kept_by(doorkeeper).refusing(metrics.refused.clone());
    let listener = listener.holding(CONNECTIONS_MAX);
    let operations = match operations {
        Some(address) => Some(bind(address).await?),
        None => None,
    };
    let (recorder, writing) = match &receipts {
        Some(receipts) => {
            let (recorder, writing) = Recorder::start(receipts, Role::Spoke, &region, Vec::new())?;
            (Some(recorder), Some(writing))
        }
        None => (None, None),
    };
    let client = reqwest::Client::builder().no_proxy().build()?;
    let Signals { wake, changed } = signals;
    let hold = Arc::new(Hold::new(spoke.clone(), wake));
    let mut tasks = JoinSet::new();
    if tls.is_none() && !listen.ip().is_loopback() {
        tracing::warn!(%listen, "requests come in the clear, as [tls] says");
    }
    if let Some(credentials) = tls {
        tasks.spawn(supervise("credentials", move || credentials.clone().follow()));
    }
    ready(listener.address());
    // Edges know from the reports that it is leaving.
    let timeouts = Timeouts { lame_duck: Duration::ZERO, ..Timeouts::default() };
    let door = Ingress {
        region,
        here,
        catalogue,
        spoke: spoke.clone(),
        replicas: Arc::new(Replicas::new(spoke.clone(), hold.clone())),
        hold,
        health: Health::default(),
        upstream: Upstream::within_the_region(),
        intake: Intake::new(BodyLimits::from_gateways(timeouts.body)).map_err(IngressError::Threads)?,
        metrics,
        listener: listener.counts(),
        connections: listener.room(),
        recorder,
    };
    let leave = async {
        shutdown.await;
        spoke.lock().set_draining();
        tokio::time::sleep(LAME_DUCK).await;
        Leave::Stopping
    };
    let door = Arc::new(door);
    tasks.spawn({
        let door = door.clone();
        supervise("replicas", move || follow::replicas(door.clone(), client.clone(), changed.clone()))
    });
    let left = tokio::sync::watch::Sender::new(false);
    let operators = async {
        if let Some(operations) = operations {
            let mut left = left.subscribe();
            let leave = async {
                // The sender outlives this.
                left.wait_for(|left| *left).await.ok();
                Leave::Stopping
            };
            operations.serve(Arc::new(Operators(door.clone())), leave, timeouts).await;
        }
    };
    let edges = async {
        listener.serve(door.clone(), leave, timeouts).await;
        left.send_replace(true);
    };
    tokio::join!(edges, operators);
    tasks.shutdown().await;
    if let Some(writing) = writing {
        writing.finish(LAST_RECEIPTS).await;
    }
    Ok(())
}

struct Ingress {
    region: RegionId,
    here: RegionIndex,
    catalogue: Arc<Catalogue>,
    spoke: Arc<Mutex<Spoke>>,
    replicas: Arc<Replicas>,
    hold: Arc<Hold>,
    health: Health,
    upstream: Upstream,
    intake: Intake,
    metrics: IngressMetrics,
    /// What its listener has ended, and a permit for each connection that could be opened.
    listener: Arc<ListenerMetrics>,
    connections: Arc<Semaphore>,
    recorder: Option<Recorder>,
}

impl Door for Ingress {
    async fn answer(&self, session: &mut ServerSession) -> AfterAnswer {
        let arrived = Instant::now();
        let head = session.req_header();
        let (method, path) = (head.method.clone(), head.uri.path().to_owned());
        if let Some(after) = self.operators(session, method.as_str(), &path).await {
            return after;
        }
        let mut arrival = None;
        let served = match (method.as_str(), path.as_str()) {
            ("POST", "/spoke/v1/exchange") => self.exchange(session).await,
            (method, path) => match endpoint::replica_endpoint(method, path) {
                Some(path) => {
                    let arrival = arrival.insert(Arrival::open(self, session, path, arrived));
                    self.forward(session, path, arrived, arrival).await
                }
                None => {
                    Err(Ended::Refused(Refusal::new(ErrorCode::NotFound, "An ingress has no such path.")))
                }
            },
        };
        let (after, ending) = match served {
            Ok(AfterAnswer::Reuse) => (AfterAnswer::Reuse, Ending::as_told(session)),
            Ok(AfterAnswer::Close) => (AfterAnswer::Close, Ending::as_told(session).broken_off()),
            Err(Ended::ClientGone) => (AfterAnswer::Close, Ending::ClientGone),
            Err(Ended::Refused(refusal)) => {
                let region = [(headers::REGION, self.region.as_str())];
                (respond::refuse(session, &refusal, &region).await, Ending::as_told(session))
            }
        };
        if let Some(mut arrival) = arrival {
            arrival.ended(session, ending);
        }
        after
    }
}

/// Why a request has no answer from a replica.
enum Ended {
    Refused(Refusal),
    ClientGone,
}

impl From<Refusal> for Ended {
    fn from(refusal: Refusal) -> Ended {
        Ended::Refused(refusal)
    }
}

impl From<NoBody> for Ended {
    fn from(none: NoBody) -> Ended {
        match none {
            NoBody::Refused(_, refusal) => Ended::Refused(refusal),
            NoBody::ClientGone => Ended::ClientGone,
        }
    }
}

impl Ingress {
    async fn exchange(&self, session: &mut ServerSession) -> Result<AfterAnswer, Ended> {
        let body = self.intake.body(session, BodyOwner::default()).await?;
        let question: ExchangeRequestV1 = serde_json::from_slice(&body.bytes).map_err(|error| {
            Refusal::new(ErrorCode::InvalidJson, format!("No exchange request: {error}."))
        })?;
        let question = Question::try_from(question).map_err(|error| {
            Refusal::new(ErrorCode::InvalidValue, format!("No exchange request: {error}."))
        })?;
        self.metrics.exchanges.add(1);
        let report = self.spoke.lock().answer(&question, Instant::now());
        let body = serde_json::to_vec(&ReportV1::from(report)).expect("a report serialises to JSON");
        Ok(respond::ok(session, body, &[]).await)
    }

    async fn forward(
        &self,
        session: &mut ServerSession,
        path: &'static str,
        arrived: Instant,
        arrival: &mut Arrival<'_>,
    ) -> Result<AfterAnswer, Ended> {
        let policy = self.allowed_here(session)?;
        let deployment = deployment(session)?;
        self.permitted(&deployment)?;
        if arrival.is_locked() {
            self.policy_is_fresh()?;
        }
        if !arrival.promised() {
            return Err(self.no_receipt().into());
        }
        let deadline = arrived + milliseconds(session, headers::TIMEOUT_MS)?.unwrap_or(TIMEOUT_DEFAULT);
        let whose =
            if session.get_header(headers::OVERFLOW).is_some() { Whose::Overflow } else { Whose::Own };
        let body = self.intake.body(session, BodyOwner::default()).await?;
        let request = Passing {
            id: text(session, headers::REQUEST_ID)?.unwrap_or_default().to_owned(),
            tenant: text(session, headers::TENANT)?.map(str::to_owned),
            crossing: Crossing::of(session, &[]),
            path,
            deployment,
            body: body.bytes.clone(),
            policy,
            revision: RevisionAsked {
                required: revision(session, headers::REQUIRED_REVISION)?,
                known: revision(session, headers::MODEL_REVISION)?,
            },
            tokens: (body.bytes.len() as u64 / BYTES_PER_TOKEN).max(1),
            deadline,
            chance: chance(),
            band: hold::band(text(session, headers::PRIORITY)?),
            elsewhere: milliseconds(session, headers::ELSEWHERE_MS)?,
        };
        arrival.commit().await.map_err(|NoReceipt| self.no_receipt())?;
        self.spoke.lock().arrived(&request.deployment, request.tokens, whose, Instant::now());
        let (answer, sent, held) = tokio::select! {
            biased;
            answered = self.go(&request) => answered?,
            () = relay::client_gone(session) => return Err(Ended::ClientGone),
        };
        let told = answer.head.headers.get(headers::SERVER_TIMING).and_then(|value| value.to_str().ok());
        let timing = timing::region_header(told, arrived.elapsed());
        let held = held.headers();
        let mut extra =
            vec![(headers::REGION, self.region.as_str()), (headers::SERVER_TIMING, timing.as_str())];
        extra.extend(held.iter().map(|(name, value)| (*name, value.as_str())));
        let after = relay::outward(session, answer, &self.upstream, &extra).await;
        sent.answered();
        Ok(after)
    }

    /// Invariant 1 (Residency), at the receiving end: what must not be seen here is refused before its body is read.
    fn allowed_here(&self, session: &ServerSession) -> Result<AllowedRegions, Refusal> {
        let policy = match text(session, headers::RESIDENCY)? {
            Some(policy) => policy.parse().map_err(|error| unreadable(headers::RESIDENCY, &error))?,
            None => ResidencyPolicy::Anywhere,
        };
        let allowed = AllowedRegions::of_policy(&policy, &self.catalogue);
        if allowed.contains(self.here) {
            return Ok(allowed);
        }
        tracing::error!(region = %self.region, %policy, "a request came here that must not be seen here");
        let message =
            format!("Region {} is not part of the residency '{policy}'; nothing was read.", self.region);
        Err(Refusal::new(ErrorCode::NotResidentHere, message).of(headers::RESIDENCY))
    }

    /// The same against whoever sent it by a table that is older than the one in hand here: what has been narrowed since is
    /// narrower at once.
    fn permitted(&self, deployment: &DeploymentName) -> Result<(), Refusal> {
        if !self.spoke.lock().forbids(deployment) {
            return Ok(());
        }
        let region = &self.region;
        tracing::warn!(%region, %deployment, "a request came here that the newest route table does not permit here");
        let message = format!("Region {region} is no longer part of the residency of '{deployment}'.");
        Err(Refusal::new(ErrorCode::NotResidentHere, message).of(headers::DEPLOYMENT))
    }

    /// What has been narrowed since a hub last answered is not known here.
    fn policy_is_fresh(&self) -> Result<(), Refusal> {
        let age = self.spoke.lock().policy_age(Instant::now());
        let Some((age, max)) = age.filter(|(age, max)| age > max) else { return Ok(()) };
        let message = format!(
            "This deployment is locked to regions, and no hub has confirmed its residency policy to region {} for {} minutes, \
             longer than policy_max_age ({} minutes); restore its connection to a hub.",
            self.region,
            age.as_secs() / 60,
            max.as_secs() / 60
        );
        Err(Refusal::new(ErrorCode::PolicyTooOld, message))
    }

    /// Another region that the residency policy permits may be able to write one.
    fn no_receipt(&self) -> Refusal {
        let message = format!(
            "Every request of a locked deployment must leave a receipt, which region {} cannot write at the moment.",
            self.region
        );
        Refusal::new(ErrorCode::NotReady, message)
    }
}

fn deployment(session: &ServerSession) -> Result<DeploymentName, Refusal> {
    let name = text(session, headers::DEPLOYMENT)?.ok_or_else(|| {
        let message = format!("An ingress is reached through a gateway, which sets {}.", headers::DEPLOYMENT);
        Refusal::new(ErrorCode::InvalidHeader, message).of(headers::DEPLOYMENT)
    })?;
    name.parse().map_err(|error| unreadable(headers::DEPLOYMENT, &error))
}

fn milliseconds(session: &ServerSession, name: &'static str) -> Result<Option<Duration>, Refusal> {
    let value = text(session, name)?.map(str::parse::<u64>).transpose();
    value.map(|value| value.map(Duration::from_millis)).map_err(|error| unreadable(name, &error))
}

fn revision(session: &ServerSession, name: &'static str) -> Result<Option<ModelRevision>, Refusal> {
    let value = text(session, name)?.map(str::parse).transpose();
    value.map_err(|error| unreadable(name, &error))
}

fn text<'a>(session: &'a ServerSession, name: &'static str) -> Result<Option<&'a str>, Refusal> {
    if session.req_header().headers.get_all(name).iter().count() > 1 {
        return Err(unreadable(name, &"it is there more than once"));
    }
    let value = session.get_header(name);
    value.map(|value| value.to_str().map_err(|error| unreadable(name, &error))).transpose()
}

fn unreadable(header: &'static str, error: &dyn std::fmt::Display) -> Refusal {
    Refusal::new(ErrorCode::InvalidHeader, format!("{header} cannot be read: {error}.")).of(header)
}
