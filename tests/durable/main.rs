//! Durable jobs lose nothing: not when processes are killed, not when their log is unreachable, not when their disk is full;
//! and they leave nothing behind, neither after their retention time nor in another jurisdiction.
//!
//! A test binary of its own, whose load would disturb tests that measure times. `MERIDIAN_JOBS=100000` sets the number of jobs
//! of the tests with kills, and `MERIDIAN_SEED` repeats the kills of a run, whose seed is printed.
//!
//! [`fleet`] has the processes, [`replica`] the engine, [`nats`] a cluster of NATS servers, [`load`] the clients and what is
//! compared at the end, [`kills`] which process is killed when. [`outage`] has the tests of a log that cannot be reached and of a
//! full disk, [`locked`] that of a deployment with a residency policy.

#![expect(clippy::unwrap_used, reason = "a failed expectation ends the test at its line")]

mod fleet;
mod kills;
mod load;
mod locked;
mod nats;
mod outage;
mod replica;
mod search;
#[path = "../small_disk/mod.rs"]
mod small_disk;

use fleet::{Fleet, JobsPlan, Plan, RegionPlan};
use kills::{Kill, KillPlan};
use load::{Load, Outcome};
use nats::NatsCluster;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;
use tokio::sync::watch;

/// Serializes the tests: each has a dozen processes.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

const AMERICA: &str = "aws/us-east-1";
const EUROPE: &str = "gcp/europe-west4";
/// Jobs of a test with kills, unless `MERIDIAN_JOBS` says otherwise: the kills take most of its time.
const JOBS: usize = 1000;

/// Two deployments, each placed in one region, so that the repeated submission of a job is one to the same queue.
const DEPLOYMENTS: &str = "\
[[deployment]]
name = 'in-america'
task = 'embed'
model = 'pypi://hash'
engine = { kind = 'cpu', precision = 'f32' }
regions = ['aws/us-east-1']

[[deployment]]
name = 'in-europe'
task = 'embed'
model = 'pypi://hash'
engine = { kind = 'cpu', precision = 'f32' }
regions = ['gcp/europe-west4']
";

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is '{text}'; write a whole number")))
}

/// Submits jobs, kills processes meanwhile, and verifies every job.
async fn run(
    mut fleet: Fleet,
    deployments: &'static [&'static str],
    kinds: &[Kill],
    nats: Option<NatsCluster>,
) {
    let begun = Instant::now();
    let seed = number("MERIDIAN_SEED").unwrap_or_else(rand::random);
    let jobs = number("MERIDIAN_JOBS").map_or(JOBS, |jobs| jobs as usize);
    println!("MERIDIAN_SEED={seed} MERIDIAN_JOBS={jobs} repeats the kills of this run");
    let plan = KillPlan::new(seed, kinds, jobs);
    let kills = plan.len();
    let load = Arc::new(Load { jobs, deployments });
    let gateways = fleet.gateways.clone();
    let (limit, permitted) = watch::channel(0);
    let begun_jobs = Arc::new(AtomicUsize::new(0));
    // The NATS servers run until the end.
    let (seen, _nats) = tokio::join!(
        load.clone().submit(&gateways, begun_jobs.clone(), permitted),
        plan.perform(&mut fleet, nats, &begun_jobs, &limit)
    );
    fleet.print("all jobs are submitted");
    let outcome = load.verify(&gateways, seen).await;
    let outcome = Outcome { kills, seconds: begun.elapsed().as_secs_f64(), ..outcome };
    println!("{outcome}");
    assert_eq!((outcome.accepted, outcome.lost, outcome.duplicates), (jobs, 0, 0), "{}", fleet.logs());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_accepted_job_is_lost_while_gateways_spokes_replicas_and_regions_are_killed() {
    let _alone = ALONE.lock().await;
    let region = |region, deployments| RegionPlan {
        region,
        spokes: 2,
        replicas: 2,
        deployments,
        jobs: JobsPlan::File(String::new()),
    };
    let plan = Plan {
        deployments: DEPLOYMENTS,
        regions: vec![region(AMERICA, &["in-america"]), region(EUROPE, &["in-europe"])],
        gateways: vec![AMERICA, EUROPE],
        log: "info",
    };
    let fleet = Fleet::start(&plan).await;
    let kinds = [
        Kill::Gateway(1),
        Kill::Gateway(2),
        // The one with the queue, and the other one.
        Kill::Spoke(AMERICA, 1),
        Kill::Spoke(AMERICA, 2),
        Kill::Replica(EUROPE, 1),
        Kill::Region(EUROPE),
    ];
    run(fleet, &["in-america", "in-europe"], &kinds, None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_accepted_job_is_lost_while_two_spokes_share_a_log_in_nats_and_processes_are_killed() {
    let _alone = ALONE.lock().await;
    let Some(nats) = NatsCluster::start().await else { return };
    let region = RegionPlan {
        region: AMERICA,
        spokes: 2,
        replicas: 2,
        deployments: &["in-america"],
        jobs: JobsPlan::Shared(nats.jobs()),
    };
    let gateways = vec![AMERICA, EUROPE];
    let plan = Plan { deployments: DEPLOYMENTS, regions: vec![region], gateways, log: "info" };
    let fleet = Fleet::start(&plan).await;
    let kinds = [
        Kill::Gateway(1),
        Kill::Spoke(AMERICA, 1),
        Kill::Spoke(AMERICA, 2),
        Kill::Replica(AMERICA, 1),
        Kill::Region(AMERICA),
        Kill::NatsNode,
    ];
    run(fleet, &["in-america"], &kinds, Some(nats)).await;
}
