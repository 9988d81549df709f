//! Why an operation gave no result.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use super::http::Failure;
use crate::scan::Wrong;

/// Why an operation gave no result. One request that fails for good fails the operation: the rest is taken back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// Nothing was sent, for all of these reasons.
    #[error("{}", .0.join("; "))]
    Invalid(Vec<String>),
    /// A request failed and could not be tried again.
    #[error("{request}: {failure}")]
    Failed {
        /// Which.
        request: RequestName,
        /// Why.
        failure: Failure,
    },
    /// A server said yes, with something that is not an answer.
    #[error("{request}: the answer is wrong: {wrong}")]
    Wrong {
        /// To which request.
        request: RequestName,
        /// What is wrong with it.
        wrong: Wrong,
    },
    /// The time for everything was up.
    #[error("{done} of {requests} requests were answered within the {total:?} for all of them")]
    OutOfTime {
        /// The time for everything.
        total: Duration,
        /// How many requests were answered.
        done: usize,
        /// Of how many.
        requests: usize,
    },
}

/// A request, as an error names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestName {
    /// Its number, from 0.
    pub number: usize,
    /// The inputs that it carries.
    pub inputs: Range<usize>,
    /// Where it was sent last.
    pub endpoint: String,
    /// How many attempts were made.
    pub attempts: u32,
}

impl fmt::Display for RequestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RequestName { number, inputs: Range { start, end }, endpoint, attempts } = self;
        write!(f, "request {number} (inputs {start}..{end}, attempt {attempts}, to {endpoint})")
    }
}
