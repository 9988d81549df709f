//! Process of a fleet: start on its machine, readiness, end.

use crate::network;
use rustix::process::{Pid, Signal, kill_process};
use scheduler::heartbeat::PARENT_VARIABLE;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Maximum time of a wait for a condition. The longest expected one is the drain of a gateway (35 s).
pub(crate) const TIMEOUT: Duration = Duration::from_secs(90);
/// Period between checks of a condition.
const PERIOD: Duration = Duration::from_millis(50);

/// Specification of a process, for its start and restarts. Its machine has the same name.
#[derive(Clone)]
pub(crate) struct ProcessSpec {
    pub(crate) name: String,
    /// Arguments of `meridian`.
    pub(crate) arguments: Vec<String>,
    /// URL that responds with 200 when it is ready.
    pub(crate) ready: String,
}

/// Process, running or ended. It is killed when this is dropped.
pub(crate) struct FleetProcess {
    pub(crate) spec: ProcessSpec,
    child: Child,
}

impl FleetProcess {
    /// Starts a process in the directory of the fleet. The process ends with the thread that calls this.
    pub(crate) fn start(spec: ProcessSpec, meridian: &Path, dir: &Path) -> FleetProcess {
        let log = File::options().create(true).append(true).open(log(dir, &spec.name)).unwrap();
        let mut command = network::command(&spec.name, meridian);
        command.args(&spec.arguments).current_dir(dir).env(PARENT_VARIABLE, std::process::id().to_string());
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        // In a group of its own, so that Ctrl-C reaches only this process, which ends the others.
        let child = command.process_group(0).spawn().unwrap();
        FleetProcess { spec, child }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the exit status if it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Sends a signal and waits for the end of the process.
    pub(crate) async fn end(&mut self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the process runs");
        wait_until(&format!("{} ends", self.spec.name), async || self.ended().is_some()).await;
    }
}

impl Drop for FleetProcess {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Returns the path of a process's log.
pub(crate) fn log(dir: &Path, name: &str) -> PathBuf {
    dir.join("logs").join(format!("{name}.log"))
}

/// Waits for a condition.
pub(crate) async fn wait_until(description: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < TIMEOUT, "timed out: {description}");
        tokio::time::sleep(PERIOD).await;
    }
}
