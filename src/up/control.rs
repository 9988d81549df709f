//! The buttons of a world over HTTP: on a loopback port of their own, for people with `curl`.
//!
//! | request | does |
//! |---|---|
//! | `GET /` | processes with their identifiers, links with their state |
//! | `POST /cut?region=R` | cuts the link to `R`, silently; with `&way=to` or `&way=from` in one direction alone |
//! | `POST /slow?region=R&times=N` | makes the link to `R` so many times as long |
//! | `POST /delay?region=R&ms=N` | and so much longer |
//! | `POST /lose?region=R&percent=N` | loses so much of what crosses it, as TCP shows it: late |
//! | `POST /heal?region=R` | ends all of these |
//! | `POST /slow-replica?region=R&times=N` | slows the replicas of `R`; 1 is as before |
//! | `POST /drain?region=R`, `POST /undrain?region=R` | what `meridian drain` does |
//! | `POST /kill?process=P` | SIGKILL |
//! | `POST /stop?process=P`, `POST /start?process=P` | an orderly end; a start with the same command line |
//! | `POST /restart?process=P` | an orderly end if it still runs, and a start |
//! | `POST /pause?process=P`, `POST /resume?process=P` | SIGSTOP, SIGCONT |

use super::buttons::Buttons;
use super::link::Weather;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use loadtest::drill::action::{LinkChange, TIMES_MAX, Verb, Way};
use regions::id::RegionId;
use reqwest::Method;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::net::TcpListener;

/// The longest delay that can be asked for.
const DELAY_MS_MAX: u64 = 60_000;

type Answer = (StatusCode, Json<Value>);

/// What stands behind the question mark, each where it is needed.
#[derive(Clone, Default, Deserialize)]
struct Asked {
    region: Option<String>,
    process: Option<String>,
    way: Option<String>,
    times: Option<u32>,
    ms: Option<u64>,
    percent: Option<f64>,
}

/// Serves the buttons for ever.
pub(crate) async fn serve(socket: TcpListener, buttons: Buttons) {
    let mut router = Router::new().route("/", get(show));
    for (path, verb) in [
        ("/kill", Verb::Kill),
        ("/stop", Verb::Stop),
        ("/start", Verb::Start),
        ("/restart", Verb::Restart),
        ("/pause", Verb::Pause),
        ("/resume", Verb::Resume),
    ] {
        router = router.route(path, post(move |State(buttons), Query(asked)| order(buttons, asked, verb)));
    }
    for path in ["/cut", "/slow", "/delay", "/lose", "/heal"] {
        router =
            router.route(path, post(async |State(buttons), Query(asked)| change(&buttons, &asked, path)));
    }
    let router = router
        .route("/slow-replica", post(slow_replica))
        .route("/drain", post(|State(buttons), Query(asked)| drain(buttons, asked, Method::PUT)))
        .route("/undrain", post(|State(buttons), Query(asked)| drain(buttons, asked, Method::DELETE)))
        .with_state(buttons);
    if let Err(error) = axum::serve(socket, router).await {
        tracing::error!(%error, "the control port is gone");
    }
}

async fn show(State(buttons): State<Buttons>) -> Json<Value> {
    let links: BTreeMap<_, _> =
        buttons.links.iter().map(|(region, link)| (region.as_str(), word(link.weather()))).collect();
    let processes = buttons.processes.lock().clone();
    Json(json!({"processes": processes, "links": links}))
}

fn word(weather: Weather) -> &'static str {
    match (weather.cut_to, weather.cut_from) {
        (true, true) => "cut",
        (true, false) => "cut to the region",
        (false, true) => "cut from the region",
        (false, false) if weather == Weather::CALM => "up",
        (false, false) => "bad",
    }
}

fn change(buttons: &Buttons, asked: &Asked, path: &str) -> Answer {
    let change = match path {
        "/cut" => match asked.way.as_deref() {
            None => Ok(LinkChange::Cut(Way::Both)),
            Some("to") => Ok(LinkChange::Cut(Way::To)),
            Some("from") => Ok(LinkChange::Cut(Way::From)),
            Some(way) => Err(format!("'{way}' is no way; write way=to or way=from, or leave it out")),
        },
        "/slow" => times(asked).map(LinkChange::Times),
        "/delay" => asked
            .ms
            .filter(|ms| *ms <= DELAY_MS_MAX)
            .map(|ms| LinkChange::Delay(Duration::from_millis(ms)))
            .ok_or_else(|| format!("write ms=N, from 0 to {DELAY_MS_MAX}")),
        "/lose" => asked
            .percent
            .filter(|percent| (0.0..=90.0).contains(percent))
            .map(LinkChange::Lose)
            .ok_or_else(|| "write percent=N, from 0 to 90; /cut loses all".to_owned()),
        _ => Ok(LinkChange::Heal),
    };
    let done = region(asked).and_then(|region| Ok((buttons.change(&region, change?)?, region)));
    answer(done.map(|((), region)| json!({"region": region.as_str(), "done": path.trim_matches('/')})))
}

async fn order(buttons: Buttons, asked: Asked, verb: Verb) -> Answer {
    let Some(process) = asked.process else {
        return answer(Err("write process=P; GET / lists them".to_owned()));
    };
    let done = buttons.order(&process, verb).await;
    answer(done.map(|()| json!({"process": process, "done": format!("{verb:?}").to_lowercase()})))
}

async fn slow_replica(State(buttons): State<Buttons>, Query(asked): Query<Asked>) -> Answer {
    let (region, times) = match (region(&asked), times(&asked)) {
        (Ok(region), Ok(times)) => (region, times),
        (Err(problem), _) | (_, Err(problem)) => return answer(Err(problem)),
    };
    let done = buttons.slow(&region, times).await;
    answer(done.map(|()| json!({"region": region.as_str(), "times": times})))
}

async fn drain(buttons: Buttons, asked: Asked, method: Method) -> Answer {
    let region = match region(&asked) {
        Ok(region) => region,
        Err(problem) => return answer(Err(problem)),
    };
    let draining = method == Method::PUT;
    let done = buttons.drain(method, &region).await;
    answer(done.map(|()| json!({"region": region.as_str(), "draining": draining})))
}

fn region(asked: &Asked) -> Result<RegionId, String> {
    let given = asked.region.as_deref().ok_or("write region=R; GET / lists them")?;
    given.parse().map_err(|error: regions::id::IdError| error.to_string())
}

fn times(asked: &Asked) -> Result<u32, String> {
    let times = asked.times.filter(|times| (1..=TIMES_MAX).contains(times));
    times.ok_or_else(|| format!("write times=N, from 1 to {TIMES_MAX}"))
}

fn answer(done: Result<Value, String>) -> Answer {
    match done {
        Ok(done) => (StatusCode::OK, Json(done)),
        Err(problem) => (StatusCode::BAD_REQUEST, Json(json!({"error": problem}))),
    }
}
