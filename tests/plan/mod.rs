//! `meridian drain` against a local fleet: a region is drained and used again.

use super::{AMERICA, ASHBURN, EUROPE, JAPAN};
use crate::world::{World, meridian};
use serde_json::Value;
use std::process::Output;

fn drain(world: &World, hub: &str, arguments: &[&str]) -> Output {
    let named = ["drain", "--hub", hub, "--identity", &world.identity];
    meridian().args(named).args(arguments).output().expect("the binary runs")
}

fn said(output: &Output) -> (Option<i32>, String) {
    let text = [output.stdout.clone(), output.stderr.clone()].concat();
    (output.status.code(), String::from_utf8(text).expect("text"))
}

#[tokio::test]
async fn a_drained_region_serves_only_requests_without_another_region_until_the_drain_ends() {
    let world = World::up(&[]);
    let hub = world.hub.clone();
    for region in [AMERICA, EUROPE, JAPAN] {
        world.until_health(region, "healthy").await;
    }
    let answers = async |headers: &[(&str, &str)]| {
        let answer = world.embed("minilm", "near", headers).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.header("x-meridian-region").to_owned()
    };
    assert_eq!(answers(&[ASHBURN]).await, AMERICA);

    let done = said(&drain(&world, &hub, &[AMERICA, "--json"]));
    assert_eq!(done.0, Some(0), "{}", done.1);
    assert_eq!(serde_json::from_str::<Value>(&done.1).expect("JSON")["draining"], true);
    // No request fails meanwhile, and at the end only requests without another allowed region are sent there.
    let mut elsewhere = 0;
    world
        .until("America is empty", async || {
            elsewhere = if answers(&[ASHBURN]).await == AMERICA { 0 } else { elsewhere + 1 };
            elsewhere == 40
        })
        .await;
    assert_eq!(
        answers(&[ASHBURN, ("x-meridian-residency", "us")]).await,
        AMERICA,
        "no other region is allowed"
    );

    let done = said(&drain(&world, &hub, &[AMERICA, "--undo"]));
    assert!(done.0 == Some(0) && done.1.contains("no longer draining"), "{done:?}");
    let mut back = 0;
    world
        .until("America is used again", async || {
            back = if answers(&[ASHBURN]).await == AMERICA { back + 1 } else { 0 };
            back == 40
        })
        .await;

    for (arguments, code, word) in
        [(["aws/us-esat-1"], 2, AMERICA), (["us-east-1"], 2, "such as gcp/europe-west4")]
    {
        let (status, text) = said(&drain(&world, &hub, &arguments));
        assert!(status == Some(code) && text.contains(word), "{status:?} {text}");
    }
    let (status, text) = said(&drain(&world, "http://127.0.0.1:1", &[AMERICA]));
    assert!(status == Some(1) && text.contains("does not respond"), "{status:?} {text}");
}
