//! Comparison of two runs: separates a change of latency from random variation.
//!
//! Requests of one second are correlated: they share a queue and garbage collections. Treating them as independent
//! samples yields significant differences that the next run does not reproduce. The confidence intervals therefore
//! come from a block bootstrap over seconds: a thousand times, both runs are resampled by seconds with replacement,
//! and the quantiles of the samples are compared. An interval that contains zero means that no difference was found.
//! The comparison needs only the reports, which contain the distribution of every second; the resampling is seeded.

mod bootstrap;

pub use bootstrap::{CONFIDENCE, DRAWS, QuantileChange};

use std::collections::BTreeMap;
use std::fmt::Write as _;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde::{Deserialize, Serialize};

use crate::record::CompactLatencies;
use bootstrap::{blocks, changes};

/// With fewer seconds the comparison warns that its intervals are too narrow.
const BLOCKS_RECOMMENDED_MIN: usize = 10;

#[derive(Deserialize)]
struct ReportInputV2 {
    version: u32,
    tasks: Vec<TaskInputV2>,
}

#[derive(Deserialize)]
struct TaskInputV2 {
    name: String,
    duration_ms: f64,
    requests: u64,
    ok: u64,
    failed: u64,
    seconds: Vec<SecondInputV2>,
}

#[derive(Deserialize)]
struct SecondInputV2 {
    second: u64,
    regions: BTreeMap<String, RegionInputV2>,
}

#[derive(Deserialize)]
struct RegionInputV2 {
    latencies_us: String,
}

/// Statistics of one task in one run.
#[derive(Clone, Debug, PartialEq)]
struct TaskMeasurement {
    requests: u64,
    failed: u64,
    ok_per_s: f64,
    /// Distributions of its blocks of seconds.
    blocks: Vec<CompactLatencies>,
}

/// Comparison of one task.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskComparison {
    /// Name of the task in both runs.
    pub task: String,
    /// Number of requests in A and in B.
    pub requests: [u64; 2],
    /// Failed requests in A and in B.
    pub failed: [u64; 2],
    /// Ok requests per second in A and in B.
    pub ok_per_s: [f64; 2],
    /// Number of blocks in A and in B.
    pub blocks: [usize; 2],
    /// Comparisons by quantile.
    pub quantiles: BTreeMap<&'static str, QuantileChange>,
}

/// Comparison of two runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Seed of the bootstrap.
    pub seed: u64,
    /// Confidence level of the intervals.
    pub confidence_percent: f64,
    /// Tasks that both runs have.
    pub tasks: Vec<TaskComparison>,
}

impl Comparison {
    /// Compares two reports of `load --json`, each given with its file name. Reports all problems at once.
    pub fn of(a: (&str, &str), b: (&str, &str), seed: u64) -> Result<Comparison, Vec<String>> {
        let (first, second) = match (read(a.0, a.1), read(b.0, b.1)) {
            (Ok(first), Ok(second)) => (first, second),
            (first, second) => return Err([first.err(), second.err()].into_iter().flatten().collect()),
        };
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut tasks = Vec::new();
        for (name, a) in &first {
            let Some(b) = second.get(name) else { continue };
            tasks.push(TaskComparison {
                task: name.clone(),
                requests: [a.requests, b.requests],
                failed: [a.failed, b.failed],
                ok_per_s: [a.ok_per_s, b.ok_per_s],
                blocks: [a.blocks.len(), b.blocks.len()],
                quantiles: changes(&a.blocks, &b.blocks, &mut rng),
            });
        }
        if tasks.is_empty() {
            let names =
                |run: &BTreeMap<String, TaskMeasurement>| run.keys().cloned().collect::<Vec<_>>().join(", ");
            return Err(vec![format!(
                "no common task: {} has {}, {} has {}",
                a.0,
                names(&first),
                b.0,
                names(&second)
            )]);
        }
        Ok(Comparison { seed, confidence_percent: CONFIDENCE, tasks })
    }

    /// Formats the comparison as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers, strings and lists serialise to JSON")
    }

    /// Formats the comparison as a table.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for TaskComparison { task, requests, failed, ok_per_s, blocks, quantiles } in &self.tasks {
            let _ = writeln!(text, "{task:<10} {:>12} {:>12} {:>9}   95 % interval", "A", "B", "change");
            let _ = writeln!(text, "{:<10} {:>12} {:>12}", "requests", requests[0], requests[1]);
            let _ = writeln!(text, "{:<10} {:>12} {:>12}", "failed", failed[0], failed[1]);
            let _ = writeln!(text, "{:<10} {:>12.1} {:>12.1}", "ok/s", ok_per_s[0], ok_per_s[1]);
            for (name, change) in quantiles {
                let QuantileChange { a_ms, b_ms, change_percent, interval_percent: [least, most] } = change;
                let verdict = match (change.is_significant(), *change_percent > 0.0) {
                    (false, _) => "no significant difference",
                    (true, true) => "B is slower",
                    (true, false) => "B is faster",
                };
                let _ = writeln!(
                    text,
                    "{name:<10} {a_ms:>9.2} ms {b_ms:>9.2} ms {change_percent:>+8.1}%   {least:+.1}% to {most:+.1}%: {verdict}"
                );
            }
            if blocks.iter().any(|blocks| *blocks < BLOCKS_RECOMMENDED_MIN) {
                let _ = writeln!(
                    text,
                    "{} and {} seconds: with fewer than {BLOCKS_RECOMMENDED_MIN} the intervals are too narrow.",
                    blocks[0], blocks[1]
                );
            }
        }
        let _ = write!(text, "Intervals: bootstrap over seconds, {DRAWS} resamples, seed {}.", self.seed);
        text
    }
}

fn read(name: &str, json: &str) -> Result<BTreeMap<String, TaskMeasurement>, String> {
    let run: ReportInputV2 = serde_json::from_str(json)
        .map_err(|error| format!("{name}: not a report of `meridian load --json`: {error}"))?;
    if run.version != 2 {
        return Err(format!("{name}: version {} is not supported, only version 2", run.version));
    }
    let tasks = run.tasks.into_iter().map(|task| {
        let TaskInputV2 { name: task_name, duration_ms, requests, ok, failed, seconds } = task;
        let spans = seconds.iter().map(|row| {
            let mut sum = CompactLatencies::default();
            for region in row.regions.values() {
                let spans = CompactLatencies::parse(&region.latencies_us);
                sum.add(
                    &spans
                        .ok_or_else(|| format!("{name}: second {} has invalid latencies_us", row.second))?,
                );
            }
            Ok(sum)
        });
        let spans = spans.collect::<Result<Vec<CompactLatencies>, String>>()?;
        let measured = TaskMeasurement {
            requests,
            failed,
            ok_per_s: ok as f64 / (duration_ms / 1000.0).max(1e-9),
            blocks: blocks(&spans),
        };
        Ok((task_name, measured))
    });
    tasks.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;
    use rand::Rng;

    /// Generates a report of `seconds` seconds with random latencies around a mean that also varies per second.
    fn run(seed: u64, seconds: u64, mean_us: f64) -> String {
        let mut rng = SmallRng::seed_from_u64(seed);
        let rows: Vec<_> = (0..seconds)
            .map(|second| {
                // The common factor of a second varies by 10 %.
                let factor = 0.9 + 0.2 * rng.random::<f64>();
                let mut spans = CompactLatencies::default();
                for _ in 0..100 {
                    let micros = mean_us * factor * (0.5 + rng.random::<f64>());
                    spans.record(std::time::Duration::from_micros(micros as u64));
                }
                let here = serde_json::json!({"ok": 100, "failed": 0, "latencies_us": spans.to_string()});
                serde_json::json!({"second": second, "regions": {"a/b": here}})
            })
            .collect();
        let count = seconds * 100;
        let task = serde_json::json!({
            "name": "queries", "duration_ms": seconds * 1000, "requests": count, "ok": count, "failed": 0, "seconds": rows
        });
        serde_json::json!({"version": 2, "tasks": [task]}).to_string()
    }

    fn p50(a: &str, b: &str) -> QuantileChange {
        Comparison::of(("a", a), ("b", b), 7).unwrap().tasks[0].quantiles["p50"]
    }

    #[test]
    fn a_difference_is_distinguished_from_random_variation() {
        let change = p50(&run(1, 30, 10_000.0), &run(2, 30, 12_000.0));
        assert!(change.is_significant() && change.change_percent > 0.0, "{change:?}");
        let [least, most] = change.interval_percent;
        assert!(least < 20.0 && 20.0 < most && most - least < 20.0, "{change:?}");
        // About 5 of 100 pairs of equal servers are reported as different, as expected at a confidence of 95 %.
        let significant = (0..100)
            .filter(|seed| p50(&run(2 * seed, 20, 5000.0), &run(2 * seed + 1, 20, 5000.0)).is_significant());
        let significant = significant.count();
        assert!(significant <= 12, "{significant} of 100");
    }

    #[test]
    fn the_seed_decides_the_interval() {
        let (a, b) = (run(1, 20, 5000.0), run(2, 20, 5200.0));
        let with = |seed| Comparison::of(("a", &a), ("b", &b), seed).unwrap();
        assert_eq!(with(1), with(1));
        assert_ne!(with(1).tasks, with(2).tasks);
    }

    #[test]
    fn only_reports_of_this_version_are_accepted() {
        let json = report().to_json();
        let comparison = Comparison::of(("a", &json), ("b", &json), 1).unwrap();
        assert_eq!(comparison.tasks[0].requests, [250, 250]);
        let table = comparison.table();
        assert!(table.contains("no significant difference") && table.contains("too narrow"), "{table}");
        let problems = Comparison::of(("a", "{}"), ("b", "{\"version\":1,\"tasks\":[]}"), 1).unwrap_err();
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].starts_with("a: not a report") && problems[1].starts_with("b: version 1"));
        let other = json.replace("\"name\": \"queries\"", "\"name\": \"bulk\"");
        assert!(Comparison::of(("a", &json), ("b", &other), 1).unwrap_err()[0].contains("no common task"));
    }
}
