//! The two lanes of an endpoint, as a request asks for them.

use std::fmt;

/// Who waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// A person, or a program on a person's behalf.
    Interactive,
    /// Nobody in particular: a backfill.
    Bulk,
}

impl Lane {
    /// As the header has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Lane::Interactive => "interactive",
            Lane::Bulk => "bulk",
        }
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
