//! Concurrency limit that adapts to an overloaded server.
//!
//! A client with a long list would send everything at once, but the server may take minutes for it. If it rejects
//! requests as overload, resending the same number causes the same rejections. The limit is therefore halved on
//! overload and grows by one per round trip of responses (AIMD, as in TCP). Rejections of requests that were sent
//! before the last reduction do not reduce it again.

use std::time::Instant;

/// Limit of concurrent attempts.
#[derive(Clone, Debug)]
pub struct ConcurrencyWindow {
    size: f64,
    max: f64,
    reduced_at: Option<Instant>,
}

impl ConcurrencyWindow {
    /// Creates a window of the largest size, at least one.
    pub fn new(max: usize) -> ConcurrencyWindow {
        let max = max.max(1) as f64;
        ConcurrencyWindow { size: max, max, reduced_at: None }
    }

    /// Returns the current limit; at least one.
    pub fn size(&self) -> usize {
        self.size as usize
    }

    /// Returns whether the limit is below its maximum.
    pub fn is_reduced(&self) -> bool {
        self.size < self.max
    }

    /// Records a response.
    pub fn succeeded(&mut self) {
        self.size = (self.size + 1.0 / self.size).min(self.max);
    }

    /// Records that an attempt sent at `sent` was rejected as overload.
    pub fn rejected(&mut self, sent: Instant, now: Instant) {
        if self.reduced_at.is_none_or(|cut| sent > cut) {
            self.size = (self.size / 2.0).max(1.0);
            self.reduced_at = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_rejection_halves_the_window_once_and_responses_widen_it() {
        let at = |ms| Instant::now() + Duration::from_millis(ms);
        let (sent, cut, later) = (at(0), at(1000), at(2000));
        let mut window = ConcurrencyWindow::new(8);
        (0..20).for_each(|_| window.succeeded());
        assert!(window.size() == 8 && !window.is_reduced(), "not above the maximum");
        (0..8).for_each(|_| window.rejected(sent, cut));
        assert!(window.is_reduced());
        assert_eq!(window.size(), 4, "they were sent before the reduction");
        (0..5).for_each(|_| window.succeeded());
        assert_eq!(window.size(), 5);
        for _ in 0..9 {
            window.rejected(at(10_000), later);
        }
        assert_eq!(window.size(), 1, "never zero");
    }
}
