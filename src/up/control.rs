//! The buttons of a world: on a loopback port of their own, for people with `curl` and for drills.
//!
//! | request | does |
//! |---|---|
//! | `GET /` | processes with their identifiers, links with their state |
//! | `POST /cut?region=R` | cuts the link to `R`, silently |
//! | `POST /heal?region=R` | heals it |
//! | `POST /kill?process=P` | SIGKILL |
//! | `POST /restart?process=P` | SIGKILL if it still runs, then starts it again with the same command line |

use super::link::{Link, LinkState};
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use regions::id::RegionId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

/// Something that only the main thread does: it owns the processes.
pub(crate) struct Order {
    pub process: String,
    pub action: Action,
    pub done: oneshot::Sender<Result<(), String>>,
}

/// What is to be done to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Kill,
    Restart,
}

/// What the buttons act on.
#[derive(Clone)]
pub(crate) struct Control {
    pub links: Arc<BTreeMap<RegionId, Link>>,
    pub orders: mpsc::Sender<Order>,
    /// Process identifiers by name; `None` once it has ended.
    pub processes: Arc<Mutex<BTreeMap<String, Option<u32>>>>,
}

type Answer = (StatusCode, Json<Value>);

#[derive(Deserialize)]
struct OfRegion {
    region: String,
}

#[derive(Deserialize)]
struct OfProcess {
    process: String,
}

/// Serves the buttons for ever.
pub(crate) async fn serve(socket: TcpListener, control: Control) {
    let router = Router::new()
        .route("/", get(show))
        .route(
            "/cut",
            post(
                |State(control): State<Control>, Query(of)| async move { set(&control, of, LinkState::Cut) },
            ),
        )
        .route(
            "/heal",
            post(|State(control): State<Control>, Query(of)| async move { set(&control, of, LinkState::Up) }),
        )
        .route("/kill", post(|State(control), Query(of)| order(control, of, Action::Kill)))
        .route("/restart", post(|State(control), Query(of)| order(control, of, Action::Restart)))
        .with_state(control);
    if let Err(error) = axum::serve(socket, router).await {
        tracing::error!(%error, "the control port is gone");
    }
}

async fn show(State(control): State<Control>) -> Json<Value> {
    let links: BTreeMap<_, _> = control
        .links
        .iter()
        .map(|(region, link)| (region.as_str(), if link.state() == LinkState::Up { "up" } else { "cut" }))
        .collect();
    let processes = control.processes.lock().expect("nobody panics while holding it").clone();
    Json(json!({"processes": processes, "links": links}))
}

fn set(control: &Control, OfRegion { region }: OfRegion, state: LinkState) -> Answer {
    let link = region.parse::<RegionId>().ok().and_then(|region| control.links.get(&region));
    match link {
        Some(link) => {
            link.set(state);
            (StatusCode::OK, Json(json!({"region": region, "link": format!("{state:?}").to_lowercase()})))
        }
        None => {
            let known: Vec<_> = control.links.keys().map(RegionId::as_str).collect();
            wrong(format!("there is no link to '{region}'; there are: {}", known.join(", ")))
        }
    }
}

async fn order(control: Control, OfProcess { process }: OfProcess, action: Action) -> Answer {
    let (done, outcome) = oneshot::channel();
    let sent = control.orders.send(Order { process: process.clone(), action, done }).await;
    match (sent, outcome.await) {
        (Ok(()), Ok(Ok(()))) => {
            (StatusCode::OK, Json(json!({"process": process, "done": format!("{action:?}").to_lowercase()})))
        }
        (Ok(()), Ok(Err(problem))) => wrong(problem),
        _ => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"error": "the world is stopping"}))),
    }
}

fn wrong(problem: String) -> Answer {
    (StatusCode::BAD_REQUEST, Json(json!({"error": problem})))
}
