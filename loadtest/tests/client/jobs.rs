//! Jobs: submission, polls, results, and what happens when gateways fail.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use loadtest::client::jobs::{
    ClientJobError, ClientJobFilter, ClientJobStatus, IN_FLIGHT_DEFAULT, JobKind, SubmitOptions,
};
use loadtest::client::{Client, ClientError, ClientSettings, EndpointSettings, HttpAttemptError, Preference};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Queue that several gateways serve. A job is finished at its second poll.
#[derive(Default)]
struct ScriptedQueue {
    /// Jobs by idempotency key.
    keys: Mutex<BTreeMap<String, String>>,
    /// Polls of each job.
    polls: Mutex<BTreeMap<String, usize>>,
    /// Requests that are rejected first, with this status.
    rejections: Mutex<Vec<u16>>,
    headers: Mutex<HeaderMap>,
    queries: Mutex<Vec<String>>,
    in_flight: AtomicUsize,
    in_flight_max: AtomicUsize,
    /// Base URL to which requests for finished jobs are redirected.
    redirect: Mutex<Option<String>>,
}

struct Gateway {
    url: String,
    task: JoinHandle<()>,
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Gateway {
    async fn start(queue: &Arc<ScriptedQueue>) -> Gateway {
        Gateway::at("127.0.0.1:0", queue).await
    }

    async fn at(address: &str, queue: &Arc<ScriptedQueue>) -> Gateway {
        let router = Router::new()
            .route("/v1/async/embeddings", post(submit))
            .route("/v1/async/{id}", get(read).delete(cancel))
            .route("/v1/async", get(list))
            .with_state(Arc::clone(queue));
        let listener = TcpListener::bind(address).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Gateway { url, task }
    }
}

fn client(gateways: &[&Gateway]) -> Arc<Client> {
    let endpoints = gateways.iter().map(|gateway| EndpointSettings::new(&gateway.url, Some("key"))).collect();
    Arc::new(Client::new(&ClientSettings { endpoints, ..ClientSettings::default() }).unwrap())
}

fn fast() -> Preference {
    let mut preference = Preference::default();
    preference.retries.backoff_first = Duration::from_millis(2);
    preference
}

fn shown(id: &str, status: &str) -> Value {
    json!({"id": id, "object": "job", "status": status, "operation": "embeddings", "model": "m", "priority": "bulk", "inputs": 1,
           "attempts": 1, "created_at": 1, "expires_at": 9})
}

type Reply = (StatusCode, axum::Json<Value>);

fn rejection(queue: &ScriptedQueue) -> Option<Reply> {
    let status = queue.rejections.lock().unwrap().pop()?;
    let error = json!({"error": {"message": "scripted"}});
    Some((StatusCode::from_u16(status).unwrap(), axum::Json(error)))
}

async fn submit(State(queue): State<Arc<ScriptedQueue>>, headers: HeaderMap) -> impl IntoResponse {
    let mut keys = queue.keys.lock().unwrap();
    let key = headers["idempotency-key"].to_str().unwrap().to_owned();
    let next = keys.len();
    let id = keys.entry(key).or_insert_with(|| format!("job_{next}.aws.us-east-1")).clone();
    *queue.headers.lock().unwrap() = headers;
    // The job is stored although the response is an error.
    rejection(&queue).unwrap_or_else(|| (StatusCode::ACCEPTED, axum::Json(shown(&id, "queued"))))
}

async fn read(State(queue): State<Arc<ScriptedQueue>>, Path(id): Path<String>) -> impl IntoResponse {
    let running = queue.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
    queue.in_flight_max.fetch_max(running, Ordering::SeqCst);
    tokio::task::yield_now().await;
    queue.in_flight.fetch_sub(1, Ordering::SeqCst);
    if let Some(rejection) = rejection(&queue) {
        return rejection.into_response();
    }
    if let Some(base) = queue.redirect.lock().unwrap().clone() {
        let location = format!("{base}/v1/async/{id}");
        return (
            StatusCode::TEMPORARY_REDIRECT,
            [("location", location)],
            axum::Json(json!({"error": {"message": "elsewhere"}})),
        )
            .into_response();
    }
    let mut polls = queue.polls.lock().unwrap();
    let polls = polls.entry(id.clone()).or_default();
    *polls += 1;
    let name = id.split('.').next().unwrap();
    let job = match name {
        "job_unknown" => {
            return (StatusCode::NOT_FOUND, axum::Json(json!({"error": {"message": "no such job"}})))
                .into_response();
        }
        "job_never" => shown(&id, "running"),
        "job_failed" | "job_expired" => {
            let mut job = shown(&id, name.trim_start_matches("job_"));
            job["error"] = json!({"message": "the reason"});
            job
        }
        "job_cancelled" => shown(&id, "cancelled"),
        _ if *polls == 1 => {
            let mut job = shown(&id, "queued");
            job["estimated_start_seconds"] = json!(0.01);
            job
        }
        _ => {
            let mut job = shown(&id, "succeeded");
            job["result"] = json!({ "of": id });
            job
        }
    };
    (StatusCode::OK, axum::Json(job)).into_response()
}

async fn cancel(Path(id): Path<String>) -> Reply {
    match id.as_str() {
        "job_done.aws.us-east-1" => {
            (StatusCode::CONFLICT, axum::Json(json!({"error": {"message": "finished"}})))
        }
        "job_unknown.aws.us-east-1" => {
            (StatusCode::NOT_FOUND, axum::Json(json!({"error": {"message": "none"}})))
        }
        _ => (StatusCode::OK, axum::Json(shown(&id, "cancelled"))),
    }
}

async fn list(State(queue): State<Arc<ScriptedQueue>>, uri: Uri) -> impl IntoResponse {
    queue.queries.lock().unwrap().push(uri.query().unwrap_or("").to_owned());
    axum::Json(json!({"object": "list", "data": [shown("job_1.aws.us-east-1", "queued")], "has_more": true,
                      "unavailable_regions": ["gcp/europe-west4"]}))
}

#[tokio::test]
async fn a_repeated_submission_is_one_job_and_has_the_options() {
    let queue = Arc::new(ScriptedQueue::default());
    let (one, two) = (Gateway::start(&queue).await, Gateway::start(&queue).await);
    *queue.rejections.lock().unwrap() = vec![503, 500, 429];
    let options = SubmitOptions {
        priority: Some(replica_api::priority::Priority::Bulk),
        deadline: Some(Duration::from_secs(60)),
        max_time_in_queue: Some(Duration::from_secs(5)),
        ..SubmitOptions::default()
    };
    let client = client(&[&one, &two]);
    let job = client.submit(JobKind::Embeddings, b"{}", &options, &fast()).await.unwrap();
    assert_eq!((job.id.as_str(), job.status), ("job_0.aws.us-east-1", ClientJobStatus::Queued));
    assert_eq!(queue.keys.lock().unwrap().len(), 1, "the four attempts have one key");
    let headers = queue.headers.lock().unwrap().clone();
    assert_eq!(headers["x-meridian-priority"], "bulk");
    assert_eq!(
        (&headers["x-meridian-deadline-ms"], &headers["x-meridian-max-time-in-queue-ms"]),
        (&"60000".parse().unwrap(), &"5000".parse().unwrap())
    );
    let again = client.submit(JobKind::Embeddings, b"{}", &SubmitOptions::default(), &fast()).await.unwrap();
    assert_ne!(again.id, job.id, "another submission has another key");
    let wrong = SubmitOptions {
        idempotency_key: Some("é".to_owned()),
        deadline: Some(Duration::ZERO),
        ..SubmitOptions::default()
    };
    let error = client.submit(JobKind::Embeddings, b"{}", &wrong, &fast()).await.unwrap_err();
    assert!(matches!(&error, ClientError::Invalid(problems) if problems.len() == 2), "{error}");
}

#[tokio::test]
async fn a_wait_returns_the_result_or_the_reason_why_there_is_none() {
    let queue = Arc::new(ScriptedQueue::default());
    let gateway = Gateway::start(&queue).await;
    let client = client(&[&gateway]);
    *queue.rejections.lock().unwrap() = vec![503, 500];
    let wait = async |name: &str| {
        let id = format!("{name}.aws.us-east-1");
        client.wait(&id, Some(Duration::from_secs(20)), &fast()).await
    };
    let result = wait("job_1").await.unwrap();
    assert_eq!(
        (result.job.id.as_str(), result.body),
        ("job_1.aws.us-east-1", br#"{"of":"job_1.aws.us-east-1"}"#.to_vec())
    );
    let reason = "the reason".to_owned();
    let id = |name: &str| format!("{name}.aws.us-east-1");
    assert_eq!(
        wait("job_failed").await,
        Err(ClientJobError::Failed { id: id("job_failed"), reason: reason.clone() })
    );
    assert_eq!(wait("job_expired").await, Err(ClientJobError::Expired { id: id("job_expired"), reason }));
    assert_eq!(wait("job_cancelled").await, Err(ClientJobError::Cancelled { id: id("job_cancelled") }));
    assert_eq!(wait("job_unknown").await, Err(ClientJobError::NotFound { id: id("job_unknown") }));
    let timeout = Duration::from_millis(50);
    let timed_out = client.wait(&id("job_never"), Some(timeout), &fast()).await;
    assert_eq!(timed_out, Err(ClientJobError::Timeout { id: id("job_never"), timeout }));
    *queue.rejections.lock().unwrap() = vec![401];
    let rejected = wait("job_1").await.unwrap_err();
    let is_status = matches!(
        &rejected,
        ClientJobError::Request(ClientError::Failed {
            failure: HttpAttemptError::ErrorStatus { status: 401, .. },
            ..
        })
    );
    assert!(is_status, "{rejected}");
    assert!(matches!(wait("a/b").await, Err(ClientJobError::Request(ClientError::Invalid(_)))));
}

#[tokio::test]
async fn a_redirect_is_followed_once_and_only_to_an_endpoint_of_the_client() {
    let (queue, foreign) = (Arc::new(ScriptedQueue::default()), Arc::new(ScriptedQueue::default()));
    let (here, there) = (Gateway::start(&foreign).await, Gateway::start(&queue).await);
    *foreign.redirect.lock().unwrap() = Some(there.url.clone());
    let id = "job_1.aws.us-east-1";
    let timeout = Some(Duration::from_secs(20));
    let both = client(&[&here, &there]);
    for _ in 0..4 {
        let result = both.wait(id, timeout, &fast()).await.unwrap();
        assert_eq!(result.body, json!({ "of": id }).to_string().into_bytes());
    }
    let polls = queue.polls.lock().unwrap()[id];
    let error = client(&[&here]).wait(id, timeout, &fast()).await.unwrap_err();
    let location = format!("{}/v1/async/{id}", there.url);
    let is_redirect = matches!(
        &error,
        ClientJobError::Request(ClientError::Failed {
            failure: HttpAttemptError::Redirected { location: named, .. },
            ..
        }) if *named == location
    );
    assert!(is_redirect && error.to_string().contains("elsewhere"), "{error}");
    assert_eq!(
        queue.polls.lock().unwrap()[id],
        polls,
        "no request was sent to a host that the client does not know"
    );
    // Two gateways that redirect to each other.
    *queue.redirect.lock().unwrap() = Some(here.url.clone());
    let error = both.wait(id, timeout, &fast()).await.unwrap_err();
    assert!(error.to_string().contains("redirected to"), "{error}");
}

#[tokio::test]
async fn each_job_is_returned_once_although_a_gateway_is_lost_and_another_restarts() {
    let queue = Arc::new(ScriptedQueue::default());
    let (lost, restarted) = (Gateway::start(&queue).await, Gateway::start(&queue).await);
    let client = client(&[&lost, &restarted]);
    let all: Vec<String> = (0..300).map(|number| format!("job_{number}.aws.us-east-1")).collect();
    let mut results = client.results(all.clone().into_iter(), 4, &fast()).unwrap();
    let (mut finished, mut lost, mut restarted) = (Vec::new(), Some(lost), Some(restarted));
    while let Some((id, result)) = results.next().await {
        assert_eq!(result.unwrap().body, json!({ "of": id }).to_string().into_bytes());
        finished.push(id);
        if finished.len() == 50 {
            drop(lost.take());
        }
        if finished.len() == 100 {
            let old = restarted.take().unwrap();
            old.task.abort();
            while !old.task.is_finished() {
                tokio::task::yield_now().await;
            }
            let address = old.url.trim_start_matches("http://").to_owned();
            let queue = Arc::clone(&queue);
            restarted = Some(Gateway::at(&address, &queue).await);
        }
    }
    finished.sort();
    let mut expected = all;
    expected.sort();
    assert_eq!(finished, expected);
    let in_flight = queue.in_flight_max.load(Ordering::SeqCst);
    assert!(in_flight <= 4, "{in_flight} requests at a time");
}

#[tokio::test]
async fn failed_jobs_do_not_end_the_iteration_and_a_dropped_wait_loses_nothing() {
    let queue = Arc::new(ScriptedQueue::default());
    let gateway = Gateway::start(&queue).await;
    let names = ["job_failed", "job_1", "job_unknown", "job_2"];
    let ids = names.map(|name| format!("{name}.aws.us-east-1"));
    let mut results = client(&[&gateway]).results(ids.into_iter(), IN_FLIGHT_DEFAULT, &fast()).unwrap();
    let mut outcomes = BTreeMap::new();
    loop {
        // Dropped again and again before its end.
        let next = tokio::time::timeout(Duration::from_millis(1), results.next()).await;
        match next {
            Err(_) => {}
            Ok(Some((id, result))) => drop(outcomes.insert(id, result.is_ok())),
            Ok(None) => break,
        }
    }
    let outcomes: Vec<bool> = names.iter().map(|name| outcomes[&format!("{name}.aws.us-east-1")]).collect();
    assert_eq!(outcomes, [false, true, false, true]);
    let error = client(&[&gateway]).results(std::iter::empty(), 0, &fast()).err().unwrap();
    assert!(error.to_string().contains("max_concurrent 0"), "{error}");
}

#[tokio::test]
async fn jobs_are_cancelled_and_listed() {
    let queue = Arc::new(ScriptedQueue::default());
    let gateway = Gateway::start(&queue).await;
    let client = client(&[&gateway]);
    let id = |name: &str| format!("{name}.aws.us-east-1");
    assert_eq!(client.cancel(&id("job_1"), &fast()).await.unwrap().status, ClientJobStatus::Cancelled);
    let finished = client.cancel(&id("job_done"), &fast()).await;
    assert_eq!(finished, Err(ClientJobError::Finished { id: id("job_done") }));
    let unknown = client.cancel(&id("job_unknown"), &fast()).await;
    assert_eq!(unknown, Err(ClientJobError::NotFound { id: id("job_unknown") }));
    let filter = ClientJobFilter {
        status: Some(ClientJobStatus::Queued),
        limit: Some(1),
        ..ClientJobFilter::default()
    };
    let page = client.jobs(&filter, &fast()).await.unwrap();
    assert_eq!((page.jobs[0].id.as_str(), page.has_more), ("job_1.aws.us-east-1", true));
    assert_eq!(page.unavailable_regions, ["gcp/europe-west4"]);
    assert_eq!(*queue.queries.lock().unwrap(), ["status=queued&limit=1"]);
}
