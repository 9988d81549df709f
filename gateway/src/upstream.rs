//! One attempt: a request to an address, and its response.
//!
//! Pingora's proxy replays a body of 64 KiB at most, gives an attempt one peer and cannot cancel it; a gateway that
//! moves a request of 32 MiB from a failing region to another needs both. So the exchange is our own, over HTTP/1.1
//! ([`crate::http1`]) or HTTP/2 ([`crate::http2`]): the complete body is kept and shared between attempts, and dropping
//! the future of an attempt cancels it.
//!
//! A small response is buffered completely before the client receives any of it. If the region fails in the middle, the
//! client has received nothing, and the request can be retried in another region. Only a large response is streamed; it
//! cannot be retried once it has begun.

use crate::hop::{Connector, UpstreamKey};
use crate::http1::{self, DuplexRequest, DuplexResponse, Http1Client};
use crate::http2::{self, Http2Client};
use crate::metrics::{Family, HopEvent};
use crate::request_head::RequestHead;
use bytes::Bytes;
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::{self, Peer, RegionConnection};
use http::header::CONTENT_LENGTH;
use http::response::Parts as Head;
use identity::ConnectionFailures;
use identity::Transport;
use regions::HostPort;
use regions::catalogue::Catalogue;
use resolver::{Resolver, ResolverMetrics};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum size of a buffered response: some 200 vectors of 384 numbers, as text.
pub(crate) const BUFFERED_RESPONSE_MAX: usize = 1 << 20;

/// Connect timeout of status requests. No client waits for them, and the round-trip time is measured from
/// when the connection is open.
const STATUS_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Client of the next hop.
pub(crate) struct Upstream {
    connector: Arc<Connector>,
    http1_client: Arc<Http1Client>,
    /// Present if HTTP/2 is enabled.
    http2_client: Option<Http2Client>,
}

/// Connection that is ready for a request.
enum UpstreamConnection<'a> {
    Http1(http1::Http1Connection<'a>),
    Http2(http2::Http2Stream),
}

/// Response body that is being received.
enum UpstreamBody {
    Http1(http1::Http1Body),
    Http2(http2::Http2Body),
}

/// Error while receiving a response body.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpstreamError {
    #[error("{0}")]
    Http1(#[from] http1::Http1Error),
    #[error("{0}")]
    Http2(#[from] h2::Error),
}

/// Response head, and its body.
pub(crate) struct UpstreamResponse {
    pub(crate) head: Head,
    pub(crate) body: ResponseBody,
}

/// Body of a response.
pub(crate) enum ResponseBody {
    /// Buffered completely.
    Buffered(Bytes),
    /// Streamed.
    Streamed(Box<StreamedBody>),
}

/// Response body that is being received.
pub(crate) struct StreamedBody {
    body: UpstreamBody,
    /// Length by its head.
    declared: Option<usize>,
}

/// Reason why a whole body was not received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WholeBodyError {
    /// It is longer than permitted.
    TooLong,
    /// The connection ended before it.
    Truncated,
}

impl Upstream {
    /// Creates the client of a gateway for regions; uses HTTP/2 where they support it, if `http2`.
    pub(crate) fn to_regions(
        transport: &Transport,
        http2: bool,
        catalogue: &Arc<Catalogue>,
        resolver: Resolver,
    ) -> Result<Upstream, rustls::Error> {
        let connector = Arc::new(Connector::to_regions(transport, http2, catalogue, resolver)?);
        let http2_client = http2.then(|| Http2Client::over(connector.clone()));
        Ok(Upstream { http1_client: Arc::new(Http1Client::over(connector.clone())), connector, http2_client })
    }

    /// Creates the client of an ingress for the replicas of its region.
    pub(crate) fn to_replicas(
        transport: &Transport,
        catalogue: &Arc<Catalogue>,
        resolver: Resolver,
    ) -> Result<Upstream, rustls::Error> {
        let connector = Arc::new(Connector::to_replicas(transport, catalogue, resolver)?);
        let http1_client = Arc::new(Http1Client::over(connector.clone()));
        Ok(Upstream { http1_client, connector, http2_client: None })
    }

    /// Returns the counters of connections that failed before a request was sent.
    pub(crate) fn hop_failures(&self) -> &ConnectionFailures {
        self.connector.failures()
    }

    /// Returns the metrics of the resolution of upstreams' names.
    pub(crate) fn names(&self) -> ResolverMetrics<'_> {
        self.connector.resolver().metrics()
    }

    /// Returns the HTTP/2 connection events, the number of open connections and of requests on them; `None` without
    /// HTTP/2.
    pub(crate) fn connections(&self) -> Option<(&Family<HopEvent>, (usize, usize))> {
        self.http2_client.as_ref().map(|http2_client| (http2_client.counts(), http2_client.size()))
    }

    async fn open(
        &self,
        key: &UpstreamKey,
        connect_timeout: Duration,
    ) -> Result<UpstreamConnection<'_>, AttemptFailure> {
        let Some(http2_client) = &self.http2_client else {
            return Ok(UpstreamConnection::Http1(self.http1_client.open(key, connect_timeout).await?));
        };
        loop {
            if let http2::Http2Slot::Stream(stream) =
                http2_client.open(key, connect_timeout, &self.http1_client).await?
            {
                return Ok(UpstreamConnection::Http2(stream));
            }
            if let Some(opened) = self.http1_client.take_idle(key) {
                return Ok(UpstreamConnection::Http1(opened));
            }
            let connected = self.connector.connect(key, connect_timeout).await?;
            if !connected.http2 {
                return Ok(UpstreamConnection::Http1(self.http1_client.ready(key, connected)));
            }
            // The region supports HTTP/2 by now.
            http2_client.adopt(key, connected).await?;
        }
    }

    /// Opens a request of this process itself whose body is sent while the response is received: over HTTP/1.1 on a
    /// connection of its own, because the frames of HTTP/2 and its acknowledgements cost more than the messages, and a
    /// stalled connection must not be one of the requests of clients. It is an idle connection if `may_reuse` and there
    /// is one.
    pub(crate) async fn open_duplex(
        &self,
        key: &UpstreamKey,
        head: &RequestHead,
        may_reuse: bool,
    ) -> Result<(DuplexRequest, DuplexResponse), AttemptFailure> {
        if may_reuse && let Some(opened) = self.http1_client.take_idle(key) {
            return Ok(opened.duplex(head));
        }
        let connected = self.connector.connect_http1(key, STATUS_CONNECT_TIMEOUT).await?;
        Ok(self.http1_client.ready(key, connected).duplex(head))
    }

    /// Opens a connection for the next request, unless there is one.
    pub(crate) async fn keep_connection(&self, key: &UpstreamKey) -> Result<(), AttemptFailure> {
        if self.http2_client.is_none() && self.http1_client.has_idle(key) {
            return Ok(());
        }
        match self.open(key, STATUS_CONNECT_TIMEOUT).await? {
            UpstreamConnection::Http1(opened) => opened.put_back(),
            // A stream that is not used releases its slot.
            UpstreamConnection::Http2(stream) => drop(stream),
        }
        Ok(())
    }

    /// Returns whether this is still an address of an upstream.
    pub(crate) fn is_current(&self, key: &UpstreamKey, remote: IpAddr) -> bool {
        self.connector.is_current(key, remote)
    }

    /// Sends a request of this process itself, without a client's body, and buffers the response, of at most `whole_max`
    /// bytes; also returns the time from request to response.
    pub(crate) async fn send_own(
        &self,
        key: &UpstreamKey,
        head: &RequestHead,
        body: &Bytes,
        whole_max: usize,
    ) -> Result<(UpstreamResponse, Duration), AttemptFailure> {
        loop {
            let opened = self.open(key, STATUS_CONNECT_TIMEOUT).await?;
            let sent = Instant::now();
            let response = match opened.send(head, body.clone()).await {
                // Another idle connection or a new one: the number of idle ones is finite.
                Err(AttemptFailure::StaleConnection) => continue,
                result => self.buffer(result?, whole_max, &key.address).await?,
            };
            return Ok((response, sent.elapsed()));
        }
    }

    /// Sends `head` and `body` to a region that the residency policy of the body allows, and waits for the response,
    /// which is buffered if it declares at most `whole_max` bytes; the caller bounds the time by dropping the future.
    pub(crate) async fn send(
        &self,
        to: RegionConnection<HostPort>,
        connect_timeout: Duration,
        head: RequestHead,
        body: residency::SealedBody<Bytes>,
        whole_max: usize,
    ) -> Result<UpstreamResponse, AttemptFailure> {
        let key = UpstreamKey { region: to.region(), address: to.address().clone() };
        let opened = self.open(&key, connect_timeout).await?;
        let (body, address) = residency::send(body, to, opened.peer());
        self.buffer(opened.send(&head, body).await?, whole_max, &address).await
    }

    /// Buffers the body if it declares at most `whole_max` bytes.
    async fn buffer(
        &self,
        (head, mut body): (Head, UpstreamBody),
        whole_max: usize,
        address: &HostPort,
    ) -> Result<UpstreamResponse, AttemptFailure> {
        let declared = declared_length(&head);
        let Some(length) = declared.filter(|length| *length <= whole_max) else {
            let streamed = StreamedBody { body, declared };
            return Ok(UpstreamResponse { head, body: ResponseBody::Streamed(Box::new(streamed)) });
        };
        let whole = body.whole(length).await.map_err(|error| {
            // An upstream closed the connection before its response was complete. The request fails over.
            tracing::debug!(%address, %error, "response truncated");
            AttemptFailure::Unreachable
        })?;
        body.finish(&self.http1_client);
        Ok(UpstreamResponse { head, body: ResponseBody::Buffered(whole) })
    }
}

impl UpstreamConnection<'_> {
    /// Returns the identity of the peer.
    fn peer(&self) -> Peer {
        match self {
            UpstreamConnection::Http1(opened) => opened.peer(),
            UpstreamConnection::Http2(stream) => stream.peer(),
        }
    }

    /// Sends a request and waits for the head of its response.
    async fn send(self, head: &RequestHead, body: Bytes) -> Result<(Head, UpstreamBody), AttemptFailure> {
        match self {
            UpstreamConnection::Http1(opened) => {
                let http1::Http1Response { head, body } = opened.send(head, &body).await?;
                Ok((head, UpstreamBody::Http1(body)))
            }
            UpstreamConnection::Http2(stream) => {
                let (head, body) = stream.send(head, body).await?;
                Ok((head, UpstreamBody::Http2(body)))
            }
        }
    }
}

impl UpstreamBody {
    async fn chunk(&mut self) -> Result<Option<Bytes>, UpstreamError> {
        Ok(match self {
            UpstreamBody::Http1(body) => body.chunk().await?,
            UpstreamBody::Http2(body) => body.chunk().await?,
        })
    }

    async fn whole(&mut self, length: usize) -> Result<Bytes, UpstreamError> {
        Ok(match self {
            UpstreamBody::Http1(body) => body.whole(length).await?,
            UpstreamBody::Http2(body) => body.whole(length).await?,
        })
    }

    fn finish(self, http1_client: &Http1Client) {
        match self {
            UpstreamBody::Http1(body) => body.finish(http1_client),
            // A stream that has ended releases its slot by itself.
            UpstreamBody::Http2(body) => drop(body),
        }
    }
}

impl StreamedBody {
    /// Returns the next piece of the body; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, UpstreamError> {
        self.body.chunk().await
    }

    /// Returns the length that the head declares.
    pub(crate) fn declared(&self) -> Option<usize> {
        self.declared
    }

    /// Receives the whole body, of at most `bytes_max` bytes, behind the bytes of `first`. With a declared length the memory is
    /// allocated once.
    pub(crate) async fn read_after(
        mut self,
        mut first: Vec<u8>,
        bytes_max: usize,
        upstream: &Upstream,
    ) -> Result<Bytes, WholeBodyError> {
        if self.declared.is_some_and(|declared| declared > bytes_max) {
            return Err(WholeBodyError::TooLong);
        }
        let begin = first.len();
        first.reserve_exact(self.declared.unwrap_or(0));
        while let Some(chunk) = self.chunk().await.map_err(|_| WholeBodyError::Truncated)? {
            if first.len() - begin + chunk.len() > bytes_max {
                return Err(WholeBodyError::TooLong);
            }
            first.extend_from_slice(&chunk);
        }
        self.finish(upstream);
        Ok(first.into())
    }

    /// Returns the connection to the pool if the body has ended.
    pub(crate) fn finish(self, upstream: &Upstream) {
        self.body.finish(&upstream.http1_client);
    }
}

fn declared_length(head: &Head) -> Option<usize> {
    head.headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}
