//! The hub's HTTP: reads what is asked, calls [`super::spokes`], [`super::demands`] and [`super::drains`], holds long polls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, RawQuery, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use regions::{Catalogue, Generation, RegionId};
use scheduler_core::access::{Access, Tokens};
use scheduler_core::lease::{LeaseHolder, LeaseId};
use scheduler_core::registry::Registration;
use scheduler_core::rollout::Reader;
use scheduler_core::wire::WireError;
use scheduler_core::wire::apply::{AppliedDeploymentsV1, AppliedV1, ApplyV1, RolloutV1};
use scheduler_core::wire::deployment::PromotedV1;
use scheduler_core::wire::plan::{DemandV1, DrainV1, GatewayDemand, PlanV1};
use scheduler_core::wire::registry::{KeepAliveV1, LeaseV1, RegisterV1};
use scheduler_core::wire::tenant::TenantsV1;
use scheduler_store::Store;
use serde::de::DeserializeOwned;
use supervision::health::Health;
use supervision::request::{Panicked, contain};
use tokio::sync::{Semaphore, mpsc, watch};

use super::access::guarded;
use super::apply::NotApplied;
use super::demands::{self, Demands};
use super::plans::Plans;
use super::readers::Word;
use super::{Current, apply, drains, health, promote, spokes, told};
use crate::events::ReaderAhead;
use crate::respond::{self, Code, Refusal};

/// Bytes of one body: ten thousand deployments of the longest name, ready and with what they can do.
const BODY_BYTES_MAX: usize = 2 << 20;
/// Bytes of the files that an operator applies: ten thousand deployments as a person writes them.
const APPLY_BYTES_MAX: usize = 8 << 20;
/// How long a question for routes is held at most, whatever it asks for.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// What answers have to do with.
#[derive(Clone)]
pub(super) struct Desk<S> {
    pub(super) store: S,
    pub(super) catalogue: Arc<Catalogue>,
    pub(super) lease_ttl: Duration,
    /// The tokens by which callers prove who they are.
    pub(super) tokens: Arc<Tokens>,
    /// Who runs which table is said here.
    pub(super) readers: mpsc::Sender<Word>,
    pub(super) current: watch::Receiver<Current>,
    /// The parts of the plan.
    pub(super) plans: Arc<Plans>,
    /// What gateways are asked for, as they have told this hub.
    pub(super) demands: Arc<Demands>,
    pub(super) polls: Arc<Semaphore>,
    pub(super) stopping: watch::Receiver<bool>,
    /// A gateway was seen to have a newer table than this hub. Told once: it asks again and again.
    pub(super) reader_ahead: Arc<AtomicBool>,
    /// Checks of the hub's own state, one at a time.
    pub(super) health: Health,
}

/// Every path of the hub, with what it needs. Only probes need nothing.
pub(super) fn router<S: Store>(desk: Desk<S>) -> Router {
    let probes =
        Router::new().route("/livez", get(health::live::<S>)).route("/readyz", get(health::ready::<S>));
    let fleet = Router::new()
        .route("/v1/spokes", post(register::<S>))
        .route("/v1/leases/{lease}/keepalive", post(keep_alive::<S>))
        .route("/v1/leases/{lease}", delete(leave::<S>))
        .route("/v1/routes", get(routes::<S>))
        .route("/v1/readers/{*reader}", delete(reader_leaves::<S>))
        .route("/v1/deployments", get(wanted::<S>))
        .route("/v1/tenants", get(tenants::<S>))
        .route("/v1/rollout", get(rollout::<S>))
        .route("/v1/plan", get(plan::<S>))
        .route("/v1/demand", post(demand::<S>));
    let operator = Router::new()
        .route("/v1/apply", post(applied::<S>).layer(DefaultBodyLimit::max(APPLY_BYTES_MAX)))
        .route("/v1/deployments/{name}/promote", post(promoted::<S>))
        .route("/v1/drains/{cloud}/{name}", put(drain::<S>).delete(undrain::<S>));
    probes
        .merge(guarded(fleet, Access::Fleet, &desk.tokens))
        .merge(guarded(operator, Access::Operator, &desk.tokens))
        .fallback(async || Refusal::new(Code::NotFound, "A hub has no such path."))
        .method_not_allowed_fallback(async || {
            Refusal::new(Code::MethodNotAllowed, "This path takes another method.")
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn(contained))
        .with_state(desk)
}

/// A request that panics costs that request and nothing else.
async fn contained(request: Request, next: Next) -> Response {
    let method = request.method().clone();
    contain(next.run(request)).await.unwrap_or_else(|Panicked(reason)| {
        tracing::error!(%method, reason, "request panicked");
        let message = "The request met a defect of this hub, which is in its log.";
        Refusal::new(Code::Internal, message).into_response()
    })
}

async fn register<S: Store>(
    State(desk): State<Desk<S>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<axum::Json<LeaseV1>, Refusal> {
    let registration = Registration::try_from(json::<RegisterV1>(body)?).map_err(wrong)?;
    spokes::register(&desk, registration).await.map(axum::Json)
}

async fn keep_alive<S: Store>(
    State(desk): State<Desk<S>>,
    Path(lease): Path<String>,
    RawQuery(query): RawQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<axum::Json<LeaseV1>, Refusal> {
    let (lease, holder) = held(&lease, query.as_deref())?;
    let state = json::<KeepAliveV1>(body)?.into_state().map_err(wrong)?;
    spokes::keep_alive(&desk, lease, &holder, state).await.map(axum::Json)
}

/// Takes what a gateway is asked for, and answers with its rows of the plan if they are newer than those it has, or with
/// 204.
async fn demand<S: Store>(
    State(desk): State<Desk<S>>,
    RawQuery(query): RawQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Refusal> {
    let Question { after, wait: _, reader: _ } = Question::read(query.as_deref().unwrap_or_default())?;
    let demand = GatewayDemand::try_from(json::<DemandV1>(body)?).map_err(wrong)?;
    let place = demand.gateway.region.clone();
    demands::note(&desk, demand).await?;
    Ok(match desk.plans.rows(&place, after) {
        Some(rows) => ([(header::CONTENT_TYPE, "application/json")], rows.body()).into_response(),
        None => StatusCode::NO_CONTENT.into_response(),
    })
}

async fn drain<S: Store>(
    State(desk): State<Desk<S>>,
    Path(region): Path<(String, String)>,
) -> Result<axum::Json<DrainV1>, Refusal> {
    drains::drain(&desk, &named(&region)?).await.map(axum::Json)
}

async fn undrain<S: Store>(
    State(desk): State<Desk<S>>,
    Path(region): Path<(String, String)>,
) -> Result<StatusCode, Refusal> {
    drains::undrain(&desk, &named(&region)?).await.map(|()| StatusCode::NO_CONTENT)
}

fn named((cloud, name): &(String, String)) -> Result<RegionId, Refusal> {
    format!("{cloud}/{name}").parse().map_err(|error| invalid("region", &format!("`region`: {error}.")))
}

async fn leave<S: Store>(
    State(desk): State<Desk<S>>,
    Path(lease): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<StatusCode, Refusal> {
    let (lease, holder) = held(&lease, query.as_deref())?;
    spokes::leave(&desk, lease, &holder).await.map(|()| StatusCode::NO_CONTENT)
}

async fn applied<S: Store>(
    State(desk): State<Desk<S>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<axum::Json<AppliedV1>, Response> {
    let message = json_of::<ApplyV1>(body, APPLY_BYTES_MAX).map_err(IntoResponse::into_response)?;
    apply::apply(&desk, message).await.map(axum::Json).map_err(|not| match not {
        NotApplied::Problems(problems) => respond::told(Code::InvalidFiles, problems),
        NotApplied::Refused(refusal) => refusal.into_response(),
    })
}

/// Lets the next model of a deployment replace the one that is served.
async fn promoted<S: Store>(
    State(desk): State<Desk<S>>,
    Path(name): Path<String>,
) -> Result<axum::Json<PromotedV1>, Refusal> {
    let name = name.parse().map_err(|error| invalid("name", &format!("`name`: {error}.")))?;
    promote::promote(&desk, name).await.map(axum::Json)
}

async fn wanted<S: Store>(State(desk): State<Desk<S>>) -> Result<axum::Json<AppliedDeploymentsV1>, Refusal> {
    apply::wanted(&desk).await.map(axum::Json)
}

async fn tenants<S: Store>(State(desk): State<Desk<S>>) -> Result<axum::Json<TenantsV1>, Refusal> {
    apply::tenants(&desk).await.map(axum::Json)
}

/// The whole plan, for operators.
async fn plan<S: Store>(State(desk): State<Desk<S>>) -> axum::Json<PlanV1> {
    axum::Json(desk.plans.all())
}

async fn rollout<S: Store>(State(desk): State<Desk<S>>) -> Result<axum::Json<RolloutV1>, Refusal> {
    apply::rollout(&desk).await.map(axum::Json)
}

/// Answers with the table that follows the one in hand, as soon as there is one, or with 204 when there is none within
/// the time that the question allows.
async fn routes<S: Store>(
    State(desk): State<Desk<S>>,
    RawQuery(query): RawQuery,
) -> Result<Response, Refusal> {
    let Question { after, wait, reader } = Question::read(query.as_deref().unwrap_or_default())?;
    if let Some((reader, after)) = reader.zip(after) {
        // What finds no room is said again with the next question.
        desk.readers.try_send(Word::Runs(reader, after)).ok();
    }
    let held = desk.polls.try_acquire();
    let Ok(_held) = held else {
        return Err(Refusal::new(Code::Overloaded, "Too many questions for routes are held already."));
    };
    if let (Some(reader), Some(published)) = (after, &*desk.current.borrow())
        && reader > published.table.generation
        && !desk.reader_ahead.swap(true, Ordering::Relaxed)
    {
        ReaderAhead { reader, ours: published.table.generation }.emit();
    }
    let mut current = desk.current.clone();
    let newer = |current: &Current| {
        let generation = current.as_ref().map(|published| published.table.generation);
        generation.is_some_and(|generation| after.is_none_or(|after| generation > after))
    };
    let found = tokio::select! {
        biased;
        found = current.wait_for(newer) => found.ok().and_then(|current| current.clone()),
        () = tokio::time::sleep(wait) => None,
        () = told(desk.stopping.clone()) => None,
    };
    match found {
        Some(published) => {
            Ok(([(header::CONTENT_TYPE, "application/json")], published.body.clone()).into_response())
        }
        None => Ok(StatusCode::NO_CONTENT.into_response()),
    }
}

/// Waits for a reader no longer that says that it goes.
async fn reader_leaves<S: Store>(
    State(desk): State<Desk<S>>,
    Path(reader): Path<String>,
) -> Result<StatusCode, Refusal> {
    let reader = reader.parse().map_err(|error| invalid("reader", &format!("`reader`: {error}.")))?;
    let full =
        |_| Refusal::new(Code::Overloaded, "Too many readers speak at once; silence says the same later.");
    desk.readers.try_send(Word::Leaves(reader)).map(|()| StatusCode::ACCEPTED).map_err(full)
}

/// A question for routes.
struct Question {
    after: Option<Generation>,
    wait: Duration,
    reader: Option<Reader>,
}

impl Question {
    /// Reads `after=EPOCH.NUMBER&wait_ms=MILLISECONDS&reader=READER`, any of which may be left out. Nothing in them needs to
    /// be escaped. A reader that names a generation runs that table.
    fn read(query: &str) -> Result<Question, Refusal> {
        let mut question = Question { after: None, wait: Duration::ZERO, reader: None };
        for (key, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            match key {
                "after" => {
                    let after =
                        value.parse().map_err(|error| invalid("after", &format!("`after`: {error}.")))?;
                    question.after = Some(after);
                }
                "wait_ms" => {
                    let wait_ms = value.parse().map_err(|_| {
                        invalid("wait_ms", "`wait_ms` is no number of milliseconds, such as 20000.")
                    })?;
                    question.wait = Duration::from_millis(wait_ms).min(WAIT_MAX);
                }
                "reader" => {
                    let reader =
                        value.parse().map_err(|error| invalid("reader", &format!("`reader`: {error}.")))?;
                    question.reader = Some(reader);
                }
                _ => {}
            }
        }
        Ok(question)
    }
}

fn json<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>) -> Result<T, Refusal> {
    json_of(body, BODY_BYTES_MAX)
}

fn json_of<T: DeserializeOwned>(body: Result<Bytes, BytesRejection>, bytes_max: usize) -> Result<T, Refusal> {
    let body = body.map_err(|rejection| match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            Refusal::new(Code::BodyTooLarge, format!("The body has more than {bytes_max} bytes."))
        }
        _ => Refusal::new(Code::InvalidJson, "The body did not arrive whole."),
    })?;
    serde_json::from_slice(&body)
        .map_err(|error| Refusal::new(Code::InvalidJson, format!("The body: {error}.")))
}

fn wrong(error: WireError) -> Refusal {
    invalid(&error.field, &format!("{error}."))
}

fn invalid(field: &str, message: &str) -> Refusal {
    Refusal::new(Code::InvalidValue, message).of(field)
}

/// The lease that a path names, and the holder that its query names.
fn held(lease: &str, query: Option<&str>) -> Result<(LeaseId, LeaseHolder), Refusal> {
    let lease = lease.parse().map_err(|error| invalid("lease", &format!("`lease`: {error}.")))?;
    let pairs = query.unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    let holder = pairs.filter(|(key, _)| *key == "holder").map(|(_, value)| value).next();
    let holder = holder.unwrap_or_default().parse();
    Ok((lease, holder.map_err(|error| invalid("holder", &format!("`holder`: {error}.")))?))
}

#[cfg(test)]
mod tests {
    use super::super::Published;
    use super::*;
    use regions::RouteTable;
    use scheduler_store::Sim;

    #[test]
    fn a_question_is_read_and_its_patience_bounded() {
        let read = |query: &str| Question::read(query).map(|question| (question.after, question.wait)).ok();
        let generation = Generation { epoch: 1, number: 42 };
        assert_eq!(read(""), Some((None, Duration::ZERO)));
        assert_eq!(read("after=1.42&wait_ms=250"), Some((Some(generation), Duration::from_millis(250))));
        assert_eq!(read("wait_ms=30000"), Some((None, WAIT_MAX)));
        assert_eq!(read("wait_ms=30001&else=1"), Some((None, WAIT_MAX)));
        assert_eq!(read("after=42"), None);
        assert_eq!(read("after=1.42&reader=somebody"), None);
        assert_eq!(read("wait_ms=-1"), None);
    }

    /// A desk at which `polls` questions are held at a time, what tells it to stop, and where its table comes from.
    fn desk(polls: usize) -> (Desk<Sim>, watch::Sender<bool>, watch::Sender<Current>) {
        let (stop, stopping) = watch::channel(false);
        let table = RouteTable::empty();
        let (publish, current) = watch::channel(Some(Arc::new(Published { table, body: Bytes::new() })));
        let desk = Desk {
            store: Sim::new(),
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
            health: Health::default(),
        };
        (desk, stop, publish)
    }

    async fn ask(desk: &Desk<Sim>) -> StatusCode {
        let query = RawQuery(Some("after=0.0&wait_ms=30000".to_owned()));
        routes(State(desk.clone()), query).await.into_response().status()
    }

    #[tokio::test]
    async fn a_hub_that_stops_lets_go_of_whoever_waits() {
        let (desk, stop, _publish) = desk(1);
        let (answer, _) = tokio::join!(biased; ask(&desk), async { stop.send_replace(true) });
        assert_eq!(answer, StatusCode::NO_CONTENT);
    }

    #[tokio::test]
    async fn as_many_questions_as_there_may_be_are_held_and_one_more_is_not() {
        let (desk, stop, _publish) = desk(2);
        let (first, second, third, _) =
            tokio::join!(biased; ask(&desk), ask(&desk), ask(&desk), async { stop.send_replace(true) });
        let held = StatusCode::NO_CONTENT;
        assert_eq!((first, second, third), (held, held, StatusCode::TOO_MANY_REQUESTS));
        assert_eq!(ask(&desk).await, held, "who was let go of makes room");
    }
}
