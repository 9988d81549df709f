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

impl Health {
    /// All, in this order.
    pub const ALL: [Health; 4] = [Health::Healthy, Health::Unknown, Health::Suspect, Health::Down];

    /// Returns the name.
    pub fn as_str(self) -> &'static str {
        match self {
            Health::Healthy => "healthy",
            Health::Unknown => "unknown",
            Health::Suspect => "suspect",
            Health::Down => "down",
        }
    }
}
