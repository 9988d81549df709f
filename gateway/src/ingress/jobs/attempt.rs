//! End of one attempt to compute a request of a job: at a replica of this region, or in another region.

use crate::respond::Rejection;
use crate::upstream::{ResponseBody, Upstream, UpstreamResponse, WholeBodyError};
use bytes::Bytes;
use jobs::queue_host::ComputationEnd;
use jobs_core::decide::ComputeEnd;
use replica_api::error::{ErrorBody, ErrorCode, Fault, Remedy};
use replica_api::headers;
use scheduler_api::usage::UsageCounts;
use std::time::Duration;

/// Time until a retry after a rejection for lack of capacity, if it names none; and at least.
const NO_CAPACITY_PAUSE: Duration = Duration::from_secs(1);
const RETRY_MIN: Duration = Duration::from_millis(50);
/// Largest result, bytes: the vectors of the most inputs of one request, 2048 of 4096 dimensions as text.
pub(super) const RESULT_BYTES_MAX: usize = 256 << 20;

/// Response to an attempt.
pub(super) struct JobAttemptResponse {
    /// Status.
    pub(super) status: u16,
    /// Error code, if it has one.
    pub(super) error: Option<ErrorCode>,
    /// Time until a retry is useful, if it names one.
    pub(super) retry_after: Option<Duration>,
    /// Tokens that were computed; 0 if it does not say it, as of a gateway of an earlier version.
    pub(super) tokens: u64,
    /// Body.
    pub(super) body: Bytes,
}

/// End of one request to a replica.
pub(super) enum ReplicaAttemptEnd {
    /// The response.
    Computed {
        /// Its body.
        body: Bytes,
        /// Tokens that were computed.
        tokens: u64,
    },
    /// The same request would fail again: its status and its error.
    Rejected((u16, ErrorBody)),
    /// It failed, with the reason.
    Failed(String),
    /// There was no capacity.
    NoCapacity {
        /// Reason.
        reason: String,
        /// Time until a retry is useful.
        retry_after: Duration,
    },
}

/// End of one request of a job: at a replica, or in another region.
pub(super) struct JobRequestEnd {
    /// The end.
    pub(super) end: ReplicaAttemptEnd,
    /// Whether it says something about gateways, and nothing about the region that would have computed the request.
    pub(super) is_gateway_lost: bool,
}

/// End of an attempt to compute a job.
pub(super) struct JobAttemptEnd {
    /// Its effect on the job.
    pub(super) end: ComputationEnd,
    /// Usage of the tenant, which counts if the end takes effect.
    pub(super) usage: UsageCounts,
    /// As in [`JobRequestEnd`].
    pub(super) is_gateway_lost: bool,
}

impl From<ReplicaAttemptEnd> for JobRequestEnd {
    fn from(end: ReplicaAttemptEnd) -> JobRequestEnd {
        JobRequestEnd { end, is_gateway_lost: false }
    }
}

impl JobRequestEnd {
    /// Returns the end of the attempt at a job that is one request with this number of inputs.
    pub(super) fn of_job(self, inputs: u64) -> JobAttemptEnd {
        let JobRequestEnd { end, is_gateway_lost } = self;
        let usage = match &end {
            ReplicaAttemptEnd::Computed { tokens, .. } => {
                UsageCounts { requests: 1, inputs, tokens: *tokens }
            }
            ReplicaAttemptEnd::Rejected(_)
            | ReplicaAttemptEnd::Failed(_)
            | ReplicaAttemptEnd::NoCapacity { .. } => UsageCounts::default(),
        };
        JobAttemptEnd { end: end.into(), usage, is_gateway_lost }
    }
}

impl From<ReplicaAttemptEnd> for JobAttemptEnd {
    /// Returns the end of an attempt without a computation.
    fn from(end: ReplicaAttemptEnd) -> JobAttemptEnd {
        JobAttemptEnd { end: end.into(), usage: UsageCounts::default(), is_gateway_lost: false }
    }
}

impl From<ReplicaAttemptEnd> for ComputationEnd {
    fn from(end: ReplicaAttemptEnd) -> ComputationEnd {
        ComputationEnd::Other(match end {
            ReplicaAttemptEnd::Computed { body, tokens: _ } => return ComputationEnd::Computed(body),
            ReplicaAttemptEnd::Rejected((_, error)) => ComputeEnd::Rejected(error.error.message),
            ReplicaAttemptEnd::Failed(reason) => ComputeEnd::Failed(reason),
            ReplicaAttemptEnd::NoCapacity { reason, retry_after } => {
                ComputeEnd::NoCapacity { reason, retry_after }
            }
        })
    }
}

/// Returns the end of a request whose gateway was lost, which counts as a failed attempt, or that no gateway has taken.
pub(super) fn gateway_lost(was_granted: bool) -> JobRequestEnd {
    let end = if was_granted {
        failed("the gateway that had the request did not return it in time")
    } else {
        no_capacity("no gateway has taken the request".to_owned(), None)
    };
    JobRequestEnd { end, is_gateway_lost: true }
}

pub(super) fn rejected(code: ErrorCode, message: String) -> ReplicaAttemptEnd {
    ReplicaAttemptEnd::Rejected((code.status(), ErrorBody::new(code, message, None)))
}

pub(super) fn failed(reason: impl Into<String>) -> ReplicaAttemptEnd {
    ReplicaAttemptEnd::Failed(reason.into())
}

/// Returns the end of an attempt that no replica has responded to.
pub(super) fn not_computed(rejection: Rejection) -> ReplicaAttemptEnd {
    let Rejection { code, message, retry_after, .. } = rejection;
    match code.fault() {
        // The job waits until an operator has corrected the deployment, or until it expires.
        _ if code == ErrorCode::DeploymentFailed => no_capacity(message, retry_after),
        Fault::Policy | Fault::Caller | Fault::Quota => rejected(code, message),
        Fault::Capacity if code != ErrorCode::DeadlineExceeded => no_capacity(message, retry_after),
        Fault::Capacity | Fault::Replica | Fault::Network => failed(message),
    }
}

pub(super) fn no_capacity(reason: String, retry_after: Option<Duration>) -> ReplicaAttemptEnd {
    let retry_after = retry_after.unwrap_or(NO_CAPACITY_PAUSE).max(RETRY_MIN);
    ReplicaAttemptEnd::NoCapacity { reason, retry_after }
}

/// Reads the response of a replica.
pub(super) async fn received(upstream: &Upstream, response: UpstreamResponse) -> ReplicaAttemptEnd {
    let UpstreamResponse { head, body } = response;
    let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
    let body = match body {
        ResponseBody::Buffered(body) => body,
        ResponseBody::Streamed(streamed) => {
            match streamed.read_after(Vec::new(), RESULT_BYTES_MAX, upstream).await {
                Ok(body) => body,
                Err(WholeBodyError::TooLong) => {
                    let problem =
                        format!("the result has more than {RESULT_BYTES_MAX} bytes; send fewer inputs");
                    return rejected(ErrorCode::InvalidValue, problem);
                }
                Err(WholeBodyError::Truncated) => {
                    return failed("the response of the replica was truncated");
                }
            }
        }
    };
    let retry_after = text(headers::RETRY_AFTER_MS).and_then(|wait| wait.parse().ok());
    let response = JobAttemptResponse {
        status: head.status.as_u16(),
        error: text(headers::ERROR).and_then(ErrorCode::parse),
        retry_after: retry_after.map(Duration::from_millis),
        tokens: text(headers::TOKENS).and_then(|tokens| tokens.parse().ok()).unwrap_or_default(),
        body,
    };
    of_replica(response)
}

/// Returns the end of an attempt by the response of a replica of this region.
fn of_replica(response: JobAttemptResponse) -> ReplicaAttemptEnd {
    let JobAttemptResponse { status, error, retry_after, tokens, body } = response;
    if (200..300).contains(&status) {
        return ReplicaAttemptEnd::Computed { body, tokens };
    }
    let reason = message(&body).unwrap_or_else(|| format!("the replica responded with status {status}"));
    match error {
        Some(code) if code.fault() == Fault::Capacity && code != ErrorCode::DeadlineExceeded => {
            no_capacity(reason, retry_after)
        }
        Some(code) if code.remedy() == Remedy::Nothing && code != ErrorCode::DeadlineExceeded => {
            let param = param(&body);
            ReplicaAttemptEnd::Rejected((status, ErrorBody::new(code, reason, param.as_deref())))
        }
        Some(_) => failed(reason),
        None if (400..500).contains(&status) && ![408, 429].contains(&status) => {
            ReplicaAttemptEnd::Rejected((status, ErrorBody::new(ErrorCode::InvalidValue, reason, None)))
        }
        None => failed(reason),
    }
}

/// Returns the end of an attempt by the response of another region. Its model decides as one of this region does. An error of the
/// region itself (its capacity, its policy, the network) is no fault of the job, which returns to the queue.
pub(super) fn of_region(response: JobAttemptResponse) -> ReplicaAttemptEnd {
    let code = response.error.filter(|code| *code != ErrorCode::DeadlineExceeded);
    let has_failed = code == Some(ErrorCode::DeploymentFailed);
    match code.map(ErrorCode::fault) {
        Some(fault)
            if has_failed
                || matches!(fault, Fault::Policy | Fault::Quota | Fault::Network | Fault::Capacity) =>
        {
            let JobAttemptResponse { status, retry_after, body, .. } = response;
            let reason =
                message(&body).unwrap_or_else(|| format!("the region responded with status {status}"));
            no_capacity(reason, retry_after)
        }
        Some(_) | None => of_replica(response),
    }
}

/// Returns the field that an error body names.
fn param(body: &Bytes) -> Option<String> {
    serde_json::from_slice::<ErrorBody>(body).ok()?.error.param
}

/// Returns the message of an error body.
fn message(body: &Bytes) -> Option<String> {
    if let Ok(body) = serde_json::from_slice::<ErrorBody>(body) {
        return Some(body.error.message);
    }
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    body.get("error")?.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(code: ErrorCode) -> JobAttemptResponse {
        let body = ErrorBody::new(code, "reason".to_owned(), None).to_json().into();
        JobAttemptResponse { status: code.status(), error: Some(code), retry_after: None, tokens: 0, body }
    }

    #[test]
    fn what_is_about_another_region_is_not_the_fault_of_the_job() {
        for code in [
            ErrorCode::NotResidentHere,
            ErrorCode::PolicyTooOld,
            ErrorCode::Overloaded,
            ErrorCode::NoCapacityInAllowedRegions,
        ] {
            let end = of_region(response(code));
            assert!(matches!(end, ReplicaAttemptEnd::NoCapacity { .. }), "{code:?}");
        }
        assert!(matches!(of_region(response(ErrorCode::InputTooLong)), ReplicaAttemptEnd::Rejected(_)));
        let late = of_region(response(ErrorCode::DeadlineExceeded));
        assert!(
            matches!(late, ReplicaAttemptEnd::Failed(_)),
            "otherwise it would be repeated without an end"
        );
        let without_error = |status| JobAttemptResponse {
            status,
            error: None,
            retry_after: None,
            tokens: 7,
            body: Bytes::new(),
        };
        assert!(matches!(of_region(without_error(200)), ReplicaAttemptEnd::Computed { tokens: 7, .. }));
        let broken = without_error(500);
        assert!(matches!(of_region(broken), ReplicaAttemptEnd::Failed(_)));
    }
}
