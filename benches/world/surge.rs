//! Surge of the load in one region, and its effect on all callers.
//!
//! Four regions on three continents, each with a gateway, a spoke and a scripted replica, all of them
//! separate processes, at the distances of the catalogue. The load is half of the capacity of each region;
//! then for ten seconds three times as much in one of them, from `meridian load --rate`. One run has spillover with
//! credits, one has it disabled (`spill = false`: all requests stay in their region), and one has credits and a hub that was
//! killed before. Scripted replicas make the capacity of the regions the limit, rather than this machine's.
//!
//! Printed are the results of the load generators, from the scheduled start of each request: the callers of the region
//! with the surge, and those of all others.

use crate::fleet::{FleetSpec, LocalFleet};
use serde_json::Value;
use tokio::runtime::Runtime;

const REGIONS: [&str; 4] = ["aws/eu-central-1", "aws/us-east-1", "aws/us-west-2", "aws/ap-northeast-1"];
/// Index of the region with the surge.
const SURGING: usize = 0;
/// Throughput of a region in tokens per second: slightly more than a hundred requests.
const SPEED: u64 = 11_000;
/// Requests per second in each region, normally and in the surge.
const BASE_RATE: u32 = 50;
const SURGE: u32 = 3 * BASE_RATE;
/// Index of the load's stage with the surge.
const SURGE_STAGE: usize = 1;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SurgeRun {
    Credits,
    Home,
    NoHub,
}

impl SurgeRun {
    pub(crate) const ALL: [SurgeRun; 3] = [SurgeRun::Credits, SurgeRun::Home, SurgeRun::NoHub];

    pub(crate) fn name(self) -> &'static str {
        match self {
            SurgeRun::Credits => "credits",
            SurgeRun::Home => "home",
            SurgeRun::NoHub => "no-hub",
        }
    }

    fn description(self) -> &'static str {
        match self {
            SurgeRun::Credits => "spillover to regions with capacity",
            SurgeRun::Home => "spill = false",
            SurgeRun::NoHub => "spillover, hub killed before",
        }
    }
}

/// Executes these runs, one after another.
pub(crate) fn run(runtime: &Runtime, runs: &[SurgeRun]) {
    println!(
        "{SURGE} requests/s instead of {BASE_RATE} in one of {} regions for ten seconds; each computes {SPEED} tokens/s",
        REGIONS.len()
    );
    println!(
        "|  | callers | requests in the surge | failed in total | p50 ms | p99 ms | served by other regions |"
    );
    println!("|---|---|---:|---:|---:|---:|---:|");
    let mut p99 = Vec::new();
    for &run in runs {
        let reports = runtime.block_on(surge(run));
        for (place, report) in reports.iter().enumerate() {
            println!("{}", row(run, place, report));
        }
        p99.push((run, surge_stage(&reports[SURGING])["latency_ms"]["p99"].as_f64().unwrap()));
    }
    let of = |requested: SurgeRun| p99.iter().find(|(run, _)| *run == requested).map(|(_, p99)| *p99);
    if let Some(home) = of(SurgeRun::Home) {
        for run in [SurgeRun::Credits, SurgeRun::NoHub] {
            let Some(p99) = of(run) else { continue };
            println!(
                "{}: p99 in the surge is {:.2} of that without spillover (goal: 0.50 or less)",
                run.name(),
                p99 / home
            );
        }
    }
}

async fn surge(run: SurgeRun) -> Vec<Value> {
    let gateway = if run == SurgeRun::Home { "spill = false" } else { "spill = true" };
    let made = FleetSpec { regions: &REGIONS, replicas: 1, tokens_per_second: SPEED, gateway };
    let mut fleet = LocalFleet::start(&made).await;
    if run == SurgeRun::NoHub {
        fleet.kill_hub().await;
    }
    let loads = (0..REGIONS.len()).map(|region| {
        let most = if region == SURGING { SURGE } else { BASE_RATE };
        let rate = format!("{BASE_RATE} for 4s, {most} for 10s, {BASE_RATE} for 3s");
        let fleet = &fleet;
        async move { fleet.load(region, &rate).await }
    });
    futures_util::future::join_all(loads).await
}

fn surge_stage(report: &Value) -> &Value {
    &report["stages"][SURGE_STAGE]
}

fn row(run: SurgeRun, place: usize, report: &Value) -> String {
    let stage = surge_stage(report);
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let ok = number(&report["total"]["ok"]);
    let at_home = number(&report["regions"][REGIONS[place]]["ok"]);
    let failures: Vec<String> = report["total"]["failures"]
        .as_array()
        .unwrap()
        .iter()
        .map(|failure| format!("{} × {}", failure["count"], failure["cause"].as_str().unwrap_or_default()))
        .collect();
    let failed = if failures.is_empty() { "0".to_owned() } else { failures.join(", ") };
    format!(
        "| {} | {} | {} | {failed} | {:.0} | {:.0} | {:.0} % |",
        run.description(),
        REGIONS[place],
        stage["requests"],
        number(&stage["latency_ms"]["p50"]),
        number(&stage["latency_ms"]["p99"]),
        100.0 * (1.0 - at_home / ok),
    )
}
