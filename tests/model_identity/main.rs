//! A deployment never mixes vectors of two models: a hub, a region, a gateway and manually started replicas
//! under load, while replicas of the wrong model appear and restart, and the model changes and is rolled back.

#![expect(clippy::unwrap_used, reason = "a failed expectation ends the test at its line")]

mod fleet;
mod load;

use fleet::{Fleet, Kind};
use load::Load;

/// Responses that are checked.
const RESPONSES: u64 = 10_000;

#[tokio::test(flavor = "multi_thread")]
async fn no_response_of_ten_thousand_is_of_the_wrong_model() {
    let mut fleet = Fleet::start("f32");
    // Two replicas of different identity under one deployment.
    fleet.replica(0, Kind::F32).await;
    fleet.replica(1, Kind::Int8).await;
    fleet.replica(2, Kind::OtherPooling).await;
    let [f32, int8, other] = [fleet.rows(0).await, fleet.rows(1).await, fleet.rows(2).await];
    f32.differs_from(&int8);
    f32.differs_from(&other);
    fleet.wait_until_served().await;
    let load = Load::start(&fleet, &[&f32, &int8, &other]);
    load.expect(f32.revision);
    load.wait_for_responses(500).await;
    fleet
        .wait_until("the mismatch is shown", async |fleet| {
            let (regions, rollout) =
                (fleet.meridian(&["get", "regions"]), fleet.meridian(&["get", "rollout"]));
            let words = ["mismatch: 1 of d run", "cpu int8"];
            words.iter().all(|word| regions.contains(word) && rollout.contains(word))
                && rollout.contains("1 of 1 replicas ready")
        })
        .await;
    // The hub compares the reports with its table; the spoke finds the mismatches with its next poll of the replicas.
    fleet
        .wait_until("the spoke counts and logs the mismatches", async |fleet| {
            let mismatched = fleet.metric("meridian_ingress_replicas_mismatched{deployment=\"d\"}").await;
            mismatched == Some(2) && fleet.log("spoke").contains("replica identity mismatch")
        })
        .await;

    // Restarts: the wrong replica restarts with the right model, and then the right one with the wrong model.
    fleet.replica(1, Kind::F32).await;
    fleet.wait_until_ready(2).await;
    fleet.replica(0, Kind::Int8).await;
    load.wait_for_responses(1_500).await;
    fleet.replica(0, Kind::OtherPooling).await;
    load.wait_for_responses(2_500).await;

    // Scale-up.
    fleet.replica(2, Kind::F32).await;
    fleet.wait_until_ready(2).await;
    load.wait_for_responses(3_500).await;

    // A rolling change: it waits for the second replica, and then all traffic switches.
    fleet.apply("int8", &[]);
    fleet.replica(0, Kind::Int8).await;
    fleet
        .wait_until("one replica of the next model is ready", async |fleet| {
            let rollout = fleet.meridian(&["get", "rollout"]);
            rollout.contains("changes to") && rollout.contains("2 of 2") && rollout.contains("1 of 1")
        })
        .await;
    load.wait_for_responses(4_500).await;
    load.expect_change_to(int8.revision);
    fleet.replica(3, Kind::Int8).await;
    load.wait_until_changed().await;
    load.wait_for_responses(6_000).await;

    // Rollback: the old replicas are still there.
    load.expect_change_to(f32.revision);
    fleet.apply("f32", &[]);
    load.wait_until_changed().await;
    load.wait_for_responses(7_500).await;

    // A change that is held waits for its promotion, though its replicas are ready.
    fleet.apply("int8", &["--hold"]);
    fleet
        .wait_until("the change is held", async |fleet| {
            fleet.meridian(&["get", "rollout"]).contains("`meridian apply --promote d` switches to it")
        })
        .await;
    load.wait_for_responses(8_500).await;
    load.expect_change_to(int8.revision);
    fleet.operator(&["apply", "--promote", "d"]);
    load.wait_until_changed().await;
    load.wait_for_responses(RESPONSES).await;

    let result = load.stop().await;
    println!("{result:?}");
    assert!(result.responses >= RESPONSES, "{result:?}");
    assert_eq!((result.wrong, &result.failed[..]), (0, &[][..]), "{result:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_region_that_restarts_without_a_hub_serves_what_the_gateways_table_pins() {
    let mut fleet = Fleet::start("f32");
    fleet.replica(0, Kind::F32).await;
    let f32 = fleet.rows(0).await;
    fleet.wait_until_served().await;
    fleet.replica(1, Kind::Int8).await;
    fleet.replica(2, Kind::Int8).await;
    fleet.kill("hub");
    fleet.restart("spoke");
    fleet.wait_until("the region responds again", async |fleet| fleet.request_rows().await.is_some()).await;
    let load = Load::start(&fleet, &[&f32]);
    load.expect(f32.revision);
    load.wait_for_responses(300).await;
    let result = load.stop().await;
    assert_eq!((result.wrong, &result.failed[..]), (0, &[][..]), "{result:?}");
}
