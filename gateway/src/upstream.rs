//! One attempt: a request to an address, and its answer.
//!
//! Pingora's proxy replays a body of 64 KiB at most and gives an attempt one peer and no way out; an edge that moves a
//! request of 32 MiB from a region that is being lost to another needs both. So the exchange is our own ([`crate::plain`]):
//! the body is held whole and shared between attempts, and dropping the future of an attempt ends it.
//!
//! A small answer is read whole before the client sees any of it. Then a region that dies in the middle of it has given
//! the client nothing yet, and another region can. Only a large answer is streamed, and is final once it has begun.

use crate::events::HopFailures;
use crate::hop::{Outward, Regions};
use crate::plain::{Begun, Broken, Plain, Rest, Way};
use bytes::Bytes;
use gateway_core::lawful::{self, Conn};
use gateway_core::outcome::Failure;
use http::Method;
use http::header::CONTENT_LENGTH;
use http::response::Parts as Head;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Answers up to this size are read whole before any of it is passed on: some 200 vectors of 384 numbers, as text.
pub(crate) const WHOLE_ANSWER_MAX: usize = 1 << 20;

/// How long a connection may take to open over which a region is asked how it is. Nobody waits for that, and the time from
/// question to answer counts from when it is open.
const CONVERSE_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The way to the next hop.
pub(crate) struct Upstream {
    plain: Plain,
}

/// The head of a request to the next hop: put together once, as it stands on the wire.
#[derive(Clone, Debug)]
pub(crate) struct RequestHead {
    method: Method,
    path: &'static str,
    /// A line for each header.
    lines: Vec<u8>,
}

/// Room for the headers of a usual request, so that they are allocated once.
const LINES_BYTES: usize = 512;

impl RequestHead {
    pub(crate) fn new(method: Method) -> RequestHead {
        RequestHead { method, path: "/", lines: Vec::with_capacity(LINES_BYTES) }
    }

    /// The same for another path.
    pub(crate) fn for_path(&self, path: &'static str) -> RequestHead {
        let mut lines = Vec::with_capacity(LINES_BYTES);
        lines.extend_from_slice(&self.lines);
        RequestHead { method: self.method.clone(), path, lines }
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
        let parts = [
            self.method.as_str().as_bytes(),
            b" ",
            self.path.as_bytes(),
            b" HTTP/1.1\r\n",
            &self.lines,
            b"\r\n",
        ];
        parts.concat()
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
    /// From an edge to regions.
    pub(crate) fn to_regions(regions: &Regions) -> Result<Upstream, rustls::Error> {
        Ok(Upstream { plain: Plain::over(Outward::to_regions(regions)?) })
    }

    /// From a region's door to its replicas: in the clear, as whatever is between those two has seen the request anyway.
    pub(crate) fn within_the_region() -> Upstream {
        Upstream { plain: Plain::over(Outward::within_the_region()) }
    }

    /// What went wrong before anything was sent.
    pub(crate) fn hop_failures(&self) -> &HopFailures {
        self.plain.outward().failures()
    }

    /// Says something to a region that is nobody's request, and waits for the whole answer, which may have so many bytes;
    /// with the time from question to answer.
    pub(crate) async fn converse(
        &self,
        way: Way,
        head: &RequestHead,
        body: &[u8],
        whole_max: usize,
    ) -> Result<(Answer, Duration), Failure> {
        loop {
            let opened = self.plain.open(way, CONVERSE_CONNECT_TIMEOUT).await?;
            let asked = Instant::now();
            let answered = match opened.ask(head, body).await {
                // Not one that waits is left, or a new one: that ends.
                Err(Failure::StaleConnection) => continue,
                answered => self.whole(answered?, whole_max, way.address).await?,
            };
            return Ok((answered, asked.elapsed()));
        }
    }

    /// Sends `head` and `body` where the law of the body permits and waits for an answer, which is read whole if it
    /// declares no more than `whole_max` bytes; the caller bounds the time by dropping this.
    pub(crate) async fn ask(
        &self,
        to: Conn<SocketAddr>,
        connect_timeout: Duration,
        head: RequestHead,
        body: lawful::Body<Bytes>,
        whole_max: usize,
    ) -> Result<Answer, Failure> {
        let way = Way { region: to.region(), address: *to.address() };
        let opened = self.plain.open(way, connect_timeout).await?;
        let (body, address) = lawful::send(body, to, opened.peer());
        self.whole(opened.ask(&head, &body).await?, whole_max, address).await
    }

    /// The rest of the answer, if it declares no more than `whole_max` bytes.
    async fn whole(&self, begun: Begun, whole_max: usize, address: SocketAddr) -> Result<Answer, Failure> {
        let Begun { head, mut rest } = begun;
        let Some(length) = declared_length(&head).filter(|length| *length <= whole_max) else {
            return Ok(Answer { head, body: AnswerBody::Coming(Box::new(Coming(rest))) });
        };
        let whole = rest.whole(length).await.map_err(|error| {
            tracing::debug!(%address, %error, "an answer broke off");
            Failure::Unreachable
        })?;
        rest.finish(&self.plain);
        Ok(Answer { head, body: AnswerBody::Whole(whole) })
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
        let mut head = RequestHead::new(Method::POST);
        head.put("host", "region");
        let mut other = head.for_path("/v1/embeddings");
        other.put("x-request-id", "a\tb c~é");
        assert_eq!(head.in_the_clear(), b"POST / HTTP/1.1\r\nhost: region\r\n\r\n");
        let wire = "POST /v1/embeddings HTTP/1.1\r\nhost: region\r\nx-request-id: a\tb c~é\r\n\r\n";
        assert_eq!(other.in_the_clear(), wire.as_bytes());
    }

    #[test]
    fn no_value_ends_its_line_or_the_head() {
        for value in ["a\r\nx: y", "a\nb", "a\rb", "a\0b", "a\x7fb"] {
            assert!(!can_stand_in_a_header(value.as_bytes()), "{value:?}");
        }
    }
}
