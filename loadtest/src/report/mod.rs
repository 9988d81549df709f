//! Report of a run: a table as text, JSON ([`Report::to_json`]), an HTML page with plots ([`Report::to_html`]), and
//! histogram files ([`Report::to_hgrm`], [`Report::to_hdr_log`]).
//!
//! Percentiles include only ok requests; failures are listed by cause. The generator's lag is always printed, with a
//! warning if it is a significant part of the latencies: a generator that cannot keep its schedule measures itself.

mod badges;
pub mod compare;
mod html;
mod json;
mod logs;

pub use html::PageContext;
#[cfg(test)]
pub(crate) use html::tests as html_tests;

use std::time::Duration;

use crate::client::HttpProtocol;
use crate::exchange::RequestFailure;
use crate::limits::IN_FLIGHT_MAX;
use crate::options::Options;
use crate::record::{Group, Latencies, Mark, Record};
use crate::task::{Pacing, Task};
use crate::workload::{TaskWorkload, WorkloadType};
use replica_api::priority::Priority;

/// Share of the latencies' p99 from which the p99 of the generator's lag causes a warning. A smaller share is below the
/// variation between two runs.
pub const LAG_SHARE_NOTABLE: f64 = 0.1;

/// Quantiles in tables, with their names.
const QUANTILES: [(f64, &str); 5] =
    [(0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9"), (1.0, "max")];

/// Results of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// Options of the run.
    pub options: Options,
    /// Time from the start to the end of the last request.
    pub elapsed: Duration,
    /// Whether the run was stopped before the end of its schedule.
    pub stopped_early: bool,
    /// Statistics.
    pub record: Record,
    /// Events during the run, in order of time.
    pub marks: Vec<Mark>,
}

impl Report {
    /// Returns the number of failed requests, including those not sent.
    pub fn failed(&self) -> u64 {
        self.record.total().failed()
    }

    /// Formats the report as text.
    pub fn table(&self) -> String {
        let total = self.record.total();
        let regions = self.record.regions();
        let mut rows: Vec<(String, &Group)> =
            regions.iter().map(|(served, region)| (served.to_string(), region)).collect();
        rows.push(("total".to_owned(), &total));
        let tasks = self.tasks();
        let tasks: Vec<(String, &Group)> = tasks.iter().map(|(name, group)| (name.clone(), group)).collect();
        let stages = self.stages();
        let names = [&rows, &tasks, &stages].into_iter().flatten().map(|(name, _)| name.chars().count());
        let width = names.max().unwrap_or(0).max("region".len());

        let mut lines = vec![self.heading()];
        for (first, rows) in [("region", &rows), ("task", &tasks), ("stage", &stages)] {
            if rows.is_empty() {
                continue;
            }
            let counts = ["requests", "ok", "failed", "retried"];
            lines.push(row(width, first, counts, QUANTILES.map(|(_, name)| name)));
            lines.extend(rows.iter().map(|(name, group)| group_row(width, name, group)));
        }
        lines.push(
            "Latencies in milliseconds, of ok requests, from the intended start. Retried: more than one attempt at the \
             request, or at a part of it."
                .to_owned(),
        );
        lines.extend(total.failures().map(|(cause, tally)| format!("failed: {} × {cause}", tally.count)));
        lines.extend(self.not_sent_line(&total));
        lines.extend(self.slo_line());
        lines.extend(
            self.marks.iter().map(|mark| format!("at {:.1} s: {}", mark.at.as_secs_f64(), mark.label)),
        );
        lines.push(self.lag());
        lines.join("\n")
    }

    /// Returns whether the objective was met; true without an objective.
    pub fn holds(&self) -> bool {
        self.options.slo.is_none_or(|slo| slo.is_met(&self.slo_requests()))
    }

    /// Returns the requests that the objective applies to: the interactive ones, or all if there are none.
    pub fn slo_requests(&self) -> Group {
        let priorities = self.record.priorities();
        let interactive = priorities.keys().any(|(_, priority)| *priority == Priority::Interactive);
        let mut slo_requests = Group::default();
        let counted =
            priorities.iter().filter(|((_, priority), _)| !interactive || *priority == Priority::Interactive);
        counted.for_each(|(_, group)| slo_requests.add(group));
        slo_requests
    }

    /// Returns the rate of requests within the objective's latency.
    pub fn goodput_per_s(&self) -> Option<f64> {
        let good = self.options.slo?.good(&self.slo_requests());
        let over = if self.stopped_early { self.elapsed } else { self.options.duration() };
        Some(good as f64 / over.as_secs_f64().max(1e-9))
    }

    /// Explains the requests that were not sent.
    fn not_sent_line(&self, total: &Group) -> Option<String> {
        total.outcomes.get(&Err(RequestFailure::NotSent))?;
        let limit = self.options.in_flight_max;
        Some(format!(
            "Requests were not sent while {limit} others were in flight: the limit is {IN_FLIGHT_MAX}, divided by the loads of \
             a drill, or less where the process may open fewer files (ulimit -n)."
        ))
    }

    fn slo_line(&self) -> Option<String> {
        let (slo, goodput) = (self.options.slo?, self.goodput_per_s()?);
        let slo_requests = self.slo_requests();
        let share = slo.good(&slo_requests) as f64 / (slo_requests.requests() as f64).max(1.0) * 100.0;
        let holds = if self.holds() { "holds" } else { "does not hold" };
        Some(format!(
            "{slo} {holds}: {share:.2} % of {} requests within {:?}, goodput {goodput:.1}/s.",
            slo_requests.requests(),
            slo.within
        ))
    }

    /// Returns whether the generator's lag was a significant part of the latencies.
    pub fn lag_is_notable(&self) -> bool {
        let lag = self.record.lag().quantile(0.99).unwrap_or_default();
        let latency = self.record.total().latencies().quantile(0.99).unwrap_or(Duration::MAX);
        lag.as_secs_f64() >= LAG_SHARE_NOTABLE * latency.as_secs_f64()
    }

    /// Returns the statistics of each task, if there are several.
    fn tasks(&self) -> Vec<(String, Group)> {
        let named = self.options.tasks.iter().zip(self.record.tasks());
        let named = named.map(|(task, record)| (task.name.clone(), record.total()));
        Some(named.collect::<Vec<_>>()).filter(|tasks| tasks.len() > 1).unwrap_or_default()
    }

    /// Returns the statistics of each stage, for tasks with several stages.
    fn stages(&self) -> Vec<(String, &Group)> {
        let mut named = Vec::new();
        let several = self.options.tasks.len() > 1;
        for (task, record) in self.options.tasks.iter().zip(self.record.tasks()) {
            let Pacing::Open { profile, .. } = &task.pacing else { continue };
            if profile.stages().count() < 2 {
                continue;
            }
            let of = if several { format!("{} ", task.name) } else { String::new() };
            let stages = profile.stages().zip(record.stages());
            named.extend(
                stages.map(|((begins, stage), group)| {
                    (format!("{of}{}s: {stage}", begins.as_secs_f64()), group)
                }),
            );
        }
        named
    }

    fn heading(&self) -> String {
        let Options { base, model, tasks, protocol, .. } = &self.options;
        let http2 = if *protocol == HttpProtocol::Http2 { ", HTTP/2" } else { "" };
        let early = if self.stopped_early { ", stopped early" } else { "" };
        let tasks = tasks.iter().map(|task| {
            let Task { name, workload, pacing } = task;
            let TaskWorkload { inputs, texts, kind, trace, .. } = workload;
            let unit = if *kind == WorkloadType::Rerank { "documents" } else { "texts" };
            let carried = match trace {
                None => format!("{inputs} of {} {unit} per request ({})", texts.count(), texts.source()),
                Some(_) => "texts of recorded lengths".to_owned(),
            };
            format!("{name}, {}: {pacing}; {carried}", kind.priority())
        });
        let tasks: Vec<String> = tasks.collect();
        format!("{base}, model {model}{http2}{early}\n{}", tasks.join("\n"))
    }

    fn lag(&self) -> String {
        let lag = self.record.lag();
        let [p50, p99, max] = [0.5, 0.99, 1.0].map(|quantile| milliseconds(lag, quantile));
        let warning = if self.lag_is_notable() {
            " It is a significant part of the latencies: lower the rate, or give the generator more CPU."
        } else {
            ""
        };
        format!("Generator lag: p50 {p50} ms, p99 {p99} ms, max {max} ms.{warning}")
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
    use crate::arrival::ArrivalProcess;
    use crate::exchange::Sample;
    use crate::options::{RawOptions, tests::good};
    use crate::profile::tests::profile;
    use crate::record::tests::sample;

    /// Creates a report of 100 requests to a near region, then 100 to a far region and 50 timeouts.
    pub(crate) fn report() -> Report {
        let rate = "100 for 1s, 150 for 1s".to_owned();
        let options = Options::check(RawOptions { rate, duration: None, ..good() }).unwrap();
        let killed = Mark {
            at: Duration::from_secs(1),
            is_action: true,
            label: "kill region gcp/europe-west4".to_owned(),
        };
        let mut record = Record::of(options.tasks.iter().map(|task| task.pacing.ends()));
        for number in 0..100 {
            record.add(sample(Some("gcp/europe-west4"), 10 * number, 8));
            record.add(Sample { retried: true, ..sample(Some("aws/us-east-1"), 1000 + 10 * number, 90) });
        }
        for number in 0..50 {
            let timeout =
                Sample { outcome: Err(RequestFailure::Timeout), ..sample(None, 1000 + 10 * number, 10_000) };
            record.add(timeout);
        }
        Report {
            options,
            elapsed: Duration::from_secs(12),
            stopped_early: false,
            record,
            marks: vec![killed],
        }
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
        assert!(table.contains("failed: 50 × timeout"), "{table}");
        assert!(table.contains("p99 0.08 ms") && !table.contains("lower the rate"), "{table}");
        assert_eq!(report().failed(), 50);
    }

    #[test]
    fn a_run_of_one_stage_has_no_table_of_stages() {
        let mut report = report();
        let arrival = ArrivalProcess::Constant;
        report.options.tasks[0].pacing = Pacing::Open { profile: profile("100 for 2s"), arrival };
        report.record = Record::of([report.options.tasks[0].pacing.ends()]);
        report.record.add(sample(None, 0, 8));
        assert!(!report.table().contains("\nstage"), "{}", report.table());
    }

    #[test]
    fn the_report_warns_of_a_lagging_generator() {
        let mut late = report();
        for _ in 0..10 {
            late.record.add(Sample { lag: Duration::from_millis(20), ..sample(None, 0, 8) });
        }
        assert!(late.lag_is_notable() && late.table().contains("lower the rate"), "{}", late.table());
    }
}
