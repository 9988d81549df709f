//! A complete fleet in network namespaces under load, while its processes are restarted and killed, and its certificates
//! are replaced. `make fleet` starts the same fleet for a person.

#![expect(clippy::unwrap_used, reason = "a panic fails the test at the right line")]

#[path = "../../resolver/tests/dns_server/mod.rs"]
#[expect(dead_code, reason = "the tests of the resolver use all of it")]
mod dns_server;
mod files;
#[expect(dead_code, reason = "the example uses all of it")]
mod fleet;
#[path = "../haproxy/mod.rs"]
mod haproxy;
mod load;
mod network;
mod process;

use fleet::Fleet;
use load::{Load, LoadResult};
use process::wait_until;
use rustix::process::Signal;
use serde_json::Value;
use std::io::Write;
use std::path::Path;

/// Requests under which a phase begins, and which follow its last action: two seconds each.
const REQUESTS_AROUND: u64 = 400;

/// Phase of the test: a row of its table.
struct Phase {
    name: &'static str,
    load: LoadResult,
    /// Attempts that HAProxy repeated.
    repeated: u64,
}

impl Phase {
    /// Performs `during` under load.
    async fn run(fleet: &mut Fleet, name: &'static str, during: impl AsyncFnOnce(&mut Fleet)) -> Phase {
        fleet.print(name);
        let (load, repeated) = (Load::start(fleet), fleet.repeated().await);
        fleet.wait_for_requests(REQUESTS_AROUND).await;
        during(fleet).await;
        fleet.wait_for_requests(REQUESTS_AROUND).await;
        let load = load.finish();
        Phase { name, load, repeated: fleet.repeated().await - repeated }
    }

    fn row(&self) -> String {
        let Phase { name, load, repeated } = self;
        let LoadResult { duration, requests, failed, retried, p50_ms, p99_ms, max_ms, failures: _ } = load;
        let (seconds, latencies) = (duration.as_secs(), format!("{p50_ms:.0} | {p99_ms:.0} | {max_ms:.0}"));
        format!("| {name} | {seconds} | {requests} | {failed} | {retried} | {repeated} | {latencies} |")
    }
}

/// Kills a process, leaves the fleet without it for a while, and starts it again.
async fn kill(fleet: &mut Fleet, name: &str) {
    fleet.end(name, Signal::KILL).await;
    // Four seconds: longer than a region without reports takes to be down.
    fleet.wait_for_requests(2 * REQUESTS_AROUND).await;
    start_again(fleet, name).await;
}

/// Starts a process again, and waits until the others use it, so that another one can end.
async fn start_again(fleet: &mut Fleet, name: &str) {
    fleet.start_again(name).await;
    fleet.wait_until_healthy().await;
    if name.starts_with("replica-") {
        fleet.wait_until_used(name).await;
    }
    fleet.print(&format!("{name} is used again"));
}

/// Replaces the authority, and so the certificate of every process.
async fn rotate(fleet: &mut Fleet) {
    let before = fleet.certificates();
    let in_regions = files::REGIONS.len() * (files::SPOKES + files::REPLICAS);
    assert_eq!(before.len(), files::HUBS + in_regions + files::GATEWAY_REGIONS.len());
    for expected in ["next_trusted", "next_signs", "single"] {
        wait_until(&format!("the rotation reaches {expected}"), async || {
            let output = fleet.run(&["pki", "rotate", "--yes", "--json"]);
            let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            output.status.success() && report["phase"] == expected
        })
        .await;
        fleet.print(&format!("rotation: {expected}"));
        if expected == "next_trusted" {
            fleet.copy_authority(2);
        }
    }
    wait_until("every process has another certificate", async || {
        let after = fleet.certificates();
        before.iter().zip(&after).all(|(old, new)| old.0 == new.0 && old.1 != new.1)
    })
    .await;
}

/// Variable that `.ci/run` sets: no test may be skipped.
const CI_VARIABLE: &str = "MERIDIAN_CI";

/// Ends the test on a machine without network namespaces.
fn skipped(reason: &str) {
    let needs = "this test needs network namespaces, and so root on Linux";
    assert!(
        std::env::var_os(CI_VARIABLE).is_none(),
        "{needs}: {reason}; run it as root, or unset {CI_VARIABLE} to skip it"
    );
    // Not with `eprintln!`, whose output is captured and is not shown for a test that passes.
    std::io::stderr().write_all(format!("skipped: {needs}: {reason}\n").as_bytes()).unwrap();
}

#[tokio::test]
async fn no_request_fails_while_processes_are_restarted_and_killed_and_certificates_are_replaced() {
    let mut fleet = match Fleet::start(Path::new(env!("CARGO_BIN_EXE_meridian"))).await {
        Ok(fleet) => fleet,
        Err(reason) => return skipped(&reason),
    };
    let fleet = &mut fleet;
    let names: Vec<_> = fleet.processes().map(|(name, _)| name.to_owned()).collect();
    let mut phases = Vec::new();
    let restarts = async |fleet: &mut Fleet| {
        for name in names.iter().filter(|name| *name != files::BALANCER) {
            fleet.end(name, Signal::TERM).await;
            start_again(fleet, name).await;
        }
    };
    phases.push(Phase::run(fleet, "rolling restart of all 19 processes", restarts).await);
    phases.push(Phase::run(fleet, "replacement of all certificates", rotate).await);
    let spoke = async |fleet: &mut Fleet| kill(fleet, &files::spoke(files::REGIONS[1], 1)).await;
    phases.push(Phase::run(fleet, "a spoke is killed", spoke).await);
    let member = async |fleet: &mut Fleet| {
        let leader = fleet.leading_member().await;
        kill(fleet, &leader).await;
    };
    phases.push(Phase::run(fleet, "the leading etcd member is killed", member).await);
    let hub = async |fleet: &mut Fleet| {
        let leader = fleet.leading_hub().await;
        kill(fleet, &leader).await;
    };
    phases.push(Phase::run(fleet, "the leading hub is killed", hub).await);
    let gateway = async |fleet: &mut Fleet| kill(fleet, &files::gateway(1)).await;
    phases.push(Phase::run(fleet, "a gateway is killed", gateway).await);

    println!(
        "| event | seconds | requests | failed | retried | repeated by HAProxy | p50 ms | p99 ms | max ms |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|---:|---:|");
    phases.iter().for_each(|phase| println!("{}", phase.row()));
    for Phase { name, load, .. } in &phases {
        assert_eq!(load.failed, 0, "{name}: {:#?}", load.failures);
    }
}
