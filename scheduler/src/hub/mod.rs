//! The hub: who is there, what is deployed, and the route table that follows from both; what is asked for, and the plan that
//! follows from that.
//!
//! ```text
//!  spoke ──register, keep alive──▶ http ──▶ spokes ──▶ store ──watch──▶ keeper ──guarded put──▶ store
//!                                                        │                │
//!  gateway ◀──long poll──────────  http ◀─── board ◀─────┴── follow       │
//!                                              ▲                          │
//!                                              └──────────────────────────┘
//! ```
//!
//! A registration is a key in the store under the spoke's lease; `spokes` writes it and tells nobody. The `keeper` sees it
//! by its watch, as it sees everything else that changes there, lets [`scheduler_core::hub`] decide, and publishes. So it
//! makes no difference which hub a spoke has registered with, where there are several on one etcd. What a gateway is asked
//! for (`demands`) and what an operator wants (`drains`) go the same way.
//!
//! What there shall be is changed by an operator ([`apply`]), who has to prove it ([`access`]); it stands in the store, and
//! the keeper sees it as it sees everything else. Who runs which table is noted there too ([`readers`]), so that what is
//! wider can wait until everybody has heard of it.
//!
//! Of several, one leads (`terms`): it alone writes the table, and the others give out what they see it write. Every
//! write is guarded by the key of the term and by the table that it stands on, so a leader that was deposed while it
//! slept writes nothing. An embedded store has one hub, which wins every term by itself.

mod access;
mod apply;
mod board;
mod demands;
mod drains;
mod health;
mod http;
mod keeper;
mod plans;
mod promote;
mod readers;
mod records;
mod replicas;
mod spokes;
mod start;
mod terms;

use std::future::{Future, IntoFuture};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use supervision::Mutex;

use regions::RouteTable;
use scheduler_core::access::NoFleetToken;
use scheduler_core::wire::keys;
use scheduler_store::{Embedded, Etcd, Store, StoreError};
use supervision::health::HealthCheck;
use supervision::task::essential;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::config::{HubConfig, StoreConfig};
use crate::events::{HubStarted, NoFleetTokenSet};
use board::Board;
use http::Desk;
use keeper::Patience;
use plans::Plans;
use readers::{Registrar, WORDS_MAX};
use records::RecordError;
use terms::Candidate;

/// How long requests may go on after the hub was told to stop. Long polls end at once.
const DRAIN: Duration = Duration::from_secs(5);
/// Questions for routes that are held at a time: every gateway has one, and one more while it reconnects.
const LONG_POLLS_MAX: usize = 1024;

/// What helps where a store is of no use.
pub(crate) const NEW_EPOCH: &str = "start the hub on another store (an empty data folder, or another prefix of the etcd): that begins a new epoch, and regions register by themselves";

/// Why a hub cannot run (any longer).
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}; choose another port or stop whoever has it")]
    Bind {
        /// Which.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Other machines could connect, and nothing keeps them out.
    #[error("listen: {0}")]
    Unprotected(#[from] NoFleetToken),
    /// The folder of the store cannot be made.
    #[error("the folder {} cannot be made: {source}", folder.display())]
    Folder {
        /// Which.
        folder: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The store cannot be opened.
    #[error("{0}; another hub may have it open")]
    Open(String),
    /// The store fails while the hub starts.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// What the store holds cannot be read, and to go on without it could publish a generation a second time.
    #[error("{0}; {NEW_EPOCH}")]
    Record(RecordError),
    /// The store's epoch is lower than that of the table or the plan in it.
    #[error("the store is at epoch {epoch} and holds what was published in epoch {published}; {NEW_EPOCH}")]
    EpochFell {
        /// Of the store.
        epoch: u64,
        /// Of the table, or the plan.
        published: u64,
    },
    /// The server ended.
    #[error("the HTTP server ended: {0}")]
    Server(io::Error),
}

/// The table that is given out, ready to send.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) table: RouteTable,
    /// `RouteTableV1` as JSON.
    pub(crate) body: axum::body::Bytes,
}

/// What is given out: nothing until the first table.
type Current = Option<Arc<Published>>;

/// Runs a hub until `shutdown`, then drains. Calls `ready` once, when a table is published and can be asked for.
///
/// # Errors
///
/// When the address cannot be bound, or what the store holds cannot be read; or when the embedded store cannot be opened.
/// An etcd that is not there is waited for.
pub async fn run(
    config: HubConfig,
    shutdown: impl Future<Output = ()>,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), HubError> {
    config.tokens.may_listen_at(config.listen.ip())?;
    let bound = TcpListener::bind(config.listen).await;
    let listener = bound.map_err(|source| HubError::Bind { address: config.listen, source })?;
    match config.store.clone() {
        StoreConfig::Embedded { data } => {
            let made = tokio::fs::create_dir_all(&data).await;
            made.map_err(|source| HubError::Folder { folder: data.clone(), source })?;
            let opened = Embedded::open(&data.join("hub.redb"), Instant::now()).await;
            let store = opened.map_err(|error| HubError::Open(error.to_string()))?;
            // Whoever led has let go of the file, so it is gone, whatever its lease says.
            store.delete(keys::LEADER).await?;
            let outcome = serve(config, listener, store.clone(), shutdown, ready).await;
            store.close().await;
            outcome
        }
        StoreConfig::Etcd(etcd) => serve(config, listener, Etcd::new(etcd), shutdown, ready).await,
    }
}

async fn serve<S: Store>(
    config: HubConfig,
    listener: TcpListener,
    store: S,
    shutdown: impl Future<Output = ()>,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), HubError> {
    let tokens = config.tokens;
    let address =
        listener.local_addr().map_err(|source| HubError::Bind { address: config.listen, source })?;
    HubStarted { address, store: &config.store }.emit();
    if tokens.fleet.is_empty() {
        NoFleetTokenSet { listen: address }.emit();
    }
    // A clock that is off by years makes a strange epoch, and a rising one all the same.
    let epoch_if_new =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |since| since.as_secs());
    let (publish, current) = watch::channel(None);
    let plans = Arc::new(Plans::default());
    let (stop, stopping) = watch::channel(false);
    let (say, words) = mpsc::channel(WORDS_MAX);
    let mut noting = JoinSet::new();
    let registrar = Registrar::new(store.clone(), config.reader_keep);
    noting.spawn(async {
        essential("readers", registrar.note_all(words)).await;
    });
    let desk = Desk {
        store: store.clone(),
        catalogue: config.catalogue.clone(),
        tokens: Arc::new(tokens),
        readers: say,
        lease_ttl: config.lease_ttl,
        current: current.clone(),
        plans: plans.clone(),
        demands: Arc::default(),
        polls: Arc::new(Semaphore::new(LONG_POLLS_MAX)),
        stopping: stopping.clone(),
        reader_ahead: Arc::default(),
        health: HealthCheck::default(),
    };
    let candidate = Candidate {
        store,
        board: Board::new(publish, plans),
        name: address.to_string(),
        deployments: config.deployments,
        epoch_if_new,
        patience: Patience { lapsed_keep: config.lapsed_keep, settle: config.settle },
        catalogue: config.catalogue,
        lease: Mutex::independent(None),
    };
    let stands = candidate.stand(stopping.clone());
    let server =
        axum::serve(listener, http::router(desk)).with_graceful_shutdown(told(stopping)).into_future();
    tokio::pin!(stands, server);
    let mut current = current;
    let told_to_stop = async {
        // The sender is gone only when the candidate has ended, which is seen below.
        let first = async { current.wait_for(Current::is_some).await.is_ok() };
        tokio::pin!(shutdown);
        tokio::select! {
            biased;
            _ = first => {
                ready(address);
                shutdown.await;
            }
            () = &mut shutdown => {}
        }
    };
    let first = tokio::select! {
        () = told_to_stop => First::Told,
        outcome = &mut stands => First::Candidate(outcome),
        outcome = &mut server => First::Server(outcome),
    };
    stop.send_replace(true);
    let drained = async { timeout(DRAIN, server).await.unwrap_or(Ok(())) };
    let outcome = match first {
        First::Told => {
            let (stood, served) = tokio::join!(stands, drained);
            stood.and(served.map_err(HubError::Server))
        }
        First::Candidate(outcome) => {
            // Why it has ended says more than what the server makes of it.
            drained.await.ok();
            outcome
        }
        First::Server(outcome) => outcome.map_err(HubError::Server).and(stands.await),
    };
    noting.shutdown().await;
    outcome
}

/// What ends a hub.
enum First {
    Told,
    Candidate(Result<(), HubError>),
    Server(io::Result<()>),
}

/// Until the hub is told to stop.
async fn told(mut stopping: watch::Receiver<bool>) {
    // The sender outlives whoever listens.
    stopping.wait_for(|stopping| *stopping).await.ok();
}
