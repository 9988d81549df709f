//! Load of 200 requests per second through HAProxy, from three places, and its sum.

use crate::files::REGIONS;
use crate::fleet::Fleet;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Requests per second of each client.
const RATES: [u32; 3] = [66, 67, 67];
/// Location and deployment of each client: one near each region.
const CLIENTS: [(&str, &str); 3] =
    [("39.04,-77.49", "minilm"), ("53.44,6.84", "minilm-eu"), ("50.11,8.68", "minilm-eu")];
/// Longer than any phase; a load is ended with SIGINT.
const DURATION: &str = "10m";

/// Running load; it ends when this is dropped.
pub(crate) struct Load {
    clients: Vec<Child>,
    begun: Instant,
    /// Its start, in the time of the fleet.
    begun_s: f64,
}

/// Result of a load.
pub(crate) struct LoadResult {
    pub(crate) duration: Duration,
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    pub(crate) retried: u64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) max_ms: f64,
    /// Failures with their causes and times, for the message of a failed test.
    pub(crate) failures: Vec<String>,
}

impl Load {
    pub(crate) fn start(fleet: &Fleet) -> Load {
        let client = |((place, model), rate): ((&str, &str), u32)| {
            let mut command = fleet.meridian();
            let (url, rate) = (fleet.url(), rate.to_string());
            command.args(["load", "--json", "--url", &url, "--model", model, "--rate", &rate]);
            command.args(["--duration", DURATION, "--geo", place]);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
        };
        Load {
            clients: CLIENTS.into_iter().zip(RATES).map(client).collect(),
            begun: Instant::now(),
            begun_s: fleet.seconds(),
        }
    }

    /// Ends the load after its last responses.
    pub(crate) fn finish(mut self) -> LoadResult {
        for client in &self.clients {
            kill_process(Pid::from_child(client), Signal::INT).expect("the load runs");
        }
        let mut result = LoadResult {
            duration: self.begun.elapsed(),
            requests: 0,
            failed: 0,
            retried: 0,
            p50_ms: 0.0,
            p99_ms: 0.0,
            max_ms: 0.0,
            failures: Vec::new(),
        };
        let mut latencies = Vec::new();
        for (client, (place, model)) in self.clients.drain(..).zip(CLIENTS) {
            let output = client.wait_with_output().unwrap();
            let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
            let total = &report["total"];
            let count = |key: &str| total[key].as_u64().expect("a count");
            result.requests += count("requests");
            result.failed += count("failed");
            result.retried += count("retried");
            let seconds = report["seconds"].as_array().expect("a list");
            latencies.extend(seconds.iter().flat_map(latencies_us));
            let failed = |second: &&Value| {
                let mut regions = second["regions"].as_object().expect("regions").values();
                regions.any(|region| region["failed"] != 0)
            };
            let times = seconds.iter().filter(failed).filter_map(|second| second["second"].as_f64());
            let times: Vec<_> = times.map(|second| format!("{:.0}", self.begun_s + second)).collect();
            for failure in total["failures"].as_array().expect("a list") {
                let (cause, number) = (&failure["cause"], &failure["count"]);
                result.failures.push(format!(
                    "{model} near {place}: {number} times {cause}; failures in the seconds {}",
                    times.join(" ")
                ));
            }
            let in_america = report["regions"][REGIONS[0]]["ok"].as_u64().unwrap_or_default();
            assert!(model == "minilm" || in_america == 0, "{in_america} requests of {model} left the EU");
        }
        latencies.sort_unstable();
        let quantile = |share: f64| latencies[(latencies.len() as f64 * share) as usize] as f64 / 1000.0;
        result.p50_ms = quantile(0.5);
        result.p99_ms = quantile(0.99);
        result.max_ms = *latencies.last().expect("a response") as f64 / 1000.0;
        result
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

impl Drop for Load {
    fn drop(&mut self) {
        for client in &mut self.clients {
            client.kill().ok();
            client.wait().ok();
        }
    }
}
