//! The edge: one door for clients, and what it keeps up to date behind it.
//!
//! ```text
//!  client ──▶ forward ──▶ [allowed] ──▶ [order] ──▶ attempt ──▶ region … ──▶ client
//!                │                        ▲
//!                └── view  ◀── table      └── watch ◀── reports (5/s, from each region)
//!                     (what, where)           (how well)
//! ```
//!
//! [`table`] follows the hub's route table and [`weights`] its plan, and both survive without the hub; [`reports`] hears the regions; [`known`] is
//! what is known of them, and [`watch`] shares it. [`forward`] serves a request from these two and waits for neither: [`admit`] finds out
//! who asks for what and who may see it, [`tenants`] who may ask at all and [`allowances`] what each has left, [`shedding`] whether there is room
//! for it, and [`attempts`] goes from region to region, with a [`race`] of two at most under way. [`scatter`] does that
//! with the pieces of a request that is too large for one replica. [`policy`] checks, before each attempt, what may be sent by the
//! newest table, and [`policy_clock`] how old that is. [`account`] is what is told of it afterwards, and
//! [`operations`] where operators ask.

mod account;
mod admit;
mod allowances;
mod attempts;
mod cold;
mod cors;
mod explain;
mod forward;
mod health;
mod known;
mod models;
mod operations;
mod policy;
mod policy_clock;
mod race;
mod refusals;
mod reload;
mod reports;
mod scatter;
mod scrape;
mod shedding;
mod snapshot;
mod table;
mod tenants;
mod view;
mod watch;
mod weights;

use crate::config::EdgeConfig;
use crate::handover::{self, HandoverListener, Sockets, Takeover};
use crate::hop::RegionTransport;
use crate::listener::{Listener, StopReason};
use crate::metrics::EdgeMetrics;
use crate::receipts::{ReceiptsError, Recorder};
use crate::request_body::BodyReader;
use crate::socket_owner;
use crate::tls;
use crate::tokens::TokenVerifier;
use crate::upstream::Upstream;
use gateway_core::receipt::entry::Role;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use supervision::health::Health;
use supervision::task::{essential, supervise, supervise_until_done};
use tokio::net::TcpListener;
use tokio::sync::watch as channel;
use tokio::task::JoinSet;

/// How long the last receipts may take to reach the disk.
const LAST_RECEIPTS: Duration = Duration::from_secs(5);

/// Why an edge cannot run.
#[derive(Debug, thiserror::Error)]
pub enum EdgeError {
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose another port, or stop {}", process(*.pid))]
    Bind {
        /// Which.
        address: SocketAddr,
        /// The process that has it, where that is known.
        pid: Option<u32>,
        /// Why.
        source: io::Error,
    },
    /// Another gateway of this configuration runs, and this one was not started to take over from it.
    #[error(
        "{} already serves {listen} with this configuration (it answers at {path}, `handover`); to replace it without \
         refusing anybody start this one with --take-over, to check the file use `meridian check`", process(*.pid)
    )]
    Runs {
        /// Where clients would connect.
        listen: SocketAddr,
        /// Where it answers.
        path: PathBuf,
        /// Its process, where that is known.
        pid: Option<u32>,
    },
    /// The configuration names no place at which to take over.
    #[error(
        "--take-over needs `handover` in the configuration: the path at which the running gateway gives its sockets"
    )]
    NoHandover,
    /// Receipts cannot be kept.
    #[error("{0}")]
    Receipts(#[from] ReceiptsError),
    /// A socket that was bound cannot be used.
    #[error("a socket cannot be used: {0}")]
    Socket(io::Error),
    /// The sockets cannot be taken from the process that runs already, or kept for the next.
    #[error("cannot hand over at {path}: {source}; choose another path or stop whoever answers there")]
    Handover {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// TLS cannot be set up.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    /// The threads for large bodies cannot be started.
    #[error("the threads for large bodies cannot be started: {0}")]
    Threads(#[source] io::Error),
    /// The client for the control plane cannot be made.
    #[error("the control plane's HTTP client cannot be made: {0}")]
    Client(#[from] reqwest::Error),
}

/// A process, in a message.
fn process(pid: Option<u32>) -> String {
    pid.map_or("the process that has it".to_owned(), |pid| format!("process {pid}"))
}

/// Runs an edge gateway until `shutdown`, then drains. Calls `ready` once, when clients can connect.
///
/// # Errors
///
/// When an address cannot be bound. Nothing that happens later ends it.
pub async fn run(
    config: EdgeConfig,
    shutdown: impl Future<Output = ()>,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), EdgeError> {
    let (sockets, taken) = sockets(&config).await?;
    let acceptor = config.tls.clone().map(tls::acceptor).transpose()?;
    let giver = config.handover.as_deref().map(|path| giver_beside(path, &sockets)).transpose()?;
    let (clients, operators) = (listening(sockets.clients)?, listening(sockets.operators)?);
    let refused = Arc::default();
    let listener = Listener::on(clients).map_err(EdgeError::Socket)?.with_tls(acceptor);
    let listener =
        listener.with_connections_max(config.connections_max).with_failure_counters(Arc::clone(&refused));
    let listener = listener.with_address_limits(config.addresses.clone());
    let client = reqwest::Client::builder().no_proxy().build()?;
    let config = Arc::new(config);
    let metrics = Arc::new(EdgeMetrics::new(&config.catalogue, &config.keys));
    let tenants = Arc::new(tenants::Tenants::of_file(&config.keys, metrics.clone()));
    let views = channel::Sender::new(table::restore(&config, &tenants, &metrics));
    let plan_counts: Arc<weights::PlanCounts> = Arc::default();
    let planned = channel::Sender::new(weights::restore(&config, &plan_counts));
    let demands = Arc::default();
    let watch = Arc::new(watch::Watch::new(config.point, &config.catalogue));
    let leaving = channel::Sender::new(false);
    let upstream = Arc::new(Upstream::to_regions(&config.regions, config.region_http2, &config.catalogue)?);

    let policy_clock = Arc::new(policy_clock::PolicyClock::of(&config.snapshot, config.policy_max_age));
    let reader = table::reader(&config);
    let mut tasks = JoinSet::new();
    tasks.spawn(supervise("route table", {
        let (config, client, reader) = (config.clone(), client.clone(), reader.clone());
        let (views, tenants, metrics) = (views.clone(), tenants.clone(), metrics.clone());
        let policy_clock = policy_clock.clone();
        move || {
            table::follow(
                config.clone(),
                client.clone(),
                reader.clone(),
                views.clone(),
                tenants.clone(),
                metrics.clone(),
                policy_clock.clone(),
            )
        }
    }));
    tasks.spawn(supervise("demand and plan", {
        let (config, client, demands) = (config.clone(), client.clone(), Arc::clone(&demands));
        let (watch, planned, plan_counts) = (watch.clone(), planned.clone(), plan_counts.clone());
        move || {
            weights::follow(
                config.clone(),
                client.clone(),
                Arc::clone(&demands),
                watch.clone(),
                planned.clone(),
                plan_counts.clone(),
            )
        }
    }));
    tasks.spawn(supervise("region reports", {
        let (config, upstream, views, watch) =
            (config.clone(), upstream.clone(), views.clone(), watch.clone());
        move || reports::listen(config.clone(), upstream.clone(), views.subscribe(), watch.clone())
    }));
    tasks.spawn(supervise("region health", {
        let watch = watch.clone();
        move || watch.clone().look_for_silence()
    }));
    if let Some(identity) = config.tls.clone() {
        tasks.spawn(supervise("certificate", move || identity.clone().follow()));
    }
    match &config.regions {
        RegionTransport::Tls(credentials) => {
            let credentials = credentials.clone();
            tasks.spawn(supervise("region credentials", move || credentials.clone().follow()));
        }
        RegionTransport::Plaintext => {
            tracing::warn!("requests go to regions in the clear, as [region_tls] says")
        }
        RegionTransport::Loopback => {}
    }
    let body_reader = Arc::new(BodyReader::new(config.bodies).map_err(EdgeError::Threads)?);
    let (recorder, writing) = match &config.receipts {
        Some(receipts) => {
            let regions = config.catalogue.iter().map(|(_, region)| region.id.clone()).collect();
            let (recorder, writing) = Recorder::start(receipts, Role::Edge, &config.region, regions)?;
            (Some(recorder), Some(writing))
        }
        None => {
            tracing::warn!(
                "no receipts are kept, because there is no [receipts]: where requests went cannot be proven"
            );
            (None, None)
        }
    };
    let place =
        config.catalogue.index_of(&config.region).expect("a place that is configured is in the catalogue");
    let explanations = Arc::new(explain::Explanations::new());
    let scattering = Arc::new(scatter::Room::new());
    if let Some(file) = config.tenants.clone() {
        tasks.spawn(supervise_until_done("tenants file", {
            let (issuers, tenants) = (config.issuers.clone(), tenants.clone());
            let (views, metrics) = (views.clone(), metrics.clone());
            move || {
                reload::follow(file.clone(), issuers.clone(), tenants.clone(), views.clone(), metrics.clone())
            }
        }));
    }
    let asked = operations::Operations {
        config: config.clone(),
        health: Health::default(),
        tenants: tenants.clone(),
        place,
        views: views.subscribe(),
        policy_clock: policy_clock.clone(),
        planned: planned.subscribe(),
        demands: demands.clone(),
        plan_counts,
        watch: watch.clone(),
        metrics: metrics.clone(),
        body_reader: body_reader.clone(),
        upstream: upstream.clone(),
        refused,
        connections: listener.permits(),
        connections_max: config.connections_max,
        listener: listener.metrics(),
        scattering: scattering.clone(),
        explanations: explanations.clone(),
        leaving: leaving.subscribe(),
        receipts: recorder.as_ref().map(Recorder::metrics),
    };
    let operations = tasks.spawn(async {
        essential("operations port", operations::serve(operators, asked)).await;
    });

    if let (Some(giver), Some(path)) = (&giver, &config.handover) {
        giver.publish(path).map_err(|source| EdgeError::Handover { path: path.clone(), source })?;
    }
    if let Some(taken) = taken {
        taken.ready().map_err(EdgeError::Socket)?;
    }
    ready(listener.address());
    let timeouts = config.timeouts;
    let tokens = Arc::new(TokenVerifier::new(&config.issuers));
    if !tokens.is_empty() {
        let (tokens, issuers) = (tokens.clone(), config.issuers.clone());
        tasks.spawn(supervise("token issuers", move || tokens.clone().follow(issuers.clone())));
    }
    let door = forward::Edge {
        config: config.clone(),
        tokens,
        tenants,
        views: views.subscribe(),
        policy_clock,
        planned: planned.subscribe(),
        demands,
        place,
        watch,
        upstream,
        body_reader,
        scattering,
        metrics,
        explanations,
        recorder,
    };
    let leave = async {
        let leave = tokio::select! {
            () = shutdown => StopReason::Shutdown,
            () = given(giver) => StopReason::HandedOver,
        };
        leaving.send_replace(true);
        if leave == StopReason::HandedOver {
            // Operators are answered by the next process now.
            operations.abort();
        }
        leave
    };
    listener.serve(Arc::new(door), leave, timeouts).await;
    tasks.shutdown().await;
    table::farewell(&config, &client, &reader).await;
    if let Some(writing) = writing {
        writing.finish(LAST_RECEIPTS).await;
    }
    Ok(())
}

/// The sockets: those of the process that runs already, where this one is to take over from it.
async fn sockets(config: &EdgeConfig) -> Result<(Sockets, Option<Takeover>), EdgeError> {
    match (&config.handover, config.take_over) {
        (None, true) => return Err(EdgeError::NoHandover),
        (None, false) => {}
        (Some(path), false) => {
            let running = handover::running(path);
            let running = running.map_err(|source| EdgeError::Handover { path: path.clone(), source })?;
            if let Some(pid) = running {
                return Err(EdgeError::Runs { listen: config.listen, path: path.clone(), pid });
            }
        }
        (Some(path), true) => {
            let asked = path.clone();
            let taken = tokio::task::spawn_blocking(move || handover::take_over(&asked)).await;
            let taken = taken.expect("asking for sockets does not panic");
            if let Some(taken) = taken.map_err(|source| EdgeError::Handover { path: path.clone(), source })? {
                tracing::info!("taking over from a running process");
                return Ok((taken.sockets.try_clone().map_err(EdgeError::Socket)?, Some(taken)));
            }
            tracing::info!(path = %path.display(), "no process to take over from; listening anew");
        }
    }
    let bind = |address| {
        std::net::TcpListener::bind(address).map_err(|source| {
            let pid = Some(address).filter(|_| source.kind() == io::ErrorKind::AddrInUse);
            EdgeError::Bind { address, pid: pid.and_then(socket_owner::listening_on), source }
        })
    };
    Ok((Sockets { clients: bind(config.listen)?, operators: bind(config.operations)? }, None))
}

fn giver_beside(path: &Path, sockets: &Sockets) -> Result<HandoverListener, EdgeError> {
    let giver = sockets.try_clone().and_then(|sockets| HandoverListener::bind_next(path, sockets));
    giver.map_err(|source| EdgeError::Handover { path: path.to_owned(), source })
}

fn listening(socket: std::net::TcpListener) -> Result<TcpListener, EdgeError> {
    let listening = socket.set_nonblocking(true).and_then(|()| TcpListener::from_std(socket));
    listening.map_err(EdgeError::Socket)
}

/// Comes back when the next process has taken over; never, where none can.
async fn given(giver: Option<HandoverListener>) {
    match giver {
        Some(giver) => giver.wait().await,
        None => std::future::pending().await,
    }
}
