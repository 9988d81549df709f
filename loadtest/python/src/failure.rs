//! Errors of operations as Python exceptions.

use loadtest::client::jobs::ClientJobError;
use loadtest::client::{ClientError, HttpAttemptError};
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(
    _native,
    Failed,
    PyException,
    "Failed operation: kind, status and message; of a job also its id and the reason."
);

/// Converts an error into the Python exception.
pub(crate) fn failed(error: &ClientError) -> PyErr {
    let (kind, status) = match error {
        ClientError::Invalid(_) => ("invalid", None),
        ClientError::Failed { failure: HttpAttemptError::ErrorStatus { status, .. }, .. } => {
            ("status", Some(*status))
        }
        ClientError::Failed { failure: HttpAttemptError::Redirected { .. }, .. } => ("status", Some(307)),
        ClientError::Failed { failure: HttpAttemptError::Timeout, .. } | ClientError::Timeout { .. } => {
            ("timeout", None)
        }
        ClientError::Failed { .. } => ("connection", None),
        ClientError::InvalidResponse { .. } => ("invalid_response", None),
    };
    Failed::new_err((kind, status, error.to_string()))
}

/// Converts the error of a request about a job into the Python exception.
pub(crate) fn job_failed(error: &ClientJobError) -> PyErr {
    let (kind, id, reason) = match error {
        ClientJobError::Request(error) => return failed(error),
        ClientJobError::Failed { id, reason } => ("job_failed", id, reason.as_str()),
        ClientJobError::Expired { id, reason } => ("job_expired", id, reason.as_str()),
        ClientJobError::Cancelled { id } => ("job_cancelled", id, ""),
        ClientJobError::Finished { id } => ("job_finished", id, ""),
        ClientJobError::NotFound { id } => ("job_not_found", id, ""),
        ClientJobError::Timeout { id, timeout: _ } => ("job_timeout", id, ""),
    };
    Failed::new_err((kind, None::<u16>, error.to_string(), id.clone(), reason.to_owned()))
}
