//! How one request went, from its intended start to its outcome.
//!
//! Nothing is hidden: an answer is not asked for again and no redirect is followed. The one exception is harmless: a request
//! for which a kept connection turns out to be closed *before a byte was sent* takes another connection, as with every HTTP
//! client.
//!
//! A request's clock ends when the last byte of the answer is here. Checking the answer comes after, so that our own
//! parsing is not counted as their latency.

use std::fmt;
use std::time::{Duration, Instant};

use replica_core::wire::error::ErrorCode;

use crate::answer::Rubbish;
use crate::pace::IntendedStart;
use crate::priority::Priority;
use crate::record::Served;

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failure {
    /// As many requests as may be were in flight already.
    NotSent,
    /// No connection came about.
    Unreachable,
    /// The connection ended before the answer did.
    BrokenOff,
    /// There was no whole answer in time.
    Timeout,
    /// The server said no.
    Refused {
        /// Its status.
        status: u16,
        /// Its code, where it is Meridian's.
        code: Option<ErrorCode>,
    },
    /// The server said yes, with something that is not an answer.
    Rubbish(Rubbish),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::NotSent => f.write_str("not sent: too many in flight"),
            Failure::Unreachable => f.write_str("no connection"),
            Failure::BrokenOff => f.write_str("connection broken off"),
            Failure::Timeout => f.write_str("no answer in time"),
            Failure::Refused { status, code: Some(code) } => write!(f, "{status} {}", code.as_str()),
            Failure::Refused { status, code: None } => write!(f, "{status}"),
            Failure::Rubbish(what) => write!(f, "rubbish: {what}"),
        }
    }
}

/// How one request went.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The task that it belongs to, by its place.
    pub task: usize,
    /// The priority that it asked for.
    pub priority: Priority,
    /// When it should have started, since the start of the run.
    pub intended: Duration,
    /// How much later than that the generator really started it.
    pub lag: Duration,
    /// From the intended start to the last byte of the answer, or to the failure; none if it was never sent.
    pub latency: Option<Duration>,
    /// Who answered, where the answer says so.
    pub served: Served,
    /// Whether the gateway had to ask more than once.
    pub retried: bool,
    /// Success, or why not.
    pub outcome: Result<(), Failure>,
}

impl Sample {
    /// The request of `intended`, which found at `now` that as many others as may be were in flight.
    pub fn not_sent(intended: IntendedStart, priority: Priority, now: Instant) -> Sample {
        Sample {
            task: intended.task,
            priority,
            intended: intended.offset,
            lag: now.saturating_duration_since(intended.at),
            latency: None,
            served: Served::Unnamed,
            retried: false,
            outcome: Err(Failure::NotSent),
        }
    }
}
