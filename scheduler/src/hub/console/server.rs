//! HTTP server of the console.
//!
//! | request | response |
//! |---|---|
//! | `GET /`, `GET /FILE` | the page; it has no data, so it needs no session |
//! | `POST /api/login` | session for the secret of a link |
//! | `POST /api/logout` | end of the session |
//! | `GET /api/session` | name and role of the person |
//! | `GET /api/history` | rates and latencies of the last five minutes, and the colours of the regions |
//! | `GET /api/events` | the state of the fleet, as server-sent events |
//! | `GET /api/requests?FILTER` | requests that gateways keep, which match a filter ([`scheduler_api::requests`]) |
//! | `GET /api/requests/{id}` | routing decision of a request, from the gateway that served it |
//! | `PUT`, `DELETE /api/drains/{cloud}/{name}` | drain of a region, and its end |
//! | `POST /api/promotions/{name}` | promotion of the next model of a deployment |
//! | `GET /api/drills` | drills of the local fleet, and the one that runs or has run last |
//! | `POST /api/drills/{name}`, `DELETE /api/drills` | start of a drill, and its end |
//!
//! Requests that change something need the role operator. Every response has the same strict headers, and every request is checked for its
//! host and, if it changes something, for its origin ([`console::origin`]).

use std::time::Instant;

use ::console::assets::{self, SECURITY_POLICY};
use ::console::lookups::{LOOKUP_TTL, LookupResult};
use ::console::origin::{self, REQUEST_HEADER};
use ::console::searches::{SEARCH_TTL, SearchResult};
use ::console::sessions::{ConsoleRole, SESSION_TTL, Visitor};
use axum::extract::rejection::QueryRejection;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Extension, Json, Router};
use identity::ConnectedClient;
use replica_api::error::ErrorCode;
use scheduler_api::error::HubErrorCode;
use scheduler_api::requests::{RequestFilter, RequestFilterV1};
use scheduler_api::traffic::REQUEST_ID_BYTES_MAX;
use scheduler_store::Store;
use serde::Deserialize;
use serde_json::{Value, json};
use supervision::request::{Panicked, contain};

use super::context::{Admitted, ConsoleApi};
use super::{auth, drills as local_drills, secret, stream};
use crate::hub::api::{Body, json_of};
use crate::hub::{drains, promote};
use crate::respond::ErrorResponse;

/// Maximum bytes of a request body: the secret of a link.
const BODY_BYTES_MAX: usize = 4096;

/// Routes of the console.
pub(super) fn router<S: Store>(api: ConsoleApi<S>) -> Router {
    let protected = Router::new()
        .route("/api/session", get(session))
        .route("/api/logout", post(logout::<S>))
        .route("/api/history", get(stream::history::<S>))
        .route("/api/events", get(stream::events::<S>))
        .route("/api/requests", get(search::<S>))
        .route("/api/requests/{*id}", get(explain::<S>))
        .route("/api/drains/{cloud}/{name}", put(drain::<S>).delete(undrain::<S>))
        .route("/api/drills", get(local_drills::show::<S>).delete(local_drills::stop::<S>))
        .route("/api/drills/{name}", post(local_drills::start::<S>))
        .route("/api/promotions/{name}", post(promote_model::<S>))
        .route_layer(from_fn_with_state(api.clone(), authenticated::<S>));
    Router::new()
        .route("/api/login", post(login::<S>))
        .merge(protected)
        .fallback(asset)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn_with_state(api.clone(), checked::<S>))
        .with_state(api)
}

/// Checks host and origin, contains panics, and adds the headers of every response.
async fn checked<S: Store>(State(api): State<ConsoleApi<S>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    // HTTP/2 has the host in the URI.
    let host = request.uri().authority().map(|authority| authority.as_str()).or(text(header::HOST));
    let origin = &api.console.origin;
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let is_page = !request.uri().path().starts_with("/api/");
    let mut response = if !origin.accepts_host(host) {
        let message = format!("This is the console at {}; open that URL.", origin.url());
        (StatusCode::MISDIRECTED_REQUEST, message).into_response()
    } else if !is_page && !origin::accepts_site(text(HeaderName::from_static("sec-fetch-site"))) {
        let message = "Pages of other sites may not send requests to the console.";
        ErrorResponse::new(HubErrorCode::Forbidden, message).into_response()
    } else if !is_read && !origin.accepts_change(text(header::ORIGIN), headers.contains_key(REQUEST_HEADER)) {
        let message = "Only the page of the console may send this request.";
        ErrorResponse::new(HubErrorCode::Forbidden, message).into_response()
    } else {
        contain(next.run(request)).await.unwrap_or_else(|Panicked(reason)| {
            // A defect. The request of a page of the console failed, and no other one is affected. Report it.
            tracing::error!(reason, "console request panicked");
            let message = "The request failed because of a defect of this hub; see its log.";
            ErrorResponse::new(ErrorCode::Internal, message).into_response()
        })
    };
    let fixed = [
        (header::CONTENT_SECURITY_POLICY, SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in fixed {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Admits a viewer or an operator; only an operator may change something.
async fn authenticated<S: Store>(
    State(api): State<ConsoleApi<S>>,
    ConnectInfo(peer): ConnectInfo<ConnectedClient>,
    mut request: Request,
    next: Next,
) -> Response {
    let found = auth::authenticate(&api, &peer, request.headers()).await;
    let admitted = match found {
        Ok(admitted) => admitted,
        Err(rejected) => return rejected.into_response(),
    };
    let is_change = !matches!(*request.method(), Method::GET | Method::HEAD);
    if is_change && admitted.visitor.role < ConsoleRole::Operator && request.uri().path() != "/api/logout" {
        let message = "This changes the fleet, which the role viewer may not; it is open to: operator.";
        return ErrorResponse::new(HubErrorCode::Forbidden, message).into_response();
    }
    request.extensions_mut().insert(admitted);
    next.run(request).await
}

async fn asset(request: Request) -> Response {
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    match assets::find(request.uri().path()).filter(|_| is_read) {
        Some(asset) => ([(header::CONTENT_TYPE, asset.content_type)], asset.body).into_response(),
        None => ErrorResponse::new(ErrorCode::NotFound, "The console has no such path.").into_response(),
    }
}

#[derive(Deserialize)]
struct LoginRequest {
    /// Secret of the link.
    login: String,
}

async fn login<S: Store>(State(api): State<ConsoleApi<S>>, body: Body) -> Result<Response, ErrorResponse> {
    let LoginRequest { login } = json_of(body, BODY_BYTES_MAX)?;
    let session = secret()?;
    let visitor = api.console.sessions.lock().redeem(&login, session, Instant::now());
    let admitted = visitor.map(|visitor| Admitted { visitor, session: Some(session.expose()) });
    // The certificate may have been revoked since it got the link.
    let Some(Admitted { visitor, .. }) = admitted.filter(|admitted| api.is_admitted(admitted)) else {
        let message = "The link was used or has expired; `meridian console` prints another one.";
        return Err(ErrorResponse::new(ErrorCode::InvalidToken, message));
    };
    let cookie = auth::set_cookie(&api.console, &session.expose(), SESSION_TTL.as_secs());
    Ok(([(header::SET_COOKIE, cookie)], Json(visitor_json(&visitor))).into_response())
}

async fn logout<S: Store>(State(api): State<ConsoleApi<S>>, headers: HeaderMap) -> Response {
    if let Some(session) = auth::cookie(&api.console, &headers) {
        api.console.sessions.lock().end(session);
    }
    ([(header::SET_COOKIE, auth::set_cookie(&api.console, "", 0))], StatusCode::NO_CONTENT).into_response()
}

fn visitor_json(Visitor { role, name, .. }: &Visitor) -> Value {
    json!({"role": role.as_str(), "name": name})
}

async fn session(Extension(admitted): Extension<Admitted>) -> Json<Value> {
    Json(visitor_json(&admitted.visitor))
}

/// Requests the routing decision of a request from the gateways.
async fn explain<S: Store>(
    State(api): State<ConsoleApi<S>>,
    Extension(admitted): Extension<Admitted>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ErrorResponse> {
    if !(1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) {
        let message = format!("`id` has {} bytes; at most {REQUEST_ID_BYTES_MAX} are allowed.", id.len());
        return Err(ErrorResponse::new(ErrorCode::InvalidValue, message).with_field("id"));
    }
    let console = &api.console;
    let mut looked_up = console.looked_up.subscribe();
    let gateways = console.gateways();
    let visitor = admitted.visitor.name.as_str();
    let started = console.lookups.lock().start((&id, visitor), gateways, Instant::now());
    started.map_err(|_| {
        let message = "Too many requests are being looked up; try again in some seconds.";
        ErrorResponse::new(ErrorCode::Overloaded, message)
    })?;
    let result = async {
        loop {
            let result = console.lookups.lock().result(&id, Instant::now());
            if result != LookupResult::Pending {
                return result;
            }
            // The sender lives as long as the console.
            looked_up.changed().await.ok();
        }
    };
    match tokio::time::timeout(LOOKUP_TTL, result).await.unwrap_or(LookupResult::TimedOut) {
        LookupResult::Found(gateway, explanation) => {
            Ok(Json(json!({"gateway": gateway, "explanation": explanation})))
        }
        LookupResult::Pending | LookupResult::TimedOut => {
            let message = format!(
                "Not all gateways responded within {} s, and no other one has a request with this id; try again.",
                LOOKUP_TTL.as_secs()
            );
            Err(ErrorResponse::new(ErrorCode::DeadlineExceeded, message))
        }
        LookupResult::Failed(gateway, problem) => {
            let message = format!(
                "A gateway in {gateway} cannot say whether it has a request with this id: {problem}. No other one has it."
            );
            Err(ErrorResponse::new(HubErrorCode::ExplanationsUnavailable, message))
        }
        LookupResult::Unknown => {
            let message = "No gateway has a request with this id. Gateways keep their last 4096 requests, with [explanations] \
                           also those that failed, failed over or were slow, for hours, and their logs have all.";
            Err(ErrorResponse::new(ErrorCode::NotFound, message))
        }
    }
}

/// Searches the requests that gateways keep on disk.
async fn search<S: Store>(
    State(api): State<ConsoleApi<S>>,
    Extension(admitted): Extension<Admitted>,
    query: Result<Query<Vec<(String, String)>>, QueryRejection>,
) -> Result<Json<SearchResult>, ErrorResponse> {
    let invalid =
        |rejection: QueryRejection| ErrorResponse::new(ErrorCode::InvalidValue, rejection.body_text());
    let Query(query) = query.map_err(invalid)?;
    let filter = RequestFilterV1::from_query(query)?;
    RequestFilter::try_from(filter.clone())?;
    let console = &api.console;
    let mut looked_up = console.looked_up.subscribe();
    let (gateways, visitor) = (console.gateways(), admitted.visitor.name.as_str());
    let started = console.searches.lock().start((filter, visitor), gateways, Instant::now());
    let number = started.map_err(|_| {
        let message = "Too many searches are in progress; try again in some seconds.";
        ErrorResponse::new(ErrorCode::Overloaded, message)
    })?;
    let completed = async {
        while !console.searches.lock().is_complete(number) {
            // The sender lives as long as the console.
            looked_up.changed().await.ok();
        }
    };
    // What the gateways have found until then is the result, which names the others.
    let _ = tokio::time::timeout(SEARCH_TTL, completed).await;
    let result = console.searches.lock().end(number);
    result.map(Json).ok_or_else(|| {
        let message = format!("The result was not taken within {} s; search again.", SEARCH_TTL.as_secs());
        ErrorResponse::new(ErrorCode::DeadlineExceeded, message)
    })
}

async fn drain<S: Store>(
    State(api): State<ConsoleApi<S>>,
    region: Path<(String, String)>,
) -> Result<Response, ErrorResponse> {
    drains::drain(State(api.hub), region).await.map(IntoResponse::into_response)
}

async fn undrain<S: Store>(
    State(api): State<ConsoleApi<S>>,
    region: Path<(String, String)>,
) -> Result<Response, ErrorResponse> {
    drains::undrain(State(api.hub), region).await.map(IntoResponse::into_response)
}

async fn promote_model<S: Store>(
    State(api): State<ConsoleApi<S>>,
    name: Path<String>,
) -> Result<Response, ErrorResponse> {
    promote::promote(State(api.hub), name).await.map(IntoResponse::into_response)
}
