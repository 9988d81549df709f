//! Regional ingress: the listener of a region for gateways, and the only path to its replicas.
//!
//! It enforces the residency policy a second time: a request carries its residency policy, and a region that is not
//! part of it rejects the request before reading the body. It asks [`Spoke`] for a replica, forwards the request
//! ([`attempts`]), and responds to the report requests of gateways. `Spoke` is shared with the agent that talks to the
//! hub; neither waits for the other. The ingress keeps its own observations of each replica separately ([`replicas`]),
//! and shows them at `/status`. Requests that find no ready replica are held for the one that is started for them
//! ([`hold`]). The spoke that scales the region shares its replicas with the other spokes ([`peers`]).

mod arrival;
mod attempts;
mod follow;
mod hold;
mod operations;
mod peers;
mod probe;
mod replicas;
mod request;
mod scrape;

use crate::body_memory::BodyLimits;
use crate::circuits::random_draw;
use crate::config::Timeouts;
use crate::hop::GatewayAcceptor;
use crate::listener::{AfterResponse, Listener, PeerKind, RequestHandler, StopReason, peer};
use crate::metrics::{IngressMetrics, ListenerMetrics, RequestOutcome};
use crate::receipts::{CommitFailed, ReceiptsConfig, ReceiptsError, Recorder};
use crate::relay::{self, ForwardedHeaders};
use crate::request_body::BodyReader;
use crate::respond::{self, ForwardError, Rejection};
use crate::upstream::Upstream;
use arrival::Arrival;
use gateway_core::endpoint;
use gateway_core::memory::BodyOwner;
use gateway_core::receipt::entry::Role;
use gateway_core::residency::AllowedRegions;
use gateway_core::timing;
use hold::Hold;
use identity::ConnectionFailures;
use identity::Transport;
use operations::OperationsHandler;
use pingora::protocols::http::ServerSession;
use regions::IpNetwork;
use regions::catalogue::Catalogue;
use regions::id::{DeploymentName, RegionId};
use regions::residency::ResidencyPolicy;
use regions::set::RegionIndex;
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::priority::Priority;
use replicas::Replicas;
use request::{ForwardedRequest, deployment, milliseconds, revision, text, unreadable};
use resolver::Resolver;
use scheduler_api::paths;
use scheduler_api::report::delta::ReportEncoder;
use scheduler_api::report::{ExchangeRequest, ExchangeRequestV1, GATEWAYS_MAX};
use scheduler_core::spoke::hold::HELD_MAX;
use scheduler_core::spoke::{RequestedRevision, Spoke, TrafficOrigin};
pub use scrape::metrics;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use supervision::health::HealthCheck;
use supervision::task::supervise;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinSet;

/// Default request timeout.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// Time for which a stopping ingress still accepts requests while its reports say that it is draining: three report
/// periods, so every gateway has received one.
const LAME_DUCK: Duration = Duration::from_millis(700);
/// Timeout for the last receipts to reach the disk after that.
const LAST_RECEIPTS: Duration = Duration::from_secs(5);
/// Maximum number of open gateway connections: one for each held request; one report connection for each gateway, so
/// that held requests cannot block reports; and as many requests in flight as an ingress without held requests had. At
/// 15 kB for an idle one with TLS (docs/benchmarks.md) that is 250 MB.
const CONNECTIONS_MAX: usize = 16_384;
/// Maximum time for which a stopping ingress waits for another spoke to replace the replicas that end with this one. With
/// the drain of the listener after it, a supervisor's usual 90 s suffice.
const HANDOVER_MAX: Duration = Duration::from_secs(20);
/// Interval of checks whether it has.
const HANDOVER_PERIOD: Duration = Duration::from_millis(50);
const _: () =
    assert!(CONNECTIONS_MAX > HELD_MAX + GATEWAYS_MAX, "reports have connections beside all held requests");
/// Bytes of JSON text a token, roughly; first estimate of the cost of a request, before it is tokenized.
const BYTES_PER_TOKEN: u64 = 4;

/// Configuration of an ingress.
pub struct IngressConfig {
    /// Address for gateways.
    pub listen: SocketAddr,
    /// Region of the ingress.
    pub region: RegionId,
    /// Catalogue of clouds and regions.
    pub catalogue: Arc<Catalogue>,
    /// Receipts, if they are configured.
    pub receipts: Option<ReceiptsConfig>,
    /// Transport security of the listener and of connections to replicas; without an identity, plaintext.
    pub transport: Transport,
    /// Plaintext address for operators; without it, operators use the address for gateways.
    pub operations: Option<SocketAddr>,
    /// Signals between the ingress and the scaler.
    pub signals: IngressSignals,
    /// Resolver of the names of replicas.
    pub resolver: Resolver,
    /// Load balancers whose connections begin with a PROXY protocol header; without one, gateways connect directly.
    pub proxy_protocol_from: Vec<IpNetwork>,
}

/// Signals between the ingress of a region and its scaler, in place of polling.
#[derive(Clone, Debug, Default)]
pub struct IngressSignals {
    /// Signal to the scaler: a request waits for a deployment that has no replica, or another spoke has sent news.
    pub wake: Arc<Notify>,
    /// Signal to the ingress: replicas were added or removed, or `Spoke` has new estimates for provisioning ones.
    pub changed: Arc<Notify>,
    /// Sequence number of the state to share with the other spokes of the region.
    pub shared: Arc<watch::Sender<u64>>,
}

/// Error that prevents an ingress from running.
#[derive(Debug, thiserror::Error)]
pub enum IngressError {
    /// The region is not in the catalogue.
    #[error(
        "region \"{0}\" is not in the catalogue, so its jurisdictions are unknown; use a region of the catalogue"
    )]
    UnknownRegion(RegionId),
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {source}; choose another port, or stop the process that uses it")]
    Bind {
        /// Address.
        address: SocketAddr,
        /// Cause.
        source: io::Error,
    },
    /// Receipts cannot be written.
    #[error("{0}")]
    Receipts(#[from] ReceiptsError),
    /// TLS cannot be set up.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    /// The body threads cannot be started.
    #[error("the threads for large bodies cannot be started: {0}")]
    Threads(#[source] io::Error),
}

/// Runs an ingress until `shutdown`, then drains. Calls `ready` once, when gateways can connect.
///
/// # Errors
///
/// Fails if the region is unknown or the address cannot be bound. Later failures do not end it.
pub async fn run(
    config: IngressConfig,
    spoke: Arc<Mutex<Spoke>>,
    shutdown: impl Future<Output = ()>,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), IngressError> {
    let IngressConfig {
        listen,
        region,
        signals,
        catalogue,
        receipts,
        transport,
        operations,
        resolver,
        proxy_protocol_from,
    } = config;
    let here = catalogue.index_of(&region).ok_or_else(|| IngressError::UnknownRegion(region.clone()))?;
    let bind = async |address| {
        Listener::bind(address).await.map_err(|source| IngressError::Bind { address, source })
    };
    let refused: Arc<ConnectionFailures> = Arc::default();
    let acceptor =
        transport.identity().map(|identity| GatewayAcceptor::new(identity, refused.clone())).transpose()?;
    let listener = bind(listen).await?.for_gateways(acceptor).with_failure_counters(refused.clone());
    let listener = listener.with_connections_max(CONNECTIONS_MAX).with_proxy_protocol(proxy_protocol_from);
    let operations = match operations {
        Some(address) => Some(bind(address).await?),
        None => None,
    };
    let (recorder, writer) = match &receipts {
        Some(receipts) => {
            let (recorder, writer) = Recorder::start(receipts, Role::Spoke, &region, Vec::new())?;
            (Some(recorder), Some(writer))
        }
        None => (None, None),
    };
    let IngressSignals { wake, changed, shared } = signals;
    let hold = Arc::new(Hold::new(spoke.clone(), wake.clone()));
    let to_peers = Arc::new(Upstream::to_regions(&transport, true, &catalogue, resolver.clone())?);
    let mut tasks = JoinSet::new();
    if transport.identity().is_none() && !listen.ip().is_loopback() {
        // Every process that reaches the port can send requests. Configure certificates unless the network is trusted.
        tracing::warn!(%listen, "ingress accepts plaintext connections because of [identity]");
    }
    if let Some(identity) = transport.identity().cloned() {
        tasks.spawn(supervise("identity", move || identity.clone().follow()));
    }
    ready(listener.address());
    // Gateways know from the reports that the ingress is draining.
    let timeouts = Timeouts { lame_duck: Duration::ZERO, ..Timeouts::default() };
    let ingress = Ingress {
        region,
        here,
        upstream: Upstream::to_replicas(&transport, &catalogue, resolver)?,
        catalogue,
        spoke: spoke.clone(),
        report_encoder: Mutex::new(ReportEncoder::default()),
        replicas: Arc::new(Replicas::new(spoke.clone(), hold.clone())),
        hold,
        health: HealthCheck::default(),
        body_reader: BodyReader::new(BodyLimits::from_gateways(timeouts.body))
            .map_err(IngressError::Threads)?,
        metrics: IngressMetrics::default(),
        refused,
        listener: listener.metrics(),
        connections: listener.permits(),
        recorder,
        scaler_wake: wake,
        changed: changed.clone(),
    };
    let stop = async {
        shutdown.await;
        spoke.lock().set_draining();
        // Tell the other spokes.
        shared.send_modify(|_| {});
        tokio::time::sleep(LAME_DUCK).await;
        handed_over(&spoke).await;
        StopReason::Shutdown
    };
    let ingress = Arc::new(ingress);
    tasks.spawn({
        let ingress = ingress.clone();
        supervise("replicas", move || follow::replicas(ingress.clone(), changed.clone()))
    });
    tasks.spawn({
        let (ingress, shared) = (ingress.clone(), shared.clone());
        supervise("exchange with spokes", move || {
            peers::follow(ingress.clone(), to_peers.clone(), shared.subscribe())
        })
    });
    let drained = watch::Sender::new(false);
    let operators = async {
        if let Some(operations) = operations {
            let mut drained = drained.subscribe();
            let stop = async {
                // The sender outlives this task.
                drained.wait_for(|drained| *drained).await.ok();
                StopReason::Shutdown
            };
            operations.serve(Arc::new(OperationsHandler(ingress.clone())), stop, timeouts).await;
        }
    };
    let gateways = async {
        listener.serve(ingress.clone(), stop, timeouts).await;
        drained.send_replace(true);
    };
    tokio::join!(gateways, operators);
    tasks.shutdown().await;
    if let Some(writer) = writer {
        writer.finish(LAST_RECEIPTS).await;
    }
    Ok(())
}

/// Waits until another spoke has drained the replicas that end with this one, at most [`HANDOVER_MAX`].
async fn handed_over(spoke: &Mutex<Spoke>) {
    let drained = async {
        while spoke.lock().awaits_handover(Instant::now()) {
            tokio::time::sleep(HANDOVER_PERIOD).await;
        }
    };
    // After that, the other spokes hold requests until a replica has started.
    tokio::time::timeout(HANDOVER_MAX, drained).await.ok();
}

struct Ingress {
    region: RegionId,
    here: RegionIndex,
    catalogue: Arc<Catalogue>,
    spoke: Arc<Mutex<Spoke>>,
    report_encoder: Mutex<ReportEncoder>,
    replicas: Arc<Replicas>,
    hold: Arc<Hold>,
    health: HealthCheck,
    upstream: Upstream,
    body_reader: BodyReader,
    metrics: IngressMetrics,
    /// Rejected connections.
    refused: Arc<ConnectionFailures>,
    /// Metrics of its listener, and the semaphore with a permit for each connection that can still be opened.
    listener: Arc<ListenerMetrics>,
    connections: Arc<Semaphore>,
    recorder: Option<Recorder>,
    /// Signals to the scaler, and to the probes of replicas.
    scaler_wake: Arc<Notify>,
    changed: Arc<Notify>,
}

impl RequestHandler for Ingress {
    async fn handle(&self, session: &mut ServerSession) -> AfterResponse {
        let arrived = Instant::now();
        let head = session.req_header();
        let (method, path) = (head.method.clone(), head.uri.path().to_owned());
        if let Some(after) = self.operators(session, method.as_str(), &path).await {
            return after;
        }
        let mut arrival = None;
        let (is_gateway, is_spoke) = match peer(session) {
            Some(PeerKind::Spoke) => (false, true),
            Some(PeerKind::Unauthenticated) => (true, true),
            Some(PeerKind::Gateway | PeerKind::Client) | None => (true, false),
        };
        let served = match (method.as_str(), path.as_str()) {
            ("POST", paths::EXCHANGE) if is_gateway => self.exchange(session).await,
            ("POST", paths::PEER_EXCHANGE) if is_spoke => self.peer_exchange(session).await,
            (method, path) => match endpoint::replica_endpoint(method, path).filter(|_| is_gateway) {
                Some(path) => {
                    let arrival = arrival.insert(Arrival::open(self, session, path, arrived));
                    self.forward(session, path, arrived, arrival).await
                }
                None => Err(ForwardError::Rejected(Rejection::new(
                    ErrorCode::NotFound,
                    "The ingress has no such path.",
                ))),
            },
        };
        let (after, outcome) = match served {
            Ok(AfterResponse::Reuse) => (AfterResponse::Reuse, RequestOutcome::of_session(session)),
            Ok(AfterResponse::Close) => {
                (AfterResponse::Close, RequestOutcome::of_session(session).truncated())
            }
            Err(ForwardError::ClientDisconnected) => {
                (AfterResponse::Close, RequestOutcome::ClientDisconnected)
            }
            Err(ForwardError::Rejected(rejection)) => {
                let region = [(headers::REGION, self.region.as_str())];
                (respond::reject(session, &rejection, &region).await, RequestOutcome::of_session(session))
            }
        };
        if let Some(mut arrival) = arrival {
            arrival.ended(session, outcome);
        }
        after
    }
}

impl Ingress {
    async fn exchange(&self, session: &mut ServerSession) -> Result<AfterResponse, ForwardError> {
        let body = self.body_reader.body(session, BodyOwner::default()).await?;
        let question: ExchangeRequestV1 = serde_json::from_slice(&body.bytes).map_err(|error| {
            Rejection::new(ErrorCode::InvalidJson, format!("Invalid exchange request: {error}."))
        })?;
        let question = ExchangeRequest::try_from(question).map_err(|error| {
            Rejection::new(ErrorCode::InvalidValue, format!("Invalid exchange request: {error}."))
        })?;
        self.metrics.exchanges.add(1);
        let now = Instant::now();
        let needs_loads = self.report_encoder.lock().needs_loads(now);
        let (report, loads) = {
            let mut spoke = self.spoke.lock();
            (spoke.exchange(&question, now), needs_loads.then(|| spoke.loads(now)))
        };
        // Not under the lock of the spoke, which every request takes: an update compares the loads of all deployments.
        let report = {
            let mut encoder = self.report_encoder.lock();
            if let Some(loads) = loads {
                encoder.update(loads, now);
            }
            encoder.encode(report, &question.gateway, question.known)
        };
        self.metrics.loads_sent.add(report.deployments.len() as u64);
        let body = serde_json::to_vec(&report).expect("a report serialises to JSON");
        Ok(respond::ok(session, body, &[]).await)
    }

    async fn forward(
        &self,
        session: &mut ServerSession,
        path: &'static str,
        arrived: Instant,
        arrival: &mut Arrival<'_>,
    ) -> Result<AfterResponse, ForwardError> {
        let policy = self.allowed_here(session)?;
        let deployment = deployment(session)?;
        self.check_deployment_policy(&deployment)?;
        if arrival.is_locked() {
            self.check_policy_age()?;
        }
        if !arrival.reserve_receipt() {
            return Err(self.no_receipt().into());
        }
        let deadline = arrived + milliseconds(session, headers::TIMEOUT_MS)?.unwrap_or(TIMEOUT_DEFAULT);
        let origin = if session.get_header(headers::SPILLOVER).is_some() {
            TrafficOrigin::Spillover
        } else {
            TrafficOrigin::Local
        };
        let body = self.body_reader.body(session, BodyOwner::default()).await?;
        let priority = text(session, headers::PRIORITY)?;
        let request = ForwardedRequest {
            id: text(session, headers::REQUEST_ID)?.unwrap_or_default().to_owned(),
            tenant: text(session, headers::TENANT)?.map(str::to_owned),
            headers: ForwardedHeaders::of(session, &[]),
            path,
            deployment,
            body: body.bytes.clone(),
            policy,
            revision: RequestedRevision {
                required: revision(session, headers::REQUIRED_REVISION)?,
                known: revision(session, headers::MODEL_REVISION)?,
            },
            tokens: (body.bytes.len() as u64 / BYTES_PER_TOKEN).max(1),
            deadline,
            draw: random_draw(),
            priority: priority.and_then(|priority| priority.parse().ok()).unwrap_or(Priority::Interactive),
            elsewhere: milliseconds(session, headers::ALTERNATIVE_MS)?,
        };
        arrival.commit().await.map_err(|CommitFailed| self.no_receipt())?;
        self.spoke.lock().arrived(&request.deployment, request.tokens, origin, Instant::now());
        let (response, attempt, held) = tokio::select! {
            biased;
            result = self.send_to_replica(&request) => result?,
            () = relay::client_disconnected(session) => return Err(ForwardError::ClientDisconnected),
        };
        let reported =
            response.head.headers.get(headers::SERVER_TIMING).and_then(|value| value.to_str().ok());
        let timing = timing::region_header(reported, arrived.elapsed());
        let held = held.headers();
        let mut extra =
            vec![(headers::REGION, self.region.as_str()), (headers::SERVER_TIMING, timing.as_str())];
        extra.extend(held.iter().map(|(name, value)| (*name, value.as_str())));
        let after = relay::forward_response(session, response, &self.upstream, &extra).await;
        attempt.finish();
        Ok(after)
    }

    /// Invariant 1 (Residency), at the receiving end: a request whose policy excludes this region is rejected before
    /// its body is read.
    fn allowed_here(&self, session: &ServerSession) -> Result<AllowedRegions, Rejection> {
        let policy = match text(session, headers::RESIDENCY)? {
            Some(policy) => policy.parse().map_err(|error| unreadable(headers::RESIDENCY, &error))?,
            None => ResidencyPolicy::Anywhere,
        };
        let allowed = AllowedRegions::of_policy(&policy, &self.catalogue);
        if allowed.contains(self.here) {
            return Ok(allowed);
        }
        // A gateway sent the request to a region that may not see it. Compare the catalogue and the version of that gateway.
        tracing::error!(region = %self.region, %policy, "request rejected because its residency policy excludes this region");
        let message =
            format!("Region {} is not part of the residency '{policy}'; the body was not read.", self.region);
        Err(Rejection::new(ErrorCode::NotResidentHere, message).of(headers::RESIDENCY))
    }

    /// Checks the same against a gateway with an older route table: a policy that was narrowed since applies at once.
    fn check_deployment_policy(&self, deployment: &DeploymentName) -> Result<(), Rejection> {
        if !self.spoke.lock().forbids(deployment) {
            return Ok(());
        }
        let region = &self.region;
        // Expected for seconds after a residency policy was narrowed. Later, check that all gateways reach a hub.
        tracing::warn!(%region, %deployment, "request rejected because the newest route table excludes this region");
        let message = format!("Region {region} is no longer part of the residency of '{deployment}'.");
        Err(Rejection::new(ErrorCode::NotResidentHere, message).of(headers::DEPLOYMENT))
    }

    /// Rejects the request if the policy is too old: a policy that was narrowed since the last contact with a hub is
    /// unknown here.
    fn check_policy_age(&self) -> Result<(), Rejection> {
        let age = self.spoke.lock().policy_age(Instant::now());
        let Some((age, max)) = age.filter(|(age, max)| age > max) else { return Ok(()) };
        let message = format!(
            "This deployment is locked to regions, and no hub has confirmed its residency policy to region {} for {} minutes, \
             longer than policy_max_age ({} minutes); restore its connection to a hub.",
            self.region,
            age.as_secs() / 60,
            max.as_secs() / 60
        );
        Err(Rejection::new(ErrorCode::PolicyTooOld, message))
    }

    /// Returns the error of a request without a durable receipt. Another allowed region may be able to write one.
    fn no_receipt(&self) -> Rejection {
        let message = format!(
            "Every request of a locked deployment requires a receipt, which region {} cannot write at the moment.",
            self.region
        );
        Rejection::new(ErrorCode::NotReady, message)
    }
}
