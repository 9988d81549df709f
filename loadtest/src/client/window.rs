//! How many requests are sent at once to a server that says when that is too many.
//!
//! A list that takes a server minutes is sent by a client that would have all of it answered now. Where the server says
//! that it is too busy, coming back with as many as before makes it say so again; so the number is halved, and grows by one
//! with every round of answers, as TCP shares a link. What was sent before a cut says nothing about what is left after it.

use std::time::Instant;

/// How many attempts may be out.
#[derive(Clone, Debug)]
pub struct Window {
    size: f64,
    most: f64,
    cut_at: Option<Instant>,
}

impl Window {
    /// A window that is as wide as it may ever be, at least one.
    pub fn new(most: usize) -> Window {
        let most = most.max(1) as f64;
        Window { size: most, most, cut_at: None }
    }

    /// How many attempts may be out now; at least one.
    pub fn size(&self) -> usize {
        self.size as usize
    }

    /// Whether it is narrower than it may be.
    pub fn is_cut(&self) -> bool {
        self.size < self.most
    }

    /// An attempt was answered.
    pub fn answered(&mut self) {
        self.size = (self.size + 1.0 / self.size).min(self.most);
    }

    /// An attempt that was sent at `sent` was refused because the server is too busy.
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
