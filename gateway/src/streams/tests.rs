//! An edge's end against a server that does as each test says, over loopback and in the clear.

use super::*;
use crate::hop::Regions;
use crate::upstream::UpstreamMethod;
use gateway_core::multiplex::{CLOSE_AFTER, REQUESTS_BEFORE_OPENING};
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{Request, Response};
use regions::set::RegionIndex;
use std::net::SocketAddr;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Longer than anything takes that is meant to happen.
const PATIENCE: Duration = Duration::from_secs(20);
const BODY: Bytes = Bytes::from_static(b"{\"input\":\"x\"}");

/// What a connection of the server does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Serves,
    /// It says that it takes nothing new.
    Leaves,
    /// It neither reads nor writes.
    Freezes,
    /// It is cut.
    Dies,
}

/// A request as the server has it.
struct Came {
    connection: usize,
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
}

struct Server {
    address: SocketAddr,
    came: mpsc::UnboundedReceiver<Came>,
    connections: Arc<Mutex<Vec<watch::Sender<Does>>>>,
}

impl Server {
    async fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (to_test, came) = mpsc::unbounded_channel();
        let connections: Arc<Mutex<Vec<watch::Sender<Does>>>> = Arc::default();
        let accepted = connections.clone();
        tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let mut accepted = accepted.lock();
                tokio::spawn(serve(tcp, accepted.len(), to_test.clone(), {
                    let (told, does) = watch::channel(Does::Serves);
                    accepted.push(told);
                    does
                }));
            }
        });
        Server { address, came, connections }
    }

    async fn next(&mut self) -> Came {
        tokio::time::timeout(PATIENCE, self.came.recv()).await.expect("a request comes").unwrap()
    }

    fn tell(&self, connection: usize, does: Does) {
        self.connections.lock()[connection].send_replace(does);
    }

    fn accepted(&self) -> usize {
        self.connections.lock().len()
    }
}

async fn serve(
    tcp: TcpStream,
    number: usize,
    to_test: mpsc::UnboundedSender<Came>,
    mut does: watch::Receiver<Does>,
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
            Ok(()) = does.changed() => match *does.borrow_and_update() {
                Does::Serves => {}
                Does::Leaves => connection.graceful_shutdown(),
                Does::Freezes => break,
                Does::Dies => return,
            },
            accepted = connection.accept() => {
                let Some(Ok((request, respond))) = accepted else { return };
                to_test.send(Came { connection: number, request, respond }).ok();
            }
        }
    }
    std::future::pending::<()>().await;
}

impl Came {
    fn answer(mut self, body: Bytes) {
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

struct Edge {
    streams: Streams,
    plain: Arc<Plain>,
}

fn edge() -> Arc<Edge> {
    let outward = Arc::new(Outward::to_regions(&Regions::InTheClear, true).unwrap());
    Arc::new(Edge { streams: Streams::over(outward.clone()), plain: Arc::new(Plain::over(outward)) })
}

impl Edge {
    async fn open(&self, address: SocketAddr) -> Result<Stream, AttemptFailure> {
        let way = Way { region: RegionIndex::new(0).expect("a number"), address };
        match self.streams.open(way, PATIENCE, &self.plain).await? {
            Opened::Stream(stream) => Ok(stream),
            Opened::Plain => panic!("in the clear nobody can choose HTTP/1.1"),
        }
    }

    async fn ask(&self, address: SocketAddr, body: Bytes) -> Result<(Parts, Rest), AttemptFailure> {
        let mut head = RequestHead::new(UpstreamMethod::Post).for_path("/v1/embeddings");
        head.put("host", "region");
        head.put("content-length", body.len().to_string());
        self.open(address).await?.ask(&head, body).await
    }

    /// What it is answered, and the body of that.
    async fn whole(&self, address: SocketAddr, body: Bytes) -> Result<usize, AttemptFailure> {
        let (_, mut rest) = self.ask(address, body).await?;
        let mut read = 0;
        while let Some(chunk) = rest.chunk().await.map_err(|_| AttemptFailure::Unreachable)? {
            read += chunk.len();
        }
        Ok(read)
    }

    /// A request that is under way, in a task of its own.
    fn asks(self: &Arc<Edge>, address: SocketAddr) -> tokio::task::JoinHandle<Result<usize, AttemptFailure>> {
        let edge = self.clone();
        tokio::spawn(async move { edge.whole(address, BODY).await })
    }
}

/// An edge that has been answered once, so that its connection has worked.
async fn after_one_answer(server: &mut Server) -> Arc<Edge> {
    let edge = edge();
    let asked = edge.asks(server.address);
    server.next().await.answer(BODY);
    assert_eq!(asked.await.unwrap(), Ok(BODY.len()));
    edge
}

#[tokio::test]
async fn requests_share_a_connection_until_it_has_more_than_is_easy() {
    let mut server = Server::start().await;
    let edge = after_one_answer(&mut server).await;
    let mut asked = Vec::new();
    for number in 0..REQUESTS_BEFORE_OPENING {
        asked.push(edge.asks(server.address));
        let came = server.next().await;
        assert_eq!((came.connection, number < REQUESTS_BEFORE_OPENING), (0, true));
        tokio::spawn(async move {
            std::future::pending::<()>().await;
            drop(came);
        });
    }
    assert_eq!((server.accepted(), edge.streams.size()), (1, (1, REQUESTS_BEFORE_OPENING)));
    // One more is not held up by the connection that is opened for those who come next.
    asked.push(edge.asks(server.address));
    server.next().await.answer(BODY);
    while edge.streams.size().0 < 2 {
        tokio::task::yield_now().await;
    }
    asked.push(edge.asks(server.address));
    assert_eq!(server.next().await.connection, 1);
    asked.iter().for_each(|task| task.abort());
}

#[tokio::test]
async fn many_who_come_at_once_wait_for_one_connection() {
    let mut server = Server::start().await;
    let edge = edge();
    let asked: Vec<_> = (0..REQUESTS_BEFORE_OPENING).map(|_| edge.asks(server.address)).collect();
    for _ in 0..REQUESTS_BEFORE_OPENING {
        server.next().await.answer(BODY);
    }
    for one in asked {
        assert_eq!(one.await.unwrap(), Ok(BODY.len()));
    }
    assert_eq!((server.accepted(), edge.streams.size()), (1, (1, 0)));
}

#[tokio::test]
async fn who_gives_a_request_up_tells_the_region_and_nobody_else_notices() {
    let mut server = Server::start().await;
    let edge = after_one_answer(&mut server).await;
    let given_up = edge.asks(server.address);
    let mut gone = server.next().await;
    let stays = edge.asks(server.address);
    let other = server.next().await;
    given_up.abort();
    let reset = std::future::poll_fn(|context| gone.respond.poll_reset(context));
    assert_eq!(tokio::time::timeout(PATIENCE, reset).await.expect("it is told").unwrap(), Reason::CANCEL);
    other.answer(BODY);
    assert_eq!(stays.await.unwrap(), Ok(BODY.len()));
    assert_eq!((server.accepted(), edge.streams.size()), (1, (1, 0)));
}

/// A gateway that reset every answer which it has read would be taken for one that floods.
#[tokio::test]
async fn an_answer_is_read_to_its_end_and_not_given_up_before() {
    let mut server = Server::start().await;
    let edge = after_one_answer(&mut server).await;
    let (asking, address) = (edge.clone(), server.address);
    let asked = tokio::spawn(async move {
        let (_, mut rest) = asking.ask(address, BODY).await?;
        rest.whole(BODY.len()).await.map_err(|_| AttemptFailure::Unreachable)
    });
    let mut came = server.next().await;
    let mut stream = came.respond.send_response(Response::new(()), false).unwrap();
    stream.send_data(BODY, false).unwrap();
    let reset = std::future::poll_fn(|context| stream.poll_reset(context));
    assert!(tokio::time::timeout(Duration::from_millis(100), reset).await.is_err(), "it waits for the end");
    assert!(!asked.is_finished());
    stream.send_data(Bytes::new(), true).unwrap();
    assert_eq!(asked.await.unwrap(), Ok(BODY));
}

#[tokio::test]
async fn a_region_that_leaves_finishes_what_it_has_and_gets_nothing_new() {
    let mut server = Server::start().await;
    let edge = after_one_answer(&mut server).await;
    let asked = edge.asks(server.address);
    let under_way = server.next().await;
    server.tell(0, Does::Leaves);
    // Once the edge has heard it, it goes elsewhere; before, it is still served there.
    while server.accepted() == 1 {
        let more = edge.asks(server.address);
        server.next().await.answer(BODY);
        assert_eq!(more.await.unwrap(), Ok(BODY.len()));
    }
    under_way.answer(BODY);
    assert_eq!(asked.await.unwrap(), Ok(BODY.len()));
}

#[tokio::test]
async fn what_was_under_way_on_a_connection_that_worked_is_stale_and_on_a_new_one_not() {
    let mut server = Server::start().await;
    let edge = edge();
    let asked = edge.asks(server.address);
    server.next().await;
    server.tell(0, Does::Dies);
    assert_eq!(asked.await.unwrap(), Err(AttemptFailure::Unreachable), "it has never worked");

    let edge = after_one_answer(&mut server).await;
    let asked = edge.asks(server.address);
    let came = server.next().await;
    server.tell(came.connection, Does::Dies);
    assert_eq!(asked.await.unwrap(), Err(AttemptFailure::StaleConnection));
    let asked = edge.asks(server.address);
    server.next().await.answer(BODY);
    assert_eq!(asked.await.unwrap(), Ok(BODY.len()), "there is another");

    for (reason, failure) in [
        (Reason::REFUSED_STREAM, AttemptFailure::StaleConnection),
        (Reason::INTERNAL_ERROR, AttemptFailure::Unreachable),
        (Reason::CANCEL, AttemptFailure::Unreachable),
    ] {
        let asked = edge.asks(server.address);
        server.next().await.respond.send_reset(reason);
        assert_eq!(asked.await.unwrap(), Err(failure), "{reason}");
    }
}

#[tokio::test]
async fn where_nobody_listens_everybody_who_waits_is_told() {
    let edge = edge();
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let asked: Vec<_> = (0..3).map(|_| edge.asks(nobody)).collect();
    for one in asked {
        assert_eq!(one.await.unwrap(), Err(AttemptFailure::Unreachable));
    }
}

#[tokio::test]
async fn the_largest_bodies_go_through_in_both_directions() {
    let mut server = Server::start().await;
    let edge = edge();
    let (inward, outward) = (Bytes::from(vec![b'i'; 32 << 20]), Bytes::from(vec![b'o'; 64 << 20]));
    let (address, length) = (server.address, inward.len());
    let asked = tokio::spawn(async move { edge.whole(address, inward).await });
    let mut came = server.next().await;
    assert_eq!(came.read().await, length);
    came.answer(outward.clone());
    assert_eq!(asked.await.unwrap(), Ok(outward.len()));
}

/// As many as a connection has easily, of which all but one do not read what they asked for.
#[tokio::test]
async fn clients_that_do_not_read_hold_up_nobody_else() {
    const LARGE: usize = 8 << 20;
    let mut server = Server::start().await;
    let edge = after_one_answer(&mut server).await;
    let mut unread = Vec::new();
    for _ in 1..REQUESTS_BEFORE_OPENING {
        let (asking, address) = (edge.clone(), server.address);
        let asked = tokio::spawn(async move { asking.ask(address, BODY).await });
        let came = server.next().await;
        came.answer(Bytes::from(vec![b' '; LARGE]));
        unread.push(asked.await.unwrap().map(|(_, rest)| rest).map_err(|failure| panic!("{failure:?}")));
    }
    let asked = edge.asks(server.address);
    let came = server.next().await;
    assert_eq!(came.connection, 0);
    came.answer(Bytes::from(vec![b' '; LARGE]));
    assert_eq!(tokio::time::timeout(PATIENCE, asked).await.expect("it is read").unwrap(), Ok(LARGE));
    assert_eq!(unread.len(), REQUESTS_BEFORE_OPENING - 1);
}

/// What a link does that was cut without a word: requests go elsewhere long before the connection is given up.
#[tokio::test]
async fn a_connection_that_says_nothing_gets_nothing_more_and_is_given_up_in_the_end() {
    let mut server = Server::start().await;
    let edge = after_one_answer(&mut server).await;
    let stuck = edge.asks(server.address);
    server.next().await;
    let frozen = Instant::now();
    server.tell(0, Does::Freezes);
    // Those who come meanwhile may be stuck as well, until it is silent; then there is another connection.
    let mut others = Vec::new();
    let came = loop {
        others.push(edge.asks(server.address));
        if let Ok(came) = tokio::time::timeout(Duration::from_millis(20), server.came.recv()).await {
            break came.unwrap();
        }
    };
    assert_eq!((came.connection, frozen.elapsed() < CLOSE_AFTER), (1, true), "{:?}", frozen.elapsed());
    came.answer(BODY);
    assert_eq!(
        tokio::time::timeout(PATIENCE, stuck).await.expect("it is given up").unwrap(),
        Err(AttemptFailure::StaleConnection)
    );
    assert!(frozen.elapsed() >= CLOSE_AFTER, "not before its time: {:?}", frozen.elapsed());
    others.iter().for_each(|task| task.abort());
}
