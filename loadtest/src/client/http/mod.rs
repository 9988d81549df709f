//! One request to one endpoint: the bytes that go out, and the answer in one buffer.
//!
//! HTTP/1.1 is spoken here by hand ([`one`]). A bulk client sends few, large requests and spends its time on the answers'
//! bytes, and what a general client does with them (frames handed from task to task, and put together again) costs as much as
//! decoding them: so a connection belongs to the request that uses it and reads straight into the buffer that is decoded.
//! HTTP/2 is hyper's ([`two`]). [`pool`] keeps connections, [`tls`] secures them.

mod one;
mod pool;
mod tls;
mod two;

pub(super) use pool::{Outgoing, Wire, may_be_set};
pub(super) use tls::Trust;

use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// How much of one answer is read: 2048 rows of 4096 numbers with 12 digits each, and a little.
pub const ANSWER_BYTES_MAX: usize = 128 << 20;

/// How long the head of an answer may be.
pub const HEAD_BYTES_MAX: usize = 64 << 10;

/// Which HTTP is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Protocol {
    /// HTTP/1.1, a connection for each request in flight. The faster one (docs/benchmarks.md).
    #[default]
    Http1,
    /// HTTP/2, many requests on a few connections: over TLS by agreement with the server (and HTTP/1.1 if it declines), in the
    /// clear by knowing that the server does.
    Http2,
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection came about.
    Unreachable(String),
    /// The connection ended before the answer did.
    BrokenOff(String),
    /// There was no whole answer in time.
    TimedOut,
    /// The server said no.
    Refused {
        /// Its status.
        status: u16,
        /// The beginning of what it said.
        message: String,
        /// When it wants to be asked again.
        retry_after: Option<Duration>,
    },
    /// What came is not HTTP, or more than is read of one answer.
    Malformed(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Unreachable(why) => write!(f, "no connection: {why}"),
            Failure::BrokenOff(why) => write!(f, "the connection broke off: {why}"),
            Failure::TimedOut => f.write_str("no whole answer in time"),
            Failure::Refused { status, message, retry_after: _ } => write!(f, "status {status}: {message}"),
            Failure::Malformed(why) => write!(f, "not an HTTP answer: {why}"),
        }
    }
}

/// The headers of an answer, one `name: value` a line, names in lower case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers(String);

impl Headers {
    pub(super) fn push(&mut self, name: &str, value: &[u8]) {
        self.0.extend(name.chars().map(|c| c.to_ascii_lowercase()));
        self.0.push(':');
        self.0.push_str(&String::from_utf8_lossy(value).replace(['\r', '\n'], " "));
        self.0.push('\n');
    }

    /// Name and value, in the order in which they came.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.lines().filter_map(|line| line.split_once(':'))
    }

    /// The first value of a header; `name` in lower case.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(there, _)| *there == name).map(|(_, value)| value)
    }
}

/// A success.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) headers: Headers,
    /// The buffer that it was read into, to be used again.
    pub(super) buffer: Vec<u8>,
    /// Where in it the body lies.
    pub(super) body: Range<usize>,
}

impl Answer {
    pub(super) fn body(&self) -> &[u8] {
        &self.buffer[self.body.clone()]
    }
}

/// How much of a refusal's body stands in the error.
const MESSAGE_BYTES_MAX: usize = 512;

/// An answer of any status, as a success or as a refusal.
fn judged(status: u16, answer: Answer) -> Result<Answer, Failure> {
    if (200..300).contains(&status) {
        return Ok(answer);
    }
    let body = answer.body();
    let message = String::from_utf8_lossy(&body[..body.len().min(MESSAGE_BYTES_MAX)]).trim().to_owned();
    // In seconds; a date, which the standard has as well, is taken for no wish.
    let retry_after = answer.headers.get("retry-after").and_then(|wait| wait.trim().parse().ok());
    Err(Failure::Refused { status, message, retry_after: retry_after.map(Duration::from_secs) })
}
