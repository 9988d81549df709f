//! What a run has shown: a table for a person, and JSON for a machine ([`Report::to_json`]).
//!
//! Percentiles are of ok requests only, and failures stand below them by cause. The generator's own lag is always
//! printed, with a warning once it is a visible part of the latencies: a tool that cannot keep its timetable measures
//! itself.

use std::time::Duration;

use crate::options::Options;
use crate::record::{Latencies, Record, RegionRecord};

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
        let named: Vec<(String, &RegionRecord)> =
            self.record.regions().iter().map(|(served, region)| (served.to_string(), region)).collect();
        let width = named.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max("region".len());

        let counts = ["requests", "ok", "failed", "retried"];
        let mut lines = vec![self.heading(), row(width, "region", counts, QUANTILES.map(|(_, name)| name))];
        lines.extend(named.iter().map(|(name, region)| region_row(width, name, region)));
        lines.push(region_row(width, "total", &total));
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

    fn heading(&self) -> String {
        let Options { target, model, rate, arrival, duration, texts, inputs, .. } = &self.options;
        let early = if self.stopped_early { ", stopped early" } else { "" };
        format!(
            "{target}, model {model}: {}/s ({arrival}) for {duration:?}{early}; {inputs} of {} texts per request ({})",
            rate.per_second(),
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

fn region_row(width: usize, name: &str, region: &RegionRecord) -> String {
    let counts =
        [region.requests(), region.ok(), region.failed(), region.retried].map(|count| count.to_string());
    let latencies = region.latencies();
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
    use crate::options::tests::good;
    use crate::record::tests::sample;

    /// A hundred requests nearby, then fifty far off after as many time-outs.
    pub(crate) fn report() -> Report {
        let mut record = Record::default();
        for number in 0..100 {
            record.add(sample(Some("gcp/europe-west4"), 10 * number, 8));
            record.add(Sample { retried: true, ..sample(Some("aws/us-east-1"), 1000 + 10 * number, 90) });
        }
        for number in 0..50 {
            let timeout =
                Sample { outcome: Err(Failure::Timeout), ..sample(None, 1000 + 10 * number, 10_000) };
            record.add(timeout);
        }
        let options = Options::check(good()).unwrap();
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
        assert!(table.contains("failed: 50 × no answer in time"), "{table}");
        assert!(table.contains("p99 0.08 ms") && !table.contains("lower the rate"), "{table}");
        assert_eq!(report().failed(), 50);
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
