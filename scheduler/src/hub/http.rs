//! HTTP server of the hub: the paths, and the handlers of long polls and demand reports. The
//! other handlers are beside their operations.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::extract::{DefaultBodyLimit, MatchedPath, Path, RawQuery, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use metrics::{Format, MetricsSnapshot};
use replica_api::error::ErrorCode;
use scheduler_api::parsed;
use scheduler_api::paths::{self, RoutesQuery};
use scheduler_api::plan::{DemandReportV1, GatewayBoot, GatewayDemand, PlanV1};
use scheduler_api::route::changes::changes_response;
use scheduler_store::Store;
use supervision::request::{Panicked, contain};
use telemetry::{ExportError, MetricsConfig, MetricsExport, Process};

use super::access::{Caller, check};
use super::api::{BODY_BYTES_MAX, Body, HubApi, json};
use super::readers::ReaderReport;
use super::scrape::{ConsoleMetrics, HubMetrics, HubPath};
use super::{
    Current, LONG_POLLS_MAX, PublishedTable, api_keys, apply, console, drains, health, placements, promote,
    shares, spokes, stopped, usage,
};
use crate::events::ReaderAhead;
use crate::respond::ErrorResponse;

/// Probes, metrics and the filter of the log, for operators on a listener of their own.
pub(super) fn operations<S: Store>(api: HubApi<S>) -> Router {
    probes()
        .merge(telemetry::logs::http::routes())
        .layer(from_fn_with_state(api.metrics.clone(), contained))
        .with_state(api)
}

fn probes<S: Store>() -> Router<HubApi<S>> {
    Router::new()
        .route(paths::LIVEZ, get(health::live::<S>))
        .route(paths::READYZ, get(health::ready::<S>))
        .route(paths::METRICS, get(scrape::<S>))
}

/// Routes of the hub. Access is checked for all of them.
pub(super) fn router<S: Store>(api: HubApi<S>) -> Router {
    probes()
        .route(paths::SPOKES, post(spokes::register::<S>))
        .route(paths::KEEP_ALIVE, post(spokes::keep_alive::<S>))
        .route(paths::LEASE, delete(spokes::deregister::<S>))
        .route(paths::ROUTES, get(routes::<S>))
        .route(paths::READER, delete(deregister_reader::<S>))
        .route(paths::DEPLOYMENTS, get(apply::deployments::<S>))
        .route(paths::TENANTS, get(apply::tenants::<S>))
        .route(paths::ROLLOUT, get(apply::rollout::<S>))
        .route(paths::PLAN, get(plan::<S>))
        .route(paths::DEMAND, post(demand::<S>))
        .route(paths::TENANT_DEMAND, post(shares::report::<S>))
        .route(paths::TENANT_SHARES, get(shares::all::<S>))
        .route(paths::USAGE, get(usage::read::<S>).post(usage::report::<S>))
        .route(paths::TRAFFIC, post(console::traffic::<S>))
        .route(paths::CONSOLE_LOGINS, post(console::create_login::<S>))
        .route(paths::APPLY, post(apply::apply::<S>).layer(DefaultBodyLimit::max(apply::BYTES_MAX)))
        .route(paths::KEYS, get(api_keys::list::<S>).post(api_keys::create::<S>))
        .route(paths::KEY, delete(api_keys::revoke::<S>))
        .route(paths::PROMOTE, post(promote::promote::<S>))
        .route(paths::DRAIN, put(drains::drain::<S>).delete(drains::undrain::<S>))
        .route_layer(from_fn_with_state(api.clone(), check::<S>))
        .fallback(async || ErrorResponse::new(ErrorCode::NotFound, "The hub has no such path."))
        .method_not_allowed_fallback(async || {
            ErrorResponse::new(ErrorCode::MethodNotAllowed, "This path does not support the method.")
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn_with_state(api.metrics.clone(), contained))
        .with_state(api)
}

/// Limits the damage of a panic to the request that caused it, and counts the request.
async fn contained(State(metrics): State<Arc<HubMetrics>>, request: Request, next: Next) -> Response {
    let method = request.method().clone();
    let path = HubPath::matched(request.extensions().get().map(MatchedPath::as_str));
    let response = contain(next.run(request)).await.unwrap_or_else(|Panicked(reason)| {
        // A defect. The request received an error and no other one is affected. Report it with the line `panicked`.
        tracing::error!(%method, reason, "request panicked");
        let message = "The request failed because of a defect of this hub; see its log.";
        ErrorResponse::new(ErrorCode::Internal, message).into_response()
    });
    metrics.requests.0.of(path).count(response.status().into());
    response
}

async fn scrape<S: Store>(State(api): State<HubApi<S>>, headers: HeaderMap) -> impl IntoResponse {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    let format = Format::negotiate(accept);
    ([(header::CONTENT_TYPE, format.content_type())], snapshot(&api).text(format))
}

/// Starts the export of the metrics, if it is configured.
pub(super) fn start_metrics_export<S: Store>(
    config: Option<&MetricsConfig>,
    api: &HubApi<S>,
) -> Result<Option<MetricsExport>, ExportError> {
    let Some(config) = config else { return Ok(None) };
    let process = Process { role: "hub", region: None };
    let api = api.clone();
    telemetry::metrics::start(config, process, move || snapshot(&api)).map(Some)
}

/// Returns the values of all metrics.
fn snapshot<S: Store>(api: &HubApi<S>) -> MetricsSnapshot {
    let current = api.current.borrow().clone();
    let table = current.as_ref().map(|published| &published.table);
    let polls = (LONG_POLLS_MAX - api.polls.available_permits(), LONG_POLLS_MAX);
    let console = api.console.as_ref().map_or(ConsoleMetrics::NONE, |console| console.metrics());
    let places = (api.plans.places(), api.plans.sharing_gateways());
    let rejected = (&*api.denials, &api.refused.counts);
    api.metrics.snapshot(table, places, (polls, console), rejected, &api.transport)
}

/// Records the demand of a gateway, and responds with its rows of the plan if they are newer than the gateway's, or
/// with 204.
async fn demand<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let RoutesQuery { after, wait: _, reader: _, changes: _ } =
        RoutesQuery::parse(query.as_deref().unwrap_or_default())?;
    let report = json::<DemandReportV1>(body)?;
    let gateway = report.gateway()?;
    let GatewayBoot { region, boot_id: _ } = gateway.clone();
    api.check_region(&region)?;
    caller.check_region(&api, &region, paths::DEMAND)?;
    let demand = api.demand_bases.restore(&gateway, report)?;
    api.demands.record(&api.store, api.lease_ttl, GatewayDemand::try_from(demand.clone())?).await?;
    api.demand_bases.keep(gateway, demand, Instant::now());
    Ok(match api.plans.rows(&region, after) {
        Some(rows) => ([(header::CONTENT_TYPE, "application/json")], rows.body()).into_response(),
        None => StatusCode::NO_CONTENT.into_response(),
    })
}

/// Returns the whole plan and the placements, for operators.
async fn plan<S: Store>(State(api): State<HubApi<S>>) -> Result<Json<PlanV1>, ErrorResponse> {
    let placements = placements::all(&api).await?;
    Ok(Json(PlanV1 { placements, ..api.plans.all() }))
}

/// Responds with a table newer than the client's as soon as there is one, or with 204 if there is none within the
/// requested time. A client that asks for changes, and has one of the last tables, gets the changes since then.
async fn routes<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
    RawQuery(query): RawQuery,
) -> Result<Response, ErrorResponse> {
    let RoutesQuery { after, wait, reader, changes } =
        RoutesQuery::parse(query.as_deref().unwrap_or_default())?;
    if let Some((reader, after)) = reader.zip(after) {
        caller.check_reader(&api, &reader, paths::ROUTES)?;
        // A report that does not fit into the queue is repeated with the next poll.
        api.readers.try_send(ReaderReport::Runs(reader, after)).ok();
    }
    let permit = api.polls.try_acquire();
    let Ok(_permit) = permit else {
        return Err(ErrorResponse::new(ErrorCode::Overloaded, "Too many polls for routes are open."));
    };
    if let (Some(reader), Some(published)) = (after, &*api.current.borrow())
        && reader > published.table.generation
        && !api.reader_ahead.swap(true, Ordering::Relaxed)
    {
        ReaderAhead { reader, ours: published.table.generation }.emit();
    }
    let mut current = api.current.clone();
    let newer = |current: &Current| {
        let generation = current.as_ref().map(|published| published.table.generation);
        generation.is_some_and(|generation| after.is_none_or(|after| generation > after))
    };
    let found = tokio::select! {
        biased;
        found = current.wait_for(newer) => found.ok().and_then(|current| current.clone()),
        () = tokio::time::sleep(wait) => None,
        () = stopped(api.stopping.clone()) => None,
    };
    match found {
        Some(published) => {
            let PublishedTable { table: _, body, history } = &*published;
            let known = after.filter(|_| changes);
            let since = known.and_then(|known| history.since(known, body.len()));
            let body = since.map_or_else(|| body.clone(), |since| changes_response(since).into());
            Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
        }
        None => Ok(StatusCode::NO_CONTENT.into_response()),
    }
}

/// Removes a reader that shuts down.
async fn deregister_reader<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
    Path(reader): Path<String>,
) -> Result<StatusCode, ErrorResponse> {
    let reader = parsed("reader", &reader)?;
    caller.check_reader(&api, &reader, paths::READER)?;
    let full = |_| {
        ErrorResponse::new(
            ErrorCode::Overloaded,
            "Too many reader requests at once; the reader's lease will expire.",
        )
    };
    api.readers.try_send(ReaderReport::Deregisters(reader)).map(|()| StatusCode::ACCEPTED).map_err(full)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Bytes;
    use identity::Transport;
    use regions::{Catalogue, RouteTable};
    use scheduler_core::table_history::TableHistory;
    use scheduler_store::SimStore;
    use std::time::Duration;
    use supervision::health::HealthCheck;
    use tokio::sync::{Semaphore, mpsc, watch};

    /// Returns a state with a limit of `polls` held polls, its stop signal, and the sender of its table.
    fn api(polls: usize) -> (HubApi<SimStore>, watch::Sender<bool>, watch::Sender<Current>) {
        let (stop, stopping) = watch::channel(false);
        let table = RouteTable::empty();
        let published = PublishedTable { table, body: Bytes::new(), history: TableHistory::default() };
        let (publish, current) = watch::channel(Some(Arc::new(published)));
        let api = HubApi {
            store: SimStore::new(),
            catalogue: Arc::new(Catalogue::builtin()),
            lease_ttl: Duration::from_secs(5),
            readers: mpsc::channel(1).0,
            current,
            plans: Arc::default(),
            demands: Arc::default(),
            demand_bases: Arc::default(),
            tenant_demands: Arc::default(),
            usage: Arc::default(),
            transport: Transport::Loopback,
            polls: Arc::new(Semaphore::new(polls)),
            placement_reports: Arc::new(Semaphore::new(placements::PLANS_MAX)),
            stopping,
            reader_ahead: Arc::default(),
            health: HealthCheck::default(),
            metrics: Arc::default(),
            denials: Arc::default(),
            tokens: None,
            refused: Arc::default(),
            console: None,
        };
        (api, stop, publish)
    }

    async fn poll(api: &HubApi<SimStore>) -> StatusCode {
        let query = RawQuery(Some("after=0.0&wait_ms=30000".to_owned()));
        routes(State(api.clone()), Caller::Local, query).await.into_response().status()
    }

    #[tokio::test]
    async fn a_hub_that_stops_ends_held_polls() {
        let (api, stop, _publish) = api(1);
        let (status, _) = tokio::join!(biased; poll(&api), async { stop.send_replace(true) });
        assert_eq!(status, StatusCode::NO_CONTENT);
    }

    #[tokio::test]
    async fn limit_of_plans_computed_at_the_same_time_is_enforced() {
        let (api, _stop, _publish) = api(1);
        let status = async || plan(State(api.clone())).await.into_response().status();
        let limit = u32::try_from(placements::PLANS_MAX).unwrap();
        let others = api.placement_reports.clone().try_acquire_many_owned(limit - 1).unwrap();
        assert_eq!(status().await, StatusCode::OK, "the last permit");
        let last = api.placement_reports.clone().try_acquire_owned().unwrap();
        assert_eq!(status().await, StatusCode::OK, "no deployment states a placement");
        let placed = r#"{"version":1,"applied":true,"deployments":[{"name":"m","task":"embed","model":"pypi://m",
            "engine":{"kind":"cpu","precision":"f32"},"residency":null,"regions":[],"placement":{"min_regions":1}}]}"#;
        api.store.put(scheduler_api::keys::DEPLOYMENTS, placed.into(), None).await.unwrap();
        assert_eq!(status().await, StatusCode::TOO_MANY_REQUESTS);
        drop((others, last));
        assert_eq!(status().await, StatusCode::OK);
    }

    #[tokio::test]
    async fn limit_of_held_polls_is_enforced() {
        let (api, stop, _publish) = api(2);
        let (first, second, third, _) =
            tokio::join!(biased; poll(&api), poll(&api), poll(&api), async { stop.send_replace(true) });
        let held = StatusCode::NO_CONTENT;
        assert_eq!((first, second, third), (held, held, StatusCode::TOO_MANY_REQUESTS));
        assert_eq!(poll(&api).await, held, "an ended poll frees a slot");
    }
}
