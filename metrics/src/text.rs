//! Metrics and their declarations as data, and the writer of the Prometheus text format, version 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format>).

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

/// Content type of the text.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const WRITES: &str = "writing to a String does not fail";

/// Returns the text of a set of metrics of a process with this role.
pub fn render(role: &'static str, set: &impl MetricSet) -> String {
    let mut text = MetricsText { role, text: String::new() };
    set.render(&mut text);
    text.text
}

/// Metrics text being written.
#[derive(Debug)]
pub struct MetricsText {
    role: &'static str,
    text: String,
}

impl MetricsText {
    /// Writes a metric with its samples.
    pub fn metric<M: Metric>(&mut self, head: MetricHead, metric: &M) {
        metric.sample(&mut self.head(head, M::KIND));
    }

    fn head(&mut self, MetricHead { name, help, labels }: MetricHead, kind: MetricKind) -> Samples<'_> {
        let (name, kind) = (name.replace("{role}", self.role), kind.as_str());
        writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}").expect(WRITES);
        Samples { text: &mut self.text, name, names: labels, labels: Vec::new(), zeros: None }
    }
}

/// Samples of a metric being written.
#[derive(Debug)]
pub struct Samples<'a> {
    text: &'a mut String,
    name: String,
    /// Names of the labels.
    names: &'static [&'static str],
    /// Labels of the next sample. Values are closed sets or names from the configuration, which have only letters,
    /// digits, '.', '_', '-', '(', ')' and '/'; so escaping is not needed.
    labels: Vec<String>,
    /// If zeros are not written: whether the next sample is written even so.
    zeros: Option<bool>,
}

impl Samples<'_> {
    /// Writes samples that have this value of the next label.
    pub fn labelled(&mut self, value: &str, write: impl FnOnce(&mut Self)) {
        self.labels.push(format!("{}=\"{value}\"", self.names[self.labels.len()]));
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

    /// Writes the number of values up to a bound; without one, of all.
    pub(crate) fn bucket(&mut self, bound: Option<f64>, count: u64) {
        let bound = bound.map_or_else(|| "+Inf".to_owned(), |bound| bound.to_string());
        self.line("_bucket", Some(format!("le=\"{bound}\"")), count);
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
