//! Clients of a fleet: embeddings at a constant rate in both regions, jobs one after another, and rounds of an operator.
//!
//! Embeddings are never repeated: a failed one is a failure. A job is submitted and read as docs/jobs.md says, with an idempotency
//! key, and both requests are repeated after a 5xx, since a queue in a file is unavailable while its spoke is replaced; it fails
//! without its result. Commands of the operator are never repeated.

use crate::fleet::{ANYWHERE, Fleet, KEY, LOCKED, PERIOD, REGIONS, TEXTS, TIMEOUT};
use crate::operator::OperatorWork;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Requests per second of each region.
const RATE: &str = "25";
/// Longer than any fleet runs; a load is ended with SIGINT.
const DURATION: &str = "30m";
/// Jobs and rounds of the operator before a replacement, and after it.
const JOBS_AROUND: u64 = 10;
const ROUNDS_AROUND: u64 = 3;
/// Timeout of this progress: a new hub widens no policy for 15 s, and every second round waits for that.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(240);
/// Tolerance of vectors of one checkpoint (f32 sums in another order, at most 2e-5).
const TOLERANCE: f64 = 1e-4;

/// Running clients.
pub(crate) struct Load {
    generators: Vec<Child>,
    tasks: Vec<JoinHandle<()>>,
    shared: Arc<LoadState>,
}

#[derive(Default)]
struct LoadState {
    stopped: AtomicBool,
    jobs: AtomicU64,
    /// Requests of jobs that were repeated after a 5xx.
    repeated: AtomicU64,
    rounds: AtomicU64,
    /// Steps of the rounds.
    commands: AtomicU64,
    failures: Mutex<Vec<String>>,
}

/// Result of a load.
pub(crate) struct LoadResult {
    pub(crate) embeddings: u64,
    pub(crate) jobs: u64,
    pub(crate) repeated: u64,
    pub(crate) commands: u64,
    pub(crate) failed: u64,
    /// Of the embeddings.
    pub(crate) p99_ms: f64,
    /// Failures with their causes, for the message of a failed test.
    pub(crate) failures: Vec<String>,
}

impl LoadState {
    fn failed(&self, problem: String) {
        self.failures.lock().unwrap().push(problem);
    }
}

impl Load {
    pub(crate) fn start(fleet: &Fleet) -> Load {
        let generator = |deployment: &str| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_meridian"));
            command.args(["load", "--json", "--url", &fleet.url(), "--key", KEY, "--model", deployment]);
            command.args(["--rate", RATE, "--duration", DURATION, "--texts", "texts.txt"]);
            command.current_dir(fleet.dir());
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
        };
        let shared = Arc::new(LoadState::default());
        let jobs = JobClient { url: fleet.url(), http: fleet.http().clone() };
        let tasks = vec![
            tokio::spawn(run_jobs(jobs, shared.clone())),
            tokio::spawn(run_operator(OperatorWork::new(fleet), shared.clone())),
        ];
        Load { generators: LOCKED.into_iter().map(generator).collect(), tasks, shared }
    }

    /// Waits for some more jobs and rounds of the operator.
    pub(crate) async fn wait_for_progress(&self, fleet: &Fleet) {
        let (jobs, rounds) = (&self.shared.jobs, &self.shared.rounds);
        let jobs_end = jobs.load(Ordering::SeqCst) + JOBS_AROUND;
        let rounds_end = rounds.load(Ordering::SeqCst) + ROUNDS_AROUND;
        let begun = Instant::now();
        while jobs.load(Ordering::SeqCst) < jobs_end || rounds.load(Ordering::SeqCst) < rounds_end {
            let failures = || self.shared.failures.lock().unwrap().clone();
            assert!(
                begun.elapsed() < PROGRESS_TIMEOUT,
                "no progress of the load: {:#?}\n{}",
                failures(),
                fleet.logs()
            );
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Ends the load after its last responses.
    pub(crate) async fn finish(mut self) -> LoadResult {
        self.shared.stopped.store(true, Ordering::SeqCst);
        for task in self.tasks.drain(..) {
            task.await.unwrap();
        }
        for generator in &self.generators {
            kill_process(Pid::from_child(generator), Signal::INT).unwrap();
        }
        let (mut embeddings, mut failed, mut latencies) = (0, 0, Vec::new());
        let mut failures = std::mem::take(&mut *self.shared.failures.lock().unwrap());
        failed += failures.len() as u64;
        for (generator, (deployment, region)) in
            self.generators.drain(..).zip(LOCKED.into_iter().zip(REGIONS))
        {
            let output = generator.wait_with_output().unwrap();
            let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
            let total = &report["total"];
            let count = |key: &str| total[key].as_u64().expect("a count");
            embeddings += count("requests");
            failed += count("failed");
            for failure in total["failures"].as_array().expect("a list") {
                failures.push(format!("{deployment}: {} times {}", failure["count"], failure["cause"]));
            }
            for (other, of_region) in report["regions"].as_object().expect("regions") {
                let responses = of_region["ok"].as_u64().expect("a count");
                assert!(
                    other == region || responses == 0,
                    "{responses} responses of {deployment} are of {other}"
                );
            }
            let seconds = report["seconds"].as_array().expect("a list");
            latencies.extend(seconds.iter().flat_map(latencies_us));
        }
        latencies.sort_unstable();
        let p99 = latencies.get(latencies.len() * 99 / 100).expect("a response");
        LoadResult {
            embeddings,
            jobs: self.shared.jobs.load(Ordering::SeqCst),
            repeated: self.shared.repeated.load(Ordering::SeqCst),
            commands: self.shared.commands.load(Ordering::SeqCst),
            failed,
            p99_ms: *p99 as f64 / 1000.0,
            failures,
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for generator in &mut self.generators {
            generator.kill().ok();
            generator.wait().ok();
        }
    }
}

/// Returns the latencies of one second of a report, in microseconds: `812*3 820` are four.
fn latencies_us(second: &Value) -> Vec<u64> {
    let regions = second["regions"].as_object().expect("regions").values();
    let words = regions.flat_map(|region| region["latencies_us"].as_str().expect("text").split_whitespace());
    words
        .flat_map(|word| {
            let (latency, count) = word.split_once('*').unwrap_or((word, "1"));
            std::iter::repeat_n(latency.parse().expect("a number"), count.parse().expect("a count"))
        })
        .collect()
}

async fn run_operator(work: OperatorWork, shared: Arc<LoadState>) {
    let mut number = 0;
    while !shared.stopped.load(Ordering::SeqCst) {
        work.round(number, |step| {
            shared.commands.fetch_add(1, Ordering::SeqCst);
            if let Err(problem) = step {
                shared.failed(problem);
            }
        })
        .await;
        number += 1;
        shared.rounds.fetch_add(1, Ordering::SeqCst);
    }
}

async fn run_jobs(client: JobClient, shared: Arc<LoadState>) {
    let mut number = 0;
    while !shared.stopped.load(Ordering::SeqCst) {
        if let Err(problem) = client.run(number, &shared.repeated).await {
            shared.failed(format!("job {number}: {problem}"));
        }
        number += 1;
        shared.jobs.fetch_add(1, Ordering::SeqCst);
    }
}

/// Client that submits a job and reads its result.
struct JobClient {
    url: String,
    http: reqwest::Client,
}

impl JobClient {
    /// Runs a job, and compares its result with the response to the ordinary request.
    async fn run(&self, number: usize, repeated: &AtomicU64) -> Result<(), String> {
        let body = json!({"model": ANYWHERE, "input": [TEXTS[number % TEXTS.len()]]}).to_string();
        let key = format!("key of the job {number}");
        let ordinary = || self.http.post(format!("{}/v1/embeddings", self.url)).body(body.clone());
        let expected = match self.send(ordinary()).await? {
            (200, response) => vector(&response)?,
            (status, response) => return Err(format!("the ordinary request: {status}: {response}")),
        };
        let submission = || {
            let request = self.http.post(format!("{}/v1/async/embeddings", self.url));
            request.header("idempotency-key", &key).body(body.clone())
        };
        let begun = Instant::now();
        let id = loop {
            match self.send(submission()).await? {
                (202, job) => break job["id"].as_str().ok_or_else(|| format!("no id: {job}"))?.to_owned(),
                (500.., response) if begun.elapsed() > TIMEOUT => {
                    return Err(format!("not accepted: {response}"));
                }
                (500.., _) => repeated.fetch_add(1, Ordering::SeqCst),
                (status, response) => return Err(format!("{status}: {response}")),
            };
            tokio::time::sleep(PERIOD).await;
        };
        let read = || self.http.get(format!("{}/v1/async/{id}", self.url));
        let result = loop {
            match self.send(read()).await? {
                (200, job) if job["status"] == "succeeded" => break job["result"].clone(),
                (status @ (200 | 500..), job) if begun.elapsed() > TIMEOUT => {
                    return Err(format!("no result of {id}: {status}: {job}"));
                }
                (200, job) if job["status"] == "queued" || job["status"] == "running" => {}
                (500.., _) => {
                    repeated.fetch_add(1, Ordering::SeqCst);
                }
                (status, job) => return Err(format!("{id}: {status}: {job}")),
            }
            tokio::time::sleep(PERIOD).await;
        };
        let computed = vector(&result)?;
        let is_same = |(one, other): (&f64, &f64)| (one - other).abs() < TOLERANCE;
        if computed.len() != expected.len() || !computed.iter().zip(&expected).all(is_same) {
            return Err(format!("{id} has {computed:?}, and the ordinary request {expected:?}"));
        }
        Ok(())
    }

    /// Sends a request; returns status and body.
    async fn send(&self, request: reqwest::RequestBuilder) -> Result<(u16, Value), String> {
        let response = request.bearer_auth(KEY).send().await.map_err(|error| format!("{error:?}"))?;
        let status = response.status().as_u16();
        let body = response.bytes().await.map_err(|error| format!("{error:?}"))?;
        Ok((status, serde_json::from_slice(&body).unwrap_or_default()))
    }
}

/// Returns the vector of a response to a request with one text.
fn vector(response: &Value) -> Result<Vec<f64>, String> {
    let numbers = response["data"][0]["embedding"].as_array().map(Vec::as_slice).unwrap_or_default();
    let vector: Vec<f64> = numbers.iter().filter_map(Value::as_f64).collect();
    if vector.is_empty() || vector.len() != numbers.len() {
        return Err(format!("no vector: {response}"));
    }
    Ok(vector)
}
