//! The labels, each a closed set with a number for each member and its name.

use crate::names;
use gateway_core::endpoint::Endpoint;
use gateway_core::priority;
use pingora::protocols::http::ServerSession;
use replica_core::wire::error::ErrorCode;
use replica_core::wire::headers;

/// What a request asked for: a path that is served, the list of models, or something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked(&'static str);

impl Asked {
    /// A path that nobody serves. What it was is a stranger's text, and is kept nowhere.
    pub(crate) const OTHER: Asked = Asked("other");

    pub(crate) fn of(endpoint: &Endpoint<'_>) -> Asked {
        Asked(endpoint.path())
    }

    /// What a replica serves at this path.
    pub(crate) fn at(path: &'static str) -> Asked {
        Asked(path)
    }

    pub(crate) fn as_str(self) -> &'static str {
        self.0
    }
}

/// How a request ended, as the one who sent it saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// With an answer of this status; `code` is the error that it told, if it told one.
    Answered { status: u16, code: Option<ErrorCode> },
    /// The answer of this status broke off on its way.
    BrokeOff { status: u16 },
    /// Whoever asked hung up before there was an answer.
    ClientGone,
    /// This process stopped before there was an answer.
    CutOff,
}

/// Endings that are no error code: ok, another status, broke off, client gone, cut off.
const BESIDE_CODES: usize = 5;

impl Ending {
    pub(crate) const LEN: usize = ErrorCode::ALL.len() + BESIDE_CODES;

    /// The end of a request that was given the answer whose head `session` has written; without one, whoever asked had
    /// left.
    pub(crate) fn as_told(session: &ServerSession) -> Ending {
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
        const BESIDE: [&str; BESIDE_CODES] = ["ok", "other_status", "broke_off", "client_gone", "cut_off"];
        BESIDE.get(at).copied().unwrap_or_else(|| ErrorCode::ALL[at - BESIDE_CODES].as_str())
    }

    /// The same answer, of which only a part arrived.
    pub(crate) fn broken_off(self) -> Ending {
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

/// Endings, coarsely: who would have to do something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Ok,
    ClientError,
    ServerError,
    /// Nobody got a whole answer.
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

/// Over what a request came.
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

/// The priority in which a request travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Priority {
    Interactive,
    Bulk,
    /// It was answered or refused before that was known.
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

/// Where a request spends its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// This process, and attempts that came to nothing.
    Gateway,
    Network,
    Queue,
    Tokenize,
    Engine,
    /// From the head of the answer to its last byte.
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
