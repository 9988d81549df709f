//! Writer of the Prometheus text format, version 0.0.4
//! (<https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format>).
//!
//! Hand-written instead of a library: we need only these lines of the format, and the libraries bring a registry of
//! their own with a lock around each family, where ours are arrays of atomics whose labels are closed sets.

use super::histogram::LatencyHistogram;
use std::fmt::{Display, Write};

/// Content type of the output of [`MetricsText`].
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// Metrics text being written.
#[derive(Default)]
pub(crate) struct MetricsText(String);

/// Names and values of labels.
pub(crate) type Labels<'a> = &'a [(&'a str, &'a str)];

impl MetricsText {
    pub(crate) fn head(&mut self, name: &str, kind: Kind, help: &str) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
    }

    pub(crate) fn sample(&mut self, name: &str, labels: Labels<'_>, value: impl Display) {
        let labels = braces(labels, None);
        self.line(format_args!("{name}{labels} {value}"));
    }

    /// Writes a metric with one sample.
    pub(crate) fn single(&mut self, name: &str, kind: Kind, help: &str, value: impl Display) {
        self.head(name, kind, help);
        self.sample(name, &[], value);
    }

    pub(crate) fn histogram(&mut self, name: &str, labels: Labels<'_>, histogram: &LatencyHistogram) {
        let mut count = 0;
        for (end, below) in histogram.cumulative() {
            let end = if end.is_finite() { end.to_string() } else { "+Inf".to_owned() };
            let labels = braces(labels, Some(&end));
            self.line(format_args!("{name}_bucket{labels} {below}"));
            count = below;
        }
        let labels = braces(labels, None);
        let sum = histogram.sum_seconds();
        self.line(format_args!("{name}_sum{labels} {sum}\n{name}_count{labels} {count}"));
    }

    pub(crate) fn finish(self) -> String {
        self.0
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.0, "{line}").expect("writing to a String does not fail");
    }
}

/// Formats labels in braces. Values are names from closed sets or from configuration, where a name has only letters,
/// digits, '.', '_', '-' and '/'; so escaping is not needed.
fn braces(labels: Labels<'_>, end: Option<&str>) -> String {
    let all = labels.iter().copied().chain(end.map(|end| ("le", end)));
    let inside = all.map(|(name, value)| format!("{name}=\"{value}\"")).collect::<Vec<_>>().join(",");
    if inside.is_empty() { inside } else { format!("{{{inside}}}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_output_is_the_prometheus_text_format() {
        let mut text = MetricsText::default();
        text.head("a_total", Kind::Counter, "What.");
        text.sample("a_total", &[("priority", "bulk"), ("code", "ok")], 3);
        text.single("b", Kind::Gauge, "Else.", 0.5);
        let histogram = LatencyHistogram::default();
        [150, 250_000].iter().for_each(|us| histogram.observe(Duration::from_micros(*us)));
        text.histogram("c_seconds", &[("x", "y")], &histogram);
        let text = text.finish();
        let expected = "# HELP a_total What.\n# TYPE a_total counter\na_total{priority=\"bulk\",code=\"ok\"} 3\n\
             # HELP b Else.\n# TYPE b gauge\nb 0.5\n\
             c_seconds_bucket{x=\"y\",le=\"0.0001\"} 0\nc_seconds_bucket{x=\"y\",le=\"0.0002\"} 1\n";
        assert!(text.starts_with(expected), "{text}");
        let end = "c_seconds_bucket{x=\"y\",le=\"60\"} 2\nc_seconds_bucket{x=\"y\",le=\"+Inf\"} 2\n\
             c_seconds_sum{x=\"y\"} 0.25015\nc_seconds_count{x=\"y\"} 2\n";
        assert!(text.ends_with(end), "{text}");
    }
}
