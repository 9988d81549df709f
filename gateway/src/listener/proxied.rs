//! Connections that a load balancer forwards: the header of the PROXY protocol, before TLS or HTTP.
//!
//! [`gateway_core::proxy_header`] parses it. Exactly its bytes are read, within the timeout of a head.

use gateway_core::proxy_header::{
    PREFIX_BYTES, ProxiedPeer, ProxyHeaderError, check_beginning, parse, remaining_bytes,
};
use pingora::protocols::l4::stream::Stream;
use pingora::protocols::{GetSocketDigest, SocketDigest};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use tokio::io::AsyncReadExt;

/// Error of the beginning of a connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProxiedError {
    #[error("{0}")]
    Header(#[from] ProxyHeaderError),
    /// A connection ended or failed before the load balancer's header was complete.
    #[error("the connection ended within the PROXY protocol header: {0}")]
    Io(#[from] io::Error),
}

/// Reads the header; `None` if the connection ends before it, as that of a health check does.
pub(super) async fn read_origin(stream: &mut Stream) -> Result<Option<ProxiedPeer>, ProxiedError> {
    let (mut prefix, mut filled) = ([0; PREFIX_BYTES], 0);
    while filled < PREFIX_BYTES {
        match stream.read(&mut prefix[filled..]).await? {
            0 if filled == 0 => return Ok(None),
            0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            read => filled += read,
        }
        check_beginning(&prefix[..filled])?;
    }
    let mut rest = vec![0; remaining_bytes(&prefix)?];
    stream.read_exact(&mut rest).await?;
    Ok(Some(parse(&prefix, &rest)?))
}

/// Makes `client` the peer of a connection, for all that reads its address.
pub(super) fn set_peer(stream: &mut Stream, client: SocketAddr) {
    let digest = SocketDigest::from_raw_fd(stream.as_raw_fd());
    digest.peer_addr.set(Some(client.into())).expect("the cell is new");
    stream.set_socket_digest(digest);
}

#[cfg(test)]
mod tests {
    use super::super::admission::AddressLimits;
    use super::super::{AfterResponse, Listener, RequestHandler, StopReason};
    use crate::config::Timeouts;
    use crate::metrics::{CloseReason, ListenerMetrics};
    use crate::respond;
    use identity::{ConnectionFailureCause, ConnectionFailures};
    use pingora::protocols::http::ServerSession;
    use regions::IpNetwork;
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    const SIGNATURE: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";
    const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";

    /// Handler that responds with the address of the client.
    struct Echo;

    impl RequestHandler for Echo {
        async fn handle(&self, session: &mut ServerSession) -> AfterResponse {
            let client = session.client_addr().map(ToString::to_string).unwrap_or_default();
            respond::ok(session, client.into_bytes(), &[]).await
        }
    }

    struct Served {
        address: SocketAddr,
        refused: Arc<ConnectionFailures>,
        metrics: Arc<ListenerMetrics>,
        task: tokio::task::JoinHandle<()>,
    }

    /// Serves connections of load balancers in this network, of which a client may have two.
    async fn serve(network: &str) -> Served {
        let network: IpNetwork = network.parse().unwrap();
        let refused: Arc<ConnectionFailures> = Arc::default();
        let listener = Listener::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let limits = AddressLimits { connections: 2, half_open: 2, exempt: Vec::new() };
        let listener = listener.with_proxy_protocol(vec![network]).with_address_limits(limits);
        let listener = listener.with_failure_counters(refused.clone());
        let (address, metrics) = (listener.address(), listener.metrics());
        let timeouts = Timeouts { head: Duration::from_millis(500), ..Timeouts::default() };
        let stop = std::future::pending::<StopReason>();
        let task = tokio::spawn(listener.serve(Arc::new(Echo), stop, timeouts));
        Served { address, refused, metrics, task }
    }

    impl Drop for Served {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    impl Served {
        /// Sends these bytes and a request, and returns what is received until the connection ends.
        async fn send(&self, beginning: &[u8]) -> String {
            let mut stream = TcpStream::connect(self.address).await.unwrap();
            stream.write_all(&[beginning, REQUEST].concat()).await.ok();
            let mut received = Vec::new();
            stream.read_to_end(&mut received).await.ok();
            String::from_utf8(received).unwrap()
        }

        fn refused(&self, cause: ConnectionFailureCause) -> u64 {
            self.refused.counts.of(cause).get()
        }
    }

    fn header(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let length = u16::try_from(rest.len()).unwrap().to_be_bytes();
        [SIGNATURE, &[command, family], &length, rest].concat()
    }

    fn client(last: u8) -> Vec<u8> {
        header(0x21, 0x11, &[203, 0, 113, last, 10, 0, 0, 1, 0x1f, 0x90, 1, 187])
    }

    #[tokio::test]
    async fn the_client_of_the_header_is_the_peer_and_a_health_check_is_served() {
        let served = serve("127.0.0.0/8").await;
        let response = served.send(&client(7)).await;
        assert!(
            response.starts_with("HTTP/1.1 200 ") && response.ends_with("\r\n203.0.113.7:8080"),
            "{response}"
        );
        let six = [&[0x20, 1, 0xd, 0xb8][..], &[0; 11], &[7], &[0; 16], &[0x1f, 0x90, 1, 187]].concat();
        let response = served.send(&header(0x21, 0x21, &six)).await;
        assert!(response.ends_with("\r\n[2001:db8::7]:8080"), "{response}");
        let response = served.send(&header(0x20, 0, &[])).await;
        assert!(response.starts_with("HTTP/1.1 200 ") && response.contains("\r\n127.0.0.1:"), "{response}");
        // A health check that only connects.
        drop(TcpStream::connect(served.address).await.unwrap());
        assert_eq!(served.refused(ConnectionFailureCause::ProxyHeader), 0);
    }

    #[tokio::test]
    async fn connections_without_a_valid_header_are_closed_and_counted() {
        let served = serve("127.0.0.1").await;
        let long = [SIGNATURE, &[0x21, 0x11, 0xff, 0xff]].concat();
        let beginnings: [&[u8]; 4] =
            [b"", b"PROXY TCP4 203.0.113.7 10.0.0.1 8080 443\r\n", &header(0x21, 0x13, &[0; 12]), &long];
        for (at, beginning) in beginnings.iter().enumerate() {
            let response = served.send(beginning).await;
            assert_eq!(response, "", "{beginning:?}");
            assert_eq!(served.refused(ConnectionFailureCause::ProxyHeader), at as u64 + 1, "{beginning:?}");
        }
        let mut truncated = TcpStream::connect(served.address).await.unwrap();
        truncated.write_all(&client(7)[..20]).await.unwrap();
        truncated.shutdown().await.unwrap();
        assert_eq!(truncated.read(&mut [0; 1]).await.unwrap_or(0), 0);
        assert_eq!(served.refused(ConnectionFailureCause::ProxyHeader), 5);
        // The rest of the header never arrives.
        let mut slow = TcpStream::connect(served.address).await.unwrap();
        slow.write_all(SIGNATURE).await.unwrap();
        assert_eq!(slow.read(&mut [0; 1]).await.unwrap_or(0), 0);
        assert_eq!(served.refused(ConnectionFailureCause::ProxyHeader), 6);
        assert!(served.send(&client(7)).await.starts_with("HTTP/1.1 200 "), "others are served");
    }

    #[tokio::test]
    async fn a_peer_that_is_not_a_load_balancer_is_rejected_with_and_without_a_header() {
        let served = serve("10.0.0.0/8").await;
        for (at, beginning) in [client(7), Vec::new()].iter().enumerate() {
            assert_eq!(served.send(beginning).await, "");
            assert_eq!(served.refused(ConnectionFailureCause::ProxyUntrusted), at as u64 + 1);
        }
    }

    #[tokio::test]
    async fn the_limits_per_address_apply_to_the_client_and_not_to_the_load_balancer() {
        let served = serve("127.0.0.1").await;
        let open = async |last| {
            let mut stream = TcpStream::connect(served.address).await.unwrap();
            let request = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";
            stream.write_all(&[&client(last)[..], request].concat()).await.unwrap();
            let read = stream.read(&mut [0; 512]).await.unwrap_or(0);
            (stream, read > 0)
        };
        let mut kept = Vec::new();
        for last in 1..=5 {
            for _ in 0..2 {
                let (stream, is_served) = open(last).await;
                assert!(is_served, "client {last}");
                kept.push(stream);
            }
        }
        assert!(!open(1).await.1, "one past the limit");
        assert_eq!(served.metrics.closed.of(CloseReason::AddressLimit).get(), 1);
    }
}
