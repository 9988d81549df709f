//! Errors that keep a replica from serving.

use std::io;
use std::net::SocketAddr;

use replica_api::start_failure::{StartFailure, StartFailureReport};
use telemetry::ExportError;

use crate::cache::{PullError, ResolveError};

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
    /// The family of the model is not supported. A replica that downloads its model looks for another version of it.
    #[error("cannot load {model}: {reason}")]
    UnknownFamily {
        /// Model as configured.
        model: String,
        /// Family, and the supported ones.
        reason: String,
    },
    /// The model cannot be loaded; the text has the cause. The replica does not start.
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
    /// Traces cannot be exported.
    #[error("{0}")]
    Tracing(#[from] ExportError),
    /// The listener of the replica failed. The replica exits.
    #[error("cannot serve: {0}")]
    Serve(io::Error),
}

impl ServeError {
    /// Returns the report of a failure after which the start is tried again; `None` if it ends the process.
    pub(crate) fn failure(&self) -> Option<StartFailureReport> {
        let reason = match self {
            ServeError::Pull(PullError::Cancelled) => return None,
            ServeError::Pull(error) => error.reason(),
            ServeError::UnknownFamily { .. } => StartFailure::UnknownFamily,
            ServeError::Listen { .. }
            | ServeError::NoCache
            | ServeError::Model(_)
            | ServeError::Load { .. }
            | ServeError::Thread(_)
            | ServeError::Tls(_)
            | ServeError::Tracing(_)
            | ServeError::Serve(_) => return None,
        };
        Some(StartFailureReport::new(reason, self.to_string()))
    }
}
