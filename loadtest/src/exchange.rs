//! Outcome of one request, from its intended start on.
//!
//! Requests are not retried and redirects are not followed. The one exception is harmless: if a kept connection turns
//! out to be closed *before a byte was sent*, the request uses another connection, as in every HTTP client.
//!
//! The latency ends when the last byte of the response is received. Validation follows, so that its cost does not
//! count as the server's latency.

use std::fmt;
use std::time::{Duration, Instant};

use replica_api::error::ErrorCode;

use crate::pace::IntendedStart;
use crate::record::served::ServingRegions;
use crate::response::ResponseDefect;
use replica_api::priority::Priority;

/// Cause of a failed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestFailure {
    /// The limit of requests in flight was reached.
    NotSent,
    /// The connection could not be established.
    Unreachable,
    /// The connection was closed before the response was complete.
    ConnectionClosed,
    /// The response was not complete before the timeout.
    Timeout,
    /// The server responded with an error status.
    ErrorStatus {
        /// Status code.
        status: u16,
        /// Error code, if it is one of Meridian's.
        code: Option<ErrorCode>,
    },
    /// The response has status 200 and an invalid body, or is not valid HTTP.
    InvalidResponse(ResponseDefect),
}

impl fmt::Display for RequestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestFailure::NotSent => f.write_str("not sent: too many requests in flight"),
            RequestFailure::Unreachable => f.write_str("connection failed"),
            RequestFailure::ConnectionClosed => f.write_str("connection closed"),
            RequestFailure::Timeout => f.write_str("timeout"),
            RequestFailure::ErrorStatus { status, code: Some(code) } => {
                write!(f, "{status} {}", code.as_str())
            }
            RequestFailure::ErrorStatus { status, code: None } => write!(f, "{status}"),
            RequestFailure::InvalidResponse(defect) => write!(f, "invalid response: {defect}"),
        }
    }
}

/// Measurement of one request.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Index of its task.
    pub task: usize,
    /// Priority of the request.
    pub priority: Priority,
    /// Intended start, since the start of the run.
    pub intended: Duration,
    /// Delay of the actual start, caused by the generator.
    pub lag: Duration,
    /// Time from the intended start to the last byte of the response, or to the failure; `None` if the request was not
    /// sent.
    pub latency: Option<Duration>,
    /// Regions that served the request, according to the response.
    pub served: ServingRegions,
    /// Whether the gateway needed more than one attempt.
    pub retried: bool,
    /// Success, or cause of the failure.
    pub outcome: Result<(), RequestFailure>,
}

impl Sample {
    /// Creates the sample of a request that was not sent because the limit of requests in flight was reached.
    pub fn not_sent(intended: IntendedStart, priority: Priority, now: Instant) -> Sample {
        Sample {
            task: intended.task,
            priority,
            intended: intended.offset,
            lag: now.saturating_duration_since(intended.at),
            latency: None,
            served: ServingRegions::Unknown,
            retried: false,
            outcome: Err(RequestFailure::NotSent),
        }
    }
}
