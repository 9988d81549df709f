//! Backfill with jobs beside interactive traffic: `cargo bench -p meridian --bench backfill`.
//!
//! Two claims: the 99th percentile of interactive requests during a backfill is at most twice that without one, and a backfill
//! alone has at least 95 % of the speed that the engine has at its ideal batch size. The engine is the real one, on the CPU,
//! because a batch and the order within a batch decide about both. The fleet is that of `meridian up` with one region.
//!
//! The four measurements are interleaved in rounds, so that other load on the machine affects all of them, and each round
//! prints its ratios; the last line has the median. `-- 5` runs five rounds instead of three.

#![expect(clippy::unwrap_used, reason = "a panic ends the benchmark at the right line")]

#[path = "../../tests/local_fleet/mod.rs"]
#[expect(dead_code, reason = "the tests use all of it")]
mod local_fleet;

use futures_util::stream::{self, StreamExt};
use local_fleet::LocalFleet;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

const MODEL: &str = "minilm";
const ROUNDS: usize = 3;
/// Inputs of a job and of a bulk request: as many as a replica computes in one batch.
const INPUTS: usize = 64;
/// Bulk requests in flight: one is computed, the next ones wait, so that the engine never idles.
const BULK_IN_FLIGHT: usize = 4;
/// Inputs of a backfill, and of the measurement that it is compared with.
const BACKFILL_INPUTS: usize = 100 * INPUTS;
/// Concurrent submissions.
const SUBMISSIONS: usize = 16;
/// Interactive requests of one input: a fraction of the capacity, at which a queue is rare without a backfill.
const INTERACTIVE_PERIOD: Duration = Duration::from_millis(50);
/// Interactive requests without a backfill.
const IDLE_REQUESTS: usize = 300;
/// Period of checks whether a backfill has ended.
const POLL_PERIOD: Duration = Duration::from_millis(100);

#[derive(Clone)]
struct Client {
    url: String,
    http: reqwest::Client,
}

/// Measurements of a round.
struct Round {
    idle_p99: Duration,
    backfill_p99: Duration,
    /// Inputs per second of bulk requests.
    ideal: f64,
    /// Inputs per second of a backfill alone.
    backfill: f64,
}

fn main() {
    // Cargo passes `--bench` to every benchmark.
    let given = std::env::args().skip(1).find_map(|word| word.parse().ok());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(run(given.unwrap_or(ROUNDS)));
}

async fn run(rounds: usize) {
    let fleet = LocalFleet::start(&["--regions", "1"]);
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let client = Client { url: fleet.url.clone(), http };
    // The speed of the replica is unknown before its first requests, and jobs are sent slowly until it is known.
    client.bulk(10 * INPUTS).await;
    println!("| idle p99 ms | p99 in a backfill ms | ratio | bulk inputs/s | backfill inputs/s | ratio |");
    println!("|---:|---:|---:|---:|---:|---:|");
    let (mut latencies, mut speeds) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let round = client.round().await;
        latencies.push(round.latency_ratio());
        speeds.push(round.speed_ratio());
        println!("{}", round.row());
    }
    println!("median: p99 {:.2} times that without a backfill (at most 2)", median(&mut latencies));
    println!(
        "median: a backfill has {:.2} of the speed of bulk requests (at least 0.95)",
        median(&mut speeds)
    );
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

impl Round {
    fn latency_ratio(&self) -> f64 {
        self.backfill_p99.as_secs_f64() / self.idle_p99.as_secs_f64()
    }

    fn speed_ratio(&self) -> f64 {
        self.backfill / self.ideal
    }

    fn row(&self) -> String {
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        format!(
            "| {:.1} | {:.1} | {:.2} | {:.0} | {:.0} | {:.2} |",
            ms(self.idle_p99),
            ms(self.backfill_p99),
            self.latency_ratio(),
            self.ideal,
            self.backfill,
            self.speed_ratio()
        )
    }
}

impl Client {
    async fn round(&self) -> Round {
        let idle_p99 = self.interactive(async || false).await;
        let begun = Instant::now();
        self.bulk(BACKFILL_INPUTS).await;
        let ideal = BACKFILL_INPUTS as f64 / begun.elapsed().as_secs_f64();
        let begun = Instant::now();
        self.submit().await;
        while self.has_jobs().await {
            tokio::time::sleep(POLL_PERIOD).await;
        }
        let backfill = BACKFILL_INPUTS as f64 / begun.elapsed().as_secs_f64();
        self.submit().await;
        let backfill_p99 = self.interactive(async || self.has_jobs().await).await;
        Round { idle_p99, backfill_p99, ideal, backfill }
    }

    async fn post(&self, path: &str, body: String, priority: &str) -> u16 {
        let request = self.http.post(format!("{}{path}", self.url)).bearer_auth("local");
        let response = request.header("x-meridian-priority", priority).body(body).send().await.unwrap();
        let status = response.status().as_u16();
        response.bytes().await.unwrap();
        status
    }

    /// Sends interactive requests at a fixed rate, at least [`IDLE_REQUESTS`] or as long as `goes_on`; returns their 99th
    /// percentile.
    async fn interactive(&self, goes_on: impl AsyncFn() -> bool) -> Duration {
        let mut ticks = tokio::time::interval(INTERACTIVE_PERIOD);
        let mut requests = JoinSet::new();
        let is_backfill = goes_on().await;
        loop {
            let ends = match is_backfill {
                // A request at the end may have had no backfill beside it; there are few of them.
                true => requests.len().is_multiple_of(20) && !goes_on().await,
                false => requests.len() >= IDLE_REQUESTS,
            };
            if ends {
                break;
            }
            ticks.tick().await;
            let (client, number) = (self.clone(), requests.len());
            requests.spawn(async move {
                let begun = Instant::now();
                let status = client.post("/v1/embeddings", body(number, 1), "interactive").await;
                assert_eq!(status, 200, "interactive requests are served");
                begun.elapsed()
            });
        }
        let mut latencies = requests.join_all().await;
        latencies.sort_unstable();
        latencies[latencies.len() * 99 / 100]
    }

    /// Computes inputs by ordinary bulk requests of the ideal size.
    async fn bulk(&self, inputs: usize) {
        let requests = stream::iter(0..inputs / INPUTS).map(async |number| {
            let status = self.post("/v1/embeddings", body(number, INPUTS), "bulk").await;
            assert_eq!(status, 200, "bulk requests are served");
        });
        requests.buffer_unordered(BULK_IN_FLIGHT).collect::<()>().await;
    }

    /// Submits a backfill.
    async fn submit(&self) {
        let requests = stream::iter(0..BACKFILL_INPUTS / INPUTS).map(async |number| {
            let status = self.post("/v1/async/embeddings", body(number, INPUTS), "bulk").await;
            assert_eq!(status, 202, "jobs are accepted");
        });
        requests.buffer_unordered(SUBMISSIONS).collect::<()>().await;
    }

    /// Returns whether a job waits or is computed.
    async fn has_jobs(&self) -> bool {
        for status in ["queued", "running"] {
            let url = format!("{}/v1/async?limit=1&status={status}", self.url);
            let response = self.http.get(url).bearer_auth("local").send().await.unwrap();
            let page: Value = serde_json::from_slice(&response.bytes().await.unwrap()).unwrap();
            if page["data"].as_array().is_some_and(|jobs| !jobs.is_empty()) {
                return true;
            }
        }
        false
    }
}

/// Returns the body of a request with texts of a dozen tokens.
fn body(number: usize, inputs: usize) -> String {
    let text = |input: usize| format!("text {input} of request {number} is about the harbour in the morning");
    let inputs: Vec<_> = (0..inputs).map(text).collect();
    json!({"model": MODEL, "input": inputs, "encoding_format": "base64"}).to_string()
}
