//! Tests of applying tenants.

use super::world::{AMERICA, Hub, config, wait_until};
use regions::{RouteTable, TenantId};
use scheduler_api::paths;
use scheduler_store::{EmbeddedStore, Store};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

fn tenant(name: &str, more: &str) -> String {
    format!("[[tenant]]\nname = \"{name}\"\nissuer = \"https://login.example/\"\n{more}\n")
}

fn message(parts: &[(&str, &str)], base: Option<u64>) -> String {
    let mut message = json!({"version": 1, "dry_run": false, "base": base});
    for (kind, text) in parts {
        message[*kind] = json!([{"name": format!("{kind}.toml"), "text": text}]);
    }
    message.to_string()
}

async fn apply(hub: &Hub, parts: &[(&str, &str)], base: Option<u64>) -> (u16, Value) {
    let request = hub.client.post(format!("{}{}", hub.url, paths::APPLY));
    let response = request.body(message(parts, base)).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

fn policy(table: &RouteTable) -> Option<(String, Option<String>)> {
    let (tenants, acme) = (table.tenants.as_ref()?, "acme".parse::<TenantId>().unwrap());
    let to = tenants.widening.get(&acme).map(|widening| widening.to.to_string());
    Some((tenants.all.get(&acme)?.residency.to_string(), to))
}

#[tokio::test]
async fn applied_tenants_are_published_and_survive_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    assert_eq!(hub.get(paths::TENANTS).await.0, 404, "no tenants are applied");
    assert_eq!(hub.routes().await.tenants, None);

    let text = tenant("acme", "residency = { allow = [\"eu\"] }\ndeployments = [\"minilm\", \"later\"]");
    let (status, listed) = apply(&hub, &[("tenants", &text)], None).await;
    assert_eq!((status, &listed["applied"]), (200, &json!(true)), "{listed}");
    assert_eq!(
        (&listed["changes"][0]["kind"], &listed["changes"][0]["name"]),
        (&json!("tenant"), &json!("acme"))
    );
    let notes = listed["notes"].to_string();
    assert!(
        notes.contains("every gateway uses these") && notes.contains("use later, which is not deployed"),
        "{notes}"
    );
    let table = hub.wait_for_routes("it is published", |table| policy(table).is_some()).await;
    assert_eq!(policy(&table), Some(("eu".to_owned(), None)));
    assert_eq!(table.deployments.len(), 2, "deployments are unchanged");
    let (status, listed) = apply(&hub, &[("tenants", &text)], None).await;
    assert_eq!((status, &listed["applied"], &listed["changes"]), (200, &json!(false), &json!([])));
    hub.stop().await;

    let hub = Hub::start(config(dir.path())).await;
    assert_eq!(hub.routes().await.tenants, table.tenants);
    let (status, _, read) = hub.get(paths::TENANTS).await;
    assert_eq!((status, &read["tenants"][0]["residency"]), (200, &json!("eu")));

    // Both in one transaction; problems of both are reported together.
    let wrong = [("deployments", "deployment = 7"), ("tenants", "tenant = 8")];
    let (status, body) = apply(&hub, &wrong, None).await;
    let files: Vec<_> = body["problems"].as_array().unwrap().iter().map(|problem| &problem["file"]).collect();
    assert_eq!((status, files), (422, vec![&json!("deployments.toml"), &json!("tenants.toml")]), "{body}");
    let (status, body) = apply(&hub, &[], None).await;
    assert!(status == 400 && body.to_string().contains("nothing to apply"), "{body}");
    let base = listed["base"].as_u64().unwrap();
    let both = [("deployments", "deployment = []"), ("tenants", "tenant = []")];
    assert_eq!(apply(&hub, &both, Some(base - 1)).await.0, 409, "the base revision is outdated");
    assert_eq!(apply(&hub, &both, Some(base)).await.0, 200);
    hub.wait_for_routes("all are gone", |table| {
        table.deployments.is_empty() && table.tenants == Some(regions::Tenants::default())
    })
    .await;
    hub.stop().await;
}

#[tokio::test]
async fn a_wider_tenant_waits_until_every_reader_has_the_table() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.settle = Duration::from_millis(1);
    let hub = Hub::start(config).await;
    let reader = format!("gateway/{AMERICA}/00000000000000ff");
    let has = async |table: &RouteTable| {
        let generation = table.generation;
        hub.get(&format!("/v1/routes?after={generation}&wait_ms=1&reader={reader}")).await;
    };
    let only = |area: &str| tenant("acme", &format!("residency = {{ allow = [\"{area}\"] }}"));
    apply(&hub, &[("tenants", &only("eu"))], None).await;
    has(&hub.wait_for_routes("it is there", |table| policy(table).is_some()).await).await;
    wait_until("the reader is known", async || {
        !hub.get(paths::ROLLOUT).await.2["readers"].as_array().unwrap().is_empty()
    })
    .await;
    let (_, listed) = apply(&hub, &[("tenants", &only("eea"))], None).await;
    assert!(listed["notes"][0].as_str().unwrap().contains("tenant acme takes effect when"), "{listed}");
    let announced = ("eu".to_owned(), Some("eea".to_owned()));
    let second =
        hub.wait_for_routes("it is announced", |table| policy(table) == Some(announced.clone())).await;
    let (_, _, rollout) = hub.get(paths::ROLLOUT).await;
    let waiting = &rollout["pending"][0];
    assert_eq!((&waiting["kind"], &waiting["outdated_readers"]), (&json!("tenant"), &json!([reader])));
    has(&second).await;
    hub.wait_for_routes("it is wider", |table| policy(table) == Some(("eea".to_owned(), None))).await;
    apply(&hub, &[("tenants", &only("de"))], None).await;
    hub.wait_for_routes("it is narrower, at once", |table| policy(table) == Some(("de".to_owned(), None)))
        .await;
    hub.stop().await;
}

#[tokio::test]
async fn unreadable_tenants_change_nothing_until_they_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let text = tenant("acme", "");
    apply(&hub, &[("tenants", &text)], None).await;
    let good = hub.wait_for_routes("it is there", |table| policy(table).is_some()).await;
    hub.stop().await;

    let store = EmbeddedStore::open(&dir.path().join("hub/hub.redb"), Instant::now()).await.unwrap();
    store.put("desired/tenants", br#"{"version":1,"tenants":[{"name":"acme"}]}"#.into(), None).await.unwrap();
    store.close().await;
    let hub = Hub::start(config(dir.path())).await;
    assert_eq!(hub.routes().await.tenants, good.tenants, "the last valid tenants stay");
    assert_eq!(hub.get(paths::TENANTS).await.0, 503);
    let (status, listed) = apply(&hub, &[("tenants", &text)], None).await;
    assert!(status == 200 && listed["notes"].to_string().contains("replaces the record"), "{listed}");
    assert_eq!(hub.get(paths::TENANTS).await.0, 200);
    hub.stop().await;
}
