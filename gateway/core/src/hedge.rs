//! Hedged requests: only to regions that are lightly loaded, and within the [`HedgeBudget`].

pub use replica_api::retry::HedgeBudget;

/// Largest queueing time up to which a region counts as lightly loaded: at this wait queueing becomes noticeable beside
/// a response of the same length.
const LIGHT_LOAD_WAIT_MS: f64 = 20.0;

/// Returns whether a region with this queue and speed is lightly loaded. Beyond that a response is late because of the
/// load, and a hedge adds to it. A region whose speed is not known yet counts as lightly loaded.
pub fn is_lightly_loaded(pending_tokens: u64, tokens_per_second: f64) -> bool {
    pending_tokens as f64 * 1e3 <= tokens_per_second * LIGHT_LOAD_WAIT_MS || tokens_per_second <= 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_lightly_loaded_up_to_twenty_milliseconds_of_queue() {
        for (pending, speed, expected) in
            [(0, 1000.0, true), (20, 1000.0, true), (21, 1000.0, false), (9, 0.0, true)]
        {
            assert_eq!(is_lightly_loaded(pending, speed), expected, "{pending} at {speed}");
        }
    }
}
