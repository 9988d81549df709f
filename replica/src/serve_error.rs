//! Errors that keep a replica from serving.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;

use replica_api::start_failure::{StartFailure, StartFailureReport};
use telemetry::ExportError;

use crate::cache::{ModelSource, PullError, ResolveError};
use crate::model::ModelError;

/// Reason why a replica does not serve.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be bound: another process uses it, it belongs to another machine, or the port needs a
    /// permission. The replica does not start.
    #[error("cannot listen on {address}: {reason}; choose another address for `listen`")]
    Listen {
        /// Configured address.
        address: SocketAddr,
        /// Error of the operating system.
        reason: io::Error,
    },
    /// The process does not know where to store models.
    #[error(
        "the location of the model cache is not configured; set MERIDIAN_CACHE, or `cache` in the configuration"
    )]
    NoCache,
    /// The model is not on this machine.
    #[error(transparent)]
    Model(#[from] ResolveError),
    /// The model cannot be downloaded. The replica tries again.
    #[error(transparent)]
    Pull(#[from] PullError),
    /// The files of the model are invalid, or its family is not supported. A replica that downloads its model looks for
    /// another version of it at its origin.
    #[error("{0}")]
    InvalidModel(InvalidModel),
    /// The model cannot be loaded on this machine; the text has the cause. The replica does not start.
    #[error("cannot load {model}: {reason}")]
    Load {
        /// Model as configured.
        model: String,
        /// Error message.
        reason: String,
    },
    /// The system starts no more threads, because of a limit of processes or memory. The replica does not start.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// The TLS library rejects the certificate, the key or the settings. The replica does not start.
    #[error("TLS cannot be set up: {0}")]
    Tls(String),
    /// Traces or metrics cannot be exported.
    #[error("{0}")]
    Export(#[from] ExportError),
    /// The listener of the replica failed. The replica exits.
    #[error("cannot serve: {0}")]
    Serve(io::Error),
}

/// Model that cannot be loaded because of its files.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot load {model}: {}{reason}", prefix(*is_verified, *is_unknown_family))]
pub struct InvalidModel {
    /// Model as configured.
    pub model: String,
    /// SHA-256 over the names and digests of its files.
    pub digest: String,
    /// Whether its files were found to be those of its origin: another pull of the same version has the same result.
    pub is_verified: bool,
    /// Whether the cause is its family.
    pub is_unknown_family: bool,
    /// File with the problem, or the family and the supported ones.
    pub reason: String,
}

/// Returns where the problem is, if that is known. The digests of the files are right, so another pull would not help.
fn prefix(is_verified: bool, is_unknown_family: bool) -> &'static str {
    if is_verified && !is_unknown_family { "a file of its origin is invalid: " } else { "" }
}

/// Errors of loading a model, by their cause.
#[derive(Clone, Copy)]
pub(crate) struct LoadErrors<'a> {
    pub(crate) source: &'a ModelSource,
    /// Digest of the model.
    pub(crate) digest: &'a str,
    /// Whether its files were found to be those of its origin.
    pub(crate) is_verified: bool,
}

impl LoadErrors<'_> {
    /// Returns an error whose cause is on this machine, such as the configuration or the number of threads.
    pub(crate) fn of_machine(self, error: &dyn Display) -> ServeError {
        ServeError::Load { model: self.source.to_string(), reason: error.to_string() }
    }

    /// Returns an error whose cause is in the files of the model.
    pub(crate) fn of_files(self, error: &dyn Display) -> ServeError {
        self.invalid_model(false, error)
    }

    /// Returns the error of reading the files of the model.
    pub(crate) fn of_model(self, error: &ModelError) -> ServeError {
        match error {
            error if error.is_of_this_machine() => self.of_machine(error),
            error => self.invalid_model(matches!(error, ModelError::UnknownFamily { .. }), error),
        }
    }

    fn invalid_model(self, is_unknown_family: bool, error: &dyn Display) -> ServeError {
        ServeError::InvalidModel(InvalidModel {
            model: self.source.to_string(),
            digest: self.digest.to_owned(),
            is_verified: self.is_verified,
            is_unknown_family,
            reason: error.to_string(),
        })
    }
}

/// Failure of an attempt to start after which there is another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FailedStart {
    pub(crate) report: StartFailureReport,
    /// Model that was on this machine and cannot be loaded; `None` if it could not be pulled.
    pub(crate) invalid_model: Option<InvalidModel>,
}

impl ServeError {
    /// Returns the failure after which the start is tried again; `None` if it ends the process.
    pub(crate) fn failure(&self) -> Option<FailedStart> {
        let (reason, invalid_model) = match self {
            ServeError::Pull(PullError::Cancelled) => return None,
            ServeError::Pull(error) => (error.reason(), None),
            ServeError::InvalidModel(model) => {
                let is_unknown_family = model.is_unknown_family;
                let reason =
                    if is_unknown_family { StartFailure::UnknownFamily } else { StartFailure::ModelCorrupt };
                (reason, Some(model.clone()))
            }
            ServeError::Listen { .. }
            | ServeError::NoCache
            | ServeError::Model(_)
            | ServeError::Load { .. }
            | ServeError::Thread(_)
            | ServeError::Tls(_)
            | ServeError::Export(_)
            | ServeError::Serve(_) => return None,
        };
        Some(FailedStart { report: StartFailureReport::new(reason, self.to_string()), invalid_model })
    }
}
