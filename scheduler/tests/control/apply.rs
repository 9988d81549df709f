//! An operator and a hub.

use super::world::{AMERICA, EUROPE, FLEET_TOKEN, Hub, TOKEN, config, until};
use regions::{DeploymentName, Generation, RouteTable};
use scheduler_core::token::Token;
use scheduler_store::{Embedded, Store};
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

/// One file, applied upon `base` if that is said.
fn message(text: &str, dry_run: bool, base: Option<u64>) -> String {
    json!({"version": 1, "dry_run": dry_run, "base": base, "deployments": [{"name": "d.toml", "text": text}]})
        .to_string()
}

async fn apply_as(hub: &Hub, token: &str, body: String) -> (u16, String, Value) {
    let request = hub.client.post(format!("{}/v1/apply", hub.url)).bearer_auth(token).body(body);
    let answer = request.send().await.unwrap();
    let code = answer.headers().get("x-meridian-error").map(|code| code.to_str().unwrap().to_owned());
    (answer.status().as_u16(), code.unwrap_or_default(), answer.json().await.unwrap())
}

async fn apply(hub: &Hub, text: &str) -> Value {
    let (status, _, body) = apply_as(hub, TOKEN, message(text, false, None)).await;
    assert_eq!(status, 200, "{body}");
    body
}

/// What was applied, and at which revision.
async fn wanted(hub: &Hub) -> (u64, Vec<String>) {
    let (status, _, body) = hub.get("/v1/deployments").await;
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
async fn what_is_applied_is_published_read_back_and_outlives_the_hub_and_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let (before, names) = wanted(&hub).await;
    assert_eq!(names, ["minilm", "minilm-eu"], "of the file");

    let text = deployment("minilm", "") + &locked("new", "eu");
    let (status, _, seen) = apply_as(&hub, TOKEN, message(&text, true, None)).await;
    let told: Vec<_> = seen["changes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| (&change["name"], &change["change"]))
        .collect();
    assert_eq!(
        told,
        [
            (&json!("minilm"), &json!("changed")),
            (&json!("minilm-eu"), &json!("removed")),
            (&json!("new"), &json!("added"))
        ]
    );
    assert_eq!((status, &seen["applied"], &seen["base"]), (200, &json!(false), &json!(before)));
    assert_eq!(wanted(&hub).await, (before, names), "a dry run changes nothing");

    assert_eq!(apply(&hub, &text).await["applied"], true);
    let table = hub.until_routes("it is published", |table| table.deployments.contains_key("new")).await;
    assert_eq!((table.deployments.len(), policy(&table, "new").0.as_str()), (2, "eu"));
    let applied = wanted(&hub).await;
    let again = apply(&hub, &text).await;
    assert_eq!((&again["applied"], &again["changes"]), (&json!(false), &json!([])));
    assert_eq!(wanted(&hub).await, applied, "what is so already is not written again");
    hub.stop().await;

    let hub = Hub::start(config(dir.path())).await;
    assert_eq!(wanted(&hub).await, applied, "the file says something else, and somebody has applied this");
    assert_eq!(hub.routes().await.deployments, table.deployments);
    hub.stop().await;
}

#[tokio::test]
async fn everything_wrong_is_told_at_once_and_nothing_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let before = wanted(&hub).await;
    let text = deployment("good", "")
        + &deployment("good", "residency = { allow = [\"eu\"] }\nregions = [\"aws/us-east-1\"]")
        + &deployment("bad", "regions = [\"aws/us-esat-1\"]").replace("\"f32\"", "\"f33\"");
    let (status, code, body) = apply_as(&hub, TOKEN, message(&text, false, None)).await;
    assert_eq!((status, code.as_str()), (422, "invalid_files"));
    let problems = body["problems"].as_array().unwrap();
    for (line, part) in
        [(8, "called `good` too"), (13, "permits none of its regions"), (18, "f33"), (19, "did you mean")]
    {
        let told = |problem: &&Value| {
            problem["file"] == "d.toml"
                && problem["line"] == line
                && problem["message"].as_str().unwrap().contains(part)
        };
        assert!(problems.iter().any(|problem| told(&problem)), "{part} in {body:#}");
    }
    assert_eq!(problems.len(), 4, "{body:#}");
    assert_eq!(wanted(&hub).await, before);
    hub.stop().await;
}

#[tokio::test]
async fn only_an_operator_changes_anything_and_where_there_is_none_nobody_does() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let before = wanted(&hub).await;
    for token in ["", "0123456789abcdeX", "0123456789abcde", "0123456789abcdef0"] {
        let (status, code, body) = apply_as(&hub, token, message("deployment = []", false, None)).await;
        assert_eq!((status, code.as_str()), (401, "unauthenticated"), "{body}");
        assert!(!body.to_string().contains("abcde"), "a token is not repeated: {body}");
    }
    let (status, code, _) = hub.post("/v1/apply", message("deployment = []", false, None)).await;
    assert_eq!((status, code.as_str()), (403, "operator_only"), "the fleet token is known, and not enough");
    assert_eq!(wanted(&hub).await, before);
    hub.stop().await;

    let mut closed = config(dir.path());
    closed.tokens.operator = None;
    let hub = Hub::start(closed).await;
    let (status, _, body) = apply_as(&hub, TOKEN, message("deployment = []", false, None)).await;
    assert!(status == 403 && body.to_string().contains("operator_token_file"), "{body}");
    hub.stop().await;
}

#[tokio::test]
async fn of_two_who_apply_at_once_one_is_told_of_the_other_and_nothing_is_half_done() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    for round in 0..8 {
        let (base, _) = wanted(&hub).await;
        let text =
            |who: &str| deployment(&format!("{who}-{round}"), "") + &deployment(&format!("{who}-too"), "");
        let (one, other) = tokio::join!(
            apply_as(&hub, TOKEN, message(&text("one"), false, Some(base))),
            apply_as(&hub, TOKEN, message(&text("other"), false, Some(base))),
        );
        let mut codes = [(one.0, "one"), (other.0, "other")];
        codes.sort_unstable();
        assert_eq!([codes[0].0, codes[1].0], [200, 409], "{one:?} {other:?}");
        let winner = codes[0].1;
        assert_eq!(wanted(&hub).await.1, [format!("{winner}-{round}"), format!("{winner}-too")]);
        let (_, code, body) = if winner == "one" { other } else { one };
        assert!(code == "conflict" && body.to_string().contains("Somebody else"), "{body}");
    }
    hub.stop().await;
}

#[tokio::test]
async fn a_wider_residency_waits_until_every_reader_has_heard_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.settle = Duration::from_millis(1);
    let hub = Hub::start(config).await;
    let reader = format!("gateway/{AMERICA}/00000000000000ff");
    // A gateway that says what it has in hand.
    let has = async |table: &RouteTable| {
        let generation = table.generation;
        hub.get(&format!("/v1/routes?after={generation}&wait_ms=1&reader={reader}")).await;
        until("the hub knows", async || {
            let (_, _, rollout) = hub.get("/v1/rollout").await;
            rollout["readers"]
                .as_array()
                .unwrap()
                .iter()
                .any(|known| known["reader"] == *reader && known["generation"] == generation.to_string())
        })
        .await;
    };
    apply(&hub, &locked("m", "eu")).await;
    let first = hub.until_routes("it is there", |table| table.deployments.contains_key("m")).await;
    has(&first).await;

    let told = apply(&hub, &locked("m", "eea")).await;
    assert_eq!(told["changes"][0]["fields"][0]["residency_change"], "widens");
    assert!(told["notes"][0].as_str().unwrap().contains("meridian get rollout"), "{told}");
    let second = hub.until_routes("it is announced", |table| !table.widening.is_empty()).await;
    assert_eq!(policy(&second, "m"), ("eu".to_owned(), Some("eea".to_owned())));
    let (_, _, rollout) = hub.get("/v1/rollout").await;
    assert_eq!(
        (&rollout["pending"][0]["to"], &rollout["pending"][0]["outdated_readers"]),
        (&json!("eea"), &json!([reader]))
    );
    // Something else is published meanwhile, and widens nothing.
    apply(&hub, &(locked("m", "eea") + &deployment("other", ""))).await;
    let third = hub.until_routes("the other is there", |table| table.deployments.len() == 2).await;
    assert_eq!(policy(&third, "m"), ("eu".to_owned(), Some("eea".to_owned())));

    has(&second).await;
    let fourth = hub.until_routes("it is wider", |table| table.widening.is_empty()).await;
    assert_eq!(policy(&fourth, "m"), ("eea".to_owned(), None));

    apply(&hub, &(locked("m", "de") + &deployment("other", ""))).await;
    let narrower = hub.until_routes("it is narrower", |table| table.generation > fourth.generation).await;
    assert_eq!(policy(&narrower, "m"), ("de".to_owned(), None), "at once");
    hub.stop().await;
}

#[tokio::test]
async fn a_stranger_neither_holds_up_a_wider_residency_nor_hastens_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.settle = Duration::from_millis(1);
    // Two are good at once, while the one is changed for the other.
    let tokens = format!("old-token-of-the-fleet\nnew-token-of-the-fleet\n{FLEET_TOKEN}");
    config.tokens.fleet = Token::read_all(&tokens).unwrap();
    let hub = Hub::start(config).await;
    // Somebody who shows this says that a reader has a table. A stranger is denied.
    let without_token = reqwest::Client::builder().no_proxy().build().unwrap();
    let says = async |shown: Option<&str>, reader: &str, generation: Generation| {
        let url = format!("{}/v1/routes?after={generation}&wait_ms=1&reader={reader}", hub.url);
        let question = without_token.get(url);
        let question = shown.iter().fold(question, |question, token| question.bearer_auth(token));
        let known = shown.is_some_and(|token| token.ends_with("-token-of-the-fleet"));
        let status = question.send().await.unwrap().status();
        assert!(if known { status.is_success() } else { status == 401 }, "{status}");
    };
    let readers = async || {
        let (_, _, rollout) = hub.get("/v1/rollout").await;
        let known = rollout["readers"].as_array().unwrap().iter();
        known.map(|known| (known["reader"].clone(), known["generation"].clone())).collect::<Vec<_>>()
    };
    let (one, other) =
        (format!("gateway/{AMERICA}/00000000000000ff"), format!("spoke/{EUROPE}/00000000000000ee"));
    let known = |first: Generation, second: Generation| {
        [(json!(one), json!(first.to_string())), (json!(other), json!(second.to_string()))]
    };
    apply(&hub, &locked("m", "eu")).await;
    let first = hub.until_routes("it is there", |table| table.deployments.contains_key("m")).await.generation;
    for stranger in 0..8_u64 {
        let shown = [None, Some("neither-of-the-two-")][stranger as usize % 2];
        says(shown, &format!("gateway/{AMERICA}/{stranger:016x}"), Generation { epoch: 0, number: 0 }).await;
    }
    says(Some("old-token-of-the-fleet"), &one, first).await;
    says(Some("new-token-of-the-fleet"), &other, first).await;
    until("both are known, and nobody else", async || readers().await == known(first, first)).await;

    apply(&hub, &locked("m", "eea")).await;
    let second = hub.until_routes("it is announced", |table| !table.widening.is_empty()).await;
    assert_eq!(policy(&second, "m"), ("eu".to_owned(), Some("eea".to_owned())));
    // The one has it; for the other a stranger says so, before it does.
    says(None, &other, second.generation).await;
    says(Some("neither-of-the-two-"), &other, second.generation).await;
    says(Some("old-token-of-the-fleet"), &one, second.generation).await;
    until("the one has it", async || readers().await == known(second.generation, first)).await;
    apply(&hub, &(locked("m", "eea") + &deployment("another", ""))).await;
    let third = hub.until_routes("the next table is there", |table| table.deployments.len() == 2).await;
    assert_eq!(policy(&third, "m"), ("eu".to_owned(), Some("eea".to_owned())), "no stranger has hastened it");

    says(Some("new-token-of-the-fleet"), &other, second.generation).await;
    let wider = hub.until_routes("it is wider", |table| table.widening.is_empty()).await;
    assert_eq!(policy(&wider, "m"), ("eea".to_owned(), None), "and no stranger holds it up");

    // Who goes and says so is waited for no longer; a stranger does not send it away.
    apply(&hub, &(deployment("m", "") + &deployment("another", ""))).await;
    let fourth = hub.until_routes("it is announced", |table| !table.widening.is_empty()).await;
    let goes = async |shown: &str, reader: &str| {
        let word = hub.client.delete(format!("{}/v1/readers/{reader}", hub.url)).bearer_auth(shown);
        let answer = word.send().await.unwrap();
        (answer.status().as_u16(), answer.headers().get("x-meridian-error").is_some())
    };
    says(Some("old-token-of-the-fleet"), &one, fourth.generation).await;
    assert_eq!(goes("neither-of-the-two-", &other).await, (401, true));
    assert_eq!(goes("old-token-of-the-fleet", "gateway/nowhere").await, (400, true));
    assert_eq!(policy(&hub.routes().await, "m"), ("eea".to_owned(), Some("anywhere".to_owned())));
    assert_eq!(goes("new-token-of-the-fleet", &other).await, (202, false));
    let wider = hub.until_routes("nobody waits for who has gone", |table| table.widening.is_empty()).await;
    assert_eq!(policy(&wider, "m"), ("anywhere".to_owned(), None));
    hub.stop().await;
}

#[tokio::test]
async fn a_record_that_cannot_be_read_changes_nothing_until_somebody_mends_it() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    apply(&hub, &locked("m", "eu")).await;
    let good = hub.until_routes("it is there", |table| table.deployments.contains_key("m")).await;
    hub.stop().await;
    let huge = format!(r#"{{"version":1,"applied":true,"deployments":["{}"]}}"#, "x".repeat(900_000));
    let blank = r#"{"version":1,"applied":true,"deployments":[{"name":"m","task":"embed","model":"pypi://m","engine":{"kind":"cpu","precision":"f32"},"residency":"","regions":[]}]}"#;
    let lost = blank.replace(r#""residency":"","#, "");
    for poison in ["", "[]", blank, &lost, &huge, r#"{"version":1,"applied":true,"deployments":7}"#] {
        let store = Embedded::open(&dir.path().join("hub/hub.redb"), Instant::now()).await.unwrap();
        store.put("desired/deployments", poison.into(), None).await.unwrap();
        store.close().await;
        let hub = Hub::start(config(dir.path())).await;
        assert_eq!(hub.routes().await.deployments, good.deployments, "the last good one stays");
        let (status, _, body) = hub.get("/v1/deployments").await;
        assert!(status == 503 && body.to_string().contains("the last good one stays"), "{body}");
        let mended = apply(&hub, &locked("m", "eu")).await;
        assert_eq!((&mended["applied"], &mended["changes"]), (&json!(true), &json!([])), "{mended}");
        assert!(mended["notes"][0].as_str().unwrap().contains("desired/deployments"), "{mended}");
        assert_eq!(wanted(&hub).await.1, ["m"]);
        hub.stop().await;
    }
}
