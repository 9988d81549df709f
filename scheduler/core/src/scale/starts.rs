//! How long a replica takes to start here, from the order to the first request that it could take.
//!
//! What counts is what nine of ten starts take at most: a scaler that goes by the average orders too late for every other
//! replica. Starts of the same model on the same machines are alike, so the last few dozen say it; before the first there
//! is a guess, which is long, because one who expects too long a start orders a little early, and one who expects none too
//! late.

use std::collections::VecDeque;
use std::time::Duration;

/// Starts that are remembered: three or four that were slow by chance do not decide.
const REMEMBERED_MAX: usize = 32;
/// Until the first is known: a model of some gigabytes from a warm disk.
pub const GUESS: Duration = Duration::from_secs(10);

/// The last starts.
#[derive(Clone, Debug, Default)]
pub struct Starts(VecDeque<Duration>);

impl Starts {
    /// One more took so long.
    pub fn took(&mut self, start: Duration) {
        if self.0.len() == REMEMBERED_MAX {
            self.0.pop_front();
        }
        self.0.push_back(start);
    }

    /// What nine of ten take at most.
    pub fn nearly_all(&self) -> Duration {
        let mut sorted: Vec<_> = self.0.iter().copied().collect();
        sorted.sort_unstable();
        // The nearest rank: of one it is that one, of ten the ninth.
        let rank = (sorted.len() * 9).div_ceil(10);
        rank.checked_sub(1).map_or(GUESS, |at| sorted[at])
    }

    /// What is left of a start that has lasted so long. One that is overdue takes a while yet: a tenth of the whole.
    pub fn left(&self, lasted: Duration) -> Duration {
        let whole = self.nearly_all();
        whole.saturating_sub(lasted).max(whole / 10)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn nine_of_ten_starts_take_no_longer() {
        let mut starts = Starts::default();
        assert_eq!(starts.nearly_all(), GUESS);
        starts.took(3 * S);
        assert_eq!(starts.nearly_all(), 3 * S);
        (1..=9).for_each(|_| starts.took(S));
        assert_eq!(starts.nearly_all(), S, "one of ten was slower");
        starts.took(4 * S);
        assert_eq!(starts.nearly_all(), 3 * S, "two of eleven were");
        (0..REMEMBERED_MAX).for_each(|_| starts.took(2 * S));
        assert_eq!((starts.nearly_all(), starts.0.len()), (2 * S, REMEMBERED_MAX), "the rest is forgotten");
    }

    #[test]
    fn what_is_overdue_takes_a_while_yet() {
        let mut starts = Starts::default();
        starts.took(10 * S);
        assert_eq!(starts.left(Duration::ZERO), 10 * S);
        assert_eq!(starts.left(7 * S), 3 * S);
        assert_eq!([starts.left(10 * S), starts.left(99 * S)], [S, S]);
    }
}
