//! Declarations of metrics as data.

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
