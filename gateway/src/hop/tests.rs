//! Both ends over loopback, with valid and invalid certificates.

#[path = "../../tests/sockets/hop/authority.rs"]
mod authority;

use super::*;
use crate::http1::Http1Client;
use crate::request_head::{RequestHead, UpstreamMethod};
use authority::{Authority, Subject};
use gateway_core::outcome::AttemptFailure;
use identity::verify::Verifier;
use identity::{
    ConnectionFailureCause, ConnectionFailures, IdentityFiles, OwnName, ProcessIdentity, RevocationList,
    Transport,
};
use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
use regions::catalogue::Catalogue;
use regions::spiffe::Role;
use resolver::{DnsSection, Resolver};
use rustls::HandshakeKind;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const FRANKFURT: &str = "spiffe://m/spoke/aws/eu-central-1/in/de";
const GATEWAY: &str = "spiffe://m/gateway/aws/us-east-1/in/us-va";
/// Longer than any expected step takes.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Files of one end, which may be replaced while it runs.
struct PeerFiles {
    dir: tempfile::TempDir,
    own: &'static str,
}

impl PeerFiles {
    fn ingress() -> PeerFiles {
        PeerFiles { dir: tempfile::tempdir().unwrap(), own: FRANKFURT }
    }

    fn gateway() -> PeerFiles {
        PeerFiles { dir: tempfile::tempdir().unwrap(), own: GATEWAY }
    }

    /// Uses a certificate that `signer` signed, and trusts `trusts`.
    fn with(&self, signer: &Authority, subject: &Subject<'_>, trusts: &Authority) -> Arc<ProcessIdentity> {
        let [certificate, key, ca] = signer.write(self.dir.path(), "own", subject);
        std::fs::write(&ca, &trusts.pem).unwrap();
        let files = IdentityFiles {
            certificate,
            key,
            authorities: ca,
            revoked: Some(self.dir.path().join("revoked.json")),
        };
        // Loaded without the name check, so that tests may use any certificate.
        let catalogue = Arc::new(Catalogue::builtin());
        Arc::new(ProcessIdentity::unchecked(files, self.own.parse().unwrap(), &catalogue).unwrap())
    }
}

/// TLS server of a region that responds 204 to every request, with the number of request bytes that it has read.
struct TestServer {
    address: SocketAddr,
    failures: Arc<ConnectionFailures>,
    bytes: Arc<AtomicU64>,
}

async fn serve(credentials: Arc<ProcessIdentity>) -> TestServer {
    let failures: Arc<ConnectionFailures> = Arc::default();
    let acceptor = Arc::new(GatewayAcceptor::new(&credentials, failures.clone()).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let bytes: Arc<AtomicU64> = Arc::default();
    let served = TestServer { address, failures, bytes: bytes.clone() };
    tokio::spawn(async move {
        while let Ok((tcp, peer)) = listener.accept().await {
            let (acceptor, bytes) = (acceptor.clone(), bytes.clone());
            tokio::spawn(async move {
                let AcceptedPeer { mut stream, guard, .. } =
                    acceptor.accept(tcp.into(), peer.ip(), TIMEOUT).await?;
                let served = async {
                    let mut read = Vec::new();
                    while stream.read_buf(&mut read).await.ok()? > 0 {
                        bytes.fetch_add(read.len() as u64, Ordering::SeqCst);
                        if read.ends_with(b"\r\n\r\n") {
                            stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.ok()?;
                            stream.flush().await.ok()?;
                            read.clear();
                        }
                    }
                    Some(())
                };
                tokio::select! {
                    served = served => served,
                    () = guard.revoked() => None,
                }
            });
        }
    });
    served
}

fn client(credentials: Arc<ProcessIdentity>) -> Http1Client {
    Http1Client::over(Arc::new(
        Connector::to_regions(
            &Transport::Tls(credentials),
            false,
            &Arc::new(Catalogue::builtin()),
            Resolver::new(&DnsSection::default()),
        )
        .unwrap(),
    ))
}

fn key(address: SocketAddr) -> UpstreamKey {
    let region = Catalogue::builtin().index_of(&"aws/eu-central-1".parse().unwrap()).unwrap();
    UpstreamKey { region, address: address.into() }
}

/// Sends a request and returns the status of its response.
async fn get(client: &Http1Client, address: SocketAddr) -> Result<u16, AttemptFailure> {
    let opened = client.open(&key(address), TIMEOUT).await?;
    let response = opened.send(&RequestHead::new(UpstreamMethod::Get), b"").await?;
    let status = response.head.status.as_u16();
    response.body.finish(client);
    Ok(status)
}

/// Returns the counted failures by cause.
fn causes(failures: &ConnectionFailures) -> Vec<String> {
    let counted =
        ConnectionFailureCause::ALL.map(|cause| (cause.as_str().to_owned(), failures.counts.of(cause).get()));
    counted.into_iter().flat_map(|(cause, n)| std::iter::repeat_n(cause, n as usize)).collect()
}

async fn wait_until(description: &str, mut holds: impl AsyncFnMut() -> bool) {
    let waited = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, waited)
        .await
        .unwrap_or_else(|_| panic!("timed out waiting until {description}"));
}

#[tokio::test]
async fn peers_with_valid_certificates_connect_and_reuse_the_connection() {
    let authority = Authority::new();
    let served = serve(PeerFiles::ingress().with(&authority, &Subject::named(FRANKFURT), &authority)).await;
    let client = client(PeerFiles::gateway().with(&authority, &Subject::named(GATEWAY), &authority));
    let first = client.open(&key(served.address), TIMEOUT).await.unwrap();
    assert_ne!(first.peer(), gateway_core::residency::Peer::UNPROVEN);
    drop(first);
    for _ in 0..3 {
        assert_eq!(get(&client, served.address).await, Ok(204));
    }
    assert_eq!(causes(&served.failures), [""; 0]);
    assert_eq!(causes(client.connector().failures()), [""; 0]);
}

#[tokio::test]
async fn a_connection_is_idle_although_the_tickets_of_its_session_are_unread() {
    let authority = Authority::new();
    let served = serve(PeerFiles::ingress().with(&authority, &Subject::named(FRANKFURT), &authority)).await;
    let client = client(PeerFiles::gateway().with(&authority, &Subject::named(GATEWAY), &authority));
    let mut connected = client.connector().connect(&key(served.address), TIMEOUT).await.unwrap();
    assert!(connected.stream.tcp().peek(&mut [0]).await.unwrap() > 0, "the server sends tickets");
    assert!(connected.stream.is_idle());
    client.put_idle(&key(served.address), connected);
    let idle = client.take_idle(&key(served.address)).expect("it is reused");
    let response = idle.send(&RequestHead::new(UpstreamMethod::Get), b"").await.unwrap();
    assert_eq!(response.head.status.as_u16(), 204);

    let mut connected = client.connector().connect(&key(served.address), TIMEOUT).await.unwrap();
    connected.stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    wait_until("the response has arrived", async || !connected.stream.is_idle()).await;
}

#[tokio::test]
async fn a_peer_other_than_the_intended_region_gets_no_byte() {
    let (fleet_authority, other) = (Authority::new(), Authority::new());
    let gateway_end = PeerFiles::gateway().with(&fleet_authority, &Subject::named(GATEWAY), &fleet_authority);
    let check = async |authority: &Authority, subject: Subject<'_>, failure: AttemptFailure, cause: &str| {
        let served = serve(PeerFiles::ingress().with(authority, &subject, &fleet_authority)).await;
        let client = client(gateway_end.clone());
        for _ in 0..2 {
            assert_eq!(get(&client, served.address).await, Err(failure), "{:?}", subject.uris);
        }
        assert_eq!(causes(client.connector().failures()), [cause, cause], "{:?}", subject.uris);
        assert_eq!(served.bytes.load(Ordering::SeqCst), 0, "{:?}", subject.uris);
    };
    for wrong in [
        "spiffe://m/spoke/gcp/europe-west3/in/de",
        "spiffe://m/spoke/aws/eu-central-1/in/us-va",
        "spiffe://other/spoke/aws/eu-central-1/in/de",
        "spiffe://m/gateway/aws/eu-central-1/in/de",
        "https://m/region/aws/eu-central-1",
    ] {
        check(&fleet_authority, Subject::named(wrong), AttemptFailure::WrongPeer, "wrong_peer").await;
    }
    let two = Subject { uris: vec![FRANKFURT, FRANKFURT], ..Subject::named(FRANKFURT) };
    check(&fleet_authority, two, AttemptFailure::WrongPeer, "wrong_peer").await;
    check(&other, Subject::named(FRANKFURT), AttemptFailure::Unreachable, "untrusted").await;
    let expired = Subject { expired: true, ..Subject::named(FRANKFURT) };
    check(&fleet_authority, expired, AttemptFailure::Unreachable, "outside_validity").await;
    let client = Subject { uses: vec![ClientAuth], ..Subject::named(FRANKFURT) };
    check(&fleet_authority, client, AttemptFailure::Unreachable, "untrusted").await;
}

#[tokio::test]
async fn only_gateways_and_spokes_of_the_region_are_accepted() {
    let (fleet_authority, other) = (Authority::new(), Authority::new());
    let ingress_end =
        PeerFiles::ingress().with(&fleet_authority, &Subject::named(FRANKFURT), &fleet_authority);
    let check = async |authority: &Authority, subject: Subject<'_>, cause: &str| {
        let served = serve(ingress_end.clone()).await;
        let client = client(PeerFiles::gateway().with(authority, &subject, &fleet_authority));
        assert_eq!(
            get(&client, served.address).await,
            Err(AttemptFailure::Unreachable),
            "{:?}",
            subject.uris
        );
        assert_eq!(causes(&served.failures), [cause], "{:?}", subject.uris);
        assert_eq!(causes(client.connector().failures()), ["rejected_by_peer"], "{:?}", subject.uris);
        assert_eq!(served.bytes.load(Ordering::SeqCst), 0, "{:?}", subject.uris);
    };
    for wrong in [
        "spiffe://m/spoke/aws/us-east-1/in/us-va",
        "spiffe://other/gateway/aws/us-east-1/in/us-va",
        "spiffe://m/gateway/aws/us-east-1/in/de",
        "spiffe://m/replica/aws/us-east-1/in/us-va",
    ] {
        check(&fleet_authority, Subject::named(wrong), "wrong_peer").await;
    }
    let served = serve(ingress_end.clone()).await;
    let neighbor =
        client(PeerFiles::ingress().with(&fleet_authority, &Subject::named(FRANKFURT), &fleet_authority));
    assert_eq!(get(&neighbor, served.address).await, Ok(204));
    check(&other, Subject::named(GATEWAY), "untrusted").await;
    check(&fleet_authority, Subject { expired: true, ..Subject::named(GATEWAY) }, "outside_validity").await;
    check(&fleet_authority, Subject { uses: vec![ServerAuth], ..Subject::named(GATEWAY) }, "untrusted").await;
}

#[tokio::test]
async fn a_peer_without_certificate_or_in_plaintext_is_rejected() {
    let fleet_authority = Authority::new();
    let served =
        serve(PeerFiles::ingress().with(&fleet_authority, &Subject::named(FRANKFURT), &fleet_authority))
            .await;
    let mut clear = TcpStream::connect(served.address).await.unwrap();
    clear.write_all(b"POST /v1/embeddings HTTP/1.1\r\n\r\n").await.unwrap();
    let mut response = Vec::new();
    // A reset or an end of stream: no byte is sent to it either way.
    clear.read_to_end(&mut response).await.ok();
    assert_eq!((response.len(), causes(&served.failures)), (0, vec!["not_tls".to_owned()]));

    let credentials = PeerFiles::gateway().with(&fleet_authority, &Subject::named(GATEWAY), &fleet_authority);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Verifier::new(credentials)))
        .with_no_client_auth();
    let tcp = TcpStream::connect(served.address).await.unwrap();
    let name = format!("spoke-{}.identity.invalid", key(served.address).region.as_usize());
    let name = rustls::pki_types::ServerName::try_from(name).unwrap();
    let mut anonymous = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
    assert!(anonymous.read_u8().await.is_err());
    assert_eq!(causes(&served.failures), ["not_tls", "other"]);
    assert_eq!(served.bytes.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_region_without_tls_and_an_unresponsive_region_are_distinguished() {
    let fleet_authority = Authority::new();
    let client =
        client(PeerFiles::gateway().with(&fleet_authority, &Subject::named(GATEWAY), &fleet_authority));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let clear = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.ok();
    };
    let (status, ()) = tokio::join!(get(&client, address), clear);
    assert_eq!(
        (status, causes(client.connector().failures())),
        (Err(AttemptFailure::Unreachable), vec!["not_tls".into()])
    );

    // The kernel accepts the connection, but no process does.
    let opened = client.open(&key(address), Duration::from_millis(1)).await;
    assert_eq!(opened.err(), Some(AttemptFailure::Unreachable));
    assert_eq!(causes(client.connector().failures()), ["not_tls", "timed_out"]);
}

#[tokio::test]
async fn plaintext_leaves_this_machine_only_if_configured() {
    let check = async |regions: Transport, address: &str, cause: &[&str]| {
        let client = Http1Client::over(Arc::new(
            Connector::to_regions(
                &regions,
                false,
                &Arc::new(Catalogue::builtin()),
                Resolver::new(&DnsSection::default()),
            )
            .unwrap(),
        ));
        let opened = client.open(&key(address.parse().unwrap()), Duration::from_millis(1)).await;
        assert!(opened.is_err(), "the port is closed");
        assert_eq!(causes(client.connector().failures()), cause, "{regions:?} {address}");
    };
    check(Transport::Loopback, "127.0.0.1:1", &[]).await;
    check(Transport::Loopback, "192.0.2.1:7100", &["plaintext_forbidden"]).await;
    check(Transport::Plaintext, "192.0.2.1:7100", &[]).await;
}

fn is_resumed(stream: &TransportStream) -> bool {
    let TransportStream::Tls(stream) = stream else { panic!("plaintext") };
    stream.get_ref().get_ref().1.handshake_kind() == Some(HandshakeKind::Resumed)
}

/// Opens a connection and waits for a response, and so for the verdict of the acceptor.
async fn connects(client: &Http1Client, address: SocketAddr) -> Result<TransportStream, AttemptFailure> {
    let PeerConnection { mut stream, .. } = client.connector().connect(&key(address), TIMEOUT).await?;
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.map_err(|_| AttemptFailure::Unreachable)?;
    stream.flush().await.map_err(|_| AttemptFailure::Unreachable)?;
    stream.read_u8().await.map_err(|_| AttemptFailure::Unreachable)?;
    Ok(stream)
}

/// A ticket is valid for hours; the certificate of its session may expire earlier.
#[tokio::test]
async fn a_session_is_resumed_for_as_long_as_the_certificates_hold() {
    let fleet_authority = Authority::new();
    for short in [Role::Spoke, Role::Gateway] {
        let holds = |role| Duration::from_secs(if role == short { 5 } else { 3600 });
        let region = Subject { holds: holds(Role::Spoke), ..Subject::named(FRANKFURT) };
        let gateway = Subject { holds: holds(Role::Gateway), ..Subject::named(GATEWAY) };
        let served = serve(PeerFiles::ingress().with(&fleet_authority, &region, &fleet_authority)).await;
        let client = client(PeerFiles::gateway().with(&fleet_authority, &gateway, &fleet_authority));
        assert!(!is_resumed(&connects(&client, served.address).await.unwrap()));
        assert!(is_resumed(&connects(&client, served.address).await.unwrap()));
        wait_until("a certificate expires", async || connects(&client, served.address).await.is_err()).await;
        let failures = if short == Role::Spoke { client.connector().failures() } else { &*served.failures };
        assert_eq!(causes(failures)[0], "outside_validity", "{short:?}");
    }
}

/// The certificate of the session has expired, and the region has a new one.
#[tokio::test]
async fn a_session_of_an_expired_certificate_does_not_prevent_new_connections() {
    let fleet_authority = Authority::new();
    let (files, short) = (PeerFiles::ingress(), Duration::from_secs(5));
    let credentials = files.with(
        &fleet_authority,
        &Subject { holds: short, ..Subject::named(FRANKFURT) },
        &fleet_authority,
    );
    tokio::spawn(credentials.clone().follow());
    let served = serve(credentials).await;
    let client =
        client(PeerFiles::gateway().with(&fleet_authority, &Subject::named(GATEWAY), &fleet_authority));
    connects(&client, served.address).await.unwrap();
    files.with(&fleet_authority, &Subject::named(FRANKFURT), &fleet_authority);
    wait_until("the old certificate is rejected", async || {
        !is_resumed(&connects(&client, served.address).await.unwrap())
    })
    .await;
    assert_eq!(causes(client.connector().failures()), [""; 0], "without a failure");
}

#[tokio::test]
async fn authorities_and_certificates_are_replaced_while_both_ends_run() {
    let (old, new) = (Authority::new(), Authority::new());
    let (ingress_files, gateway_files) = (PeerFiles::ingress(), PeerFiles::gateway());
    let ingress_end = ingress_files.with(&old, &Subject::named(FRANKFURT), &old);
    let gateway_end = gateway_files.with(&old, &Subject::named(GATEWAY), &old);
    tokio::spawn(ingress_end.clone().follow());
    tokio::spawn(gateway_end.clone().follow());
    let (served, client) = (serve(ingress_end).await, client(gateway_end));
    let works = async || connects(&client, served.address).await.is_ok();
    assert!(works().await);
    gateway_files.with(&old, &Subject::named(GATEWAY), &new);
    wait_until("the gateway trusts only the new authority", async || !works().await).await;
    ingress_files.with(&new, &Subject::named(FRANKFURT), &old);
    wait_until("the ingress uses its new certificate", works).await;
    ingress_files.with(&new, &Subject::named(FRANKFURT), &new);
    wait_until("the ingress trusts only the new authority", async || !works().await).await;
    gateway_files.with(&new, &Subject::named(GATEWAY), &new);
    wait_until("the gateway uses its new certificate", works).await;
}

/// Certificates of both ends, of which one is revoked while they are connected.
#[tokio::test]
async fn a_revoked_certificate_ends_open_connections_within_two_seconds_and_makes_no_new_ones() {
    let fleet_authority = Authority::new();
    for revoked in [Role::Spoke, Role::Gateway] {
        let (ingress_files, gateway_files) = (PeerFiles::ingress(), PeerFiles::gateway());
        let ingress_end = ingress_files.with(&fleet_authority, &Subject::named(FRANKFURT), &fleet_authority);
        let gateway_end = gateway_files.with(&fleet_authority, &Subject::named(GATEWAY), &fleet_authority);
        let (files, owner, judge) = match revoked {
            Role::Spoke => (&gateway_files, &ingress_end, gateway_end.clone()),
            _ => (&ingress_files, &gateway_end, ingress_end.clone()),
        };
        tokio::spawn(judge.follow());
        let serial = {
            let chain = owner.certificate().certified_key();
            let parsed = webpki::EndEntityCert::try_from(&chain.cert[0]).unwrap();
            identity::SerialNumber::of(parsed.serial())
        };
        let (served, client) = (serve(ingress_end).await, client(gateway_end));
        let mut open = connects(&client, served.address).await.unwrap();
        let list = RevocationList { generation: 1, serials: [serial].into() };
        std::fs::write(files.dir.path().join("revoked.json"), list.to_json()).unwrap();
        let mut rest = Vec::new();
        let ended = tokio::time::timeout(Duration::from_secs(2), open.read_to_end(&mut rest)).await;
        assert!(ended.is_ok(), "{revoked}");
        assert!(connects(&client, served.address).await.is_err(), "{revoked}");
        let failures = if revoked == Role::Spoke { client.connector().failures() } else { &*served.failures };
        assert_eq!(causes(failures), ["revoked"], "{revoked}");
    }
}

#[test]
fn invalid_files_are_reported_by_name_and_all_at_once() {
    let (dir, fleet_authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let catalogue = Arc::new(Catalogue::builtin());
    let check = |files: [PathBuf; 3], words: &[&str]| {
        let [certificate, key, ca] = files;
        let name = OwnName::of(&[Role::Spoke], &"aws/eu-central-1".parse().unwrap());
        let files = IdentityFiles { certificate, key, authorities: ca, revoked: None };
        let read = ProcessIdentity::load(files, &name, Some(&catalogue));
        let problems = read.err().unwrap_or_default();
        assert_eq!(problems.len(), words.len(), "{problems:#?}");
        for (problem, word) in problems.iter().zip(words) {
            assert!(problem.contains(word), "'{word}' in {problem}");
        }
    };
    let path = |name: &str| dir.path().join(name);
    let good = fleet_authority.write(dir.path(), "good", &Subject::named(FRANKFURT));
    check(good.clone(), &[]);
    check(
        [path("no.crt"), path("no.key"), path("no.ca")],
        &["identity.certificate", "identity.key", "identity.authorities"],
    );
    let [certificate, key, _] = good.clone();
    check([certificate, key.clone(), key], &["no certificate"]);
    for wrong in
        [GATEWAY, "spiffe://m/spoke/aws/us-east-1/in/us-va", "spiffe://m/spoke/aws/eu-central-1/in/us"]
    {
        let expected = "its only URI must be spiffe://TRUST-DOMAIN/spoke/aws/eu-central-1/in/de";
        check(fleet_authority.write(dir.path(), "wrong", &Subject::named(wrong)), &[expected]);
    }
}
