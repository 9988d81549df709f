//! Batching settings: defaults, and the values that `meridian tune` measures for a machine.

use std::time::Duration;

use replica_api::limits::BATCH_TOKENS;

/// Default limit of the tokens of an interactive batch: that of all batches. The learnt cost shortens batches while
/// there are interactive requests.
pub const INTERACTIVE_BATCH_TOKENS: u64 = BATCH_TOKENS;
/// Default share of bulk while both priorities are saturated: interactive requests get three quarters of the tokens,
/// and a backfill that would take an hour alone takes four.
pub const BULK_SHARE_PERCENT: u8 = 25;
/// Longer than the fixed cost of a batch on any measured machine; that cost bounds every batching delay as well.
pub const WINDOW_MAX: Duration = Duration::from_millis(5);

/// Batching settings; `meridian tune` measures them for a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSettings {
    /// Maximum tokens of a batch while there are no interactive requests.
    pub batch_tokens: u64,
    /// Maximum tokens of a batch while there are interactive requests.
    pub interactive_batch_tokens: u64,
    /// Percentage of the tokens that bulk gets while both priorities have queued requests, from 1 to 99.
    pub bulk_share_percent: u8,
    /// Longest batching delay; 0 turns it off.
    pub window_max: Duration,
}

impl Default for BatchSettings {
    fn default() -> BatchSettings {
        BatchSettings {
            batch_tokens: BATCH_TOKENS,
            interactive_batch_tokens: INTERACTIVE_BATCH_TOKENS,
            bulk_share_percent: BULK_SHARE_PERCENT,
            window_max: WINDOW_MAX,
        }
    }
}
