//! Replay of a recorded drill: `promtool` evaluates the shipped rules over its series and says which alerts fire, and when.
//!
//! The rules look at minutes to hours, and a drill repairs its faults after seconds. So a replay *holds* the fault: before the repair,
//! the last state of the fleet continues for [`HELD`] seconds, gauges with their last value and counters at their last rate. Everything
//! else has its real pace. To stretch the whole recording instead would stretch elections and failovers as well, and an alert that
//! must not fire for a takeover of ten seconds would fire.
//!
//! An hour at the rates before the first action comes first, so that the hourly windows are full, and [`HELD`] seconds at the last state
//! come last. The replay is scraped at the interval of configs/observability/prometheus.yml.

use crate::recording::{Recording, Series};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

/// Seconds for which a fault, and the state after the drill, is held.
const HELD: usize = 720;
/// Seconds before the drill.
const BEFORE: usize = 3600;
/// Scrape interval in seconds.
const INTERVAL: usize = 15;
/// Initial seconds of a drill that are left out: connections are being opened (`warm_up` of the drills).
const WARM_UP: usize = 2;
/// Seconds over which the rate of a counter is taken that is held.
const RATE: usize = 5;

/// Part of the time of a replay.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// Seconds at the rates from the first of these scrapes to the last, which is excluded.
    Before(usize, usize, usize),
    /// Scrapes, the last one excluded.
    Recorded(usize, usize),
    /// Seconds at the state of this scrape.
    Held(usize, usize),
}

/// Time of a replay.
pub(crate) struct Replay<'r> {
    recording: &'r Recording,
    parts: Vec<Part>,
    /// Second of the first action.
    action: i64,
}

impl Replay<'_> {
    /// Creates the replay of a drill, whose state is held before each of these seconds, and after its end.
    pub(crate) fn of_drill<'r>(recording: &'r Recording, held: &[usize]) -> Replay<'r> {
        let action = recording.steps.first().expect("a drill has an action").0 as usize;
        let mut parts = vec![Part::Before(BEFORE, WARM_UP, action)];
        let mut from = WARM_UP;
        for until in held.iter().copied().chain([recording.scrapes]) {
            parts.extend([Part::Recorded(from, until), Part::Held(HELD, until - 1)]);
            from = until;
        }
        Replay { recording, parts, action: (BEFORE + action - WARM_UP) as i64 }
    }

    /// Creates the replay of a calm fleet, which is repeated for an hour.
    pub(crate) fn of_calm_hour(recording: &Recording) -> Replay<'_> {
        let (from, until) = (WARM_UP, recording.scrapes);
        let times = 3600_usize.div_ceil(until - from);
        Replay { recording, parts: vec![Part::Recorded(from, until); times], action: 0 }
    }

    fn seconds(&self) -> usize {
        let seconds = self.parts.iter().map(|part| match part {
            Part::Before(seconds, ..) | Part::Held(seconds, _) => *seconds,
            Part::Recorded(from, until) => until - from,
        });
        seconds.sum()
    }

    /// Returns the seconds from the first action to the first evaluation with which each alert fires; negative for one that fired
    /// before.
    pub(crate) fn alerts(&self) -> BTreeMap<String, i64> {
        let test = self.test();
        // Without an expected sample promtool fails if an alert fires, and prints all of them.
        let Err(printed) = run(&test) else { return BTreeMap::new() };
        let fired = samples(&printed);
        let count = printed.matches("{alertname=").count();
        assert!(count > 0 && fired.len() == count, "promtool prints something else:\n{printed}");
        fired.into_iter().map(|(alert, at)| (alert, at - self.action)).collect()
    }

    /// Returns the input of `promtool test rules`, which expects no alert.
    fn test(&self) -> String {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/observability/rules");
        let (rules, end) = (folder.display(), self.seconds());
        let files =
            ["recording.yml", "alerts.yml"].map(|name| std::fs::read_to_string(folder.join(name)).unwrap());
        // In the order of the files: without it promtool evaluates the groups in a random one.
        let groups =
            files.iter().flat_map(|file| file.lines().filter_map(|line| line.strip_prefix("  - name: ")));
        let groups = groups.collect::<Vec<_>>().join(", ");
        let mut text = format!(
            "rule_files: ['{rules}/recording.yml', '{rules}/alerts.yml']\nevaluation_interval: 30s\n\
             group_eval_order: [{groups}]\ntests:\n- interval: {INTERVAL}s\n  input_series:\n"
        );
        for (name, series) in &self.recording.series {
            // Times of certificates were recorded relative to the start of the drill.
            let is_time = name.contains("_not_after_seconds") || name.contains("_not_before_seconds");
            let offset = if is_time { self.action as f64 } else { 0.0 };
            let values = self.values(series).into_iter().step_by(INTERVAL);
            let values = notation(values.map(|value| value.map(|it| it + offset)));
            writeln!(text, "  - {{ series: '{name}', values: '{values}' }}").unwrap();
        }
        // The first time at which each alert fires.
        let firing = format!("timestamp(ALERTS{{alertstate=\"firing\"}})[{end}s:{INTERVAL}s]");
        writeln!(
            text,
            "  promql_expr_test:\n  - expr: min by (alertname) (min_over_time({firing}))\n    eval_time: {end}s\n    exp_samples: []"
        )
        .unwrap();
        text
    }

    /// Returns the value of a series at each second.
    fn values(&self, series: &Series) -> Vec<Option<f64>> {
        let recorded = &series.values;
        let mut values = Vec::with_capacity(self.seconds());
        // What a counter has gained outside the recording, and its last scrape.
        let (mut gained, mut former): (f64, Option<(usize, f64)>) = (0.0, None);
        for part in &self.parts {
            match *part {
                Part::Before(seconds, from, until) => {
                    let rate = series.rate(from, until - 1);
                    // A gauge has its value from shortly before the action, a counter continues into the recording.
                    let last = recorded[from].and(recorded[until - 1]);
                    let begin = if series.is_counter { recorded[from].map(|_| 0.0) } else { last };
                    values.extend((0..seconds).map(|second| begin.map(|begin| begin + rate * second as f64)));
                    if let (true, Some(first)) = (series.is_counter, recorded[from]) {
                        gained = rate * seconds as f64 - first;
                    }
                }
                Part::Recorded(from, until) => {
                    for (at, value) in recorded.iter().enumerate().take(until).skip(from) {
                        // In a repetition, a counter continues after the end of the recording.
                        let end = former.filter(|(before, _)| *before > at && series.is_counter);
                        match (end, former, value) {
                            (Some((_, end)), _, Some(value)) => gained += end - value,
                            // The process has started again.
                            (None, Some((_, former)), Some(value)) if *value < former => gained = 0.0,
                            (None, _, None) => gained = 0.0,
                            _ => {}
                        }
                        values.push(value.map(|value| value + if series.is_counter { gained } else { 0.0 }));
                        former = value.map(|value| (at, value));
                    }
                }
                Part::Held(seconds, at) => {
                    let rate = series.rate(at.saturating_sub(RATE), at);
                    let held =
                        |second: usize| recorded[at].map(|value| value + gained + rate * second as f64);
                    values.extend((1..=seconds).map(held));
                    gained += rate * seconds as f64;
                }
            }
        }
        values
    }
}

impl Series {
    /// Returns the increase for each second of a counter between two scrapes; 0 for a gauge, and for one that began between them.
    fn rate(&self, from: usize, until: usize) -> f64 {
        match (self.values[from], self.values[until]) {
            (Some(first), Some(last)) if self.is_counter && until > from => {
                ((last - first) / (until - from) as f64).max(0.0)
            }
            _ => 0.0,
        }
    }
}

/// Returns values in promtool's notation. `stale` marks the end of a series, as Prometheus does after a failed scrape.
fn notation(values: impl Iterator<Item = Option<f64>>) -> String {
    let values: Vec<_> = values.collect();
    let mut text = String::new();
    let mut is_present = false;
    for run in values.chunk_by(PartialEq::eq) {
        match run[0] {
            Some(value) if run.len() == 1 => write!(text, "{value} ").unwrap(),
            // `1x2` are three values.
            Some(value) => write!(text, "{value}x{} ", run.len() - 1).unwrap(),
            None if is_present && run.len() == 1 => text += "stale ",
            None if is_present => write!(text, "stale _x{} ", run.len() - 1).unwrap(),
            None => write!(text, "_x{} ", run.len()).unwrap(),
        }
        is_present = run[0].is_some();
    }
    text.trim_end().to_owned()
}

/// Runs a test; returns what promtool prints if it fails.
fn run(test: &str) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("test.yml");
    std::fs::write(&file, test).unwrap();
    let ran = Command::new("promtool").args(["test", "rules"]).arg(&file).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if ran.status.success() { Ok(()) } else { Err(text(&ran.stdout) + &text(&ran.stderr)) }
}

/// Reads the samples that promtool got, `got: {alertname="A"} 3.7E+03, …`.
fn samples(printed: &str) -> BTreeMap<String, i64> {
    let got = printed.split_once("got:").map_or("", |(_, got)| got);
    let alerts = got.split("{alertname=\"").skip(1).filter_map(|sample| {
        let (name, rest) = sample.split_once("\"} ")?;
        let value = rest.split(|sign: char| sign == ',' || sign.is_whitespace()).next()?;
        Some((name.to_owned(), value.parse::<f64>().ok()?.round() as i64))
    });
    alerts.collect()
}

#[test]
fn a_replay_holds_a_fault_and_continues_the_counters() {
    let counter = |values: &[Option<f64>]| Series { is_counter: true, values: values.to_vec() };
    let steps = vec![(4.0, "kill hub".to_owned())];
    let recording = Recording { scrapes: 6, steps, ..Recording::default() };
    let replay = Replay::of_drill(&recording, &[5]);
    let ends = counter(&[Some(10.0), Some(20.0), Some(30.0), Some(40.0), Some(50.0), None]);
    let values = replay.values(&ends);
    assert_eq!(values.len(), replay.seconds());
    // Ten in each second before the drill, in it, and while it is held.
    let end_of_hold = BEFORE + 3 + HELD;
    let expected: Vec<_> = (0..end_of_hold).map(|second| Some(10.0 * second as f64)).collect();
    assert_eq!(values[..end_of_hold], expected);
    assert!(values[end_of_hold..].iter().all(Option::is_none));
    // A new process counts from the beginning.
    let restarts = counter(&[Some(1.0), Some(2.0), Some(3.0), Some(4.0), Some(5.0), Some(0.0)]);
    let restarts = replay.values(&restarts);
    assert_eq!(restarts[end_of_hold - 1..=end_of_hold], [Some((end_of_hold - 1) as f64), Some(0.0)]);
    let gauge = Series { is_counter: false, values: [7.0, 8.0, 9.0, 10.0, 11.0, 12.0].map(Some).to_vec() };
    let gauge = replay.values(&gauge);
    assert_eq!(gauge[BEFORE - 1..BEFORE + 5], [10.0, 9.0, 10.0, 11.0, 11.0, 11.0].map(Some));
    assert_eq!(gauge.last(), Some(&Some(12.0)));

    let calm = Replay::of_calm_hour(&recording);
    let repeated = calm.values(&counter(&[1.0, 2.0, 3.0, 4.0, 6.0, 6.0].map(Some)));
    assert_eq!(repeated[..7], [3.0, 4.0, 6.0, 6.0, 6.0, 7.0, 9.0].map(Some));
    assert!(calm.seconds() >= 3600);
    let values = [None, Some(1.0), Some(1.0), None, None, Some(2.5)];
    assert_eq!(notation(values.into_iter()), "_x1 1x1 stale _x1 2.5");
}
