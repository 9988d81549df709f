//! Plot of throughput against latency, for a terminal and as SVG ([`svg`](fn@svg)).
//!
//! Each precision is a line through its budgets, from few tokens on the left to many on the right. The time axis is
//! logarithmic, because budgets double. The chosen settings are marked; the SVG also says why they were chosen, and shows
//! the slowest and the fastest run of each point.

mod svg;

pub use svg::svg;

use std::collections::BTreeMap;
use std::fmt::Write;

use replica_core::Precision;

use super::curve::Point;
use super::plan::TunedChoice;

/// Size of the terminal plot in characters, without the axes.
const COLUMNS: usize = 64;
const ROWS: usize = 14;
/// Points with the chosen number of threads, by precision.
type Curves<'a> = BTreeMap<Precision, Vec<&'a Point>>;

/// Maps a value to a share of an axis.
struct AxisScale {
    from: f64,
    to: f64,
}

impl AxisScale {
    fn share(&self, value: f64) -> f64 {
        if self.to > self.from { (value - self.from) / (self.to - self.from) } else { 0.5 }
    }
}

struct Axes {
    /// Logarithm of milliseconds.
    time: AxisScale,
    speed: AxisScale,
}

impl Axes {
    /// Returns axes that contain all points; `None` without points.
    fn around(lines: &Curves<'_>) -> Option<Axes> {
        let points = || lines.values().flatten();
        let times = || points().map(|point| millis(point).ln());
        let speeds = points().map(|point| point.tokens_per_second);
        let time = AxisScale { from: times().min_by(f64::total_cmp)?, to: times().max_by(f64::total_cmp)? };
        Some(Axes { time, speed: AxisScale { from: 0.0, to: speeds.max_by(f64::total_cmp)? * 1.05 } })
    }

    fn position(&self, point: &Point) -> (f64, f64) {
        (self.time.share(millis(point).ln()), self.speed.share(point.tokens_per_second))
    }
}

fn lines<'a>(points: &'a [Point], choices: &[TunedChoice]) -> Curves<'a> {
    let mut lines = Curves::new();
    for choice in choices {
        let of_it = |point: &&Point| {
            point.setting.precision == choice.precision && point.setting.threads == choice.threads
        };
        lines.insert(choice.precision, points.iter().filter(of_it).collect());
    }
    lines
}

fn is_chosen(point: &Point, choices: &[TunedChoice]) -> bool {
    choices.iter().any(|choice| {
        choice.precision == point.setting.precision && choice.batch.batch_tokens == point.setting.batch_tokens
    })
}

/// Renders the plot for a terminal; empty without points.
pub fn terminal(points: &[Point], choices: &[TunedChoice]) -> String {
    let lines = lines(points, choices);
    let Some(axes) = Axes::around(&lines) else { return String::new() };
    let mut grid = vec![vec![' '; COLUMNS]; ROWS];
    let mut legend = Vec::new();
    for ((precision, line), mark) in lines.iter().zip(['o', 'x', '+', '*']) {
        legend.push(format!("{mark} {precision}"));
        for point in line {
            let (across, up) = axes.position(point);
            let column = (across * (COLUMNS - 1) as f64).round() as usize;
            let row = ROWS - 1 - (up * (ROWS - 1) as f64).round() as usize;
            grid[row][column] = if is_chosen(point, choices) { '@' } else { mark };
        }
    }
    let mut plot = format!("tokens/s  ({}, @ chosen)\n", legend.join(", "));
    for (row, cells) in grid.iter().enumerate() {
        let speed = axes.speed.to * (ROWS - 1 - row) as f64 / (ROWS - 1) as f64;
        let label = if row % 3 == 1 { format!("{speed:.0}") } else { String::new() };
        let cells: String = cells.iter().collect();
        let _ = writeln!(plot, "{label:>9} |{}", cells.trim_end());
    }
    let (first, last) = (axes.time.from.exp(), axes.time.to.exp());
    let (first, last) = (format!("{first:.1} ms"), format!("{last:.0} ms a batch"));
    let _ = writeln!(plot, "{:>9} +{}", "", "-".repeat(COLUMNS));
    let _ = writeln!(plot, "{:>11}{first}{last:>width$}", "", width = COLUMNS - first.len());
    plot
}

fn millis(point: &Point) -> f64 {
    (point.batch_p50.as_secs_f64() * 1e3).max(1e-6)
}

#[cfg(test)]
pub(super) mod tests {
    use std::num::NonZeroUsize;
    use std::time::Duration;

    use replica_core::batch::BatchSettings;

    use super::super::curve::MeasurementRun;
    use super::super::curve::Setting;
    use super::*;

    pub(super) fn points() -> Vec<Point> {
        let point = |tokens: u64| {
            let setting =
                Setting { precision: Precision::F32, threads: NonZeroUsize::MIN, batch_tokens: tokens };
            let batches = vec![Duration::from_micros(1000 + 10 * tokens)];
            Point::of(setting, &[MeasurementRun { tokens, batches }]).expect("a turn")
        };
        [64, 256, 1024, 4096].map(point).into()
    }

    pub(super) fn choices() -> Vec<TunedChoice> {
        vec![TunedChoice {
            precision: Precision::F32,
            threads: NonZeroUsize::MIN,
            batch: BatchSettings { batch_tokens: 1024, ..BatchSettings::default() },
            tokens_per_second: 1.0,
            target_met: None,
        }]
    }

    #[test]
    fn the_curve_rises_from_left_to_right_and_the_choice_is_marked() {
        let plot = terminal(&points(), &choices());
        let mut marks: Vec<(usize, usize, char)> = Vec::new();
        for (row, line) in plot.lines().enumerate().skip(1) {
            marks.extend(
                line.match_indices(['o', '@'])
                    .filter_map(|(column, mark)| Some((column, row, mark.chars().next()?))),
            );
        }
        marks.sort_unstable();
        let along: String = marks.iter().map(|(_, _, mark)| mark).collect();
        assert_eq!(along, "oo@o", "{plot}");
        assert!(marks.is_sorted_by(|(_, left, _), (_, right, _)| left >= right), "{plot}");
        assert_eq!(plot.matches('@').count(), 2, "in the legend and in the plot: {plot}");
        assert!(plot.contains("1.6 ms") && plot.contains("42 ms a batch"), "{plot}");
        assert!(plot.lines().all(|line| line.chars().count() <= 80), "{plot}");
    }

    #[test]
    fn without_measurements_the_plot_is_empty() {
        assert_eq!(terminal(&[], &[]), "");
    }
}
