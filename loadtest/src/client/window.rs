//! Concurrency limit that adapts to an overloaded server.
//!
//! A client with a long list would send everything at once, but the server may take minutes for it. If it rejects requests
//! as overload, resending the same number causes the same rejections. The limit is therefore halved on overload and grows
//! by one per round trip of responses (AIMD, as in TCP). Rejections of requests that were sent before the last reduction
//! do not reduce it again.

use std::time::Instant;

/// Limit of concurrent attempts.
#[derive(Clone, Debug)]
pub struct Window {
    size: f64,
    most: f64,
    cut_at: Option<Instant>,
}

impl Window {
    /// Creates a window of the largest size, at least one.
    pub fn new(most: usize) -> Window {
        let most = most.max(1) as f64;
        Window { size: most, most, cut_at: None }
    }

    /// Returns the current limit; at least one.
    pub fn size(&self) -> usize {
        self.size as usize
    }

    /// Returns whether the limit is below its maximum.
    pub fn is_cut(&self) -> bool {
        self.size < self.most
    }

    /// Records a response.
    pub fn answered(&mut self) {
        self.size = (self.size + 1.0 / self.size).min(self.most);
    }

    /// Records that an attempt sent at `sent` was rejected as overload.
    pub fn refused(&mut self, sent: Instant, now: Instant) {
        if self.cut_at.is_none_or(|cut| sent > cut) {
            self.size = (self.size / 2.0).max(1.0);
            self.cut_at = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_refusal_halves_it_once_and_answers_widen_it_again() {
        let at = |ms| Instant::now() + Duration::from_millis(ms);
        let (sent, cut, later) = (at(0), at(1000), at(2000));
        let mut window = Window::new(8);
        (0..20).for_each(|_| window.answered());
        assert!(window.size() == 8 && !window.is_cut(), "no wider than it may be");
        (0..8).for_each(|_| window.refused(sent, cut));
        assert!(window.is_cut());
        assert_eq!(window.size(), 4, "they were sent before it was cut");
        (0..5).for_each(|_| window.answered());
        assert_eq!(window.size(), 5);
        for _ in 0..9 {
            window.refused(at(10_000), later);
        }
        assert_eq!(window.size(), 1, "never closed");
    }
}
