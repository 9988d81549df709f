//! How a pull tells whoever waits for it how far it is.
//!
//! The cache draws nothing: it reports a phase and two numbers, and the front door makes a bar of them, or a line.

/// What a pull is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Another process is pulling the same model; this one waits for it.
    Waiting,
    /// Asking the source what there is.
    Asking,
    /// Downloading.
    Downloading,
    /// Unpacking what was downloaded.
    Unpacking,
}

impl Phase {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Waiting => "waiting for another pull",
            Phase::Asking => "asking",
            Phase::Downloading => "downloading",
            Phase::Unpacking => "unpacking",
        }
    }
}

/// Told how far a pull is.
pub trait Progress {
    /// A phase begins.
    fn phase(&mut self, phase: Phase);

    /// So many bytes of this phase are done; the total is absent where the source does not say it.
    fn bytes(&mut self, done: u64, total: Option<u64>);
}

/// For whoever does not want to know.
impl Progress for () {
    fn phase(&mut self, _: Phase) {}
    fn bytes(&mut self, _: u64, _: Option<u64>) {}
}
