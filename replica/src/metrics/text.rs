//! Prometheus text format, version 0.0.4.
//!
//! Written here instead of using a library: `prometheus-client` writes OpenMetrics, which appends `_total` to every
//! counter, and TEI's dashboards query `te_request_count`. The format needs only these lines.

use std::fmt::{Display, Write};

use super::histogram::HistogramSnapshot;

/// Content type of the rendered text.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Metrics being rendered.
#[derive(Default)]
pub(super) struct ExpositionText(String);

/// Names and values from closed sets, which need no escaping.
pub(super) type LabelPairs<'a> = &'a [(&'a str, &'a str)];

impl ExpositionText {
    pub(super) fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
    }

    pub(super) fn sample(&mut self, name: &str, labels: LabelPairs<'_>, value: impl Display) {
        let labels = braces(labels, None);
        self.line(format_args!("{name}{labels} {value}"));
    }

    /// Writes a metric with a single sample.
    pub(super) fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.head(name, kind, help);
        self.sample(name, &[], value);
    }

    pub(super) fn histogram(&mut self, name: &str, labels: LabelPairs<'_>, snapshot: &HistogramSnapshot) {
        let mut below = 0;
        for (count, end) in snapshot.counts.iter().zip(snapshot.bounds) {
            below += count;
            let labels = braces(labels, Some(&end.to_string()));
            self.line(format_args!("{name}_bucket{labels} {below}"));
        }
        below += snapshot.counts.last().copied().unwrap_or_default();
        let all = braces(labels, Some("+Inf"));
        self.line(format_args!("{name}_bucket{all} {below}"));
        let labels = braces(labels, None);
        self.line(format_args!("{name}_sum{labels} {}\n{name}_count{labels} {below}", snapshot.sum));
    }

    pub(super) fn finish(self) -> String {
        self.0
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.0, "{line}").expect("a string takes everything");
    }
}

fn braces(labels: LabelPairs<'_>, end: Option<&str>) -> String {
    let all = labels.iter().copied().chain(end.map(|end| ("le", end)));
    let inside = all.map(|(name, value)| format!("{name}=\"{value}\"")).collect::<Vec<_>>().join(",");
    if inside.is_empty() { inside } else { format!("{{{inside}}}") }
}

#[cfg(test)]
mod tests {
    use super::super::histogram::AtomicHistogram;
    use super::*;

    #[test]
    fn metrics_are_rendered_in_the_prometheus_text_format() {
        let mut text = ExpositionText::default();
        text.head("a_total", "counter", "What.");
        text.sample("a_total", &[("priority", "bulk"), ("code", "ok")], 3);
        text.single("b", "gauge", "Else.", 0.5);
        let histogram = AtomicHistogram::new(&[1.0, 2.5]);
        [0.5, 2.0, 9.0].iter().for_each(|value| histogram.observe(*value));
        text.histogram("c", &[("x", "y")], &histogram.read());
        let expected = "# HELP a_total What.\n# TYPE a_total counter\na_total{priority=\"bulk\",code=\"ok\"} 3\n\
             # HELP b Else.\n# TYPE b gauge\nb 0.5\n\
             c_bucket{x=\"y\",le=\"1\"} 1\nc_bucket{x=\"y\",le=\"2.5\"} 2\nc_bucket{x=\"y\",le=\"+Inf\"} 3\n\
             c_sum{x=\"y\"} 11.5\nc_count{x=\"y\"} 3\n";
        assert_eq!(text.finish(), expected);
    }
}
