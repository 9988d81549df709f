//! Drills against an existing fleet, and throttling of a real replica.

use super::world::{World, meridian};
use super::{AMERICA, ASHBURN, EUROPE};
use std::process::Output;
use std::time::Duration;

/// Drains a region under load, and expects that it gets no requests after its share was moved.
const DRAIN: &str = r#"
description = "A region is emptied before its maintenance."
duration = "24s"
before = ["served_by gcp/europe-west4"]
expect = ["failed == 0"]

[fleet]
regions = ["aws/us-east-1", "gcp/europe-west4"]

[[load]]
name = "america"
near = "aws/us-east-1"
rate = 5

[[load]]
name = "europe"
near = "gcp/europe-west4"
rate = 5

[[step]]
at = "5s"
do = ["drain region gcp/europe-west4", "surge 2x on america for 4s"]
expect = ["evacuated within 14s", "served_by aws/us-east-1 for europe within 14s"]
"#;

/// Runs a drill against a fleet as its operator; returns exit code, stdout and stderr.
fn against(world: &World, drill: &str, identity: &str) -> (Option<i32>, String, String) {
    let file = world.file("drill.toml");
    std::fs::write(&file, drill).expect("written");
    let mut command = meridian();
    command.arg("drill").arg(&file).args(["--against", &world.url, "--hub", &world.hub]);
    let Output { status, stdout, stderr } =
        command.args(["--identity", identity]).output().expect("the binary starts");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (status.code(), text(&stdout), text(&stderr))
}

#[tokio::test]
async fn a_drill_against_an_existing_fleet_executes_operators_actions_and_evaluates_responses() {
    let world = World::up(&["--regions", "2"]);
    let other = std::path::Path::new(&world.identity).with_file_name("viewer");
    let (code, said, problems) = against(&world, DRAIN, other.to_str().expect("UTF-8"));
    assert_eq!(code, Some(1), "{said}\n{problems}");
    assert!(problems.contains("action `drain region gcp/europe-west4` failed"), "{problems}");
    assert_eq!(world.route(EUROPE).await["draining"], false, "a drain without permission has no effect");

    let (code, said, problems) = against(&world, DRAIN, &world.identity);
    assert_eq!(code, Some(0), "{said}\n{problems}");
    for part in [">> drain region gcp/europe-west4", ">> surge 2x on america", "4 of 4 expectations hold"] {
        assert!(said.contains(part), "{part} in {said}");
    }
    // The gateway of another process's fleet is not observed.
    assert!(said.contains("0 responses from it") && !said.contains("the gateway"), "{said}");
    assert_eq!(world.route(EUROPE).await["draining"], true);
    assert_eq!(world.embed("minilm", "after it", &[ASHBURN]).await.header("x-meridian-region"), AMERICA);

    let wrong = DRAIN.replace("evacuated within 14s", "served_by gcp/europe-west4 within 14s");
    let (code, said, _) = against(&world, &wrong, &world.identity);
    assert!(code == Some(3) && said.contains("FAILS"), "{said}");
}

/// Samples the state of a process; returns the number of samples in which it was stopped, the state changes, and the samples.
async fn sampled(process: u32) -> (usize, usize, usize) {
    const SAMPLES: usize = 400;
    let (mut stopped, mut changes, mut before) = (0, 0, None);
    for _ in 0..SAMPLES {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).expect("it lives");
        let (_, after) = stat.rsplit_once(") ").expect("a name in brackets");
        let is_stopped = after.starts_with('T');
        stopped += usize::from(is_stopped);
        changes += usize::from(before.replace(is_stopped).is_some_and(|before| before != is_stopped));
        tokio::time::sleep(Duration::from_millis(7)).await;
    }
    (stopped, changes, SAMPLES)
}

#[tokio::test]
async fn a_throttled_replica_runs_for_its_share_of_the_time_and_still_serves() {
    let world = World::up(&["--regions", "1"]);
    let replica = || world.find(&["replica"]).expect("a replica");
    let slowed = replica();
    world.press(&format!("slow-replica?region={AMERICA}&times=10")).await;
    let (stopped, changes, samples) = sampled(slowed).await;
    let share = stopped as f64 / samples as f64;
    assert!((0.7..0.98).contains(&share), "stopped for {share:.2} of the time, not for nine tenths");
    // Two changes per period, ten periods a second, in nearly three seconds.
    assert!(changes >= 20, "{changes} changes");
    let answer = world.embed("minilm", vec!["a text that takes its time"; 64], &[ASHBURN]).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(replica(), slowed);

    world.press(&format!("slow-replica?region={AMERICA}&times=1")).await;
    let (stopped, _, _) = sampled(slowed).await;
    assert_eq!(stopped, 0, "it is no longer throttled");

    // Throttling does not apply to the next process with this name.
    world.press(&format!("slow-replica?region={AMERICA}&times=10")).await;
    let named = world.processes().await.into_iter().find(|(name, _)| name.starts_with("replica"));
    let (name, _) = named.expect("it is among them");
    world.press(&format!("restart?process={}", name.replace(' ', "%20"))).await;
    let again = replica();
    assert_ne!(again, slowed);
    assert_eq!(sampled(again).await.0, 0);
}
