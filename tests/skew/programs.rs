//! Programs of a fleet of two versions.

use std::path::{Path, PathBuf};

/// Processes that run the same role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessClass {
    /// Hub, with its store and the certificate authority.
    Hub,
    /// Spokes, with the queues of jobs.
    Spoke,
    /// Replicas.
    Replica,
    /// Gateway.
    Gateway,
    /// Commands of an operator.
    Operator,
}

impl ProcessClass {
    /// All, in the order of an upgrade.
    pub(crate) const ALL: [ProcessClass; 5] = [
        ProcessClass::Hub,
        ProcessClass::Spoke,
        ProcessClass::Replica,
        ProcessClass::Gateway,
        ProcessClass::Operator,
    ];

    /// Returns the name in the table.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            ProcessClass::Hub => "hub",
            ProcessClass::Spoke => "spokes",
            ProcessClass::Replica => "replicas",
            ProcessClass::Gateway => "gateway",
            ProcessClass::Operator => "operator",
        }
    }
}

/// Programs of a fleet: that of one class of processes, and that of all others.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    pub(crate) class: ProcessClass,
    pub(crate) of_class: PathBuf,
    pub(crate) of_others: PathBuf,
}

impl Programs {
    /// Returns the program of the processes of a class.
    pub(crate) fn of(&self, class: ProcessClass) -> &Path {
        if class == self.class { &self.of_class } else { &self.of_others }
    }
}
