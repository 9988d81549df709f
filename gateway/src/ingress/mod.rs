//! Regional ingress: the listener of a region for gateways, and the only path to its replicas.
//!
//! A request, in reading order: [`pipeline`] is its path. The ingress enforces the residency policy a second time
//! ([`residency`]): a request carries its residency policy, and a region that is not part of it rejects the request
//! before reading the body. [`request`] is the request as read; [`forwarder`] asks [`Spoke`] for a replica and sends the
//! request. `Spoke` is shared with the agent that talks to the hub; neither waits for the other. The ingress keeps its
//! own observations of each replica separately ([`replicas`]), and shows them at `/status`. Requests that find no ready
//! replica are held for the one that is started for them ([`hold`]). [`arrival`] records a request when it ends.
//!
//! A region with a queue accepts durable jobs and computes them when there is capacity ([`jobs`]).
//!
//! Beside requests, [`reports`] responds to the report requests of gateways, and [`operations`] serves operators. In the
//! background, [`follow`] probes the replicas, and the spoke that scales the region shares its replicas with the other
//! spokes ([`peers`]). [`components`] puts the parts together.

mod arrival;
mod components;
mod deployment_rows;
mod follow;
mod forwarder;
mod hold;
mod jobs;
mod operations;
mod peers;
mod pipeline;
mod probe;
mod refusals;
mod replicas;
mod report_streams;
mod reports;
mod request;
mod residency;
mod scrape;
mod spans;

use crate::config::Timeouts;
use crate::hop::GatewayAcceptor;
use crate::listener::{Listener, StopReason};
use crate::receipts::{ReceiptsConfig, ReceiptsError, Recorder, WriterHandle};
use components::Ingress;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use gateway_core::receipt::entry::Role;
use identity::ConnectionFailures;
use identity::Transport;
use jobs::RegionalJobQueue;
pub use jobs::{JobsConfig, JobsError};
use operations::ListenerUsage;
use regions::IpNetwork;
use regions::catalogue::Catalogue;
use regions::id::RegionId;
use report_streams::ALL_STREAMS_MAX;
use resolver::Resolver;
use scheduler_api::report::GATEWAYS_MAX;
use scheduler_core::spoke::Spoke;
use scheduler_core::spoke::hold::HELD_MAX;
pub use scrape::metrics;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;
use supervision::task::{contained, essential};
use telemetry::{ExportError, MetricsConfig, Process, TraceExport, Tracer, TracingConfig};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

/// Time for which a stopping ingress still accepts requests while its reports say that it is draining: three report
/// periods, so every gateway has received one.
const LAME_DUCK: Duration = Duration::from_millis(700);
/// Timeout for the last receipts to reach the disk after that.
const LAST_RECEIPTS: Duration = Duration::from_secs(5);
/// Timeout for the export of the last spans after that.
const LAST_SPANS: Duration = Duration::from_secs(2);
/// Maximum number of open gateway connections: one for each held request; the streams of reports of each gateway and an
/// idle connection, and its requests about waiting jobs, so that held requests cannot block reports; and requests in flight. At 15 kB for an idle one with TLS
/// (docs/benchmarks.md) that is 250 MB.
const CONNECTIONS_MAX: usize = 16_384;
/// Maximum time for which a stopping ingress waits for another spoke to replace the replicas that end with this one. With
/// the drain of the listener after it, a supervisor's usual 90 s suffice.
const HANDOVER_MAX: Duration = Duration::from_secs(20);
/// Interval of checks whether it has.
const HANDOVER_PERIOD: Duration = Duration::from_millis(50);
const _: () = assert!(
    CONNECTIONS_MAX > HELD_MAX + ALL_STREAMS_MAX + GATEWAYS_MAX + jobs::POLLS_MAX + jobs::PULLS_MAX,
    "reports have connections beside all held requests"
);

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
    /// Traces, if they are configured.
    pub tracing: Option<TracingConfig>,
    /// Export of the metrics, if it is configured.
    pub metrics: Option<MetricsConfig>,
    /// Queue of durable jobs, if the region has one.
    pub jobs: Option<JobsConfig>,
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
    /// The `region` of the spoke is not in its catalogue. The spoke does not start.
    #[error(
        "region \"{0}\" is not in the catalogue, so its jurisdictions are unknown; use a region of the catalogue"
    )]
    UnknownRegion(RegionId),
    /// The address cannot be bound: another process uses it, it belongs to another machine, or the port needs a
    /// permission. The spoke does not start.
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
    /// The TLS library rejects the certificate, the key or the settings. The spoke does not start.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    /// Traces or metrics cannot be exported.
    #[error("{0}")]
    Export(#[from] ExportError),
    /// The queue of jobs cannot be opened. The spoke does not start.
    #[error("{0}")]
    Jobs(#[from] JobsError),
    /// The system starts no more threads, because of a limit of processes or memory. The spoke does not start.
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
    shutdown: impl Future<Output = ()> + Send,
    ready: impl FnOnce(SocketAddr) + Send,
) -> Result<(), IngressError> {
    boxed(config, spoke, Box::pin(shutdown), Box::new(ready)).await
}

/// [`run`] without type parameters, so that the role is compiled once, in this crate, and not in every program that runs it.
fn boxed<'a>(
    config: IngressConfig,
    spoke: Arc<Mutex<Spoke>>,
    shutdown: BoxFuture<'a, ()>,
    ready: Box<dyn FnOnce(SocketAddr) + Send + 'a>,
) -> BoxFuture<'a, Result<(), IngressError>> {
    Box::pin(run_until(config, spoke, shutdown, ready))
}

async fn run_until(
    config: IngressConfig,
    spoke: Arc<Mutex<Spoke>>,
    shutdown: BoxFuture<'_, ()>,
    ready: Box<dyn FnOnce(SocketAddr) + Send + '_>,
) -> Result<(), IngressError> {
    let here = config
        .catalogue
        .index_of(&config.region)
        .ok_or_else(|| IngressError::UnknownRegion(config.region.clone()))?;
    let refused: Arc<ConnectionFailures> = Arc::default();
    let gateways = bind_for_gateways(&config, refused.clone()).await?;
    let operators = match config.operations {
        Some(address) => Some(bind(address).await?),
        None => None,
    };
    let (recorder, writer) = start_receipts(&config)?;
    let (tracer, trace_export) = start_tracing(&config)?;
    if config.transport.identity().is_none() && !config.listen.ip().is_loopback() {
        // Every process that reaches the port can send requests. Configure certificates unless the network is trusted.
        tracing::warn!(listen = %config.listen, "ingress accepts plaintext connections because of [identity]");
    }
    let timeouts = timeouts();
    let usage = ListenerUsage::of(&gateways, refused);
    let shared = config.signals.shared.clone();
    let metrics = config.metrics.clone();
    let (jobs, job_tasks) = match &config.jobs {
        Some(jobs) => {
            let IngressConfig { region, resolver, transport, catalogue, .. } = &config;
            Some(RegionalJobQueue::open(jobs, region, resolver, transport, catalogue).await?).unzip()
        }
        None => (None, None),
    };
    if jobs.is_some() {
        // Gateways learn it from the reports.
        spoke.lock().set_has_jobs();
    }
    let jobs = jobs.map(Arc::new);
    let ingress =
        Ingress::new(config, here, spoke.clone(), timeouts, usage, (recorder, tracer), jobs.clone())?;
    let metrics_export = ingress.operations.start_metrics_export(metrics.as_ref())?;
    ready(gateways.address());
    let mut tasks = JoinSet::new();
    ingress.start_tasks(&mut tasks);
    if let Some(job_tasks) = job_tasks {
        tasks.spawn(essential("job queue", job_tasks.run()).map(drop));
    }
    serve(&ingress, gateways, operators, stop(shutdown, &spoke, &shared), timeouts).await;
    tasks.shutdown().await;
    if let Some(writer) = writer {
        writer.finish(LAST_RECEIPTS).await;
    }
    if let Some(trace_export) = trace_export {
        trace_export.finish(LAST_SPANS).await;
    }
    if let Some(metrics_export) = metrics_export {
        metrics_export.finish().await;
    }
    if let Some(jobs) = jobs {
        // After the receipts, so that no defect of the ledgers loses evidence.
        contained("last usage", jobs::finish_usage(jobs)).await;
    }
    Ok(())
}

/// Returns the timeouts of the listener, which cannot be configured: replicas depend on them ([`identity::LOST_AFTER`]).
fn timeouts() -> Timeouts {
    // Gateways know from the reports that the ingress is draining.
    Timeouts { lame_duck: Duration::ZERO, ..Timeouts::default() }
}

async fn bind(address: SocketAddr) -> Result<Listener, IngressError> {
    Listener::bind(address).await.map_err(|source| IngressError::Bind { address, source })
}

async fn bind_for_gateways(
    config: &IngressConfig,
    refused: Arc<ConnectionFailures>,
) -> Result<Listener, IngressError> {
    let identity = config.transport.identity();
    let acceptor = identity.map(|identity| GatewayAcceptor::new(identity, refused.clone())).transpose()?;
    let listener = bind(config.listen).await?.for_gateways(acceptor).with_failure_counters(refused);
    let load_balancers = config.proxy_protocol_from.clone();
    Ok(listener.with_connections_max(CONNECTIONS_MAX).with_proxy_protocol(load_balancers))
}

/// Starts the writer of receipts, if they are configured.
fn start_receipts(config: &IngressConfig) -> Result<(Option<Recorder>, Option<WriterHandle>), ReceiptsError> {
    let Some(receipts) = &config.receipts else { return Ok((None, None)) };
    let (recorder, writer) = Recorder::start(receipts, Role::Spoke, &config.region, Vec::new())?;
    Ok((Some(recorder), Some(writer)))
}

/// Starts the export of traces, if it is configured.
fn start_tracing(config: &IngressConfig) -> Result<(Option<Tracer>, Option<TraceExport>), ExportError> {
    let Some(tracing) = &config.tracing else { return Ok((None, None)) };
    let process = Process { role: "spoke", region: Some(config.region.as_str()) };
    let started = telemetry::start(&tracing.behind_gateway(), process)?;
    Ok(Some(started).unzip())
}

/// Waits for `shutdown`, and then until the gateways and the other spokes know that this one drains and the replicas
/// that end with it have been replaced.
async fn stop(
    shutdown: impl Future<Output = ()>,
    spoke: &Mutex<Spoke>,
    shared: &watch::Sender<u64>,
) -> StopReason {
    shutdown.await;
    spoke.lock().set_draining();
    // Tell the other spokes.
    shared.send_modify(|_| {});
    tokio::time::sleep(LAME_DUCK).await;
    handed_over(spoke).await;
    StopReason::Shutdown
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

/// Serves gateways until `stop`, and operators until the connections of the gateways are drained.
async fn serve(
    ingress: &Ingress,
    gateways: Listener,
    operators: Option<Listener>,
    stop: impl Future<Output = StopReason>,
    timeouts: Timeouts,
) {
    let drained = watch::Sender::new(false);
    let serve_operators = async {
        if let Some(operators) = operators {
            let mut drained = drained.subscribe();
            let stop = async {
                // The sender outlives this task.
                drained.wait_for(|drained| *drained).await.ok();
                StopReason::Shutdown
            };
            operators.serve(ingress.operations.clone(), stop, timeouts).await;
        }
    };
    let serve_gateways = async {
        gateways.serve(ingress.pipeline.clone(), stop, timeouts).await;
        drained.send_replace(true);
    };
    tokio::join!(serve_gateways, serve_operators);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spoke_ends_the_response_to_a_gateway_that_does_not_read_before_its_replica_does() {
        assert!(timeouts().write < identity::LOST_AFTER);
    }
}
