//! Peers that stop in the middle of opening a connection, at a listener with short limits.

#[path = "../../../gateway/tests/sockets/hop/authority.rs"]
mod authority;

use super::*;
use crate::client::TlsClient;
use crate::process::{IdentityFiles, OwnName, ProcessIdentity};
use crate::verify::{AcceptedPeers, ExpectedPeer};
use authority::{Authority, Subject};
use regions::catalogue::Catalogue;
use regions::spiffe::Role;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

const REGION: &str = "aws/eu-central-1";
const LIMIT: Duration = Duration::from_millis(300);
/// Longer than any expected step takes on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(20);
/// First bytes of a ClientHello of 512 bytes.
const PART_OF_A_HELLO: [u8; 12] = [22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 7];

fn identity_of(authority: &Authority, role: Role) -> Arc<ProcessIdentity> {
    let dir = tempfile::tempdir().unwrap();
    let uri = format!("spiffe://m.example/{role}/{REGION}/in/de");
    let [certificate, key, authorities] = authority.write(dir.path(), "own", &Subject::named(&uri));
    let files = IdentityFiles { certificate, key, authorities, revoked: None };
    let name = OwnName { roles: &Role::ALL, region: None };
    let catalogue = Arc::new(Catalogue::builtin());
    Arc::new(ProcessIdentity::load(files, &name, Some(&catalogue)).unwrap())
}

/// Listener whose server returns every byte.
struct EchoServer {
    address: SocketAddr,
    failures: Arc<ConnectionFailures>,
    spoke: TlsClient,
    _tasks: JoinSet<()>,
}

impl EchoServer {
    async fn start(limits: OpeningLimits) -> EchoServer {
        let authority = Authority::new();
        let accepted = AcceptedPeers { roles: &[], same_region: &[Role::Spoke] };
        let tls = ServerTls::new(&identity_of(&authority, Role::Replica), accepted, &[]).unwrap();
        EchoServer::with(&authority, Some(tls), limits).await
    }

    async fn start_plaintext(limits: OpeningLimits) -> EchoServer {
        EchoServer::with(&Authority::new(), None, limits).await
    }

    async fn with(authority: &Authority, tls: Option<ServerTls>, limits: OpeningLimits) -> EchoServer {
        let failures: Arc<ConnectionFailures> = Arc::default();
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (mut listener, acceptor) = listen(socket, tls, 1024, failures.clone()).unwrap();
        let acceptor = PeerAcceptor { limits, ..acceptor };
        let mut tasks = JoinSet::new();
        let address = listener.address();
        tasks.spawn(acceptor.run());
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (mut stream, _) = listener.accept().await;
                connections.spawn(async move {
                    let mut byte = [0];
                    while stream.read_exact(&mut byte).await.is_ok() {
                        stream.write_all(&byte).await.ok();
                    }
                });
            }
        });
        let spoke = TlsClient::new(identity_of(authority, Role::Spoke), &[]).unwrap();
        EchoServer { address, failures, spoke, _tasks: tasks }
    }

    /// Opens a connection with a certificate.
    async fn connect(&self) -> impl AsyncRead + AsyncWrite + Unpin + use<> {
        let tcp = TcpStream::connect(self.address).await.unwrap();
        let expected = ExpectedPeer { role: Role::Replica, region: None };
        self.spoke.connect(expected, tcp).await.unwrap().stream
    }

    fn timed_out(&self) -> u64 {
        self.failures.counts.of(ConnectionFailureCause::TimedOut).get()
    }
}

async fn echoes(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> bool {
    let mut byte = [0];
    stream.write_all(b"x").await.is_ok() && stream.read_exact(&mut byte).await.is_ok()
}

/// Waits until the other end closes the connection.
async fn closed(mut stream: impl AsyncRead + Unpin) {
    let end = async { while matches!(stream.read(&mut [0; 64]).await, Ok(1..)) {} };
    timeout(TIMEOUT, end).await.expect("the connection is closed");
}

#[tokio::test]
async fn half_open_handshakes_are_closed_in_time_and_counted_and_delay_no_other_peer() {
    const PEERS: usize = 100;
    let limits = OpeningLimits { handshake: 4 * LIMIT, ..OpeningLimits::DEFAULT };
    let server = EchoServer::start(limits).await;
    let begun = Instant::now();
    let mut silent = Vec::new();
    for number in 0..PEERS {
        let mut tcp = TcpStream::connect(server.address).await.unwrap();
        if number % 2 == 0 {
            tcp.write_all(&PART_OF_A_HELLO).await.unwrap();
        }
        silent.push(tcp);
    }
    assert!(echoes(&mut server.connect().await).await);
    assert_eq!(server.timed_out(), 0, "another peer is served before the first of them is closed");
    for tcp in silent {
        closed(tcp).await;
    }
    assert!(begun.elapsed() >= limits.handshake);
    assert_eq!(server.timed_out(), PEERS as u64);
    assert!(server.failures.counts.of(ConnectionFailureCause::Overloaded).get() == 0);
}

#[tokio::test]
async fn a_peer_that_sends_no_request_is_closed_and_counted_and_one_that_has_sent_one_may_be_quiet() {
    let limits = OpeningLimits { first_request: LIMIT, ..OpeningLimits::DEFAULT };
    let server = EchoServer::start(limits).await;
    let mut quiet = server.connect().await;
    assert!(echoes(&mut quiet).await);
    let begun = Instant::now();
    closed(server.connect().await).await;
    assert!(begun.elapsed() >= LIMIT, "its limit has passed, and that of the quiet peer");
    assert_eq!(server.timed_out(), 1);
    assert!(echoes(&mut quiet).await, "its next request arrives after the limit");
    assert_eq!(server.timed_out(), 1);
}

#[tokio::test]
async fn a_plaintext_peer_that_sends_no_request_is_closed_and_counted_and_one_that_has_sent_one_may_be_quiet()
{
    let limits = OpeningLimits { first_request: LIMIT, ..OpeningLimits::DEFAULT };
    let server = EchoServer::start_plaintext(limits).await;
    let mut quiet = TcpStream::connect(server.address).await.unwrap();
    assert!(echoes(&mut quiet).await);
    let begun = Instant::now();
    closed(TcpStream::connect(server.address).await.unwrap()).await;
    assert!(begun.elapsed() >= LIMIT, "its limit has passed, and that of the quiet peer");
    assert_eq!(server.timed_out(), 1);
    assert!(echoes(&mut quiet).await, "its next request arrives after the limit");
    drop(TcpStream::connect(server.address).await.unwrap());
    assert!(echoes(&mut TcpStream::connect(server.address).await.unwrap()).await);
    assert_eq!(server.timed_out(), 1, "a port check is not counted");
}

#[test]
fn the_addresses_of_persons_are_not_logged() {
    let address = IpAddr::from([10, 0, 0, 1]);
    let of = |id: &str| {
        let (id, serial) = (id.parse().unwrap(), "1f".parse().unwrap());
        ClientIdentity::Verified(PeerIdentity { id, region: None, serial, not_after: 0 }).logged(address)
    };
    assert_eq!(of("spiffe://m.example/spoke/aws/eu-central-1/in/de"), Some(address));
    assert_eq!(of("spiffe://m.example/operator/jane"), None);
    assert_eq!(of("spiffe://m.example/viewer/dashboard"), None);
    assert_eq!(ClientIdentity::Anonymous.logged(address), None);
    assert_eq!(ClientIdentity::Plaintext.logged(address), Some(address));
}

#[tokio::test]
async fn a_listener_of_persons_logs_no_address() {
    for (has_persons_only, expected) in [(false, Some(IpAddr::from([127, 0, 0, 1]))), (true, None)] {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (mut listener, acceptor) = listen(socket, None, 1, Arc::default()).unwrap();
        let acceptor = if has_persons_only { acceptor.of_persons() } else { acceptor };
        let mut tasks = JoinSet::new();
        tasks.spawn(acceptor.run());
        let _peer = TcpStream::connect(listener.address()).await.unwrap();
        let (stream, _) = listener.accept().await;
        assert_eq!(stream.silent.unwrap().address, expected);
    }
}
