//! Errors of operations.

use std::ops::Range;
use std::time::Duration;

use super::http::HttpAttemptError;
use crate::scan::DecodeError;

/// Error of an operation. One request that fails for good fails the operation, and the others are aborted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// Invalid settings or arguments; no request was sent. Contains all problems.
    #[error("{}", .0.join("; "))]
    Invalid(Vec<String>),
    /// A request failed and is not retried.
    #[error("{request}: {failure}")]
    Failed {
        /// The request.
        request: FailedRequest,
        /// Error of its last attempt.
        failure: HttpAttemptError,
    },
    /// The server responded with a success status and an invalid body.
    #[error("{request}: invalid response: {error}")]
    InvalidResponse {
        /// The request.
        request: FailedRequest,
        /// Decoding error.
        error: DecodeError,
    },
    /// The total timeout of the operation has passed.
    #[error("{done} of {requests} requests were completed within the total timeout of {total:?}")]
    Timeout {
        /// Timeout of the operation.
        total: Duration,
        /// Completed requests.
        done: usize,
        /// Total requests.
        requests: usize,
    },
}

/// Request of the bulk client that an error is about; the text continues with the error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request {number} (inputs {}..{}, attempt {attempts}, to {endpoint})", .inputs.start, .inputs.end)]
pub struct FailedRequest {
    /// Index, from 0.
    pub number: usize,
    /// Inputs of the request.
    pub inputs: Range<usize>,
    /// Endpoint of the last attempt.
    pub endpoint: String,
    /// Number of attempts.
    pub attempts: u32,
}
