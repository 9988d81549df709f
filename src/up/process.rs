//! Child process of a local fleet: start, readiness, signals, stop.

use super::authority::MemberIdentity;
use crate::roles::PARENT_VARIABLE;
use rustix::process::{Pid, Signal, kill_process};
use scheduler::JOIN_TOKEN_VARIABLE;
use scheduler_core::pki::token::JoinToken;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdout, Command};

/// Specification of a process, for its start and restarts.
#[derive(Clone)]
pub(crate) struct ProcessSpec {
    /// Display name: `gateway`, `spoke gcp/europe-west4`.
    pub name: String,
    /// Arguments of `meridian`.
    pub arguments: Vec<String>,
    /// Identity with which it joins the fleet at its first start.
    pub member: Option<MemberIdentity>,
    /// Path of its log.
    pub log: PathBuf,
    /// Readiness signal.
    pub ready: ReadinessSignal,
    /// Whether a second process takes over from the first, which then ends by itself.
    pub takes_over: bool,
}

/// Signal by which a process is known to be ready.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReadinessSignal {
    /// The ready line on stdout, which every role writes.
    ReadyLine,
    /// Successful connections to this address, for other programs.
    Connects(SocketAddr),
}

/// Running process.
pub(crate) struct FleetProcess {
    pub spec: ProcessSpec,
    child: Child,
}

/// Failure to start a process.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// A process of the local fleet could not be started.
    #[error("{name} could not be started: {source}")]
    Spawn { name: String, source: io::Error },
    /// A process of the local fleet ended during its start. The text has the end of its log.
    #[error("{name} ended before it was ready ({status}); end of {log}:\n{tail}", log = log.display())]
    Ended { name: String, status: String, log: PathBuf, tail: String },
    /// A process of the local fleet did not become ready in time. Its log has the reason.
    #[error("{name} was not ready within {} s; see {log}", timeout.as_secs(), log = log.display())]
    TimedOut { name: String, timeout: Duration, log: PathBuf },
}

impl FleetProcess {
    /// Starts `spec`, with a join token if it has no certificate yet, and waits until it is ready.
    ///
    /// Must be called on the main thread: the parent-death signal is sent when the *thread* that started the child ends.
    pub(crate) async fn start(
        spec: ProcessSpec,
        token: Option<&JoinToken>,
        timeout: Duration,
    ) -> Result<FleetProcess, StartError> {
        let spawn_error = |source| StartError::Spawn { name: spec.name.clone(), source };
        let log = File::options().create(true).append(true).open(&spec.log).map_err(spawn_error)?;
        let program = std::env::current_exe().map_err(spawn_error)?;
        let mut child = Command::new(program)
            .args(&spec.arguments)
            .env(PARENT_VARIABLE, std::process::id().to_string())
            .env_remove(JOIN_TOKEN_VARIABLE)
            .envs(token.map(|token| (JOIN_TOKEN_VARIABLE, token.text())))
            .stdin(Stdio::null())
            .stdout(match spec.ready {
                ReadinessSignal::ReadyLine => Stdio::piped(),
                ReadinessSignal::Connects(_) => Stdio::null(),
            })
            .stderr(log)
            // A separate process group: Ctrl-C in the terminal reaches only this process, which stops the others in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(spawn_error)?;
        let ready = async {
            match spec.ready {
                ReadinessSignal::ReadyLine => ready_line(child.stdout.take()).await,
                ReadinessSignal::Connects(address) => connects(&mut child, address).await,
            }
        };
        match tokio::time::timeout(timeout, ready).await {
            Ok(true) => Ok(FleetProcess { spec, child }),
            Ok(false) => {
                let status =
                    child.wait().await.map_or_else(|error| error.to_string(), |status| status.to_string());
                let tail = tail(&spec.log);
                Err(StartError::Ended { name: spec.name, status, log: spec.log, tail })
            }
            Err(_) => Err(StartError::TimedOut { name: spec.name, timeout, log: spec.log }),
        }
    }

    /// Returns the process id while it runs.
    pub(crate) fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Returns the exit status if it has ended.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends a signal; returns whether the process was still running.
    pub(crate) fn signal(&self, signal: Signal) -> bool {
        signal_to(self.child.id(), signal)
    }

    /// Drains the process, and kills it after `within`. A paused process is resumed for that.
    pub(crate) async fn stop(mut self, within: Duration) {
        if self.signal(Signal::TERM)
            && self.signal(Signal::CONT)
            && tokio::time::timeout(within, self.child.wait()).await.is_ok()
        {
            return;
        }
        self.kill().await;
    }

    /// Waits for the process to end by itself, and kills it after `within`.
    pub(crate) async fn wait(mut self, within: Duration) {
        if tokio::time::timeout(within, self.child.wait()).await.is_err() {
            self.kill().await;
        }
    }

    /// Kills the process.
    pub(crate) async fn kill(&mut self) {
        if let Err(error) = self.child.kill().await {
            // A process of the local fleet was to be killed and had ended before.
            tracing::debug!(name = self.spec.name, %error, "process had ended already");
        }
    }
}

/// Sends a signal to a process that has not been reaped; returns whether it exists.
pub(crate) fn signal_to(id: Option<u32>, signal: Signal) -> bool {
    let pid = id.and_then(|id| Pid::from_raw(id as i32));
    pid.is_some_and(|pid| kill_process(pid, signal).is_ok())
}

/// Waits for the ready line; returns false if stdout is closed without it.
async fn ready_line(stdout: Option<ChildStdout>) -> bool {
    let Some(stdout) = stdout else { return false };
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if line.starts_with("ready ") {
            return true;
        }
    }
    false
}

/// Waits until a connection succeeds; returns false if the process ends before.
async fn connects(child: &mut Child, address: SocketAddr) -> bool {
    while matches!(child.try_wait(), Ok(None)) {
        if TcpStream::connect(address).await.is_ok() {
            return true;
        }
        tokio::time::sleep(CONNECT_PERIOD).await;
    }
    false
}

/// Period of connection attempts.
const CONNECT_PERIOD: Duration = Duration::from_millis(20);

/// Maximum bytes of a log that are shown.
const TAIL_BYTES_MAX: usize = 2000;

fn tail(log: &Path) -> String {
    let text =
        std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let mut start = text.len().saturating_sub(TAIL_BYTES_MAX);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    text[start..].trim_end().to_owned()
}
