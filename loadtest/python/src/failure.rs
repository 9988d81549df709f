//! Errors of operations as Python exceptions.

use loadtest::client::{ClientError, HttpAttemptError};
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(_native, Failed, PyException, "Failed operation: kind, status and message.");

/// Converts an error into the Python exception.
pub(crate) fn failed(error: &ClientError) -> PyErr {
    let (kind, status) = match error {
        ClientError::Invalid(_) => ("invalid", None),
        ClientError::Failed { failure: HttpAttemptError::ErrorStatus { status, .. }, .. } => {
            ("status", Some(*status))
        }
        ClientError::Failed { failure: HttpAttemptError::Timeout, .. } | ClientError::Timeout { .. } => {
            ("timeout", None)
        }
        ClientError::Failed { .. } => ("connection", None),
        ClientError::InvalidResponse { .. } => ("invalid_response", None),
    };
    Failed::new_err((kind, status, error.to_string()))
}
