//! Results, files and errors of a locked deployment through gateways in several regions.

use super::batches::{Client, EmbeddingReplica, PATIENCE, file_of, line};
use super::jobs::{EUROPE, REGION, Region, Replica, gateway_in, jobs_config};
use regions::RouteTable;
use regions::catalogue::Catalogue;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::sync::{Semaphore, watch};

/// Part of each input, and so of each result.
const MARKER: &str = "recognisable";

/// Region in Europe with a queue, and gateways: one in Europe, one in America that knows it, and one that does not.
struct Readers {
    region: Region,
    european: Client,
    american: Client,
    alone: Client,
    stop: watch::Sender<()>,
    _dirs: [TempDir; 4],
}

impl Readers {
    async fn start(replica: SocketAddr) -> Readers {
        let dirs = [(); 4].map(|()| tempfile::tempdir().unwrap());
        let region = Region::start_in(EUROPE, Some(jobs_config(dirs[0].path(), "")), vec![replica]).await;
        let stop = watch::Sender::new(());
        let regions = [(EUROPE, &region)];
        let european = gateway_in(EUROPE, "", dirs[1].path(), &regions, &stop).await;
        let list = format!("\n[[jobs.gateway]]\nregion = '{EUROPE}'\nurl = '{european}/'\n");
        let american = gateway_in(REGION, &list, dirs[2].path(), &regions, &stop).await;
        let alone = gateway_in(REGION, "", dirs[3].path(), &regions, &stop).await;
        let [european, american, alone] = [european, american, alone].map(Client::new);
        let begun = Instant::now();
        for gateway in [&european, &american, &alone] {
            // Until the region has reported to it.
            while gateway.located("/v1/async/job_1.aws.eu-central-1").await.0 != 404 {
                assert!(begun.elapsed() < PATIENCE, "the region does not report");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Readers { region, european, american, alone, stop, _dirs: dirs }
    }

    /// Checks that the content at `path` is returned through the gateway in Europe only.
    async fn check_withheld(&self, path: &str) {
        let (status, text) = self.european.text("GET", path, "KEY", &Value::Null).await;
        assert_eq!((status, text.contains(MARKER)), (200, true), "{path}: {text}");
        let (status, location, text) = self.american.located(path).await;
        let expected = format!("{}{path}", self.european.url);
        assert_eq!((status, location.as_str()), (307, expected.as_str()), "{text}");
        assert!(!text.contains(MARKER), "{text}");
        let problem: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(problem["error"]["code"], "read_elsewhere");
        assert!(problem["error"]["message"].as_str().unwrap().contains(&expected), "{problem}");
        let (status, location, text) = self.alone.located(path).await;
        assert_eq!((status, location.as_str(), text.contains(MARKER)), (403, "", false), "{text}");
        let problem: Value = serde_json::from_str(&text).unwrap();
        let message = problem["error"]["message"].as_str().unwrap();
        assert_eq!(problem["error"]["code"], "region_not_permitted");
        for part in ["policy 'eu'", REGION, "[[jobs.gateway]]"] {
            assert!(message.contains(part), "{part} in {message}");
        }
    }

    async fn stop(self) {
        drop(self.stop);
        self.region.stop().await;
    }
}

/// Submits a job through a gateway, when the region has reported that it has a queue.
async fn submit(gateway: &Client, model: &str) -> String {
    let body = json!({"model": model, "input": MARKER});
    let begun = Instant::now();
    loop {
        let (status, job) = gateway.send("POST", "/v1/async/embeddings", "KEY", &body).await;
        if status == 202 {
            return format!("/v1/async/{}", job["id"].as_str().unwrap());
        }
        assert!(status == 503 && begun.elapsed() < PATIENCE, "{status}: {job}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits for a status of a job.
async fn wait(gateway: &Client, path: &str, status: &str) -> Value {
    let begun = Instant::now();
    loop {
        let job = gateway.get(path).await;
        if job["status"] == status {
            return job;
        }
        assert!(begun.elapsed() < PATIENCE, "{job}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the row of a job in the list of a gateway.
async fn row(gateway: &Client, path: &str) -> Value {
    let list = gateway.get("/v1/async").await;
    let id = json!(path.trim_start_matches("/v1/async/"));
    list["data"].as_array().unwrap().iter().find(|job| job["id"] == id).cloned().unwrap()
}

#[tokio::test]
async fn a_result_of_a_locked_job_is_returned_only_through_a_gateway_in_an_allowed_region() {
    let (replica, at) = Replica::start().await;
    let readers = Readers::start(at).await;
    // A submission passes through any gateway.
    let locked = submit(&readers.american, "m-eu").await;
    wait(&readers.european, &locked, "succeeded").await;
    readers.check_withheld(&locked).await;
    assert_eq!(row(&readers.american, &locked).await["status"], "succeeded", "status without content");
    let (status, problem) = readers.american.send("DELETE", &locked, "KEY", &Value::Null).await;
    assert_eq!((status, &problem["error"]["code"]), (409, &json!("job_finished")), "{problem}");

    // The reason of a failure may quote the input.
    replica.status.store(400, Ordering::SeqCst);
    let failed = submit(&readers.european, "m-eu").await;
    let job = wait(&readers.european, &failed, "failed").await;
    assert!(job["error"]["message"].is_string(), "{job}");
    let (status, location, _) = readers.american.located(&failed).await;
    assert_eq!((status, location), (307, format!("{}{failed}", readers.european.url)));
    let (american, european) = (row(&readers.american, &failed).await, row(&readers.european, &failed).await);
    assert_eq!((&american["status"], american.get("error")), (&json!("failed"), None));
    assert_eq!(european["error"], job["error"]);

    // A job that has no result is shown, without the reason of its failed attempt.
    replica.status.store(500, Ordering::SeqCst);
    let waiting = submit(&readers.european, "m-eu").await;
    let begun = Instant::now();
    while readers.european.get(&waiting).await["error"].is_null() {
        assert!(begun.elapsed() < PATIENCE, "no failed attempt");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let job = readers.american.get(&waiting).await;
    assert_eq!((job.get("error"), job["status"] != "succeeded"), (None, true), "{job}");
    readers.stop().await;
}

#[tokio::test]
async fn a_policy_that_was_narrowed_after_the_end_of_a_job_applies_to_its_result() {
    let (_, at) = Replica::start().await;
    let readers = Readers::start(at).await;
    let open = submit(&readers.american, "m").await;
    for gateway in [&readers.american, &readers.european, &readers.alone] {
        let job = wait(gateway, &open, "succeeded").await;
        assert_eq!(job["result"]["input"], MARKER, "{job}");
    }
    let text = "[[deployment]]\nname = \"m\"\ntask = \"embed\"\nmodel = \"pypi://m\"\n\
                engine = { kind = \"cpu\", precision = \"f32\" }\nresidency = { allow = [\"eu\"] }";
    let catalogue = Catalogue::builtin();
    let deployment = regions::parse_deployments(text, &catalogue).unwrap().remove(0);
    let mut table = RouteTable::empty();
    table.deployments.insert(deployment.name.clone(), deployment);
    readers.region.spoke.lock().apply_route_table(&table, &catalogue);
    readers.check_withheld(&open).await;
    readers.stop().await;
}

#[tokio::test]
async fn files_and_outputs_of_a_locked_model_are_returned_only_through_a_gateway_in_an_allowed_region() {
    let (_, at) = EmbeddingReplica::start(Semaphore::MAX_PERMITS).await;
    let readers = Readers::start(at).await;
    // The replica does not echo inputs, but the lines of the output have the identifiers.
    let locked = line(MARKER, &json!({"model": "m-eu", "input": MARKER}));
    let file = readers.american.upload(&locked).await;
    let content = format!("/v1/files/{}/content", file["id"].as_str().unwrap());
    readers.check_withheld(&content).await;
    let batch = readers.american.create(&file, "24h").await;
    let batch = readers.american.wait(&batch, &["completed"]).await;
    let output = batch["output_file_id"].as_str().unwrap();
    readers.check_withheld(&format!("/v1/files/{output}/content")).await;
    assert_eq!(readers.american.get(&format!("/v1/files/{output}")).await["purpose"], "batch_output");

    // Messages about lines quote them.
    let wrong = locked.replace("/v1/embeddings", "/v1/nothing");
    let file = readers.american.upload(&wrong).await;
    let batch = readers.american.create(&file, "24h").await;
    let batch = readers.american.wait(&batch, &["failed"]).await;
    let path = format!("/v1/batches/{}", batch["id"].as_str().unwrap());
    let seen = readers.european.get(&path).await;
    let (withheld, shown) = (&batch["errors"]["data"][0], &seen["errors"]["data"][0]);
    assert_eq!((&withheld["code"], &withheld["line"]), (&shown["code"], &shown["line"]), "{batch}");
    assert!(withheld["message"].as_str().unwrap().contains("only through a gateway"), "{withheld}");
    assert_ne!(withheld["message"], shown["message"]);

    // Without a condition nothing changes.
    let open = readers.american.upload(&file_of(0..1)).await;
    let path = format!("/v1/files/{}/content", open["id"].as_str().unwrap());
    let (status, text) = readers.alone.text("GET", &path, "KEY", &Value::Null).await;
    assert_eq!((status, text), (200, file_of(0..1)));
    readers.stop().await;
}
