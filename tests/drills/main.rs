//! `meridian drill` with three drills: one that succeeds, one whose expectation fails, and one that is invalid.
//!
//! The shipped drills take minutes and need an otherwise idle machine: `make drills` runs them all.

#![expect(clippy::unwrap_used, reason = "a panic fails the test at the right line")]

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output};

/// A shorter region-kill drill with scripted replicas, and `more` expectations.
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
    let output = command.arg("drill").arg(&file).args(arguments).current_dir(dir.path()).output().unwrap();
    (output, file, dir)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_killed_region_causes_no_failures_and_appears_in_the_timeline() {
    let (output, _, _dir) = run(&drill(""), &[]);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}\n{err}");
    let place = |part: &str| out.find(part).unwrap_or_else(|| panic!("{part} in {out}"));
    let killed = place(">> kill region gcp/europe-west4");
    for gateway in ["aws/us-east-1", "gcp/europe-west4"] {
        assert!(killed < place(&format!("gateway {gateway} reports gcp/europe-west4 down")), "{out}");
    }
    let share = "demand: 40.0 requests/s: 20 % of the 200 inputs/s of 2 scripted replicas, 100 each";
    assert!(out.contains(share), "{out}");
    assert!(out.contains("6 of 6 expectations hold") && !out.contains("FAILS"), "{out}");
}

/// Clients use the gateway near them: without their own region they cross the ocean, and with it they do not.
#[test]
fn the_loss_of_a_region_does_not_make_its_clients_faster() {
    let alone =
        drill("").replace("[[load]]\nname = \"america\"\nnear = \"aws/us-east-1\"\nrate = \"10 %\"\n", "");
    let alone = alone.replace("before = [\"served_by aws/us-east-1\", ", "before = [");
    let (output, _, dir) = run(&alone, &["--json", "--html", "page.html"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let seconds = report["seconds"].as_array().unwrap();
    let fastest = |from: usize, to: usize| {
        let p50 = seconds[from..to].iter().filter_map(|second| second["p50_ms"].as_f64());
        p50.min_by(f64::total_cmp).unwrap()
    };
    // The round trip to the other region is 91 ms longer; half of that leaves room for a busy machine.
    let (before, after) = (fastest(2, 6), fastest(8, 12));
    assert!(after > before + 45.0, "{before} ms with the region, {after} ms without it: {report:#}");
    let page = std::fs::read_to_string(dir.path().join("page.html")).unwrap();
    assert!(page.contains("\"name\":\"drill\"") && !page.contains("127.0.0.1"), "{page}");
}

#[test]
fn a_failed_expectation_is_reported_with_exit_code_3() {
    let (output, _, _dir) = run(&drill(", \"served_in eu only\""), &["--json"]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let broken: Vec<&Value> =
        report["expectations"].as_array().unwrap().iter().filter(|each| each["held"] == false).collect();
    assert_eq!((report["held"].as_bool(), broken.len()), (Some(false), 1), "{report:#}");
    assert_eq!(broken[0]["expectation"], "served_in eu only");
    assert!(broken[0]["observed"].as_str().unwrap().contains("aws/us-east-1"), "{}", broken[0]);
    assert_eq!(report["seconds"].as_array().unwrap().len(), 12);
}

#[test]
fn an_invalid_drill_starts_nothing_and_all_its_problems_are_reported() {
    let wrong = drill(", \"no failures\"")
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
        let start = format!("meridian: {}:{line}: ", file.display());
        assert!(err.lines().any(|it| it.starts_with(&start) && it.contains(part)), "{start}{part} in {err}");
    }
    assert!(!err.contains("starting"), "{err}");
}

#[test]
fn an_existing_fleet_is_never_killed() {
    let (output, _, _dir) = run(&drill(""), &["--against", "http://127.0.0.1:1"]);
    let err = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("only surge, drain and undrain are"), "{err}");
}
