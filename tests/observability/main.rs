//! The rules for Prometheus, the dashboards for Grafana and the runbook agree with each other and with the metrics that exist.
//!
//! `promtool` of Prometheus checks syntax and runs the unit tests of the rules. It does not know our metrics, so the other
//! tests compare every metric, label and label value with docs/metrics.md, which is rendered from the code.

#![expect(clippy::unwrap_used, reason = "a panic fails the test at the right line")]

mod drills;
mod names;
mod recording;
mod replay;

use names::{Metrics, Names};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const RULES: [&str; 2] = ["rules/recording.yml", "rules/alerts.yml"];
const RULE_TESTS: &str = "rules/alerts_test.yml";
const RUNBOOK: &str = "docs/runbook.md";
/// Variable that `.ci/run` sets: no test may be skipped because of a program that `.ci/prerequisites` installs.
const CI_VARIABLE: &str = "MERIDIAN_CI";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn folder() -> PathBuf {
    root().join("configs/observability")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Reports that a test is skipped. Not with `eprintln!`, whose output is captured and is not shown for a test that passes.
fn skipped(reason: &str) {
    std::io::stderr().write_all(format!("skipped: {reason}\n").as_bytes()).unwrap();
}

/// Runs a program and returns its standard output, or the reason why it cannot be started. Panics if it fails.
fn output(program: &str, arguments: &[&str]) -> Result<String, std::io::Error> {
    let output = Command::new(program).args(arguments).current_dir(folder()).output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let printed = text(&output.stdout);
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{printed}\n{}",
        output.status,
        text(&output.stderr)
    );
    Ok(printed)
}

/// Returns whether a program can be started. Without it a test is skipped, or fails in CI.
fn has(program: &str, package: &str) -> bool {
    let Err(error) = output(program, &["--version"]) else { return true };
    let is_ci = std::env::var_os(CI_VARIABLE).is_some();
    skipped(&missing(program, package, &error, is_ci).unwrap_or_else(|failure| panic!("{failure}")));
    false
}

/// Returns why a test is skipped without this program, or the failure in CI.
fn missing(program: &str, package: &str, error: &std::io::Error, is_ci: bool) -> Result<String, String> {
    let needs = format!("this test needs {program} (Debian: apt-get install {package}): {error}");
    if is_ci {
        Err(format!("{needs}; install it, or unset {CI_VARIABLE} to skip the test"))
    } else {
        Ok(needs)
    }
}

fn has_promtool() -> bool {
    has("promtool", "prometheus")
}

#[test]
fn a_test_without_its_program_is_skipped_with_the_reason_and_fails_in_ci() {
    let error = output("no-such-program", &["--version"]).unwrap_err();
    let missing = |is_ci| missing("no-such-program", "none", &error, is_ci);
    assert!(missing(false).unwrap().contains("needs no-such-program (Debian: apt-get install none): "));
    assert!(missing(true).unwrap_err().contains("unset MERIDIAN_CI"));
}

/// Returns the value of each line `KEY: VALUE`, such as of `- alert:`.
fn values<'a>(text: &'a str, key: &str) -> Vec<&'a str> {
    text.lines().filter_map(|line| line.trim_start().strip_prefix(key)?.strip_prefix(' ')).collect()
}

fn alerts() -> BTreeSet<String> {
    let text = read(&folder().join(RULES[1]));
    values(&text, "- alert:").into_iter().map(str::to_owned).collect()
}

/// Dashboards by file name.
fn dashboards() -> BTreeMap<String, Value> {
    let files = std::fs::read_dir(folder().join("grafana")).unwrap().flatten();
    let files = files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|it| it == "json"));
    let parsed = files.map(|path| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let value = serde_json::from_str(&read(&path)).unwrap_or_else(|error| panic!("{name}: {error}"));
        (name, value)
    });
    parsed.collect()
}

/// Returns the array below a key.
fn array<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

/// Returns each query of a dashboard with its legend.
fn queries(dashboard: &Value) -> Vec<(&str, &str)> {
    let targets = array(dashboard, "panels").flat_map(|panel| array(panel, "targets"));
    targets
        .map(|target| (target["expr"].as_str().unwrap(), target["legendFormat"].as_str().unwrap()))
        .collect()
}

#[test]
fn promtool_accepts_the_configuration_the_rules_and_their_tests() {
    if !has_promtool() {
        return;
    }
    let run = |arguments: &[&str]| output("promtool", arguments).expect("promtool was found");
    run(&["check", "config", "prometheus.yml"]);
    run(&[&["check", "rules"], &RULES[..]].concat());
    run(&["test", "rules", RULE_TESTS]);
}

#[test]
fn promtool_accepts_each_query_of_the_dashboards() {
    if !has_promtool() {
        return;
    }
    let mut rules = "groups:\n- name: queries\n  rules:\n".to_owned();
    for (name, dashboard) in dashboards() {
        for (at, (query, _)) in queries(&dashboard).into_iter().enumerate() {
            let query = Value::from(query.replace("$__rate_interval", "5m"));
            rules += &format!("  - record: {}:{at}\n    expr: {query}\n", name.replace('-', "_"));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("queries.yml");
    std::fs::write(&path, rules).unwrap();
    output("promtool", &["check", "rules", path.to_str().unwrap()]).expect("promtool was found");
}

#[test]
fn every_metric_and_label_of_the_rules_the_dashboards_and_the_runbook_exists() {
    let rules: Vec<_> = RULES.iter().map(|path| (*path, read(&folder().join(path)))).collect();
    let mut names = Names::new(Metrics::read(&read(&root().join("docs/metrics.md"))));
    for (_, text) in &rules {
        names.add_recorded(text);
    }
    let mut complaints = Vec::new();
    let tests = (RULE_TESTS, read(&folder().join(RULE_TESTS)));
    let runbook = (RUNBOOK, read(&root().join(RUNBOOK)));
    for (path, text) in rules.iter().chain([&tests, &runbook]) {
        complaints.extend(names.complaints(path, text));
    }
    for (name, dashboard) in dashboards() {
        let variables = array(&dashboard["templating"], "list");
        for variable in variables.filter_map(|variable| variable["query"]["query"].as_str()) {
            complaints.extend(names.complaints(&name, variable));
        }
        for (query, legend) in queries(&dashboard) {
            complaints.extend(names.complaints(&name, query));
            complaints.extend(names.legend_complaints(&name, legend));
        }
    }
    assert!(complaints.is_empty(), "{complaints:#?}");
}

#[test]
fn failed_requests_are_those_with_an_error_code_that_is_a_fault_of_meridian() {
    let rules = read(&folder().join(RULES[0]));
    let (_, rule) = rules.split_once("record: meridian_fleet:requests_bad:rate5m").unwrap();
    let (_, outcomes) = rule.split_once("outcome=~\"").unwrap();
    let counted: BTreeSet<_> = outcomes.split_once('"').unwrap().0.split('|').collect();

    let page = read(&root().join("docs/errors.md"));
    let (codes, _) = page.split_once("## Hub").unwrap();
    let faults = codes.lines().filter_map(|line| {
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        let [_, code, _, _, fault, ..] = cells[..] else { return None };
        ["capacity", "network", "replica"].contains(&fault).then(|| code.trim_matches('`'))
    });
    // Rejections by residency that no client causes, responses that this side left incomplete, and errors without a code.
    let others = ["not_resident_here", "policy_too_old", "truncated", "shutdown", "other_server_error"];
    assert_eq!(counted, faults.chain(others).collect(), "left: the rule; right: docs/errors.md");
}

#[test]
fn each_alert_has_a_section_in_the_runbook_and_each_section_an_alert() {
    let runbook = read(&root().join(RUNBOOK));
    let sections: Vec<_> = values(&runbook, "###").into_iter().map(str::to_owned).collect();
    let unique: BTreeSet<_> = sections.iter().cloned().collect();
    assert_eq!(sections.len(), unique.len(), "a section occurs twice");
    assert_eq!(alerts(), unique, "left: alerts; right: sections of {RUNBOOK}");
    for section in runbook.split("\n### ").skip(1) {
        let name = section.lines().next().unwrap_or_default();
        for part in ["**Meaning.**", "**Impact.**", "**Over when**"] {
            assert!(section.contains(part), "{name} has no {part}");
        }
        let verifies = section.contains("**Verify.**") && section.contains("**Act.**");
        assert!(
            verifies || section.contains("**Verify and act**"),
            "{name} does not say how to verify or act"
        );
    }
}

#[test]
fn each_alert_has_a_severity_a_summary_a_description_and_the_address_of_its_section() {
    let text = read(&folder().join(RULES[1]));
    for rule in text.split("      - alert: ").skip(1) {
        let name = rule.lines().next().unwrap_or_default();
        let has_severity = ["page", "ticket"]
            .iter()
            .any(|severity| rule.contains(&format!("labels: {{ severity: {severity}")));
        assert!(has_severity, "{name} has no severity");
        assert_eq!(values(rule, "summary:").len(), 1, "{name} has no summary");
        assert_eq!(values(rule, "description:"), [">-"], "{name} has no description");
        let address = format!("{RUNBOOK}#{}", name.to_lowercase());
        assert_eq!(values(rule, "runbook_url:"), [address.as_str()], "{name}");
    }
}

#[test]
fn each_alert_has_a_series_that_raises_it_and_one_with_which_it_stays_inactive() {
    let text = read(&folder().join(RULE_TESTS));
    let (mut raised, mut inactive) = (BTreeSet::new(), BTreeSet::new());
    for test in text.split("- expr: ALERTS{alertname=\"").skip(1) {
        let (name, rest) = test.split_once('"').unwrap_or_default();
        let is_inactive = rest.lines().any(|line| line.trim() == "exp_samples: []");
        let is_raised = rest.lines().any(|line| line.trim() == "exp_samples:");
        assert_ne!(is_inactive, is_raised, "{name} expects samples or none");
        if is_inactive { &mut inactive } else { &mut raised }.insert(name.to_owned());
    }
    assert_eq!(raised, alerts(), "left: alerts that a test raises; right: all");
    assert_eq!(inactive, alerts(), "left: alerts with a test in which they stay inactive; right: all");
}

#[test]
fn the_dashboards_are_what_build_py_prints_and_each_panel_is_described() {
    for (name, dashboard) in dashboards() {
        for panel in array(&dashboard, "panels").filter(|panel| panel["type"] != "row") {
            let title = &panel["title"];
            let described = panel["description"].as_str().is_some_and(|text| !text.is_empty());
            let has_unit = panel["fieldConfig"]["defaults"]["unit"].is_string();
            assert!(described && has_unit, "{name}: {title} has no description or no unit");
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{name}: {title}");
        }
    }
    let script = "grafana/build.py";
    if !has("python3", "python3") {
        return;
    }
    let names = output("python3", &[script, "--list"]).expect("python3 was found");
    let names: BTreeSet<_> = names.lines().collect();
    assert_eq!(names, dashboards().keys().map(String::as_str).collect(), "left: {script}; right: files");
    for name in names {
        let printed = output("python3", &[script, name]).expect("python3 was found");
        let committed = read(&folder().join(format!("grafana/{name}.json")));
        assert!(printed == committed, "grafana/{name}.json is out of date: run python3 {script}");
    }
}
