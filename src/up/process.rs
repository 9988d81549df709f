//! One process of the world: started, announced, stopped.

use crate::roles::PARENT_VARIABLE;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdout, Command};

/// What is started, and again after a restart.
#[derive(Clone)]
pub(crate) struct Spec {
    /// For people: `gateway`, `spoke gcp/europe-west4`.
    pub name: String,
    /// Everything behind `meridian`.
    pub arguments: Vec<String>,
    /// Where its log goes.
    pub log: PathBuf,
    /// By what it is seen that it can be used.
    pub ready: Ready,
    /// A second one takes over from the first, which then ends by itself.
    pub takes_over: bool,
}

/// By what it is seen that a process can be used.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ready {
    /// It says so on stdout, as every role does.
    Says,
    /// It is somebody else's program, and connections to this address come about.
    Answers(SocketAddr),
}

/// A process that runs.
pub(crate) struct Process {
    pub spec: Spec,
    child: Child,
}

/// Why a process did not become ready.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("{name} could not be started: {source}")]
    Spawn { name: String, source: io::Error },
    #[error("{name} ended before it was ready ({status}); the end of {log} says:\n{tail}", log = log.display())]
    Ended { name: String, status: String, log: PathBuf, tail: String },
    #[error("{name} was not ready within {} s; see {log}", timeout.as_secs(), log = log.display())]
    Late { name: String, timeout: Duration, log: PathBuf },
}

impl Process {
    /// Starts `spec` and waits until it says that it is ready.
    ///
    /// To be called on the main thread: the kernel ends the process when the *thread* that started it is gone.
    pub(crate) async fn start(spec: Spec, timeout: Duration) -> Result<Process, StartError> {
        let spawn_error = |source| StartError::Spawn { name: spec.name.clone(), source };
        let log = File::options().create(true).append(true).open(&spec.log).map_err(spawn_error)?;
        let program = std::env::current_exe().map_err(spawn_error)?;
        let mut child = Command::new(program)
            .args(&spec.arguments)
            .env(PARENT_VARIABLE, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(match spec.ready {
                Ready::Says => Stdio::piped(),
                Ready::Answers(_) => Stdio::null(),
            })
            .stderr(log)
            // A group of its own, so that a Ctrl-C in the terminal reaches us alone and we choose the order of the end.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(spawn_error)?;
        let ready = async {
            match spec.ready {
                Ready::Says => says_so(child.stdout.take()).await,
                Ready::Answers(address) => answers(&mut child, address).await,
            }
        };
        match tokio::time::timeout(timeout, ready).await {
            Ok(true) => Ok(Process { spec, child }),
            Ok(false) => {
                let status =
                    child.wait().await.map_or_else(|error| error.to_string(), |status| status.to_string());
                let tail = tail(&spec.log);
                Err(StartError::Ended { name: spec.name, status, log: spec.log, tail })
            }
            Err(_) => Err(StartError::Late { name: spec.name, timeout, log: spec.log }),
        }
    }

    /// Its process identifier while it runs.
    pub(crate) fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// How it ended, if it has.
    pub(crate) fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends it a signal; whether it still ran.
    pub(crate) fn signal(&self, signal: Signal) -> bool {
        signal_to(self.child.id(), signal)
    }

    /// Asks it to drain, and ends it if it takes longer than `within`. One that was stopped hears of it as well.
    pub(crate) async fn stop(mut self, within: Duration) {
        if self.signal(Signal::TERM)
            && self.signal(Signal::CONT)
            && tokio::time::timeout(within, self.child.wait()).await.is_ok()
        {
            return;
        }
        self.kill().await;
    }

    /// Waits until it has ended by itself, and ends it if that takes longer than `within`.
    pub(crate) async fn ended(mut self, within: Duration) {
        if tokio::time::timeout(within, self.child.wait()).await.is_err() {
            self.kill().await;
        }
    }

    /// Ends it at once.
    pub(crate) async fn kill(&mut self) {
        if let Err(error) = self.child.kill().await {
            tracing::debug!(name = self.spec.name, %error, "it had ended already");
        }
    }
}

/// Sends a signal to a process that has not been waited for; whether there is one.
pub(crate) fn signal_to(id: Option<u32>, signal: Signal) -> bool {
    let pid = id.and_then(|id| Pid::from_raw(id as i32));
    pid.is_some_and(|pid| kill_process(pid, signal).is_ok())
}

/// Waits until it says that it is ready; or has closed its stdout, and will not.
async fn says_so(stdout: Option<ChildStdout>) -> bool {
    let Some(stdout) = stdout else { return false };
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if line.starts_with("ready ") {
            return true;
        }
    }
    false
}

/// Waits until connections come about; or it has ended.
async fn answers(child: &mut Child, address: SocketAddr) -> bool {
    while matches!(child.try_wait(), Ok(None)) {
        if TcpStream::connect(address).await.is_ok() {
            return true;
        }
        tokio::time::sleep(LOOK_PERIOD).await;
    }
    false
}

/// How often a process is looked at that does not say when it is ready.
const LOOK_PERIOD: Duration = Duration::from_millis(20);

/// Bytes of a log that are shown.
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
