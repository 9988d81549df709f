//! Values of the metrics of a process at one time, collected from the declarations. Every format is made from them: the text
//! of `/metrics` ([`text`](crate::text)) and what a process sends to a collector, so that these cannot differ.

use crate::declaration::{MetricDescription, MetricHead, MetricKind};
use crate::exemplar::Exemplar;
use std::fmt;

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

impl MetricDescription {
    /// Returns the description of a metric whose values are an `M`.
    pub fn of<M: Metric>(head: MetricHead) -> MetricDescription {
        let mut values = Vec::new();
        M::label_values(&mut values);
        MetricDescription { head, kind: M::KIND, values }
    }
}

/// Values of all metrics of a process.
#[derive(Debug)]
pub struct MetricsSnapshot {
    pub(crate) role: &'static str,
    describe: fn(&mut Vec<MetricDescription>),
    /// Metrics in the order of their declarations.
    pub metrics: Vec<CollectedMetric>,
}

/// Metric with its samples.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectedMetric {
    /// Name.
    pub name: String,
    /// One sentence.
    pub help: &'static str,
    /// Type.
    pub kind: MetricKind,
    /// Names of the labels.
    pub label_names: &'static [&'static str],
    /// Samples; none for a family that is empty.
    pub samples: Vec<MetricSample>,
}

/// Value of a metric with these labels.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricSample {
    /// Values of the labels; the last may be missing.
    pub labels: Vec<String>,
    /// Value.
    pub value: SampleValue,
}

/// Value of a sample.
#[derive(Clone, Debug, PartialEq)]
pub enum SampleValue {
    /// Of a counter or a gauge.
    Number(Number),
    /// Of a histogram.
    Histogram(HistogramValue),
}

/// Number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// Natural number.
    Integer(u64),
    /// Number such as a duration in seconds.
    Float(f64),
}

/// Buckets of a histogram.
#[derive(Clone, Debug, PartialEq)]
pub struct HistogramValue {
    /// Upper bounds, which belong to their buckets.
    pub bounds: &'static [f64],
    /// Number of values in each bucket; the last is that of the values above the last bound.
    pub counts: Vec<u64>,
    /// Sum of all values.
    pub sum: f64,
    /// Last value with a trace in each bucket.
    pub exemplars: Vec<Option<(f64, Exemplar)>>,
}

impl Number {
    fn is_zero(self) -> bool {
        match self {
            Number::Integer(number) => number == 0,
            Number::Float(number) => number == 0.0,
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Number::Integer(number) => number.fmt(f),
            Number::Float(number) => number.fmt(f),
        }
    }
}

impl From<u8> for Number {
    fn from(number: u8) -> Number {
        Number::Integer(number.into())
    }
}

impl From<u32> for Number {
    fn from(number: u32) -> Number {
        Number::Integer(number.into())
    }
}

impl From<u64> for Number {
    fn from(number: u64) -> Number {
        Number::Integer(number)
    }
}

impl From<usize> for Number {
    fn from(number: usize) -> Number {
        Number::Integer(number as u64)
    }
}

impl From<f64> for Number {
    fn from(number: f64) -> Number {
        Number::Float(number)
    }
}

impl MetricsSnapshot {
    /// Collects the values of a set of metrics of a process with this role.
    pub fn of<S: MetricSet>(role: &'static str, set: &S) -> MetricsSnapshot {
        let mut snapshot = MetricsSnapshot { role, describe: S::describe, metrics: Vec::new() };
        set.collect(&mut snapshot);
        snapshot
    }

    /// Appends a metric with its samples.
    pub fn metric<M: Metric>(&mut self, head: MetricHead, metric: &M) {
        let MetricHead { name, help, labels: label_names } = head;
        let mut samples = Vec::new();
        metric.sample(&mut Samples { samples: &mut samples, labels: Vec::new(), zeros: None });
        let name = name.replace("{role}", self.role);
        self.metrics.push(CollectedMetric { name, help, kind: M::KIND, label_names, samples });
    }

    /// Returns the descriptions of all metrics, also of those that the process does not have.
    pub(crate) fn descriptions(&self) -> Vec<MetricDescription> {
        let mut all = Vec::new();
        (self.describe)(&mut all);
        all
    }
}

/// Samples of a metric being collected.
#[derive(Debug)]
pub struct Samples<'a> {
    samples: &'a mut Vec<MetricSample>,
    /// Labels of the next sample.
    labels: Vec<String>,
    /// If zeros are omitted: whether the next sample is added even so.
    zeros: Option<bool>,
}

impl Samples<'_> {
    /// Adds samples that have this value of the next label.
    pub fn labelled(&mut self, value: &str, add: impl FnOnce(&mut Self)) {
        self.labels.push(value.to_owned());
        add(self);
        self.labels.pop();
    }

    /// Adds samples, of which those that are zero are omitted, except the first if `first`.
    pub fn without_zeros(&mut self, first: bool, add: impl FnOnce(&mut Self)) {
        self.zeros = Some(first);
        add(self);
        self.zeros = None;
    }

    /// Adds the sample of a counter or a gauge.
    pub fn value(&mut self, value: impl Into<Number>) {
        let value = value.into();
        if self.zeros.is_none_or(|first| first || !value.is_zero()) {
            self.add(SampleValue::Number(value));
        }
        self.zeros = self.zeros.map(|_| false);
    }

    /// Adds the sample of a histogram.
    pub(crate) fn histogram(&mut self, value: HistogramValue) {
        self.add(SampleValue::Histogram(value));
    }

    fn add(&mut self, value: SampleValue) {
        self.samples.push(MetricSample { labels: self.labels.clone(), value });
    }
}
