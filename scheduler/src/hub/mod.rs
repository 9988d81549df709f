//! The hub: registrations and deployments, and the route table derived from them; demand, and the traffic plan derived
//! from it.
//!
//! ```text
//!  spoke ──register, keep alive──▶ http ──▶ spokes ──▶ store ──watch──▶ controller ──guarded put──▶ store
//!                                                        │                │
//!  gateway ◀──long poll──────────  http ◀─ publisher ◀───┴── follow       │
//!                                              ▲                          │
//!                                              └──────────────────────────┘
//! ```
//!
//! A registration is a key in the store under the spoke's lease, written by `spokes`. The `controller` sees it through
//! its watch, like every other change, lets [`scheduler_core::hub`] decide, and publishes. So with several hubs on one
//! etcd, it does not matter which hub a spoke has registered with. Demand of gateways (`demands`), demand of tenants
//! (`tenant_demands`) and drains (`drains`) take the same way.
//!
//! Operators change deployments and tenants with [`apply`]; `access` admits each role to its paths; the controller sees
//! these records through its watch too. The store also records which reader runs which table ([`readers`]), so that a
//! wider residency takes effect only when every reader knows it.
//!
//! Of several hubs, one leads (`election`): it alone writes the table, and the followers publish what it writes. Every
//! write is guarded by the key of the term and by the revision of the previous table, so a deposed leader that was
//! suspended writes nothing. An embedded store has one hub, which wins every election.

mod access;
mod api;
mod api_keys;
mod apply;
pub mod backup;
mod console;
mod controller;
mod demand_bases;
mod demands;
mod denials;
mod drains;
mod election;
mod health;
mod http;
mod operators;
pub mod pki;
mod placements;
mod plans;
mod promote;
mod publisher;
mod readers;
mod records;
mod replicas;
mod restored;
mod scalers;
mod scrape;
mod shares;
mod spokes;
mod store_format;
mod tenant_demands;
mod term_start;
mod usage;
mod usage_records;

use std::future::{Future, IntoFuture};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use supervision::Mutex;

use futures_util::future::BoxFuture;
use identity::operations::{self, OperationsLimits};
use identity::{AcceptedPeers, ConnectedClient, ConnectionFailures, ServerTls, Transport, listener};
use regions::RouteTable;
use regions::spiffe::Role;
use scheduler_api::keys;
use scheduler_core::hubs::is_loopback;
use scheduler_core::table_history::TableHistory;
use scheduler_store::{EmbeddedStore, EtcdStore, EtcdTls, Store, StoreError};
use supervision::health::HealthCheck;
use supervision::task::{essential, supervise};
use telemetry::ExportError;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::config::{AuthorityConfig, HubConfig, StoreConfig};
use crate::events::{EtcdUnprotected, HubStarted, HubWithoutIdentity, NEW_EPOCH};
use api::HubApi;
use controller::GracePeriods;
use denials::Denials;
use election::ElectionCandidate;
use operators::OperatorTokens;
use pki::AuthorityParts;
use plans::PublishedPlan;
use publisher::Publisher;
use readers::{REPORTS_MAX, ReaderRecorder};
use records::RecordError;
pub use scrape::metrics;

/// File of the embedded store.
const STORE_FILE: &str = "hub.redb";
/// Time for which requests may continue after shutdown began. Long polls end at once.
const DRAIN: Duration = Duration::from_secs(5);
/// Maximum number of open connections: some for each of a thousand gateways and spokes.
const CONNECTIONS_MAX: usize = 8192;
/// Peers that may connect; each path has its own roles.
const PEERS: AcceptedPeers = AcceptedPeers { roles: &Role::ALL, same_region: &[] };
/// Offered protocols.
const PROTOCOLS: &[&[u8]] = &[b"h2", b"http/1.1"];
/// Maximum number of held polls for routes: one per gateway, and one more while it reconnects.
const LONG_POLLS_MAX: usize = 1024;

/// Error that prevents a hub from running.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The address cannot be bound: another process uses it, it belongs to another machine, or the port needs a
    /// permission. The hub does not start.
    #[error("cannot listen on {address}: {source}; choose another port or stop the process that uses it")]
    Bind {
        /// The configured address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// The hub has no identity, so it listens on loopback only, and the configured address is another one. It does not
    /// start.
    #[error("listen: {0} can be reached from other machines; add [identity] to the configuration of the hub")]
    Unprotected(IpAddr),
    /// The folder of the store cannot be created. The hub does not start.
    #[error("cannot create the folder {}: {source}", folder.display())]
    Folder {
        /// The configured folder.
        folder: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The store cannot be opened. The hub does not start.
    #[error("{0}")]
    Open(String),
    /// The store fails while the hub starts.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// A record in the store is unreadable, and without it the hub could publish a generation twice.
    #[error("{0}; {NEW_EPOCH}")]
    Record(RecordError),
    /// A later version has written the store, in a format that this one does not read. The hub does not start, and changes nothing.
    #[error("the store cannot be used: {0}")]
    LaterFormat(String),
    /// The store was restored from an older backup: its epoch is lower than that of its route table or plan. The hub
    /// does not start.
    #[error("the store is at epoch {epoch} but holds a table or plan of epoch {published}; {NEW_EPOCH}")]
    EpochFell {
        /// Epoch of the store.
        epoch: u64,
        /// Epoch of the table or the plan.
        published: u64,
    },
    /// The authorities for the URL of the issuer's keys cannot be used; the text has the key and the cause. The hub
    /// does not start.
    #[error("operators.{0}")]
    Operators(String),
    /// The client of the control API of the local fleet cannot be created; the text has the cause. The hub does not start.
    #[error("console.drills: {0}")]
    Drills(String),
    /// The built-in authority cannot be used; the text has the cause. The hub does not start.
    #[error("authority: {0}")]
    Authority(String),
    /// The metrics cannot be exported. The hub does not start.
    #[error("{0}")]
    Export(#[from] ExportError),
    /// The listener of the hub failed. The hub exits.
    #[error("the HTTP server ended: {0}")]
    Server(io::Error),
}

/// Published route table, ready to send.
#[derive(Debug)]
pub(crate) struct PublishedTable {
    pub(crate) table: RouteTable,
    /// `RouteTableV1` as JSON.
    pub(crate) body: axum::body::Bytes,
    /// Changes from earlier tables to this one.
    pub(crate) history: TableHistory,
}

/// Published route table; `None` until the first one.
type Current = Option<Arc<PublishedTable>>;

/// Runs a hub until `shutdown`, then drains. Calls `ready` once, when the first table is published.
///
/// # Errors
///
/// When the address cannot be bound, a record in the store is unreadable, or the embedded store cannot be opened. An
/// unreachable etcd is waited for.
pub async fn run(
    config: HubConfig,
    shutdown: impl Future<Output = ()> + Send,
    ready: impl FnOnce(SocketAddr) + Send,
) -> Result<(), HubError> {
    boxed(config, Box::pin(shutdown), Box::new(ready)).await
}

/// [`run`] without type parameters, so that the role is compiled once, in this crate, and not in every program that runs it.
fn boxed<'a>(
    config: HubConfig,
    shutdown: BoxFuture<'a, ()>,
    ready: Box<dyn FnOnce(SocketAddr) + Send + 'a>,
) -> BoxFuture<'a, Result<(), HubError>> {
    Box::pin(run_until(config, shutdown, ready))
}

async fn run_until(
    config: HubConfig,
    shutdown: BoxFuture<'_, ()>,
    ready: Box<dyn FnOnce(SocketAddr) + Send + '_>,
) -> Result<(), HubError> {
    if !config.transport.permits(config.listen.ip()) {
        return Err(HubError::Unprotected(config.listen.ip()));
    }
    let listener = bind(config.listen).await?;
    match config.store.clone() {
        StoreConfig::Embedded { data } => {
            let made = tokio::fs::create_dir_all(&data).await;
            made.map_err(|source| HubError::Folder { folder: data.clone(), source })?;
            let opened = EmbeddedStore::open(&data.join(STORE_FILE), Instant::now()).await;
            let store = opened.map_err(|error| HubError::Open(error.to_string()))?;
            if let Err(error) = store_format::check(&store).await {
                store.close().await;
                return Err(error);
            }
            // The previous leader has closed the file, so its term is over, whatever its lease says.
            store.delete(keys::LEADER).await?;
            let outcome = serve(config, listener, store.clone(), shutdown, ready).await;
            store.close().await;
            outcome
        }
        StoreConfig::Etcd(etcd) => {
            let is_remote =
                |endpoint: &String| !is_loopback(endpoint.split_once("://").map_or("", |(_, at)| at));
            let is_mutual = etcd.tls.as_ref().is_some_and(EtcdTls::is_mutual);
            if !is_mutual && etcd.endpoints.iter().any(is_remote) {
                EtcdUnprotected { endpoints: &etcd.endpoints }.emit();
            }
            serve(config, listener, EtcdStore::new(etcd), shutdown, ready).await
        }
    }
}

async fn bind(address: SocketAddr) -> Result<TcpListener, HubError> {
    TcpListener::bind(address).await.map_err(|source| HubError::Bind { address, source })
}

/// Runs a hub on an open store: makes its parts, starts its tasks, and runs its services until the shutdown.
async fn serve<S: Store>(
    config: HubConfig,
    listener: TcpListener,
    store: S,
    shutdown: BoxFuture<'_, ()>,
    ready: Box<dyn FnOnce(SocketAddr) + Send + '_>,
) -> Result<(), HubError> {
    let address =
        listener.local_addr().map_err(|source| HubError::Bind { address: config.listen, source })?;
    HubStarted { address, store: &config.store }.emit();
    if config.transport.identity().is_none() {
        HubWithoutIdentity { listen: address }.emit();
    }
    let operations = match config.operations {
        Some(address) => Some(bind(address).await?),
        None => None,
    };
    // Bound before the hub is ready, so that a conflict is an error at start.
    let bound = match &config.authority {
        Some(authority) => Some(bind(authority.listen).await?),
        None => None,
    };
    let (console, console_bound) = console::bind(config.console.as_ref(), &config.transport).await?.unzip();
    let (publish, current) = watch::channel(None);
    let (stop, stopping) = watch::channel(false);
    let (reports, received) = mpsc::channel(REPORTS_MAX);
    let plans = Arc::new(PublishedPlan::default());
    let metrics = Arc::<scrape::HubMetrics>::default();
    let (refused, denials) = (Arc::<ConnectionFailures>::default(), Arc::<Denials>::default());
    let tokens = config.operators.map(|operators| OperatorTokens::new(operators, metrics.clone()));
    let tokens = tokens.transpose().map_err(HubError::Operators)?.map(Arc::new);
    let api = HubApi {
        store: store.clone(),
        catalogue: config.catalogue.clone(),
        transport: config.transport.clone(),
        readers: reports,
        lease_ttl: config.lease_ttl,
        current: current.clone(),
        plans: plans.clone(),
        demands: Arc::default(),
        demand_bases: Arc::default(),
        tenant_demands: Arc::default(),
        usage: Arc::default(),
        polls: Arc::new(Semaphore::new(LONG_POLLS_MAX)),
        placement_reports: Arc::new(Semaphore::new(placements::PLANS_MAX)),
        stopping: stopping.clone(),
        reader_ahead: Arc::default(),
        health: HealthCheck::default(),
        metrics: metrics.clone(),
        denials: denials.clone(),
        tokens: tokens.clone(),
        refused: refused.clone(),
        console,
    };
    let identity_folder = config.authority.as_ref().map(|authority| authority.identity.clone());
    let authority = config.authority.zip(bound).zip(config.transport.identity().cloned());
    let authority = authority.map(|((authority, bound), identity)| {
        let (store, catalogue) = (store.clone(), config.catalogue.clone());
        let parts = AuthorityParts { bound, store, identity, catalogue, refused, denials, tokens };
        (authority, parts)
    });
    let candidate = ElectionCandidate {
        store: store.clone(),
        publisher: Publisher::new(publish, plans, metrics),
        name: address.to_string(),
        deployments: config.deployments,
        epoch_if_new: epoch_if_new(),
        grace_periods: GracePeriods { lapsed_keep: config.lapsed_keep, settle: config.settle },
        catalogue: config.catalogue,
        lease: Mutex::independent(None),
    };
    let metrics_export = http::start_metrics_export(config.metrics.as_ref(), &api)?;
    let mut tasks = JoinSet::new();
    let recorder = ReaderRecorder::new(store.clone(), config.reader_keep);
    tasks.spawn(async {
        essential("readers", recorder.run(received)).await;
    });
    let server = start_server(&mut tasks, listener, &config.transport, api.clone())?;
    if let Some(bound) = console_bound {
        console::start(&mut tasks, bound, &config.transport, &api).map_err(HubError::Server)?;
    }
    follow_identities(&mut tasks, &config.transport, api.tokens.as_ref());
    if let Some(operations) = operations {
        let refused = api.refused.clone();
        let server = operations::serve(operations, http::operations(api), OperationsLimits::DEFAULT, refused);
        tasks.spawn(async {
            essential("operations", async { drop(server.await) }).await;
        });
    }
    let restored = async {
        store_format::check(&store).await?;
        restored::begin_epoch_if_restored(&store, identity_folder, epoch_if_new()).await
    };
    let (begun, epoch_begun) = oneshot::channel();
    let election = async {
        tokio::select! {
            begun = restored => begun?,
            () = stopped(stopping.clone()) => return Ok(()),
        }
        // The authority may not have been waiting any more.
        begun.send(()).ok();
        candidate.run(stopping.clone()).await
    };
    let authority = run_authority(authority, stopping.clone());
    let authority = after_epoch(epoch_begun, authority, stopping.clone());
    let services = Services { election, server, authority };
    let shut_down = shut_down(current, shutdown, || ready(address));
    let outcome = services.run(shut_down, &stop).await;
    tasks.shutdown().await;
    if let Some(metrics_export) = metrics_export {
        metrics_export.finish().await;
    }
    outcome
}

/// Returns the epoch of a store that has none.
fn epoch_if_new() -> u64 {
    // A wrong clock makes an odd epoch, but still a higher one than the last.
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |since| since.as_secs())
}

/// Starts the tasks that follow the hub's certificate, and the keys of the issuer of operators' tokens.
fn follow_identities(tasks: &mut JoinSet<()>, transport: &Transport, tokens: Option<&Arc<OperatorTokens>>) {
    if let Some(tokens) = tokens.cloned() {
        tasks.spawn(supervise("issuer keys", move || tokens.clone().follow()));
    }
    if let Transport::Tls(identity) = transport {
        let identity = identity.clone();
        tasks.spawn(supervise("identity", move || identity.clone().follow()));
    }
}

/// Starts the acceptor of the connections of gateways, spokes and operators. Returns the server of their requests, which
/// ends after the hub is stopped.
fn start_server<S: Store>(
    tasks: &mut JoinSet<()>,
    listener: TcpListener,
    transport: &Transport,
    api: HubApi<S>,
) -> Result<impl Future<Output = io::Result<()>> + use<S>, HubError> {
    let server_tls = match api.tokens {
        Some(_) => ServerTls::with_optional_client,
        None => ServerTls::new,
    };
    let tls = transport.identity().map(|identity| server_tls(identity, PEERS, PROTOCOLS)).transpose();
    let tls = tls.map_err(|error| HubError::Server(io::Error::other(error)))?;
    let (listener, acceptor) =
        listener::listen(listener, tls, CONNECTIONS_MAX, api.refused.clone()).map_err(HubError::Server)?;
    tasks.spawn(async {
        essential("connections", acceptor.run()).await;
    });
    let stopping = api.stopping.clone();
    let service = http::router(api).into_make_service_with_connect_info::<ConnectedClient>();
    Ok(axum::serve(listener, service).with_graceful_shutdown(stopped(stopping)).into_future())
}

/// Runs the built-in authority, if there is one, until the hub is stopped.
async fn run_authority<S: Store>(
    authority: Option<(AuthorityConfig, AuthorityParts<S>)>,
    stopping: watch::Receiver<bool>,
) -> Result<(), HubError> {
    match authority {
        Some((config, parts)) => pki::run(config, parts, stopping).await,
        None => {
            stopped(stopping).await;
            Ok(())
        }
    }
}

/// Runs the authority once the epoch of a restored hub has begun, because the authority removes the mark of the
/// restoration. If the election ends before, the mark stays for the next start, which begins the epoch.
async fn after_epoch(
    epoch_begun: oneshot::Receiver<()>,
    authority: impl Future<Output = Result<(), HubError>>,
    stopping: watch::Receiver<bool>,
) -> Result<(), HubError> {
    match epoch_begun.await {
        Ok(()) => authority.await,
        // The hub is stopping, or the election has failed and `Services` returns its error.
        Err(_) => {
            stopped(stopping).await;
            Ok(())
        }
    }
}

/// Waits for `shutdown`. Calls `ready` when the first table is published.
async fn shut_down(
    mut current: watch::Receiver<Current>,
    shutdown: impl Future<Output = ()>,
    ready: impl FnOnce(),
) {
    // The sender is gone only when the candidate has ended, which `Services` observes.
    let first = async { current.wait_for(Current::is_some).await.is_ok() };
    tokio::pin!(shutdown);
    tokio::select! {
        biased;
        _ = first => {
            ready();
            shutdown.await;
        }
        () = &mut shutdown => {}
    }
}

/// Services of a hub. The end of one ends the hub.
struct Services<E, R, A> {
    election: E,
    server: R,
    authority: A,
}

impl<E, R, A> Services<E, R, A>
where
    E: Future<Output = Result<(), HubError>>,
    R: Future<Output = io::Result<()>>,
    A: Future<Output = Result<(), HubError>>,
{
    /// Runs the services until `shut_down` or until one of them ends; then stops and drains the others.
    async fn run(
        self,
        shut_down: impl Future<Output = ()>,
        stop: &watch::Sender<bool>,
    ) -> Result<(), HubError> {
        let Services { election, server, authority } = self;
        tokio::pin!(election, server, authority);
        let first = tokio::select! {
            () = shut_down => EndedTask::Shutdown,
            outcome = &mut election => EndedTask::Candidate(outcome),
            outcome = &mut server => EndedTask::Server(outcome),
            outcome = &mut authority => EndedTask::Authority(outcome),
        };
        stop.send_replace(true);
        let drained = async { timeout(DRAIN, server).await.unwrap_or(Ok(())) };
        match first {
            EndedTask::Shutdown => {
                let issuing = async { timeout(DRAIN, authority).await.unwrap_or(Ok(())) };
                let (elected, served, issued) = tokio::join!(election, drained, issuing);
                elected.and(served.map_err(HubError::Server)).and(issued)
            }
            EndedTask::Candidate(outcome) => {
                // The candidate's error is more specific than the server's.
                drained.await.ok();
                outcome
            }
            EndedTask::Server(outcome) => outcome.map_err(HubError::Server).and(election.await),
            EndedTask::Authority(outcome) => {
                let (elected, served) = tokio::join!(election, drained);
                outcome.and(elected).and(served.map_err(HubError::Server))
            }
        }
    }
}

/// Task that ended first.
enum EndedTask {
    Shutdown,
    Candidate(Result<(), HubError>),
    Server(io::Result<()>),
    Authority(Result<(), HubError>),
}

/// Waits until the hub is stopped.
async fn stopped(mut stopping: watch::Receiver<bool>) {
    // The sender outlives its receivers.
    stopping.wait_for(|stopping| *stopping).await.ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_authority_starts_after_the_epoch_and_not_without_it() {
        let run = async |is_begun: bool| {
            let (begun, epoch_begun) = oneshot::channel();
            let (_stop, stopping) = watch::channel(true);
            match is_begun {
                true => begun.send(()).unwrap(),
                false => drop(begun),
            }
            let authority = async { Err(HubError::Authority("it was started".to_owned())) };
            after_epoch(epoch_begun, authority, stopping).await
        };
        assert!(run(true).await.is_err(), "its error ends the hub");
        assert!(run(false).await.is_ok(), "the error of the election is not replaced");
    }
}
