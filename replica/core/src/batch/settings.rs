//! How batches are made: what `meridian tune` finds for a machine, and what holds without it.

use std::time::Duration;

use crate::limits::BATCH_TOKENS;

/// As many as any batch has without tuning; what is learnt makes batches shorter while there are lookups.
pub const INTERACTIVE_BATCH_TOKENS: u64 = BATCH_TOKENS;
/// While both priorities want more than there is, a quarter for bulk: lookups then have three, and a backfill that would take an
/// hour alone takes four.
pub const BULK_SHARE_PERCENT: u8 = 25;
/// More than the fixed cost of a batch on any machine that was seen; and that bounds every wait anyway.
pub const WINDOW_MAX: Duration = Duration::from_millis(5);

/// How batches are made; `meridian tune` finds them for a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSettings {
    /// Tokens of a batch while there are no lookups.
    pub batch_tokens: u64,
    /// Tokens of a batch while there are, at most.
    pub interactive_batch_tokens: u64,
    /// The part of the tokens that bulk has while both priorities wait, from 1 to 99.
    pub bulk_share_percent: u8,
    /// The longest that anybody waits for company; 0 turns that off.
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
