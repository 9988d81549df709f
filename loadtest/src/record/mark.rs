//! Moments of a run that a reader of its report should know of: a region was killed, a link was cut.

use std::time::Duration;

/// Something that happened to the system while it was under load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Since the start of the run.
    pub at: Duration,
    /// What happened, in a few words.
    pub label: String,
}
