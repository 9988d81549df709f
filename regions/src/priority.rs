//! Priorities of requests: interactive requests, which need low latency, and bulk requests, which need throughput.

use std::fmt;
use std::str::FromStr;

/// Priority of a request. The order of the variants is the preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// A person waits for the response.
    Interactive,
    /// Throughput matters more than latency.
    Bulk,
}

impl Priority {
    /// Both priorities, in the order of preference.
    pub const ALL: [Priority; 2] = [Priority::Interactive, Priority::Bulk];

    /// Returns the name in headers, configuration, metrics and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Priority::Interactive => "interactive",
            Priority::Bulk => "bulk",
        }
    }

    /// Returns the other priority.
    pub fn other(self) -> Priority {
        match self {
            Priority::Interactive => Priority::Bulk,
            Priority::Bulk => Priority::Interactive,
        }
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Error for a text that is not the name of a priority.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a priority: write interactive or bulk")]
pub struct UnknownPriority(String);

impl FromStr for Priority {
    type Err = UnknownPriority;

    fn from_str(text: &str) -> Result<Priority, UnknownPriority> {
        let known = Priority::ALL.into_iter().find(|priority| priority.as_str() == text);
        known.ok_or_else(|| UnknownPriority(text.chars().take(64).collect()))
    }
}
