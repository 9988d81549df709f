//! Delay before the next attempt: exponential backoff with jitter.

use std::time::Duration;

/// Upper bound of the first delay.
const BACKOFF_MIN: Duration = Duration::from_millis(250);
/// Upper bound of any delay: the lease time, so that a hub that recovers knows every region within two lease times.
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// Returns the delay after this number of consecutive failures: doubled after each, of which at least one half. The
/// other half is scaled by `chance` (0 to 1), so that regions that lost the hub at the same time do not reconnect at
/// the same time.
pub(super) fn pause(failures: u32, chance: f64) -> Duration {
    let doubled = BACKOFF_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled.min(BACKOFF_MAX).mul_f64(0.5 + chance / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_up_to_a_bound_with_jitter_over_their_upper_half() {
        let ms = |failures, chance| pause(failures, chance).as_millis();
        assert_eq!([1, 2, 3, 4, 5].map(|failures| ms(failures, 1.0)), [250, 500, 1000, 2000, 4000]);
        assert_eq!([6, 7, u32::MAX].map(|failures| ms(failures, 1.0)), [5000; 3]);
        assert_eq!([1, 6].map(|failures| ms(failures, 0.0)), [125, 2500]);
        assert_eq!(ms(0, 1.0), 250);
    }
}
