//! What a run has shown: a table for a person, and JSON for a machine ([`Report::to_json`]).
//!
//! Percentiles are of ok requests only, and failures stand below them by cause. The generator's own lag is always
//! printed, with a warning once it is a visible part of the latencies: a tool that cannot keep its timetable measures
//! itself.

use std::time::Duration;

use crate::options::Options;
use crate::record::{Group, Latencies, Record};

/// The report warns once the p99 of the generator's lag is this share of the p99 of the latencies: less than that is
/// lost in the differences between two runs.
pub const LAG_SHARE_NOTABLE: f64 = 0.1;

/// The quantiles that are shown, and their names.
const QUANTILES: [(f64, &str); 5] =
    [(0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9"), (1.0, "max")];

/// A run that has ended.
#[derive(Clone, Debug)]
pub struct Report {
    /// What was asked.
    pub options: Options,
    /// From the start to the end of the last request.
    pub elapsed: Duration,
    /// Whether it was ended before its timetable was.
    pub stopped_early: bool,
    /// What happened.
    pub record: Record,
}

impl Report {
    /// How many requests failed, also those that could not be sent.
    pub fn failed(&self) -> u64 {
        self.record.total().failed()
    }

    /// The report as lines of text.
    pub fn table(&self) -> String {
        let total = self.record.total();
        let named: Vec<(String, &Group)> =
            self.record.regions().iter().map(|(served, region)| (served.to_string(), region)).collect();
        let stages = self.stages();
        let names = named.iter().map(|(name, _)| name).chain(stages.iter().map(|(name, _)| name));
        let width = names.map(String::len).max().unwrap_or(0).max("region".len());

        let heads = |first| {
            let counts = ["requests", "ok", "failed", "retried"];
            row(width, first, counts, QUANTILES.map(|(_, name)| name))
        };
        let mut lines = vec![self.heading(), heads("region")];
        lines.extend(named.iter().map(|(name, region)| group_row(width, name, region)));
        lines.push(group_row(width, "total", &total));
        if !stages.is_empty() {
            lines.push(heads("stage"));
            lines.extend(stages.iter().map(|(name, stage)| group_row(width, name, stage)));
        }
        lines.push(
            "Milliseconds, of ok requests, from the intended start. Retried: more than one attempt."
                .to_owned(),
        );
        lines.extend(total.failures().map(|(cause, tally)| format!("failed: {} × {cause}", tally.count)));
        lines.push(self.lag());
        lines.join("\n")
    }

    /// Whether the generator was so late that a visible part of the latencies is its own.
    pub fn lag_is_notable(&self) -> bool {
        let lag = self.record.lag().quantile(0.99).unwrap_or_default();
        let latency = self.record.total().latencies().quantile(0.99).unwrap_or(Duration::MAX);
        lag.as_secs_f64() >= LAG_SHARE_NOTABLE * latency.as_secs_f64()
    }

    /// Each stage under the name by which it was asked for, where there is more than the one that is all.
    fn stages(&self) -> Vec<(String, &Group)> {
        let named = self.options.profile.stages().zip(self.record.stages());
        let named =
            named.map(|((begins, stage), group)| (format!("{}s: {stage}", begins.as_secs_f64()), group));
        Some(named.collect::<Vec<_>>()).filter(|stages| stages.len() > 1).unwrap_or_default()
    }

    fn heading(&self) -> String {
        let Options { target, model, profile, arrival, texts, inputs, .. } = &self.options;
        let early = if self.stopped_early { ", stopped early" } else { "" };
        format!(
            "{target}, model {model}: requests per second {profile} ({arrival}){early}; {inputs} of {} texts per request ({})",
            texts.count(),
            texts.source(),
        )
    }

    fn lag(&self) -> String {
        let lag = self.record.lag();
        let [p50, p99, max] = [0.5, 0.99, 1.0].map(|quantile| milliseconds(lag, quantile));
        let warning = if self.lag_is_notable() {
            " It is a visible part of the latencies: lower the rate, or give the generator more of the machine."
        } else {
            ""
        };
        format!("Lag of the generator itself: p50 {p50} ms, p99 {p99} ms, max {max} ms.{warning}")
    }
}

fn group_row(width: usize, name: &str, group: &Group) -> String {
    let counts = [group.requests(), group.ok(), group.failed(), group.retried].map(|count| count.to_string());
    let latencies = group.latencies();
    row(width, name, counts, QUANTILES.map(|(quantile, _)| milliseconds(&latencies, quantile)))
}

fn row(width: usize, name: &str, counts: [impl AsRef<str>; 4], spans: [impl AsRef<str>; 5]) -> String {
    let mut line = format!("{name:width$}");
    for cell in counts.iter().map(AsRef::as_ref).chain(spans.iter().map(AsRef::as_ref)) {
        line.push_str(&format!(" {cell:>9}"));
    }
    line
}

fn milliseconds(latencies: &Latencies, quantile: f64) -> String {
    latencies.quantile(quantile).map_or("-".to_owned(), |span| format!("{:.2}", span.as_secs_f64() * 1000.0))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::client::{Failure, Sample};
    use crate::options::{RawOptions, tests::good};
    use crate::profile::tests::profile;
    use crate::record::tests::sample;

    /// A hundred requests nearby, then a hundred far off and fifty time-outs.
    pub(crate) fn report() -> Report {
        let rate = "100 for 1s, 150 for 1s".to_owned();
        let options = Options::check(RawOptions { rate, duration: None, ..good() }).unwrap();
        let mut record = Record::of(&options.profile);
        for number in 0..100 {
            record.add(sample(Some("gcp/europe-west4"), 10 * number, 8));
            record.add(Sample { retried: true, ..sample(Some("aws/us-east-1"), 1000 + 10 * number, 90) });
        }
        for number in 0..50 {
            let timeout =
                Sample { outcome: Err(Failure::Timeout), ..sample(None, 1000 + 10 * number, 10_000) };
            record.add(timeout);
        }
        Report { options, elapsed: Duration::from_secs(12), stopped_early: false, record }
    }

    #[test]
    fn the_table_has_a_row_per_region_a_total_the_failures_and_the_lag() {
        let table = report().table();
        let cells = |start: &str| -> Vec<String> {
            let line = table
                .lines()
                .find(|line| line.starts_with(start))
                .unwrap_or_else(|| panic!("{start} in {table}"));
            line[start.len()..].split_whitespace().map(str::to_owned).collect()
        };
        assert_eq!(
            cells("gcp/europe-west4"),
            ["100", "100", "0", "0", "8.00", "8.00", "8.00", "8.00", "8.00"]
        );
        assert_eq!(cells("aws/us-east-1")[..5], ["100", "100", "0", "100", "90.05"]);
        assert_eq!(cells("(no region)"), ["50", "0", "50", "0", "-", "-", "-", "-", "-"]);
        assert_eq!(cells("total")[..5], ["250", "200", "50", "100", "8.00"]);
        assert_eq!(cells("0s: 100 for 1s")[..5], ["100", "100", "0", "0", "8.00"]);
        assert_eq!(cells("1s: 150 for 1s")[..5], ["150", "100", "50", "100", "90.05"]);
        assert!(table.contains("requests per second 100 for 1s, 150 for 1s (constant)"), "{table}");
        assert!(table.contains("failed: 50 × no answer in time"), "{table}");
        assert!(table.contains("p99 0.08 ms") && !table.contains("lower the rate"), "{table}");
        assert_eq!(report().failed(), 50);
    }

    #[test]
    fn a_run_of_one_stage_has_no_table_of_stages() {
        let mut report = report();
        report.options.profile = profile("100 for 2s");
        report.record = Record::of(&report.options.profile);
        report.record.add(sample(None, 0, 8));
        assert!(!report.table().contains("\nstage"), "{}", report.table());
    }

    #[test]
    fn a_generator_that_is_late_says_so() {
        let mut late = report();
        for _ in 0..10 {
            late.record.add(Sample { lag: Duration::from_millis(20), ..sample(None, 0, 8) });
        }
        assert!(late.lag_is_notable() && late.table().contains("lower the rate"), "{}", late.table());
    }
}
