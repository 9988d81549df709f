//! One attempt: a request to an address, and its answer.
//!
//! Pingora's proxy replays a body of 64 KiB at most and gives an attempt one peer and no way out; an edge that moves a
//! request of 32 MiB from a region that is being lost to another needs both. So the exchange is our own, in HTTP/1.1
//! ([`crate::plain`]) or in HTTP/2 ([`crate::streams`]): the body is held whole and shared between attempts, and dropping the
//! future of an attempt ends it.
//!
//! A small answer is read whole before the client sees any of it. Then a region that dies in the middle of it has given
//! the client nothing yet, and another region can. Only a large answer is streamed, and is final once it has begun.

use crate::events::HopFailures;
use crate::hop::{Outward, Regions};
use crate::metrics::{HopEvent, Tally};
use crate::plain::{self, Plain, Way};
use crate::streams::{self, Streams};
use bytes::Bytes;
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::{self, Peer, RegionConnection};
use http::header::{CONTENT_LENGTH, HOST};
use http::response::Parts as Head;
use http::uri::{Authority, PathAndQuery, Scheme, Uri};
use http::{HeaderName, HeaderValue, Method, Request};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Answers up to this size are read whole before any of it is passed on: some 200 vectors of 384 numbers, as text.
pub(crate) const WHOLE_ANSWER_MAX: usize = 1 << 20;

/// How long a connection may take to open over which a region is asked how it is. Nobody waits for that, and the time from
/// question to answer counts from when it is open.
const CONVERSE_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The way to the next hop.
pub(crate) struct Upstream {
    outward: Arc<Outward>,
    plain: Arc<Plain>,
    /// Where HTTP/2 is spoken.
    streams: Option<Streams>,
}

/// A way to ask, on which nothing was asked yet.
enum Opened<'a> {
    Plain(plain::Opened<'a>),
    Stream(streams::Stream),
}

/// A body that is still coming.
enum Rest {
    Plain(plain::Rest),
    Stream(streams::Rest),
}

/// An answer that broke off.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    #[error("{0}")]
    Plain(#[from] plain::Broken),
    #[error("{0}")]
    Stream(#[from] h2::Error),
}

/// The method of a request to the next hop. HEAD is not among them: the length in its response is that of a body which does
/// not follow, so whoever sends one has to remember it while reading. A client's HEAD is answered from the response to GET.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpstreamMethod {
    Get,
    Post,
}

impl UpstreamMethod {
    /// The method by which a client's request is forwarded.
    pub(crate) fn for_client(method: &Method) -> UpstreamMethod {
        if matches!(*method, Method::GET | Method::HEAD) { UpstreamMethod::Get } else { UpstreamMethod::Post }
    }

    fn as_http(self) -> Method {
        match self {
            UpstreamMethod::Get => Method::GET,
            UpstreamMethod::Post => Method::POST,
        }
    }
}

/// The head of a request to the next hop: put together once, as it stands on the wire.
#[derive(Clone, Debug)]
pub(crate) struct RequestHead {
    method: UpstreamMethod,
    path: &'static str,
    /// A line for each header.
    lines: Vec<u8>,
}

/// Whom every request to a next hop is for, whoever that is: a connection says where it leads.
pub(crate) const AUTHORITY: &str = "region";
/// Room for the headers of a usual request, so that they are allocated once.
const LINES_BYTES: usize = 512;

impl RequestHead {
    pub(crate) fn new(method: UpstreamMethod) -> RequestHead {
        RequestHead { method, path: "/", lines: Vec::with_capacity(LINES_BYTES) }
    }

    /// The same for another path.
    pub(crate) fn for_path(&self, path: &'static str) -> RequestHead {
        let mut lines = Vec::with_capacity(LINES_BYTES);
        lines.extend_from_slice(&self.lines);
        RequestHead { method: self.method, path, lines }
    }

    /// Adds a header of ours, or one whose value [can stand in a header](can_stand_in_a_header).
    pub(crate) fn put(&mut self, name: &str, value: impl AsRef<[u8]>) {
        let value = value.as_ref();
        // A line break in a value would be a header, or a request, of whoever chose the value.
        assert!(can_stand_in_a_header(value), "the value of {name} cannot stand in a header");
        for part in [name.as_bytes(), b": ", value, b"\r\n"] {
            self.lines.extend_from_slice(part);
        }
    }

    /// As HTTP/1.1 has it.
    pub(crate) fn in_the_clear(&self) -> Vec<u8> {
        let method = self.method.as_http();
        let parts =
            [method.as_str().as_bytes(), b" ", self.path.as_bytes(), b" HTTP/1.1\r\n", &self.lines, b"\r\n"];
        parts.concat()
    }

    /// As HTTP/2 has it.
    pub(crate) fn over_http2(&self) -> Request<()> {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(Scheme::HTTPS);
        parts.authority = Some(Authority::from_static(AUTHORITY));
        parts.path_and_query = Some(PathAndQuery::from_static(self.path));
        let mut request = Request::new(());
        *request.uri_mut() = Uri::from_parts(parts).expect("all that a request to a server has");
        *request.method_mut() = self.method.as_http();
        for line in self.lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let colon = line.iter().position(|byte| *byte == b':').expect("a line has a name");
            let (name, value) = (&line[..colon], &line[colon + 2..line.len() - 1]);
            if name != HOST.as_str().as_bytes() {
                let name = HeaderName::from_bytes(name).expect("the name of a header of ours");
                let value = HeaderValue::from_bytes(value).expect("looked at when it was put in");
                request.headers_mut().append(name, value);
            }
        }
        request
    }
}

/// Whether a value ends where its line ends (RFC 9110, 5.5).
pub(crate) fn can_stand_in_a_header(value: &[u8]) -> bool {
    value.iter().all(|byte| (*byte >= b' ' && *byte != 0x7f) || *byte == b'\t')
}

/// An answer whose head has come.
pub(crate) struct Answer {
    pub(crate) head: Head,
    pub(crate) body: AnswerBody,
}

/// The body of an answer.
pub(crate) enum AnswerBody {
    /// All of it.
    Whole(Bytes),
    /// Still coming.
    Coming(Box<Coming>),
}

/// A body that is still coming.
pub(crate) struct Coming(Rest);

impl Upstream {
    /// From an edge to regions; in HTTP/2 where they speak it, if `http2`.
    pub(crate) fn to_regions(regions: &Regions, http2: bool) -> Result<Upstream, rustls::Error> {
        let outward = Arc::new(Outward::to_regions(regions, http2)?);
        let streams = http2.then(|| Streams::over(outward.clone()));
        Ok(Upstream { plain: Arc::new(Plain::over(outward.clone())), outward, streams })
    }

    /// From a region's door to its replicas: in the clear, as whatever is between those two has seen the request anyway.
    pub(crate) fn within_the_region() -> Upstream {
        let outward = Arc::new(Outward::within_the_region());
        Upstream { plain: Arc::new(Plain::over(outward.clone())), outward, streams: None }
    }

    /// What went wrong before anything was sent.
    pub(crate) fn hop_failures(&self) -> &HopFailures {
        self.outward.failures()
    }

    /// What connections of HTTP/2 have met, how many are open, and how many requests are on them; where there are such.
    pub(crate) fn connections(&self) -> Option<(&Tally<HopEvent>, (usize, usize))> {
        self.streams.as_ref().map(|streams| (streams.counts(), streams.size()))
    }

    async fn open(&self, way: Way, connect_timeout: Duration) -> Result<Opened<'_>, AttemptFailure> {
        let Some(streams) = &self.streams else {
            return Ok(Opened::Plain(self.plain.open(way, connect_timeout).await?));
        };
        loop {
            if let streams::Opened::Stream(stream) = streams.open(way, connect_timeout, &self.plain).await? {
                return Ok(Opened::Stream(stream));
            }
            if let Some(opened) = self.plain.waiting(way) {
                return Ok(Opened::Plain(opened));
            }
            let greeted = self.outward.connect(way, connect_timeout).await?;
            if !greeted.http2 {
                return Ok(Opened::Plain(self.plain.begin(way, greeted)));
            }
            // The region has learned HTTP/2 since.
            streams.adopt(way, greeted).await?;
        }
    }

    /// Says something to a region that is nobody's request, and waits for the whole answer, which may have so many bytes;
    /// with the time from question to answer.
    pub(crate) async fn converse(
        &self,
        way: Way,
        head: &RequestHead,
        body: &Bytes,
        whole_max: usize,
    ) -> Result<(Answer, Duration), AttemptFailure> {
        loop {
            let opened = self.open(way, CONVERSE_CONNECT_TIMEOUT).await?;
            let asked = Instant::now();
            let answered = match opened.ask(head, body.clone()).await {
                // Not one that waits is left, or a new one: that ends.
                Err(AttemptFailure::StaleConnection) => continue,
                answered => self.whole(answered?, whole_max, way.address).await?,
            };
            return Ok((answered, asked.elapsed()));
        }
    }

    /// Sends `head` and `body` where the residency policy of the body permits and waits for an answer, which is read whole if it
    /// declares no more than `whole_max` bytes; the caller bounds the time by dropping this.
    pub(crate) async fn ask(
        &self,
        to: RegionConnection<SocketAddr>,
        connect_timeout: Duration,
        head: RequestHead,
        body: residency::SealedBody<Bytes>,
        whole_max: usize,
    ) -> Result<Answer, AttemptFailure> {
        let way = Way { region: to.region(), address: *to.address() };
        let opened = self.open(way, connect_timeout).await?;
        let (body, address) = residency::send(body, to, opened.peer());
        self.whole(opened.ask(&head, body).await?, whole_max, address).await
    }

    /// The rest of the answer, if it declares no more than `whole_max` bytes.
    async fn whole(
        &self,
        (head, mut rest): (Head, Rest),
        whole_max: usize,
        address: SocketAddr,
    ) -> Result<Answer, AttemptFailure> {
        let Some(length) = declared_length(&head).filter(|length| *length <= whole_max) else {
            return Ok(Answer { head, body: AnswerBody::Coming(Box::new(Coming(rest))) });
        };
        let whole = rest.whole(length).await.map_err(|error| {
            tracing::debug!(%address, %error, "an answer broke off");
            AttemptFailure::Unreachable
        })?;
        rest.finish(&self.plain);
        Ok(Answer { head, body: AnswerBody::Whole(whole) })
    }
}

impl Opened<'_> {
    /// Who is at the other end.
    fn peer(&self) -> Peer {
        match self {
            Opened::Plain(opened) => opened.peer(),
            Opened::Stream(stream) => stream.peer(),
        }
    }

    /// Sends a request and waits for the head of its answer.
    async fn ask(self, head: &RequestHead, body: Bytes) -> Result<(Head, Rest), AttemptFailure> {
        match self {
            Opened::Plain(opened) => {
                let plain::Begun { head, rest } = opened.ask(head, &body).await?;
                Ok((head, Rest::Plain(rest)))
            }
            Opened::Stream(stream) => {
                let (head, rest) = stream.ask(head, body).await?;
                Ok((head, Rest::Stream(rest)))
            }
        }
    }
}

impl Rest {
    async fn chunk(&mut self) -> Result<Option<Bytes>, Broken> {
        Ok(match self {
            Rest::Plain(rest) => rest.chunk().await?,
            Rest::Stream(rest) => rest.chunk().await?,
        })
    }

    async fn whole(&mut self, length: usize) -> Result<Bytes, Broken> {
        Ok(match self {
            Rest::Plain(rest) => rest.whole(length).await?,
            Rest::Stream(rest) => rest.whole(length).await?,
        })
    }

    fn finish(self, plain: &Plain) {
        match self {
            Rest::Plain(rest) => rest.finish(plain),
            // A stream that has ended leaves its connection by itself.
            Rest::Stream(rest) => drop(rest),
        }
    }
}

impl Coming {
    /// The next piece of the body; `None` at its end.
    pub(crate) async fn chunk(&mut self) -> Result<Option<Bytes>, Broken> {
        self.0.chunk().await
    }

    /// Gives the connection back once the body has ended.
    pub(crate) fn finish(self, upstream: &Upstream) {
        self.0.finish(&upstream.plain);
    }
}

fn declared_length(head: &Head) -> Option<usize> {
    head.headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_stands_on_the_wire_as_it_was_put_together() {
        let mut head = RequestHead::new(UpstreamMethod::Post);
        head.put("host", "region");
        let mut other = head.for_path("/v1/embeddings");
        other.put("x-request-id", "a\tb c~é");
        assert_eq!(head.in_the_clear(), b"POST / HTTP/1.1\r\nhost: region\r\n\r\n");
        let wire = "POST /v1/embeddings HTTP/1.1\r\nhost: region\r\nx-request-id: a\tb c~é\r\n\r\n";
        assert_eq!(other.in_the_clear(), wire.as_bytes());
        let request = other.over_http2();
        assert_eq!(
            (request.method(), request.uri().to_string()),
            (&Method::POST, "https://region/v1/embeddings".to_owned())
        );
        let headers: Vec<_> =
            request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        assert_eq!(headers, [("x-request-id", "a\tb c~é".as_bytes())], "of `host` there is the authority");
    }

    #[test]
    fn a_head_request_is_forwarded_as_get() {
        for (method, forwarded) in [(Method::HEAD, "GET "), (Method::GET, "GET "), (Method::POST, "POST ")] {
            let head = RequestHead::new(UpstreamMethod::for_client(&method));
            assert!(head.in_the_clear().starts_with(forwarded.as_bytes()), "{method}");
            assert_eq!(head.over_http2().method().as_str(), forwarded.trim(), "{method}");
        }
    }

    #[test]
    fn no_value_ends_its_line_or_the_head() {
        for value in ["a\r\nx: y", "a\nb", "a\rb", "a\0b", "a\x7fb"] {
            assert!(!can_stand_in_a_header(value.as_bytes()), "{value:?}");
        }
    }
}
