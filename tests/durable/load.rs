//! Clients that submit jobs, and the comparison of all jobs with what was accepted.

use crate::fleet::{KEY, TIMEOUT};
use crate::replica;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use supervision::Mutex;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Clients.
const CONCURRENCY: usize = 64;
/// Timeout of a request: a process that was killed may leave a connection without a response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time until a job is finished: that of a long queue on a slow machine.
const FINISHED_TIMEOUT: Duration = Duration::from_secs(600);
/// Pause after a response that asks for one, and while a job is not finished.
const PAUSE: Duration = Duration::from_millis(100);
/// One job of so many is cancelled, and one submission of so many is repeated with its key.
const CANCELLED_EVERY: usize = 20;
const REPEATED_EVERY: usize = 8;
/// Jobs whose result is also compared with the response to the ordinary request.
const COMPARED_WITH_RESPONSE: usize = 50;
const PATH: &str = "/v1/async/embeddings";

/// Load of a number of jobs.
pub(crate) struct Load {
    pub(crate) jobs: usize,
    /// Deployments, which take turns.
    pub(crate) deployments: &'static [&'static str],
}

/// An accepted job.
#[derive(Clone)]
struct Accepted {
    id: String,
    /// Whether its cancellation was confirmed.
    is_cancelled: bool,
}

/// Responses to all submissions.
#[derive(Default)]
pub(crate) struct Submissions {
    accepted: BTreeMap<usize, Accepted>,
    /// Requests that were sent to submit a job.
    sent: u64,
    /// Responses other than 202, by code; the client repeated the request.
    rejected: BTreeMap<String, u64>,
}

/// Result of a run: the row of its table.
pub(crate) struct Outcome {
    pub(crate) submitted: u64,
    pub(crate) accepted: usize,
    pub(crate) rejected: BTreeMap<String, u64>,
    pub(crate) succeeded: usize,
    pub(crate) cancelled: usize,
    pub(crate) kills: usize,
    pub(crate) duplicates: usize,
    pub(crate) lost: usize,
    pub(crate) seconds: f64,
}

/// Status and body of a response; without one the reason.
pub(crate) type ClientResult = Result<(u16, Value), String>;

/// Client of all gateways.
#[derive(Clone)]
pub(crate) struct Client {
    gateways: Vec<String>,
    http: reqwest::Client,
}

impl Load {
    fn deployment(&self, number: usize) -> &'static str {
        self.deployments[number % self.deployments.len()]
    }

    fn text(number: usize) -> String {
        format!("text of the job {number}")
    }

    fn body(&self, number: usize) -> String {
        json!({"model": self.deployment(number), "input": [Load::text(number)]}).to_string()
    }

    /// Submits all jobs, and counts those that have begun in `next`. A client waits before a job whose number is at least
    /// `limit`, so that the load lasts as long as the faults.
    pub(crate) async fn submit(
        self: Arc<Load>,
        gateways: &[String],
        next: Arc<AtomicUsize>,
        limit: watch::Receiver<usize>,
    ) -> Submissions {
        let client = Client::new(gateways);
        let submissions = Arc::new(Mutex::new(Submissions::default()));
        let mut clients = JoinSet::new();
        for _ in 0..CONCURRENCY {
            let (load, client, next) = (self.clone(), client.clone(), next.clone());
            let (submissions, mut limit) = (submissions.clone(), limit.clone());
            clients.spawn(async move {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= load.jobs {
                        return;
                    }
                    limit.wait_for(|limit| number < *limit).await.unwrap();
                    let accepted = load.submit_one(&client, number, &submissions).await;
                    submissions.lock().accepted.insert(number, accepted);
                }
            });
        }
        while let Some(ended) = clients.join_next().await {
            ended.unwrap();
        }
        Arc::into_inner(submissions).unwrap().into_inner()
    }

    async fn submit_one(&self, client: &Client, number: usize, counts: &Mutex<Submissions>) -> Accepted {
        let id = self.accepted_id(client, number, number, counts).await;
        if number % REPEATED_EVERY == 1 {
            // At another gateway, later.
            tokio::time::sleep(PAUSE).await;
            let again = self.accepted_id(client, number, number + 1, counts).await;
            assert_eq!(again, id, "job {number}: one job for an idempotency key");
        }
        let mut is_cancelled = false;
        if number % CANCELLED_EVERY == 7 {
            let path = format!("/v1/async/{id}");
            let begun = Instant::now();
            is_cancelled = loop {
                match client.send(reqwest::Method::DELETE, number, &path, None).await {
                    Ok((200, body)) => {
                        assert_eq!(body["status"], "cancelled", "{body}");
                        break true;
                    }
                    Ok((409, _)) => break false,
                    Ok((status, body)) => assert!(status >= 500, "{status}: {body}"),
                    Err(_) => {}
                }
                assert!(begun.elapsed() < TIMEOUT, "the job {id} is neither cancelled nor finished");
                tokio::time::sleep(PAUSE).await;
            };
        }
        Accepted { id, is_cancelled }
    }

    /// Submits a job until it is accepted, at alternating gateways; returns its identifier.
    async fn accepted_id(
        &self,
        client: &Client,
        number: usize,
        first: usize,
        counts: &Mutex<Submissions>,
    ) -> String {
        let begun = Instant::now();
        for attempt in first.. {
            let key = format!("key of the job {number}");
            let body = Some((self.body(number), key));
            let response = client.send(reqwest::Method::POST, attempt, PATH, body).await;
            let rejected = match response {
                Ok((202, body)) => {
                    counts.lock().sent += 1;
                    return body["id"].as_str().expect("an id").to_owned();
                }
                Ok((status, body)) => {
                    assert!(status >= 500, "job {number}: {status}: {body}");
                    format!("{status} {}", body["error"]["code"].as_str().unwrap_or("without a code"))
                }
                Err(_) => "no response".to_owned(),
            };
            {
                let mut counts = counts.lock();
                counts.sent += 1;
                *counts.rejected.entry(rejected.clone()).or_default() += 1;
            }
            assert!(begun.elapsed() < TIMEOUT, "job {number} is not accepted; the last response: {rejected}");
            tokio::time::sleep(PAUSE).await;
        }
        unreachable!("attempts do not end")
    }

    /// Waits until all jobs are finished, and compares them with what was accepted.
    pub(crate) async fn verify(self: Arc<Load>, gateways: &[String], seen: Submissions) -> Outcome {
        let client = Client::new(gateways);
        let accepted = Arc::new(seen.accepted);
        let first = self.clone().states(&client, accepted.clone(), 0).await;
        // Once more through the other gateway: a job has one end, and a cancelled one no result ever.
        let second = self.clone().states(&client, accepted.clone(), 1).await;
        assert_eq!(first, second, "no job changes after its end");
        let step = (self.jobs / COMPARED_WITH_RESPONSE).max(1);
        for number in (0..self.jobs).step_by(step) {
            let expected = replica::response(self.deployment(number), &Load::text(number));
            let body = Some((self.body(number), String::new()));
            let response = client.send(reqwest::Method::POST, number, "/v1/embeddings", body).await;
            assert_eq!(response, Ok((200, expected)), "the ordinary request of job {number}");
        }
        let listed = client.list().await;
        let ids: BTreeSet<&String> = accepted.values().map(|accepted| &accepted.id).collect();
        assert_eq!(ids.len(), self.jobs, "each job has its own identifier");
        let succeeded = first.values().filter(|status| *status == "succeeded").count();
        let cancelled = first.values().filter(|status| *status == "cancelled").count();
        let missing = ids.iter().filter(|id| !listed.contains(**id)).count();
        let unfinished = self.jobs - succeeded - cancelled;
        Outcome {
            submitted: seen.sent,
            accepted: ids.len(),
            rejected: seen.rejected,
            succeeded,
            cancelled,
            kills: 0,
            duplicates: listed.iter().filter(|id| !ids.contains(id)).count(),
            lost: missing + unfinished,
            seconds: 0.0,
        }
    }

    /// Returns the final status of every job, read through one gateway, after a comparison of its result.
    async fn states(
        self: Arc<Load>,
        client: &Client,
        accepted: Arc<BTreeMap<usize, Accepted>>,
        gateway: usize,
    ) -> BTreeMap<usize, String> {
        let next = Arc::new(AtomicUsize::new(0));
        let mut readers = JoinSet::new();
        for _ in 0..CONCURRENCY {
            let (load, client, accepted, next) =
                (self.clone(), client.clone(), accepted.clone(), next.clone());
            readers.spawn(async move {
                let mut states = Vec::new();
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(accepted) = accepted.get(&number) else { return states };
                    let job = client.finished(gateway, &accepted.id).await;
                    load.check(number, accepted, &job);
                    states.push((number, job["status"].as_str().expect("a status").to_owned()));
                }
            });
        }
        let mut states = BTreeMap::new();
        while let Some(read) = readers.join_next().await {
            states.extend(read.unwrap());
        }
        states
    }

    fn check(&self, number: usize, accepted: &Accepted, job: &Value) {
        assert_eq!(job["id"], accepted.id.as_str(), "job {number}");
        if accepted.is_cancelled {
            assert_eq!(job["status"], "cancelled", "job {number}: its cancellation was confirmed: {job}");
        }
        match job["status"].as_str() {
            Some("succeeded") => {
                let expected = replica::response(self.deployment(number), &Load::text(number));
                assert_eq!(job["result"], expected, "job {number}");
            }
            // A cancellation whose response was lost is repeated, and confirmed then.
            Some("cancelled") if accepted.is_cancelled => assert_eq!(job.get("result"), None, "job {number}"),
            _ => panic!("job {number} has no result: {job}"),
        }
    }
}

impl Client {
    pub(crate) fn new(gateways: &[String]) -> Client {
        let http = reqwest::Client::builder().no_proxy().timeout(REQUEST_TIMEOUT).build().unwrap();
        Client { gateways: gateways.to_vec(), http }
    }

    /// Sends a request to a gateway, the remainder of `gateway`. The body has an idempotency key, unless that is empty.
    pub(crate) async fn send(
        &self,
        method: reqwest::Method,
        gateway: usize,
        path: &str,
        body: Option<(String, String)>,
    ) -> ClientResult {
        let url = format!("{}{path}", self.gateways[gateway % self.gateways.len()]);
        let mut request = self.http.request(method, url).bearer_auth(KEY);
        if let Some((body, key)) = body {
            request = request.body(body);
            if !key.is_empty() {
                request = request.header("idempotency-key", key);
            }
        }
        let response = request.send().await.map_err(|error| error.to_string())?;
        let status = response.status().as_u16();
        let body = response.bytes().await.map_err(|error| error.to_string())?;
        Ok((status, serde_json::from_slice(&body).unwrap_or_default()))
    }

    /// Submits a job; returns its identifier, or the response that rejects it.
    pub(crate) async fn submit(&self, model: &str, text: &str) -> Result<String, ClientResult> {
        let body = json!({"model": model, "input": [text]}).to_string();
        match self.send(reqwest::Method::POST, 0, PATH, Some((body, String::new()))).await {
            Ok((202, job)) => Ok(job["id"].as_str().expect("an id").to_owned()),
            response => Err(response),
        }
    }

    /// Submits a job until it is accepted; returns its identifier.
    pub(crate) async fn accepted(&self, model: &str, text: &str) -> String {
        let begun = Instant::now();
        loop {
            match self.submit(model, text).await {
                Ok(id) => return id,
                Err(response) => assert!(begun.elapsed() < TIMEOUT, "not accepted: {response:?}"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until a job is finished.
    pub(crate) async fn finished(&self, gateway: usize, id: &str) -> Value {
        let begun = Instant::now();
        loop {
            let response = self.send(reqwest::Method::GET, gateway, &format!("/v1/async/{id}"), None).await;
            match &response {
                Ok((200, job)) if !["queued", "running"].contains(&job["status"].as_str().unwrap_or("")) => {
                    return job.clone();
                }
                Ok((200, _)) | Err(_) => {}
                Ok((status, body)) => assert!(*status >= 500, "the job {id} is lost: {status}: {body}"),
            }
            assert!(begun.elapsed() < FINISHED_TIMEOUT, "the job {id} does not end: {response:?}");
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Returns the identifiers of all jobs, from the pages of the list.
    async fn list(&self) -> BTreeSet<String> {
        let (mut ids, mut path) = (BTreeSet::new(), "/v1/async?limit=100".to_owned());
        loop {
            let (status, page) = self.send(reqwest::Method::GET, 0, &path, None).await.expect("a page");
            assert_eq!(status, 200, "{page}");
            assert_eq!(page.get("unavailable_regions"), None, "{page}");
            for job in page["data"].as_array().expect("jobs") {
                let id = job["id"].as_str().expect("an id");
                assert!(ids.insert(id.to_owned()), "{id} is listed twice");
                path = format!("/v1/async?limit=100&after={id}");
            }
            if page["has_more"] == false {
                return ids;
            }
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rejected: Vec<_> =
            self.rejected.iter().map(|(code, count)| format!("{count} x {code}")).collect();
        let rejected = if rejected.is_empty() { "0".to_owned() } else { rejected.join(", ") };
        let Outcome { submitted, accepted, succeeded, cancelled, kills, duplicates, lost, seconds, .. } =
            self;
        writeln!(
            f,
            "| submissions | accepted | rejected or without response | succeeded | cancelled | kills | duplicates | lost | seconds |"
        )?;
        writeln!(f, "|---:|---:|---|---:|---:|---:|---:|---:|---:|")?;
        write!(
            f,
            "| {submitted} | {accepted} | {rejected} | {succeeded} | {cancelled} | {kills} | {duplicates} | {lost} | {seconds:.0} |"
        )
    }
}
