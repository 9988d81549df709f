//! Metrics and their declarations as data.

use crate::snapshot::{MetricsSnapshot, Samples};

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

/// Metrics that are exported together; implemented by [`metric_set!`](crate::metric_set).
pub trait MetricSet {
    /// Appends the descriptions of its metrics.
    fn describe(all: &mut Vec<MetricDescription>);

    /// Appends its metrics with their values.
    fn collect(&self, into: &mut MetricsSnapshot);
}

impl<S: MetricSet> MetricSet for &S {
    fn describe(all: &mut Vec<MetricDescription>) {
        S::describe(all);
    }

    fn collect(&self, into: &mut MetricsSnapshot) {
        S::collect(self, into);
    }
}

/// Metrics of a component that a process may not have.
impl<S: MetricSet> MetricSet for Option<S> {
    fn describe(all: &mut Vec<MetricDescription>) {
        S::describe(all);
    }

    fn collect(&self, into: &mut MetricsSnapshot) {
        self.iter().for_each(|set| set.collect(into));
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

    /// Adds its samples.
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
