//! Simulation of a surge: six regions, twelve gateways, the real decisions on both sides, and no clock.
//!
//! `gateway_core::spill` decides at each gateway and `scheduler_core::spoke` at each region; between them are the
//! distances of the catalogue and reports delayed by those. Each region computes a fixed number of tokens a second,
//! first come first served. At six tenths of the total capacity, one region's gateways receive three times their usual
//! traffic.
//!
//! Three policies over the same arrivals: *nearest* never spills over; *greedy* sends to the minimum of distance plus
//! reported queue, the obvious approach; *credits* is the implementation. `--nocapture` prints the table.

#![expect(clippy::unwrap_used, reason = "what is not as expected fails the test, there")]

mod world;

use std::fmt;
use std::time::Duration;
use world::{Outcome, Policy, World};

const SEEDS: [u64; 3] = [1, 2, 3];

/// Results of the requests during the surge.
struct Row {
    policy: Policy,
    asked: usize,
    failed: usize,
    p50: Duration,
    p99: Duration,
    /// At the other regions, in thousandths of all.
    remote_permille: usize,
    /// Maximum queue of one of the other regions, in milliseconds of work.
    worst_neighbour: Duration,
}

impl Row {
    fn of(policy: Policy) -> Row {
        let mut all = Vec::new();
        let mut worst_neighbour = Duration::ZERO;
        for seed in SEEDS {
            let world = World::run(policy, seed);
            worst_neighbour = worst_neighbour.max(world.worst_neighbour);
            all.extend(world.in_the_surge);
        }
        let asked = all.len();
        let failed = all.iter().filter(|outcome| outcome.took.is_none()).count();
        let remote = all.iter().filter(|outcome| outcome.remote).count();
        let mut took: Vec<_> =
            all.iter().map(|outcome: &Outcome| outcome.took.unwrap_or(world::DEADLINE)).collect();
        took.sort_unstable();
        Row {
            policy,
            asked,
            failed,
            p50: took[asked / 2],
            p99: took[asked * 99 / 100],
            remote_permille: remote * 1000 / asked,
            worst_neighbour,
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<8} {:>8} asked {:>7} failed  p50 {:>5} ms  p99 {:>5} ms  {:>4.1} % remote  worst neighbour {:>5} ms",
            format!("{:?}", self.policy),
            self.asked,
            self.failed,
            self.p50.as_millis(),
            self.p99.as_millis(),
            self.remote_permille as f64 / 10.0,
            self.worst_neighbour.as_millis(),
        )
    }
}

#[test]
fn a_surge_of_three_times_the_usual_traffic_fails_no_request_with_credits() {
    let [nearest, greedy, credits] = [Policy::Nearest, Policy::Greedy, Policy::Credits].map(Row::of);
    println!("{nearest}\n{greedy}\n{credits}");
    assert_eq!(credits.failed, 0);
    assert!(nearest.failed * 10 > nearest.asked / 10, "the surge is one that one region cannot take");
    assert!(credits.p99 * 2 <= nearest.p99, "half of what it takes without");
    assert!(
        credits.worst_neighbour < Duration::from_millis(500),
        "regions that take overflow are not overloaded"
    );
}
