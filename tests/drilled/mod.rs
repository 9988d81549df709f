//! Drills against an existing fleet, and throttling of a real replica.

use super::local_fleet::{LocalFleet, meridian};
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
fn against(fleet: &LocalFleet, drill: &str, identity: &str) -> (Option<i32>, String, String) {
    let file = fleet.file("drill.toml");
    std::fs::write(&file, drill).expect("written");
    let mut command = meridian();
    command.arg("drill").arg(&file).args(["--against", &fleet.url, "--hub", &fleet.hub]);
    let Output { status, stdout, stderr } =
        command.args(["--identity", identity]).output().expect("the binary starts");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (status.code(), text(&stdout), text(&stderr))
}

#[tokio::test]
async fn a_drill_against_an_existing_fleet_executes_operators_actions_and_evaluates_responses() {
    let fleet = LocalFleet::start(&["--regions", "2"]);
    let other = std::path::Path::new(&fleet.identity).with_file_name("viewer");
    let (code, output, problems) = against(&fleet, DRAIN, other.to_str().expect("UTF-8"));
    assert_eq!(code, Some(1), "{output}\n{problems}");
    assert!(problems.contains("action `drain region gcp/europe-west4` failed"), "{problems}");
    assert_eq!(fleet.route(EUROPE).await["draining"], false, "a drain without permission has no effect");

    let (code, output, problems) = against(&fleet, DRAIN, &fleet.identity);
    assert_eq!(code, Some(0), "{output}\n{problems}");
    for part in [">> drain region gcp/europe-west4", ">> surge 2x on america", "4 of 4 expectations hold"] {
        assert!(output.contains(part), "{part} in {output}");
    }
    // The gateway of another process's fleet is not observed.
    assert!(output.contains("0 responses from it") && !output.contains("the gateway"), "{output}");
    assert_eq!(fleet.route(EUROPE).await["draining"], true);
    assert_eq!(fleet.embed("minilm", "after it", &[ASHBURN]).await.header("x-meridian-region"), AMERICA);

    let wrong = DRAIN.replace("evacuated within 14s", "served_by gcp/europe-west4 within 14s");
    let (code, output, _) = against(&fleet, &wrong, &fleet.identity);
    assert!(code == Some(3) && output.contains("FAILS"), "{output}");
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
    let fleet = LocalFleet::start(&["--regions", "1"]);
    let replica = || fleet.find(&["replica"]).expect("a replica");
    let slowed = replica();
    fleet.control_action(&format!("slow-replica?region={AMERICA}&times=10")).await;
    let (stopped, changes, samples) = sampled(slowed).await;
    let share = stopped as f64 / samples as f64;
    assert!((0.7..0.98).contains(&share), "stopped for {share:.2} of the time, not for nine tenths");
    // Two changes per period, ten periods a second, in nearly three seconds.
    assert!(changes >= 20, "{changes} changes");
    let response = fleet.embed("minilm", vec!["a text that takes its time"; 64], &[ASHBURN]).await;
    assert_eq!(response.status, 200, "{}", response.body);
    assert_eq!(replica(), slowed);

    fleet.control_action(&format!("slow-replica?region={AMERICA}&times=1")).await;
    let (stopped, _, _) = sampled(slowed).await;
    assert_eq!(stopped, 0, "it is no longer throttled");

    // Throttling does not apply to the next process with this name.
    fleet.control_action(&format!("slow-replica?region={AMERICA}&times=10")).await;
    let named = fleet.processes().await.into_iter().find(|(name, _)| name.starts_with("replica"));
    let (name, _) = named.expect("it is among them");
    fleet.control_action(&format!("restart?process={}", name.replace(' ', "%20"))).await;
    let again = replica();
    assert_ne!(again, slowed);
    assert_eq!(sampled(again).await.0, 0);
}
