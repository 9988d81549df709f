//! Operators with tokens at a running hub, over mutual TLS and TLS without a client certificate.

use super::access::{Fleet, request};
use super::world::wait_until;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jwt::TokenRules;
use regions::spiffe::Role;
use resolver::{DnsSection, Resolver};
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use scheduler::config::{KeySource, OperatorsConfig};
use scheduler_api::paths::{self, HUB_ENDPOINTS};
use scheduler_client::hub::{ControlPlaneClient, HubFailure, HubRequest};
use scheduler_client::operator_token::OperatorToken;
use scheduler_client::unix_time;
use scheduler_core::hubs::Hubs;
use scheduler_core::operators::OperatorRules;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const ISSUER: &str = "https://login.example.com";

/// Key of the issuer.
pub(super) struct Issuer {
    pair: Ed25519KeyPair,
    kid: String,
}

impl Issuer {
    pub(super) fn new(kid: &str) -> Issuer {
        let made = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
        Issuer { pair: Ed25519KeyPair::from_pkcs8(made.as_ref()).unwrap(), kid: kid.to_owned() }
    }

    pub(super) fn write(&self, file: &Path) {
        let x = URL_SAFE_NO_PAD.encode(self.pair.public_key().as_ref());
        let set = json!({"keys": [{"kty": "OKP", "crv": "Ed25519", "kid": self.kid, "x": x}]});
        let new = file.with_extension("new");
        std::fs::write(&new, set.to_string()).unwrap();
        std::fs::rename(new, file).unwrap();
    }

    fn token(&self, algorithm: &str, roles: &[&str], more: Value) -> String {
        let now = unix_time().as_secs();
        let mut claims =
            json!({"iss": ISSUER, "aud": "meridian", "sub": "jane", "exp": now + 600, "roles": roles});
        claims.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let text = format!("{}.{}", part(&json!({"alg": algorithm, "kid": self.kid})), part(&claims));
        let signature = URL_SAFE_NO_PAD.encode(self.pair.sign(text.as_bytes()));
        format!("{text}.{signature}")
    }

    pub(super) fn valid(&self, roles: &[&str]) -> String {
        self.token("EdDSA", roles, json!({}))
    }
}

async fn start(issuer: &Issuer) -> Fleet {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys.json");
    issuer.write(&file);
    Fleet::start_with(dir, Some(operators_config(file))).await
}

/// Returns a configuration with the roles `readers` and `admins`.
pub(super) fn operators_config(file: PathBuf) -> OperatorsConfig {
    let token = TokenRules {
        issuer: ISSUER.to_owned(),
        audience: "meridian".to_owned(),
        leeway: Duration::from_secs(300),
    };
    let rules = OperatorRules {
        token,
        roles_claim: "roles".to_owned(),
        viewers: vec!["readers".to_owned()],
        operators: vec!["admins".to_owned()],
    };
    OperatorsConfig { rules, keys: KeySource::File(file) }
}

fn client(fleet: &Fleet, token: &str) -> ControlPlaneClient {
    let token = OperatorToken::new(token, &fleet.authorities()).unwrap();
    let resolver = Resolver::new(&DnsSection::default());
    ControlPlaneClient::with_token(&Hubs::one(fleet.url()), &token, resolver).unwrap()
}

/// Returns the status and the message of a rejection; 200 stands for all requests that were admitted.
async fn verdict(client: &ControlPlaneClient, request: &HubRequest) -> (u16, String) {
    match client.send::<IgnoredAny>(request).await {
        Ok(_) => (200, String::new()),
        Err(error) => match error.failure {
            HubFailure::Rejected { status, message, .. } if [401, 403].contains(&status.as_u16()) => {
                (status.as_u16(), message)
            }
            HubFailure::Rejected { .. } | HubFailure::Invalid(_) | HubFailure::NoTable => {
                (200, String::new())
            }
            failure @ (HubFailure::Unreachable(_) | HubFailure::Untrusted { .. }) => panic!("{failure}"),
        },
    }
}

#[tokio::test]
async fn a_token_opens_the_endpoints_of_its_role_and_no_others() {
    let issuer = Issuer::new("1");
    let fleet = start(&issuer).await;
    let (viewer, operator, none) = (
        client(&fleet, &issuer.valid(&["readers"])),
        client(&fleet, &issuer.valid(&["readers", "admins"])),
        client(&fleet, &issuer.valid(&["other"])),
    );
    let plan = request("GET", paths::PLAN);
    wait_until("the keys are read", async || verdict(&operator, &plan).await.0 == 200).await;
    for endpoint in HUB_ENDPOINTS {
        let request = request(endpoint.method, endpoint.path);
        for (client, role) in
            [(&viewer, Some(Role::Viewer)), (&operator, Some(Role::Operator)), (&none, None)]
        {
            let (status, message) = verdict(client, &request).await;
            let is_open = role.is_some_and(|role| endpoint.roles.contains(&role));
            let expected = if is_open { 200 } else { 403 };
            assert_eq!(status, expected, "{role:?}: {} {}: {message}", endpoint.method, endpoint.path);
        }
    }
    let (_, message) = verdict(&viewer, &request("POST", paths::APPLY)).await;
    assert!(message.contains("the role viewer") && message.contains("open to: operator"), "{message}");
    let (_, message) = verdict(&operator, &request("POST", paths::SPOKES)).await;
    assert!(message.contains("client certificate"), "{message}");
    // A token acknowledges no route table, which would let a wider residency take effect too early.
    let forged = HubRequest::new(
        reqwest::Method::GET,
        format!("{}?after=1.1&wait_ms=1&reader=gateway/aws/us-east-1/00000000000000ff", paths::ROUTES),
        Duration::from_secs(10),
    );
    let (status, message) = verdict(&operator, &forged).await;
    assert!(status == 403 && message.contains("may not acknowledge"), "{status} {message}");
    // Certificates work as before.
    assert_eq!(verdict(&fleet.client_of(Role::Operator), &plan).await.0, 200);
    assert_eq!(verdict(&fleet.client_of(Role::Spoke), &plan).await.0, 403);
    fleet.hub.stop().await;
}

#[tokio::test]
async fn an_invalid_token_is_rejected_with_a_reason_that_is_counted() {
    let (issuer, other) = (Issuer::new("1"), Issuer::new("1"));
    let fleet = start(&issuer).await;
    let operator = client(&fleet, &issuer.valid(&["admins"]));
    let plan = request("GET", paths::PLAN);
    wait_until("the keys are read", async || verdict(&operator, &plan).await.0 == 200).await;
    let now = unix_time().as_secs();
    let with = |more: Value| issuer.token("EdDSA", &["admins"], more);
    let unknown = Issuer { pair: Issuer::new("2").pair, kid: "2".to_owned() };
    let cases = [
        ("expired", with(json!({"exp": now - 301})), "has expired"),
        ("not_yet", with(json!({"nbf": now + 320})), "not valid yet"),
        ("issuer", with(json!({"iss": "https://other.example.com"})), "operators.issuer"),
        ("audience", with(json!({"aud": "other"})), "operators.audience"),
        (
            "algorithm",
            issuer.token("HS256", &["admins"], json!({})),
            "RS256, ES256 or EdDSA, never none or HS256",
        ),
        ("algorithm", issuer.token("none", &["admins"], json!({})), "never none"),
        ("signature", other.valid(&["admins"]), "signature of the token is invalid"),
        ("key", unknown.valid(&["admins"]), "no key with the 'kid'"),
        ("too_long", "a".repeat(8193), "8192 bytes"),
        ("malformed", "key".to_owned(), "not a JWT"),
    ];
    for (reason, token, part) in &cases {
        let (status, message) = verdict(&client(&fleet, token), &plan).await;
        assert_eq!(status, 401, "{reason}: {message}");
        assert!(message.contains(part), "{part} in {message}");
    }
    let response = raw(&fleet, "GET /v1/plan HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n").await;
    assert!(
        response.starts_with("HTTP/1.1 401") && response.contains("www-authenticate: Bearer\r\n"),
        "{response}"
    );
    let expired = &cases[0].1;
    let response = raw(
        &fleet,
        &format!(
            "GET /metrics HTTP/1.1\r\nhost: h\r\nauthorization: bearer {expired}\r\nconnection: close\r\n\r\n"
        ),
    )
    .await;
    assert!(
        response.contains(
            "www-authenticate: Bearer error=\"invalid_token\", error_description=\"The token has expired"
        ),
        "{response}"
    );
    let valid = issuer.valid(&["readers"]);
    let metrics = raw(
        &fleet,
        &format!(
            "GET /metrics HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {valid}\r\nconnection: close\r\n\r\n"
        ),
    )
    .await;
    let counted = |reason: &str| {
        let name = format!("meridian_hub_token_rejections_total{{reason=\"{reason}\"}} ");
        let line =
            metrics.lines().find_map(|line| line.strip_prefix(&name)).unwrap_or_else(|| panic!("{metrics}"));
        line.parse::<u64>().unwrap()
    };
    let expected = [
        ("expired", 2),
        ("not_yet", 1),
        ("issuer", 1),
        ("audience", 1),
        ("algorithm", 2),
        ("signature", 1),
        ("too_long", 1),
        ("malformed", 1),
        ("missing", 1),
    ];
    for (reason, count) in expected {
        assert_eq!(counted(reason), count, "{reason}");
    }
    assert!(counted("key") >= 1);
    fleet.hub.stop().await;
}

#[tokio::test]
async fn a_new_key_of_the_issuer_is_used_and_an_invalid_file_changes_nothing() {
    let (first, second) = (Issuer::new("1"), Issuer::new("2"));
    let fleet = start(&first).await;
    let file = fleet.dir.path().join("keys.json");
    let plan = request("GET", paths::PLAN);
    let (old, new) = (client(&fleet, &first.valid(&["admins"])), client(&fleet, &second.valid(&["admins"])));
    wait_until("the keys are read", async || verdict(&old, &plan).await.0 == 200).await;
    std::fs::write(&file, "{").unwrap();
    assert_eq!(verdict(&new, &plan).await.0, 401);
    assert_eq!(verdict(&old, &plan).await.0, 200);
    second.write(&file);
    wait_until("the new keys are read", async || verdict(&new, &plan).await.0 == 200).await;
    assert_eq!(verdict(&old, &plan).await.0, 401);
    fleet.hub.stop().await;
}

/// Sends a request over TLS without a client certificate, and returns the response.
async fn raw(fleet: &Fleet, request: &str) -> String {
    let token = OperatorToken::new("t", &fleet.authorities()).unwrap();
    let address = fleet.hub.url.strip_prefix("http://").unwrap().to_owned();
    let tcp = tokio::net::TcpStream::connect(address).await.unwrap();
    let mut stream = token.connect(tcp).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).await.ok();
    String::from_utf8(response).unwrap()
}
