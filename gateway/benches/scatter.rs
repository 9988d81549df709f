//! Gain of sending one request with very many inputs to several regions, and the cost when one of them is killed in the
//! middle.
//!
//! `cargo bench -p gateway --bench scatter`; `-- 1` runs one round instead of three.
//!
//! The gateway and its sockets are real; the hub and the three regions are scripted, as in the tests
//! (`tests/sockets/scatter`). A region computes 5,000 inputs a second, one part after another, by waiting instead of
//! computing: so the three act as three machines, which three real models on the cores of one would not. Vectors have
//! few numbers, so that JSON is not what is measured; `cargo bench -p gateway-core --bench scatter` measures that.
//! Every response is compared with that of one replica without limits.

#![expect(clippy::unwrap_used, reason = "the bench creates all of its inputs")]

#[path = "../tests/sockets/address.rs"]
mod address;
#[path = "../tests/sockets/scatter/fixture.rs"]
#[expect(dead_code, reason = "the tests have cases more")]
mod fixture;
#[path = "../tests/sockets/hub.rs"]
mod hub;
#[path = "../tests/sockets/scatter/replica.rs"]
mod replica;
#[path = "../tests/sockets/reports.rs"]
#[expect(dead_code, reason = "the tests have cases more")]
mod reports;

use fixture::{AMERICA, EUROPE, Fixture, JAPAN, Script, WIDTH};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const INPUTS: usize = 20_000;
const ROUNDS: usize = 3;
const TIME_PER_INPUT: Duration = Duration::from_micros(200);
/// Requests of the killed region before it is killed: about half of its share.
const REQUESTS_BEFORE_KILL: u64 = 7;

/// Setup of a measurement.
#[derive(Clone, Copy, Debug)]
enum Setup {
    /// Split, with all parts to one region, because the residency policy allows no other.
    OneRegion,
    ThreeRegions,
    /// One of three regions is killed within a response, when it has computed half of its share.
    OneIsKilled,
}

/// Result of a measurement.
struct Measurement {
    took: Duration,
    attempts: u64,
    requests: [u64; 3],
}

fn main() {
    let rounds = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(ROUNDS);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(async {
        println!(
            "{INPUTS} inputs, regions that need {TIME_PER_INPUT:?} for each, the median of {rounds} rounds"
        );
        println!("| way | s | of one region | requests to regions | of which {AMERICA}, {EUROPE}, {JAPAN} |");
        println!("|---|---:|---:|---:|---|");
        let setups = [Setup::OneRegion, Setup::ThreeRegions, Setup::OneIsKilled];
        let mut measurements = setups.map(|_| Vec::new());
        for _ in 0..rounds {
            for (setup, measurements) in setups.into_iter().zip(&mut measurements) {
                measurements.push(measure(setup).await);
            }
        }
        let middle = |measurements: &mut Vec<Measurement>| {
            measurements.sort_by_key(|measurements| measurements.took);
            measurements.swap_remove(measurements.len() / 2)
        };
        let measurements = measurements.each_mut().map(middle);
        let base = measurements[0].took.as_secs_f64();
        for (setup, Measurement { took, attempts, requests }) in setups.iter().zip(measurements) {
            let seconds = took.as_secs_f64();
            println!("| {setup:?} | {seconds:.2} | {:.2} | {attempts} | {requests:?} |", seconds / base);
        }
    });
}

async fn measure(setup: Setup) -> Measurement {
    let fixture = Fixture::with([Script::Computes(TIME_PER_INPUT); 3]).await;
    let texts: Vec<String> = (0..INPUTS).map(|number| format!("text number {number}")).collect();
    let model = if matches!(setup, Setup::OneRegion) { "locked" } else { "anywhere" };
    let body = json!({"model": model, "input": texts});
    let victim = &fixture.regions[EUROPE];
    let killed = async {
        if matches!(setup, Setup::OneIsKilled) {
            while victim.requests() < REQUESTS_BEFORE_KILL {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            victim.set_script(Script::KilledAfter(0));
        }
    };
    let begun = Instant::now();
    let requests = async {
        let response = fixture.send("/v1/embeddings", &body, &[]).await;
        (begun.elapsed(), response)
    };
    let ((took, response), ()) = tokio::join!(requests, killed);
    assert_eq!(response.status, 200, "{setup:?}");
    let right = replica::response("/v1/embeddings", body.to_string().as_bytes(), usize::MAX, WIDTH);
    assert!(
        response.json() == serde_json::from_slice::<Value>(&right.body).unwrap(),
        "{setup:?}: the response is correct"
    );
    Measurement {
        took,
        attempts: response.header("x-meridian-attempts").parse().unwrap(),
        requests: fixture.requests(),
    }
}
