//! Deployments whose model cannot be downloaded or loaded: each has failed, with its reason, for an operator and for clients.
//!
//! The time of a failure is measured from the start of `meridian apply --wait`, which is before the first attempt, to its end.

use super::s3_server::Fault;
use super::{AMERICA, Bucket, WEIGHTS, in_bucket, small_model, write};
use crate::applied::operator;
use crate::deploy::skip;
use crate::local_fleet::{LocalFleet, meridian};
use crate::small_disk::SmallDisk;
use futures_util::future::join_all;
use http::Method;
use serde_json::Value;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Time within which a deployment has failed that cannot start.
const FAILED_WITHIN: Duration = Duration::from_secs(10);
/// Longer than a rejection takes on a busy machine, and shorter than any start for which a request would be held.
const AT_ONCE: Duration = Duration::from_secs(2);
/// More than the requests of a test.
const FOREVER: usize = 1_000;

/// Deployment that cannot start. The model is at the prefix of its name.
struct BadModel {
    name: &'static str,
    reason: &'static str,
    /// Part of the message for the operator.
    message: &'static str,
}

const BAD_MODELS: [BadModel; 8] = [
    BadModel { name: "stalled", reason: "model_unavailable", message: "there is no response yet" },
    BadModel {
        name: "unavailable",
        reason: "model_unavailable",
        message: "s3://models/unavailable/SHA256SUMS",
    },
    BadModel {
        name: "truncated",
        reason: "model_unavailable",
        message: "s3://models/truncated/model.safetensors",
    },
    BadModel {
        name: "forbidden",
        reason: "model_forbidden",
        message: "denies access to s3://models/forbidden/SHA256SUMS (status 403)",
    },
    BadModel { name: "missing", reason: "model_missing", message: "has no s3://models/missing/SHA256SUMS" },
    BadModel {
        name: "corrupt",
        reason: "model_corrupt",
        message: "the SHA-256 of s3://models/corrupt/model.safetensors",
    },
    BadModel {
        name: "invalid",
        reason: "model_corrupt",
        message: "a file of its origin is invalid: cannot load the tokenizer",
    },
    BadModel { name: "unknown", reason: "unknown_family", message: "`model_type` is t5" },
];

const DISK_FULL: BadModel =
    BadModel { name: "too-large", reason: "disk_full", message: "bytes are needed at" };

/// Running `meridian apply --wait`, with its result and its time.
type RunningApply = JoinHandle<(Output, Duration)>;

impl Bucket {
    /// Stores the models, and sets the faults of the server.
    fn put_bad_models(&self) {
        for prefix in ["unavailable", "truncated", "forbidden", "corrupt", "invalid", "unknown", "stalled"] {
            self.put_model(&small_model(), prefix);
        }
        let faults = [
            ("unavailable/SHA256SUMS", Fault::Status(503, "<Error><Code>SlowDown</Code></Error>")),
            ("truncated/model.safetensors", Fault::CutAfter(10)),
            ("forbidden/SHA256SUMS", Fault::Status(403, "<Error><Code>AccessDenied</Code></Error>")),
            ("stalled/SHA256SUMS", Fault::Stall),
        ];
        for (object, fault) in faults {
            self.server.fail(Method::GET, object, &[fault; FOREVER]);
        }
        let list = self.folder("corrupt").join("SHA256SUMS");
        let right = std::fs::read_to_string(&list).unwrap();
        let wrong = |line: &str| match line.ends_with(WEIGHTS) {
            true => format!("{}{}\n", "0".repeat(super::DIGEST_CHARS), &line[super::DIGEST_CHARS..]),
            false => format!("{line}\n"),
        };
        std::fs::write(list, right.lines().map(wrong).collect::<String>()).unwrap();
        // Its digest is that of the list.
        std::fs::write(self.folder("invalid").join("tokenizer.json"), "{").unwrap();
        self.list("invalid");
        let config = self.folder("unknown").join("config.json");
        let mut changed: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
        changed["model_type"] = "t5".into();
        std::fs::write(config, changed.to_string()).unwrap();
        self.list("unknown");
    }
}

/// Starts to apply a file of which one deployment is new, and returns when the hub has it.
async fn start_apply(fleet: &LocalFleet, file: &Path, new: &str) -> RunningApply {
    let mut command = meridian();
    command.arg("apply").arg(file).args(["--yes", "--wait", "--wait-timeout", "2m"]);
    command.args(["--hub", &fleet.hub, "--identity", &fleet.identity]).stdin(Stdio::null());
    let begun = Instant::now();
    let running = tokio::task::spawn_blocking(move || {
        let output = command.output().unwrap();
        (output, begun.elapsed())
    });
    let is_applied = async || operator(fleet, &["get", "deployments", new]).0 == Some(0);
    fleet.wait_until(&format!("{new} is applied"), is_applied).await;
    running
}

/// Waits until the command has ended with a failure; returns its messages and its time.
async fn failed(running: RunningApply) -> (String, Duration) {
    let (Output { status, stdout, stderr }, took) = running.await.unwrap();
    let problems = String::from_utf8_lossy(&stderr).into_owned();
    assert_eq!(status.code(), Some(1), "{problems}");
    let output = String::from_utf8_lossy(&stdout);
    assert!(output.ends_with("applied\n"), "{output}{problems}");
    (problems, took)
}

/// Checks that a deployment has failed: for `meridian apply --wait`, `meridian get deployments` and a client.
async fn check(fleet: &LocalFleet, model: &BadModel, running: RunningApply) {
    let BadModel { name, reason, message } = model;
    let (problems, took) = failed(running).await;
    let line = format!("{name} has failed in {AMERICA}: {reason}: ");
    let found = problems.lines().find(|problem| problem.contains(&line));
    let found = found.unwrap_or_else(|| panic!("{line} in {problems}"));
    assert!(found.contains(message), "{message} in {found}");
    println!("{reason:<18} {name:<12} failed after {:>5.1} s: {found}", took.as_secs_f64());
    assert!(took <= FAILED_WITHIN, "{name} failed after {took:?}");

    let (code, deployments, _) = operator(fleet, &["get", "deployments"]);
    assert!(code == Some(0) && deployments.contains(&format!("# Failed: {line}")), "{deployments}");

    // The reports of the region to the gateway and to the hub are independent.
    let is_known = async || fleet.route(AMERICA).await["failed"][name] == *reason;
    fleet.wait_until(&format!("the gateway knows that {name} has failed"), is_known).await;
    let response = fleet.embed(name, "near", &[]).await;
    assert_eq!((response.status, response.code()), (503, "deployment_failed"), "{}", response.body);
    assert!(response.took < AT_ONCE, "{name}: {:?}", response.took);
    let text = response.body["error"]["message"].as_str().unwrap();
    assert!(text.contains(&format!("'{name}' has failed in {AMERICA} ({reason}: ")), "{text}");
    assert_eq!(response.header("retry-after"), "", "its correction has no time");
}

#[tokio::test]
async fn a_deployment_whose_model_is_bad_has_failed_with_its_reason() {
    let bucket = Bucket::new();
    bucket.put_bad_models();
    let fleet = bucket.fleet();
    let (mut deployments, mut checks) = (String::new(), Vec::new());
    for model in &BAD_MODELS {
        // A file states all deployments.
        deployments += &in_bucket(model.name, model.name, "");
        let file = write(&fleet, &format!("{}.toml", model.name), &deployments);
        checks.push(check(&fleet, model, start_apply(&fleet, &file, model.name).await));
    }
    join_all(checks).await;
}

#[tokio::test]
async fn a_deployment_whose_model_does_not_fit_on_the_disk_has_failed() {
    let mut bucket = Bucket::new();
    let disk = match SmallDisk::mount(&bucket.root.path().join("disk"), "16m") {
        Ok(disk) => disk,
        Err(reason) => {
            return skip(&format!("this test needs to mount a file system (root on Linux): {reason}"));
        }
    };
    bucket.cache = disk.path.clone();
    bucket.put_model(&small_model(), DISK_FULL.name);
    let fleet = bucket.fleet();
    let file = write(&fleet, "disk.toml", &in_bucket(DISK_FULL.name, DISK_FULL.name, ""));
    let running = start_apply(&fleet, &file, DISK_FULL.name).await;
    check(&fleet, &DISK_FULL, running).await;
    let requests = bucket.server.requests(&Method::GET, WEIGHTS);
    assert_eq!(requests, [], "a model that does not fit is not downloaded");
    drop(fleet);
    drop(disk);
}
