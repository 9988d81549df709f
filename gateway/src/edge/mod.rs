//! The gateway: serves clients, and keeps up to date what their requests need.
//!
//! ```text
//!  client ──▶ pipeline ──▶ auth ─▶ reader ─▶ router ─▶ admission ─▶ forwarder ──▶ region … ──▶ responder ──▶ client
//!                             │                  ▲                                                │
//!                             └── view ◀── table └── watch ◀── reports (5/s, from each region)    └▶ account
//! ```
//!
//! A request, in reading order: [`pipeline`] is its path; [`auth`] authenticates it; [`allowances`] are the rate limits of its tenant;
//! [`reader`] reads head and body; [`router`] makes the routing decision; [`admission`] admits or sheds it; [`forwarder`] sends it,
//! with at most two attempts in a [`race`], and [`policy`] checks before each attempt what the newest route table allows; [`scatter`]
//! splits a request that is too large for one replica; [`responder`] writes the response; [`account`] records it.
//!
//! In the background: [`table`] follows the hub's route table and [`weights`] its traffic plan, and both survive without the hub;
//! [`policy_clock`] is the age of the table; [`tenants`] are the tenants that it has; [`reports`] receives the reports of the regions;
//! [`known`] is the observed state of the regions, and [`watch`] shares it. [`operations`] serves operators. [`gateway`] puts the
//! parts together.

mod account;
mod admission;
mod allowances;
mod auth;
mod cold;
mod duration;
mod explain;
mod forwarder;
mod gateway;
mod health;
mod known;
mod models;
mod operations;
mod operator_state;
mod pipeline;
mod policy;
mod policy_clock;
mod race;
mod reader;
mod refusals;
mod reload;
mod reports;
mod request;
mod request_head;
mod responder;
mod router;
mod scatter;
mod scrape;
mod snapshot;
mod table;
mod tenants;
mod view;
mod watch;
mod weights;

use crate::config::EdgeConfig;
use crate::handover::{self, Giver, Sockets, Taken};
use crate::listener::{Leave, Listener};
use crate::receipts::ReceiptsError;
use crate::socket_owner;
use crate::tls;
use gateway::Gateway;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use supervision::task::essential;
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

/// Runs a gateway until `shutdown`, then drains. Calls `ready` once, when clients can connect.
///
/// # Errors
///
/// When an address cannot be bound, or something that requests need cannot be set up. Nothing later ends it.
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
    let listener = Listener::on(clients).map_err(EdgeError::Socket)?.over_tls(acceptor);
    let listener = listener.holding(config.connections_max).refusing(Arc::clone(&refused));
    let listener = listener.limited_by(config.addresses.clone());
    let gateway = Gateway::new(config)?;
    let (recorder, writing) = gateway.start_receipts()?;
    let leaving = channel::Sender::new(false);
    let mut tasks = JoinSet::new();
    gateway.follow_control_plane(&mut tasks);
    gateway.follow_files(&mut tasks);

    let state = gateway.operator_state(&listener, refused, leaving.subscribe(), recorder.as_deref());
    let operations = tasks.spawn(async {
        essential("operations port", operations::serve(operators, state)).await;
    });
    if let (Some(giver), Some(path)) = (&giver, &gateway.config.handover) {
        giver.stand_at(path).map_err(|source| EdgeError::Handover { path: path.clone(), source })?;
    }
    if let Some(taken) = taken {
        taken.ready().map_err(EdgeError::Socket)?;
    }
    ready(listener.address());
    let leave = async {
        let leave = tokio::select! {
            () = shutdown => Leave::Stopping,
            () = given(giver) => Leave::HandedOver,
        };
        leaving.send_replace(true);
        if leave == Leave::HandedOver {
            // The next process serves operators now.
            operations.abort();
        }
        leave
    };
    listener.serve(Arc::new(gateway.pipeline(recorder)), leave, gateway.config.timeouts).await;
    tasks.shutdown().await;
    table::farewell(&gateway.config, &gateway.client, &gateway.table_reader).await;
    if let Some(writing) = writing {
        writing.finish(LAST_RECEIPTS).await;
    }
    Ok(())
}

/// The sockets: those of the process that runs already, where this one is to take over from it.
async fn sockets(config: &EdgeConfig) -> Result<(Sockets, Option<Taken>), EdgeError> {
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
            let taken = tokio::task::spawn_blocking(move || handover::ask(&asked)).await;
            let taken = taken.expect("asking for sockets does not panic");
            if let Some(taken) = taken.map_err(|source| EdgeError::Handover { path: path.clone(), source })? {
                tracing::info!("taking over from a running process");
                return Ok((taken.sockets.again().map_err(EdgeError::Socket)?, Some(taken)));
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

fn giver_beside(path: &Path, sockets: &Sockets) -> Result<Giver, EdgeError> {
    let giver = sockets.again().and_then(|sockets| Giver::beside(path, sockets));
    giver.map_err(|source| EdgeError::Handover { path: path.to_owned(), source })
}

fn listening(socket: std::net::TcpListener) -> Result<TcpListener, EdgeError> {
    let listening = socket.set_nonblocking(true).and_then(|()| TcpListener::from_std(socket));
    listening.map_err(EdgeError::Socket)
}

/// Comes back when the next process has taken over; never, where none can.
async fn given(giver: Option<Giver>) {
    match giver {
        Some(giver) => giver.given().await,
        None => std::future::pending().await,
    }
}
