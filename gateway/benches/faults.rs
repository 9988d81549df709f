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

#![expect(clippy::unwrap_used, reason = "the bench creates all of its inputs")]

#[path = "../tests/sockets/address.rs"]
mod address;
#[path = "../tests/sockets/edge/clients.rs"]
mod clients;
#[path = "../tests/sockets/edge/faults.rs"]
mod faults;
#[path = "../tests/sockets/edge/fixture.rs"]
#[expect(dead_code, reason = "the tests have cases more")]
mod fixture;
#[path = "../tests/sockets/edge/http2.rs"]
mod http2;
#[path = "../tests/sockets/edge/region.rs"]
#[expect(dead_code, reason = "the tests have cases more")]
mod region;
#[path = "../tests/sockets/reports.rs"]
#[expect(dead_code, reason = "the tests have cases more")]
mod reports;

use clients::{ClientProtocol, ClientResponse, RegionProtocol};
use faults::{Fault, FaultFixture};
use fixture::{AMERICA, ROUND_TRIP_TIMES};
use std::collections::BTreeMap;
use std::time::Duration;

/// Response time of a healthy region.
const HEALTHY_RESPONSE_TIME: Duration = Duration::from_millis(20);
/// Requests before the fault: one in fifty may be hedged, so one hedge is earned.
const BEFORE: usize = 55;
/// Requests of each kind, unless another number is given.
const REQUESTS: usize = 30;
/// Gateways that are started concurrently: their three regions report five times a second each, and the start should
/// not be delayed by load.
const READY_AT_ONCE: usize = 10;
const PRIORITIES: [&str; 2] = ["interactive", "bulk"];

fn main() {
    // Cargo passes `--bench` to every bench.
    let given: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let requests = given.iter().find_map(|word| word.parse().ok()).unwrap_or(REQUESTS);
    let words: Vec<String> =
        given.iter().filter(|word| word.parse::<usize>().is_err()).map(|word| word.to_lowercase()).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(async {
        println!("the first request that meets a fault, {requests} of each kind; a region takes {HEALTHY_RESPONSE_TIME:?} otherwise, and they are {ROUND_TRIP_TIMES:?} away");
        println!("| fault | client protocol | region protocol | priority | p50 ms | max ms | response | attempts |\n|---|---|---|---|---:|---:|---|---|");
        for fault in Fault::ALL {
            let name = format!("{fault:?}").to_lowercase();
            if !words.is_empty() && !words.iter().any(|word| name.contains(word)) {
                continue;
            }
            for client_protocol in [ClientProtocol::Http1, ClientProtocol::Http2OverTls] {
                for region_protocol in [RegionProtocol::Http1, RegionProtocol::Http2] {
                    for priority in PRIORITIES {
                        let responses = measure(fault, client_protocol, region_protocol, priority, requests).await;
                        println!("| {fault:?} | {client_protocol:?} | {region_protocol:?} | {priority} | {} |", summary(responses));
                    }
                }
            }
        }
    });
}

/// Measures one kind of request: starts the gateways concurrently, and sends the requests one after another.
async fn measure(
    fault: Fault,
    client_protocol: ClientProtocol,
    region_protocol: RegionProtocol,
    priority: &str,
    requests: usize,
) -> Vec<ClientResponse> {
    let mut responses = Vec::with_capacity(requests);
    while responses.len() < requests {
        let ready = (responses.len()..requests).take(READY_AT_ONCE);
        let ready = ready.map(|_| {
            FaultFixture::healthy(client_protocol, region_protocol, "anywhere", HEALTHY_RESPONSE_TIME, BEFORE)
        });
        for mut served in futures_util::future::join_all(ready).await {
            responses.push(
                served
                    .send_first_request(fault, AMERICA, "anywhere", &[("x-meridian-priority", priority)])
                    .await,
            );
        }
    }
    responses
}

/// Formats the median, the maximum, and the number of requests by status and attempts.
fn summary(mut responses: Vec<ClientResponse>) -> String {
    responses.sort_by_key(|responses| responses.took);
    let ms = |responses: &ClientResponse| responses.took.as_secs_f64() * 1e3;
    let (mut status, mut attempts) = (BTreeMap::new(), BTreeMap::new());
    for responses in &responses {
        let truncated = if responses.body.is_some() { "" } else { ", cut" };
        *status.entry(format!("{} from {}{truncated}", responses.status, responses.region)).or_insert(0) += 1;
        *attempts.entry(responses.attempts.clone()).or_insert(0) += 1;
    }
    let counted = |counts: BTreeMap<String, usize>| {
        let one = counts.len() == 1;
        let words = counts
            .into_iter()
            .map(|(description, count)| if one { description } else { format!("{description} ({count} ×)") });
        words.collect::<Vec<_>>().join(", ")
    };
    let (middle, longest) = (&responses[responses.len() / 2], responses.last().unwrap());
    format!("{:.1} | {:.1} | {} | {}", ms(middle), ms(longest), counted(status), counted(attempts))
}
