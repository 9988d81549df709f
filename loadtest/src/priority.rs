//! The two priorities of an endpoint, as a request asks for them.

use std::fmt;

/// Who waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// A person, or a program on a person's behalf.
    Interactive,
    /// Nobody in particular: a backfill.
    Bulk,
}

impl Priority {
    /// As the header has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Priority::Interactive => "interactive",
            Priority::Bulk => "bulk",
        }
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
