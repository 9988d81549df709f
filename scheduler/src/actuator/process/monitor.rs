//! Monitor of one replica process, from its start or discovery to its end.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use replica_api::start_failure::StartFailureReport;
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use scheduler_client::readiness::{ReadinessProber, StartReport};
use tokio::process::Child;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{sleep, sleep_until, timeout};

use super::record::ProcessStart;
use crate::actuator::{ReadyEndpoint, ReplicaId};
use crate::scaling::events::{ReplicaStartTimedOut, ReplicaStopTimedOut};

/// Interval of checks whether an adopted process is still running.
const CHECK_PERIOD: Duration = Duration::from_millis(100);
/// Start timeout: the largest models are loaded within a few minutes. It does not include the download of a model, which
/// fails if it makes no progress, and the time in which a replica tries a failed start again, which it reports.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(600);
/// Stop timeout: one and a half times the replica's own time limit for its requests.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);

/// Running process.
pub(super) struct ProcessMonitor {
    /// Refers to this process and no other, also after it has ended.
    process: OwnedFd,
    exit: ExitSource,
}

/// Source of the notification that the process has ended.
enum ExitSource {
    /// Child of this process.
    Child(Child),
    /// Process of an earlier parent, which is polled.
    Polled(ProcessStart),
}

/// Exit of a replica process.
#[derive(Debug)]
pub(super) struct ProcessExit {
    pub(super) id: ReplicaId,
    /// The exit was requested.
    pub(super) requested: bool,
    /// Exit status, as far as the system reports it.
    pub(super) status: String,
}

/// Start time of a replica.
#[derive(Clone, Copy)]
pub(super) enum StartTime {
    /// Started at this time.
    At(Instant),
    /// Already started, in this time if it is known.
    Took(Option<Duration>),
}

/// Receives what a replica reports while it is not ready.
pub(super) struct ReportSender {
    /// Expected end of the download of the model.
    pub(super) download: watch::Sender<Option<Instant>>,
    /// Whether it waits for another process that pulls the model.
    pub(super) waits_for_pull: watch::Sender<bool>,
    /// Failure of the last attempt to start.
    pub(super) failure: watch::Sender<Option<StartFailureReport>>,
    /// Notified when the failure has changed.
    pub(super) failure_changed: Arc<Notify>,
}

/// Parameters of a monitor.
pub(super) struct MonitorContext {
    pub(super) id: ReplicaId,
    pub(super) endpoint: SocketAddr,
    /// Start time, or the duration of an earlier start.
    pub(super) start: StartTime,
    pub(super) prober: ReadinessProber,
    /// Stop request: sent or dropped.
    pub(super) stop: oneshot::Receiver<()>,
    /// Receives the replica when it is ready.
    pub(super) ready: mpsc::Sender<(ReplicaId, ReadyEndpoint)>,
    /// Receives what the replica reports while it is not ready.
    pub(super) report: ReportSender,
}

impl ProcessMonitor {
    /// Creates the monitor of a new child process.
    pub(super) fn started(child: Child, identity: ProcessStart) -> io::Result<ProcessMonitor> {
        let process = pidfd_open(identity.pid, PidfdFlags::empty())?;
        Ok(ProcessMonitor { process, exit: ExitSource::Child(child) })
    }

    /// Creates the monitor of a process of an earlier spoke.
    pub(super) fn adopted(process: OwnedFd, identity: ProcessStart) -> ProcessMonitor {
        ProcessMonitor { process, exit: ExitSource::Polled(identity) }
    }

    /// Waits for the exit; returns the status, as far as the system reports it.
    async fn wait(&mut self) -> String {
        match &mut self.exit {
            ExitSource::Child(child) => {
                child.wait().await.map_or_else(|error| error.to_string(), |status| status.to_string())
            }
            ExitSource::Polled(identity) => {
                while identity.is_running() {
                    sleep(CHECK_PERIOD).await;
                }
                "exited".to_owned()
            }
        }
    }

    /// Sends SIGTERM, and SIGKILL after the stop timeout.
    async fn stop(&mut self, id: &ReplicaId) -> String {
        // A process that has already exited ignores the signal, and its exit is observed.
        pidfd_send_signal(&self.process, Signal::TERM).ok();
        if let Ok(status) = timeout(STOP_TIMEOUT, self.wait()).await {
            return status;
        }
        ReplicaStopTimedOut { id, after: STOP_TIMEOUT }.emit();
        self.kill().await
    }

    async fn kill(&mut self) -> String {
        pidfd_send_signal(&self.process, Signal::KILL).ok();
        self.wait().await
    }

    /// Monitors the process until it exits.
    pub(super) async fn run(mut self, context: MonitorContext) -> ProcessExit {
        let MonitorContext { id, endpoint, start, prober, mut stop, ready, report } = context;
        // Time of the start, or of the last report that extends the start timeout.
        let last_report = watch::Sender::new(Instant::now());
        let exited = |id, status| ProcessExit { id, requested: false, status };
        tokio::select! {
            status = self.wait() => return exited(id, status),
            _ = &mut stop => {}
            () = start_timeout(last_report.subscribe()) => {
                ReplicaStartTimedOut { id: &id, after: START_TIMEOUT }.emit();
                let status = self.kill().await;
                let seconds = START_TIMEOUT.as_secs();
                return exited(id, format!("{status}, killed after {seconds} s without readiness"));
            }
            () = prober.until_ready(endpoint, |reported| report.record(reported, &last_report)) => {
                let took = match start {
                    StartTime::At(began) => Some(began.elapsed()),
                    StartTime::Took(took) => took,
                };
                // On failure the receiver is gone, which also drops the stop sender.
                ready.send((id.clone(), ReadyEndpoint { endpoint, took })).await.ok();
                tokio::select! {
                    status = self.wait() => return exited(id, status),
                    _ = stop => {}
                }
            }
        }
        let status = self.stop(&id).await;
        ProcessExit { id, requested: true, status }
    }
}

/// Waits until the start timeout has passed since the start and every report that extends it.
async fn start_timeout(last_report: watch::Receiver<Instant>) {
    loop {
        let deadline = *last_report.borrow() + START_TIMEOUT;
        if deadline <= Instant::now() {
            return;
        }
        sleep_until(deadline.into()).await;
    }
}

/// Returns whether the start timeout begins again: the replica still downloads its model, waits for the process that downloads it, or
/// tries a failed start again. A download that has ended has no time left; a replica reports that while it loads the model, for which the timeout is.
fn extends_start_timeout(report: &StartReport) -> bool {
    let StartReport { download_left, waits_for_pull, failure } = report;
    download_left.is_some_and(|left| !left.is_zero()) || *waits_for_pull || failure.is_some()
}

impl ReportSender {
    /// Records the report of a replica that is starting.
    fn record(&self, report: StartReport, last_report: &watch::Sender<Instant>) {
        let now = Instant::now();
        if extends_start_timeout(&report) {
            last_report.send_replace(now);
        }
        let StartReport { download_left, waits_for_pull, failure } = report;
        let ends_at = download_left.and_then(|left| now.checked_add(left));
        self.download.send_if_modified(|known| std::mem::replace(known, ends_at) != ends_at);
        self.waits_for_pull.send_replace(waits_for_pull);
        let is_changed = self.failure.send_if_modified(|known| {
            let is_changed = *known != failure;
            *known = failure;
            is_changed
        });
        if is_changed {
            self.failure_changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use replica_api::start_failure::StartFailure;

    use super::*;

    #[test]
    fn only_a_download_that_has_not_ended_and_a_failure_extend_the_start_timeout() {
        let downloads = |left| StartReport { download_left: Some(left), ..StartReport::default() };
        assert!(extends_start_timeout(&downloads(Duration::from_millis(1))));
        assert!(!extends_start_timeout(&downloads(Duration::ZERO)), "it loads the model");
        assert!(!extends_start_timeout(&StartReport::default()));
        assert!(extends_start_timeout(&StartReport { waits_for_pull: true, ..StartReport::default() }));
        let failure = Some(StartFailureReport::new(StartFailure::ModelUnavailable, "503"));
        assert!(extends_start_timeout(&StartReport { failure, ..downloads(Duration::ZERO) }));
    }
}
