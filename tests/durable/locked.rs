//! Jobs of a deployment with a residency policy, submitted through a gateway elsewhere: no process in another jurisdiction has
//! their input, their result, or their entry in a file.

use crate::fleet::{Fleet, JobsPlan, Plan, RegionPlan, replica as replica_name, spoke};
use crate::load::Client;
use crate::replica;
use crate::search::files_with;
use crate::{ALONE, AMERICA, EUROPE};
use reqwest::Method;

const JOBS: usize = 40;
const DEPLOYMENTS: &str = "\
[[deployment]]
name = 'locked'
task = 'embed'
model = 'pypi://hash'
engine = { kind = 'cpu', precision = 'f32' }
residency = { allow = ['eu'] }

[[deployment]]
name = 'open'
task = 'embed'
model = 'pypi://hash'
engine = { kind = 'cpu', precision = 'f32' }
";

fn text(number: usize) -> String {
    format!("recognisable input {number}.")
}

/// Returns the result of a job as the replica has written it, in the part that depends on the input.
fn row(number: usize) -> String {
    replica::response("locked", &text(number))["data"][0]["embedding"].to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_file_outside_the_allowed_jurisdiction_has_a_job_of_a_locked_deployment() {
    let _alone = ALONE.lock().await;
    let region = |region, deployments| RegionPlan {
        region,
        spokes: 1,
        replicas: 1,
        deployments,
        jobs: JobsPlan::File(String::new()),
    };
    let plan = Plan {
        deployments: DEPLOYMENTS,
        regions: vec![region(AMERICA, &["open"]), region(EUROPE, &["open", "locked"])],
        gateways: vec![AMERICA, EUROPE],
        log: "debug",
    };
    let mut fleet = Fleet::start(&plan).await;
    let client = Client::new(&fleet.gateways);
    let mut ids = Vec::new();
    for number in 0..JOBS {
        // Its queue is killed meanwhile, and a rejected job is not stored elsewhere.
        if number == JOBS / 2 {
            fleet.kill(&spoke(EUROPE, 1)).await;
            let rejected = client.submit("locked", &text(JOBS)).await;
            assert!(matches!(rejected, Err(Ok((503, _)))), "{rejected:?}");
            fleet.start_process(&spoke(EUROPE, 1)).await;
        }
        let id = client.accepted("locked", &text(number)).await;
        assert!(id.ends_with(".gcp.europe-west4"), "{id}");
        ids.push(id);
    }
    // A gateway in America has accepted the jobs, one in Europe has read the results, and an open job is in America.
    for (number, id) in ids.iter().enumerate() {
        let job = client.finished(1, id).await;
        assert_eq!(job["result"], replica::response("locked", &text(number)), "{job}");
    }
    let open = client.accepted("open", "an open input.").await;
    assert!(open.ends_with(".aws.us-east-1"), "{open}");
    let (_, cancelled) =
        client.send(Method::DELETE, 0, &format!("/v1/async/{}", ids[0]), None).await.unwrap();
    assert_eq!(cancelled["error"]["code"], "job_finished", "{cancelled}");
    let (status, list) = client.send(Method::GET, 0, "/v1/async?limit=100", None).await.unwrap();
    assert_eq!((status, list["data"].as_array().map(Vec::len)), (200, Some(JOBS + 1)), "{list}");
    check_files(&fleet, &ids, &open);
}

/// Compares what the processes have in their files, by jurisdiction.
fn check_files(fleet: &Fleet, ids: &[String], open: &str) {
    let european = [spoke(EUROPE, 1), replica_name(EUROPE, 1)];
    let queue = fleet.folder(&spoke(EUROPE, 1)).join("jobs");
    for number in 0..ids.len() {
        assert!(!files_with(&queue, &text(number)).is_empty(), "the queue in Europe has the input {number}");
        assert!(!files_with(&queue, &row(number)).is_empty(), "the queue in Europe has the result {number}");
    }
    let elsewhere: Vec<_> =
        fleet.folders().into_iter().filter(|(name, _)| !european.contains(name)).collect();
    assert!(elsewhere.len() >= 4, "a hub, a gateway, a spoke, a replica");
    let american = files_with(&fleet.folder(&spoke(AMERICA, 1)), open.split('.').next().unwrap());
    assert!(!american.is_empty(), "an entry of a queue is found");
    for (name, folder) in elsewhere {
        for number in 0..=ids.len() {
            assert_eq!(files_with(&folder, &text(number)), [""; 0], "{name} has the input {number}");
            assert_eq!(files_with(&folder, &row(number)), [""; 0], "{name} has the result {number}");
        }
        for id in ids {
            let id = id.split('.').next().unwrap();
            // A log line may name a job, which says nothing about it.
            let mut files = files_with(&folder, id);
            files.retain(|file| !file.ends_with("/log") || file.ends_with("/jobs/log"));
            assert_eq!(files, [""; 0], "{name} has an entry of the job {id}");
        }
    }
}
