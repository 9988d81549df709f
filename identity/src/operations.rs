//! Server of an operations port: plaintext HTTP/1 for probes, scrapes and operators, without authentication.
//!
//! A connection has one request, and is closed after the response, which tells the client so (`connection: close`). So one
//! deadline of the connection limits all that a peer can delay: the rest of a request, and reading the response. With
//! persistent connections, each of these needed a timer, and one more the time between two scrapes, in which a client must
//! not begin a request on a connection that is being closed. A new connection for each scrape costs a round trip.
//!
//! [`crate::listener`] limits and counts the connections. `axum::serve` is not used, because it has no timeout for a
//! request head.

use crate::cause::ConnectionFailureCause;
use crate::events::{ConnectionFailures, ConnectionRejected};
use crate::listener;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use supervision::task::contained;
use tokio::net::TcpListener;
use tokio::time::timeout;

/// Maximum number of bytes of a request head: more than a search for requests has with all its filters.
const HEAD_BYTES_MAX: usize = 16 << 10;

/// Limits of the connections of an operations port.
#[derive(Clone, Copy, Debug)]
pub struct OperationsLimits {
    /// Maximum number of open connections. Others are closed at once.
    pub connections: usize,
    /// Maximum time from the connection to the complete head of its request.
    pub head: Duration,
    /// Maximum time of a connection: of its request, and of the response until the client has received it.
    pub connection: Duration,
}

impl OperationsLimits {
    /// Limits of an operations port. A few clients scrape and probe a process, with a connection of some milliseconds each, so
    /// they never need 256. Those take as many file descriptors, of the 1,024 that a process has by default, and 4 MB for
    /// heads. A head has the time that a gateway gives its clients. The slowest response is that of a search for
    /// requests, which ends after 4 s, and Prometheus waits 10 s for a scrape by default.
    pub const DEFAULT: OperationsLimits = OperationsLimits {
        connections: 256,
        head: Duration::from_secs(10),
        connection: Duration::from_secs(30),
    };
}

/// Serves an operations port for ever. Connections that reach a limit are closed and counted in `failures`.
///
/// # Errors
///
/// If the socket has no address.
pub async fn serve(
    socket: TcpListener,
    router: Router,
    limits: OperationsLimits,
    failures: Arc<ConnectionFailures>,
) -> io::Result<()> {
    let (mut listener, acceptor) = listener::listen(socket, None, limits.connections, failures.clone())?;
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(limits.head);
    server.max_buf_size(HEAD_BYTES_MAX).keep_alive(false);
    let serving = async {
        loop {
            let (stream, _) = listener.accept().await;
            let service = TowerToHyperService::new(router.clone());
            let connection = server.serve_connection(TokioIo::new(stream), service);
            let connection = until_closed(connection, limits, failures.clone());
            // It ends within its limits, also if this task ends before.
            tokio::spawn(contained("operations connection", connection));
        }
    };
    // In this order, so that no accepted connection waits here when a gateway ends this task, because the next process has
    // taken the port over.
    tokio::select! {
        biased;
        // Clients may be operators, whose addresses are personal data.
        () = acceptor.of_persons().run() => {}
        () = serving => {}
    }
    Ok(())
}

/// Runs a connection until its end or a limit.
async fn until_closed(
    connection: impl Future<Output = hyper::Result<()>>,
    limits: OperationsLimits,
    failures: Arc<ConnectionFailures>,
) {
    let reason = match timeout(limits.connection, connection).await {
        Ok(Err(error)) if error.is_timeout() => {
            format!("no complete request head within {:?}", limits.head)
        }
        Ok(_) => return,
        Err(_) => format!("no complete request and response within {:?}", limits.connection),
    };
    let cause = ConnectionFailureCause::TimedOut;
    ConnectionRejected { cause, peer: None, reason: &reason }.record(&failures);
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::net::SocketAddr;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::task::JoinSet;
    use tokio::time::Instant;

    const LIMIT: Duration = Duration::from_millis(500);
    /// Longer than any expected step takes on a loaded machine.
    const LONG: Duration = Duration::from_secs(60);
    /// Bytes of a response that the buffers of both ends do not hold.
    const LARGE: usize = 64 << 20;

    struct OperationsServer {
        address: SocketAddr,
        failures: Arc<ConnectionFailures>,
        _task: JoinSet<io::Result<()>>,
    }

    impl OperationsServer {
        async fn start(limits: OperationsLimits) -> OperationsServer {
            let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let (address, failures) = (socket.local_addr().unwrap(), Arc::<ConnectionFailures>::default());
            let router = Router::new()
                .route("/livez", get(async || "alive"))
                .route("/large", get(async || vec![b'x'; LARGE]));
            let mut task = JoinSet::new();
            task.spawn(serve(socket, router, limits, failures.clone()));
            OperationsServer { address, failures, _task: task }
        }

        /// Opens a connection, and sends bytes.
        async fn send(&self, bytes: &str) -> TcpStream {
            let mut stream = TcpStream::connect(self.address).await.unwrap();
            stream.write_all(bytes.as_bytes()).await.unwrap();
            stream
        }

        async fn get(&self, path: &str) -> String {
            received(self.send(&format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await).await
        }

        fn count(&self, cause: ConnectionFailureCause) -> u64 {
            self.failures.counts.of(cause).get()
        }

        async fn until_timed_out(&self, count: u64) {
            let counted = async {
                while self.count(ConnectionFailureCause::TimedOut) < count {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            timeout(LONG, counted).await.unwrap();
        }
    }

    /// Reads until the server closes the connection, which need not be orderly.
    async fn received(mut stream: TcpStream) -> String {
        let mut bytes = Vec::new();
        timeout(LONG, stream.read_to_end(&mut bytes)).await.expect("the connection is closed").ok();
        String::from_utf8(bytes).unwrap()
    }

    #[tokio::test]
    async fn a_response_ends_its_connection_and_tells_the_client_so() {
        let server = OperationsServer::start(OperationsLimits::DEFAULT).await;
        let response = server.get("/livez").await;
        assert!(response.starts_with("HTTP/1.1 200 ") && response.ends_with("\r\n\r\nalive"), "{response}");
        assert!(response.contains("\r\nconnection: close\r\n"), "{response}");
        assert_eq!(server.get("/large").await.len() / LARGE, 1);
        assert_eq!(server.count(ConnectionFailureCause::TimedOut), 0);
    }

    #[tokio::test]
    async fn connections_without_a_complete_head_are_closed_in_time_and_counted_and_delay_no_other_client() {
        const PEERS: usize = 50;
        let limits = OperationsLimits { head: LIMIT, connection: LONG, ..OperationsLimits::DEFAULT };
        let server = OperationsServer::start(limits).await;
        let begun = Instant::now();
        let mut half_open = Vec::new();
        for number in 0..PEERS {
            half_open.push(server.send(if number % 2 == 0 { "" } else { "GET /met" }).await);
        }
        assert!(server.get("/livez").await.ends_with("alive"));
        for stream in half_open {
            assert_eq!(received(stream).await, "");
        }
        assert!(begun.elapsed() >= LIMIT);
        server.until_timed_out(PEERS as u64).await;
    }

    #[tokio::test]
    async fn a_connection_whose_response_is_not_read_is_closed_in_time_and_counted() {
        let limits = OperationsLimits { connection: LIMIT, ..OperationsLimits::DEFAULT };
        let server = OperationsServer::start(limits).await;
        // A second request, which is never served, hides from the server whether the client is there.
        let requests = "GET /large HTTP/1.1\r\nhost: a\r\n\r\n".repeat(2);
        let slow = server.send(&requests).await;
        server.until_timed_out(1).await;
        assert!(received(slow).await.len() < LARGE, "the response is truncated");
    }

    #[tokio::test]
    async fn connections_beyond_the_limit_are_closed_and_counted_until_others_end() {
        let limits = OperationsLimits { connections: 2, head: LONG, ..OperationsLimits::DEFAULT };
        let server = OperationsServer::start(limits).await;
        let open = [server.send("GET /met").await, server.send("").await];
        assert_eq!(server.get("/livez").await, "");
        assert_eq!(server.count(ConnectionFailureCause::Overloaded), 1);
        drop(open);
        let served = async { while server.get("/livez").await.is_empty() {} };
        timeout(LONG, served).await.expect("a connection is accepted again");
    }
}
