//! Built-in authority of a running hub: joining, revocation, roles, and a restoration from a backup, over its listener.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use identity::{OwnName, ProcessIdentity, Transport};
use regions::Catalogue;
use regions::spiffe::Role;
use resolver::{DnsSection, Resolver};
use scheduler::config::{AuthorityConfig, HubConfig};
use scheduler::hub::backup;
use scheduler::hub::pki::init::{self, NewAuthority};
use scheduler_api::pki::{CertificatesV1, NewTokenResponseV1, NewTokenV1, RevocationsV1, RevokeV1};
use scheduler_api::{VERSION, keys, paths};
use scheduler_client::authority::{self, AuthorityConnection, AuthorityError, issue_for_replicas};
use scheduler_client::identity_folder::{IdentityFolder, Membership};
use scheduler_client::operator_token::OperatorToken;
use scheduler_client::{membership, unix_time};
use scheduler_core::pki::CLOCK_SKEW_MAX;
use scheduler_core::pki::issue::VALIDITY;
use scheduler_core::pki::token::JoinToken;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::dns_server::{DnsServer, Zone, addresses};
use super::operators::{Issuer, operators_config};
use super::world::{Hub, config, wait_until};

pub(super) fn resolver() -> Resolver {
    Resolver::new(&DnsSection::default())
}

pub(super) async fn join(folder: &IdentityFolder, token: &JoinToken) -> Result<Membership, AuthorityError> {
    join_as(folder, token, &Role::ALL, &resolver()).await
}

async fn join_as(
    folder: &IdentityFolder,
    token: &JoinToken,
    roles: &'static [Role],
    resolver: &Resolver,
) -> Result<Membership, AuthorityError> {
    authority::join(folder, token, &OwnName { roles, region: None }, resolver).await
}

/// Connects to the hub at `address` once.
async fn connect(folder: &IdentityFolder, address: &str) -> Result<AuthorityConnection, AuthorityError> {
    AuthorityConnection::with_identity(folder, &[address.to_owned()], &resolver()).await
}

/// Hub with an authority.
pub(super) struct Fleet {
    dir: PathBuf,
    address: String,
}

impl Fleet {
    pub(super) fn new(dir: &Path) -> Fleet {
        Fleet::created_at(dir, unix_time())
    }

    /// Creates the authority and the first certificates with this time of the clock.
    fn created_at(dir: &Path, now: Duration) -> Fleet {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let request = NewAuthority {
            dir: &dir.join("pki"),
            domain: "m.example",
            region: &"aws/us-east-1".parse().unwrap(),
            operator: "admin",
            operator_validity: VALIDITY,
            addresses: vec![address.clone()],
            catalogue: &Catalogue::builtin(),
        };
        init::create(&request, now).unwrap();
        Fleet { dir: dir.to_owned(), address }
    }

    pub(super) fn config(&self) -> HubConfig {
        let hub = self.dir.join("pki/hub");
        let own = OwnName { roles: &[Role::Hub], region: None };
        let files = IdentityFolder::new(&hub).files();
        let identity = ProcessIdentity::load(files, &own, Some(&Arc::new(Catalogue::builtin()))).unwrap();
        HubConfig {
            transport: Transport::Tls(Arc::new(identity)),
            authority: Some(AuthorityConfig {
                listen: self.address.parse().unwrap(),
                dir: self.dir.join("pki/authority"),
                signer: None,
                validity: Duration::from_secs(7 * 24 * 3600),
                identity: hub,
            }),
            ..config(&self.dir)
        }
    }

    async fn operator(&self) -> AuthorityConnection {
        self.connect(&IdentityFolder::new(self.dir.join("pki/operator"))).await
    }

    async fn connect(&self, folder: &IdentityFolder) -> AuthorityConnection {
        let begun = Instant::now();
        loop {
            match connect(folder, &self.address).await {
                Ok(connection) => return connection,
                Err(error) => assert!(begun.elapsed() < Duration::from_secs(30), "{error}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(super) async fn token(&self, role: &str, region: Option<&str>, name: Option<&str>) -> JoinToken {
        let request = NewTokenV1 {
            version: VERSION,
            role: role.to_owned(),
            region: region.map(str::to_owned),
            name: name.map(str::to_owned),
            ttl_s: 600,
            validity_s: None,
        };
        let created: NewTokenResponseV1 =
            self.operator().await.post(paths::JOIN_TOKENS, &request).await.unwrap();
        let fingerprints = created.fingerprints.iter().map(|text| text.parse().unwrap()).collect();
        JoinToken::new(vec![self.address.clone()], fingerprints, created.secret.parse().unwrap()).unwrap()
    }

    pub(super) fn folder(&self, name: &str) -> IdentityFolder {
        IdentityFolder::new(self.dir.join(name))
    }
}

/// Returns the epoch in a backup.
fn stored_epoch(backup: &backup::StoreBackupV1) -> u64 {
    let entry = backup.entries.iter().find(|entry| entry.key == keys::EPOCH).unwrap();
    let value = base64::engine::general_purpose::STANDARD.decode(&entry.value).unwrap();
    String::from_utf8(value).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_joins_with_a_token_and_a_revocation_reaches_it_and_ends_its_connections() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let hub = Hub::start(fleet.config()).await;
    let token = fleet.token("spoke", Some("aws/eu-central-1"), None).await;
    let (spoke, gateway) = (fleet.folder("spoke"), fleet.folder("gateway"));
    join(&spoke, &token).await.unwrap();
    let again = join(&fleet.folder("thief"), &token).await.unwrap_err();
    assert!(again.to_string().contains("used before"), "{again}");
    assert!(!fleet.folder("thief").has_certificate());
    let token = fleet.token("gateway", Some("aws/us-east-1"), None).await;
    join(&gateway, &token).await.unwrap();

    // The gateway follows the trusted state; the spoke holds a poll open.
    let following = tokio::spawn(membership::follow(gateway.clone(), resolver()));
    let mut open = fleet.connect(&spoke).await;
    let generation = spoke.trust().unwrap().unwrap().generation;
    let held = tokio::spawn(async move { open.poll_trust(Some(generation), Duration::from_secs(20)).await });
    let serial = spoke.membership().unwrap().unwrap().serial;
    let request = RevokeV1 { version: VERSION, target: "spoke/aws/eu-central-1".to_owned(), own: false };
    let mut operator = fleet.operator().await;
    let begun = Instant::now();
    let revoked: RevocationsV1 = operator.post(paths::REVOKE, &request).await.unwrap();
    assert_eq!(revoked.revoked[0].serial, serial);
    let knows =
        || gateway.trust().unwrap().is_some_and(|trust| trust.revoked.keys().any(|it| it.as_str() == serial));
    wait_until("the gateway has the revocation on disk", async || knows()).await;
    held.await.unwrap().ok();
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    println!("revocation on the disk of another process, connection closed: {took:?}");
    let refused = connect(&spoke, &fleet.address).await;
    let refused = match refused {
        // The server's verdict arrives with the first response.
        Ok(mut connection) => connection.poll_trust(None, Duration::ZERO).await.map(drop),
        Err(error) => Err(error),
    };
    assert!(refused.is_err(), "a revoked certificate connects no more");
    following.abort();
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_another_role_or_region_leaves_a_folder_that_can_join_with_the_right_one() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let hub = Hub::start(fleet.config()).await;
    let folder = fleet.folder("replica");
    let token = fleet.token("gateway", Some("aws/us-east-1"), None).await;
    let problem = join_as(&folder, &token, &[Role::Replica], &resolver()).await.unwrap_err().to_string();
    let command = "`meridian pki token --role replica --region aws/us-east-1`";
    assert!(
        problem.contains("for the role gateway in aws/us-east-1") && problem.contains(command),
        "{problem}"
    );
    assert!(!folder.has_certificate() && folder.membership().unwrap().is_none());
    assert_eq!(folder.trust().unwrap(), None, "nothing was written");

    let elsewhere = OwnName::of(&[Role::Replica], &"aws/eu-central-1".parse().unwrap());
    let token = fleet.token("replica", Some("aws/us-east-1"), None).await;
    let problem = authority::join(&folder, &token, &elsewhere, &resolver()).await.unwrap_err().to_string();
    assert!(problem.contains("--role replica --region aws/eu-central-1"), "{problem}");
    assert!(!folder.has_certificate());

    let token = fleet.token("replica", Some("aws/us-east-1"), None).await;
    join_as(&folder, &token, &[Role::Replica], &resolver()).await.unwrap();
    assert!(folder.has_certificate());
    hub.stop().await;
}

/// The clock of the machine that issued the certificates differs from those of the hub and of its peers.
#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_differs_by_five_minutes_is_tolerated_and_a_larger_difference_is_named() {
    let minute = Duration::from_secs(60);
    for (issued, problem) in [
        (unix_time() + CLOCK_SKEW_MAX, None),
        (unix_time() - CLOCK_SKEW_MAX, None),
        // A process renews its certificate long before.
        (unix_time() - VALIDITY + CLOCK_SKEW_MAX, None),
        (unix_time() + CLOCK_SKEW_MAX + minute, Some("not valid yet")),
        (unix_time() - VALIDITY - minute, Some("expired")),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let fleet = Fleet::created_at(dir.path(), issued);
        let hub = Hub::start(fleet.config()).await;
        let Some(problem) = problem else {
            // Both handshakes: that with the certificate of the operator, and that with a token, without one.
            let token = fleet.token("gateway", Some("aws/us-east-1"), None).await;
            join(&fleet.folder("gateway"), &token).await.unwrap();
            hub.stop().await;
            continue;
        };
        let rejected = async || match connect(&fleet.folder("pki/operator"), &fleet.address).await {
            // The verdict of the hub arrives with its first response.
            Ok(mut connection) => connection.poll_trust(None, Duration::ZERO).await.map(drop),
            Err(error) => Err(error),
        };
        // The authority starts after the hub.
        wait_until(problem, async || match rejected().await {
            Ok(()) => panic!("{problem}: accepted"),
            Err(AuthorityError::Untrusted(reason)) => {
                assert!(reason.to_lowercase().contains(problem), "{reason}");
                true
            }
            Err(_) => false,
        })
        .await;
        hub.stop().await;
    }
}

/// Forwards connections to `target` until it is frozen: then it keeps them open, accepts others, and forwards nothing, like
/// a hub that is stopped by SIGSTOP.
async fn freezable(listen: &str, target: String) -> (String, watch::Sender<bool>) {
    let listener = tokio::net::TcpListener::bind(listen).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (freeze, frozen) = watch::channel(false);
    tokio::spawn(async move {
        let mut kept = JoinSet::new();
        while let Ok((mut near, _)) = listener.accept().await {
            let (target, mut frozen) = (target.clone(), frozen.clone());
            kept.spawn(async move {
                let is_frozen = *frozen.borrow();
                if !is_frozen {
                    let Ok(mut far) = tokio::net::TcpStream::connect(&target).await else { return };
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => return,
                        _ = frozen.wait_for(|frozen| *frozen) => {}
                    }
                }
                // Both sides stay open for as long as the listener.
                std::future::pending::<()>().await;
            });
        }
    });
    (address, freeze)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_hub_does_not_delay_a_revocation_while_another_one_is_reachable() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let hub = Hub::start(fleet.config()).await;
    let (first, freeze) = freezable("127.0.0.1:0", fleet.address.clone()).await;
    let gateway = fleet.folder("gateway");
    let token = fleet.token("gateway", Some("aws/us-east-1"), None).await;
    let addresses = vec![first, fleet.address.clone()];
    let token = JoinToken::new(addresses, token.fingerprints().to_vec(), token.secret().clone()).unwrap();
    join(&gateway, &token).await.unwrap();
    let following = tokio::spawn(membership::follow(gateway.clone(), resolver()));

    revoke_while_frozen(&fleet, &gateway, &freeze).await;
    following.abort();
    hub.stop().await;
}

/// Revokes certificates before and after one of two hubs is frozen, and asserts that the gateway knows each at once.
async fn revoke_while_frozen(fleet: &Fleet, gateway: &IdentityFolder, freeze: &watch::Sender<bool>) {
    let mut operator = fleet.operator().await;
    for is_frozen in [false, true, true] {
        freeze.send_replace(is_frozen);
        let spoke = fleet.folder("spoke");
        join(&spoke, &fleet.token("spoke", Some("aws/eu-central-1"), None).await).await.unwrap();
        let serial = spoke.membership().unwrap().unwrap().serial;
        let request = RevokeV1 { version: VERSION, target: serial.clone(), own: false };
        let begun = Instant::now();
        operator.post::<RevocationsV1>(paths::REVOKE, &request).await.unwrap();
        wait_until("the gateway has the revocation on disk", async || {
            let trust = gateway.trust().unwrap();
            trust.is_some_and(|trust| trust.revoked.keys().any(|it| it.as_str() == serial))
        })
        .await;
        // A process reads its changed files within a second.
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(1), "frozen: {is_frozen}, {took:?}");
        std::fs::remove_dir_all(spoke.path()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_hub_behind_the_name_of_another_one_does_not_delay_a_revocation() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let hub = Hub::start(fleet.config()).await;
    let port = fleet.address.rsplit_once(':').unwrap().1;
    let (_, freeze) = freezable(&format!("127.0.0.2:{port}"), fleet.address.clone()).await;
    let dns = DnsServer::start().await;
    let resolver = Resolver::new(&DnsSection { servers: vec![dns.address] });
    // The second address is found while the first is polled.
    dns.set("hub.test", addresses(&["127.0.0.1"], 1));
    let token = fleet.token("gateway", Some("aws/us-east-1"), None).await;
    let name = vec![format!("hub.test:{port}")];
    let token = JoinToken::new(name, token.fingerprints().to_vec(), token.secret().clone()).unwrap();
    let gateway = fleet.folder("gateway");
    join_as(&gateway, &token, &[Role::Gateway], &resolver).await.unwrap();
    let following = tokio::spawn(membership::follow(gateway.clone(), resolver));
    dns.set("hub.test", addresses(&["127.0.0.1", "127.0.0.2"], 1));
    // Each connection has a receiver, and the listener.
    wait_until("both addresses are polled", async || freeze.receiver_count() > 1).await;
    revoke_while_frozen(&fleet, &gateway, &freeze).await;
    following.abort();
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_of_the_authority_is_resolved_at_the_configured_servers_and_each_of_its_addresses_is_tried() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let hub = Hub::start(fleet.config()).await;
    let token = fleet.token("gateway", Some("aws/us-east-1"), None).await;
    let dns = DnsServer::start().await;
    let resolver = Resolver::new(&DnsSection { servers: vec![dns.address] });
    // At the first address a frozen hub accepts connections and does not respond.
    let port = fleet.address.rsplit_once(':').unwrap().1;
    let _frozen = tokio::net::TcpListener::bind(format!("127.0.0.2:{port}")).await.unwrap();
    dns.set("hub.test", addresses(&["127.0.0.1", "127.0.0.2"], 1));
    let name = vec![format!("hub.test:{port}")];
    let token = JoinToken::new(name.clone(), token.fingerprints().to_vec(), token.secret().clone()).unwrap();
    let gateway = fleet.folder("gateway");
    join_as(&gateway, &token, &[Role::Gateway], &resolver).await.unwrap();
    assert_eq!(gateway.membership().unwrap().unwrap().addresses, name);
    // The last addresses are used while DNS fails.
    dns.set("hub.test", Zone::Silence);
    let queries = dns.queries();
    wait_until("the answer has expired", async || dns.queries() > queries).await;
    AuthorityConnection::with_identity(&gateway, &name, &resolver).await.unwrap();
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_path_has_its_callers_and_a_hub_with_another_authority_receives_no_secret() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let hub = Hub::start(fleet.config()).await;
    let viewer = fleet.folder("viewer");
    join(&viewer, &fleet.token("viewer", None, Some("bob")).await).await.unwrap();
    let gateway = fleet.folder("gateway");
    join(&gateway, &fleet.token("gateway", Some("aws/us-east-1"), None).await).await.unwrap();
    let target = RevokeV1 { version: VERSION, target: "admin".to_owned(), own: false };
    for (folder, may_read) in [(&viewer, true), (&gateway, false)] {
        let mut connection = fleet.connect(folder).await;
        let listed = connection.get::<CertificatesV1>(paths::CERTIFICATES).await;
        assert_eq!(listed.is_ok(), may_read);
        let denied = connection.post::<RevocationsV1>(paths::REVOKE, &target).await.unwrap_err();
        assert_eq!(denied.status().map(|status| status.as_u16()), Some(403), "{denied}");
        assert!(denied.to_string().contains("operator"), "{denied}");
        assert!(connection.poll_trust(None, Duration::ZERO).await.unwrap().is_some());
    }
    let token = fleet.token("spoke", Some("aws/eu-central-1"), None).await;
    let mut anonymous = AuthorityConnection::with_token(&token, &resolver()).await.unwrap();
    for path in [paths::CERTIFICATES, paths::TRUST, paths::ROTATION, paths::BACKUP] {
        let denied = anonymous.get::<serde_json::Value>(path).await.unwrap_err();
        assert_eq!(denied.status().map(|status| status.as_u16()), Some(403), "{path}: {denied}");
    }
    // A man in the middle with an authority of its own, at the address of the token.
    let other = tempfile::tempdir().unwrap();
    let impostor = Fleet::new(other.path());
    let impostor_hub = Hub::start(impostor.config()).await;
    impostor.operator().await;
    let redirected =
        JoinToken::new(vec![impostor.address.clone()], token.fingerprints().to_vec(), token.secret().clone());
    let rejected = AuthorityConnection::with_token(&redirected.unwrap(), &resolver()).await.unwrap_err();
    assert!(rejected.to_string().contains("UnknownIssuer"), "{rejected}");
    impostor_hub.stop().await;
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_hub_is_restored_from_a_backup_and_continues() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let hub = Hub::start(fleet.config()).await;
    let spoke = fleet.folder("spoke");
    join(&spoke, &fleet.token("spoke", Some("aws/eu-central-1"), None).await).await.unwrap();
    let unused = fleet.token("gateway", Some("aws/us-east-1"), None).await;
    let saved: backup::StoreBackupV1 = fleet.operator().await.get(paths::BACKUP).await.unwrap();
    let before = stored_epoch(&saved);
    // After the backup: a join, and a revocation, which the spoke learns.
    join(&fleet.folder("gateway"), &unused).await.unwrap();
    let request = RevokeV1 { version: VERSION, target: "gateway/aws/us-east-1".to_owned(), own: false };
    fleet.operator().await.post::<RevocationsV1>(paths::REVOKE, &request).await.unwrap();
    let mut connection = fleet.connect(&spoke).await;
    let newest = connection.poll_trust(None, Duration::ZERO).await.unwrap().unwrap();
    spoke.write_trust(&newest).unwrap();
    hub.kill().await;

    let data = dir.path().join("hub");
    std::fs::rename(&data, dir.path().join("lost")).unwrap();
    let epoch = backup::restore(&data, &saved, unix_time()).await.unwrap();
    assert!(epoch > before);
    let hub = Hub::start(fleet.config()).await;
    assert_eq!(stored_epoch(&fleet.operator().await.get(paths::BACKUP).await.unwrap()), epoch);
    // The used token is not valid again; members keep their certificates; the revocation is kept where it is known.
    let reused = join(&fleet.folder("thief"), &unused).await.unwrap_err();
    assert!(reused.to_string().contains("unknown"), "{reused}");
    let mut connection = fleet.connect(&spoke).await;
    let offered =
        connection.poll_trust(Some(newest.generation), Duration::from_secs(20)).await.unwrap().unwrap();
    let accepted = offered.accept(Some(&newest), unix_time()).unwrap();
    assert!(newest.revoked.keys().all(|serial| accepted.revoked.contains_key(serial)));
    join(&fleet.folder("gateway-2"), &fleet.token("gateway", Some("aws/us-east-1"), None).await)
        .await
        .unwrap();
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spoke_obtains_a_certificate_for_the_replicas_of_its_region_and_another_role_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let hub = Hub::start(fleet.config()).await;
    let [spoke, gateway, replicas] = ["spoke", "gateway", "replicas"].map(|name| fleet.folder(name));
    join(&spoke, &fleet.token("spoke", Some("aws/eu-central-1"), None).await).await.unwrap();
    join(&gateway, &fleet.token("gateway", Some("aws/eu-central-1"), None).await).await.unwrap();
    let addresses = std::slice::from_ref(&fleet.address);
    let refused = issue_for_replicas(&replicas, &mut fleet.connect(&gateway).await, addresses).await;
    assert!(refused.unwrap_err().to_string().contains("open to: spoke"));
    assert!(!replicas.has_certificate());

    // The task of a spoke obtains it, and continues with its renewal.
    let following = tokio::spawn(membership::follow_replicas(spoke, replicas.clone(), resolver()));
    wait_until("the replicas have a certificate", async || replicas.has_certificate()).await;
    let name = OwnName { roles: &[Role::Replica], region: Some("aws/eu-central-1".parse().unwrap()) };
    let loaded = ProcessIdentity::load(replicas.files(), &name, Some(&Arc::new(Catalogue::builtin())));
    assert_eq!(loaded.unwrap().own().to_string(), "spiffe://m.example/replica/aws/eu-central-1/in/de");
    following.abort();
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_without_its_authority_begins_with_another_one() {
    let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let fleet = Fleet::new(dir.path());
    let store = dir.path().join("hub");
    backup::delete_authority(&store).await.unwrap();
    assert!(!store.join("hub.redb").exists(), "a missing store is not created");
    let hub = Hub::start(fleet.config()).await;
    fleet.token("spoke", Some("aws/eu-central-1"), None).await;
    hub.stop().await;

    let next = Fleet::new(other.path());
    backup::delete_authority(&store).await.unwrap();
    let hub = Hub::start(HubConfig { store: fleet.config().store, ..next.config() }).await;
    let token = next.token("spoke", Some("aws/eu-central-1"), None).await;
    join(&next.folder("spoke"), &token).await.unwrap();
    let former = fleet.folder("pki/operator");
    let refused = connect(&former, &next.address).await;
    assert!(refused.is_err(), "the former authority is not trusted");
    hub.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_with_a_token_creates_join_tokens_and_a_viewer_only_reads() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    let issuer = Issuer::new("1");
    let file = dir.path().join("keys.json");
    issuer.write(&file);
    let hub = Hub::start(HubConfig { operators: Some(operators_config(file)), ..fleet.config() }).await;
    let authorities = dir.path().join("pki/operator/authorities.pem");
    let connect = async |token: &str| {
        let token = OperatorToken::new(token, &authorities).unwrap();
        let addresses = std::slice::from_ref(&fleet.address);
        AuthorityConnection::with_operator_token(&token, addresses, &resolver()).await.unwrap()
    };
    let list = async |roles: &[&str]| {
        connect(&issuer.valid(roles)).await.get::<CertificatesV1>(paths::CERTIFICATES).await
    };
    wait_until("the keys are read", async || list(&["readers"]).await.is_ok()).await;
    let request = NewTokenV1 {
        version: VERSION,
        role: "spoke".to_owned(),
        region: Some("aws/eu-central-1".to_owned()),
        name: None,
        ttl_s: 600,
        validity_s: None,
    };
    let create = async |roles: &[&str]| {
        let mut connection = connect(&issuer.valid(roles)).await;
        connection.post::<NewTokenResponseV1>(paths::JOIN_TOKENS, &request).await
    };
    let denied = create(&["readers"]).await.unwrap_err().to_string();
    assert!(denied.contains("403") && denied.contains("the role viewer"), "{denied}");
    let created = create(&["admins"]).await.unwrap();
    assert!(created.subject.contains("spoke/aws/eu-central-1"), "{}", created.subject);
    let revoke = RevokeV1 { version: VERSION, target: "spoke/aws/eu-central-1".to_owned(), own: false };
    let mut operator = connect(&issuer.valid(&["admins"])).await;
    let revoked: RevocationsV1 = operator.post(paths::REVOKE, &revoke).await.unwrap();
    assert_eq!((revoked.revoked.len(), revoked.tokens), (0, 1));
    // A token renews no certificate and follows no trusted state.
    let refused =
        connect(&issuer.valid(&["admins"])).await.poll_trust(None, Duration::ZERO).await.unwrap_err();
    assert!(refused.to_string().contains("client certificate"), "{refused}");
    hub.stop().await;
}
