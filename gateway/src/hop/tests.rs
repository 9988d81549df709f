//! One end meets the other, over loopback, with certificates that are right or wrong in every way that matters.

#[path = "../../tests/sockets/hop/authority.rs"]
mod authority;

use super::*;
use crate::events::HopFailures;
use crate::metrics::Text;
use crate::plain::{Plain, Stream, Way};
use crate::upstream::{RequestHead, UpstreamMethod};
use authority::{Authority, Subject};
use gateway_core::outcome::AttemptFailure;
use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
use rustls::HandshakeKind;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const FRANKFURT: &str = "spiffe://m/region/aws/eu-central-1/in/de";
const GATEWAY: &str = "spiffe://m/gateway/aws/us-east-1/in/us-va";
/// Longer than anything takes that is meant to happen.
const PATIENCE: Duration = Duration::from_secs(20);

/// Files of one end, which may be exchanged while it runs.
struct End {
    dir: tempfile::TempDir,
    own: &'static str,
}

impl End {
    fn door() -> End {
        End { dir: tempfile::tempdir().unwrap(), own: FRANKFURT }
    }

    fn gateway() -> End {
        End { dir: tempfile::tempdir().unwrap(), own: GATEWAY }
    }

    /// Shows what `shows` signed and believes `believes`.
    fn with(&self, shows: &Authority, subject: &Subject<'_>, believes: &Authority) -> Arc<Credentials> {
        let [certificate, key, ca] = shows.write(self.dir.path(), "own", subject);
        std::fs::write(&ca, &believes.pem).unwrap();
        // What it shows may be anything; only here it is loaded without a look at the name.
        Arc::new(Credentials {
            identity: Arc::new(Identity::load(certificate, key).unwrap()),
            anchors: Arc::new(Anchors::load("tls", "ca", ca).unwrap()),
            own: self.own.parse().unwrap(),
            catalogue: Arc::new(Catalogue::builtin()),
        })
    }
}

/// A region's door that answers every request with nothing, and how many bytes of requests it has read.
struct Served {
    address: SocketAddr,
    failures: Arc<HopFailures>,
    bytes: Arc<AtomicU64>,
}

async fn door(credentials: Arc<Credentials>) -> Served {
    let failures: Arc<HopFailures> = Arc::default();
    let doorkeeper = Arc::new(Doorkeeper::with(credentials, failures.clone()).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let bytes: Arc<AtomicU64> = Arc::default();
    let served = Served { address, failures, bytes: bytes.clone() };
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let (doorkeeper, bytes) = (doorkeeper.clone(), bytes.clone());
            tokio::spawn(async move {
                let mut stream = doorkeeper.greet(tcp.into(), PATIENCE).await?;
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
            });
        }
    });
    served
}

fn edge(credentials: Arc<Credentials>) -> Plain {
    Plain::over(Arc::new(Outward::to_regions(&Regions::Tls(credentials), false).unwrap()))
}

fn way(address: SocketAddr) -> Way {
    let region = Catalogue::builtin().index_of(&"aws/eu-central-1".parse().unwrap()).unwrap();
    Way { region, address }
}

/// The status that a request is answered with.
async fn ask(edge: &Plain, address: SocketAddr) -> Result<u16, AttemptFailure> {
    let opened = edge.open(way(address), PATIENCE).await?;
    let begun = opened.ask(&RequestHead::new(UpstreamMethod::Get), b"").await?;
    let status = begun.head.status.as_u16();
    begun.rest.finish(edge);
    Ok(status)
}

/// What was counted, by cause.
fn causes(failures: &HopFailures) -> Vec<String> {
    let mut text = Text::default();
    failures.render(&mut text, "n", "help");
    let text = text.finish();
    let counted = text.lines().filter_map(|line| line.strip_prefix("n{cause=\"")?.split_once("\"} "));
    counted.flat_map(|(cause, n)| std::iter::repeat_n(cause.to_owned(), n.parse().unwrap())).collect()
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let waited = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waited).await.unwrap_or_else(|_| panic!("{what} does not come true"));
}

#[tokio::test]
async fn two_that_are_who_they_are_meet_and_keep_their_connection() {
    let authority = Authority::new();
    let served = door(End::door().with(&authority, &Subject::named(FRANKFURT), &authority)).await;
    let edge = edge(End::gateway().with(&authority, &Subject::named(GATEWAY), &authority));
    let first = edge.open(way(served.address), PATIENCE).await.unwrap();
    assert_ne!(first.peer(), gateway_core::residency::Peer::UNPROVEN);
    drop(first);
    for _ in 0..3 {
        assert_eq!(ask(&edge, served.address).await, Ok(204));
    }
    assert_eq!(causes(&served.failures), [""; 0]);
    assert_eq!(causes(edge.outward().failures()), [""; 0]);
}

#[tokio::test]
async fn whoever_is_not_the_region_that_was_meant_gets_not_a_byte() {
    let (ours, other) = (Authority::new(), Authority::new());
    let edge_end = End::gateway().with(&ours, &Subject::named(GATEWAY), &ours);
    let check = async |authority: &Authority, subject: Subject<'_>, failure: AttemptFailure, cause: &str| {
        let served = door(End::door().with(authority, &subject, &ours)).await;
        let edge = edge(edge_end.clone());
        for _ in 0..2 {
            assert_eq!(ask(&edge, served.address).await, Err(failure), "{:?}", subject.uris);
        }
        assert_eq!(causes(edge.outward().failures()), [cause, cause], "{:?}", subject.uris);
        assert_eq!(served.bytes.load(Ordering::SeqCst), 0, "{:?}", subject.uris);
    };
    for wrong in [
        "spiffe://m/region/gcp/europe-west3/in/de",
        "spiffe://m/region/aws/eu-central-1/in/us-va",
        "spiffe://other/region/aws/eu-central-1/in/de",
        "spiffe://m/gateway/aws/eu-central-1/in/de",
        "https://m/region/aws/eu-central-1",
    ] {
        check(&ours, Subject::named(wrong), AttemptFailure::WrongPeer, "wrong_peer").await;
    }
    let two = Subject { uris: vec![FRANKFURT, FRANKFURT], ..Subject::named(FRANKFURT) };
    check(&ours, two, AttemptFailure::WrongPeer, "wrong_peer").await;
    check(&other, Subject::named(FRANKFURT), AttemptFailure::Unreachable, "untrusted").await;
    let expired = Subject { expired: true, ..Subject::named(FRANKFURT) };
    check(&ours, expired, AttemptFailure::Unreachable, "not_valid_now").await;
    let client = Subject { uses: vec![ClientAuth], ..Subject::named(FRANKFURT) };
    check(&ours, client, AttemptFailure::Unreachable, "untrusted").await;
}

#[tokio::test]
async fn only_gateways_are_let_in() {
    let (ours, other) = (Authority::new(), Authority::new());
    let door_end = End::door().with(&ours, &Subject::named(FRANKFURT), &ours);
    let check = async |authority: &Authority, subject: Subject<'_>, cause: &str| {
        let served = door(door_end.clone()).await;
        let edge = edge(End::gateway().with(authority, &subject, &ours));
        assert_eq!(ask(&edge, served.address).await, Err(AttemptFailure::Unreachable), "{:?}", subject.uris);
        assert_eq!(causes(&served.failures), [cause], "{:?}", subject.uris);
        assert_eq!(causes(edge.outward().failures()), ["refused"], "{:?}", subject.uris);
        assert_eq!(served.bytes.load(Ordering::SeqCst), 0, "{:?}", subject.uris);
    };
    for wrong in [
        "spiffe://m/region/aws/us-east-1/in/us-va",
        "spiffe://other/gateway/aws/us-east-1/in/us-va",
        "spiffe://m/gateway/aws/us-east-1/in/de",
        "spiffe://m/replica/aws/us-east-1/in/us-va",
    ] {
        check(&ours, Subject::named(wrong), "wrong_peer").await;
    }
    check(&other, Subject::named(GATEWAY), "untrusted").await;
    check(&ours, Subject { expired: true, ..Subject::named(GATEWAY) }, "not_valid_now").await;
    check(&ours, Subject { uses: vec![ServerAuth], ..Subject::named(GATEWAY) }, "untrusted").await;
}

#[tokio::test]
async fn whoever_shows_nothing_or_speaks_in_the_clear_is_not_let_in() {
    let ours = Authority::new();
    let served = door(End::door().with(&ours, &Subject::named(FRANKFURT), &ours)).await;
    let mut clear = TcpStream::connect(served.address).await.unwrap();
    clear.write_all(b"POST /v1/embeddings HTTP/1.1\r\n\r\n").await.unwrap();
    let mut said = Vec::new();
    // A reset or an end: nothing is said to it either way.
    clear.read_to_end(&mut said).await.ok();
    assert_eq!((said.len(), causes(&served.failures)), (0, vec!["not_tls".to_owned()]));

    let believed = End::gateway().with(&ours, &Subject::named(GATEWAY), &ours);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verify::Verifier(believed)))
        .with_no_client_auth();
    let tcp = TcpStream::connect(served.address).await.unwrap();
    let name = verify::server_name(way(served.address).region);
    let mut nameless = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
    assert!(nameless.read_u8().await.is_err());
    assert_eq!(causes(&served.failures), ["not_tls", "other"]);
    assert_eq!(served.bytes.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_region_that_speaks_no_tls_or_says_nothing_is_told_apart() {
    let ours = Authority::new();
    let edge = edge(End::gateway().with(&ours, &Subject::named(GATEWAY), &ours));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let clear = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.ok();
    };
    let (asked, ()) = tokio::join!(ask(&edge, address), clear);
    assert_eq!(
        (asked, causes(edge.outward().failures())),
        (Err(AttemptFailure::Unreachable), vec!["not_tls".into()])
    );

    // The kernel connects, and nobody is there.
    let opened = edge.open(way(address), Duration::from_millis(1)).await;
    assert_eq!(opened.err(), Some(AttemptFailure::Unreachable));
    assert_eq!(causes(edge.outward().failures()), ["not_tls", "timed_out"]);
}

#[tokio::test]
async fn nothing_leaves_this_machine_in_the_clear_unless_somebody_wrote_so() {
    let check = async |regions: Regions, address: &str, cause: &[&str]| {
        let edge = Plain::over(Arc::new(Outward::to_regions(&regions, false).unwrap()));
        let opened = edge.open(way(address.parse().unwrap()), Duration::from_millis(1)).await;
        assert!(opened.is_err(), "nobody listens there");
        assert_eq!(causes(edge.outward().failures()), cause, "{regions:?} {address}");
    };
    check(Regions::OnThisMachine, "127.0.0.1:1", &[]).await;
    check(Regions::OnThisMachine, "192.0.2.1:7100", &["in_the_clear"]).await;
    check(Regions::InTheClear, "192.0.2.1:7100", &[]).await;
}

fn is_resumed(stream: &Stream) -> bool {
    let Stream::Tls(stream) = stream else { panic!("in the clear") };
    stream.get_ref().1.handshake_kind() == Some(HandshakeKind::Resumed)
}

/// Opens a connection and waits for an answer on it, and so for whether the door takes it.
async fn connects(edge: &Plain, address: SocketAddr) -> Result<Stream, AttemptFailure> {
    let Greeted { mut stream, .. } = edge.outward().connect(way(address), PATIENCE).await?;
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.map_err(|_| AttemptFailure::Unreachable)?;
    stream.flush().await.map_err(|_| AttemptFailure::Unreachable)?;
    stream.read_u8().await.map_err(|_| AttemptFailure::Unreachable)?;
    Ok(stream)
}

/// A ticket is good for hours; the certificate with which it was got may be not.
#[tokio::test]
async fn a_session_is_resumed_for_as_long_as_the_certificates_hold() {
    let ours = Authority::new();
    for short in [Role::Region, Role::Gateway] {
        let holds = |role| Duration::from_secs(if role == short { 5 } else { 3600 });
        let region = Subject { holds: holds(Role::Region), ..Subject::named(FRANKFURT) };
        let gateway = Subject { holds: holds(Role::Gateway), ..Subject::named(GATEWAY) };
        let served = door(End::door().with(&ours, &region, &ours)).await;
        let edge = edge(End::gateway().with(&ours, &gateway, &ours));
        assert!(!is_resumed(&connects(&edge, served.address).await.unwrap()));
        assert!(is_resumed(&connects(&edge, served.address).await.unwrap()));
        until("a certificate expires", async || connects(&edge, served.address).await.is_err()).await;
        let told = if short == Role::Region { edge.outward().failures() } else { &*served.failures };
        assert_eq!(causes(told)[0], "not_valid_now", "{short:?}");
    }
}

/// The session was begun with a certificate that has expired since, and the region has had a new one for long.
#[tokio::test]
async fn a_session_of_an_old_certificate_does_not_keep_anybody_from_the_new_one() {
    let ours = Authority::new();
    let (files, short) = (End::door(), Duration::from_secs(5));
    let credentials = files.with(&ours, &Subject { holds: short, ..Subject::named(FRANKFURT) }, &ours);
    tokio::spawn(credentials.clone().follow());
    let served = door(credentials).await;
    let edge = edge(End::gateway().with(&ours, &Subject::named(GATEWAY), &ours));
    connects(&edge, served.address).await.unwrap();
    files.with(&ours, &Subject::named(FRANKFURT), &ours);
    until("the old certificate is not taken any more", async || {
        !is_resumed(&connects(&edge, served.address).await.unwrap())
    })
    .await;
    assert_eq!(causes(edge.outward().failures()), [""; 0], "and nobody noticed");
}

#[tokio::test]
async fn a_new_authority_and_new_certificates_are_taken_while_both_ends_run() {
    let (old, new) = (Authority::new(), Authority::new());
    let (door_files, edge_files) = (End::door(), End::gateway());
    let door_end = door_files.with(&old, &Subject::named(FRANKFURT), &old);
    let edge_end = edge_files.with(&old, &Subject::named(GATEWAY), &old);
    tokio::spawn(door_end.clone().follow());
    tokio::spawn(edge_end.clone().follow());
    let (served, edge) = (door(door_end).await, edge(edge_end));
    let works = async || connects(&edge, served.address).await.is_ok();
    assert!(works().await);
    edge_files.with(&old, &Subject::named(GATEWAY), &new);
    until("the edge believes the new authority alone", async || !works().await).await;
    door_files.with(&new, &Subject::named(FRANKFURT), &old);
    until("the door shows its new certificate", works).await;
    door_files.with(&new, &Subject::named(FRANKFURT), &new);
    until("the door believes the new authority alone", async || !works().await).await;
    edge_files.with(&new, &Subject::named(GATEWAY), &new);
    until("the edge shows its new certificate", works).await;
}

#[test]
fn files_that_are_wrong_are_told_by_name_and_all_at_once() {
    let (dir, ours) = (tempfile::tempdir().unwrap(), Authority::new());
    let catalogue = Arc::new(Catalogue::builtin());
    let check = |files: [PathBuf; 3], words: &[&str]| {
        let [certificate, key, ca] = files;
        let region = "aws/eu-central-1".parse().unwrap();
        let read = Credentials::of_region(Files { certificate, key, ca }, &region, &catalogue);
        let problems = read.err().unwrap_or_default();
        assert_eq!(problems.len(), words.len(), "{problems:#?}");
        for (problem, word) in problems.iter().zip(words) {
            assert!(problem.contains(word), "'{word}' in {problem}");
        }
    };
    let path = |name: &str| dir.path().join(name);
    let good = ours.write(dir.path(), "good", &Subject::named(FRANKFURT));
    check(good.clone(), &[]);
    check([path("no.crt"), path("no.key"), path("no.ca")], &["tls.certificate", "tls.key", "tls.client_ca"]);
    let [certificate, key, _] = good.clone();
    check([certificate, key.clone(), key], &["no certificate"]);
    for wrong in
        [GATEWAY, "spiffe://m/region/aws/us-east-1/in/us-va", "spiffe://m/region/aws/eu-central-1/in/us"]
    {
        let wanted = "its one URI has to be spiffe://TRUST-DOMAIN/region/aws/eu-central-1/in/de";
        check(ours.write(dir.path(), "wrong", &Subject::named(wrong)), &[wanted]);
    }
}
