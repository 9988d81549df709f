//! Declared metrics in the text format and in the documentation.

use metrics::page::{RoleMetrics, markdown};
use metrics::{
    ByIndex, ByName, Counter, Exemplar, Family, Format, Gauge, Histogram, Info, MetricSet, OneOf, Sizes,
    Sparse, Total, labels, labels_of, metric_set, render,
};
use std::sync::Arc;
use std::time::Duration;

labels! {
    /// Priority.
    enum Priority {
        /// A person waits.
        Fast = "fast",
        Bulk = "bulk",
    }
}

/// Enum of another crate, as far as this test is concerned.
#[derive(Clone, Copy)]
enum Cause {
    First,
    Retry,
}

impl Cause {
    const ALL: [Cause; 2] = [Cause::First, Cause::Retry];

    fn as_str(self) -> &'static str {
        match self {
            Cause::First => "first",
            Cause::Retry => "retry",
        }
    }
}

struct Site;
labels_of!(Site: Cause);

metric_set! {
    /// Shared metrics.
    #[derive(Default)]
    struct SharedMetrics {
        /// Panics.
        panics: Counter = "meridian_{role}_panics_total",
    }
}

metric_set! {
    /// Metrics under test.
    struct TestMetrics<'a> {
        /// Requests, by priority
        /// and cause.
        requests: Sparse<Family<Priority, Family<Cause, Counter, Site>, Site>> = "requests_total" ["priority", "cause"],
        /// Requests in flight.
        in_flight: Gauge = "in_flight",
        /// By known or unknown priority.
        known: Family<Option<Priority>> = "known_total" ["priority"],
        /// Sizes.
        sizes: Histogram<Sizes> = "sizes",
        /// Times.
        times: ByIndex<Histogram> = "times_seconds" ["region"],
        /// Age.
        age: Option<Duration> = "age_seconds",
        /// State.
        state: ByName<OneOf<Priority>> = "state" ["region", "state"],
        /// Total that another component counts.
        total: &'a Total<f64> = "busy_seconds_total",
        /// Engine.
        engine: Info<3> = "engine_info" ["kind", "precision", "gpu"],
        /// Included.
        shared: &'a SharedMetrics = set,
        /// Absent.
        none: Option<&'a SharedMetrics> = set,
    }
}

fn all<'a>(total: &'a Total<f64>, shared: &'a SharedMetrics) -> TestMetrics<'a> {
    TestMetrics {
        requests: Sparse::default(),
        in_flight: Gauge::default(),
        known: Family::default(),
        sizes: Histogram::default(),
        times: ByIndex::new(&Arc::from(["a".to_owned(), "b".to_owned()])),
        age: None,
        state: [("eu", OneOf::new(Priority::Bulk))].into_iter().collect(),
        total,
        engine: Info(vec!["cpu".to_owned(), "f32".to_owned()]),
        shared,
        none: None,
    }
}

/// Returns the lines of a metric with their `# HELP` and `# TYPE`.
fn lines(text: &str, name: &str) -> Vec<String> {
    let of = |line: &&str| line.trim_start_matches("# HELP ").trim_start_matches("# TYPE ").starts_with(name);
    text.lines().filter(of).map(str::to_owned).collect()
}

#[test]
fn metrics_are_rendered_in_the_prometheus_text_format() {
    let (total, shared) = (Total(1.5), SharedMetrics::default());
    let all = all(&total, &shared);
    all.requests.0.of(Priority::Bulk).of(Cause::Retry).add(3);
    all.in_flight.add(2);
    all.in_flight.decrement();
    shared.panics.add(4);
    all.known.count(None);
    all.known.count(Some(Priority::Fast));
    let text = render("hub", &all, Format::Prometheus);
    assert_eq!(
        lines(&text, "requests_total"),
        [
            "# HELP requests_total Requests, by priority and cause.",
            "# TYPE requests_total counter",
            "requests_total{priority=\"fast\",cause=\"first\"} 0",
            "requests_total{priority=\"bulk\",cause=\"retry\"} 3",
        ]
    );
    assert_eq!(lines(&text, "in_flight")[1..], ["# TYPE in_flight gauge", "in_flight 1"]);
    let known =
        ["unknown\"} 1", "fast\"} 1", "bulk\"} 0"].map(|end| format!("known_total{{priority=\"{end}"));
    assert_eq!(lines(&text, "known_total")[2..], known);
    assert_eq!(lines(&text, "age_seconds").len(), 2, "no sample");
    let state = ["state{region=\"eu\",state=\"fast\"} 0", "state{region=\"eu\",state=\"bulk\"} 1"];
    assert_eq!(lines(&text, "state")[2..], state);
    assert_eq!(lines(&text, "busy")[1..], ["# TYPE busy_seconds_total counter", "busy_seconds_total 1.5"]);
    assert_eq!(lines(&text, "engine_info")[2..], ["engine_info{kind=\"cpu\",precision=\"f32\"} 1"]);
    assert_eq!(lines(&text, "meridian_hub_panics_total").len(), 3, "the absent set is not rendered");
    assert!(text.ends_with("meridian_hub_panics_total 4\n"));
}

#[test]
fn a_value_is_counted_in_the_first_bucket_that_contains_it() {
    let (total, shared) = (Total(0.0), SharedMetrics::default());
    let all = all(&total, &shared);
    [1, 2, 3, 16_384, 16_385].iter().for_each(|size| all.sizes.observe(*size));
    for us in [0, 100, 101, 60_000_000, 60_000_001] {
        all.times.of(1).observe(Duration::from_micros(us));
    }
    let text = render("hub", &all, Format::Prometheus);
    let sizes = lines(&text, "sizes");
    assert_eq!(
        sizes[2..5],
        ["sizes_bucket{le=\"1\"} 1", "sizes_bucket{le=\"2\"} 2", "sizes_bucket{le=\"4\"} 3"]
    );
    let end =
        ["sizes_bucket{le=\"16384\"} 4", "sizes_bucket{le=\"+Inf\"} 5", "sizes_sum 32775", "sizes_count 5"];
    assert_eq!(sizes[sizes.len() - 4..], end);
    let times = lines(&text, "times_seconds");
    assert_eq!(times.len(), 2 + 19 + 2, "a region without a value has no sample");
    assert_eq!(times[2], "times_seconds_bucket{region=\"b\",le=\"0.0001\"} 2");
    assert_eq!(times[3], "times_seconds_bucket{region=\"b\",le=\"0.0002\"} 3");
    assert_eq!(times[19], "times_seconds_bucket{region=\"b\",le=\"60\"} 4");
    assert_eq!(times[20], "times_seconds_bucket{region=\"b\",le=\"+Inf\"} 5");
    assert_eq!(times[21], "times_seconds_sum{region=\"b\"} 120.000202");
    let sum = Histogram::sum([&all.sizes, &all.sizes].into_iter());
    assert!(format!("{sum:?}").contains("65550000000"), "{sum:?}");
}

#[test]
fn the_page_has_every_metric_with_its_labels_and_their_values() {
    fn roles<S: MetricSet>(_: &S) -> [RoleMetrics; 1] {
        [RoleMetrics::of::<S>("hub")]
    }
    let (total, shared) = (Total(0.0), SharedMetrics::default());
    let page = markdown(&roles(&all(&total, &shared)));
    for line in [
        "## Role `hub`",
        "| `requests_total` | counter |  | `priority`, `cause` | Requests, by priority and cause. |",
        "| `times_seconds` | histogram | seconds | `region` | Times. |",
        "| `meridian_hub_panics_total` | counter |  |  | Panics. |",
        "| `priority` | `requests_total` | `fast`, `bulk` |",
        "| `priority` | `known_total` | `unknown`, `fast`, `bulk` |",
    ] {
        assert!(page.lines().any(|given| given == line), "{line} in {page}");
    }
}

metric_set! {
    /// Metrics whose names OpenMetrics treats in different ways.
    #[derive(Default)]
    struct NamesMetrics {
        /// Counter with "quotes".
        counted: Counter = "counted_total",
        /// Counter without the suffix.
        te: Counter = "te_request_count",
        /// Counter with the name of a gauge.
        opened: Counter = "connections_total",
        /// Gauge.
        open: Gauge = "connections",
        /// Sizes.
        sizes: Histogram<Sizes> = "sizes",
        /// Times.
        times: Histogram = "times_seconds",
    }
}

#[test]
fn open_metrics_has_the_same_samples_and_ends_with_eof() {
    let all = NamesMetrics::default();
    all.counted.add(1);
    all.te.add(2);
    all.opened.add(3);
    all.open.add(4);
    all.sizes.observe(1);
    let text = render("hub", &all, Format::OpenMetrics);
    let start = "# TYPE counted counter\n# HELP counted Counter with \\\"quotes\\\".\ncounted_total 1\n\
                 # TYPE te_request_count unknown\n# HELP te_request_count Counter without the suffix.\nte_request_count 2\n\
                 # TYPE connections_total unknown\n# HELP connections_total Counter with the name of a gauge.\n\
                 connections_total 3\n\
                 # TYPE connections gauge\n# HELP connections Gauge.\nconnections 4\n";
    assert!(text.starts_with(start), "{text}");
    assert!(text.ends_with("times_seconds_count 0\n# EOF\n"), "{text}");
    assert!(
        text.contains("sizes_bucket{le=\"1.0\"} 1\n") && text.contains("sizes_bucket{le=\"16384.0\"} 1\n")
    );
    let samples = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(|line| line.replace(".0\"}", "\"}")).collect()
    };
    assert_eq!(samples(&text), samples(&render("hub", &all, Format::Prometheus)));
}

#[test]
fn a_bucket_has_the_trace_of_its_last_value_in_open_metrics_only() {
    let all = NamesMetrics::default();
    let trace = |last: u8, at_ms| {
        let mut trace_id = [0; 16];
        (trace_id[0], trace_id[15]) = (0xab, last);
        Some(Exemplar { trace_id, at_ms })
    };
    all.times.observe_traced(Duration::from_millis(3), trace(1, 1_700_000_000_250));
    all.times.observe_traced(Duration::from_millis(4), trace(2, 1_700_000_001_000));
    all.times.observe_traced(Duration::from_millis(4), None);
    all.times.observe_traced(Duration::from_secs(90), trace(3, 1_700_000_002_000));
    let text = render("hub", &all, Format::OpenMetrics);
    let buckets: Vec<_> = text.lines().filter(|line| line.contains(" # {")).collect();
    assert_eq!(
        buckets,
        [
            "times_seconds_bucket{le=\"0.005\"} 3 # {trace_id=\"ab000000000000000000000000000002\"} 0.004 1700000001.000",
            "times_seconds_bucket{le=\"+Inf\"} 4 # {trace_id=\"ab000000000000000000000000000003\"} 90 1700000002.000",
        ]
    );
    assert!(!render("hub", &all, Format::Prometheus).contains("trace_id"));
}

#[test]
fn a_label_value_cannot_end_its_sample() {
    metric_set! {
        /// Metrics by name.
        struct NamedMetrics {
            /// By name.
            by: ByName<u64> = "by_name" ["name"],
        }
    }
    let hostile = "a\"} 1\nfake{x=\"\\";
    for format in [Format::Prometheus, Format::OpenMetrics] {
        let text = render("hub", &NamedMetrics { by: [(hostile, 7)].into_iter().collect() }, format);
        assert!(text.contains("by_name{name=\"a\\\"} 1\\nfake{x=\\\"\\\\\"} 7\n"), "{text}");
        assert!(!text.lines().any(|line| line.starts_with("fake")), "{text}");
    }
}
