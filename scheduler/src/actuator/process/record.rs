//! Who was started at which port, on disk: by this a spoke that starts again finds the replicas of the one before it.
//!
//! A process number alone says nothing, because the system gives it to somebody else later. So a record also has the moment
//! at which the process started, in the kernel's own ticks, and the command line must name the file that we wrote for it.
//! What is checked is checked through a descriptor of the process that was opened before, which can never mean another one.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use regions::Deployment;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use scheduler_core::wire::deployment::StoredDeploymentV1;
use serde::{Deserialize, Serialize};

/// One replica, as its file says.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct RecordV1 {
    version: u32,
    pid: i32,
    /// Field 22 of /proc/PID/stat.
    started: u64,
    /// How long it took to start, once it was ready: the next spoke need not guess.
    #[serde(default)]
    took_ms: Option<u64>,
    deployment: StoredDeploymentV1,
}

/// Who was found, and what is known of it.
pub(super) struct FoundAgain {
    pub(super) identity: Identity,
    pub(super) process: OwnedFd,
    pub(super) deployment: Deployment,
    pub(super) took: Option<Duration>,
}

/// A process, told from all others that ever had its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) pid: Pid,
    started: u64,
}

impl Identity {
    /// That of a process that runs.
    pub(super) fn of(pid: Pid) -> io::Result<Identity> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))?;
        let strange = || io::Error::new(io::ErrorKind::InvalidData, "its /proc entry cannot be read");
        // The second field is a name in brackets, in which anything may stand.
        let (_, rest) = stat.rsplit_once(')').ok_or_else(strange)?;
        // One that has ended stays in the list until its parent has looked.
        if matches!(rest.split_whitespace().next(), Some("Z" | "X") | None) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "it has ended"));
        }
        let started = rest.split_whitespace().nth(22 - 3).and_then(|ticks| ticks.parse().ok());
        Ok(Identity { pid, started: started.ok_or_else(strange)? })
    }

    /// Whether it has not ended.
    pub(super) fn lives(&self) -> bool {
        Identity::of(self.pid).is_ok_and(|now| now == *self)
    }

    /// For an identifier that is never given twice.
    pub(super) fn name(&self) -> String {
        format!("{}-{}", self.pid.as_raw_nonzero(), self.started)
    }
}

/// The files of whoever is at one port.
#[derive(Clone, Debug)]
pub(super) struct Files {
    dir: PathBuf,
    pub(super) port: u16,
}

impl Files {
    pub(super) fn of(dir: &Path, port: u16) -> Files {
        Files { dir: dir.to_owned(), port }
    }

    pub(super) fn config(&self) -> PathBuf {
        self.dir.join(format!("replica-{}.toml", self.port))
    }

    pub(super) fn log(&self) -> PathBuf {
        self.dir.join(format!("replica-{}.log", self.port))
    }

    pub(super) fn alive(&self) -> PathBuf {
        self.dir.join(format!("replica-{}.alive", self.port))
    }

    fn record(&self) -> PathBuf {
        self.dir.join(format!("replica-{}.json", self.port))
    }

    /// Writes who is there.
    pub(super) async fn write(
        &self,
        identity: Identity,
        deployment: &Deployment,
        took: Option<Duration>,
    ) -> io::Result<()> {
        let Identity { pid, started } = identity;
        let pid = pid.as_raw_nonzero().get();
        let took_ms = took.map(|took| took.as_millis() as u64);
        let record = RecordV1 { version: 1, pid, started, took_ms, deployment: deployment.into() };
        let beside = self.record().with_extension("new");
        tokio::fs::write(&beside, serde_json::to_vec(&record)?).await?;
        tokio::fs::rename(beside, self.record()).await
    }

    /// Nobody is there any longer.
    pub(super) async fn forget(&self) {
        for file in [self.record(), self.alive()] {
            if let Err(error) = tokio::fs::remove_file(&file).await
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::debug!(file = %file.display(), %error, "a file stays behind");
            }
        }
    }

    /// Who is there by the record, if that is still so.
    pub(super) async fn found(&self) -> Option<FoundAgain> {
        let bytes = tokio::fs::read(self.record()).await.ok()?;
        let RecordV1 { version, pid, started, took_ms, deployment } = serde_json::from_slice(&bytes).ok()?;
        let pid = Pid::from_raw(pid).filter(|_| version == 1)?;
        let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        let identity = Identity { pid, started };
        let same = identity.lives();
        let config = self.config();
        let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
        let ours = line.split(|byte| *byte == 0).any(|word| word == config.as_os_str().as_encoded_bytes());
        let deployment = Deployment::try_from(deployment).ok()?;
        let took = took_ms.map(Duration::from_millis);
        (same && ours).then_some(FoundAgain { identity, process, deployment, took })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn deployment() -> Deployment {
        let text = "[[deployment]]\nname = \"a\"\ntask = \"embed\"\nmodel = \"m\"\nengine = { kind = \"cpu\", precision = \"f32\" }\n";
        regions::parse_deployments(text, &regions::Catalogue::builtin()).unwrap().remove(0)
    }

    #[tokio::test]
    async fn only_the_process_that_was_started_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::of(dir.path(), 7300);
        assert!(files.found().await.is_none(), "nobody was there");
        // The file's name stands in its command line, as in a replica's.
        let config = files.config();
        let sleep = |argument: &Path| {
            Command::new("sh").args(["-c", "sleep 100 & wait", "sh"]).arg(argument).spawn().unwrap()
        };
        let (mut ours, mut other) = (sleep(&config), sleep(Path::new("x")));
        let pid = |child: &std::process::Child| Pid::from_raw(child.id().cast_signed()).unwrap();
        let identity = Identity::of(pid(&ours)).unwrap();
        let took = Some(Duration::from_millis(144));
        files.write(identity, &deployment(), took).await.unwrap();
        let found = files.found().await.unwrap();
        assert_eq!((found.identity, found.deployment, found.took), (identity, deployment(), took));

        let later = Identity { started: identity.started + 1, ..identity };
        files.write(later, &deployment(), None).await.unwrap();
        assert!(files.found().await.is_none(), "somebody else has its number now");
        files.write(Identity::of(pid(&other)).unwrap(), &deployment(), None).await.unwrap();
        assert!(files.found().await.is_none(), "that is none of ours");
        files.write(identity, &deployment(), None).await.unwrap();
        ours.kill().unwrap();
        ours.wait().unwrap();
        assert!(files.found().await.is_none(), "it has ended");
        other.kill().unwrap();
        other.wait().unwrap();
        files.forget().await;
        assert!(!files.record().exists());
    }
}
