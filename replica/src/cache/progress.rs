//! Progress reports of a pull.
//!
//! The cache reports a phase and two numbers; the caller renders them as a progress bar or a line.

use replica_api::status::phase;

/// Phase of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Another process is pulling the same model; this one waits for it.
    Waiting,
    /// Querying the origin for versions and files.
    Resolving,
    /// Downloading.
    Downloading,
    /// Unpacking the download.
    Unpacking,
}

impl Phase {
    /// Returns the name of the phase.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Waiting => phase::WAITING,
            Phase::Resolving => phase::RESOLVING,
            Phase::Downloading => phase::DOWNLOADING,
            Phase::Unpacking => phase::UNPACKING,
        }
    }
}

/// Receiver of progress reports.
pub trait PullObserver {
    /// Called when a phase begins.
    fn phase(&mut self, phase: Phase);

    /// Called with the bytes done in this phase; the total is absent if the origin does not report it.
    fn bytes(&mut self, done: u64, total: Option<u64>);

    /// Called several times a second while there are requests: with a description if they make no progress.
    fn stalled(&mut self, _stalled: Option<String>) {}

    /// Returns whether the pull is to end with [`PullError::Cancelled`](super::PullError::Cancelled); called several times
    /// a second.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// Ignores all reports.
impl PullObserver for () {
    fn phase(&mut self, _: Phase) {}
    fn bytes(&mut self, _: u64, _: Option<u64>) {}
}
