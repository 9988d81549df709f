//! The console of a hub: who is admitted, what is rejected, and what a page receives.

use super::access::{Fleet, Subject, name, serial};
use super::world::{self, Hub};
use axum::extract::{ConnectInfo, Request};
use axum::{Json, Router};
use regions::spiffe::Role;
use reqwest::{Client, Method, Response, StatusCode};
use scheduler::config::{ConsoleConfig, HubConfig};
use scheduler_api::paths;
use scheduler_api::traffic::ConsoleLoginV1;
use scheduler_client::hub::HubRequest;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use supervision::Mutex;
use tokio::net::TcpListener;

const TIMEOUT: Duration = Duration::from_secs(10);
const EUROPE: &str = "gcp/europe-west4";
const AMERICA: &str = "aws/us-east-1";
/// Limit of the gateways of one region.
const REGION_GATEWAYS_MAX: u64 = 64;
/// Limit of the open pages of one visitor.
const VISITOR_PAGES_MAX: usize = 16;

/// Listener of the console on any port.
pub(super) fn any_port() -> Option<ConsoleConfig> {
    Some(ConsoleConfig { listen: ([127, 0, 0, 1], 0).into(), url: None, drills: None })
}

/// Returns the base URL and the secret of a link.
fn parts(login: &ConsoleLoginV1) -> (String, String) {
    let (url, secret) = login.url.split_once("/#login=").expect("a link");
    (url.to_owned(), secret.to_owned())
}

/// Hub without an identity, and the base URL of its console.
async fn local(dir: &tempfile::TempDir) -> (Hub, String) {
    let hub = Hub::start(HubConfig { console: any_port(), ..world::config(dir.path()) }).await;
    let (status, _, body) = hub.post(paths::CONSOLE_LOGINS, "").await;
    assert_eq!(status, 200, "{body}");
    let (url, _) = parts(&serde_json::from_value(body).unwrap());
    (hub, url)
}

async fn change(client: &Client, url: &str, path: &str, cookie: &str) -> Response {
    let request = client.put(format!("{url}{path}")).header("origin", url).header("x-meridian-console", "1");
    request.header("cookie", cookie).send().await.unwrap()
}

fn report(boot_id: u64, explained: Value) -> String {
    json!({
        "version": 1, "gateway": AMERICA, "boot_id": boot_id, "interval_ms": 1000, "in_flight": 1,
        "regions": [{"region": EUROPE, "health": "healthy", "rtt_us": 92_000, "in_flight": 1}],
        "served": [{"deployment": "minilm", "region": EUROPE, "requests": 30, "failed": 0, "tokens": 90,
                    "latencies": [[34, 30]]}],
        "failures": [], "tenants": [], "moves": [], "explained": explained,
    })
    .to_string()
}

#[tokio::test]
async fn a_page_shows_the_traffic_that_gateways_report() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, url) = local(&dir).await;
    hub.wait_for_routes("a table", |_| true).await;
    let (status, _, body) = hub.post(paths::TRAFFIC, report(1, json!([]))).await;
    assert_eq!((status, &body["next_ms"]), (200, &json!(1000)), "{body}");
    let history = hub.client.get(format!("{url}/api/history")).send().await.unwrap();
    let history: Value = history.json().await.unwrap();
    assert_eq!(history["colours"][EUROPE], "c-b97500", "{history}");
    assert!(history["at_ms"].is_array(), "{history}");
    let mut stream = hub.client.get(format!("{url}/api/events")).send().await.unwrap();
    assert_eq!(stream.headers()["content-type"], "text/event-stream");
    let mut received = String::new();
    while !received.contains("data: {") || !received.ends_with("\n\n") {
        let chunk = tokio::time::timeout(TIMEOUT, stream.chunk()).await.unwrap().unwrap().expect("an event");
        received += std::str::from_utf8(&chunk).unwrap();
    }
    assert!(received.starts_with("retry: "), "{received}");
    let data = received.split("data: ").nth(1).unwrap().split("\n\n").next().unwrap();
    let snapshot: Value = serde_json::from_str(data).unwrap();
    assert_eq!(snapshot["arcs"][0]["traffic"]["rate"], 30.0, "{snapshot}");
    assert_eq!(snapshot["total"]["rate"], 30.0);
    drop(stream);
    hub.stop().await;
}

#[tokio::test]
async fn the_gateway_that_served_a_request_explains_it() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, url) = local(&dir).await;
    hub.post(paths::TRAFFIC, report(1, json!([]))).await;
    hub.post(paths::TRAFFIC, report(2, json!([]))).await;
    let lookup = tokio::spawn(hub.client.get(format!("{url}/api/requests/req-7")).send());
    while !lookup.is_finished() {
        for boot_id in [1, 2] {
            let (_, _, body) = hub.post(paths::TRAFFIC, report(boot_id, json!([]))).await;
            if body["explain"] == json!(["req-7"]) {
                let known = (boot_id == 2).then(|| json!({"status": 200}));
                let found = json!([{"id": "req-7", "explanation": known}]);
                hub.post(paths::TRAFFIC, report(boot_id, found)).await;
            }
        }
    }
    let found: Value = lookup.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(found, json!({"gateway": AMERICA, "explanation": {"status": 200}}));
    hub.stop().await;
}

#[tokio::test]
async fn a_gateway_that_cannot_read_its_disk_is_not_reported_as_an_unknown_request() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, url) = local(&dir).await;
    for boot_id in [1, 2] {
        hub.post(paths::TRAFFIC, report(boot_id, json!([]))).await;
    }
    let lookup = tokio::spawn(hub.client.get(format!("{url}/api/requests/req-7")).send());
    while !lookup.is_finished() {
        for boot_id in [1, 2] {
            let (_, _, body) = hub.post(paths::TRAFFIC, report(boot_id, json!([]))).await;
            if body["explain"] == json!(["req-7"]) {
                let problem = (boot_id == 1).then_some("the disk failed");
                let found = json!([{"id": "req-7", "problem": problem}]);
                hub.post(paths::TRAFFIC, report(boot_id, found)).await;
            }
        }
    }
    let response = lookup.await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["error"]["code"], "explanations_unavailable");
    assert!(body["error"]["message"].as_str().unwrap().contains("the disk failed"), "{body}");
    hub.stop().await;
}

#[tokio::test]
async fn a_search_joins_what_all_gateways_find() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, url) = local(&dir).await;
    for boot_id in [1, 2] {
        hub.post(paths::TRAFFIC, report(boot_id, json!([]))).await;
    }
    let query = format!("{url}/api/requests?status=5xx&since_ms=1000&tenant=docs");
    let search = tokio::spawn(hub.client.get(query).send());
    while !search.is_finished() {
        for boot_id in [1, 2] {
            let (_, _, body) = hub.post(paths::TRAFFIC, report(boot_id, json!([]))).await;
            if body["search"].is_null() {
                continue;
            }
            let filter = json!({"tenant": "docs", "status": "5xx", "since_ms": 1000});
            assert_eq!(body["search"][0]["filter"], filter);
            let row = json!({"id": format!("req-{boot_id}"), "at_ms": 1000 + boot_id, "kept": "failed", "tenant": "docs", "deployment": null,
                             "region": null, "status": 503, "outcome": "overloaded", "total_ms": 1.5, "attempts": [EUROPE]});
            let mut wire: Value = serde_json::from_str(&report(boot_id, json!([]))).unwrap();
            wire["searched"] = json!([{"search": body["search"][0]["search"], "requests": [row], "has_more": false, "is_enabled": true}]);
            if boot_id == 2 {
                // Of a newer version, which could not search everything.
                wire["searched"][0]["problem"] = "the disk failed".into();
                wire["searched"][0]["requests"][0]["kept"] = "throttled".into();
            }
            let (status, _, body) = hub.post(paths::TRAFFIC, wire.to_string()).await;
            assert_eq!(status, 200, "{body}");
        }
    }
    let found: Value = search.await.unwrap().unwrap().json().await.unwrap();
    let ids: Vec<_> = found["requests"].as_array().unwrap().iter().map(|row| &row["id"]).collect();
    assert_eq!(ids, ["req-2", "req-1"], "{found}");
    assert_eq!((&found["requests"][0]["gateway"], &found["unresponsive"]), (&json!(AMERICA), &json!([])));
    assert_eq!(found["problems"], json!([{"gateway": AMERICA, "problem": "the disk failed"}]));
    for (field, value, valid) in [
        ("status", "9xx", "5xx"),
        ("kept", "lost", "failed_over"),
        ("outcome", "bogus", "client_disconnected"),
        ("limit", "0", "from 1 to 1000"),
        ("limit", "many", "from 1 to 1000"),
        ("since_ms", "yesterday", "from 0 to 18446744073709551615"),
        ("until_ms", "-1", "from 0 to 18446744073709551615"),
        ("unknown", "1", "since_ms"),
    ] {
        let rejected = hub.client.get(format!("{url}/api/requests?{field}={value}")).send().await.unwrap();
        assert_eq!(rejected.status(), StatusCode::BAD_REQUEST, "{field}");
        let body: Value = rejected.json().await.unwrap();
        let message = body["error"]["message"].as_str().unwrap();
        assert!(body["error"]["param"] == field && message.contains(valid), "{body}");
    }
    hub.stop().await;
}

#[tokio::test]
async fn a_hub_outside_a_local_fleet_says_why_no_drill_can_be_started() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, url) = local(&dir).await;
    let found: Value =
        hub.client.get(format!("{url}/api/drills")).send().await.unwrap().json().await.unwrap();
    assert_eq!(found["is_available"], false);
    assert!(found["reason"].as_str().is_some_and(|reason| reason.contains("meridian up")), "{found}");
    let start = hub.client.post(format!("{url}/api/drills/surge")).header("origin", &url);
    let refused = start.header("x-meridian-console", "1").send().await.unwrap();
    assert_eq!(refused.status(), StatusCode::NOT_FOUND);
    hub.stop().await;
}

/// Control API of a local fleet in which a drill runs. Returns its URL, and the ports from which requests came.
async fn busy_fleet() -> (String, Arc<Mutex<BTreeSet<u16>>>) {
    let ports: Arc<Mutex<BTreeSet<u16>>> = Arc::default();
    let seen = ports.clone();
    let respond = move |ConnectInfo(peer): ConnectInfo<SocketAddr>, request: Request| async move {
        seen.lock().insert(peer.port());
        let body = |text: &str| Json(json!({"error": text}));
        match (request.uri().path(), request.uri().query()) {
            ("/drills", None) => (StatusCode::OK, Json(json!({"drills": [], "run": null}))),
            ("/drills/start", Some("name=surge")) => (StatusCode::CONFLICT, body("a drill is running")),
            ("/drills/start", Some("name=broken")) => {
                (StatusCode::INTERNAL_SERVER_ERROR, body("out of order"))
            }
            ("/drills/stop", None) => (StatusCode::CONFLICT, body("no drill is running")),
            _ => (StatusCode::NOT_FOUND, body("no such drill")),
        }
    };
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    let service = Router::new().fallback(respond).into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(axum::serve(socket, service).into_future());
    (url, ports)
}

#[tokio::test]
async fn the_local_fleet_decides_about_drills_and_its_absence_is_not_an_error_of_the_hub() {
    let dir = tempfile::tempdir().unwrap();
    let (fleet, ports) = busy_fleet().await;
    let in_fleet = async |folder: &str, fleet: &str| {
        let drills = Some(fleet.parse().unwrap());
        let console = any_port().map(|console| ConsoleConfig { drills, ..console });
        let hub = Hub::start(HubConfig { console, ..world::config(&dir.path().join(folder)) }).await;
        let (_, _, body) = hub.post(paths::CONSOLE_LOGINS, "").await;
        let (url, _) = parts(&serde_json::from_value(body).unwrap());
        (hub, url)
    };
    let call = async |hub: &Hub, url: &str, method: Method, path: &str| {
        let request = hub.client.request(method, format!("{url}{path}"));
        let response = request.header("origin", url).header("x-meridian-console", "1").send().await.unwrap();
        let status = response.status().as_u16();
        (status, response.json::<Value>().await.unwrap())
    };
    let (hub, url) = in_fleet("busy", &fleet).await;
    for (method, path, expected, code, reason) in [
        (Method::POST, "/api/drills/surge", 409, "conflict", "a drill is running"),
        (Method::DELETE, "/api/drills", 409, "conflict", "no drill is running"),
        (Method::POST, "/api/drills/unknown", 404, "not_found", "no such drill"),
        (Method::POST, "/api/drills/broken", 503, "fleet_unavailable", "out of order"),
    ] {
        let (status, body) = call(&hub, &url, method, path).await;
        assert_eq!((status, &body["error"]["code"]), (expected, &json!(code)), "{body}");
        assert!(body["error"]["message"].as_str().is_some_and(|message| message.contains(reason)), "{body}");
    }
    let (status, body) = call(&hub, &url, Method::GET, "/api/drills").await;
    assert_eq!((status, &body["is_available"]), (200, &json!(true)), "{body}");
    let connections = ports.lock().len();
    assert!(connections < 3, "five requests used {connections} connections");
    hub.stop().await;

    let (hub, url) = in_fleet("alone", &format!("http://{}", world::free_address())).await;
    for (method, path) in [(Method::GET, "/api/drills"), (Method::POST, "/api/drills/surge")] {
        let (status, body) = call(&hub, &url, method, path).await;
        assert_eq!((status, &body["error"]["code"]), (503, &json!("fleet_unavailable")), "{body}");
        let message = body["error"]["message"].as_str().unwrap_or_default();
        assert!(message.contains("refused") && message.contains("meridian up"), "{message}");
    }
    hub.stop().await;
}

#[tokio::test]
async fn requests_of_other_sites_are_rejected_and_every_response_has_the_policy() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, url) = local(&dir).await;
    let get = |path: &str| hub.client.get(format!("{url}{path}"));
    let page = get("/").send().await.unwrap();
    let policy = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.starts_with("default-src 'none'; script-src 'self'"), "{policy}");
    assert_eq!(page.headers()["x-content-type-options"], "nosniff");
    assert_eq!(get("/nothing").send().await.unwrap().status(), StatusCode::NOT_FOUND);
    // A name of another site that resolves to this address.
    let rebound = get("/api/history").header("host", "evil.example").send().await.unwrap();
    assert_eq!(rebound.status(), StatusCode::MISDIRECTED_REQUEST);
    assert!(rebound.headers().contains_key("content-security-policy"));
    for (site, expected) in [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)] {
        let found = get("/api/history").header("sec-fetch-site", site).send().await.unwrap();
        assert_eq!(found.status().as_u16(), expected, "{site}");
    }
    let linked = get("/").header("sec-fetch-site", "cross-site").send().await.unwrap();
    assert_eq!(linked.status(), StatusCode::OK, "a link to the page has no data");
    let drain = format!("/api/drains/{EUROPE}");
    let put = || hub.client.put(format!("{url}{drain}"));
    assert_eq!(put().send().await.unwrap().status(), StatusCode::FORBIDDEN);
    assert_eq!(put().header("origin", &url).send().await.unwrap().status(), StatusCode::FORBIDDEN);
    let foreign = put().header("origin", "http://evil.example").header("x-meridian-console", "1");
    assert_eq!(foreign.send().await.unwrap().status(), StatusCode::FORBIDDEN);
    assert_eq!(change(&hub.client, &url, &drain, "").await.status(), StatusCode::OK);
    hub.stop().await;
}

#[tokio::test]
async fn limit_of_pages_of_a_visitor_is_enforced() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, url) = local(&dir).await;
    let open = async || hub.client.get(format!("{url}/api/events")).send().await.unwrap();
    let mut pages = Vec::new();
    for _ in 0..VISITOR_PAGES_MAX {
        pages.push(open().await);
    }
    assert!(pages.iter().all(|page| page.status() == StatusCode::OK));
    assert_eq!(open().await.status(), StatusCode::TOO_MANY_REQUESTS);
    drop(pages);
    world::wait_until("a closed page frees a slot", async || open().await.status() == StatusCode::OK).await;
    hub.stop().await;
}

#[tokio::test]
async fn a_link_signs_in_once_with_the_role_of_its_owner() {
    let fleet = Fleet::start_with(tempfile::tempdir().unwrap(), None).await;
    let client = Client::builder().no_proxy().build().unwrap();
    let link = async |role| {
        let request = HubRequest::post(paths::CONSOLE_LOGINS, &json!({}), TIMEOUT);
        fleet.client_of(role).send::<ConsoleLoginV1>(&request).await.map(|login| parts(&login))
    };
    assert!(link(Role::Gateway).await.is_err(), "a process does not sign in");
    let drain = format!("/api/drains/{EUROPE}");
    for (role, may_drain) in [(Role::Viewer, false), (Role::Operator, true)] {
        let (url, secret) = link(role).await.unwrap();
        let get = async |path: &str, cookie: &str| {
            client.get(format!("{url}{path}")).header("cookie", cookie).send().await.unwrap()
        };
        assert_eq!(get("/", "").await.status(), StatusCode::OK, "the page has no data");
        for path in ["/api/session", "/api/history", "/api/events", "/api/requests/a"] {
            assert_eq!(get(path, "").await.status(), StatusCode::UNAUTHORIZED, "{path}");
        }
        let sign_in = async || {
            let request = client.post(format!("{url}/api/login")).header("origin", &url);
            let request = request.header("x-meridian-console", "1");
            request.body(json!({"login": secret}).to_string()).send().await.unwrap()
        };
        let signed_in = sign_in().await;
        let cookie = signed_in.headers()["set-cookie"].to_str().unwrap().to_owned();
        assert!(cookie.contains("; HttpOnly; SameSite=Strict"), "{cookie}");
        let cookie = cookie.split(';').next().unwrap();
        assert_eq!(signed_in.json::<Value>().await.unwrap()["role"], role.as_str());
        assert_eq!(sign_in().await.status(), StatusCode::UNAUTHORIZED, "the link was used");
        assert_eq!(get("/api/session", cookie).await.status(), StatusCode::OK);
        let expected = if may_drain { StatusCode::OK } else { StatusCode::FORBIDDEN };
        assert_eq!(change(&client, &url, &drain, cookie).await.status(), expected);
        let logout = client.post(format!("{url}/api/logout")).header("origin", &url);
        let logout = logout.header("x-meridian-console", "1").header("cookie", cookie);
        assert_eq!(logout.send().await.unwrap().status(), StatusCode::NO_CONTENT);
        assert_eq!(get("/api/session", cookie).await.status(), StatusCode::UNAUTHORIZED);
    }
}

/// Exchanges a link for the cookie of a session.
async fn sign_in(client: &Client, (url, secret): &(String, String)) -> String {
    let request =
        client.post(format!("{url}/api/login")).header("origin", url).header("x-meridian-console", "1");
    let response = request.body(json!({"login": secret}).to_string()).send().await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let cookie = response.headers()["set-cookie"].to_str().unwrap();
    cookie.split(';').next().unwrap().to_owned()
}

#[tokio::test]
async fn a_session_and_its_stream_end_with_sign_out_revocation_and_expiry() {
    let fleet = Fleet::start_with(tempfile::tempdir().unwrap(), None).await;
    let client = Client::builder().no_proxy().build().unwrap();
    let uri = name(Role::Viewer, EUROPE);
    for (end, holds) in [("sign-out", 3600), ("revocation", 3600), ("expiry", 5)] {
        let subject = Subject { holds: Duration::from_secs(holds), ..Subject::named(&uri) };
        let viewer = fleet.peer(end, &fleet.authority, &subject);
        let request = HubRequest::post(paths::CONSOLE_LOGINS, &json!({}), TIMEOUT);
        let link = async || parts(&fleet.client(&viewer).send::<ConsoleLoginV1>(&request).await.unwrap());
        let (first, unused) = (link().await, link().await);
        let (url, cookie) = (&first.0, sign_in(&client, &first).await);
        let get = async |path: &str| {
            client.get(format!("{url}{path}")).header("cookie", &cookie).send().await.unwrap()
        };
        let mut stream = get("/api/events").await;
        assert_eq!(stream.status(), StatusCode::OK, "{end}");
        match end {
            "sign-out" => {
                let request = client.post(format!("{url}/api/logout")).header("origin", url);
                let request = request.header("x-meridian-console", "1").header("cookie", &cookie);
                assert_eq!(request.send().await.unwrap().status(), StatusCode::NO_CONTENT);
            }
            "revocation" => fleet.revoke(1, serial(&viewer)),
            _ => {}
        }
        let ended = async { while stream.chunk().await.unwrap().is_some() {} };
        tokio::time::timeout(TIMEOUT, ended)
            .await
            .unwrap_or_else(|_| panic!("the stream goes on after {end}"));
        assert_eq!(get("/api/session").await.status(), StatusCode::UNAUTHORIZED, "{end}");
        if end != "sign-out" {
            let login = client.post(format!("{url}/api/login")).header("origin", url);
            let login = login.header("x-meridian-console", "1").body(json!({"login": unused.1}).to_string());
            assert_eq!(login.send().await.unwrap().status(), StatusCode::UNAUTHORIZED, "link after {end}");
        }
    }
}

#[tokio::test]
async fn a_lookup_that_a_gateway_does_not_respond_to_is_not_reported_as_unknown() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, url) = local(&dir).await;
    hub.post(paths::TRAFFIC, report(1, json!([]))).await;
    let response = hub.client.get(format!("{url}/api/requests/req-7")).send().await.unwrap();
    assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["error"]["code"], "deadline_exceeded", "{body}");
    hub.stop().await;
}

#[tokio::test]
async fn a_certificate_for_one_region_cannot_use_up_the_gateways_of_the_console() {
    let dir = tempfile::tempdir().unwrap();
    let operations = world::free_address();
    let config = world::config(dir.path());
    let hub = Hub::start(HubConfig { console: any_port(), operations: Some(operations), ..config }).await;
    for boot_id in 0..=REGION_GATEWAYS_MAX {
        let (status, _, body) = hub.post(paths::TRAFFIC, report(boot_id, json!([]))).await;
        assert_eq!(status, 200, "{body}");
    }
    let text = hub.client.get(format!("http://{operations}/metrics")).send().await.unwrap();
    let text = text.text().await.unwrap();
    for (name, expected) in [("", REGION_GATEWAYS_MAX), ("_max", 1024), ("_evicted_total", 1)] {
        assert!(text.contains(&format!("\nmeridian_hub_console_gateways{name} {expected}\n")), "{text}");
    }
    hub.stop().await;
}

#[tokio::test]
async fn a_login_has_at_most_the_bytes_that_its_error_names() {
    let dir = tempfile::tempdir().unwrap();
    let (hub, url) = local(&dir).await;
    let login = async |bytes: usize| {
        let request = hub
            .client
            .post(format!("{url}/api/login"))
            .header("origin", &url)
            .header("x-meridian-console", "1");
        let body = json!({"login": "x".repeat(bytes - r#"{"login":""}"#.len())}).to_string();
        assert_eq!(body.len(), bytes);
        let response = request.body(body).send().await.unwrap();
        (response.status(), response.json::<Value>().await.unwrap())
    };
    assert_eq!(login(4096).await.0, StatusCode::UNAUTHORIZED);
    let (status, body) = login(4097).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(body["error"]["message"], "The body has more than 4096 bytes.");
    hub.stop().await;
}
