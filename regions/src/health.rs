//! Health of a region, as one gateway observes it.

/// Health of a region. The order is that of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Health {
    /// It reports.
    Healthy,
    /// Nothing was received from it yet, neither reports nor failures.
    Unknown,
    /// It has missed reports or failed requests; it is used when nothing better is left.
    Suspect,
    /// It is not used.
    Down,
}
