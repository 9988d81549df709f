//! Both text formats ([`Format`]): that of Prometheus, version 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format>), and OpenMetrics, version 1.0.0
//! (<https://github.com/prometheus/OpenMetrics/blob/v1.0.0/specification/OpenMetrics.md>).

use crate::declaration::MetricKind;
use crate::exemplar::Exemplar;
use crate::format::Format;
use crate::snapshot::MetricSet;
use crate::snapshot::{CollectedMetric, HistogramValue, MetricSample, MetricsSnapshot, SampleValue};
use std::collections::BTreeSet;
use std::fmt::{Display, Write};

const WRITES: &str = "writing to a String does not fail";

/// Returns the text of a set of metrics of a process with this role.
pub fn render<S: MetricSet>(role: &'static str, set: &S, format: Format) -> String {
    MetricsSnapshot::of(role, set).text(format)
}

impl MetricsSnapshot {
    /// Returns its text.
    pub fn text(&self, format: Format) -> String {
        let others = match format {
            Format::Prometheus => BTreeSet::new(),
            Format::OpenMetrics => self.names_that_are_no_counters(),
        };
        let mut text = MetricsText { format, text: String::new(), others };
        self.metrics.iter().for_each(|metric| text.metric(metric));
        if format == Format::OpenMetrics {
            text.text.push_str("# EOF\n");
        }
        text.text
    }

    /// Returns the names of all metrics but the counters, also of those that the process does not have.
    fn names_that_are_no_counters(&self) -> BTreeSet<String> {
        let all = self.descriptions();
        let others = all.iter().filter(|metric| metric.kind != MetricKind::Counter);
        others.map(|metric| metric.head.name.replace("{role}", self.role)).collect()
    }
}

/// Metrics text being written.
struct MetricsText {
    format: Format,
    text: String,
    /// Names of the metrics that are no counters, for OpenMetrics.
    others: BTreeSet<String>,
}

impl MetricsText {
    /// Writes a metric with its samples.
    fn metric(&mut self, metric: &CollectedMetric) {
        let CollectedMetric { name, help, kind, label_names, samples } = metric;
        match self.format {
            Format::Prometheus => {
                let kind = kind.as_str();
                writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}").expect(WRITES);
            }
            Format::OpenMetrics => {
                let (family, kind) = self.open_metrics_family(name, *kind);
                let help = escaped(help);
                writeln!(self.text, "# TYPE {family} {kind}\n# HELP {family} {help}").expect(WRITES);
            }
        }
        for MetricSample { labels, value } in samples {
            let labels = label_names.iter().zip(labels);
            let labels: Vec<_> =
                labels.map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
            match value {
                SampleValue::Number(number) => self.line(name, "", &labels, None, number),
                SampleValue::Histogram(histogram) => self.histogram(name, &labels, histogram),
            }
        }
    }

    /// Writes the number of values up to each bound and of all, their sum and their number. The exemplar of a line is of the
    /// values above the bound before.
    fn histogram(&mut self, name: &str, labels: &[String], histogram: &HistogramValue) {
        let mut below = 0;
        for (at, (count, exemplar)) in histogram.counts.iter().zip(&histogram.exemplars).enumerate() {
            below += count;
            let bound =
                histogram.bounds.get(at).map_or_else(|| "+Inf".to_owned(), |bound| self.bound(*bound));
            let exemplar = exemplar.filter(|_| self.format == Format::OpenMetrics);
            let exemplar = exemplar.map_or_else(String::new, |(value, exemplar)| {
                let Exemplar { trace_id, at_ms } = exemplar;
                let (trace_id, seconds) = (u128::from_be_bytes(trace_id), at_ms as f64 / 1e3);
                format!(" # {{trace_id=\"{trace_id:032x}\"}} {value} {seconds:.3}")
            });
            let bound = format!("le=\"{bound}\"");
            self.line(name, "_bucket", labels, Some(bound), format_args!("{below}{exemplar}"));
        }
        self.line(name, "_sum", labels, None, histogram.sum);
        self.line(name, "_count", labels, None, below);
    }

    /// Returns the name and the type of a family in OpenMetrics, where the samples of a counter `x` are named `x_total`.
    /// The samples of a metric have the same name in both formats, so that queries do not depend on the format: a counter
    /// without that suffix (TEI's), and one whose `x` is the name of another metric, are of unknown type.
    fn open_metrics_family<'a>(&self, name: &'a str, kind: MetricKind) -> (&'a str, &'static str) {
        match (kind, name.strip_suffix("_total")) {
            (MetricKind::Counter, Some(family)) if !self.others.contains(family) => (family, kind.as_str()),
            (MetricKind::Counter, _) => (name, "unknown"),
            (MetricKind::Gauge | MetricKind::Histogram, _) => (name, kind.as_str()),
        }
    }

    /// Returns a bound as the format writes it: OpenMetrics wants a float, `1.0`.
    fn bound(&self, bound: f64) -> String {
        match self.format {
            Format::Prometheus => bound.to_string(),
            Format::OpenMetrics => format!("{bound:?}"),
        }
    }

    fn line(
        &mut self,
        name: &str,
        suffix: &str,
        labels: &[String],
        bound: Option<String>,
        value: impl Display,
    ) {
        let labels = labels.iter().chain(&bound).map(String::as_str).collect::<Vec<_>>().join(",");
        let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
        writeln!(self.text, "{name}{suffix}{labels} {value}").expect(WRITES);
    }
}

/// Returns a text as both formats write it between quotes.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
