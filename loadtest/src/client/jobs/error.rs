//! Errors of requests about a job.

use std::time::Duration;

use crate::client::{ClientError, HttpAttemptError};

/// Reason why there is no result of a job.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientJobError {
    /// The model rejected the request, or all attempts failed.
    #[error("the job {id} has failed: {reason}")]
    Failed {
        /// The job.
        id: String,
        /// Reason that the server states.
        reason: String,
    },
    /// The job was cancelled.
    #[error("the job {id} was cancelled")]
    Cancelled {
        /// The job.
        id: String,
    },
    /// The job was not computed in time.
    #[error("the job {id} has expired: {reason}")]
    Expired {
        /// The job.
        id: String,
        /// Reason that the server states.
        reason: String,
    },
    /// The job is finished, so it cannot be cancelled.
    #[error("the job {id} is finished and cannot be cancelled")]
    Finished {
        /// The job.
        id: String,
    },
    /// The server has no such job, or has deleted it after its retention time.
    #[error("there is no job {id}, or its retention time has passed")]
    NotFound {
        /// The job.
        id: String,
    },
    /// The job has not finished within the timeout. It continues.
    #[error("the job {id} is not finished after {timeout:?}; it continues")]
    Timeout {
        /// The job.
        id: String,
        /// Timeout of the call.
        timeout: Duration,
    },
    /// A request about the job failed for good.
    #[error(transparent)]
    Request(#[from] ClientError),
}

impl ClientJobError {
    /// Returns the error of a failed request about a job.
    pub(super) fn of_call(id: &str, error: ClientError) -> ClientJobError {
        let id = id.to_owned();
        match &error {
            ClientError::Failed { failure: HttpAttemptError::ErrorStatus { status: 404, .. }, .. } => {
                ClientJobError::NotFound { id }
            }
            ClientError::Failed { failure: HttpAttemptError::ErrorStatus { status: 409, .. }, .. } => {
                ClientJobError::Finished { id }
            }
            _ => ClientJobError::Request(error),
        }
    }
}
