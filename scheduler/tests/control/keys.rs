//! Tests of created API keys over HTTP.

use super::world::{Hub, config, response};
use regions::RouteTable;
use scheduler_api::paths;
use serde_json::{Value, json};

fn digest(digit: char) -> String {
    digit.to_string().repeat(64)
}

async fn operator(hub: &Hub, method: reqwest::Method, path: &str, body: Value) -> (u16, Value) {
    let request = hub.client.request(method, format!("{}{path}", hub.url));
    let (status, _, body) = response(request.body(body.to_string())).await;
    (status, body)
}

async fn create(hub: &Hub, key_sha256: &str, more: Value) -> (u16, Value) {
    let mut message = json!({"version": 1, "tenant": "acme", "key_sha256": key_sha256});
    message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    operator(hub, reqwest::Method::POST, paths::KEYS, message).await
}

async fn revoke(hub: &Hub, id: &str) -> u16 {
    operator(hub, reqwest::Method::DELETE, &paths::key(id), Value::Null).await.0
}

async fn apply(hub: &Hub, text: &str) -> Value {
    let message =
        json!({"version": 1, "dry_run": false, "base": null, "tenants": [{"name": "t", "text": text}]});
    let (status, body) = operator(hub, reqwest::Method::POST, paths::APPLY, message).await;
    assert_eq!(status, 200, "{body}");
    body
}

/// Returns the created keys of a table: the first digit of each digest, and whether it expires.
fn keys(table: &RouteTable) -> Vec<(String, bool)> {
    let keys = table.tenants.iter().flat_map(|tenants| &tenants.keys);
    keys.map(|(digest, key)| (digest.to_string()[..1].to_owned(), key.expires_at.is_some())).collect()
}

fn named(digits: &[(&str, bool)]) -> Vec<(String, bool)> {
    digits.iter().map(|(digit, expires)| ((*digit).to_owned(), *expires)).collect()
}

#[tokio::test]
async fn created_keys_are_published_until_they_are_revoked_and_survive_apply_and_restart() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let (status, body) = create(&hub, &digest('a'), json!({})).await;
    assert!(status == 400 && body.to_string().contains("is not an applied tenant"), "{body}");
    let notes = apply(&hub, "[[tenant]]\nname = \"acme\"\n").await["notes"].to_string();
    assert!(notes.contains("meridian key create --tenant acme"), "{notes}");

    let more = json!({"name": "ci", "owner": "search team", "expires_in_s": 3600});
    let (status, created) = create(&hub, &digest('a'), more).await;
    assert_eq!(
        (status, &created["id"], &created["owner"]),
        (200, &json!("a".repeat(16)), &json!("search team"))
    );
    let validity = created["expires_at"].as_u64().unwrap() - created["created_at"].as_u64().unwrap();
    assert_eq!(validity, 3600);
    assert_eq!(create(&hub, &digest('b'), json!({})).await.0, 200);
    let both = named(&[("a", true), ("b", false)]);
    hub.wait_for_routes("both are published", |table| keys(table) == both).await;

    // A tenant that is removed takes its keys with it, and has them again when it is back.
    apply(&hub, "tenant = []").await;
    hub.wait_for_routes("none is published", |table| keys(table).is_empty()).await;
    apply(&hub, "[[tenant]]\nname = \"acme\"\nissuer = \"i\"\n").await;
    hub.wait_for_routes("both are back", |table| keys(table) == both).await;
    hub.stop().await;

    let hub = Hub::start(config(dir.path())).await;
    assert_eq!(keys(&hub.routes().await), both);
    assert_eq!(revoke(&hub, &"a".repeat(16)).await, 204);
    hub.wait_for_routes("one is left", |table| keys(table) == named(&[("b", false)])).await;
    assert_eq!(revoke(&hub, &"a".repeat(16)).await, 404, "it is revoked already");
    let (_, listed) = operator(&hub, reqwest::Method::GET, paths::KEYS, Value::Null).await;
    assert_eq!(listed["keys"].as_array().unwrap().len(), 1, "{listed}");
    hub.stop().await;
}

#[tokio::test]
async fn invalid_keys_are_rejected_and_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    apply(&hub, &format!("[[tenant]]\nname = \"acme\"\nkey_sha256 = [\"{}\"]\n", digest('f'))).await;
    assert_eq!(create(&hub, &digest('a'), json!({"name": "ci"})).await.0, 200);
    let generation = hub.wait_for_routes("it is there", |table| keys(table).len() == 1).await.generation;
    for (digit, more, status, part) in [
        ('a', json!({}), 409, "exists already"),
        ('f', json!({}), 409, "exists already"),
        ('b', json!({"name": "ci"}), 409, "has a key `ci` already"),
        ('b', json!({"tenant": "other"}), 400, "not an applied tenant"),
        ('b', json!({"tenant": "a b"}), 400, "tenant"),
        ('b', json!({"expires_in_s": 0}), 400, "out of range"),
        ('b', json!({"expires_in_s": u64::MAX}), 400, "out of range"),
        ('b', json!({"expires_in_s": -5}), 400, "u64"),
        ('b', json!({"name": "n".repeat(129)}), 400, "128 bytes"),
        ('b', json!({"owner": "a\nb"}), 400, "control characters"),
        ('b', json!({"expires_at": 5}), 400, "unknown field"),
        ('x', json!({}), 400, "64 hexadecimal digits"),
    ] {
        let (given, body) = create(&hub, &digest(digit), more).await;
        assert!(given == status && body.to_string().contains(part), "{part}: {given} {body}");
    }
    for id in ["b".repeat(16), "unknown".to_owned(), digest('a')] {
        assert_eq!(revoke(&hub, &id).await, 404, "{id}");
    }
    let table = hub.routes().await;
    assert_eq!((table.generation, keys(&table)), (generation, named(&[("a", false)])));
    hub.stop().await;
}
