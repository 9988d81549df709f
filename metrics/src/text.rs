//! Metrics and their declarations as data, and the writer of both text formats ([`Format`]): that of Prometheus, version 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format>), and OpenMetrics, version 1.0.0
//! (<https://github.com/prometheus/OpenMetrics/blob/v1.0.0/specification/OpenMetrics.md>).

use crate::exemplar::Exemplar;
use crate::format::Format;
use std::collections::BTreeSet;
use std::fmt::{Display, Write};

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only increases.
    Counter,
    /// Current state.
    Gauge,
    /// Distribution in buckets.
    Histogram,
}

impl MetricKind {
    /// Returns the name in the text format.
    pub fn as_str(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        }
    }
}

/// Declaration of a metric.
#[derive(Clone, Copy, Debug)]
pub struct MetricHead {
    /// Name; `{role}` in it stands for the role of the process, for sets that several roles have.
    pub name: &'static str,
    /// One sentence.
    pub help: &'static str,
    /// Names of the labels, outermost family first.
    pub labels: &'static [&'static str],
}

/// Description of a metric, for the documentation.
#[derive(Clone, Debug)]
pub struct MetricDescription {
    /// Its declaration.
    pub head: MetricHead,
    /// Its type.
    pub kind: MetricKind,
    /// Values of its labels; `None` for names from the configuration.
    pub values: Vec<Option<Vec<&'static str>>>,
}

impl MetricDescription {
    /// Returns the description of a metric whose values are an `M`.
    pub fn of<M: Metric>(head: MetricHead) -> MetricDescription {
        let mut values = Vec::new();
        M::label_values(&mut values);
        MetricDescription { head, kind: M::KIND, values }
    }
}

/// Metrics that are rendered together; implemented by [`metric_set!`](crate::metric_set).
pub trait MetricSet {
    /// Appends the descriptions of its metrics.
    fn describe(all: &mut Vec<MetricDescription>);

    /// Appends its metrics with their values.
    fn render(&self, text: &mut MetricsText);
}

impl<S: MetricSet> MetricSet for &S {
    fn describe(all: &mut Vec<MetricDescription>) {
        S::describe(all);
    }

    fn render(&self, text: &mut MetricsText) {
        S::render(self, text);
    }
}

/// Metrics of a component that a process may not have.
impl<S: MetricSet> MetricSet for Option<S> {
    fn describe(all: &mut Vec<MetricDescription>) {
        S::describe(all);
    }

    fn render(&self, text: &mut MetricsText) {
        self.iter().for_each(|set| set.render(text));
    }
}

/// Values of a metric.
pub trait Metric {
    /// Its type.
    const KIND: MetricKind;
    /// Number of its labels.
    const LABELS: usize = 0;

    /// Appends the values of its labels; `None` for names from the configuration.
    fn label_values(_values: &mut Vec<Option<Vec<&'static str>>>) {}

    /// Writes its samples.
    fn sample(&self, to: &mut Samples<'_>);
}

impl<M: Metric> Metric for &M {
    const KIND: MetricKind = M::KIND;
    const LABELS: usize = M::LABELS;

    fn label_values(values: &mut Vec<Option<Vec<&'static str>>>) {
        M::label_values(values);
    }

    fn sample(&self, to: &mut Samples<'_>) {
        M::sample(self, to);
    }
}

/// A value that may be absent at the time of a scrape.
impl<M: Metric> Metric for Option<M> {
    const KIND: MetricKind = M::KIND;
    const LABELS: usize = M::LABELS;

    fn label_values(values: &mut Vec<Option<Vec<&'static str>>>) {
        M::label_values(values);
    }

    fn sample(&self, to: &mut Samples<'_>) {
        self.iter().for_each(|value| value.sample(to));
    }
}

const WRITES: &str = "writing to a String does not fail";

/// Returns the text of a set of metrics of a process with this role.
pub fn render<S: MetricSet>(role: &'static str, set: &S, format: Format) -> String {
    let others = match format {
        Format::Prometheus => BTreeSet::new(),
        Format::OpenMetrics => names_that_are_no_counters::<S>(role),
    };
    let mut text = MetricsText { role, format, text: String::new(), others };
    set.render(&mut text);
    if format == Format::OpenMetrics {
        text.text.push_str("# EOF\n");
    }
    text.text
}

/// Returns the names of all metrics but the counters.
fn names_that_are_no_counters<S: MetricSet>(role: &str) -> BTreeSet<String> {
    let mut all = Vec::new();
    S::describe(&mut all);
    let others = all.iter().filter(|metric| metric.kind != MetricKind::Counter);
    others.map(|metric| metric.head.name.replace("{role}", role)).collect()
}

/// Metrics text being written.
#[derive(Debug)]
pub struct MetricsText {
    role: &'static str,
    format: Format,
    text: String,
    /// Names of the metrics that are no counters, for OpenMetrics.
    others: BTreeSet<String>,
}

impl MetricsText {
    /// Writes a metric with its samples.
    pub fn metric<M: Metric>(&mut self, head: MetricHead, metric: &M) {
        metric.sample(&mut self.head(head, M::KIND));
    }

    fn head(&mut self, MetricHead { name, help, labels }: MetricHead, kind: MetricKind) -> Samples<'_> {
        let name = name.replace("{role}", self.role);
        match self.format {
            Format::Prometheus => {
                let kind = kind.as_str();
                writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}").expect(WRITES);
            }
            Format::OpenMetrics => {
                let (family, kind) = self.open_metrics_family(&name, kind);
                let help = escaped(help);
                writeln!(self.text, "# TYPE {family} {kind}\n# HELP {family} {help}").expect(WRITES);
            }
        }
        let format = self.format;
        Samples { text: &mut self.text, format, name, names: labels, labels: Vec::new(), zeros: None }
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
}

/// Returns a text as both formats write it between quotes.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Samples of a metric being written.
#[derive(Debug)]
pub struct Samples<'a> {
    text: &'a mut String,
    format: Format,
    name: String,
    /// Names of the labels.
    names: &'static [&'static str],
    /// Labels of the next sample.
    labels: Vec<String>,
    /// If zeros are not written: whether the next sample is written even so.
    zeros: Option<bool>,
}

impl Samples<'_> {
    /// Writes samples that have this value of the next label.
    pub fn labelled(&mut self, value: &str, write: impl FnOnce(&mut Self)) {
        self.labels.push(format!("{}=\"{}\"", self.names[self.labels.len()], escaped(value)));
        write(self);
        self.labels.pop();
    }

    /// Writes samples, of which those that are zero are omitted, except the first if `first`.
    pub fn without_zeros(&mut self, first: bool, write: impl FnOnce(&mut Self)) {
        self.zeros = Some(first);
        write(self);
        self.zeros = None;
    }

    /// Writes a sample.
    pub fn value(&mut self, value: impl Display) {
        let value = value.to_string();
        if self.zeros.is_none_or(|first| first || value != "0") {
            self.line("", None, value);
        }
        self.zeros = self.zeros.map(|_| false);
    }

    /// Writes the number of values up to a bound; without one, of all. The exemplar is of the values above the bound before.
    pub(crate) fn bucket(&mut self, bound: Option<f64>, count: u64, exemplar: Option<(f64, Exemplar)>) {
        let bound = bound.map_or_else(|| "+Inf".to_owned(), |bound| self.bound(bound));
        let exemplar = exemplar.filter(|_| self.format == Format::OpenMetrics);
        let exemplar = exemplar.map_or_else(String::new, |(value, exemplar)| {
            let Exemplar { trace_id, at_ms } = exemplar;
            let (trace_id, seconds) = (u128::from_be_bytes(trace_id), at_ms as f64 / 1e3);
            format!(" # {{trace_id=\"{trace_id:032x}\"}} {value} {seconds:.3}")
        });
        self.line("_bucket", Some(format!("le=\"{bound}\"")), format!("{count}{exemplar}"));
    }

    /// Returns a bound as the format writes it: OpenMetrics wants a float, `1.0`.
    fn bound(&self, bound: f64) -> String {
        match self.format {
            Format::Prometheus => bound.to_string(),
            Format::OpenMetrics => format!("{bound:?}"),
        }
    }

    pub(crate) fn sum_and_count(&mut self, sum: f64, count: u64) {
        self.line("_sum", None, sum);
        self.line("_count", None, count);
    }

    fn line(&mut self, suffix: &str, bound: Option<String>, value: impl Display) {
        let labels = self.labels.iter().chain(&bound).map(String::as_str).collect::<Vec<_>>().join(",");
        let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
        writeln!(self.text, "{}{suffix}{labels} {value}", self.name).expect(WRITES);
    }
}
