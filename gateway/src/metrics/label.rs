//! Metric labels: closed sets with a number and a name for each value.

use crate::names;
use gateway_core::endpoint::Endpoint;
use gateway_core::priority;
use pingora::protocols::http::ServerSession;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;

/// Endpoint of a request: a served path, the list of models, or other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked(&'static str);

impl Asked {
    /// Path that is not served. The path itself is client text and is not recorded.
    pub(crate) const OTHER: Asked = Asked("other");

    /// Returns the label of an endpoint.
    pub(crate) fn of(endpoint: &Endpoint<'_>) -> Asked {
        Asked(endpoint.path())
    }

    /// Returns the label of a replica's endpoint.
    pub(crate) fn at(path: &'static str) -> Asked {
        Asked(path)
    }

    pub(crate) fn as_str(self) -> &'static str {
        self.0
    }
}

/// Outcome of a request as its client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Complete response with this status; `code` is its error code, if it has one.
    Answered { status: u16, code: Option<ErrorCode> },
    /// Response with this status, truncated.
    BrokeOff { status: u16 },
    /// The client disconnected before a response was sent.
    ClientGone,
    /// This process stopped before a response was sent.
    CutOff,
}

/// Outcomes without an error code: ok, other status, truncated, client disconnected, shutdown.
const BESIDE_CODES: usize = 5;

impl Ending {
    pub(crate) const LEN: usize = ErrorCode::ALL.len() + BESIDE_CODES;

    /// Returns the outcome of a request by the response head that `session` has written; without one, the client
    /// disconnected.
    pub(crate) fn of_session(session: &ServerSession) -> Ending {
        let Some(head) = session.response_written() else { return Ending::ClientGone };
        let code = head
            .headers
            .get(names::name(headers::ERROR))
            .and_then(|value| ErrorCode::parse(value.to_str().ok()?));
        Ending::Answered { status: head.status.as_u16(), code }
    }

    pub(crate) fn at(self) -> usize {
        match self {
            Ending::Answered { code: Some(code), .. } => code as usize + BESIDE_CODES,
            Ending::Answered { status: 200..300, code: None } => 0,
            Ending::Answered { code: None, .. } => 1,
            Ending::BrokeOff { .. } => 2,
            Ending::ClientGone => 3,
            Ending::CutOff => 4,
        }
    }

    pub(crate) fn name(at: usize) -> &'static str {
        const BESIDE: [&str; BESIDE_CODES] = ["ok", "other_status", "truncated", "client_disconnected", "shutdown"];
        BESIDE.get(at).copied().unwrap_or_else(|| ErrorCode::ALL[at - BESIDE_CODES].as_str())
    }

    /// Returns the same response as truncated.
    pub(crate) fn truncated(self) -> Ending {
        match self {
            Ending::Answered { status, .. } => Ending::BrokeOff { status },
            Ending::BrokeOff { .. } | Ending::ClientGone | Ending::CutOff => self,
        }
    }

    pub(crate) fn status(self) -> Option<u16> {
        match self {
            Ending::Answered { status, .. } | Ending::BrokeOff { status } => Some(status),
            Ending::ClientGone | Ending::CutOff => None,
        }
    }
}

/// Class of outcomes by the party at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Ok,
    ClientError,
    ServerError,
    /// No complete response was sent.
    Unfinished,
}

impl Outcome {
    pub(crate) const ALL: [Outcome; 4] =
        [Outcome::Ok, Outcome::ClientError, Outcome::ServerError, Outcome::Unfinished];

    pub(crate) fn of(ending: Ending) -> Outcome {
        match ending {
            Ending::Answered { status: 500.., .. } => Outcome::ServerError,
            Ending::Answered { status: 400..500, .. } => Outcome::ClientError,
            Ending::Answered { .. } => Outcome::Ok,
            Ending::BrokeOff { .. } | Ending::ClientGone | Ending::CutOff => Outcome::Unfinished,
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::ClientError => "client_error",
            Outcome::ServerError => "server_error",
            Outcome::Unfinished => "unfinished",
        }
    }
}

/// Protocol of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http1,
    Http2,
}

impl Protocol {
    pub(crate) const ALL: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Protocol::Http1 => "http/1.1",
            Protocol::Http2 => "h2",
        }
    }
}

/// Priority of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Priority {
    Interactive,
    Bulk,
    /// The request was answered or rejected before its priority was known.
    #[default]
    Unknown,
}

impl Priority {
    pub(crate) const ALL: [Priority; 3] = [Priority::Interactive, Priority::Bulk, Priority::Unknown];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Priority::Interactive => "interactive",
            Priority::Bulk => "bulk",
            Priority::Unknown => "unknown",
        }
    }
}

impl From<priority::Priority> for Priority {
    fn from(priority: priority::Priority) -> Priority {
        match priority {
            priority::Priority::Interactive => Priority::Interactive,
            priority::Priority::Bulk => Priority::Bulk,
        }
    }
}

/// Stage of a request, for its latency breakdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// This process, and failed attempts.
    Gateway,
    Network,
    Queue,
    Tokenize,
    Engine,
    /// From the head of the response to its last byte.
    Sending,
}

impl Stage {
    pub(crate) const ALL: [Stage; 6] =
        [Stage::Gateway, Stage::Network, Stage::Queue, Stage::Tokenize, Stage::Engine, Stage::Sending];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Stage::Gateway => "gateway",
            Stage::Network => "network",
            Stage::Queue => "queue",
            Stage::Tokenize => "tokenize",
            Stage::Engine => "engine",
            Stage::Sending => "sending",
        }
    }
}
