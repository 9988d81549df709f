//! Speed of a request: one that is slower than the minimum is repeated on another connection.

use std::time::{Duration, Instant};

use super::origin::SLOW_BYTES_PER_SECOND;

/// Measures the speed of a request over windows of a fixed time.
pub(super) struct SpeedWindow {
    length: Duration,
    since: Instant,
    bytes: u64,
}

impl SpeedWindow {
    pub(super) fn new(length: Duration, now: Instant) -> SpeedWindow {
        SpeedWindow { length, since: now, bytes: 0 }
    }

    /// Records bytes; at the end of a window returns its speed if that is below the minimum.
    pub(super) fn record(&mut self, bytes: u64, now: Instant) -> Option<u64> {
        self.bytes += bytes;
        let lasted = now.saturating_duration_since(self.since);
        if lasted < self.length {
            return None;
        }
        let speed = (self.bytes as f64 / lasted.as_secs_f64().max(f64::MIN_POSITIVE)) as u64;
        *self = SpeedWindow::new(self.length, now);
        (speed < SLOW_BYTES_PER_SECOND).then_some(speed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_below_the_minimum_speed_is_slow() {
        let (second, start) = (Duration::from_secs(1), Instant::now());
        let window = || SpeedWindow::new(10 * second, start);
        assert_eq!(window().record(0, start + 9 * second), None, "the window has not ended");
        assert_eq!(window().record(10 * SLOW_BYTES_PER_SECOND, start + 10 * second), None);
        assert_eq!(
            window().record(10 * SLOW_BYTES_PER_SECOND - 1, start + 10 * second),
            Some(SLOW_BYTES_PER_SECOND - 1)
        );
        let mut window = window();
        window.record(1 << 20, start + 10 * second);
        assert_eq!(window.record(1, start + 20 * second), Some(0), "each window counts for itself");
    }
}
