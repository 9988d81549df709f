//! Operator of a fleet: commands of one program, and rounds of them that change and show the state of the fleet.

use crate::fleet::{ANYWHERE, CHANGED, Fleet, KEY, PERIOD, ReplacementLocks, TEXTS, TIMEOUT, deployments};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::process::Command;

/// Kinds of resources of `meridian get`.
pub(crate) const KINDS: [&str; 9] =
    ["deployments", "tenants", "regions", "plan", "shares", "rollout", "jobs", "requests", "usage"];

/// Time within which a gateway has recorded a request after its response.
const RECORDED_WITHIN: Duration = Duration::from_secs(5);

/// Operator. A clone is the same one.
#[derive(Clone)]
pub(crate) struct Operator {
    program: Arc<Mutex<PathBuf>>,
    dir: PathBuf,
    hub: String,
}

impl Operator {
    /// Creates the operator of the fleet in this directory, whose identity is in `pki/operator`.
    pub(crate) fn new(program: &Path, dir: &Path, hub: &str) -> Operator {
        Operator {
            program: Arc::new(Mutex::new(program.to_owned())),
            dir: dir.to_owned(),
            hub: hub.to_owned(),
        }
    }

    /// Returns the URL of the hub.
    pub(crate) fn hub(&self) -> &str {
        &self.hub
    }

    /// Uses another program from now on.
    pub(crate) fn set_program(&self, program: &Path) {
        *self.program.lock().unwrap() = program.to_owned();
    }

    /// Runs a command; returns its output. The error is that of the command.
    pub(crate) async fn run(&self, arguments: &[&str]) -> Result<String, String> {
        let program = self.program.lock().unwrap().clone();
        let mut command = Command::new(program);
        command.args(arguments).current_dir(&self.dir).stdin(Stdio::null()).kill_on_drop(true);
        command.env("MERIDIAN_HUB", &self.hub).env("MERIDIAN_IDENTITY", self.dir.join("pki/operator"));
        let named = |problem: &str| format!("meridian {}: {}", arguments.join(" "), problem.trim());
        let output = tokio::time::timeout(TIMEOUT, command.output()).await;
        let output = output.map_err(|_| named("timed out"))?.map_err(|error| named(&error.to_string()))?;
        if !output.status.success() {
            return Err(named(&String::from_utf8_lossy(&output.stderr)));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns the kinds of resources that its program can show: an earlier one may lack some.
    pub(crate) async fn kinds(&self) -> Result<Vec<&'static str>, String> {
        let help = self.run(&["get", "--help"]).await?;
        Ok(KINDS.into_iter().filter(|kind| help.contains(&format!("- {kind}:"))).collect())
    }
}

/// Work of an operator at a fleet.
#[derive(Clone)]
pub(crate) struct OperatorWork {
    operator: Operator,
    locks: Arc<ReplacementLocks>,
    http: reqwest::Client,
    dir: PathBuf,
    url: String,
    operations: String,
}

impl OperatorWork {
    pub(crate) fn new(fleet: &Fleet) -> OperatorWork {
        OperatorWork {
            operator: fleet.operator().clone(),
            locks: fleet.locks().clone(),
            http: fleet.http().clone(),
            dir: fleet.dir().to_owned(),
            url: fleet.url(),
            operations: fleet.operations(),
        }
    }

    /// Changes a deployment, shows every kind of resource, and explains a request. Calls `ended` with the result of each step.
    pub(crate) async fn round(&self, number: u64, mut ended: impl FnMut(Result<(), String>)) {
        let is_locked = number.is_multiple_of(2);
        ended(self.apply(is_locked).await);
        ended(self.wait_for_policy(if is_locked { "eu" } else { "anywhere" }).await);
        match self.operator.kinds().await {
            Err(problem) => ended(Err(problem)),
            Ok(kinds) => {
                for kind in kinds {
                    ended(self.get(kind).await);
                }
            }
        }
        ended(self.explain().await);
    }

    /// Applies the deployments, and verifies that the hub has them.
    async fn apply(&self, is_locked: bool) -> Result<(), String> {
        let _lock = self.locks.hub.lock().await;
        fs::write(self.dir.join("deployments.toml"), deployments(is_locked)).unwrap();
        self.operator.run(&["apply", "--yes", "deployments.toml"]).await?;
        let difference = self.operator.run(&["apply", "--dry-run", "deployments.toml"]).await?;
        if difference.contains(&format!("deployment {CHANGED}")) {
            return Err(format!("the hub has not applied the deployments: {difference}"));
        }
        Ok(())
    }

    /// Waits until the gateway uses the residency policy of the changed deployment. A wider one is in effect only when the hub has
    /// the acknowledgements of the gateway and of all spokes.
    async fn wait_for_policy(&self, policy: &str) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let response = self.http.get(format!("{}/routes", self.operations)).send().await;
            let routes: Value = match response {
                Ok(response) => response.json().await.unwrap_or_default(),
                Err(_) => Value::Null,
            };
            let deployments = routes["deployments"].as_array().map(Vec::as_slice).unwrap_or_default();
            if deployments.iter().any(|it| it["name"] == CHANGED && it["residency"] == policy) {
                return Ok(());
            }
            if begun.elapsed() > TIMEOUT {
                let rollout = self.operator.run(&["get", "rollout"]).await;
                return Err(format!("the gateway does not have the policy {policy}: {rollout:?}"));
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    async fn get(&self, kind: &str) -> Result<(), String> {
        let (_lock, options) = match kind {
            "jobs" => (self.locks.gateway.lock().await, vec!["--gateway", &self.url, "--key", KEY]),
            "requests" => (self.locks.gateway.lock().await, vec!["--operations", &self.operations]),
            _ => (self.locks.hub.lock().await, Vec::new()),
        };
        self.operator.run(&[&["get", kind][..], &options].concat()).await?;
        Ok(())
    }

    /// Sends a request and explains it.
    async fn explain(&self) -> Result<(), String> {
        let _lock = self.locks.gateway.lock().await;
        let body = json!({"model": ANYWHERE, "input": TEXTS}).to_string();
        let request = self.http.post(format!("{}/v1/embeddings", self.url)).bearer_auth(KEY).body(body);
        let response = request.send().await.map_err(|error| format!("a request to explain: {error}"))?;
        let status = response.status().as_u16();
        let id = response.headers().get("x-request-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
        let text = response.text().await.map_err(|error| format!("a request to explain: {error}"))?;
        let id =
            id.filter(|_| status == 200).ok_or_else(|| format!("a request to explain: {status}: {text}"))?;
        // The request is recorded after its response.
        let begun = Instant::now();
        loop {
            match self.operator.run(&["explain", &id, "--gateway", &self.operations]).await {
                Ok(explained) if explained.contains(&id) => return Ok(()),
                Ok(other) => return Err(format!("no explanation of {id}: {other}")),
                Err(problem) if begun.elapsed() > RECORDED_WITHIN => return Err(problem),
                Err(_) => tokio::time::sleep(PERIOD).await,
            }
        }
    }
}
