//! Tests of `meridian apply` against a hub.

use super::world::{AMERICA, EUROPE, Hub, config, wait_until};
use regions::{DeploymentName, RouteTable};
use scheduler_api::paths;
use scheduler_store::{EmbeddedStore, Store};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn deployment(name: &str, more: &str) -> String {
    format!(
        "[[deployment]]\nname = \"{name}\"\ntask = \"embed\"\nmodel = \"pypi://m\"\nengine = {{ kind = \"cpu\", precision = \"f32\" }}\n{more}\n"
    )
}

fn locked(name: &str, policy: &str) -> String {
    deployment(name, &format!("residency = {{ allow = [\"{policy}\"] }}"))
}

/// Returns a request with one file, on top of revision `base` if given.
fn message(text: &str, dry_run: bool, base: Option<u64>) -> String {
    json!({"version": 1, "dry_run": dry_run, "base": base, "deployments": [{"name": "d.toml", "text": text}]})
        .to_string()
}

async fn send(hub: &Hub, body: String) -> (u16, String, Value) {
    hub.post(paths::APPLY, body).await
}

async fn apply(hub: &Hub, text: &str) -> Value {
    let (status, _, body) = send(hub, message(text, false, None)).await;
    assert_eq!(status, 200, "{body}");
    body
}

/// Returns the revision and the names of the applied deployments.
async fn applied_deployments(hub: &Hub) -> (u64, Vec<String>) {
    let (status, _, body) = hub.get(paths::DEPLOYMENTS).await;
    assert_eq!(status, 200, "{body}");
    let names =
        body["deployments"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned());
    (body["revision"].as_u64().unwrap(), names.collect())
}

fn policy(table: &RouteTable, name: &str) -> (String, Option<String>) {
    let name: DeploymentName = name.parse().unwrap();
    let to = table.widening.get(&name).map(|widening| widening.to.to_string());
    (table.deployments[&name].residency.to_string(), to)
}

#[tokio::test]
async fn applied_deployments_are_published_and_survive_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let (before, names) = applied_deployments(&hub).await;
    assert_eq!(names, ["minilm", "minilm-eu"], "of the file");

    let text = deployment("minilm", "") + &locked("new", "eu");
    let (status, _, preview) = send(&hub, message(&text, true, None)).await;
    let listed: Vec<_> = preview["changes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| (&change["name"], &change["change"]))
        .collect();
    assert_eq!(
        listed,
        [
            (&json!("minilm"), &json!("changed")),
            (&json!("minilm-eu"), &json!("removed")),
            (&json!("new"), &json!("added"))
        ]
    );
    assert_eq!((status, &preview["applied"], &preview["base"]), (200, &json!(false), &json!(before)));
    assert_eq!(applied_deployments(&hub).await, (before, names), "a dry run changes nothing");

    assert_eq!(apply(&hub, &text).await["applied"], true);
    let table = hub.wait_for_routes("it is published", |table| table.deployments.contains_key("new")).await;
    assert_eq!((table.deployments.len(), policy(&table, "new").0.as_str()), (2, "eu"));
    let applied = applied_deployments(&hub).await;
    let again = apply(&hub, &text).await;
    assert_eq!((&again["applied"], &again["changes"]), (&json!(false), &json!([])));
    assert_eq!(applied_deployments(&hub).await, applied, "an unchanged configuration is not written again");
    hub.stop().await;

    let hub = Hub::start(config(dir.path())).await;
    assert_eq!(applied_deployments(&hub).await, applied, "applied deployments take precedence over the file");
    assert_eq!(hub.routes().await.deployments, table.deployments);
    hub.stop().await;
}

#[tokio::test]
async fn all_problems_are_reported_together_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let before = applied_deployments(&hub).await;
    let text = deployment("good", "")
        + &deployment("good", "residency = { allow = [\"eu\"] }\nregions = [\"aws/us-east-1\"]")
        + &deployment("bad", "regions = [\"aws/us-esat-1\"]").replace("\"f32\"", "\"f33\"");
    let (status, code, body) = send(&hub, message(&text, false, None)).await;
    assert_eq!((status, code.as_str()), (422, "invalid_files"));
    let problems = body["problems"].as_array().unwrap();
    for (line, part) in
        [(8, "named `good` too"), (13, "permits none of its regions"), (18, "f33"), (19, "did you mean")]
    {
        let listed = |problem: &&Value| {
            problem["file"] == "d.toml"
                && problem["line"] == line
                && problem["message"].as_str().unwrap().contains(part)
        };
        assert!(problems.iter().any(|problem| listed(&problem)), "{part} in {body:#}");
    }
    assert_eq!(problems.len(), 4, "{body:#}");
    assert_eq!(applied_deployments(&hub).await, before);
    hub.stop().await;
}

#[tokio::test]
async fn of_two_concurrent_applies_one_gets_a_conflict_and_nothing_is_partial() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    for round in 0..8 {
        let (base, _) = applied_deployments(&hub).await;
        let text = |operator: &str| {
            deployment(&format!("{operator}-{round}"), "") + &deployment(&format!("{operator}-too"), "")
        };
        let (one, other) = tokio::join!(
            send(&hub, message(&text("one"), false, Some(base))),
            send(&hub, message(&text("other"), false, Some(base))),
        );
        let mut codes = [(one.0, "one"), (other.0, "other")];
        codes.sort_unstable();
        assert_eq!([codes[0].0, codes[1].0], [200, 409], "{one:?} {other:?}");
        let winner = codes[0].1;
        assert_eq!(applied_deployments(&hub).await.1, [format!("{winner}-{round}"), format!("{winner}-too")]);
        let (_, code, body) = if winner == "one" { other } else { one };
        assert!(code == "conflict" && body.to_string().contains("has changed"), "{body}");
    }
    hub.stop().await;
}

#[tokio::test]
async fn a_wider_residency_waits_until_every_reader_has_the_table() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.settle = Duration::from_millis(1);
    let hub = Hub::start(config).await;
    let reader = format!("gateway/{AMERICA}/00000000000000ff");
    // A poll of a gateway with this table.
    let has = async |table: &RouteTable| {
        let generation = table.generation;
        hub.get(&format!("/v1/routes?after={generation}&wait_ms=1&reader={reader}")).await;
        wait_until("the hub has received it", async || {
            let (_, _, rollout) = hub.get(paths::ROLLOUT).await;
            rollout["readers"]
                .as_array()
                .unwrap()
                .iter()
                .any(|known| known["reader"] == *reader && known["generation"] == generation.to_string())
        })
        .await;
    };
    apply(&hub, &locked("m", "eu")).await;
    let first = hub.wait_for_routes("it is there", |table| table.deployments.contains_key("m")).await;
    has(&first).await;

    let listed = apply(&hub, &locked("m", "eea")).await;
    assert_eq!(listed["changes"][0]["fields"][0]["residency_change"], "widens");
    assert!(listed["notes"][0].as_str().unwrap().contains("meridian get rollout"), "{listed}");
    let second = hub.wait_for_routes("it is announced", |table| !table.widening.is_empty()).await;
    assert_eq!(policy(&second, "m"), ("eu".to_owned(), Some("eea".to_owned())));
    let (_, _, rollout) = hub.get(paths::ROLLOUT).await;
    assert_eq!(
        (&rollout["pending"][0]["to"], &rollout["pending"][0]["outdated_readers"]),
        (&json!("eea"), &json!([reader]))
    );
    // A later table with another change widens nothing.
    apply(&hub, &(locked("m", "eea") + &deployment("other", ""))).await;
    let third = hub.wait_for_routes("the other is there", |table| table.deployments.len() == 2).await;
    assert_eq!(policy(&third, "m"), ("eu".to_owned(), Some("eea".to_owned())));

    has(&second).await;
    let fourth = hub.wait_for_routes("it is wider", |table| table.widening.is_empty()).await;
    assert_eq!(policy(&fourth, "m"), ("eea".to_owned(), None));

    apply(&hub, &(locked("m", "de") + &deployment("other", ""))).await;
    let narrower = hub.wait_for_routes("it is narrower", |table| table.generation > fourth.generation).await;
    assert_eq!(policy(&narrower, "m"), ("de".to_owned(), None), "at once");
    hub.stop().await;
}

#[tokio::test]
async fn an_unreadable_record_changes_nothing_until_it_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    apply(&hub, &locked("m", "eu")).await;
    let good = hub.wait_for_routes("it is there", |table| table.deployments.contains_key("m")).await;
    hub.stop().await;
    let huge = format!(r#"{{"version":1,"applied":true,"deployments":["{}"]}}"#, "x".repeat(900_000));
    let blank = r#"{"version":1,"applied":true,"deployments":[{"name":"m","task":"embed","model":"pypi://m","engine":{"kind":"cpu","precision":"f32"},"residency":"","regions":[]}]}"#;
    let lost = blank.replace(r#""residency":"","#, "");
    for poison in ["", "[]", blank, &lost, &huge, r#"{"version":1,"applied":true,"deployments":7}"#] {
        let store = EmbeddedStore::open(&dir.path().join("hub/hub.redb"), Instant::now()).await.unwrap();
        store.put("desired/deployments", poison.into(), None).await.unwrap();
        store.close().await;
        let hub = Hub::start(config(dir.path())).await;
        assert_eq!(hub.routes().await.deployments, good.deployments, "the last valid table stays");
        let (status, _, body) = hub.get(paths::DEPLOYMENTS).await;
        assert!(status == 503 && body.to_string().contains("the last valid configuration stays"), "{body}");
        let replaced = apply(&hub, &locked("m", "eu")).await;
        assert_eq!((&replaced["applied"], &replaced["changes"]), (&json!(true), &json!([])), "{replaced}");
        assert!(replaced["notes"][0].as_str().unwrap().contains("desired/deployments"), "{replaced}");
        assert_eq!(applied_deployments(&hub).await.1, ["m"]);
        hub.stop().await;
    }
}

#[tokio::test]
async fn a_hub_does_not_start_on_the_store_of_a_later_version_and_leaves_it_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    Hub::start(config(dir.path())).await.stop().await;
    let open = async || EmbeddedStore::open(&dir.path().join("hub/hub.redb"), Instant::now()).await.unwrap();
    let store = open().await;
    let format = store.get("meta/format").await.unwrap().expect("a hub writes the format");
    assert!(String::from_utf8_lossy(&format.value).contains(env!("CARGO_PKG_VERSION")));
    store.put("meta/format", r#"{"format":2,"written_by":"0.9.0"}"#.into(), None).await.unwrap();
    let before = store.range("").await.unwrap();
    store.close().await;
    let error = Hub::try_start(config(dir.path())).await.err().expect("it does not start").to_string();
    for part in ["format 2", "version 0.9.0", "format 1", env!("CARGO_PKG_VERSION")] {
        assert!(error.contains(part), "{part} in {error}");
    }
    let store = open().await;
    assert_eq!(store.range("").await.unwrap(), before);
    store.close().await;
}

#[tokio::test]
async fn a_placement_is_checked_chosen_among_the_registered_regions_and_explained() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    for (placement, more, part) in [
        ("min_regions = 1, max_cost = 1", "", "its price is unknown"),
        ("min_regions = 16", "residency = { allow = [\"nl\"] }", "the placement requires 16"),
        ("min_regions = 1", "regions = [\"aws/us-east-1\"]", "exclude each other"),
    ] {
        let text = deployment("placed", &format!("{more}\nplacement = {{ {placement} }}"));
        let (status, code, body) = send(&hub, message(&text, false, None)).await;
        assert_eq!((status, code.as_str()), (422, "invalid_files"), "{placement}");
        assert!(body["problems"][0]["message"].as_str().unwrap().contains(part), "{body}");
    }

    let applied = apply(&hub, &deployment("placed", "placement = { min_regions = 1 }")).await;
    assert!(
        applied["notes"][0].as_str().unwrap().contains("the hub chooses the regions of placed"),
        "{applied}"
    );
    hub.register(AMERICA, 7100, 1, &["placed"]).await;
    let regions = |table: &RouteTable| {
        let placed = table.deployments.get("placed");
        placed.map(|placed| placed.regions.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    hub.wait_for_routes("it is placed", |table| regions(table) == Some(vec![AMERICA.to_owned()])).await;
    hub.register(EUROPE, 7200, 2, &["placed"]).await;
    let table = hub.wait_for_routes("Europe is there", |table| table.regions.len() == 2).await;
    assert_eq!(regions(&table), Some(vec![AMERICA.to_owned()]), "the current region stays");

    let (status, _, plan) = hub.get(paths::PLAN).await;
    let placement = &plan["placements"][0];
    assert_eq!((status, &placement["deployment"]), (200, &json!("placed")), "{plan}");
    let states: Vec<_> = placement["regions"].as_array().unwrap().iter().map(|one| &one["state"]).collect();
    assert_eq!(states, ["chosen", "not_needed"], "{plan}");

    // The status has the regions that are chosen for the applied placement.
    let statuses = async || {
        let (_, _, body) = hub.get(paths::DEPLOYMENTS).await;
        let regions = body["statuses"][0]["regions"].as_array().unwrap().iter();
        regions.map(|one| one["region"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    wait_until("the decision is in the store", async || statuses().await == [AMERICA]).await;
    apply(&hub, &deployment("placed", "placement = { min_regions = 2 }")).await;
    assert_ne!(statuses().await, [AMERICA], "not those of the earlier placement");
    wait_until("both are chosen", async || statuses().await == [AMERICA, EUROPE]).await;
    hub.stop().await;
}
