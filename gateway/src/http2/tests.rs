//! The client against a server with the behaviour of each test, over plaintext loopback.

use super::*;
use crate::request_head::UpstreamMethod;
use gateway_core::multiplex::{CLOSE_AFTER, REQUESTS_BEFORE_OPENING};
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{Request, Response};
use identity::Transport;
use regions::catalogue::Catalogue;
use regions::set::RegionIndex;
use resolver::{DnsSection, Resolver};
use std::net::SocketAddr;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Longer than any expected step takes.
const TIMEOUT: Duration = Duration::from_secs(20);
const BODY: Bytes = Bytes::from_static(b"{\"input\":\"x\"}");

/// Behaviour of a server connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServerBehaviour {
    Serve,
    /// It sends GOAWAY.
    Drain,
    /// It neither reads nor writes.
    Freeze,
    /// It closes the connection.
    Close,
}

/// Request as received by the server.
struct ReceivedRequest {
    connection: usize,
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
}

struct Server {
    address: SocketAddr,
    requests: mpsc::UnboundedReceiver<ReceivedRequest>,
    connections: Arc<Mutex<Vec<watch::Sender<ServerBehaviour>>>>,
}

impl Server {
    async fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (to_test, requests) = mpsc::unbounded_channel();
        let connections: Arc<Mutex<Vec<watch::Sender<ServerBehaviour>>>> = Arc::default();
        let accepted = connections.clone();
        tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let mut accepted = accepted.lock();
                tokio::spawn(serve(tcp, accepted.len(), to_test.clone(), {
                    let (set_behaviour, behaviour) = watch::channel(ServerBehaviour::Serve);
                    accepted.push(set_behaviour);
                    behaviour
                }));
            }
        });
        Server { address, requests, connections }
    }

    async fn next(&mut self) -> ReceivedRequest {
        tokio::time::timeout(TIMEOUT, self.requests.recv()).await.expect("a request arrives").unwrap()
    }

    fn set(&self, connection: usize, behaviour: ServerBehaviour) {
        self.connections.lock()[connection].send_replace(behaviour);
    }

    fn accepted(&self) -> usize {
        self.connections.lock().len()
    }
}

async fn serve(
    tcp: TcpStream,
    number: usize,
    to_test: mpsc::UnboundedSender<ReceivedRequest>,
    mut behaviour: watch::Receiver<ServerBehaviour>,
) {
    let mut options = h2::server::Builder::new();
    options
        .max_concurrent_streams(1000)
        .initial_window_size(4 << 20)
        .initial_connection_window_size(32 << 20);
    let Ok(mut connection) = options.handshake::<_, Bytes>(tcp).await else { return };
    loop {
        tokio::select! {
            biased;
            Ok(()) = behaviour.changed() => match *behaviour.borrow_and_update() {
                ServerBehaviour::Serve => {}
                ServerBehaviour::Drain => connection.graceful_shutdown(),
                ServerBehaviour::Freeze => break,
                ServerBehaviour::Close => return,
            },
            accepted = connection.accept() => {
                let Some(Ok((request, respond))) = accepted else { return };
                to_test.send(ReceivedRequest { connection: number, request, respond }).ok();
            }
        }
    }
    std::future::pending::<()>().await;
}

impl ReceivedRequest {
    fn respond(mut self, body: Bytes) {
        let mut stream = self.respond.send_response(Response::new(()), false).unwrap();
        stream.send_data(body, true).unwrap();
    }

    async fn read(&mut self) -> usize {
        let (body, mut read) = (self.request.body_mut(), 0);
        while let Some(chunk) = body.data().await {
            let chunk = chunk.unwrap();
            body.flow_control().release_capacity(chunk.len()).unwrap();
            read += chunk.len();
        }
        read
    }
}

struct TestClient {
    http2: Http2Client,
    http1: Arc<Http1Client>,
}

fn client() -> Arc<TestClient> {
    let connector = Arc::new(
        Connector::to_regions(
            &Transport::Plaintext,
            true,
            &Arc::new(Catalogue::builtin()),
            Resolver::new(&DnsSection::default()),
        )
        .unwrap(),
    );
    Arc::new(TestClient {
        http2: Http2Client::over(connector.clone()),
        http1: Arc::new(Http1Client::over(connector)),
    })
}

impl TestClient {
    async fn open(&self, address: SocketAddr) -> Result<Http2Stream, AttemptFailure> {
        let key = UpstreamKey { region: RegionIndex::new(0).expect("a number"), address: address.into() };
        match self.http2.open(&key, TIMEOUT, &self.http1).await? {
            Http2Slot::Stream(stream) => Ok(stream),
            Http2Slot::Http1 => panic!("plaintext has no negotiation of HTTP/1.1"),
        }
    }

    async fn send(&self, address: SocketAddr, body: Bytes) -> Result<(Parts, Http2Body), AttemptFailure> {
        let mut head = RequestHead::new(UpstreamMethod::Post).for_path("/v1/embeddings");
        head.put("host", "region");
        head.put("content-length", body.len().to_string());
        self.open(address).await?.send(&head, body).await
    }

    /// Sends a request and returns the length of the response body.
    async fn whole(&self, address: SocketAddr, body: Bytes) -> Result<usize, AttemptFailure> {
        let (_, mut rest) = self.send(address, body).await?;
        let mut read = 0;
        while let Some(chunk) = rest.chunk().await.map_err(|_| AttemptFailure::Unreachable)? {
            read += chunk.len();
        }
        Ok(read)
    }

    /// Sends a request in its own task.
    fn spawn_request(
        self: &Arc<TestClient>,
        address: SocketAddr,
    ) -> tokio::task::JoinHandle<Result<usize, AttemptFailure>> {
        let client = self.clone();
        tokio::spawn(async move { client.whole(address, BODY).await })
    }
}

/// Returns a client whose connection has received one response.
async fn after_one_response(server: &mut Server) -> Arc<TestClient> {
    let client = client();
    let sent = client.spawn_request(server.address);
    server.next().await.respond(BODY);
    assert_eq!(sent.await.unwrap(), Ok(BODY.len()));
    client
}

#[tokio::test]
async fn requests_share_a_connection_up_to_its_comfortable_load() {
    let mut server = Server::start().await;
    let client = after_one_response(&mut server).await;
    let mut sent = Vec::new();
    for number in 0..REQUESTS_BEFORE_OPENING {
        sent.push(client.spawn_request(server.address));
        let request = server.next().await;
        assert_eq!((request.connection, number < REQUESTS_BEFORE_OPENING), (0, true));
        tokio::spawn(async move {
            std::future::pending::<()>().await;
            drop(request);
        });
    }
    assert_eq!((server.accepted(), client.http2.size()), (1, (1, REQUESTS_BEFORE_OPENING)));
    // The next request behaviour not wait for the connection that is opened for later ones.
    sent.push(client.spawn_request(server.address));
    server.next().await.respond(BODY);
    while client.http2.size().0 < 2 {
        tokio::task::yield_now().await;
    }
    sent.push(client.spawn_request(server.address));
    assert_eq!(server.next().await.connection, 1);
    sent.iter().for_each(|task| task.abort());
}

#[tokio::test]
async fn concurrent_requests_wait_for_one_connection() {
    let mut server = Server::start().await;
    let client = client();
    let sent: Vec<_> = (0..REQUESTS_BEFORE_OPENING).map(|_| client.spawn_request(server.address)).collect();
    for _ in 0..REQUESTS_BEFORE_OPENING {
        server.next().await.respond(BODY);
    }
    for one in sent {
        assert_eq!(one.await.unwrap(), Ok(BODY.len()));
    }
    assert_eq!((server.accepted(), client.http2.size()), (1, (1, 0)));
}

#[tokio::test]
async fn cancelling_a_request_resets_its_stream_and_affects_no_other() {
    let mut server = Server::start().await;
    let client = after_one_response(&mut server).await;
    let cancelled = client.spawn_request(server.address);
    let mut received = server.next().await;
    let stays = client.spawn_request(server.address);
    let other = server.next().await;
    cancelled.abort();
    let reset = std::future::poll_fn(|context| received.respond.poll_reset(context));
    assert_eq!(tokio::time::timeout(TIMEOUT, reset).await.expect("a reset").unwrap(), Reason::CANCEL);
    other.respond(BODY);
    assert_eq!(stays.await.unwrap(), Ok(BODY.len()));
    assert_eq!((server.accepted(), client.http2.size()), (1, (1, 0)));
}

/// A gateway that reset every response after reading it would be considered flooding.
#[tokio::test]
async fn a_response_is_read_to_its_end_and_not_cancelled_before() {
    let mut server = Server::start().await;
    let client = after_one_response(&mut server).await;
    let (sender, address) = (client.clone(), server.address);
    let sent = tokio::spawn(async move {
        let (_, mut rest) = sender.send(address, BODY).await?;
        rest.whole(BODY.len()).await.map_err(|_| AttemptFailure::Unreachable)
    });
    let mut request = server.next().await;
    let mut stream = request.respond.send_response(Response::new(()), false).unwrap();
    stream.send_data(BODY, false).unwrap();
    let reset = std::future::poll_fn(|context| stream.poll_reset(context));
    assert!(
        tokio::time::timeout(Duration::from_millis(100), reset).await.is_err(),
        "the client waits for the end of the stream"
    );
    assert!(!sent.is_finished());
    stream.send_data(Bytes::new(), true).unwrap();
    assert_eq!(sent.await.unwrap(), Ok(BODY));
}

#[tokio::test]
async fn a_draining_connection_finishes_its_requests_and_gets_no_new_ones() {
    let mut server = Server::start().await;
    let client = after_one_response(&mut server).await;
    let sent = client.spawn_request(server.address);
    let in_flight = server.next().await;
    server.set(0, ServerBehaviour::Drain);
    // Requests sent before the client has received the GOAWAY are still served on the old connection.
    while server.accepted() == 1 {
        let more = client.spawn_request(server.address);
        server.next().await.respond(BODY);
        assert_eq!(more.await.unwrap(), Ok(BODY.len()));
    }
    in_flight.respond(BODY);
    assert_eq!(sent.await.unwrap(), Ok(BODY.len()));
}

#[tokio::test]
async fn requests_on_a_failed_connection_are_stale_if_it_had_worked_before() {
    let mut server = Server::start().await;
    let client = client();
    let sent = client.spawn_request(server.address);
    server.next().await;
    server.set(0, ServerBehaviour::Close);
    assert_eq!(sent.await.unwrap(), Err(AttemptFailure::Unreachable), "it has never responded");

    let client = after_one_response(&mut server).await;
    let sent = client.spawn_request(server.address);
    let request = server.next().await;
    server.set(request.connection, ServerBehaviour::Close);
    assert_eq!(sent.await.unwrap(), Err(AttemptFailure::StaleConnection));
    let sent = client.spawn_request(server.address);
    server.next().await.respond(BODY);
    assert_eq!(sent.await.unwrap(), Ok(BODY.len()), "another connection is opened");

    for (reason, failure) in [
        (Reason::REFUSED_STREAM, AttemptFailure::StaleConnection),
        (Reason::INTERNAL_ERROR, AttemptFailure::Unreachable),
        (Reason::CANCEL, AttemptFailure::Unreachable),
    ] {
        let sent = client.spawn_request(server.address);
        server.next().await.respond.send_reset(reason);
        assert_eq!(sent.await.unwrap(), Err(failure), "{reason}");
    }
}

#[tokio::test]
async fn all_waiting_requests_fail_when_the_port_is_closed() {
    let client = client();
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let sent: Vec<_> = (0..3).map(|_| client.spawn_request(closed)).collect();
    for one in sent {
        assert_eq!(one.await.unwrap(), Err(AttemptFailure::Unreachable));
    }
}

#[tokio::test]
async fn the_largest_bodies_are_sent_in_both_directions() {
    let mut server = Server::start().await;
    let client = client();
    let (request_body, response_body) =
        (Bytes::from(vec![b'i'; 32 << 20]), Bytes::from(vec![b'o'; 64 << 20]));
    let (address, length) = (server.address, request_body.len());
    let sent = tokio::spawn(async move { client.whole(address, request_body).await });
    let mut request = server.next().await;
    assert_eq!(request.read().await, length);
    request.respond(response_body.clone());
    assert_eq!(sent.await.unwrap(), Ok(response_body.len()));
}

/// As many requests as a connection comfortably has; all but one of their clients do not read.
#[tokio::test]
async fn clients_that_do_not_read_block_no_other() {
    const LARGE: usize = 8 << 20;
    let mut server = Server::start().await;
    let client = after_one_response(&mut server).await;
    let mut unread = Vec::new();
    for _ in 1..REQUESTS_BEFORE_OPENING {
        let (sender, address) = (client.clone(), server.address);
        let sent = tokio::spawn(async move { sender.send(address, BODY).await });
        let request = server.next().await;
        request.respond(Bytes::from(vec![b' '; LARGE]));
        unread.push(sent.await.unwrap().map(|(_, rest)| rest).map_err(|failure| panic!("{failure:?}")));
    }
    let sent = client.spawn_request(server.address);
    let request = server.next().await;
    assert_eq!(request.connection, 0);
    request.respond(Bytes::from(vec![b' '; LARGE]));
    assert_eq!(tokio::time::timeout(TIMEOUT, sent).await.expect("it is read").unwrap(), Ok(LARGE));
    assert_eq!(unread.len(), REQUESTS_BEFORE_OPENING - 1);
}

/// Behaviour of a link that was cut silently: requests use another connection long before this one times out.
#[tokio::test]
async fn an_unresponsive_connection_gets_no_new_requests_and_times_out() {
    let mut server = Server::start().await;
    let client = after_one_response(&mut server).await;
    let stuck = client.spawn_request(server.address);
    server.next().await;
    let frozen = Instant::now();
    server.set(0, ServerBehaviour::Freeze);
    // Requests sent meanwhile may be stuck as well, until the connection counts as unresponsive; then another is
    // opened.
    let mut others = Vec::new();
    let request = loop {
        others.push(client.spawn_request(server.address));
        if let Ok(request) = tokio::time::timeout(Duration::from_millis(20), server.requests.recv()).await {
            break request.unwrap();
        }
    };
    assert_eq!((request.connection, frozen.elapsed() < CLOSE_AFTER), (1, true), "{:?}", frozen.elapsed());
    request.respond(BODY);
    assert_eq!(
        tokio::time::timeout(TIMEOUT, stuck).await.expect("it times out").unwrap(),
        Err(AttemptFailure::StaleConnection)
    );
    assert!(frozen.elapsed() >= CLOSE_AFTER, "not before the timeout: {:?}", frozen.elapsed());
    others.iter().for_each(|task| task.abort());
}
