//! Grey failure: a replica that becomes ten times slower and still reports ready.
//!
//! Four regions, two in Europe and two in America, each with a gateway, a spoke and two scripted replicas, all of them
//! separate processes, at the distances of the catalogue. The load is a third of the capacity of each region. After some
//! seconds one replica of a region becomes ten times slower, or both. It still responds to status requests, and to
//! every other request. Printed are the latencies of all callers of all regions, per second,
//! from the scheduled start of each request, and the number of responses from the slow region.

use crate::fleet::{FleetSpec, LocalFleet};
use loadtest::record::{Group, ServingRegions};
use loadtest::{Options, Report};
use std::time::Duration;
use tokio::runtime::Runtime;

const REGIONS: [&str; 4] = ["aws/eu-central-1", "aws/eu-west-3", "aws/us-east-1", "aws/us-east-2"];
/// Index of the region that becomes slow.
const SLOW: usize = 0;
const TIMES: u32 = 10;
pub(crate) const REPLICAS: usize = 2;
/// Throughput of a replica in tokens per second: slightly more than a hundred requests.
const SPEED: u64 = 11_000;
/// Requests per second in each region.
const RATE: u32 = 66;
/// Seconds before the slowdown. The first two are not counted, because the gateways have no measurements yet.
const BEFORE: usize = 8;
const AFTER: usize = 14;
/// Goal: after this number of seconds, the p99 is at most `P99_RATIO_MAX` times that before.
const RECOVERED_WITHIN: usize = 5;
const P99_RATIO_MAX: f64 = 1.5;

/// Runs the benchmark with this number of slow replicas.
pub(crate) fn run(runtime: &Runtime, slow: usize) {
    let reports = runtime.block_on(measure(slow));
    print(slow, &reports);
}

async fn measure(slow: usize) -> Vec<Report> {
    let made = FleetSpec { regions: &REGIONS, replicas: REPLICAS, tokens_per_second: SPEED, gateway: "" };
    let fleet = LocalFleet::start(&made).await;
    let second = format!("{RATE} for 1s");
    let rate = vec![second; BEFORE + AFTER].join(", ");
    let loads = (0..REGIONS.len()).map(|region| {
        let options = Options::check(fleet.options(region, &rate)).unwrap();
        async { loadtest::run(options, |_| {}, std::future::pending()).await.unwrap() }
    });
    let slows = async {
        tokio::time::sleep(Duration::from_secs(BEFORE as u64)).await;
        fleet.slow(SLOW, slow, TIMES).await;
    };
    tokio::join!(futures_util::future::join_all(loads), slows).0
}

/// Sums the results of all callers per second.
fn seconds(reports: &[Report]) -> Vec<Group> {
    let mut seconds = vec![Group::default(); BEFORE + AFTER];
    for report in reports {
        seconds.iter_mut().zip(report.record.stages()).for_each(|(sum, stage)| sum.add(stage));
    }
    seconds
}

fn print(slow: usize, reports: &[Report]) {
    let seconds = seconds(reports);
    let ms = |group: &Group, quantile| {
        group.latencies().quantile(quantile).map_or(f64::NAN, |span| span.as_secs_f64() * 1e3)
    };
    let mut before: Vec<f64> = seconds[2..BEFORE].iter().map(|group| ms(group, 0.99)).collect();
    before.sort_by(f64::total_cmp);
    let before = before[before.len() / 2];
    println!(
        "{slow} of {REPLICAS} replicas of {} become {TIMES} times slower at 0 s; before, p99 was {before:.0} ms",
        REGIONS[SLOW]
    );
    println!(
        "| second | requests | failed | p50 ms | p99 ms | relative to before | responses from the slow region |\n|---:|---:|---:|---:|---:|---:|---:|"
    );
    let here = ServingRegions::One(REGIONS[SLOW].parse().unwrap());
    for (second, group) in seconds.iter().enumerate() {
        let served = reports
            .iter()
            .filter_map(|report| report.record.seconds().remove(&(second as u64))?.remove(&here));
        let served: u64 = served.map(|second| second.ok).sum();
        let p99 = ms(group, 0.99);
        println!(
            "| {} | {} | {} | {:.0} | {p99:.0} | {:.2} | {served} |",
            second as i64 - BEFORE as i64,
            group.requests(),
            group.failed(),
            ms(group, 0.5),
            p99 / before,
        );
    }
    let worst =
        seconds[BEFORE + RECOVERED_WITHIN..].iter().map(|group| ms(group, 0.99) / before).fold(0.0, f64::max);
    let failed: u64 = seconds.iter().map(Group::failed).sum();
    println!(
        "{failed} failed; from the {RECOVERED_WITHIN}th second on the worst p99 is {worst:.2} of before (goal: {P99_RATIO_MAX} or less)\n"
    );
}
