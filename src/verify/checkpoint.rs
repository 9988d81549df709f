//! The file of the signed checkpoint: read before an audit, and renewed after one that found the chains whole.

use gateway_core::receipt::audit::Report;
use gateway_core::receipt::checkpoint::{AuditCheckpoint, CheckpointKey, CheckpointProblem};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Where the checkpoint is, and with what it is signed.
pub(super) struct Keeping {
    file: PathBuf,
    key: CheckpointKey,
    /// What was there; nothing where one is begun.
    pub(super) last: Option<AuditCheckpoint>,
}

/// Why an audit cannot go by the checkpoint.
pub(super) enum Unusable {
    /// Something is missing or not as it must be.
    Problem(String),
    /// It is not the one that was signed.
    Tampered(String),
}

impl Keeping {
    /// Reads the checkpoint in `file`; `begin` says that there is none yet.
    pub(super) fn read(file: &Path, key_file: &Path, begin: bool) -> Result<Keeping, Unusable> {
        let problem = |text: String| Unusable::Problem(text);
        let secret = fs::read_to_string(key_file)
            .map_err(|error| problem(format!("--checkpoint-key-file {}: {error}", key_file.display())))?;
        let key = CheckpointKey::new(secret.trim().as_bytes()).ok_or_else(|| {
            let least = CheckpointKey::SECRET_BYTES_MIN;
            problem(format!(
                "--checkpoint-key-file {}: it has fewer than {least} bytes and could be guessed; make it longer",
                key_file.display()
            ))
        })?;
        let keeping = |last| Keeping { file: file.to_owned(), key: key.clone(), last };
        match (fs::read_to_string(file), begin) {
            (Ok(_), true) => Err(problem(format!(
                "--init-checkpoint: there is a checkpoint in {} already; leave the option out",
                file.display()
            ))),
            (Ok(text), false) => match AuditCheckpoint::read(&text, &key) {
                Ok(last) => Ok(keeping(Some(last))),
                Err(error @ CheckpointProblem::Signature) => {
                    Err(Unusable::Tampered(format!("the checkpoint {}: {error}", file.display())))
                }
                Err(error) => Err(problem(format!("--checkpoint {}: {error}", file.display()))),
            },
            (Err(error), true) if error.kind() == io::ErrorKind::NotFound => Ok(keeping(None)),
            (Err(error), _) if error.kind() == io::ErrorKind::NotFound => Err(problem(format!(
                "--checkpoint {}: there is none; restore it, or begin a new one with --init-checkpoint (then nothing before \
                 it is compared)",
                file.display()
            ))),
            (Err(error), _) => Err(problem(format!("--checkpoint {}: {error}", file.display()))),
        }
    }

    /// Renews the checkpoint; `None` where the audit found a chain that is not whole, and the last one stays.
    pub(super) fn renew(&self, report: &Report) -> io::Result<Option<AuditCheckpoint>> {
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
