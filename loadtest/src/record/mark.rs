//! Annotations of a run: events that explain its report, such as a killed region or a cut link.

use std::time::Duration;

/// Event during a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Time since the start of the run.
    pub at: Duration,
    /// Whether this is an action of the drill, as opposed to an observation.
    pub is_action: bool,
    /// Short description.
    pub label: String,
}
