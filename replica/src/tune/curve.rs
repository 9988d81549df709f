//! What turns come to: throughput, how long a batch takes, and what it costs before its first token.

use std::time::Duration;

use super::plan::Setting;

/// Batches of one setting, one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Tokens of each batch.
    pub tokens: u64,
    /// How long each took; at least one.
    pub batches: Vec<Duration>,
}

impl Turn {
    /// How long all of it took.
    pub fn took(&self) -> Duration {
        self.batches.iter().sum()
    }

    fn tokens_per_second(&self) -> f64 {
        let tokens = self.tokens * self.batches.len() as u64;
        tokens as f64 / self.took().as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// One setting, by everything that was measured of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// What was measured.
    pub setting: Setting,
    /// The median of its turns.
    pub tokens_per_second: f64,
    /// Half of its batches were faster.
    pub batch_p50: Duration,
    /// All but the slowest hundredth were.
    pub batch_p99: Duration,
    /// How often it was measured.
    pub turns: usize,
}

impl Point {
    /// Of these turns, if there are any.
    pub fn of(setting: Setting, turns: &[Turn]) -> Option<Point> {
        let mut speeds: Vec<f64> = turns.iter().map(Turn::tokens_per_second).collect();
        speeds.sort_by(f64::total_cmp);
        let mut batches: Vec<Duration> = turns.iter().flat_map(|turn| turn.batches.iter().copied()).collect();
        batches.sort_unstable();
        Some(Point {
            setting,
            tokens_per_second: *speeds.get(speeds.len() / 2)?,
            batch_p50: at(&batches, 0.50)?,
            batch_p99: at(&batches, 0.99)?,
            turns: turns.len(),
        })
    }
}

/// The nearest rank.
fn at(sorted: &[Duration], share: f64) -> Option<Duration> {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// What a batch takes before its first token: the time of the line through the points at no tokens, where each point's
/// error counts in proportion to its time. Absent when a line is not determined.
pub fn fixed_cost(curve: &[Point]) -> Option<Duration> {
    let lines = curve.iter().map(|point| {
        let (x, y) = (point.setting.batch_tokens as f64, point.batch_p50.as_secs_f64());
        (1.0 / (y * y).max(f64::MIN_POSITIVE), x, y)
    });
    let (mut s, mut sx, mut sy, mut sxx, mut sxy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (weight, x, y) in lines {
        s += weight;
        sx += weight * x;
        sy += weight * y;
        sxx += weight * x * x;
        sxy += weight * x * y;
    }
    let determinant = s * sxx - sx * sx;
    // With one budget, or none, every line fits.
    if curve.len() < 2 || determinant <= f64::EPSILON * s * sxx {
        return None;
    }
    Duration::try_from_secs_f64(((sxx * sy - sx * sxy) / determinant).max(0.0)).ok()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use replica_core::Precision;

    use super::*;

    fn setting(batch_tokens: u64) -> Setting {
        Setting { precision: Precision::F32, threads: NonZeroUsize::MIN, batch_tokens }
    }

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_point_is_the_median_of_turns_and_the_ranks_of_all_batches() {
        let turn = |each: u64| Turn { tokens: 100, batches: vec![millis(each); 10] };
        // One turn was disturbed for all of its time.
        let point = Point::of(setting(100), &[turn(10), turn(1000), turn(20)]).expect("turns");
        assert_eq!(point.tokens_per_second, 100.0 / 0.020);
        assert_eq!((point.batch_p50, point.batch_p99, point.turns), (millis(20), millis(1000), 3));
        assert_eq!(Point::of(setting(100), &[]), None);
    }

    #[test]
    fn the_fixed_cost_is_where_the_line_meets_no_tokens() {
        let point = |tokens: u64, time: Duration| {
            Point::of(setting(tokens), &[Turn { tokens, batches: vec![time] }]).expect("a turn")
        };
        let line = |tokens: u64| point(tokens, Duration::from_micros(700 + 20 * tokens));
        let cost = fixed_cost(&[64, 256, 1024, 4096].map(line)).expect("a line");
        assert!(cost.abs_diff(Duration::from_micros(700)) < Duration::from_micros(1), "{cost:?}");
        // Caches give out: large batches cost more per token. That must not make the fixed cost negative.
        assert_eq!(fixed_cost(&[point(64, millis(1)), point(128, millis(4))]), Some(Duration::ZERO));
        assert_eq!(fixed_cost(&[line(64)]), None);
    }
}
