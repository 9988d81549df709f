//! HTTP handlers of the hub: parse requests, call [`super::spokes`], [`super::demands`] and [`super::drains`], hold
//! long polls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, MatchedPath, Path, RawQuery, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use regions::{Catalogue, Generation, RegionId};
use scheduler_api::WireError;
use scheduler_api::apply::{AppliedDeploymentsV1, AppliedV1, ApplyV1, RolloutV1};
use scheduler_api::deployment::PromotedV1;
use scheduler_api::lease::{LeaseHolder, LeaseId};
use scheduler_api::plan::{DemandV1, DrainV1, GatewayDemand, PlanV1};
use scheduler_api::reader::Reader;
use scheduler_api::registration::{KeepAliveV1, LeaseV1, RegisterV1, Registration};
use scheduler_api::tenant::TenantsV1;
use scheduler_core::access::{Access, Tokens};
use scheduler_store::Store;
use serde::de::DeserializeOwned;
use supervision::health::HealthCheck;
use supervision::request::{Panicked, contain};
use tokio::sync::{Semaphore, mpsc, watch};

use super::access::guarded;
use super::apply::NotApplied;
use super::demands::{self, DemandRecords};
use super::plans::PublishedPlan;
use super::readers::ReaderReport;
use super::scrape::{HubMetrics, HubPath};
use super::{Current, LONG_POLLS_MAX, apply, drains, health, promote, spokes, stopped};
use crate::events::ReaderAhead;
use crate::respond::{self, Code, ErrorResponse};

/// Maximum bytes of a request body: ten thousand deployments with the longest names, ready and with their capacity.
const BODY_BYTES_MAX: usize = 2 << 20;
/// Maximum bytes of the files that an operator applies: ten thousand deployments as a person writes them.
const APPLY_BYTES_MAX: usize = 8 << 20;
/// Maximum time for which a poll for routes is held, whatever it requests.
const POLL_WAIT_MAX: Duration = Duration::from_secs(30);

/// State shared by the handlers.
#[derive(Clone)]
pub(super) struct HubApi<S> {
    pub(super) store: S,
    pub(super) catalogue: Arc<Catalogue>,
    pub(super) lease_ttl: Duration,
    /// Tokens that authorise callers.
    pub(super) tokens: Arc<Tokens>,
    /// Queue of reports about which reader runs which table.
    pub(super) readers: mpsc::Sender<ReaderReport>,
    pub(super) current: watch::Receiver<Current>,
    /// The published plan.
    pub(super) plans: Arc<PublishedPlan>,
    /// Demand that gateways have reported to this hub.
    pub(super) demands: Arc<DemandRecords>,
    pub(super) polls: Arc<Semaphore>,
    pub(super) stopping: watch::Receiver<bool>,
    /// A gateway with a newer table than this hub was observed. Logged once, since the gateway repeats its poll.
    pub(super) reader_ahead: Arc<AtomicBool>,
    /// Checks of the hub's own state, one at a time.
    pub(super) health: HealthCheck,
    pub(super) metrics: Arc<HubMetrics>,
}

/// Routes of the hub with their required access. Only probes and metrics need no token.
pub(super) fn router<S: Store>(api: HubApi<S>) -> Router {
    let probes = Router::new()
        .route(HubPath::Livez.as_str(), get(health::live::<S>))
        .route(HubPath::Readyz.as_str(), get(health::ready::<S>))
        .route(HubPath::Metrics.as_str(), get(scrape::<S>));
    let fleet = Router::new()
        .route(HubPath::Spokes.as_str(), post(register::<S>))
        .route(HubPath::KeepAlive.as_str(), post(keep_alive::<S>))
        .route(HubPath::Lease.as_str(), delete(deregister::<S>))
        .route(HubPath::Routes.as_str(), get(routes::<S>))
        .route(HubPath::Reader.as_str(), delete(deregister_reader::<S>))
        .route(HubPath::Deployments.as_str(), get(deployments::<S>))
        .route(HubPath::Tenants.as_str(), get(tenants::<S>))
        .route(HubPath::Rollout.as_str(), get(rollout::<S>))
        .route(HubPath::Plan.as_str(), get(plan::<S>))
        .route(HubPath::Demand.as_str(), post(demand::<S>));
    let operator = Router::new()
        .route(HubPath::Apply.as_str(), post(apply_files::<S>).layer(DefaultBodyLimit::max(APPLY_BYTES_MAX)))
        .route(HubPath::Promote.as_str(), post(promote_model::<S>))
        .route(HubPath::Drain.as_str(), put(drain::<S>).delete(undrain::<S>));
    probes
        .merge(guarded(fleet, Access::Fleet, &api.tokens))
        .merge(guarded(operator, Access::Operator, &api.tokens))
        .fallback(async || ErrorResponse::new(Code::NotFound, "The hub has no such path."))
        .method_not_allowed_fallback(async || {
            ErrorResponse::new(Code::MethodNotAllowed, "This path does not support the method.")
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
        ErrorResponse::new(Code::Internal, message).into_response()
    });
    metrics.requests.0.of(path).count(response.status().into());
    response
}

async fn scrape<S: Store>(State(api): State<HubApi<S>>) -> impl IntoResponse {
    let current = api.current.borrow().clone();
    let table = current.as_ref().map(|published| &published.table);
    let polls = (LONG_POLLS_MAX - api.polls.available_permits(), LONG_POLLS_MAX);
    let text = api.metrics.render(table, api.plans.places(), polls);
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text)
}

async fn register<S: Store>(
    State(api): State<HubApi<S>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<axum::Json<LeaseV1>, ErrorResponse> {
    let registration = Registration::try_from(json::<RegisterV1>(body)?).map_err(invalid_wire)?;
    spokes::register(&api, registration).await.map(axum::Json)
}

async fn keep_alive<S: Store>(
    State(api): State<HubApi<S>>,
    Path(lease): Path<String>,
    RawQuery(query): RawQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<axum::Json<LeaseV1>, ErrorResponse> {
    let (lease, holder) = lease_and_holder(&lease, query.as_deref())?;
    let state = json::<KeepAliveV1>(body)?.into_state().map_err(invalid_wire)?;
    spokes::keep_alive(&api, lease, &holder, state).await.map(axum::Json)
}

/// Records the demand of a gateway, and responds with its rows of the plan if they are newer than the gateway's, or
/// with 204.
async fn demand<S: Store>(
    State(api): State<HubApi<S>>,
    RawQuery(query): RawQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ErrorResponse> {
    let PollQuery { after, wait: _, reader: _ } = PollQuery::read(query.as_deref().unwrap_or_default())?;
    let demand = GatewayDemand::try_from(json::<DemandV1>(body)?).map_err(invalid_wire)?;
    let region = demand.gateway.region.clone();
    demands::record(&api, demand).await?;
    Ok(match api.plans.rows(&region, after) {
        Some(rows) => ([(header::CONTENT_TYPE, "application/json")], rows.body()).into_response(),
        None => StatusCode::NO_CONTENT.into_response(),
    })
}

async fn drain<S: Store>(
    State(api): State<HubApi<S>>,
    Path(region): Path<(String, String)>,
) -> Result<axum::Json<DrainV1>, ErrorResponse> {
    drains::drain(&api, &region_of(&region)?).await.map(axum::Json)
}

async fn undrain<S: Store>(
    State(api): State<HubApi<S>>,
    Path(region): Path<(String, String)>,
) -> Result<StatusCode, ErrorResponse> {
    drains::undrain(&api, &region_of(&region)?).await.map(|()| StatusCode::NO_CONTENT)
}

fn region_of((cloud, name): &(String, String)) -> Result<RegionId, ErrorResponse> {
    format!("{cloud}/{name}").parse().map_err(|error| invalid("region", &format!("`region`: {error}.")))
}

async fn deregister<S: Store>(
    State(api): State<HubApi<S>>,
    Path(lease): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<StatusCode, ErrorResponse> {
    let (lease, holder) = lease_and_holder(&lease, query.as_deref())?;
    spokes::deregister(&api, lease, &holder).await.map(|()| StatusCode::NO_CONTENT)
}

async fn apply_files<S: Store>(
    State(api): State<HubApi<S>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<axum::Json<AppliedV1>, Response> {
    let message = json_of::<ApplyV1>(body, APPLY_BYTES_MAX).map_err(IntoResponse::into_response)?;
    apply::apply(&api, message).await.map(axum::Json).map_err(|not| match not {
        NotApplied::Problems(problems) => respond::with_body(Code::InvalidFiles, problems),
        NotApplied::Other(error) => error.into_response(),
    })
}

/// Promotes the next model of a deployment.
async fn promote_model<S: Store>(
    State(api): State<HubApi<S>>,
    Path(name): Path<String>,
) -> Result<axum::Json<PromotedV1>, ErrorResponse> {
    let name = name.parse().map_err(|error| invalid("name", &format!("`name`: {error}.")))?;
    promote::promote(&api, name).await.map(axum::Json)
}

async fn deployments<S: Store>(
    State(api): State<HubApi<S>>,
) -> Result<axum::Json<AppliedDeploymentsV1>, ErrorResponse> {
    apply::deployments(&api).await.map(axum::Json)
}

async fn tenants<S: Store>(State(api): State<HubApi<S>>) -> Result<axum::Json<TenantsV1>, ErrorResponse> {
    apply::tenants(&api).await.map(axum::Json)
}

/// Returns the whole plan, for operators.
async fn plan<S: Store>(State(api): State<HubApi<S>>) -> axum::Json<PlanV1> {
    axum::Json(api.plans.all())
}

async fn rollout<S: Store>(State(api): State<HubApi<S>>) -> Result<axum::Json<RolloutV1>, ErrorResponse> {
    apply::rollout(&api).await.map(axum::Json)
}

/// Responds with a table newer than the client's as soon as there is one, or with 204 if there is none within the
/// requested time.
async fn routes<S: Store>(
    State(api): State<HubApi<S>>,
    RawQuery(query): RawQuery,
) -> Result<Response, ErrorResponse> {
    let PollQuery { after, wait, reader } = PollQuery::read(query.as_deref().unwrap_or_default())?;
    if let Some((reader, after)) = reader.zip(after) {
        // A report that does not fit into the queue is repeated with the next poll.
        api.readers.try_send(ReaderReport::Runs(reader, after)).ok();
    }
    let permit = api.polls.try_acquire();
    let Ok(_permit) = permit else {
        return Err(ErrorResponse::new(Code::Overloaded, "Too many polls for routes are open."));
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
            Ok(([(header::CONTENT_TYPE, "application/json")], published.body.clone()).into_response())
        }
        None => Ok(StatusCode::NO_CONTENT.into_response()),
    }
}

/// Removes a reader that shuts down.
async fn deregister_reader<S: Store>(
    State(api): State<HubApi<S>>,
    Path(reader): Path<String>,
) -> Result<StatusCode, ErrorResponse> {
    let reader = reader.parse().map_err(|error| invalid("reader", &format!("`reader`: {error}.")))?;
    let full = |_| {
        ErrorResponse::new(
            Code::Overloaded,
            "Too many reader requests at once; the reader's lease will expire.",
        )
    };
    api.readers.try_send(ReaderReport::Deregisters(reader)).map(|()| StatusCode::ACCEPTED).map_err(full)
}

/// Query of a poll for routes.
struct PollQuery {
    after: Option<Generation>,
    wait: Duration,
    reader: Option<Reader>,
}

impl PollQuery {
    /// Parses `after=EPOCH.NUMBER&wait_ms=MILLISECONDS&reader=READER`, each of which is optional. None of the values
    /// needs escaping. A reader that sends `after` runs that table.
    fn read(query: &str) -> Result<PollQuery, ErrorResponse> {
        let mut parsed = PollQuery { after: None, wait: Duration::ZERO, reader: None };
        for (key, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            match key {
                "after" => {
                    let after =
                        value.parse().map_err(|error| invalid("after", &format!("`after`: {error}.")))?;
                    parsed.after = Some(after);
                }
                "wait_ms" => {
                    let wait_ms = value.parse().map_err(|_| {
                        invalid("wait_ms", "`wait_ms` is not a number of milliseconds, such as 20000.")
                    })?;
                    parsed.wait = Duration::from_millis(wait_ms).min(POLL_WAIT_MAX);
                }
                "reader" => {
                    let reader =
                        value.parse().map_err(|error| invalid("reader", &format!("`reader`: {error}.")))?;
                    parsed.reader = Some(reader);
                }
                _ => {}
            }
        }
        Ok(parsed)
    }
}

fn json<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>) -> Result<T, ErrorResponse> {
    json_of(body, BODY_BYTES_MAX)
}

fn json_of<T: DeserializeOwned>(
    body: Result<Bytes, BytesRejection>,
    bytes_max: usize,
) -> Result<T, ErrorResponse> {
    let body = body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            ErrorResponse::new(Code::BodyTooLarge, format!("The body has more than {bytes_max} bytes."))
        }
        _ => ErrorResponse::new(Code::InvalidJson, "The body is incomplete."),
    })?;
    serde_json::from_slice(&body)
        .map_err(|error| ErrorResponse::new(Code::InvalidJson, format!("The body: {error}.")))
}

fn invalid_wire(error: WireError) -> ErrorResponse {
    invalid(&error.field, &format!("{error}."))
}

fn invalid(field: &str, message: &str) -> ErrorResponse {
    ErrorResponse::new(Code::InvalidValue, message).with_field(field)
}

/// Parses the lease of a path and the holder of its query.
fn lease_and_holder(lease: &str, query: Option<&str>) -> Result<(LeaseId, LeaseHolder), ErrorResponse> {
    let lease = lease.parse().map_err(|error| invalid("lease", &format!("`lease`: {error}.")))?;
    let pairs = query.unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    let holder = pairs.filter(|(key, _)| *key == "holder").map(|(_, value)| value).next();
    let holder = holder.unwrap_or_default().parse();
    Ok((lease, holder.map_err(|error| invalid("holder", &format!("`holder`: {error}.")))?))
}

#[cfg(test)]
mod tests {
    use super::super::PublishedTable;
    use super::*;
    use regions::RouteTable;
    use scheduler_store::SimStore;

    #[test]
    fn poll_queries_are_parsed_and_their_wait_is_limited() {
        let read = |query: &str| PollQuery::read(query).map(|query| (query.after, query.wait)).ok();
        let generation = Generation { epoch: 1, number: 42 };
        assert_eq!(read(""), Some((None, Duration::ZERO)));
        assert_eq!(read("after=1.42&wait_ms=250"), Some((Some(generation), Duration::from_millis(250))));
        assert_eq!(read("wait_ms=30000"), Some((None, POLL_WAIT_MAX)));
        assert_eq!(read("wait_ms=30001&else=1"), Some((None, POLL_WAIT_MAX)));
        assert_eq!(read("after=42"), None);
        assert_eq!(read("after=1.42&reader=unknown"), None);
        assert_eq!(read("wait_ms=-1"), None);
    }

    /// Returns a state with a limit of `polls` held polls, its stop signal, and the sender of its table.
    fn api(polls: usize) -> (HubApi<SimStore>, watch::Sender<bool>, watch::Sender<Current>) {
        let (stop, stopping) = watch::channel(false);
        let table = RouteTable::empty();
        let (publish, current) = watch::channel(Some(Arc::new(PublishedTable { table, body: Bytes::new() })));
        let api = HubApi {
            store: SimStore::new(),
            catalogue: Arc::new(Catalogue::builtin()),
            lease_ttl: Duration::from_secs(5),
            tokens: Arc::default(),
            readers: mpsc::channel(1).0,
            current,
            plans: Arc::default(),
            demands: Arc::default(),
            polls: Arc::new(Semaphore::new(polls)),
            stopping,
            reader_ahead: Arc::default(),
            health: HealthCheck::default(),
            metrics: Arc::default(),
        };
        (api, stop, publish)
    }

    async fn poll(api: &HubApi<SimStore>) -> StatusCode {
        let query = RawQuery(Some("after=0.0&wait_ms=30000".to_owned()));
        routes(State(api.clone()), query).await.into_response().status()
    }

    #[tokio::test]
    async fn a_hub_that_stops_ends_held_polls() {
        let (api, stop, _publish) = api(1);
        let (status, _) = tokio::join!(biased; poll(&api), async { stop.send_replace(true) });
        assert_eq!(status, StatusCode::NO_CONTENT);
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
