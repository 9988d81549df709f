//! Metric labels: closed sets with a number and a name for each value.

use super::InGateway;
use crate::names;
use gateway_core::endpoint::Endpoint;
use gateway_core::flood::IdleFrame;
use gateway_core::labels::AttemptResult;
use gateway_core::shed::ShedReason;
use gateway_core::trail::AttemptCause;
use metrics::{Label, labels, labels_of};
use pingora::protocols::http::ServerSession;
use replica_api::error::{ErrorCode, Fault};
use replica_api::headers;
use replica_api::priority::Priority;
use replica_api::start_failure::StartFailure;
use scheduler_api::requests::OUTCOMES_WITHOUT_CODE;

labels_of!(InGateway: AttemptCause, AttemptResult, IdleFrame, Priority, ShedReason, StartFailure);

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

impl<In> Label<In> for EndpointLabel {
    fn values() -> Vec<&'static str> {
        Endpoint::paths().chain([EndpointLabel::OTHER.as_str()]).collect()
    }

    fn index(self) -> usize {
        Endpoint::paths().take_while(|path| *path != self.as_str()).count()
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

impl RequestOutcome {
    pub(crate) const LEN: usize = OUTCOMES_WITHOUT_CODE.len() + ErrorCode::ALL.len();

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

    /// Returns the number of the outcome: its index in [`OUTCOMES_WITHOUT_CODE`], which the error codes follow.
    pub(crate) fn index(self) -> usize {
        match self {
            RequestOutcome::Complete { code: Some(code), .. } => OUTCOMES_WITHOUT_CODE.len() + code as usize,
            RequestOutcome::Complete { status: 200..300, code: None } => 0,
            RequestOutcome::Complete { status: 500.., code: None } => 5,
            RequestOutcome::Complete { code: None, .. } => 1,
            RequestOutcome::Truncated { .. } => 2,
            RequestOutcome::ClientDisconnected => 3,
            RequestOutcome::Shutdown => 4,
        }
    }

    pub(crate) fn name(at: usize) -> &'static str {
        let without_code = OUTCOMES_WITHOUT_CODE.get(at).copied();
        without_code.unwrap_or_else(|| ErrorCode::ALL[at - OUTCOMES_WITHOUT_CODE.len()].as_str())
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

impl<In> Label<In> for RequestOutcome {
    fn values() -> Vec<&'static str> {
        (0..RequestOutcome::LEN).map(RequestOutcome::name).collect()
    }

    fn index(self) -> usize {
        RequestOutcome::index(self)
    }
}

labels! {
    /// Why an explanation was not written to disk.
    pub(crate) enum ExplanationLoss {
        QueueFull = "queue_full",
        /// The tenant had used its quota of the hour.
        Quota = "quota",
        Disk = "disk",
    }
}

labels! {
    /// Class of outcomes by the party at fault.
    pub(crate) enum OutcomeClass {
        Ok = "ok",
        ClientError = "client_error",
        ServerError = "server_error",
        /// No complete response was sent.
        Unfinished = "unfinished",
    }
}

impl OutcomeClass {
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
}

labels! {
    /// Result of a request for the objective of its deployment.
    pub(crate) enum ObjectiveResult {
        Ok = "ok",
        /// Meridian is at fault.
        Failed = "failed",
        /// The client is at fault, over a quota or disconnected, so the request is neither good nor bad.
        Excluded = "excluded",
    }
}

impl ObjectiveResult {
    /// Returns the result of a request with this outcome. The recording rule `meridian_fleet:requests_bad:rate5m` has the
    /// same failures.
    pub(crate) fn of(outcome: RequestOutcome) -> ObjectiveResult {
        match outcome {
            RequestOutcome::Complete { status: 200..300, code: None } => ObjectiveResult::Ok,
            RequestOutcome::Complete { status: 500.., code: None } => ObjectiveResult::Failed,
            RequestOutcome::Complete { code: None, .. } | RequestOutcome::ClientDisconnected => {
                ObjectiveResult::Excluded
            }
            RequestOutcome::Truncated { .. } | RequestOutcome::Shutdown => ObjectiveResult::Failed,
            RequestOutcome::Complete { code: Some(code), .. } => match code.fault() {
                Fault::Capacity | Fault::Network | Fault::Replica => ObjectiveResult::Failed,
                // No client causes these.
                _ if matches!(code, ErrorCode::NotResidentHere | ErrorCode::PolicyTooOld) => {
                    ObjectiveResult::Failed
                }
                Fault::Caller | Fault::Quota | Fault::Policy => ObjectiveResult::Excluded,
            },
        }
    }
}

labels! {
    /// Protocol of a request.
    pub(crate) enum ClientProtocol {
        Http1 = "http/1.1",
        Http2 = "h2",
    }
}

labels! {
    /// Stage of a request, for its latency breakdown.
    pub(crate) enum LatencyStage {
        /// This process, and failed attempts.
        Gateway = "gateway",
        Network = "network",
        Queue = "queue",
        Tokenize = "tokenize",
        Engine = "engine",
        /// From the head of the response to its last byte.
        Sending = "sending",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_objective_of_a_deployment_has_the_failures_of_the_recording_rule_of_the_fleet() {
        let rules = include_str!("../../../configs/observability/rules/recording.yml");
        let (_, rule) = rules.split_once("record: meridian_fleet:requests_bad:rate5m").unwrap();
        let (_, outcomes) = rule.split_once("outcome=~\"").unwrap();
        let counted: BTreeSet<_> = outcomes.split_once('"').unwrap().0.split('|').collect();
        let with_code =
            |code: ErrorCode| RequestOutcome::Complete { status: code.status(), code: Some(code) };
        let others = [
            RequestOutcome::Complete { status: 200, code: None },
            RequestOutcome::Complete { status: 499, code: None },
            RequestOutcome::Complete { status: 500, code: None },
            RequestOutcome::Truncated { status: 200 },
            RequestOutcome::ClientDisconnected,
            RequestOutcome::Shutdown,
        ];
        let all = ErrorCode::ALL.iter().map(|code| with_code(*code)).chain(others);
        let failed = all.filter(|outcome| ObjectiveResult::of(*outcome) == ObjectiveResult::Failed);
        assert_eq!(
            failed.map(|outcome| RequestOutcome::name(outcome.index())).collect::<BTreeSet<_>>(),
            counted
        );
    }
}
