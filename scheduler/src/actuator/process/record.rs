//! Records on disk of the replica processes, one per port, by which a restarted spoke finds them.
//!
//! A process id alone proves nothing, because the system reuses it. So a record also has the start time of the process,
//! in the kernel's ticks, and the command line must name the configuration file that the spoke wrote. All checks come
//! after opening a descriptor of the process, which can never refer to another one.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use regions::Deployment;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use scheduler_api::deployment::StoredDeploymentV1;
use scheduler_core::scale::devices::Device;
use serde::{Deserialize, Serialize};

/// Record of one replica.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ProcessRecordV1 {
    version: u32,
    pid: i32,
    /// Field 22 of /proc/PID/stat.
    started: u64,
    /// Duration of the start, once the replica is ready, as an estimate for the next spoke.
    #[serde(default)]
    took_ms: Option<u64>,
    /// Device of the process; absent if none was assigned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    deployment: StoredDeploymentV1,
}

/// Running process of an earlier spoke, with its record.
pub(super) struct AdoptedProcess {
    pub(super) identity: ProcessStart,
    pub(super) process: OwnedFd,
    pub(super) deployment: Deployment,
    pub(super) device: Option<Device>,
    pub(super) took: Option<Duration>,
}

/// Process id with the start time, which together are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProcessStart {
    pub(super) pid: Pid,
    started: u64,
}

impl ProcessStart {
    /// Reads the identity of a running process.
    pub(super) fn read(pid: Pid) -> io::Result<ProcessStart> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))?;
        let unreadable = || io::Error::new(io::ErrorKind::InvalidData, "unreadable /proc entry");
        // The second field is a name in brackets, with arbitrary characters.
        let (_, rest) = stat.rsplit_once(')').ok_or_else(unreadable)?;
        // A zombie stays in the list until its parent has waited for it.
        if matches!(rest.split_whitespace().next(), Some("Z" | "X") | None) {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the process has ended"));
        }
        let started = rest.split_whitespace().nth(22 - 3).and_then(|ticks| ticks.parse().ok());
        Ok(ProcessStart { pid, started: started.ok_or_else(unreadable)? })
    }

    /// Returns whether the process is running.
    pub(super) fn is_running(&self) -> bool {
        ProcessStart::read(self.pid).is_ok_and(|now| now == *self)
    }

    /// Returns a string for an identifier that is never reused.
    pub(super) fn name(&self) -> String {
        format!("{}-{}", self.pid.as_raw_nonzero(), self.started)
    }
}

/// Files of the replica on one port.
#[derive(Clone, Debug)]
pub(super) struct ReplicaFiles {
    dir: PathBuf,
    pub(super) port: u16,
}

impl ReplicaFiles {
    pub(super) fn new(dir: &Path, port: u16) -> ReplicaFiles {
        ReplicaFiles { dir: dir.to_owned(), port }
    }

    pub(super) fn config(&self) -> PathBuf {
        self.dir.join(format!("replica-{}.toml", self.port))
    }

    pub(super) fn log(&self) -> PathBuf {
        self.dir.join(format!("replica-{}.log", self.port))
    }

    pub(super) fn heartbeat(&self) -> PathBuf {
        self.dir.join(format!("replica-{}.alive", self.port))
    }

    fn record(&self) -> PathBuf {
        self.dir.join(format!("replica-{}.json", self.port))
    }

    /// Writes the record.
    pub(super) async fn write(
        &self,
        identity: ProcessStart,
        deployment: &Deployment,
        device: Option<&Device>,
        took: Option<Duration>,
    ) -> io::Result<()> {
        let ProcessStart { pid, started } = identity;
        let pid = pid.as_raw_nonzero().get();
        let took_ms = took.map(|took| took.as_millis() as u64);
        let device = device.map(Device::to_string);
        let deployment = deployment.into();
        let record = ProcessRecordV1 { version: 1, pid, started, took_ms, device, deployment };
        let temporary = self.record().with_extension("new");
        tokio::fs::write(&temporary, serde_json::to_vec(&record)?).await?;
        tokio::fs::rename(temporary, self.record()).await
    }

    /// Removes the record and the heartbeat file.
    pub(super) async fn remove(&self) {
        for file in [self.record(), self.heartbeat()] {
            if let Err(error) = tokio::fs::remove_file(&file).await
                && error.kind() != io::ErrorKind::NotFound
            {
                // A file of a replica that has ended remains on disk.
                tracing::debug!(file = %file.display(), %error, "cannot remove file");
            }
        }
    }

    /// Returns the recorded process, if it is still running.
    pub(super) async fn running_process(&self) -> Option<AdoptedProcess> {
        let bytes = tokio::fs::read(self.record()).await.ok()?;
        let ProcessRecordV1 { version, pid, started, took_ms, device, deployment } =
            serde_json::from_slice(&bytes).ok()?;
        let pid = Pid::from_raw(pid).filter(|_| version == 1)?;
        let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        let identity = ProcessStart { pid, started };
        let same = identity.is_running();
        let config = self.config();
        let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
        let ours = line.split(|byte| *byte == 0).any(|word| word == config.as_os_str().as_encoded_bytes());
        let deployment = Deployment::try_from(deployment).ok()?;
        let (device, took) =
            (device.and_then(|device| device.parse().ok()), took_ms.map(Duration::from_millis));
        (same && ours).then_some(AdoptedProcess { identity, process, deployment, device, took })
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
    async fn only_the_recorded_process_is_adopted() {
        let dir = tempfile::tempdir().unwrap();
        let files = ReplicaFiles::new(dir.path(), 7300);
        assert!(files.running_process().await.is_none(), "no record");
        // The command line names the file, like that of a replica.
        let config = files.config();
        let sleep = |argument: &Path| {
            Command::new("sh").args(["-c", "sleep 100 & wait", "sh"]).arg(argument).spawn().unwrap()
        };
        let (mut ours, mut other) = (sleep(&config), sleep(Path::new("x")));
        let pid = |child: &std::process::Child| Pid::from_raw(child.id().cast_signed()).unwrap();
        let identity = ProcessStart::read(pid(&ours)).unwrap();
        let took = Some(Duration::from_millis(144));
        files.write(identity, &deployment(), None, took).await.unwrap();
        let found = files.running_process().await.unwrap();
        assert_eq!((found.identity, found.deployment, found.took), (identity, deployment(), took));
        assert_eq!(found.device, None);
        let device: Device = "GPU-5f2a".parse().unwrap();
        files.write(identity, &deployment(), Some(&device), took).await.unwrap();
        assert_eq!(files.running_process().await.unwrap().device, Some(device));

        let later = ProcessStart { started: identity.started + 1, ..identity };
        files.write(later, &deployment(), None, None).await.unwrap();
        assert!(files.running_process().await.is_none(), "the process id was reused");
        files.write(ProcessStart::read(pid(&other)).unwrap(), &deployment(), None, None).await.unwrap();
        assert!(files.running_process().await.is_none(), "not a replica of this spoke");
        files.write(identity, &deployment(), None, None).await.unwrap();
        ours.kill().unwrap();
        ours.wait().unwrap();
        assert!(files.running_process().await.is_none(), "the process has ended");
        other.kill().unwrap();
        other.wait().unwrap();
        files.remove().await;
        assert!(!files.record().exists());
    }
}
