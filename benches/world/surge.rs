//! What a surge does to those who come in it.
//!
//! Four regions on three continents, each with a gateway, a spoke and a replica of so many tokens a second, all of them
//! processes of their own, at the distances of the catalogue. Everywhere half of what a region can compute is asked for;
//! then for ten seconds three times as much at one of them, through `meridian load --rate`. Once with overflow as it is
//! (credits), once where it is switched off (`spill = false`: all stay at home), and once with credits and a hub that was
//! killed before. Nothing here computes, so that the capacity of the regions is the limit and not that of this machine.
//!
//! What is printed is what the load generators saw, from the intended start of each request: the callers of the region
//! that surges, and those of all others.

use crate::scene::{Made, World};
use serde_json::Value;
use tokio::runtime::Runtime;

const REGIONS: [&str; 4] = ["aws/eu-central-1", "aws/us-east-1", "aws/us-west-2", "aws/ap-northeast-1"];
/// The first of them surges.
const SURGING: usize = 0;
/// Tokens of a region in a second: a hundred requests and a few.
const SPEED: u64 = 11_000;
/// Requests a second in each region, usually and in the surge.
const USUAL: u32 = 50;
const SURGE: u32 = 3 * USUAL;
/// Which stage of the load is the surge.
const IN_THE_SURGE: usize = 1;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Run {
    Credits,
    Home,
    NoHub,
}

impl Run {
    pub(crate) const ALL: [Run; 3] = [Run::Credits, Run::Home, Run::NoHub];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Run::Credits => "credits",
            Run::Home => "home",
            Run::NoHub => "no-hub",
        }
    }

    fn about(self) -> &'static str {
        match self {
            Run::Credits => "overflow goes where there is room",
            Run::Home => "spill = false",
            Run::NoHub => "overflow goes on, hub killed before",
        }
    }
}

/// All of these, one after another.
pub(crate) fn run(runtime: &Runtime, runs: &[Run]) {
    println!(
        "{SURGE} requests a second instead of {USUAL} in one of {} regions for ten seconds; each computes {SPEED} tokens a second",
        REGIONS.len()
    );
    println!(
        "|  | callers | asked in the surge | failed in it and around it | p50 ms | p99 ms | answered elsewhere |"
    );
    println!("|---|---|---:|---:|---:|---:|---:|");
    let mut p99 = Vec::new();
    for &run in runs {
        let reports = runtime.block_on(surge(run));
        for (place, report) in reports.iter().enumerate() {
            println!("{}", row(run, place, report));
        }
        p99.push((run, in_the_surge(&reports[SURGING])["latency_ms"]["p99"].as_f64().unwrap()));
    }
    let of = |wanted: Run| p99.iter().find(|(run, _)| *run == wanted).map(|(_, p99)| *p99);
    if let Some(home) = of(Run::Home) {
        for run in [Run::Credits, Run::NoHub] {
            let Some(p99) = of(run) else { continue };
            println!(
                "{}: p99 in the surge {:.2} of what it is at home (goal: 0.50 or less)",
                run.name(),
                p99 / home
            );
        }
    }
}

async fn surge(run: Run) -> Vec<Value> {
    let gateway = if run == Run::Home { "spill = false" } else { "spill = true" };
    let made = Made { regions: &REGIONS, replicas: 1, tokens_per_second: SPEED, gateway };
    let mut world = World::start(&made).await;
    if run == Run::NoHub {
        world.kill_hub().await;
    }
    let loads = (0..REGIONS.len()).map(|region| {
        let most = if region == SURGING { SURGE } else { USUAL };
        let rate = format!("{USUAL} for 4s, {most} for 10s, {USUAL} for 3s");
        let world = &world;
        async move { world.load(region, &rate).await }
    });
    futures_util::future::join_all(loads).await
}

fn in_the_surge(report: &Value) -> &Value {
    &report["stages"][IN_THE_SURGE]
}

fn row(run: Run, place: usize, report: &Value) -> String {
    let stage = in_the_surge(report);
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
        run.about(),
        REGIONS[place],
        stage["requests"],
        number(&stage["latency_ms"]["p50"]),
        number(&stage["latency_ms"]["p99"]),
        100.0 * (1.0 - at_home / ok),
    )
}
