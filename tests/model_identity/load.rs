//! Clients that send requests in a closed loop and check every vector.

use crate::fleet::{Fleet, TEXTS};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

const CLIENTS: usize = 6;
/// One of this many requests is large enough to be split.
const LARGE_EVERY: u64 = 100;
const LARGE: usize = 1024;
/// Tolerance of vectors of one model (f32 sums in another order, at most 2e-5); those of two models differ by more than ten
/// times as much.
const SAME: f32 = 1e-4;
const TIMEOUT: Duration = Duration::from_secs(300);

/// The vectors of [`TEXTS`] by one model.
#[derive(Clone, Debug)]
pub(crate) struct Rows {
    pub(crate) revision: u64,
    rows: Vec<Vec<f32>>,
}

impl Rows {
    /// Reads the vectors of a response; the error describes a response without vectors.
    pub(crate) async fn read(response: reqwest::Response) -> Result<Rows, String> {
        let status = response.status();
        let revision = response.headers().get("x-meridian-model-revision");
        let revision = revision.and_then(|value| u64::from_str_radix(value.to_str().ok()?, 16).ok());
        let body: Value = response.json().await.map_err(|error| error.to_string())?;
        let (Some(revision), Some(data)) =
            (revision, body["data"].as_array().filter(|_| status.is_success()))
        else {
            return Err(format!("{status}: {body}"));
        };
        let numbers = |row: &Value| -> Vec<f32> {
            let numbers = row["embedding"].as_array().unwrap().iter();
            numbers.map(|number| number.as_f64().unwrap() as f32).collect()
        };
        Ok(Rows { revision, rows: data.iter().map(numbers).collect() })
    }

    /// The largest difference between two rows.
    fn difference(one: &[f32], other: &[f32]) -> f32 {
        let each = one.iter().zip(other).map(|(one, other)| (one - other).abs());
        if one.len() == other.len() { each.fold(0.0, f32::max) } else { f32::INFINITY }
    }

    /// Asserts that every text distinguishes the two models.
    pub(crate) fn differs_from(&self, other: &Rows) {
        assert_ne!(self.revision, other.revision);
        for (one, other) in self.rows.iter().zip(&other.rows) {
            let difference = Rows::difference(one, other);
            assert!(difference > 10.0 * SAME, "{difference}");
        }
    }
}

/// Results of the load.
#[derive(Clone, Debug, Default)]
pub(crate) struct LoadResult {
    pub(crate) responses: u64,
    /// Vectors of another model than the served one, or than the revision in the header.
    pub(crate) wrong: u64,
    pub(crate) failed: Vec<String>,
}

/// Served revision.
#[derive(Default)]
struct Expected {
    now: u64,
    /// Next revision: after the first response with it, only it is valid.
    next: Option<u64>,
}

struct Shared {
    url: String,
    models: Vec<Rows>,
    expected: Mutex<Expected>,
    result: Mutex<LoadResult>,
    sent: AtomicU64,
    stopped: AtomicBool,
}

/// Running clients.
pub(crate) struct Load {
    shared: Arc<Shared>,
    tasks: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts clients that know the vectors of these models.
    pub(crate) fn start(fleet: &Fleet, models: &[&Rows]) -> Load {
        let shared = Arc::new(Shared {
            url: fleet.url(),
            models: models.iter().map(|model| (*model).clone()).collect(),
            expected: Mutex::new(Expected { now: models[0].revision, next: None }),
            result: Mutex::default(),
            sent: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
        });
        let tasks = (0..CLIENTS).map(|_| tokio::spawn(run_client(shared.clone()))).collect();
        Load { shared, tasks }
    }

    /// Accepts only this revision from now on.
    pub(crate) fn expect(&self, revision: u64) {
        *self.shared.expected.lock().unwrap() = Expected { now: revision, next: None };
    }

    /// Accepts a change to this revision, once.
    pub(crate) fn expect_change_to(&self, revision: u64) {
        self.shared.expected.lock().unwrap().next = Some(revision);
    }

    /// Waits until the change was observed.
    pub(crate) async fn wait_until_changed(&self) {
        self.wait("the model changes", || self.shared.expected.lock().unwrap().next.is_none()).await;
    }

    /// Waits for this total number of responses.
    pub(crate) async fn wait_for_responses(&self, responses: u64) {
        let is_reached = || self.shared.result.lock().unwrap().responses >= responses;
        self.wait(&format!("{responses} responses"), is_reached).await;
    }

    async fn wait(&self, description: &str, holds: impl Fn() -> bool) {
        let begun = Instant::now();
        while !holds() {
            let result = self.shared.result.lock().unwrap().clone();
            assert!(begun.elapsed() < TIMEOUT, "{description}: {result:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Stops the clients; returns the results.
    pub(crate) async fn stop(self) -> LoadResult {
        self.shared.stopped.store(true, Ordering::SeqCst);
        for task in self.tasks {
            task.await.unwrap();
        }
        self.shared.result.lock().unwrap().clone()
    }
}

async fn run_client(shared: Arc<Shared>) {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    while !shared.stopped.load(Ordering::SeqCst) {
        let number = shared.sent.fetch_add(1, Ordering::SeqCst);
        let inputs =
            if number % LARGE_EVERY == LARGE_EVERY - 1 { LARGE } else { 1 + number as usize % TEXTS.len() };
        let texts: Vec<_> = (0..inputs).map(|at| TEXTS[at % TEXTS.len()]).collect();
        // The revision that was valid when the request was sent.
        let before = shared.expected.lock().unwrap().now;
        let body = json!({"model": "d", "input": texts}).to_string();
        let request = client.post(&shared.url).header("authorization", "Bearer local").body(body);
        let read = match request.send().await {
            Ok(response) => Rows::read(response).await,
            Err(error) => Err(error.to_string()),
        };
        let mut result = shared.result.lock().unwrap();
        result.responses += 1;
        match read {
            Ok(rows) if shared.is_right(before, inputs, &rows) => {}
            Ok(_) => result.wrong += 1,
            Err(problem) => result.failed.push(problem),
        }
    }
}

impl Shared {
    /// Returns whether all rows are of the model in the header, and that model is the served one.
    fn is_right(&self, before: u64, inputs: usize, rows: &Rows) -> bool {
        let mut expected = self.expected.lock().unwrap();
        let served = if rows.revision == before {
            true
        } else if expected.next == Some(rows.revision) {
            *expected = Expected { now: rows.revision, next: None };
            true
        } else {
            rows.revision == expected.now
        };
        let model = self.models.iter().find(|model| model.revision == rows.revision);
        let same = model.is_some_and(|model| {
            let expected = (0..inputs).map(|at| &model.rows[at % TEXTS.len()]);
            rows.rows.len() == inputs
                && rows
                    .rows
                    .iter()
                    .zip(expected)
                    .all(|(row, expected)| Rows::difference(row, expected) < SAME)
        });
        served && same
    }
}
