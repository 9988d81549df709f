//! Drills as a person runs them: one that holds, one that expects too much, and one that cannot be read.
//!
//! The shipped ones take minutes and want a quiet machine: `make drills` runs them all.

#![expect(clippy::unwrap_used, reason = "what is not as expected fails the test, there")]

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};

/// Region-kill in short, with replicas that compute nothing; `more` is expected besides.
fn drill(more: &str) -> String {
    format!(
        r#"
description = "A region that serves dies."
duration = "12s"
before = ["served_by aws/us-east-1", "served_by gcp/europe-west4"]
expect = ["failed == 0", "generation never falls"{more}]

[fleet]
regions = ["aws/us-east-1", "gcp/europe-west4"]
engine = {{ kind = "scripted", inputs_per_second = 100 }}

[[load]]
name = "america"
near = "aws/us-east-1"
rate = "10 %"

[[load]]
name = "europe"
near = "gcp/europe-west4"
rate = "10 %"

[[step]]
at = "6s"
do = "kill region gcp/europe-west4"
expect = ["evacuated within 3s", "served_by aws/us-east-1 for europe"]
"#
    )
}

fn run(text: &str, arguments: &[&str]) -> (Output, PathBuf, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("drill.toml");
    std::fs::write(&file, text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_meridian"));
    let output = command.arg("drill").arg(&file).args(arguments).output().unwrap();
    (output, file, dir)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_region_dies_and_the_timeline_shows_that_nobody_failed() {
    let (output, _, _dir) = run(&drill(""), &[]);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}\n{err}");
    let place = |part: &str| out.find(part).unwrap_or_else(|| panic!("{part} in {out}"));
    let killed = place(">> kill region gcp/europe-west4");
    assert!(killed < place("the gateway sees gcp/europe-west4 down"), "{out}");
    let share = "demand: 40.0 requests/s: 20 % of the 200 inputs/s of 2 scripted replicas, 100 each";
    assert!(out.contains(share), "{out}");
    assert!(out.contains("6 of 6 expectations hold") && !out.contains("FAILS"), "{out}");
}

#[test]
fn what_does_not_hold_is_named_and_ends_with_three() {
    let (output, _, _dir) = run(&drill(", \"served_in eu only\""), &["--json"]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let broken: Vec<&Value> =
        told["expectations"].as_array().unwrap().iter().filter(|each| each["held"] == false).collect();
    assert_eq!((told["held"].as_bool(), broken.len()), (Some(false), 1), "{told:#}");
    assert_eq!(broken[0]["expectation"], "served_in eu only");
    assert!(broken[0]["observed"].as_str().unwrap().contains("aws/us-east-1"), "{}", broken[0]);
    assert_eq!(told["seconds"].as_array().unwrap().len(), 12);
}

#[test]
fn a_file_that_cannot_be_run_starts_nothing_and_tells_all_that_is_wrong_with_it() {
    let wrong = drill(", \"all requests succeed\"")
        .replace("kill region gcp", "kill region aws")
        .replace("inputs_per_second", "speed")
        .replace("evacuated within 3s", "evacuated within 6s");
    let (output, file, _dir) = run(&wrong, &[]);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(output.stdout.is_empty());
    for (line, part) in [
        (5, "unknown expectation"),
        (9, "unknown key `speed`"),
        (23, "no region `aws/europe-west4` in the fleet"),
    ] {
        let start = format!("meridian: {}: line {line}: ", file.display());
        assert!(err.lines().any(|it| it.starts_with(&start) && it.contains(part)), "{start}{part} in {err}");
    }
    assert!(!err.contains("starting"), "{err}");
}

#[test]
fn a_deployment_that_was_there_before_is_not_killed() {
    let (output, _, _dir) = run(&drill(""), &["--against", "http://127.0.0.1:1"]);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("only surge, drain and undrain are"), "{err}");
}
