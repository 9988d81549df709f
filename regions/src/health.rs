//! Health of a region as observed by one gateway.

/// Health of a region. The order is that of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// It sends reports.
    Healthy,
    /// No report and no failure was received yet.
    Unknown,
    /// It has missed reports or failed requests; it is used when no better region is available.
    Suspect,
    /// It is not used.
    Down,
}
