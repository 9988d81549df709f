//! `meridian drain` against a local fleet: a region is drained and used again.

use super::{AMERICA, ASHBURN, EUROPE, JAPAN};
use crate::local_fleet::{LocalFleet, meridian};
use serde_json::Value;
use std::process::Output;

fn drain(fleet: &LocalFleet, hub: &str, arguments: &[&str]) -> Output {
    let named = ["drain", "--hub", hub, "--identity", &fleet.identity];
    meridian().args(named).args(arguments).output().expect("the binary runs")
}

fn status_and_output(output: &Output) -> (Option<i32>, String) {
    let text = [output.stdout.clone(), output.stderr.clone()].concat();
    (output.status.code(), String::from_utf8(text).expect("text"))
}

#[tokio::test]
async fn a_drained_region_serves_only_requests_without_another_region_until_the_drain_ends() {
    let fleet = LocalFleet::start(&[]);
    let hub = fleet.hub.clone();
    for region in [AMERICA, EUROPE, JAPAN] {
        fleet.wait_for_health(region, "healthy").await;
    }
    let responses = async |headers: &[(&str, &str)]| {
        let response = fleet.embed("minilm", "near", headers).await;
        assert_eq!(response.status, 200, "{}", response.body);
        response.header("x-meridian-region").to_owned()
    };
    assert_eq!(responses(&[ASHBURN]).await, AMERICA);

    let done = status_and_output(&drain(&fleet, &hub, &[AMERICA, "--json"]));
    assert_eq!(done.0, Some(0), "{}", done.1);
    assert_eq!(serde_json::from_str::<Value>(&done.1).expect("JSON")["draining"], true);
    // No request fails meanwhile, and at the end only requests without another allowed region are sent there.
    let mut elsewhere = 0;
    fleet
        .wait_until("America is empty", async || {
            elsewhere = if responses(&[ASHBURN]).await == AMERICA { 0 } else { elsewhere + 1 };
            elsewhere == 40
        })
        .await;
    assert_eq!(
        responses(&[ASHBURN, ("x-meridian-residency", "us")]).await,
        AMERICA,
        "no other region is allowed"
    );

    let done = status_and_output(&drain(&fleet, &hub, &[AMERICA, "--undo"]));
    assert!(done.0 == Some(0) && done.1.contains("no longer draining"), "{done:?}");
    let mut back = 0;
    fleet
        .wait_until("America is used again", async || {
            back = if responses(&[ASHBURN]).await == AMERICA { back + 1 } else { 0 };
            back == 40
        })
        .await;

    for (arguments, code, word) in
        [(["aws/us-esat-1"], 2, AMERICA), (["us-east-1"], 2, "such as gcp/europe-west4")]
    {
        let (status, text) = status_and_output(&drain(&fleet, &hub, &arguments));
        assert!(status == Some(code) && text.contains(word), "{status:?} {text}");
    }
    let (status, text) = status_and_output(&drain(&fleet, "http://127.0.0.1:1", &[AMERICA]));
    assert!(status == Some(1) && text.contains("does not respond"), "{status:?} {text}");
}
