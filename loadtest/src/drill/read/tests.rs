//! Tests of the parser: a valid drill, and the messages for invalid ones.

use super::*;
use regions::{Catalogue, Deployment};

const GOOD: &str = r#"description = "A region dies."
duration = "30s"
before = ["served_by aws/us-east-1"]
expect = ["failed == 0"]

[fleet]
regions = ["aws/us-east-1", "gcp/europe-west4"]
engine = { kind = "scripted", inputs_per_second = 50 }
replicas = [3, 1]

[[load]]
name = "near"
near = "aws/us-east-1"
rate = "40 %"

[[load]]
name = "far"
model = "minilm-eu"
near = "gcp/europe-west4"
rate = 20

[[step]]
at = "10s"
do = ["kill region gcp/europe-west4", "surge 2x on near for 5s"]
expect = ["evacuated within 3s", "p99 <= 1.2x before within 5s"]

[[step]]
at = "20s"
do = "start region gcp/europe-west4"
"#;

fn deployments(_: Option<&str>) -> Result<Vec<Deployment>, Vec<String>> {
    let text = include_str!("../../../../configs/deployments.toml");
    Ok(regions::parse_deployments(text, &Catalogue::builtin()).unwrap())
}

fn read(text: &str, against: bool) -> Result<Drill, Vec<Problem>> {
    let catalogue = Catalogue::builtin();
    super::read(text, &ReadContext { catalogue: &catalogue, deployments: &deployments, against })
}

#[test]
fn rates_and_spans_follow_from_the_file() {
    let drill = read(GOOD, false).unwrap();
    assert_eq!(drill.fleet.capacity, Some(200.0));
    assert_eq!((drill.loads[0].rate, drill.loads[1].rate), (80.0, 20.0));
    assert_eq!(drill.profile(&drill.loads[0]), "80 for 10000ms, 160 for 5000ms, 80 for 15000ms");
    assert_eq!(drill.profile(&drill.loads[1]), "20 for 30000ms");
    let seconds = |from, to| (Duration::from_secs(from), Duration::from_secs(to));
    let spans: Vec<_> = drill.expectations.iter().map(|each| each.span.seconds()).collect();
    assert_eq!(spans, [seconds(2, 10), seconds(0, 30), seconds(13, 20), seconds(15, 20)]);
    assert_eq!(drill.requests(None, Duration::from_secs(8), Duration::from_secs(12)), 560.0);
}

#[test]
fn every_shipped_drill_can_be_read() {
    for (name, text) in [
        (
            "configs/drills/flapping-region.toml",
            include_str!("../../../../configs/drills/flapping-region.toml"),
        ),
        ("configs/drills/grey-region.toml", include_str!("../../../../configs/drills/grey-region.toml")),
        ("configs/drills/hub-loss.toml", include_str!("../../../../configs/drills/hub-loss.toml")),
        ("configs/drills/hub-takeover.toml", include_str!("../../../../configs/drills/hub-takeover.toml")),
        ("configs/drills/region-kill.toml", include_str!("../../../../configs/drills/region-kill.toml")),
        (
            "configs/drills/residency-under-outage.toml",
            include_str!("../../../../configs/drills/residency-under-outage.toml"),
        ),
        (
            "configs/drills/rolling-restart.toml",
            include_str!("../../../../configs/drills/rolling-restart.toml"),
        ),
        (
            "configs/drills/rolling-upgrade.toml",
            include_str!("../../../../configs/drills/rolling-upgrade.toml"),
        ),
        (
            "configs/drills/silent-partition.toml",
            include_str!("../../../../configs/drills/silent-partition.toml"),
        ),
        ("configs/drills/store-loss.toml", include_str!("../../../../configs/drills/store-loss.toml")),
        ("configs/drills/surge.toml", include_str!("../../../../configs/drills/surge.toml")),
    ] {
        let drill = read(text, false).unwrap_or_else(|problems| panic!("{name}: {problems:#?}"));
        assert!(!drill.expectations.is_empty() && !drill.steps.is_empty(), "{name}");
    }
}

/// Applies one error at a time; checks the line and a part of the message.
#[test]
fn each_problem_is_reported_with_its_line_and_the_valid_syntax() {
    let check = |from: &str, to: &str, line: usize, part: &str| {
        assert!(GOOD.contains(from), "{from}");
        let problems = read(&GOOD.replacen(from, to, 1), false).unwrap_err();
        let found = problems.iter().any(|it| it.line == line && it.message.contains(part));
        assert!(found, "{part} in line {line} of {problems:#?}");
    };
    check("duration = \"30s\"", "duration = \"2h\"", 2, "from \"1s\" to \"1h\"");
    check("duration = \"30s\"", "durration = \"30s\"", 2, "did you mean duration?");
    check("[\"served_by aws/us-east-1\"]", "[\"served_by aws/us-east-2\"]", 3, "did you mean aws/us-east-1?");
    check("failed == 0", "failed == 0 within 3s", 4, "move it under one");
    check("failed == 0", "all requests succeed", 4, "unknown expectation");
    check("failed == 0", "generation rises", 4, "move it under one");
    check("failed == 0", "hubs agree", 4, "hubs = 2");
    check("failed == 0", "served_in atlantis only", 4, "atlantis");
    check("failed == 0", "failures only bad_luck for near", 4, "docs/errors.md");
    check("failed == 0", "failures only timeout", 4, "unknown error code");
    check("failed == 0", "generation never falls for near", 4, "leave out `for`");
    check("regions = [\"aws/us-east-1\"", "regions = [\"aws/us-esat-1\"", 7, "did you mean aws/us-east-1");
    check("kind = \"scripted\"", "kind = \"gpu\"", 8, "write \"scripted\"");
    check("inputs_per_second = 50", "inputs_per_second = 0", 8, "from 1 to 10000");
    check("replicas = [3, 1]", "replicas = [3]", 9, "one for each of 2 regions");
    check("replicas = [3, 1]", "capacity = 10", 9, "remove it");
    check("replicas = [3, 1]", "hubs = 2", 9, "store = \"etcd\"");
    check("replicas = [3, 1]", "hubs = 6\nstore = \"etcd\"", 9, "from 1 to 5");
    check("rate = \"40 %\"", "rate = 0", 14, "above 0");
    check("rate = \"40 %\"", "rate = \"a lot\"", 14, "a share of the capacity");
    check("name = \"far\"", "name = \"near\"", 17, "choose another name");
    check("minilm-eu", "minilm-ue", 18, "did you mean minilm-eu");
    check(
        "near = \"gcp/europe-west4\"",
        "near = \"oci/ap-tokyo-1\"",
        19,
        "no region `oci/ap-tokyo-1` in the fleet",
    );
    check("at = \"10s\"", "at = \"30s\"", 23, "not before the end");
    check("at = \"20s\"", "at = \"9s\"", 28, "in order");
    check("kill region gcp", "kill store\", \"kill region gcp", 24, "store = \"etcd\"");
    check("surge 2x on near", "surge 2x on here", 24, "the loads are near, far");
    check("evacuated within 3s", "evacuated within 10s", 25, "no whole second is left");
    check("p99 <= 1.2x before", "p99.9 < 250ms", 25, "needs 1000");
    check("within 5s\"]", "for far within 6s\"]", 25, "80 requests from 16 s to 20 s");
}

#[test]
fn all_problems_are_reported_at_once() {
    let text = GOOD.replace("30s", "30").replace("gcp/europe-west4\"]", "gcp/europe-west5\"]");
    let text = text.replace("failed == 0", "failed > 0").replace("minilm-eu", "maxilm");
    let problems = read(&text, false).unwrap_err();
    let lines: std::collections::BTreeSet<_> = problems.iter().map(|problem| problem.line).collect();
    assert_eq!(lines.into_iter().collect::<Vec<_>>(), [2, 4, 7, 9, 18, 19, 24, 25, 29], "{problems:#?}");
}

#[test]
fn five_mistakes_in_five_sections_are_five_problems_with_their_lines() {
    let mut text = GOOD.to_owned();
    for (from, to) in [
        ("duration = \"30s\"", "duration = 30"),
        ("inputs_per_second = 50", "inputs_per_second = \"50\""),
        ("near = \"gcp/europe-west4\"", "nearr = \"gcp/europe-west4\"\nnear = \"gcp/europe-west4\""),
        ("rate = 20", "rate = true"),
        ("at = \"20s\"", "at = \"20\""),
    ] {
        assert!(text.contains(from), "{from}");
        text = text.replacen(from, to, 1);
    }
    let problems = read(&text, false).unwrap_err();
    let expected = [
        "line 2: duration: 30 is a number; write a duration from \"1s\" to \"1h\"",
        "line 8: fleet.engine.inputs_per_second: is a string; write a whole number from 1 to 10000",
        "line 19: load \"far\": nearr: unknown key `nearr`; did you mean near?; the keys are name, model, near",
        "line 21: load \"far\": rate: is no rate; write requests per second above 0",
        "line 29: step 2: at: \"20\" is not a duration; write a duration",
    ];
    assert_eq!(problems.len(), expected.len(), "{problems:#?}");
    for (problem, part) in problems.iter().map(ToString::to_string).zip(expected) {
        assert!(problem.starts_with(part), "{part} in {problem}");
    }
}

#[test]
fn a_share_requires_a_known_capacity() {
    let of = |line: &str| {
        let real = GOOD.replace("engine = { kind = \"scripted\", inputs_per_second = 50 }", line);
        read(&real.replace("replicas = [3, 1]\n", ""), false)
    };
    let problems = of("").unwrap_err();
    assert!(problems.len() == 1 && problems[0].message.contains("requires a capacity"), "{problems:#?}");
    assert_eq!(of("capacity = 100").unwrap().loads[0].rate, 40.0);
    // Two regions with three replicas and one replica, 50 inputs/s each; a request of five inputs takes five times as
    // long.
    let scripted =
        |more: &str| read(&GOOD.replace("rate = \"40 %\"", &format!("rate = \"40 %\"{more}")), false);
    assert_eq!(scripted("").unwrap().loads[0].rate, 80.0);
    assert_eq!(scripted("\ninputs = 5").unwrap().loads[0].rate, 16.0);
}

#[test]
fn only_surge_and_drain_are_possible_on_an_existing_deployment() {
    let problems = read(GOOD, true).unwrap_err();
    assert_eq!(problems.len(), 2, "{problems:#?}");
    assert!(problems.iter().all(|problem| problem.message.contains("only surge, drain and undrain")));
    let kill = "\"kill region gcp/europe-west4\"";
    let drained =
        GOOD.replace(kill, "\"drain region gcp/europe-west4\"").replace("start region", "undrain region");
    assert!(read(&drained, true).is_ok());
}
