//! Time that a client waits when a region fails under its request, for each fault and either protocol.
//!
//! `cargo bench -p gateway --bench faults` prints one table; `-- 5` takes five requests of each kind instead of thirty,
//! and a word selects the faults whose name contains it, as in `-- 30 frozen`.
//!
//! The gateway and its sockets are real; the hub and the three regions behind it are scripted, as in the tests that
//! verify everything printed here except the times (`tests/sockets/edge`). A healthy region takes 20 ms; the next one
//! is 30 ms farther away, so a response from there takes 50. Only the first request that meets the fault counts: from
//! the second on a gateway has adapted, and would make the figures better than the fault is. So each request has a
//! gateway of its own, which has served enough before to know its regions and to have earned one hedge. An interactive
//! request may be hedged and bulk may not, so bulk shows the effect of the deadlines alone.

#![expect(clippy::unwrap_used, reason = "a bench of what it made itself")]

#[path = "../tests/sockets/address.rs"]
mod address;
#[path = "../tests/sockets/edge/faults.rs"]
mod faults;
#[path = "../tests/sockets/edge/front.rs"]
mod front;
#[path = "../tests/sockets/edge/http2.rs"]
mod http2;
#[path = "../tests/sockets/edge/region.rs"]
#[expect(dead_code, reason = "the tests have cases more")]
mod region;
#[path = "../tests/sockets/edge/scene.rs"]
#[expect(dead_code, reason = "the tests have cases more")]
mod scene;

use faults::{Fault, Served};
use front::{Front, Hop, Seen};
use scene::{AMERICA, AWAY};
use std::collections::BTreeMap;
use std::time::Duration;

/// Response time of a healthy region.
const WELL_TAKES: Duration = Duration::from_millis(20);
/// Requests before the fault: one in fifty may be hedged, so one hedge is earned.
const BEFORE: usize = 55;
/// Requests of each kind, unless another number is given.
const REQUESTS: usize = 30;
/// Gateways that are started concurrently: their three regions report five times a second each, and the start should
/// not be delayed by load.
const READY_AT_ONCE: usize = 10;
const PRIORITIES: [&str; 2] = ["interactive", "bulk"];

fn main() {
    // Cargo says `--bench` to every bench.
    let given: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let requests = given.iter().find_map(|word| word.parse().ok()).unwrap_or(REQUESTS);
    let words: Vec<String> =
        given.iter().filter(|word| word.parse::<usize>().is_err()).map(|word| word.to_lowercase()).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(async {
        println!("the first request that meets a fault, {requests} of each kind; a region takes {WELL_TAKES:?} otherwise, and they are {AWAY:?} away");
        println!("| fault | front | hop | priority | p50 ms | max ms | answer | attempts |\n|---|---|---|---|---:|---:|---|---|");
        for fault in Fault::ALL {
            let name = format!("{fault:?}").to_lowercase();
            if !words.is_empty() && !words.iter().any(|word| name.contains(word)) {
                continue;
            }
            for front in [Front::Http1, Front::Http2OverTls] {
                for hop in [Hop::Http1, Hop::Http2] {
                    for priority in PRIORITIES {
                        let seen = all(fault, front, hop, priority, requests).await;
                        println!("| {fault:?} | {front:?} | {hop:?} | {priority} | {} |", summary(seen));
                    }
                }
            }
        }
    });
}

/// Measures one kind of request: starts the gateways concurrently, and sends the requests one after another.
async fn all(fault: Fault, front: Front, hop: Hop, priority: &str, requests: usize) -> Vec<Seen> {
    let mut seen = Vec::with_capacity(requests);
    while seen.len() < requests {
        let ready = (seen.len()..requests).take(READY_AT_ONCE);
        let ready = ready.map(|_| Served::well(front, hop, "anywhere", WELL_TAKES, BEFORE));
        for mut served in futures_util::future::join_all(ready).await {
            seen.push(served.meets(fault, AMERICA, "anywhere", &[("x-meridian-priority", priority)]).await);
        }
    }
    seen
}

/// Formats the median, the maximum, and the number of requests by status and attempts.
fn summary(mut seen: Vec<Seen>) -> String {
    seen.sort_by_key(|seen| seen.took);
    let ms = |seen: &Seen| seen.took.as_secs_f64() * 1e3;
    let (mut status, mut attempts) = (BTreeMap::new(), BTreeMap::new());
    for seen in &seen {
        let whole = if seen.body.is_some() { "" } else { ", cut" };
        *status.entry(format!("{} from {}{whole}", seen.status, seen.region)).or_insert(0) += 1;
        *attempts.entry(seen.attempts.clone()).or_insert(0) += 1;
    }
    let counted = |counts: BTreeMap<String, usize>| {
        let one = counts.len() == 1;
        let words =
            counts.into_iter().map(|(what, count)| if one { what } else { format!("{what} ({count} ×)") });
        words.collect::<Vec<_>>().join(", ")
    };
    let (middle, longest) = (&seen[seen.len() / 2], seen.last().unwrap());
    format!("{:.1} | {:.1} | {} | {}", ms(middle), ms(longest), counted(status), counted(attempts))
}
