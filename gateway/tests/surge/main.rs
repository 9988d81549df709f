//! Simulation of a surge: six regions, twelve gateways, the real decisions on both sides, and no clock.
//!
//! `gateway_core::spill` decides at each gateway and `scheduler_core::spoke` at each region; between them are the
//! distances of the catalogue and reports delayed by those. Each region computes a fixed number of tokens a second,
//! first come first served. At six tenths of the total capacity, one region's gateways receive three times their usual
//! traffic.
//!
//! Three policies over the same arrivals: *nearest* never spills over; *greedy* sends to the minimum of distance plus
//! reported queue, the obvious approach; *credits* is the implementation. `--nocapture` prints the table.

#![expect(clippy::unwrap_used, reason = "a failed expectation ends the test at its line")]

mod simulation;

use simulation::{Outcome, Policy, SimulationResult};
use std::fmt;
use std::time::Duration;

const SEEDS: [u64; 3] = [1, 2, 3];

/// Results of the requests during the surge.
struct Row {
    policy: Policy,
    requests: usize,
    failed: usize,
    p50: Duration,
    p99: Duration,
    /// At the other regions, in thousandths of all.
    remote_permille: usize,
    /// Maximum queue of one of the other regions, in milliseconds of work.
    longest_remote_queue: Duration,
}

impl Row {
    fn of(policy: Policy) -> Row {
        let mut all = Vec::new();
        let mut longest_remote_queue = Duration::ZERO;
        for seed in SEEDS {
            let result = SimulationResult::run(policy, seed);
            longest_remote_queue = longest_remote_queue.max(result.longest_remote_queue);
            all.extend(result.surge_outcomes);
        }
        let requests = all.len();
        let failed = all.iter().filter(|outcome| outcome.took.is_none()).count();
        let remote = all.iter().filter(|outcome| outcome.remote).count();
        let mut took: Vec<_> =
            all.iter().map(|outcome: &Outcome| outcome.took.unwrap_or(simulation::DEADLINE)).collect();
        took.sort_unstable();
        Row {
            policy,
            requests,
            failed,
            p50: took[requests / 2],
            p99: took[requests * 99 / 100],
            remote_permille: remote * 1000 / requests,
            longest_remote_queue,
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<8} {:>8} requests {:>7} failed  p50 {:>5} ms  p99 {:>5} ms  {:>4.1} % remote  longest remote queue {:>5} ms",
            format!("{:?}", self.policy),
            self.requests,
            self.failed,
            self.p50.as_millis(),
            self.p99.as_millis(),
            self.remote_permille as f64 / 10.0,
            self.longest_remote_queue.as_millis(),
        )
    }
}

#[test]
fn a_surge_of_three_times_the_usual_traffic_fails_no_request_with_credits() {
    let [nearest, greedy, credits] = [Policy::Nearest, Policy::Greedy, Policy::Credits].map(Row::of);
    println!("{nearest}\n{greedy}\n{credits}");
    assert_eq!(credits.failed, 0);
    assert!(nearest.failed * 10 > nearest.requests / 10, "the surge exceeds the capacity of one region");
    assert!(credits.p99 * 2 <= nearest.p99, "at most half of the p99 without credits");
    assert!(
        credits.longest_remote_queue < Duration::from_millis(500),
        "regions that take overflow are not overloaded"
    );
}
