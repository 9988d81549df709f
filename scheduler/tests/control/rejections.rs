//! Rejected connections, requests and join tokens: each is counted by its cause, named in the log without secrets, and
//! changes nothing for other peers.

use super::access::{Authority, Fleet, Subject, TIMEOUT, name, request, serial, verdict};
use super::pki;
use super::world::{AMERICA, EUROPE, Hub, free_address, registration, wait_until};
use identity::Transport;
use regions::spiffe::Role;
use scheduler::config::HubConfig;
use scheduler_api::paths;
use scheduler_client::authority::AuthorityConnection;
use scheduler_client::hub::HubRequest;
use scheduler_core::pki::token::{JoinSecret, JoinToken};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tracing::subscriber::DefaultGuard;

/// Log of this test and of its hub, which run on one thread.
struct Log {
    file: tempfile::NamedTempFile,
    _captured: DefaultGuard,
}

impl Log {
    fn capture() -> Log {
        let file = tempfile::NamedTempFile::new().unwrap();
        let writer = Arc::new(file.reopen().unwrap());
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
        Log { file, _captured: tracing::subscriber::set_default(subscriber) }
    }

    fn text(&self) -> String {
        std::fs::read_to_string(self.file.path()).unwrap()
    }

    /// Returns the lines with all of these words.
    fn lines(&self, words: &[&str]) -> Vec<String> {
        let text = self.text();
        let lines = text.lines().filter(|line| words.iter().all(|word| line.contains(word)));
        lines.map(str::to_owned).collect()
    }

    fn assert_has(&self, words: &[&str]) {
        assert!(!self.lines(words).is_empty(), "no line with {words:?} in\n{}", self.text());
    }

    /// Asserts that the log has no line of a private key in this folder and in those below it.
    fn assert_has_no_key_of(&self, dir: &Path) {
        let text = self.text();
        for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_dir() {
                self.assert_has_no_key_of(&entry.path());
            } else if entry.path().extension().is_some_and(|ending| ending == "key") {
                let key = std::fs::read_to_string(entry.path()).unwrap();
                let secret = key.lines().filter(|line| !line.starts_with("-----") && !line.is_empty());
                assert!(secret.clone().count() > 0);
                secret.for_each(|line| assert!(!text.contains(line), "{text}"));
            }
        }
    }
}

/// Returns a counter of the hub with this listener for operators; 0 if nothing was counted.
async fn counted(operations: SocketAddr, counter: &str) -> u64 {
    let text = reqwest::Client::builder().no_proxy().build().unwrap();
    let text = text.get(format!("http://{operations}/metrics")).send().await.unwrap().text().await.unwrap();
    let value = text.lines().find_map(|line| line.strip_prefix(counter)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().unwrap())
}

#[tokio::test]
async fn an_invalid_certificate_is_counted_by_its_cause_and_named_in_the_log_and_harms_no_other_peer() {
    let log = Log::capture();
    let fleet = Fleet::start().await;
    let (uri, routes) = (name(Role::Spoke, EUROPE), request("GET", paths::ROUTES));
    let valid = fleet.client_of(Role::Spoke);
    let subject = || Subject::named(&uri);
    let signed = |folder: &str, subject: Subject<'_>| fleet.peer(folder, &fleet.authority, &subject);
    let of = |folder: &str, uri: &str| signed(folder, Subject::named(uri));
    let revoked = signed("revoked", subject());
    fleet.revoke(1, serial(&revoked));
    wait_until("the revocation is in force", async || {
        verdict(&fleet.client(&revoked), &routes).await == "no connection"
    })
    .await;
    let cases: [(&str, &str, Transport); 6] = [
        ("outside_validity", "expired", signed("expired", Subject { expired: true, ..subject() })),
        ("outside_validity", "not valid yet", signed("early", Subject { early: true, ..subject() })),
        ("untrusted", "invalid peer certificate", fleet.peer("other", &Authority::new(), &subject())),
        ("wrong_peer", "not in the catalogue", of("region", "spiffe://m/spoke/aws/mars-1/in/us-va")),
        ("wrong_peer", "another jurisdiction", of("jurisdiction", "spiffe://m/spoke/gcp/europe-west4/in/de")),
        ("revoked", "revoked", revoked),
    ];
    let counter = |cause: &str| format!("meridian_hub_connections_refused_total{{cause=\"{cause}\"}}");
    for (cause, reason, peer) in &cases {
        let before = counted(fleet.operations, &counter(cause)).await;
        assert_eq!(verdict(&fleet.client(peer), &routes).await, "no connection", "{cause}: {reason}");
        wait_until(reason, async || counted(fleet.operations, &counter(cause)).await > before).await;
        // At most one line a second for each cause.
        wait_until(reason, async || {
            let words = ["connection rejected", &format!("cause=\"{cause}\""), "peer=127.0.0.1", reason];
            let is_logged = !log.lines(&words).is_empty();
            is_logged || verdict(&fleet.client(peer), &routes).await != "no connection"
        })
        .await;
        log.assert_has(&[&format!("cause=\"{cause}\""), "peer=127.0.0.1", reason]);
        assert_eq!(verdict(&valid, &routes).await, "yes", "after {cause}: {reason}");
    }
    let before = counted(fleet.operations, &counter("not_tls")).await;
    let address = fleet.hub.url.strip_prefix("http://").unwrap();
    let mut plaintext = TcpStream::connect(address).await.unwrap();
    plaintext.write_all(b"GET /v1/routes HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    plaintext.read_to_end(&mut Vec::new()).await.ok();
    wait_until("plaintext is counted", async || {
        counted(fleet.operations, &counter("not_tls")).await == before + 1
    })
    .await;
    log.assert_has(&["connection rejected", "cause=\"not_tls\"", "peer=127.0.0.1"]);
    log.assert_has_no_key_of(fleet.dir.path());
    fleet.hub.stop().await;
}

#[tokio::test]
async fn a_forged_registration_is_counted_and_named_in_the_log_and_registers_nothing() {
    let log = Log::capture();
    let fleet = Fleet::start().await;
    let register = |region: &str| {
        let body: Value = serde_json::from_str(&registration(region, 7100, 1, &["minilm"])).unwrap();
        HubRequest::post(paths::SPOKES, &body, TIMEOUT)
    };
    let denied = "meridian_hub_requests_denied_total";
    for (role, region, reason, text) in [
        (Role::Spoke, AMERICA, "region", "a spoke of gcp/europe-west4 may not act for aws/us-east-1"),
        (Role::Gateway, EUROPE, "role", "the role gateway may not send POST to this path"),
    ] {
        let (client, counter) = (fleet.client_of(role), format!("{denied}{{reason=\"{reason}\"}}"));
        for times in 1..=2 {
            let error = client.send::<Value>(&register(region)).await.unwrap_err();
            assert_eq!(error.failure.status().map(|status| status.as_u16()), Some(403), "{error}");
            assert_eq!(counted(fleet.operations, &counter).await, times);
        }
        let logged = log.lines(&["request denied", &name(role, EUROPE), text]);
        assert_eq!(logged.len(), 1, "the first one of a peer: {}", log.text());
    }
    let operator = fleet.client_of(Role::Operator);
    let table: Value = operator.send(&request("GET", paths::ROUTES)).await.unwrap();
    assert_eq!(table["regions"], json!([]));
    let spoke = fleet.client_of(Role::Spoke);
    spoke.send::<Value>(&register(EUROPE)).await.unwrap();
    log.assert_has_no_key_of(fleet.dir.path());
    fleet.hub.stop().await;
}

#[tokio::test]
async fn a_reused_or_forged_join_token_is_counted_and_logged_without_its_secret_and_others_can_join() {
    let log = Log::capture();
    let dir = tempfile::tempdir().unwrap();
    let fleet = pki::Fleet::new(dir.path());
    let operations = free_address();
    let hub = Hub::start(HubConfig { operations: Some(operations), ..fleet.config() }).await;
    let token = fleet.token("spoke", Some("aws/eu-central-1"), None).await;
    pki::join(&fleet.folder("spoke"), &token).await.unwrap();
    let secret = JoinSecret::from_random([7; 20]);
    let forged = JoinToken::new(token.addresses().to_vec(), token.fingerprints().to_vec(), secret).unwrap();
    let counter = |reason: &str| format!("meridian_hub_joins_rejected_total{{reason=\"{reason}\"}}");
    for (token, reason, text) in [
        (&token, "used", "the join token was used before"),
        (&forged, "unknown", "the join token is unknown"),
    ] {
        let error = pki::join(&fleet.folder("thief"), token).await.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(counted(operations, &counter(reason)).await, 1);
        log.assert_has(&["join rejected", "address=127.0.0.1", text]);
        assert!(!log.text().contains(&token.secret().reveal()), "{}", log.text());
    }
    assert!(!fleet.folder("thief").has_certificate());
    for (times, body) in [(1, json!({"version": 1})), (2, json!("join"))] {
        let mut connection = AuthorityConnection::with_token(&token, &pki::resolver()).await.unwrap();
        let error = connection.post::<Value>(paths::JOIN, &body).await.unwrap_err();
        assert_eq!(error.status().map(|status| status.as_u16()), Some(400), "{error}");
        assert_eq!(counted(operations, &counter("invalid_request")).await, times);
    }
    let next = fleet.token("gateway", Some("aws/us-east-1"), None).await;
    pki::join(&fleet.folder("gateway"), &next).await.unwrap();
    assert!(!log.text().contains(&next.secret().reveal()));
    hub.stop().await;
}
