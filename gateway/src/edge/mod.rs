//! The edge: one door for clients, and what it keeps up to date behind it.
//!
//! ```text
//!  client ──▶ forward ──▶ [allowed] ──▶ [order] ──▶ attempt ──▶ region … ──▶ client
//!                │                        ▲
//!                └── view  ◀── table      └── watch ◀── reports (5/s, from each region)
//!                     (what, where)           (how well)
//! ```
//!
//! [`table`] follows the hub's route table and survives without the hub; [`reports`] hears the regions; [`watch`] holds
//! what is known of their health. [`forward`] serves a request from these two and waits for neither: [`admit`] finds out
//! who asks for what and who may see it, [`allowances`] is what its tenant has left, [`shedding`] whether there is room
//! for it, and [`attempts`] goes from region to region, with a [`race`] of two at most under way. [`scatter`] does that
//! with the pieces of a request that is too large for one replica. [`account`] is what is told of it afterwards, and
//! [`operations`] where operators ask.

mod account;
mod admit;
mod allowances;
mod attempts;
mod explain;
mod forward;
mod operations;
mod race;
mod refusals;
mod reports;
mod scatter;
mod scrape;
mod shedding;
mod table;
mod view;
mod watch;

use crate::config::EdgeConfig;
use crate::intake::Intake;
use crate::listener::Listener;
use crate::metrics::EdgeMetrics;
use crate::receipts::{ReceiptsError, Recorder};
use crate::tokens::Tokens;
use crate::upstream::Upstream;
use gateway_core::receipt::entry::Role;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch as channel;
use tokio::task::JoinSet;

/// How long requests in flight may go on after the edge was told to stop.
const DRAIN: Duration = Duration::from_secs(30);

/// How long the last receipts may take to reach the disk.
const LAST_RECEIPTS: Duration = Duration::from_secs(5);

/// Why an edge cannot run.
#[derive(Debug, thiserror::Error)]
pub enum EdgeError {
    /// An address cannot be listened on.
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
    /// The client for the control plane cannot be made.
    #[error("the control plane's HTTP client cannot be made: {0}")]
    Client(#[from] reqwest::Error),
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
    let listener = bind(config.listen).await?;
    let operations = tokio::net::TcpListener::bind(config.operations)
        .await
        .map_err(|source| EdgeError::Bind { address: config.operations, source })?;
    let client = reqwest::Client::builder().no_proxy().build()?;
    let config = Arc::new(config);
    let views = channel::Sender::new(table::restore(&config));
    let watch = Arc::new(watch::Watch::new(config.point, &config.catalogue));

    let mut tasks = JoinSet::new();
    tasks.spawn(table::follow(config.clone(), client.clone(), views.clone()));
    tasks.spawn(reports::listen(config.clone(), client, views.subscribe(), watch.clone()));
    tasks.spawn(watch.clone().look_for_silence());
    let metrics = Arc::new(EdgeMetrics::new(&config.catalogue, &config.keys));
    let intake = Arc::new(Intake::new());
    let (recorder, writing) = match &config.receipts {
        Some(receipts) => {
            let regions = config.catalogue.iter().map(|(_, region)| region.id.clone()).collect();
            let (recorder, writing) = Recorder::start(receipts, Role::Edge, &config.place, regions)?;
            (Some(recorder), Some(writing))
        }
        None => {
            tracing::warn!(
                "no receipts are kept, because there is no [receipts]: where requests went cannot be proven"
            );
            (None, None)
        }
    };
    let explanations = Arc::new(explain::Explanations::new());
    let asked = operations::Operations {
        config: config.clone(),
        views: views.subscribe(),
        watch: watch.clone(),
        metrics: metrics.clone(),
        intake: intake.clone(),
        connections: listener.room(),
        explanations: explanations.clone(),
        receipts: recorder.as_ref().map(Recorder::gauge),
    };
    tasks.spawn(operations::serve(operations, asked));

    ready(listener.address());
    let tokens = Arc::new(Tokens::new(&config.issuers));
    tasks.spawn(tokens.clone().follow(config.issuers.clone()));
    let allowances = allowances::Allowances::new(&config.keys, Instant::now());
    let door = forward::Edge {
        config,
        tokens,
        allowances,
        views: views.subscribe(),
        watch,
        upstream: Upstream::new(),
        intake,
        scattering: scatter::at_once(),
        metrics,
        explanations,
        recorder,
    };
    listener.serve(Arc::new(door), shutdown, DRAIN).await;
    tasks.shutdown().await;
    if let Some(writing) = writing {
        writing.finish(LAST_RECEIPTS).await;
    }
    Ok(())
}

async fn bind(address: SocketAddr) -> Result<Listener, EdgeError> {
    Listener::bind(address).await.map_err(|source| EdgeError::Bind { address, source })
}
