//! Access control of the hub: which role may use which endpoint, over mutual TLS, and who may use a lease.

#[path = "../../../gateway/tests/sockets/hop/authority.rs"]
mod authority;

use super::world::{AMERICA, EUROPE, Hub, Lease, config, free_address, registration, wait_until};
pub(super) use authority::{Authority, Subject};
use futures_util::future::join_all;
use identity::handshakes::SLOTS_PER_NETWORK_MAX;
use identity::{IdentityFiles, OwnName, ProcessIdentity, RevocationList, SerialNumber, Transport, Verifier};
use regions::Catalogue;
use regions::spiffe::Role;
use reqwest::Method;
use resolver::{DnsSection, Resolver};
use scheduler::config::{HubConfig, OperatorsConfig};
use scheduler::hub::HubError;
use scheduler_api::paths::{self, HUB_ENDPOINTS};
use scheduler_api::usage::UsageDay;
use scheduler_client::hub::{ControlPlaneClient, HubFailure, HubRequest};
use scheduler_core::hubs::Hubs;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

pub(super) const TIMEOUT: Duration = Duration::from_secs(10);
const HUB: &str = "spiffe://m/hub/aws/us-east-1/in/us-va";

/// Writes an identity and returns its transport.
fn transport(dir: &Path, authority: &Authority, subject: &Subject<'_>, trusted: &Authority) -> Transport {
    std::fs::create_dir_all(dir).unwrap();
    let [certificate, key, authorities] = authority.write(dir, "own", subject);
    std::fs::write(&authorities, &trusted.pem).unwrap();
    let revoked = Some(dir.join("revoked.json"));
    let files = IdentityFiles { certificate, key, authorities, revoked };
    let name = OwnName { roles: &Role::ALL, region: None };
    Transport::Tls(Arc::new(ProcessIdentity::load(files, &name, None).unwrap()))
}

pub(super) fn serial(transport: &Transport) -> SerialNumber {
    let chain = transport.identity().unwrap().certificate().certified_key();
    SerialNumber::of(webpki::EndEntityCert::try_from(&chain.cert[0]).unwrap().serial())
}

pub(super) fn name(role: Role, region: &str) -> String {
    match (role.is_process(), region) {
        (false, _) => format!("spiffe://m/{role}/jane"),
        (true, EUROPE) => format!("spiffe://m/{role}/{EUROPE}/in/nl"),
        (true, _) => format!("spiffe://m/{role}/{AMERICA}/in/us-va"),
    }
}

/// Returns a request in the name of a process of Europe for an endpoint.
pub(super) fn request(method: &str, path: &str) -> HubRequest {
    let lease = format!("{:032x}", 1);
    let holder = format!("holder=spoke/{EUROPE}/{:016x}", 1);
    let body: Option<Value> = match path {
        paths::SPOKES => Some(serde_json::from_str(&registration(EUROPE, 7100, 1, &[])).unwrap()),
        paths::KEEP_ALIVE => Some(json!({"version": 1})),
        paths::DEMAND => Some(json!({"version": 1, "gateway": EUROPE, "boot_id": 1, "classes": []})),
        paths::TRAFFIC => {
            Some(json!({"version": 1, "gateway": EUROPE, "boot_id": 1, "interval_ms": 1, "in_flight": 0,
                                      "regions": [], "served": [], "failures": [], "tenants": [], "moves": []}))
        }
        paths::USAGE if method == "POST" => {
            let today = UsageDay::of(SystemTime::now()).to_string();
            Some(
                json!({"version": 1, "gateway": EUROPE, "ledger": 1, "sequence": 1, "day": today, "rows": []}),
            )
        }
        paths::APPLY => Some(json!({"version": 1, "dry_run": true, "deployments": []})),
        _ => None,
    };
    let query =
        if matches!(path, paths::KEEP_ALIVE | paths::LEASE) { format!("?{holder}") } else { String::new() };
    let path = path
        .replace("{lease}", &lease)
        .replace("{*reader}", &format!("gateway/{EUROPE}/{:016x}", 1))
        .replace("{cloud}/{name}", EUROPE)
        .replace("{name}", "minilm");
    match body {
        Some(body) => HubRequest::post(path + &query, &body, TIMEOUT),
        None => HubRequest::new(method.parse::<Method>().unwrap(), path + &query, TIMEOUT),
    }
}

/// Hub with an identity, and the authority of its fleet.
pub(super) struct Fleet {
    pub(super) dir: tempfile::TempDir,
    pub(super) authority: Authority,
    /// Address of the listener for operators, without TLS.
    pub(super) operations: SocketAddr,
    pub(super) hub: Hub,
}

fn resolver() -> Resolver {
    Resolver::new(&DnsSection::default())
}

impl Fleet {
    pub(super) async fn start() -> Fleet {
        Fleet::start_with(tempfile::tempdir().unwrap(), None).await
    }

    /// Starts a hub that accepts tokens of operators.
    pub(super) async fn start_with(dir: tempfile::TempDir, operators: Option<OperatorsConfig>) -> Fleet {
        let authority = Authority::new();
        let operations = free_address();
        let console = super::console::any_port();
        let mut config = HubConfig { operators, operations: Some(operations), console, ..config(dir.path()) };
        let loaded = transport(&dir.path().join("identity"), &authority, &Subject::named(HUB), &authority);
        // The hub verifies regions and jurisdictions against its catalogue.
        let Transport::Tls(_) = loaded else { unreachable!() };
        let files = dir.path().join("identity");
        let files = IdentityFiles {
            certificate: files.join("own.crt"),
            key: files.join("own.key"),
            authorities: files.join("own.ca"),
            revoked: Some(files.join("revoked.json")),
        };
        let name = OwnName { roles: &[Role::Hub], region: None };
        let catalogue = Arc::new(Catalogue::builtin());
        config.transport =
            Transport::Tls(Arc::new(ProcessIdentity::load(files, &name, Some(&catalogue)).unwrap()));
        let hub = Hub::start(config).await;
        Fleet { dir, authority, operations, hub }
    }

    /// Returns the file with the certificates of the fleet's authorities.
    pub(super) fn authorities(&self) -> PathBuf {
        self.dir.path().join("identity/own.ca")
    }

    pub(super) fn url(&self) -> String {
        self.hub.url.replace("http://", "https://")
    }

    /// Returns a client with a certificate of this role.
    pub(super) fn client_of(&self, role: Role) -> ControlPlaneClient {
        let uri = name(role, EUROPE);
        self.client(&self.peer(role.as_str(), &self.authority, &Subject::named(&uri)))
    }

    pub(super) fn client(&self, transport: &Transport) -> ControlPlaneClient {
        ControlPlaneClient::new(&Hubs::one(self.url()), transport, resolver()).unwrap()
    }

    pub(super) fn peer(&self, folder: &str, authority: &Authority, subject: &Subject<'_>) -> Transport {
        transport(&self.dir.path().join(folder), authority, subject, &self.authority)
    }

    pub(super) fn revoke(&self, generation: u64, serial: SerialNumber) {
        let list = RevocationList { generation, serials: [serial].into() };
        std::fs::write(self.dir.path().join("identity/revoked.json"), list.to_json()).unwrap();
    }
}

/// Verdict on a request: admitted, denied, or not connected.
pub(super) async fn verdict(client: &ControlPlaneClient, request: &HubRequest) -> &'static str {
    match client.send::<serde::de::IgnoredAny>(request).await {
        Ok(_) => "yes",
        Err(error) => match error.failure {
            HubFailure::Rejected { status, .. } if status == 403 => "denied",
            HubFailure::Rejected { .. } | HubFailure::Invalid(_) | HubFailure::NoTable => "yes",
            HubFailure::Unreachable(_) | HubFailure::Untrusted { .. } => "no connection",
        },
    }
}

#[tokio::test]
async fn each_endpoint_admits_its_roles_and_no_other_peer() {
    let fleet = Fleet::start().await;
    let other = Authority::new();
    let mut peers: Vec<(String, Transport, Option<Role>, bool)> = Vec::new();
    for role in Role::ALL {
        let peer = fleet.peer(role.as_str(), &fleet.authority, &Subject::named(&name(role, EUROPE)));
        peers.push((role.to_string(), peer, Some(role), true));
    }
    for role in [Role::Spoke, Role::Gateway] {
        let description = format!("{role} elsewhere");
        let peer = fleet.peer(&description, &fleet.authority, &Subject::named(&name(role, AMERICA)));
        peers.push((description, peer, Some(role), false));
    }
    for role in [Role::Spoke, Role::Operator] {
        let uri = name(role, EUROPE);
        let subject = || Subject::named(&uri);
        let cases = [
            ("expired", &fleet.authority, Subject { expired: true, ..subject() }),
            ("not yet valid", &fleet.authority, Subject { early: true, ..subject() }),
            ("other authority", &other, subject()),
            ("revoked", &fleet.authority, subject()),
        ];
        for (description, authority, subject) in cases {
            let description = format!("{role} {description}");
            let peer = fleet.peer(&description, authority, &subject);
            peers.push((description, peer, None, false));
        }
    }
    let other_domain = "spiffe://other/operator/jane";
    peers.push((
        "other domain".to_owned(),
        fleet.peer("other domain", &fleet.authority, &Subject::named(other_domain)),
        None,
        false,
    ));
    let revoked = peers.iter().filter(|(description, ..)| description.ends_with("revoked"));
    let serials = revoked.map(|(_, peer, ..)| serial(peer)).collect();
    let list = RevocationList { generation: 1, serials };
    std::fs::write(fleet.dir.path().join("identity/revoked.json"), list.to_json()).unwrap();
    let revoked = peers.iter().find(|(description, ..)| description == "operator revoked").unwrap();
    let plan = request("GET", paths::PLAN);
    wait_until("the list is in force", async || {
        verdict(&fleet.client(&revoked.1), &plan).await == "no connection"
    })
    .await;

    for (description, peer, role, is_own_region) in &peers {
        let client = fleet.client(peer);
        let mut admitted = BTreeSet::new();
        for endpoint in HUB_ENDPOINTS {
            let found = verdict(&client, &request(endpoint.method, endpoint.path)).await;
            // A spoke cannot leave as a gateway, and processes act for their own region only.
            let expected = match role {
                None => "no connection",
                Some(role) if !endpoint.roles.contains(role) => "denied",
                Some(Role::Spoke) if endpoint.path == paths::READER => "denied",
                Some(_) => {
                    let is_regional = [
                        paths::SPOKES,
                        paths::KEEP_ALIVE,
                        paths::LEASE,
                        paths::READER,
                        paths::DEMAND,
                        paths::TRAFFIC,
                    ]
                    .contains(&endpoint.path)
                        || (endpoint.method, endpoint.path) == ("POST", paths::USAGE);
                    if is_regional && !is_own_region { "denied" } else { "yes" }
                }
            };
            if found == "yes" {
                admitted.insert(format!("{} {}", endpoint.method, endpoint.path));
            }
            assert_eq!(found, expected, "{description}: {} {}", endpoint.method, endpoint.path);
        }
        println!("{description:24} {}", admitted.into_iter().collect::<Vec<_>>().join(", "));
    }
    let operator = fleet.client(&peers.iter().find(|(description, ..)| description == "operator").unwrap().1);
    let unknown = HubRequest::new(Method::GET, "/v1/unknown", TIMEOUT);
    let error = operator.send::<Value>(&unknown).await.unwrap_err();
    assert_eq!(error.failure.status().map(|status| status.as_u16()), Some(404));
    let denied = HubRequest::new(Method::DELETE, paths::APPLY, TIMEOUT);
    let error = operator.send::<Value>(&denied).await.unwrap_err();
    assert_eq!(error.failure.status().map(|status| status.as_u16()), Some(405));
    fleet.hub.stop().await;
}

#[tokio::test]
async fn a_peer_without_a_certificate_or_in_plaintext_gets_no_byte() {
    let fleet = Fleet::start().await;
    let address = fleet.hub.url.strip_prefix("http://").unwrap().to_owned();
    let mut clear = TcpStream::connect(&address).await.unwrap();
    clear.write_all(b"GET /v1/routes HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let mut response = Vec::new();
    clear.read_to_end(&mut response).await.ok();
    assert_eq!(response.len(), 0);
    let peer = fleet.peer("spoke", &fleet.authority, &Subject::named(&name(Role::Spoke, EUROPE)));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Verifier::new(peer.identity().unwrap().clone())))
        .with_no_client_auth();
    let tcp = TcpStream::connect(&address).await.unwrap();
    let name = rustls::pki_types::ServerName::try_from("hub-any.identity.invalid").unwrap();
    let mut anonymous = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
    anonymous.write_all(b"GET /v1/routes HTTP/1.1\r\nhost: x\r\n\r\n").await.ok();
    let mut response = Vec::new();
    anonymous.read_to_end(&mut response).await.ok();
    assert_eq!(response.len(), 0);
    // Half-open connections delay no other peer.
    let mut silent = Vec::new();
    for _ in 0..64 {
        silent.push(TcpStream::connect(&address).await.unwrap());
    }
    let client = fleet.client(&peer);
    assert_eq!(verdict(&client, &request("GET", paths::ROUTES)).await, "yes");
    drop(silent);
    fleet.hub.stop().await;
}

#[tokio::test]
async fn silent_connections_of_one_network_do_not_exclude_others() {
    let fleet = Fleet::start().await;
    let address: SocketAddr = fleet.hub.url.strip_prefix("http://").unwrap().parse().unwrap();
    let connect = async || {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 2], 0).into()).unwrap();
        socket.connect(address).await.unwrap()
    };
    let mut silent = Vec::new();
    for _ in 0..SLOTS_PER_NETWORK_MAX {
        silent.push(connect().await);
    }
    let mut next = connect().await;
    let closed = tokio::time::timeout(Duration::from_secs(3), next.read(&mut [0])).await;
    assert!(matches!(closed, Ok(Ok(0) | Err(_))), "closed at once, before a handshake times out: {closed:?}");
    let peer = fleet.peer("spoke", &fleet.authority, &Subject::named(&name(Role::Spoke, EUROPE)));
    assert_eq!(verdict(&fleet.client(&peer), &request("GET", paths::ROUTES)).await, "yes");
    drop(silent);
    fleet.hub.stop().await;
}

#[tokio::test]
async fn a_man_in_the_middle_with_another_authority_gets_no_request() {
    let (fleet, other) = (Fleet::start().await, Authority::new());
    let dir = tempfile::tempdir().unwrap();
    let mut between = config(dir.path());
    between.transport =
        transport(&dir.path().join("identity"), &other, &Subject::named(HUB), &fleet.authority);
    let between = Hub::start(between).await;
    let spoke = fleet.peer("spoke", &fleet.authority, &Subject::named(&name(Role::Spoke, EUROPE)));
    let url = between.url.replace("http://", "https://");
    let client = ControlPlaneClient::new(&Hubs::one(url), &spoke, resolver()).unwrap();
    let error = client.send::<Value>(&request("POST", paths::SPOKES)).await.unwrap_err();
    assert!(error.to_string().contains("untrusted"), "{error}");
    // A valid certificate of another role is not that of a hub.
    let wrong = dir.path().join("wrong");
    let uri = name(Role::Spoke, AMERICA);
    let mut impostor = config(&wrong);
    impostor.transport = transport(&wrong, &fleet.authority, &Subject::named(&uri), &fleet.authority);
    let impostor = Hub::start(impostor).await;
    let url = impostor.url.replace("http://", "https://");
    let client = ControlPlaneClient::new(&Hubs::one(url), &spoke, resolver()).unwrap();
    let error = client.send::<Value>(&request("POST", paths::SPOKES)).await.unwrap_err();
    assert!(error.to_string().contains("wrong_peer"), "{error}");
    for hub in [between, impostor, fleet.hub] {
        hub.stop().await;
    }
}

#[tokio::test]
async fn a_revoked_spoke_loses_its_open_connection_within_two_seconds() {
    let fleet = Fleet::start().await;
    let spoke = fleet.peer("spoke", &fleet.authority, &Subject::named(&name(Role::Spoke, EUROPE)));
    let client = fleet.client(&spoke);
    assert_eq!(verdict(&client, &request("POST", paths::SPOKES)).await, "yes");
    let operator = fleet.peer("operator", &fleet.authority, &Subject::named(&name(Role::Operator, EUROPE)));
    let operator = fleet.client(&operator);
    let table: Value = operator.send(&request("GET", paths::ROUTES)).await.unwrap();
    let (epoch, generation) = (&table["epoch"], &table["generation"]);
    // The poll is held until the connection is closed; a newer table ends it too.
    let path =
        format!("{}?after={epoch}.{}&wait_ms=8000", paths::ROUTES, generation.as_u64().unwrap() + 1000);
    let poll = HubRequest::new(Method::GET, path, TIMEOUT);
    let begun = std::time::Instant::now();
    let (ended, ()) = tokio::join!(client.send::<Option<Value>>(&poll), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        fleet.revoke(1, serial(&spoke));
    });
    assert!(ended.is_err(), "{ended:?}");
    assert!(begun.elapsed() < Duration::from_millis(2200), "{:?}", begun.elapsed());
    assert_eq!(verdict(&client, &request("POST", paths::SPOKES)).await, "no connection");
    assert_eq!(verdict(&operator, &request("GET", paths::PLAN)).await, "yes");
    fleet.hub.stop().await;
}

/// A wider residency waits for every reader, so a forged acknowledgement could widen it too early.
#[tokio::test]
async fn a_forged_acknowledgement_neither_delays_a_wider_residency_nor_hastens_it() {
    let fleet = Fleet::start().await;
    let named = |folder: &str, role, region| {
        fleet.client(&fleet.peer(folder, &fleet.authority, &Subject::named(&name(role, region))))
    };
    let (operator, gateway) =
        (named("operator", Role::Operator, EUROPE), named("gateway", Role::Gateway, AMERICA));
    let others =
        [named("elsewhere", Role::Gateway, EUROPE), named("spoke", Role::Spoke, AMERICA), operator.clone()];
    let reader = format!("gateway/{AMERICA}/00000000000000ff");
    let poll = async |client: &ControlPlaneClient, reader: &str, after: &str| {
        let path = format!("{}?after={after}&wait_ms=1&reader={reader}", paths::ROUTES);
        verdict(client, &HubRequest::new(Method::GET, path, TIMEOUT)).await
    };
    let table: Value = operator.send(&request("GET", paths::ROUTES)).await.unwrap();
    let generation = format!("{}.{}", table["epoch"], table["generation"]);
    for other in &others {
        assert_eq!(poll(other, &reader, &generation).await, "denied");
        let path = format!("/v1/readers/{reader}");
        assert_eq!(verdict(other, &HubRequest::new(Method::DELETE, path, TIMEOUT)).await, "denied");
    }
    let readers = async || {
        let rollout: Value = operator.send(&request("GET", paths::ROLLOUT)).await.unwrap();
        rollout["readers"].as_array().map_or(0, Vec::len)
    };
    assert_eq!(readers().await, 0);
    assert_eq!(poll(&gateway, &reader, &generation).await, "yes");
    wait_until("the reader itself is known", async || readers().await == 1).await;
    fleet.hub.stop().await;
}

#[tokio::test]
async fn a_hub_without_an_identity_listens_on_loopback_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut open = config(dir.path());
    open.listen = ([0, 0, 0, 0], 0).into();
    let error = Hub::try_start(open.clone()).await.err().expect("the hub does not start");
    assert!(matches!(error, HubError::Unprotected(_)) && error.to_string().contains("[identity]"), "{error}");
    open.listen = ([127, 0, 0, 1], 0).into();
    let hub = Hub::start(open).await;
    assert_eq!(reqwest::get(format!("{}{}", hub.url, paths::ROUTES)).await.unwrap().status(), 200);
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
    wait_until("the new lease is valid", async || hub.keep_alive(&new, &[]).await.0 == 200).await;
    hub.stop().await;
}

/// Network between a client and the hub, which counts connections and can forget them without closing them, as a firewall does.
struct Network {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    forgotten: watch::Sender<usize>,
}

impl Network {
    async fn start(hub: SocketAddr) -> Network {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (connections, forgotten) = (Arc::<AtomicUsize>::default(), watch::Sender::new(0));
        let (count, forgets) = (connections.clone(), forgotten.clone());
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let number = count.fetch_add(1, Ordering::SeqCst) + 1;
                let mut forgotten = forgets.subscribe();
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(hub).await.unwrap();
                    let is_forgotten = async { drop(forgotten.wait_for(|last| *last >= number).await) };
                    tokio::select! {
                        _ = copy_bidirectional(&mut client, &mut server) => return,
                        () = is_forgotten => {}
                    }
                    // Both ends stay open, and nothing passes any more.
                    std::future::pending::<()>().await;
                });
            }
        });
        Network { address, connections, forgotten }
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    fn forget_connections(&self) {
        self.forgotten.send_replace(self.connections());
    }
}

#[tokio::test]
async fn requests_to_a_hub_share_one_connection_and_a_forgotten_connection_is_replaced() {
    let fleet = Fleet::start().await;
    let network = Network::start(fleet.url().trim_start_matches("https://").parse().unwrap()).await;
    let transport = fleet.peer("gateway", &fleet.authority, &Subject::named(&name(Role::Gateway, EUROPE)));
    let hubs = Hubs::one(format!("https://{}", network.address));
    let client = ControlPlaneClient::new(&hubs, &transport, resolver()).unwrap();
    let demand = request("POST", paths::DEMAND);
    let send = async || client.send::<serde::de::IgnoredAny>(&demand).await;
    send().await.unwrap();
    for result in join_all((0..64).map(|_| send())).await {
        result.unwrap();
    }
    assert_eq!(network.connections(), 1);

    network.forget_connections();
    let short = HubRequest::post(
        paths::DEMAND,
        &json!({"version": 1, "gateway": EUROPE, "boot_id": 1, "classes": []}),
        Duration::from_millis(500),
    );
    wait_until("another connection is opened", async || {
        client.send::<serde::de::IgnoredAny>(&short).await.is_ok()
    })
    .await;
    assert_eq!(network.connections(), 2);
}
