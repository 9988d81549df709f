//! Statistics of measurements: throughput, duration of a batch, and fixed cost of a batch.

use std::num::NonZeroUsize;
use std::time::Duration;

use replica_core::Precision;

/// Combination of parameters to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Setting {
    /// Number format.
    pub precision: Precision,
    /// Engine threads.
    pub threads: NonZeroUsize,
    /// Tokens of a batch.
    pub batch_tokens: u64,
}

/// Consecutive batches of one setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasurementRun {
    /// Tokens of each batch.
    pub tokens: u64,
    /// Duration of each batch; at least one.
    pub batches: Vec<Duration>,
}

impl MeasurementRun {
    /// Returns the total duration.
    pub fn took(&self) -> Duration {
        self.batches.iter().sum()
    }

    fn tokens_per_second(&self) -> f64 {
        let tokens = self.tokens * self.batches.len() as u64;
        tokens as f64 / self.took().as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// Statistics of all measurements of a setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Measured setting.
    pub setting: Setting,
    /// Median over the runs.
    pub tokens_per_second: f64,
    /// Slowest and fastest run.
    pub tokens_per_second_range: (f64, f64),
    /// Median duration of a batch.
    pub batch_p50: Duration,
    /// 99th percentile of the duration of a batch.
    pub batch_p99: Duration,
    /// Number of runs.
    pub runs: usize,
}

impl Point {
    /// Computes the statistics; `None` without runs.
    pub fn of(setting: Setting, runs: &[MeasurementRun]) -> Option<Point> {
        let mut speeds: Vec<f64> = runs.iter().map(MeasurementRun::tokens_per_second).collect();
        speeds.sort_by(f64::total_cmp);
        let mut batches: Vec<Duration> = runs.iter().flat_map(|run| run.batches.iter().copied()).collect();
        batches.sort_unstable();
        Some(Point {
            setting,
            tokens_per_second: *speeds.get(speeds.len() / 2)?,
            tokens_per_second_range: (*speeds.first()?, *speeds.last()?),
            batch_p50: at(&batches, 0.50)?,
            batch_p99: at(&batches, 0.99)?,
            runs: runs.len(),
        })
    }
}

/// Returns a percentile by nearest rank.
fn at(sorted: &[Duration], share: f64) -> Option<Duration> {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// Returns the fixed cost of a batch: the intercept of a line fitted through the points, with relative errors weighted
/// equally. Absent if the line is not determined.
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
    // With a single budget every slope fits.
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
    fn a_point_has_the_median_of_runs_and_the_percentiles_of_all_batches() {
        let run = |each: u64| MeasurementRun { tokens: 100, batches: vec![millis(each); 10] };
        // One run was disturbed for its whole duration.
        let point = Point::of(setting(100), &[run(10), run(1000), run(20)]).expect("turns");
        assert_eq!(point.tokens_per_second, 100.0 / 0.020);
        assert_eq!(point.tokens_per_second_range, (100.0 / 1.0, 100.0 / 0.010));
        assert_eq!((point.batch_p50, point.batch_p99, point.runs), (millis(20), millis(1000), 3));
        assert_eq!(Point::of(setting(100), &[]), None);
    }

    #[test]
    fn the_fixed_cost_is_the_intercept_of_the_line() {
        let point = |tokens: u64, time: Duration| {
            Point::of(setting(tokens), &[MeasurementRun { tokens, batches: vec![time] }]).expect("a turn")
        };
        let line = |tokens: u64| point(tokens, Duration::from_micros(700 + 20 * tokens));
        let cost = fixed_cost(&[64, 256, 1024, 4096].map(line)).expect("a line");
        assert!(cost.abs_diff(Duration::from_micros(700)) < Duration::from_micros(1), "{cost:?}");
        // Cache misses: large batches cost more per token. The fixed cost must not become negative.
        assert_eq!(fixed_cost(&[point(64, millis(1)), point(128, millis(4))]), Some(Duration::ZERO));
        assert_eq!(fixed_cost(&[line(64)]), None);
    }
}
