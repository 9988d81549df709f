//! Two runs side by side: did it become slower, or was that chance?
//!
//! Requests of one second have much in common: the same queue, the same collection of garbage. Whoever takes each as a
//! witness of its own is told of differences that the next run does not show. So intervals come from a bootstrap over
//! seconds: a thousand times, as many seconds as a run has are drawn from it with replacement, in both runs, and the
//! quantiles of what is in them are compared. An interval that holds no change at all means that none was seen. It is told
//! from the reports alone, which hold the distribution of every second; the draws come from a seed.

mod bootstrap;

pub use bootstrap::{CONFIDENCE, Change, DRAWS};

use std::collections::BTreeMap;
use std::fmt::Write as _;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde::{Deserialize, Serialize};

use crate::record::Spans;
use bootstrap::{blocks, changes};

/// With fewer seconds the comparison says that its intervals are too narrow.
const BLOCKS_ENOUGH: usize = 10;

#[derive(Deserialize)]
struct RunV2 {
    version: u32,
    tasks: Vec<TaskV2>,
}

#[derive(Deserialize)]
struct TaskV2 {
    name: String,
    duration_ms: f64,
    requests: u64,
    ok: u64,
    failed: u64,
    seconds: Vec<SecondV2>,
}

#[derive(Deserialize)]
struct SecondV2 {
    second: u64,
    regions: BTreeMap<String, RegionV2>,
}

#[derive(Deserialize)]
struct RegionV2 {
    latencies_us: String,
}

/// One task of one run.
#[derive(Clone, Debug, PartialEq)]
struct Measured {
    requests: u64,
    failed: u64,
    ok_per_s: f64,
    /// The distributions of its seconds, or of rows of seconds.
    blocks: Vec<Spans>,
}

/// One task in both runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskComparison {
    /// Its name in both.
    pub task: String,
    /// Requests, failed requests, and ok requests a second, in the first run and in the second.
    pub requests: [u64; 2],
    /// Failed.
    pub failed: [u64; 2],
    /// Answered rightly, a second.
    pub ok_per_s: [f64; 2],
    /// Seconds that were drawn from.
    pub blocks: [usize; 2],
    /// By quantile.
    pub quantiles: BTreeMap<&'static str, Change>,
}

/// Two runs side by side.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Decides the draws.
    pub seed: u64,
    /// The share that intervals hold.
    pub confidence_percent: f64,
    /// The tasks that both have.
    pub tasks: Vec<TaskComparison>,
}

impl Comparison {
    /// Compares two reports of `load --json`, each with the name of its file. All that is wrong with them is told at once.
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
            let names = |run: &BTreeMap<String, Measured>| run.keys().cloned().collect::<Vec<_>>().join(", ");
            return Err(vec![format!(
                "{} has the tasks {} and {} has {}: none to compare",
                a.0,
                names(&first),
                b.0,
                names(&second)
            )]);
        }
        Ok(Comparison { seed, confidence_percent: CONFIDENCE, tasks })
    }

    /// For machines.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers, strings and lists serialise to JSON")
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for TaskComparison { task, requests, failed, ok_per_s, blocks, quantiles } in &self.tasks {
            let _ = writeln!(text, "{task:<10} {:>12} {:>12} {:>9}   95 % interval", "A", "B", "change");
            let _ = writeln!(text, "{:<10} {:>12} {:>12}", "requests", requests[0], requests[1]);
            let _ = writeln!(text, "{:<10} {:>12} {:>12}", "failed", failed[0], failed[1]);
            let _ = writeln!(text, "{:<10} {:>12.1} {:>12.1}", "ok/s", ok_per_s[0], ok_per_s[1]);
            for (name, change) in quantiles {
                let Change { a_ms, b_ms, change_percent, interval_percent: [least, most] } = change;
                let verdict = match (change.is_seen(), *change_percent > 0.0) {
                    (false, _) => "no difference seen",
                    (true, true) => "B is slower",
                    (true, false) => "B is faster",
                };
                let _ = writeln!(
                    text,
                    "{name:<10} {a_ms:>9.2} ms {b_ms:>9.2} ms {change_percent:>+8.1}%   {least:+.1}% to {most:+.1}%: {verdict}"
                );
            }
            if blocks.iter().any(|blocks| *blocks < BLOCKS_ENOUGH) {
                let _ = writeln!(
                    text,
                    "Of {} and {} seconds: with fewer than {BLOCKS_ENOUGH} the intervals are too narrow.",
                    blocks[0], blocks[1]
                );
            }
        }
        let _ = write!(text, "Intervals by a bootstrap over seconds, {DRAWS} draws, seed {}.", self.seed);
        text
    }
}

fn read(name: &str, json: &str) -> Result<BTreeMap<String, Measured>, String> {
    let run: RunV2 = serde_json::from_str(json)
        .map_err(|error| format!("{name}: is no report of `meridian load --json`: {error}"))?;
    if run.version != 2 {
        return Err(format!("{name}: is of version {}, and version 2 is read", run.version));
    }
    let tasks = run.tasks.into_iter().map(|task| {
        let TaskV2 { name: task_name, duration_ms, requests, ok, failed, seconds } = task;
        let spans = seconds.iter().map(|row| {
            let mut sum = Spans::default();
            for region in row.regions.values() {
                let spans = Spans::parse(&region.latencies_us);
                sum.add(&spans.ok_or_else(|| format!("{name}: second {} has no spans", row.second))?);
            }
            Ok(sum)
        });
        let spans = spans.collect::<Result<Vec<Spans>, String>>()?;
        let measured = Measured {
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

    /// A run of so many seconds, each of whose requests take about as long as it was drawn to.
    fn run(seed: u64, seconds: u64, mean_us: f64) -> String {
        let mut rng = SmallRng::seed_from_u64(seed);
        let rows: Vec<_> = (0..seconds)
            .map(|second| {
                // What a second has in common scatters by a tenth.
                let mood = 0.9 + 0.2 * rng.random::<f64>();
                let mut spans = Spans::default();
                for _ in 0..100 {
                    let micros = mean_us * mood * (0.5 + rng.random::<f64>());
                    spans.record(std::time::Duration::from_micros(micros as u64));
                }
                let here = serde_json::json!({"ok": 100, "failed": 0, "latencies_us": spans.to_string()});
                serde_json::json!({"second": second, "regions": {"a/b": here}})
            })
            .collect();
        let count = seconds * 100;
        let task = serde_json::json!({
            "name": "lookups", "duration_ms": seconds * 1000, "requests": count, "ok": count, "failed": 0, "seconds": rows
        });
        serde_json::json!({"version": 2, "tasks": [task]}).to_string()
    }

    fn p50(a: &str, b: &str) -> Change {
        Comparison::of(("a", a), ("b", b), 7).unwrap().tasks[0].quantiles["p50"]
    }

    #[test]
    fn a_difference_is_told_from_chance() {
        let change = p50(&run(1, 30, 10_000.0), &run(2, 30, 12_000.0));
        assert!(change.is_seen() && change.change_percent > 0.0, "{change:?}");
        let [least, most] = change.interval_percent;
        assert!(least < 20.0 && 20.0 < most && most - least < 20.0, "{change:?}");
        // Of a hundred pairs of equal servers some five are told apart: that is what 95 % means.
        let told =
            (0..100).filter(|seed| p50(&run(2 * seed, 20, 5000.0), &run(2 * seed + 1, 20, 5000.0)).is_seen());
        let told = told.count();
        assert!(told <= 12, "{told} of 100");
    }

    #[test]
    fn the_seed_decides_the_interval() {
        let (a, b) = (run(1, 20, 5000.0), run(2, 20, 5200.0));
        let with = |seed| Comparison::of(("a", &a), ("b", &b), seed).unwrap();
        assert_eq!(with(1), with(1));
        assert_ne!(with(1).tasks, with(2).tasks);
    }

    #[test]
    fn reports_of_this_version_are_read_and_nothing_else() {
        let json = report().to_json();
        let comparison = Comparison::of(("a", &json), ("b", &json), 1).unwrap();
        assert_eq!(comparison.tasks[0].requests, [250, 250]);
        let table = comparison.table();
        assert!(table.contains("no difference seen") && table.contains("too narrow"), "{table}");
        let problems = Comparison::of(("a", "{}"), ("b", "{\"version\":1,\"tasks\":[]}"), 1).unwrap_err();
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].starts_with("a: is no report") && problems[1].starts_with("b: is of version 1"));
        let other = json.replace("\"name\": \"lookups\"", "\"name\": \"bulk\"");
        assert!(Comparison::of(("a", &json), ("b", &other), 1).unwrap_err()[0].contains("none to compare"));
    }
}
