//! Control API of a local fleet, for operators with `curl`: HTTP on a separate loopback port.
//!
//! | request | effect |
//! |---|---|
//! | `GET /` | lists processes with their ids, and links with their state |
//! | `POST /cut?region=R` | cuts the link to `R`, silently; with `&way=to` or `&way=from` in one direction only |
//! | `POST /slow?region=R&times=N` | multiplies the delay of the link to `R` by N |
//! | `POST /delay?region=R&ms=N` | adds N ms to it |
//! | `POST /lose?region=R&percent=N` | emulates packet loss as TCP shows it: as delay |
//! | `POST /heal?region=R` | ends all of these |
//! | `POST /slow-replica?region=R&times=N` | slows the replicas of `R`; 1 restores normal speed |
//! | `POST /drain?region=R`, `POST /undrain?region=R` | like `meridian drain` |
//! | `POST /kill?process=P` | SIGKILL |
//! | `POST /stop?process=P`, `POST /start?process=P` | graceful stop; start with the same command line |
//! | `POST /restart?process=P` | graceful stop if it is running, and start |
//! | `POST /pause?process=P`, `POST /resume?process=P` | SIGSTOP, SIGCONT |
//! | `GET /drills` | lists drills, and the one that runs or has run last, with its events and expectations |
//! | `POST /drills/start?name=N`, `POST /drills/stop` | starts a drill, one at a time; stops it |
//!
//! Changes are made one after the other: a request waits for those before it, for an action of a drill, and for the restoration after a
//! drill, which undoes changes that were made while the drill ran.
//!
//! Requests of web pages are rejected: a page of any site could send them to a port of this machine.

use super::drills::board::{DrillBoard, DrillStartError};
use super::fleet_control::FleetControl;
use super::link::LinkConditions;
use axum::extract::{Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use identity::operations::{self, OperationsLimits};
use loadtest::drill::Action;
use loadtest::drill::action::{LinkChange, LinkDirection, ProcessAction, TIMES_MAX};
use regions::id::RegionId;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// Maximum extra delay of a link.
const DELAY_MS_MAX: u64 = 60_000;
/// Maximum time of a connection, whose request may wait for others, and for the graceful stop of a process.
const CONNECTION_MAX: Duration = Duration::from_secs(600);

type ControlResponse = (StatusCode, Json<Value>);

/// Query parameters of all requests, each optional.
#[derive(Clone, Default, Deserialize)]
struct ControlQuery {
    region: Option<String>,
    process: Option<String>,
    way: Option<String>,
    times: Option<u32>,
    ms: Option<u64>,
    percent: Option<f64>,
}

/// Serves the control API until the process ends.
pub(super) async fn serve(socket: TcpListener, control: FleetControl, drills: Option<Arc<DrillBoard>>) {
    let mut router = Router::new().route("/", get(show));
    for (path, action) in [
        ("/kill", ProcessAction::Kill),
        ("/stop", ProcessAction::Stop),
        ("/start", ProcessAction::Start),
        ("/restart", ProcessAction::Restart),
        ("/pause", ProcessAction::Pause),
        ("/resume", ProcessAction::Resume),
    ] {
        router =
            router.route(path, post(move |State(control), Query(query)| command(control, query, action)));
    }
    for path in ["/cut", "/slow", "/delay", "/lose", "/heal"] {
        router = router.route(path, post(move |State(control), Query(query)| change(control, query, path)));
    }
    let router = router
        .route("/slow-replica", post(slow_replica))
        .route("/drain", post(|State(control), Query(query)| drain(control, query, true)))
        .route("/undrain", post(|State(control), Query(query)| drain(control, query, false)))
        .with_state(control);
    let router = match drills {
        Some(drills) => router.merge(drill_routes(drills)),
        None => router,
    };
    let router = router.layer(from_fn(reject_browsers));
    let limits = OperationsLimits { connection: CONNECTION_MAX, ..OperationsLimits::DEFAULT };
    if let Err(error) = operations::serve(socket, router, limits, Arc::default()).await {
        // Faults can no longer be injected. Start `meridian up` again.
        tracing::error!(%error, "control API failed");
    }
}

fn drill_routes(drills: Arc<DrillBoard>) -> Router {
    Router::new()
        .route("/drills", get(async |State(drills): State<Arc<DrillBoard>>| Json(drills.to_json())))
        .route("/drills/start", post(start_drill))
        .route("/drills/stop", post(stop_drill))
        .with_state(drills)
}

/// Rejects requests that a browser sends for a page.
async fn reject_browsers(request: Request, next: Next) -> Response {
    let headers = request.headers();
    if headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site") {
        let problem = "the control API is for curl and the console of the hub, not for web pages";
        return (StatusCode::FORBIDDEN, Json(json!({"error": problem}))).into_response();
    }
    next.run(request).await
}

/// Name of a drill.
#[derive(Deserialize)]
struct DrillQuery {
    name: String,
}

async fn start_drill(
    State(drills): State<Arc<DrillBoard>>,
    Query(DrillQuery { name }): Query<DrillQuery>,
) -> ControlResponse {
    let (status, problem) = match drills.start(&name) {
        Ok(()) => return respond(Ok(json!({"drill": name, "done": "start"}))),
        Err(DrillStartError::Unknown) => {
            (StatusCode::NOT_FOUND, format!("no drill '{name}'; GET /drills lists them"))
        }
        Err(DrillStartError::Unmet(unmet)) => (StatusCode::CONFLICT, format!("the drill {name} {unmet}")),
        Err(DrillStartError::Running) => {
            (StatusCode::CONFLICT, "a drill is running; stop it first".to_owned())
        }
    };
    (status, Json(json!({"error": problem})))
}

async fn stop_drill(State(drills): State<Arc<DrillBoard>>) -> ControlResponse {
    if drills.stop() {
        return respond(Ok(json!({"done": "stop"})));
    }
    (StatusCode::CONFLICT, Json(json!({"error": "no drill is running"})))
}

async fn show(State(control): State<FleetControl>) -> Json<Value> {
    // All links of a region are changed together.
    let links = control.links.iter();
    let links: BTreeMap<_, _> =
        links.filter_map(|(region, all)| Some((region.as_str(), state(all.first()?.conditions())))).collect();
    let processes = control.processes.lock().clone();
    Json(json!({"processes": processes, "links": links}))
}

fn state(conditions: LinkConditions) -> &'static str {
    match (conditions.cut_to, conditions.cut_from) {
        (true, true) => "cut",
        (true, false) => "cut to the region",
        (false, true) => "cut from the region",
        (false, false) if conditions == LinkConditions::NORMAL => "up",
        (false, false) => "degraded",
    }
}

async fn change(control: FleetControl, query: ControlQuery, path: &'static str) -> ControlResponse {
    let change = match path {
        "/cut" => match query.way.as_deref() {
            None => Ok(LinkChange::Cut(LinkDirection::Both)),
            Some("to") => Ok(LinkChange::Cut(LinkDirection::To)),
            Some("from") => Ok(LinkChange::Cut(LinkDirection::From)),
            Some(way) => Err(format!("unknown way '{way}'; write way=to or way=from, or omit it for both")),
        },
        "/slow" => times(&query).map(LinkChange::Times),
        "/delay" => query
            .ms
            .filter(|ms| *ms <= DELAY_MS_MAX)
            .map(|ms| LinkChange::Delay(Duration::from_millis(ms)))
            .ok_or_else(|| format!("write ms=N, from 0 to {DELAY_MS_MAX}")),
        "/lose" => query
            .percent
            .filter(|percent| (0.0..=90.0).contains(percent))
            .map(LinkChange::Lose)
            .ok_or_else(|| "write percent=N, from 0 to 90; /cut loses all".to_owned()),
        _ => Ok(LinkChange::Heal),
    };
    let (region, change) = match (region(&query), change) {
        (Ok(region), Ok(change)) => (region, change),
        (Err(problem), _) | (_, Err(problem)) => return respond(Err(problem)),
    };
    let done = control.execute(&Action::Link(region.clone(), change)).await;
    respond(done.map(|()| json!({"region": region.as_str(), "done": path.trim_matches('/')})))
}

async fn command(control: FleetControl, query: ControlQuery, action: ProcessAction) -> ControlResponse {
    let Some(process) = query.process else {
        return respond(Err("write process=P; GET / lists them".to_owned()));
    };
    let done = control.command(&process, action).await;
    respond(done.map(|()| json!({"process": process, "done": format!("{action:?}").to_lowercase()})))
}

async fn slow_replica(
    State(control): State<FleetControl>,
    Query(query): Query<ControlQuery>,
) -> ControlResponse {
    let (region, times) = match (region(&query), times(&query)) {
        (Ok(region), Ok(times)) => (region, times),
        (Err(problem), _) | (_, Err(problem)) => return respond(Err(problem)),
    };
    let done = control.execute(&Action::SlowReplicas(region.clone(), times)).await;
    respond(done.map(|()| json!({"region": region.as_str(), "times": times})))
}

async fn drain(control: FleetControl, query: ControlQuery, is_draining: bool) -> ControlResponse {
    let region = match region(&query) {
        Ok(region) => region,
        Err(problem) => return respond(Err(problem)),
    };
    let change = if is_draining { Action::Drain } else { Action::Undrain };
    let done = control.execute(&change(region.clone())).await;
    respond(done.map(|()| json!({"region": region.as_str(), "draining": is_draining})))
}

fn region(query: &ControlQuery) -> Result<RegionId, String> {
    let given = query.region.as_deref().ok_or("write region=R; GET / lists them")?;
    given.parse().map_err(|error: regions::id::IdError| error.to_string())
}

fn times(query: &ControlQuery) -> Result<u32, String> {
    let times = query.times.filter(|times| (1..=TIMES_MAX).contains(times));
    times.ok_or_else(|| format!("write times=N, from 1 to {TIMES_MAX}"))
}

fn respond(done: Result<Value, String>) -> ControlResponse {
    match done {
        Ok(done) => (StatusCode::OK, Json(done)),
        Err(problem) => (StatusCode::BAD_REQUEST, Json(json!({"error": problem}))),
    }
}
