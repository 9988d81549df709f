//! Progress display of `meridian embed`: a bar on a terminal, a line every few seconds elsewhere.

use crate::load::PROGRESS_LINE_PERIOD;
use embed::job::{EmbedJobProgress, JobObserver};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// Steps of the bar.
const STEPS: u64 = 10_000;

/// Signal that was received, or 0.
pub(super) type ReceivedSignal = Arc<AtomicI32>;

/// Progress display, and the signal that cancels the run.
pub(super) struct EmbedProgress {
    bar: Option<ProgressBar>,
    started: Instant,
    next_line: Duration,
    /// Share of the input that had been read when the run began to compute.
    first_fraction: Option<f64>,
    signal: ReceivedSignal,
}

impl EmbedProgress {
    pub(super) fn new(signal: ReceivedSignal) -> EmbedProgress {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{elapsed:>4} {wide_bar} {msg}").expect("a constant template");
            ProgressBar::new(STEPS).with_style(style)
        });
        let next_line = PROGRESS_LINE_PERIOD;
        EmbedProgress { bar, started: Instant::now(), next_line, first_fraction: None, signal }
    }

    pub(super) fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl JobObserver for EmbedProgress {
    fn progress(&mut self, progress: EmbedJobProgress) {
        if progress.rows == progress.rows_before {
            self.started = Instant::now();
            self.first_fraction = progress.fraction;
            if progress.rows > 0 {
                let line = format!("continues after {} rows", progress.rows);
                match &self.bar {
                    Some(bar) => bar.println(line),
                    None => eprintln!("{line}"),
                }
            }
        }
        let elapsed = self.started.elapsed();
        let left = time_left(elapsed, self.first_fraction, progress.fraction);
        let line = line(&progress, elapsed, left);
        match &self.bar {
            Some(bar) => {
                bar.set_position((progress.fraction.unwrap_or(0.0) * STEPS as f64) as u64);
                bar.set_message(line);
            }
            None if elapsed >= self.next_line => {
                eprintln!("{line}");
                self.next_line = elapsed + PROGRESS_LINE_PERIOD;
            }
            None => {}
        }
    }

    fn is_cancelled(&self) -> bool {
        self.signal.load(Ordering::Relaxed) != 0
    }
}

/// Estimates the time left from the share of the input that was read in this run.
fn time_left(elapsed: Duration, first: Option<f64>, now: Option<f64>) -> Option<Duration> {
    let (first, now) = (first?, now?);
    (now > first).then(|| elapsed.mul_f64((1.0 - now).max(0.0) / (now - first)))
}

fn line(progress: &EmbedJobProgress, elapsed: Duration, left: Option<Duration>) -> String {
    let EmbedJobProgress { rows, rows_before, skipped, fraction } = progress;
    let mut line = format!("{rows} rows");
    if *skipped > 0 {
        line.push_str(&format!(", {skipped} skipped"));
    }
    if let Some(fraction) = fraction {
        line.push_str(&format!(", {:.0} %", fraction * 100.0));
    }
    if !elapsed.is_zero() {
        line.push_str(&format!(", {:.0} rows/s", (rows - rows_before) as f64 / elapsed.as_secs_f64()));
    }
    if let Some(left) = left {
        line.push_str(&format!(", {} left", shown(left)));
    }
    line
}

fn shown(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds} s"),
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{hours} h {minutes} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_and_the_time_left_are_those_of_this_run() {
        let progress = EmbedJobProgress { rows: 1500, rows_before: 1000, skipped: 2, fraction: Some(0.75) };
        let elapsed = Duration::from_secs(10);
        let left = time_left(elapsed, Some(0.5), progress.fraction);
        assert_eq!(left, Some(Duration::from_secs(10)));
        assert_eq!(line(&progress, elapsed, left), "1500 rows, 2 skipped, 75 %, 50 rows/s, 10 s left");
        let stream = EmbedJobProgress { rows: 10, rows_before: 0, skipped: 0, fraction: None };
        assert_eq!(line(&stream, elapsed, time_left(elapsed, None, None)), "10 rows, 1 rows/s");
        assert_eq!(time_left(elapsed, Some(0.5), Some(0.5)), None);
    }

    #[test]
    fn times_have_two_units() {
        assert_eq!(shown(Duration::from_secs(59)), "59 s");
        assert_eq!(shown(Duration::from_secs(61)), "1 min 1 s");
        assert_eq!(shown(Duration::from_secs(7_260)), "2 h 1 min");
    }
}
