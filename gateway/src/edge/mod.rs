//! The gateway: serves clients, and follows the control plane and the reports of the regions.
//!
//! ```text
//!  client ──▶ pipeline ──▶ router ──▶ forwarder ──▶ region … ──▶ responder ──▶ client
//!                │            ▲
//!                └── view ◀── table    region_monitor ◀── reports (5/s per region)
//! ```
//!
//! A request, in reading order: [`pipeline`] is its path, and authenticates and reads it; [`request`] is the admitted request
//! with its context, which records it when it ends; [`router`] makes the routing decision, and admits or sheds it;
//! [`forwarder`] sends it, with at most two attempts in flight, and checks before each attempt what the newest route table
//! allows; [`responder`] writes the response. Beside them, [`tenant_limiters`] applies the rate limits of a tenant, and
//! [`scatter`] splits a request that is too large for one replica. [`jobs`] and [`files`] send what is computed later to the queue of
//! a region, [`lists`] merges the lists of all regions, and [`job_transfer`] takes it to others if that region has too much of it.
//!
//! In the background: [`table`] watches the route table of the hub and [`weights`] its traffic plan, and both work
//! without the hub; [`policy_clock`] measures the age of the table; [`tenants`] holds its tenants; [`reports`] receives
//! the reports of the regions; [`region_states`] is the observed state of the regions, and [`region_monitor`] shares it. [`operations`]
//! serves operators, and [`traffic`] the consoles of the hubs, with their [`lookups`] of requests. Explanations of some requests are
//! kept on disk by [`explanation_archive`]. [`gateway`] puts the parts together.

mod batch_caller;
mod duration;
mod explain;
mod explanation_archive;
mod files;
mod forwarder;
mod gateway;
mod health;
mod job_transfer;
mod jobs;
mod lists;
mod lookups;
mod models;
mod operations;
mod operator_state;
mod pipeline;
mod policy_clock;
mod readers;
mod refusals;
mod region_monitor;
mod region_states;
mod reload;
mod reports;
mod request;
mod responder;
mod router;
mod scatter;
mod scrape;
mod shares;
mod spans;
mod table;
mod tenant_limiters;
pub(crate) mod tenants;
mod traffic;
mod upload_form;
mod view;
mod weights;

use crate::config::EdgeConfig;
use crate::handover::{self, HandoverListener, Sockets, Takeover};
use crate::listener::{Listener, StopReason};
use crate::receipts::ReceiptsError;
use crate::socket_owner;
use crate::tls;
pub use explanation_archive::ExplanationsConfig;
use futures_util::future::BoxFuture;
use gateway::Gateway;
pub use scrape::metrics;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use supervision::task::{blocking, contained, essential};
use telemetry::ExportError;
use tokio::net::TcpListener;
use tokio::sync::watch as channel;
use tokio::task::JoinSet;

/// Timeout for writing the last receipts to disk at shutdown.
const FINAL_RECEIPTS_TIMEOUT: Duration = Duration::from_secs(5);

/// Timeout for writing the last explanations to disk at shutdown.
const FINAL_EXPLANATIONS_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for the export of the last spans at shutdown.
const FINAL_SPANS_TIMEOUT: Duration = Duration::from_secs(2);

/// Error that prevents a gateway from starting.
#[derive(Debug, thiserror::Error)]
pub enum EdgeError {
    /// The address cannot be bound: another process uses it, it belongs to another machine, or the port needs a
    /// permission. The gateway does not start.
    #[error("cannot listen on {address}: {source}; choose another port, or stop {}", process(*.pid))]
    Bind {
        /// Address of the listener.
        address: SocketAddr,
        /// Process that listens there, if known.
        pid: Option<u32>,
        /// Cause.
        source: io::Error,
    },
    /// Another gateway with this configuration runs, and this one was not started with --take-over. The running one
    /// continues.
    #[error(
        "{} already serves {listen} with this configuration (`handover` socket {path}); to replace it without \
         rejecting requests start this gateway with --take-over, to check the file use `meridian check`", process(*.pid)
    )]
    Runs {
        /// Address of the client listener.
        listen: SocketAddr,
        /// Path of its handover socket.
        path: PathBuf,
        /// Process that runs, if known.
        pid: Option<u32>,
    },
    /// The gateway was started with --take-over, but its configuration names no handover socket. It does not start.
    #[error(
        "--take-over needs `handover` in the configuration: the path of the handover socket of the running gateway"
    )]
    NoHandover,
    /// Receipts cannot be written.
    #[error("{0}")]
    Receipts(#[from] ReceiptsError),
    /// The system rejects a socket that was bound or taken over. The gateway does not start.
    #[error("cannot use a listening socket: {0}")]
    Socket(io::Error),
    /// The listening sockets cannot be received from the running process, or offered to the next. The gateway does not
    /// start.
    #[error(
        "cannot use the handover socket {path}: {source}; choose another path or stop the process that uses it"
    )]
    Handover {
        /// Path of the handover socket.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The TLS library rejects the certificate, the key or the settings. The gateway does not start.
    #[error("cannot set up TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The system starts no more threads, because of a limit of processes or memory. The gateway does not start.
    #[error("cannot start the threads for large bodies and explanations: {0}")]
    Threads(#[source] io::Error),
    /// Another gateway keeps its explanations in this directory: requests would be found twice, and each gateway would delete files of
    /// the other. The gateway does not start.
    #[error(
        "another gateway keeps its explanations in {dir}; set `dir` of [explanations] of one of them to another directory, or stop the \
         other one; to replace it without rejecting requests start this gateway with --take-over"
    )]
    ExplanationsInUse {
        /// Directory of the explanations.
        dir: PathBuf,
    },
    /// Traces or metrics cannot be exported.
    #[error("{0}")]
    Export(#[from] ExportError),
    /// A URL in `hub` or the identity cannot be used for requests to hubs. The gateway does not start.
    #[error("cannot build the HTTP client for the control plane: {0}")]
    Client(#[from] scheduler_client::hub::HubClientError),
}

/// Description of a process for an error message.
fn process(pid: Option<u32>) -> String {
    pid.map_or("the process that uses it".to_owned(), |pid| format!("process {pid}"))
}

/// Runs a gateway until `shutdown`, then drains. Calls `ready` once, when clients can connect.
///
/// # Errors
///
/// When an address cannot be bound or a component cannot be set up. Errors after the start do not end the gateway.
pub async fn run(
    config: EdgeConfig,
    shutdown: impl Future<Output = ()> + Send,
    ready: impl FnOnce(SocketAddr) + Send,
) -> Result<(), EdgeError> {
    boxed(config, Box::pin(shutdown), Box::new(ready)).await
}

/// [`run`] without type parameters, so that the role is compiled once, in this crate, and not in every program that runs it.
fn boxed<'a>(
    config: EdgeConfig,
    shutdown: BoxFuture<'a, ()>,
    ready: Box<dyn FnOnce(SocketAddr) + Send + 'a>,
) -> BoxFuture<'a, Result<(), EdgeError>> {
    Box::pin(run_until(config, shutdown, ready))
}

async fn run_until(
    config: EdgeConfig,
    shutdown: BoxFuture<'_, ()>,
    ready: Box<dyn FnOnce(SocketAddr) + Send + '_>,
) -> Result<(), EdgeError> {
    let (sockets, takeover) = sockets(&config).await?;
    let acceptor = config.tls.clone().map(tls::acceptor).transpose()?;
    let handover_listener =
        config.handover.as_deref().map(|path| bind_handover(path, &sockets)).transpose()?;
    let (clients, operators) = (tokio_listener(sockets.clients)?, tokio_listener(sockets.operators)?);
    let refused = Arc::default();
    let listener = Listener::on(clients).map_err(EdgeError::Socket)?.with_tls(acceptor);
    let listener =
        listener.with_connections_max(config.connections_max).with_failure_counters(Arc::clone(&refused));
    let listener = listener.with_address_limits(config.addresses.clone());
    let listener = listener.with_proxy_protocol(config.proxy_protocol_from.clone());
    let gateway = Gateway::new(config, takeover.is_some())?;
    let (recorder, receipt_writer) = gateway.start_receipts()?;
    let (tracer, trace_export) = gateway.start_tracing()?;
    let draining = channel::Sender::new(false);
    let mut tasks = JoinSet::new();
    gateway.follow_control_plane(&mut tasks, &draining.subscribe());
    gateway.follow_files(&mut tasks);
    gateway.transfer_jobs(&mut tasks, recorder.clone(), &draining.subscribe());

    let state =
        gateway.operator_state(&listener, refused, draining.subscribe(), recorder.as_deref(), tracer.clone());
    let metrics_export = scrape::start_export(&state)?;
    let operations = tasks.spawn(async {
        essential("operations port", operations::serve(operators, state)).await;
    });
    if let (Some(handover_listener), Some(path)) = (&handover_listener, &gateway.config.handover) {
        handover_listener
            .publish(path)
            .map_err(|source| EdgeError::Handover { path: path.clone(), source })?;
    }
    if let Some(takeover) = takeover {
        takeover.ready().map_err(EdgeError::Socket)?;
    }
    ready(listener.address());
    let stop = async {
        let stop = tokio::select! {
            () = shutdown => StopReason::Shutdown,
            () = handed_over(handover_listener) => StopReason::HandedOver,
        };
        draining.send_replace(true);
        if let Some(archive) = &gateway.archive {
            archive.release_directory();
        }
        if stop == StopReason::HandedOver {
            // The next process serves the operations port now.
            operations.abort();
        }
        stop
    };
    listener.serve(Arc::new(gateway.pipeline(recorder, tracer)), stop, gateway.config.timeouts).await;
    gateway.finish_transfers().await;
    tasks.shutdown().await;
    scheduler_client::table::deregister(&gateway.client, &gateway.table_reader).await;
    if let Some(receipt_writer) = receipt_writer {
        receipt_writer.finish(FINAL_RECEIPTS_TIMEOUT).await;
    }
    if let Some(archive) = &gateway.archive {
        archive.finish(FINAL_EXPLANATIONS_TIMEOUT).await;
    }
    if let Some(trace_export) = trace_export {
        trace_export.finish(FINAL_SPANS_TIMEOUT).await;
    }
    if let Some(metrics_export) = metrics_export {
        metrics_export.finish().await;
    }
    // After the receipts, so that no defect of the ledgers loses evidence.
    contained("last usage", gateway.usage.finish(&gateway.client)).await;
    Ok(())
}

/// Binds the listening sockets, or receives them from the running process if this one takes over from it.
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
            let handover_path = path.clone();
            let takeover = blocking(move || handover::take_over(&handover_path)).await;
            if let Some(takeover) =
                takeover.map_err(|source| EdgeError::Handover { path: path.clone(), source })?
            {
                // The running process has handed over its listening sockets, and drains when this one is ready.
                tracing::info!("received the listening sockets from the running process");
                return Ok((takeover.sockets.try_clone().map_err(EdgeError::Socket)?, Some(takeover)));
            }
            // The gateway was started with --take-over, and no process listens on the handover socket. It binds its
            // addresses itself.
            tracing::info!(path = %path.display(), "no running process to take over from; binding new sockets");
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

fn bind_handover(path: &Path, sockets: &Sockets) -> Result<HandoverListener, EdgeError> {
    let handover_listener =
        sockets.try_clone().and_then(|sockets| HandoverListener::bind_next(path, sockets));
    handover_listener.map_err(|source| EdgeError::Handover { path: path.to_owned(), source })
}

fn tokio_listener(socket: std::net::TcpListener) -> Result<TcpListener, EdgeError> {
    let tokio_listener = socket.set_nonblocking(true).and_then(|()| TcpListener::from_std(socket));
    tokio_listener.map_err(EdgeError::Socket)
}

/// Waits until the next process has taken over; pending for ever without a handover socket.
async fn handed_over(handover_listener: Option<HandoverListener>) {
    match handover_listener {
        Some(handover_listener) => handover_listener.wait().await,
        None => std::future::pending().await,
    }
}
