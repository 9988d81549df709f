//! How long to wait before the next attempt.

use std::time::Duration;

/// The first pause, at most.
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// Any pause, at most: as long as a lease, so that a hub that comes back knows every region within two of them.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The pause after this many failures in a row: twice as long after each, and of it at least a half. The rest is
/// `chance` (from 0 to 1), so that regions which lost the hub together do not come back together.
pub(super) fn pause(failures: u32, chance: f64) -> Duration {
    let doubled = PAUSE_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled.min(PAUSE_MAX).mul_f64(0.5 + chance / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_bound_and_are_scattered_over_their_upper_half() {
        let ms = |failures, chance| pause(failures, chance).as_millis();
        assert_eq!([1, 2, 3, 4, 5].map(|failures| ms(failures, 1.0)), [250, 500, 1000, 2000, 4000]);
        assert_eq!([6, 7, u32::MAX].map(|failures| ms(failures, 1.0)), [5000; 3]);
        assert_eq!([1, 6].map(|failures| ms(failures, 0.0)), [125, 2500]);
        assert_eq!(ms(0, 1.0), 250);
    }
}
