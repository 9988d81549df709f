//! Every lock that an edge takes while it serves, and what a panic of its holder costs.
//!
//! A failed process stays one, so each case is a process of its own: this test starts itself again. Which locks there are is
//! found out by watching an edge at work, so a new one is tried without anybody adding it here.

use super::region::Script::Answers;
use super::scene::{AMERICA, EUROPE, JAPAN, Scene};
use serde_json::json;
use std::collections::BTreeSet;
use std::process::Command;
use std::time::{Duration, Instant};
use supervision::{failpoint, process};

/// Says to a child what to do: to list the locks, or which one's holder shall panic.
const CASE: &str = "MERIDIAN_TEST_LOCK";
const LIST: &str = "list";
const NAME: &str = "edge::locks::a_panic_under_any_lock_costs_one_request_or_fails_the_process";
/// What a child says of each lock that it has seen.
const SEEN: &str = "lock seen: ";
/// Requests that may fail for the one panic: that in which it is, and those that share an exchange with it.
const FAILED_MAX: usize = 2;
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn a_panic_under_any_lock_costs_one_request_or_fails_the_process() {
    if let Ok(case) = std::env::var(CASE) {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(child(&case));
        // What is left of the scene ends with the process.
        std::process::exit(0);
    }
    let run = |case: &str| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture", "--test-threads", "1"])
            .env(CASE, case)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{case}: {said}\n{why}");
        said
    };
    let said = run(LIST);
    let locks: BTreeSet<&str> = said.lines().filter_map(|line| line.split(SEEN).nth(1)).collect();
    assert!(locks.iter().any(|lock| lock.ends_with("shed::Pools")), "{locks:?}");
    assert!(locks.len() >= 8, "{locks:?}");
    for lock in locks {
        let said = run(lock);
        println!("{lock}: {}", said.lines().find(|line| line.contains("outcome: ")).unwrap_or_default());
    }
}

async fn child(case: &str) {
    let scene = Scene::with([(AMERICA, Answers), (EUROPE, Answers), (JAPAN, Answers)]).await;
    if case == LIST {
        // What is taken once, while it starts, is not what requests need.
        drive(&scene).await;
        failpoint::watch();
        drive(&scene).await;
        drive(&scene).await;
        failpoint::seen().iter().for_each(|lock| println!("{SEEN}{lock}"));
        return;
    }
    drive(&scene).await;
    failpoint::arm(case);
    let (begun, mut failed) = (Instant::now(), 0);
    while !failpoint::has_fired() {
        assert!(begun.elapsed() < PATIENCE, "nobody takes it any more");
        failed += drive(&scene).await;
    }
    if process::failure().is_none() {
        // Whoever holds it may still unwind.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let probes = ["/livez", "/readyz"];
    if let Some(reason) = process::failure() {
        for probe in probes {
            let (status, said) = operators(&scene, probe).await;
            // The accept loop of the probes takes this lock itself: a connection that is refused fails a probe as well.
            let is_refused = status == 0 && case.ends_with("listener::admission::State");
            let is_told = status == 503 && said.contains(&*reason);
            assert!(is_refused || is_told, "{probe} says {status} {said}");
        }
        println!("outcome: the process fails: {reason}");
        return;
    }
    assert!(failed <= FAILED_MAX, "{failed} requests failed for one panic");
    for _ in 0..5 {
        assert_eq!(drive(&scene).await, 0, "every request after it is served");
    }
    for probe in probes {
        assert_eq!(operators(&scene, probe).await.0, 200, "{probe}");
    }
    println!("outcome: one request");
}

/// One request of each kind; how many were not answered as they should.
async fn drive(scene: &Scene) -> usize {
    let body = |model: &str| json!({"model": model, "input": "x"}).to_string();
    let cases = [
        ("POST", "/v1/embeddings", "k", body("anywhere"), 200),
        ("POST", "/v1/embeddings", "k", body("locked"), 200),
        ("POST", "/v1/embeddings", "n", body("locked"), 404),
        ("GET", "/v1/models", "k", String::new(), 200),
        ("GET", "/deployments/anywhere/info", "k", String::new(), 200),
        ("POST", "/v1/embeddings", "nobody", body("anywhere"), 401),
    ];
    let mut failed = 0;
    for (method, path, key, body, expected) in cases {
        let url = scene.url.replace("/v1/embeddings", path);
        let request = scene.client.request(method.parse().unwrap(), url).bearer_auth(key).body(body);
        let status = request.send().await.map(|answer| answer.status().as_u16());
        failed += usize::from(status.ok() != Some(expected));
    }
    for path in ["/metrics", "/routes", "/explain/nobody"] {
        operators(scene, path).await;
    }
    // Beside requests there are reports, five times a second, and looks for silence.
    tokio::time::sleep(Duration::from_millis(300)).await;
    failed
}

async fn operators(scene: &Scene, path: &str) -> (u16, String) {
    match scene.client.get(format!("{}{path}", scene.operations)).send().await {
        Ok(answer) => (answer.status().as_u16(), answer.text().await.unwrap_or_default()),
        Err(error) => (0, error.to_string()),
    }
}
