//! Errors of operations.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use super::http::Failure;
use crate::scan::Wrong;

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
        request: RequestName,
        /// Error of its last attempt.
        failure: Failure,
    },
    /// A response with a success status has an invalid body.
    #[error("{request}: the answer is wrong: {wrong}")]
    Wrong {
        /// The request.
        request: RequestName,
        /// Decoding error.
        wrong: Wrong,
    },
    /// The timeout of the operation expired.
    #[error("{done} of {requests} requests were answered within the {total:?} for all of them")]
    OutOfTime {
        /// Timeout of the operation.
        total: Duration,
        /// Completed requests.
        done: usize,
        /// Total requests.
        requests: usize,
    },
}

/// Request as identified in errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestName {
    /// Index, from 0.
    pub number: usize,
    /// Inputs of the request.
    pub inputs: Range<usize>,
    /// Endpoint of the last attempt.
    pub endpoint: String,
    /// Number of attempts.
    pub attempts: u32,
}

impl fmt::Display for RequestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RequestName { number, inputs: Range { start, end }, endpoint, attempts } = self;
        write!(f, "request {number} (inputs {start}..{end}, attempt {attempts}, to {endpoint})")
    }
}
