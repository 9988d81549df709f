//! An operator, a hub, and who may come in.

use super::world::{AMERICA, Hub, TOKEN, config, until};
use regions::{RouteTable, TenantId};
use scheduler_store::{Embedded, Store};
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
    let request = hub.client.post(format!("{}/v1/apply", hub.url)).bearer_auth(TOKEN);
    let answer = request.body(message(parts, base)).send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

fn policy(table: &RouteTable) -> Option<(String, Option<String>)> {
    let (tenants, acme) = (table.tenants.as_ref()?, "acme".parse::<TenantId>().unwrap());
    let to = tenants.widening.get(&acme).map(|widening| widening.to.to_string());
    Some((tenants.all.get(&acme)?.residency.to_string(), to))
}

#[tokio::test]
async fn tenants_are_applied_beside_deployments_published_read_back_and_outlive_the_hub() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    assert_eq!(hub.get("/v1/tenants").await.0, 404, "nobody has applied any");
    assert_eq!(hub.routes().await.tenants, None);

    let text = tenant("acme", "residency = { allow = [\"eu\"] }\ndeployments = [\"minilm\", \"later\"]");
    let (status, told) = apply(&hub, &[("tenants", &text)], None).await;
    assert_eq!((status, &told["applied"]), (200, &json!(true)), "{told}");
    assert_eq!(
        (&told["changes"][0]["kind"], &told["changes"][0]["name"]),
        (&json!("tenant"), &json!("acme"))
    );
    let notes = told["notes"].to_string();
    assert!(
        notes.contains("of every gateway") && notes.contains("use later, which is not deployed"),
        "{notes}"
    );
    let table = hub.until_routes("it is published", |table| policy(table).is_some()).await;
    assert_eq!(policy(&table), Some(("eu".to_owned(), None)));
    assert_eq!(table.deployments.len(), 2, "of deployments nothing was said");
    let (status, told) = apply(&hub, &[("tenants", &text)], None).await;
    assert_eq!((status, &told["applied"], &told["changes"]), (200, &json!(false), &json!([])));
    hub.stop().await;

    let hub = Hub::start(config(dir.path())).await;
    assert_eq!(hub.routes().await.tenants, table.tenants);
    let (status, _, read) = hub.get("/v1/tenants").await;
    assert_eq!((status, &read["tenants"][0]["residency"]), (200, &json!("eu")));

    // Both at once, or neither: what is wrong with the one is told beside what is wrong with the other.
    let wrong = [("deployments", "deployment = 7"), ("tenants", "tenant = 8")];
    let (status, body) = apply(&hub, &wrong, None).await;
    let files: Vec<_> = body["problems"].as_array().unwrap().iter().map(|problem| &problem["file"]).collect();
    assert_eq!((status, files), (422, vec![&json!("deployments.toml"), &json!("tenants.toml")]), "{body}");
    let (status, body) = apply(&hub, &[], None).await;
    assert!(status == 400 && body.to_string().contains("nothing is to be applied"), "{body}");
    let base = told["base"].as_u64().unwrap();
    let both = [("deployments", "deployment = []"), ("tenants", "tenant = []")];
    assert_eq!(apply(&hub, &both, Some(base - 1)).await.0, 409, "it is a change to what stands no longer");
    assert_eq!(apply(&hub, &both, Some(base)).await.0, 200);
    hub.until_routes("all are gone", |table| {
        table.deployments.is_empty() && table.tenants == Some(regions::Tenants::default())
    })
    .await;
    hub.stop().await;
}

#[tokio::test]
async fn a_tenant_is_wider_when_every_reader_has_heard_of_it() {
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
    has(&hub.until_routes("it is there", |table| policy(table).is_some()).await).await;
    until("the reader is known", async || {
        !hub.get("/v1/rollout").await.2["readers"].as_array().unwrap().is_empty()
    })
    .await;
    let (_, told) = apply(&hub, &[("tenants", &only("eea"))], None).await;
    assert!(told["notes"][0].as_str().unwrap().contains("tenant acme comes when"), "{told}");
    let announced = ("eu".to_owned(), Some("eea".to_owned()));
    let second = hub.until_routes("it is announced", |table| policy(table) == Some(announced.clone())).await;
    let (_, _, rollout) = hub.get("/v1/rollout").await;
    let waiting = &rollout["pending"][0];
    assert_eq!((&waiting["kind"], &waiting["outdated_readers"]), (&json!("tenant"), &json!([reader])));
    has(&second).await;
    hub.until_routes("it is wider", |table| policy(table) == Some(("eea".to_owned(), None))).await;
    apply(&hub, &[("tenants", &only("de"))], None).await;
    hub.until_routes("it is narrower, at once", |table| policy(table) == Some(("de".to_owned(), None))).await;
    hub.stop().await;
}

#[tokio::test]
async fn tenants_that_cannot_be_read_change_nothing_until_somebody_mends_them() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let text = tenant("acme", "");
    apply(&hub, &[("tenants", &text)], None).await;
    let good = hub.until_routes("it is there", |table| policy(table).is_some()).await;
    hub.stop().await;

    let store = Embedded::open(&dir.path().join("hub/hub.redb"), Instant::now()).await.unwrap();
    store.put("desired/tenants", br#"{"version":1,"tenants":[{"name":"acme"}]}"#.into(), None).await.unwrap();
    store.close().await;
    let hub = Hub::start(config(dir.path())).await;
    assert_eq!(hub.routes().await.tenants, good.tenants, "those that are known stay");
    assert_eq!(hub.get("/v1/tenants").await.0, 503);
    let (status, told) = apply(&hub, &[("tenants", &text)], None).await;
    assert!(status == 200 && told["notes"].to_string().contains("mends it"), "{told}");
    assert_eq!(hub.get("/v1/tenants").await.0, 200);
    hub.stop().await;
}
