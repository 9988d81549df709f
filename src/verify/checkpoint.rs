//! File of the signed checkpoint: read before an audit, and updated after one that found all chains intact.

use gateway_core::receipt::audit::Report;
use gateway_core::receipt::checkpoint::{AuditCheckpoint, CheckpointKey, CheckpointProblem};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The checkpoint's file, signing key and last content.
pub(super) struct CheckpointFile {
    file: PathBuf,
    key: CheckpointKey,
    /// Content of the file; `None` if it is being created.
    pub(super) last: Option<AuditCheckpoint>,
}

/// Reason why the checkpoint cannot be used.
pub(super) enum CheckpointFileError {
    /// A file is missing or invalid.
    Problem(String),
    /// The signature does not match.
    Tampered(String),
}

impl CheckpointFile {
    /// Reads the checkpoint in `file`; with `create`, the file must not exist.
    pub(super) fn read(
        file: &Path,
        key_file: &Path,
        create: bool,
    ) -> Result<CheckpointFile, CheckpointFileError> {
        let problem = |text: String| CheckpointFileError::Problem(text);
        let secret = fs::read_to_string(key_file)
            .map_err(|error| problem(format!("--checkpoint-key-file {}: {error}", key_file.display())))?;
        let key = CheckpointKey::new(secret.trim().as_bytes()).ok_or_else(|| {
            let min = CheckpointKey::SECRET_BYTES_MIN;
            problem(format!(
                "--checkpoint-key-file {}: the key has fewer than {min} bytes and could be guessed; use a longer one",
                key_file.display()
            ))
        })?;
        let with_last = |last| CheckpointFile { file: file.to_owned(), key: key.clone(), last };
        match (fs::read_to_string(file), create) {
            (Ok(_), true) => Err(problem(format!(
                "--init-checkpoint: the checkpoint {} exists already; omit the option",
                file.display()
            ))),
            (Ok(text), false) => match AuditCheckpoint::read(&text, &key) {
                Ok(last) => Ok(with_last(Some(last))),
                Err(error @ CheckpointProblem::Signature) => {
                    Err(CheckpointFileError::Tampered(format!("the checkpoint {}: {error}", file.display())))
                }
                Err(error) => Err(problem(format!("--checkpoint {}: {error}", file.display()))),
            },
            (Err(error), true) if error.kind() == io::ErrorKind::NotFound => Ok(with_last(None)),
            (Err(error), _) if error.kind() == io::ErrorKind::NotFound => Err(problem(format!(
                "--checkpoint {}: the file does not exist; restore it, or create a new one with --init-checkpoint (then earlier \
                 receipts are not compared)",
                file.display()
            ))),
            (Err(error), _) => Err(problem(format!("--checkpoint {}: {error}", file.display()))),
        }
    }

    /// Updates the checkpoint; returns `None` and keeps the last one if the audit found a damaged chain.
    pub(super) fn update(&self, report: &Report) -> io::Result<Option<AuditCheckpoint>> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let Some(next) = AuditCheckpoint::after(self.last.as_ref(), report, now_ms) else { return Ok(None) };
        let mut new = self.file.clone().into_os_string();
        new.push(".new");
        let mut file = fs::File::create(&new)?;
        file.write_all(next.signed(&self.key).as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &self.file)?;
        Ok(Some(next))
    }
}
