//! Errors that keep a replica from serving.

use std::fmt::Display;
use std::io;
use std::net::SocketAddr;

use replica_api::start_failure::{StartFailure, StartFailureReport};
use telemetry::ExportError;

use crate::cache::{ModelSource, PullError, ResolveError};
use crate::model::ModelError;
use crate::tokenize::TokenizerLoadError;

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
    /// The model cannot be loaded on this machine or with this configuration; the text has the cause. The replica does not
    /// start.
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

    /// Returns the error of loading the tokenizer.
    pub(crate) fn of_tokenizer(self, error: &TokenizerLoadError) -> ServeError {
        if error.is_of_this_machine { self.of_machine(error) } else { self.invalid_model(false, error) }
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use replica_api::input::Readable;

    use super::*;
    use crate::model::TokenizerConfig;
    use crate::tokenize::TextTokenizer;

    fn errors(source: &ModelSource) -> LoadErrors<'_> {
        LoadErrors { source, digest: "digest", is_verified: true }
    }

    #[test]
    fn only_an_invalid_file_of_a_model_leads_to_another_attempt() {
        let source = "s3://bucket/m".parse().expect("a source");
        let of_model = |error: ModelError| errors(&source).of_model(&error).failure().is_some();
        let (path, problem) = (Path::new("config.json").to_owned(), "the `task`".to_owned());
        assert!(of_model(ModelError::Content { path: path.clone(), problem: problem.clone() }));
        assert!(!of_model(ModelError::OtherTask { path: path.clone(), problem }), "of the configuration");
        for (kind, is_of_the_model) in [(io::ErrorKind::NotFound, true), (io::ErrorKind::OutOfMemory, false)]
        {
            let error = ModelError::Read { path: path.clone(), reason: kind.into() };
            assert_eq!(of_model(error), is_of_the_model, "{kind}");
        }
    }

    #[test]
    fn a_tokenizer_that_cannot_be_read_on_this_machine_ends_the_process() {
        let source = "s3://bucket/m".parse().expect("a source");
        let folder = tempfile::tempdir().expect("a folder");
        let leads_to_another_attempt = || {
            let readable = Readable { max_input_tokens: 12, vocabulary: 512 };
            let loaded = TextTokenizer::load_from(
                folder.path(),
                &TokenizerConfig::default(),
                false,
                None,
                readable,
                2,
            );
            errors(&source).of_tokenizer(&loaded.err().expect("an error")).failure().is_some()
        };
        let path = folder.path().join("tokenizer.json");
        assert!(leads_to_another_attempt(), "the file is missing");
        fs::write(&path, "{").expect("a file");
        assert!(leads_to_another_attempt(), "the file is invalid");
        fs::remove_file(&path).expect("to remove it");
        fs::create_dir(&path).expect("a folder");
        assert!(!leads_to_another_attempt(), "the file cannot be read");
    }
}
