//! Access control of the hub, over HTTP: which token each path needs, and who may use a lease.

use super::world::{
    AMERICA, EUROPE, FLEET_TOKEN, Hub, Lease, TOKEN, config, port, registration, response, until,
};
use reqwest::Method;
use serde_json::json;

/// Returns a well-formed request for every path except the probes, and whether it needs the operator token.
fn requests() -> Vec<(Method, String, String, bool)> {
    let lease = format!("/v1/leases/{:032x}", 1);
    let holder = format!("holder=spoke/{EUROPE}/{:016x}", 1);
    let keep_alive = json!({"version": 1, "deployments": []}).to_string();
    let demand = json!({"version": 1, "gateway": AMERICA, "boot_id": 1, "classes": []}).to_string();
    let apply = json!({"version": 1, "dry_run": true, "deployments": []}).to_string();
    let none = String::new;
    vec![
        (Method::POST, "/v1/spokes".to_owned(), registration(EUROPE, 7100, 1, &[]), false),
        (Method::POST, format!("{lease}/keepalive?{holder}"), keep_alive, false),
        (Method::DELETE, format!("{lease}?{holder}"), none(), false),
        (Method::GET, "/v1/routes".to_owned(), none(), false),
        (Method::DELETE, format!("/v1/readers/gateway/{AMERICA}/{:016x}", 1), none(), false),
        (Method::GET, "/v1/deployments".to_owned(), none(), false),
        (Method::GET, "/v1/tenants".to_owned(), none(), false),
        (Method::GET, "/v1/rollout".to_owned(), none(), false),
        (Method::GET, "/v1/plan".to_owned(), none(), false),
        (Method::POST, "/v1/demand".to_owned(), demand, false),
        (Method::POST, "/v1/apply".to_owned(), apply, true),
        (Method::PUT, format!("/v1/drains/{EUROPE}"), none(), true),
        (Method::DELETE, format!("/v1/drains/{EUROPE}"), none(), true),
    ]
}

#[tokio::test]
async fn every_path_except_probes_needs_a_token_and_changes_need_the_operator_token() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let before = hub.routes().await.generation;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let send = async |method: &Method, path: &str, body: &str, tokens: &[&str]| {
        let request = client.request(method.clone(), format!("{}{path}", hub.url)).body(body.to_owned());
        let with_tokens = tokens
            .iter()
            .fold(request, |request, token| request.header("authorization", format!("Bearer {token}")));
        let (status, code, _) = response(with_tokens).await;
        (status, code)
    };
    let denied = (401, "unauthenticated".to_owned());
    for (method, path, body, operator) in requests() {
        let what = format!("{method} {path}");
        for tokens in
            [&[][..], &["token-of-the-test-fleeX"], &["token-of-the-test-flee"], &[FLEET_TOKEN, "x"]]
        {
            assert_eq!(send(&method, &path, &body, tokens).await, denied, "{what} with {tokens:?}");
        }
        let (status, code) = send(&method, &path, &body, &[FLEET_TOKEN]).await;
        if operator {
            assert_eq!((status, code.as_str()), (403, "operator_only"), "{what} with the fleet token");
        } else {
            assert!(!matches!(status, 401 | 403), "{what} with the fleet token: {status} {code}");
        }
        let (status, code) = send(&method, &path, &body, &[TOKEN]).await;
        assert!(!matches!(status, 401 | 403), "{what} with the operator token: {status} {code}");
    }
    for probe in ["/livez", "/readyz", "/metrics"] {
        assert_eq!(send(&Method::GET, probe, "", &[]).await.0, 200, "{probe}");
    }
    // Only requests with a valid token have changed anything.
    let routes = hub.until_routes("Europe is there", |table| port(table, EUROPE) == Some(7100)).await;
    assert!(routes.generation > before);
    hub.stop().await;
}

#[tokio::test]
async fn a_denied_request_changes_nothing_and_names_the_required_token() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let before = hub.routes().await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("{}/v1/spokes", hub.url);
    // Larger than the body limit: it is denied before it is read.
    let response = client.post(url).body(vec![b' '; 3 << 20]).send().await.unwrap();
    assert_eq!(response.status(), 401);
    assert_eq!(response.headers()["www-authenticate"], "Bearer");
    let body: serde_json::Value = response.json().await.unwrap();
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains("fleet token") && message.contains("authorization: Bearer"), "{message}");
    assert_eq!(hub.routes().await, before);
    hub.stop().await;
}

#[tokio::test]
async fn a_hub_without_a_fleet_token_listens_on_loopback_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut open = config(dir.path());
    open.tokens.fleet.clear();
    open.listen = ([0, 0, 0, 0], 0).into();
    let error = Hub::try_start(open.clone()).await.err().expect("the hub does not start").to_string();
    assert!(error.contains("0.0.0.0") && error.contains("fleet_token_file"), "{error}");
    open.listen = ([127, 0, 0, 1], 0).into();
    let hub = Hub::start(open).await;
    assert_eq!(reqwest::get(format!("{}/v1/routes", hub.url)).await.unwrap().status(), 200);
    hub.stop().await;
}

#[tokio::test]
async fn lease_ids_are_unpredictable_and_usable_by_their_holders_only() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let europe = hub.register(EUROPE, 7100, 1, &[]).await;
    let sibling = hub.register(EUROPE, 7101, 2, &[]).await;
    let america = hub.register(AMERICA, 7200, 3, &[]).await;
    let ids = [&europe, &sibling, &america].map(|lease| u128::from_str_radix(&lease.id, 16).unwrap());
    for (one, other) in [(0, 1), (0, 2), (1, 2)] {
        assert!(ids[one].abs_diff(ids[other]) > 1 << 64, "ids are not sequential: {ids:x?}");
    }
    let assert_not_found = |(status, body): (u16, serde_json::Value)| {
        assert_eq!((status, &body["error"]["code"]), (404, &json!("lease_not_found")), "{body}");
    };
    // The numbers of the store's own leases.
    for number in 0..32 {
        let guessed = Lease { id: format!("{number:032x}"), ..europe.clone() };
        assert_not_found(hub.keep_alive(&guessed, &[]).await);
        assert_eq!(hub.deregister(&guessed).await, 404);
    }
    for other in [&sibling, &america] {
        let stolen = Lease { id: other.id.clone(), ..europe.clone() };
        assert_not_found(hub.keep_alive(&stolen, &[]).await);
        assert_eq!(hub.deregister(&stolen).await, 404, "an instance cannot end the lease of another one");
    }
    let unnamed = format!("{}/v1/leases/{}", hub.url, europe.id);
    assert_eq!(hub.client.delete(unnamed).send().await.unwrap().status(), 400, "a holder must be named");
    for lease in [&europe, &sibling, &america] {
        assert_eq!(hub.keep_alive(lease, &[]).await.0, 200);
    }
    assert_eq!(hub.deregister(&america).await, 204);
    assert_not_found(hub.keep_alive(&america, &[]).await);
    assert_eq!(hub.keep_alive(&europe, &[]).await.0, 200);
    hub.stop().await;
}

#[tokio::test]
async fn registering_again_replaces_the_lease() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let old = hub.register(EUROPE, 7100, 1, &[]).await;
    let new = hub.register(EUROPE, 7101, 1, &[]).await;
    assert_eq!((old.holder.as_str(), old.id == new.id), (new.holder.as_str(), false));
    assert_eq!(hub.deregister(&old).await, 404);
    assert_eq!(hub.keep_alive(&old, &[]).await.0, 404);
    until("the new lease is valid", async || hub.keep_alive(&new, &[]).await.0 == 200).await;
    hub.stop().await;
}
