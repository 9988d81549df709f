//! Metric labels: closed sets with a number and a name for each value.

use crate::names;
use gateway_core::endpoint::Endpoint;
use pingora::protocols::http::ServerSession;
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::priority;

/// Endpoint of a request: a served path, the list of models, or other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndpointLabel(&'static str);

impl EndpointLabel {
    /// Path that is not served. The path itself is client text and is not recorded.
    pub(crate) const OTHER: EndpointLabel = EndpointLabel("other");

    /// Returns the label of an endpoint.
    pub(crate) fn of(endpoint: &Endpoint<'_>) -> EndpointLabel {
        EndpointLabel(endpoint.path())
    }

    /// Returns the label of a replica's endpoint.
    pub(crate) fn at(path: &'static str) -> EndpointLabel {
        EndpointLabel(path)
    }

    pub(crate) fn as_str(self) -> &'static str {
        self.0
    }
}

/// Outcome of a request as its client sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    /// Complete response with this status; `code` is its error code, if it has one.
    Complete { status: u16, code: Option<ErrorCode> },
    /// Response with this status, truncated.
    Truncated { status: u16 },
    /// The client disconnected before a response was sent.
    ClientDisconnected,
    /// This process stopped before a response was sent.
    Shutdown,
}

/// Outcomes without an error code: ok, other status, truncated, client disconnected, shutdown.
const OUTCOMES_WITHOUT_CODE: usize = 5;

impl RequestOutcome {
    pub(crate) const LEN: usize = ErrorCode::ALL.len() + OUTCOMES_WITHOUT_CODE;

    /// Returns the outcome of a request by the response head that `session` has written; without one, the client
    /// disconnected.
    pub(crate) fn of_session(session: &ServerSession) -> RequestOutcome {
        let Some(head) = session.response_written() else { return RequestOutcome::ClientDisconnected };
        let code = head
            .headers
            .get(names::name(headers::ERROR))
            .and_then(|value| ErrorCode::parse(value.to_str().ok()?));
        RequestOutcome::Complete { status: head.status.as_u16(), code }
    }

    pub(crate) fn index(self) -> usize {
        match self {
            RequestOutcome::Complete { code: Some(code), .. } => code as usize + OUTCOMES_WITHOUT_CODE,
            RequestOutcome::Complete { status: 200..300, code: None } => 0,
            RequestOutcome::Complete { code: None, .. } => 1,
            RequestOutcome::Truncated { .. } => 2,
            RequestOutcome::ClientDisconnected => 3,
            RequestOutcome::Shutdown => 4,
        }
    }

    pub(crate) fn name(at: usize) -> &'static str {
        const NAMES: [&str; OUTCOMES_WITHOUT_CODE] =
            ["ok", "other_status", "truncated", "client_disconnected", "shutdown"];
        NAMES.get(at).copied().unwrap_or_else(|| ErrorCode::ALL[at - OUTCOMES_WITHOUT_CODE].as_str())
    }

    /// Returns the same response as truncated.
    pub(crate) fn truncated(self) -> RequestOutcome {
        match self {
            RequestOutcome::Complete { status, .. } => RequestOutcome::Truncated { status },
            RequestOutcome::Truncated { .. }
            | RequestOutcome::ClientDisconnected
            | RequestOutcome::Shutdown => self,
        }
    }

    pub(crate) fn status(self) -> Option<u16> {
        match self {
            RequestOutcome::Complete { status, .. } | RequestOutcome::Truncated { status } => Some(status),
            RequestOutcome::ClientDisconnected | RequestOutcome::Shutdown => None,
        }
    }
}

/// Class of outcomes by the party at fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutcomeClass {
    Ok,
    ClientError,
    ServerError,
    /// No complete response was sent.
    Unfinished,
}

impl OutcomeClass {
    pub(crate) const ALL: [OutcomeClass; 4] =
        [OutcomeClass::Ok, OutcomeClass::ClientError, OutcomeClass::ServerError, OutcomeClass::Unfinished];

    pub(crate) fn of(outcome: RequestOutcome) -> OutcomeClass {
        match outcome {
            RequestOutcome::Complete { status: 500.., .. } => OutcomeClass::ServerError,
            RequestOutcome::Complete { status: 400..500, .. } => OutcomeClass::ClientError,
            RequestOutcome::Complete { .. } => OutcomeClass::Ok,
            RequestOutcome::Truncated { .. }
            | RequestOutcome::ClientDisconnected
            | RequestOutcome::Shutdown => OutcomeClass::Unfinished,
        }
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            OutcomeClass::Ok => "ok",
            OutcomeClass::ClientError => "client_error",
            OutcomeClass::ServerError => "server_error",
            OutcomeClass::Unfinished => "unfinished",
        }
    }
}

/// Protocol of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientProtocol {
    Http1,
    Http2,
}

impl ClientProtocol {
    pub(crate) const ALL: [ClientProtocol; 2] = [ClientProtocol::Http1, ClientProtocol::Http2];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            ClientProtocol::Http1 => "http/1.1",
            ClientProtocol::Http2 => "h2",
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
pub(crate) enum LatencyStage {
    /// This process, and failed attempts.
    Gateway,
    Network,
    Queue,
    Tokenize,
    Engine,
    /// From the head of the response to its last byte.
    Sending,
}

impl LatencyStage {
    pub(crate) const ALL: [LatencyStage; 6] = [
        LatencyStage::Gateway,
        LatencyStage::Network,
        LatencyStage::Queue,
        LatencyStage::Tokenize,
        LatencyStage::Engine,
        LatencyStage::Sending,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            LatencyStage::Gateway => "gateway",
            LatencyStage::Network => "network",
            LatencyStage::Queue => "queue",
            LatencyStage::Tokenize => "tokenize",
            LatencyStage::Engine => "engine",
            LatencyStage::Sending => "sending",
        }
    }
}
