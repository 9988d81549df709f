//! Metrics, labels and label values in PromQL, compared with docs/metrics.md.
//!
//! A scanner, not a parser: it finds the names in a query, a rules file or prose alike. Names of metrics are recognised by
//! their prefix; `promtool` checks the syntax.

use std::collections::{BTreeMap, BTreeSet};

/// Prefixes of our metrics.
const PREFIXES: [&str; 2] = ["meridian_", "te_"];
/// Labels that Prometheus itself adds, also to `ALERTS`.
const PROMETHEUS: [&str; 6] = ["job", "instance", "le", "alertname", "alertstate", "severity"];
/// Labels of the targets in configs/observability/prometheus.yml, by the prefix of the metrics of their role. Receipts are
/// metrics of two roles, the build of all.
const TARGETS: [(&str, &[&str]); 8] = [
    ("meridian_build_", &["origin", "region", "deployment"]),
    ("meridian_gateway_", &["origin"]),
    ("meridian_receipts_", &["origin", "region"]),
    ("meridian_ingress_", &["region"]),
    ("meridian_scaling_", &["region"]),
    ("meridian_jobs_", &["region"]),
    ("meridian_replica_", &["region", "deployment"]),
    ("meridian_hub_", &["region"]),
];

/// Metrics of docs/metrics.md.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    /// Type and labels by name.
    metrics: BTreeMap<String, (String, BTreeSet<String>)>,
    /// Values by metric and label, of labels with a closed set.
    values: BTreeMap<(String, String), BTreeSet<String>>,
}

impl Metrics {
    /// Reads the tables of the page.
    pub(crate) fn read(page: &str) -> Metrics {
        let mut read = Metrics::default();
        for line in page.lines() {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            match cells[..] {
                ["", name, kind, _, labels, _, ""] if name.starts_with('`') => {
                    let (_, known) = read
                        .metrics
                        .entry(name.trim_matches('`').to_owned())
                        .or_insert_with(|| (kind.to_owned(), BTreeSet::new()));
                    known.extend(list(labels));
                }
                ["", label, metrics, values, ""] if label.starts_with('`') => {
                    for metric in list(metrics) {
                        let key = (metric, label.trim_matches('`').to_owned());
                        read.values.entry(key).or_default().extend(list(values));
                    }
                }
                _ => {}
            }
        }
        assert!(
            read.metrics.len() > 100 && read.values.len() > 20,
            "the tables of the page have another format"
        );
        read
    }
}

/// Returns the names in a cell, which are in backticks.
fn list(cell: &str) -> BTreeSet<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Names that a query may use.
#[derive(Debug)]
pub(crate) struct Names {
    metrics: Metrics,
    /// Metrics that recording rules define.
    recorded: BTreeSet<String>,
    labels: BTreeSet<String>,
}

impl Names {
    pub(crate) fn new(metrics: Metrics) -> Names {
        let own = metrics.metrics.values().flat_map(|(_, labels)| labels.iter().map(String::as_str));
        let targets = TARGETS.iter().flat_map(|(_, labels)| labels.iter().copied());
        let labels = own.chain(targets).chain(PROMETHEUS).map(str::to_owned).collect();
        Names { metrics, recorded: BTreeSet::new(), labels }
    }

    /// Adds the metrics that the recording rules of a file define, and the labels that `label_replace` adds in its
    /// alerts or that these have.
    pub(crate) fn add_recorded(&mut self, text: &str) {
        let recorded = text.lines().filter_map(|line| line.trim().strip_prefix("- record: "));
        self.recorded.extend(recorded.map(str::to_owned));
        // label_replace(…, "LABEL", "VALUE", "", "")
        for before in text.split(", \"\", \"\")") {
            if let Some(label) = before.strip_suffix('"').and_then(|before| before.rsplit('"').nth(2)) {
                self.labels.insert(label.to_owned());
            }
        }
        for labels in text.lines().filter_map(|line| line.trim().strip_prefix("labels: {")) {
            let keys = labels.split(',').filter_map(|label| label.split_once(':'));
            self.labels.extend(keys.map(|(key, _)| key.trim().to_owned()));
        }
    }

    /// Returns what is wrong with the names in a text.
    pub(crate) fn complaints(&self, path: &str, text: &str) -> Vec<String> {
        let mut complaints = Vec::new();
        for (name, rest) in identifiers(text) {
            if matches!(name, "by" | "on" | "without" | "ignoring" | "group_left" | "group_right") {
                let listed =
                    rest.trim_start_matches(' ').strip_prefix('(').and_then(|rest| rest.split_once(')'));
                for label in listed.into_iter().flat_map(|(listed, _)| listed.split(',')).map(str::trim) {
                    // Prose in parentheses is no list of labels.
                    let is_name = !label.is_empty() && label.chars().all(is_part);
                    if is_name && !self.labels.contains(label) {
                        complaints.push(format!("{path}: {name} ({label}): no metric has this label"));
                    }
                }
            } else if name == "labels" && rest.starts_with('.') {
                complaints.extend(
                    identifiers(rest).next().and_then(|(label, _)| self.label_complaint(path, label)),
                );
            } else if PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
                complaints
                    .extend(self.metric_complaints(name, rest).into_iter().map(|it| format!("{path}: {it}")));
            }
        }
        complaints
    }

    /// Returns what is wrong with the labels of a legend, `{{LABEL}}`.
    pub(crate) fn legend_complaints(&self, path: &str, legend: &str) -> Vec<String> {
        let labels = legend.split("{{").skip(1).filter_map(|rest| rest.split_once("}}"));
        labels.filter_map(|(label, _)| self.label_complaint(path, label)).collect()
    }

    fn label_complaint(&self, path: &str, label: &str) -> Option<String> {
        (!self.labels.contains(label)).then(|| format!("{path}: no metric has the label {label}"))
    }

    fn metric_complaints(&self, name: &str, rest: &str) -> Vec<String> {
        let name = name.trim_end_matches(':');
        if name.contains(':') {
            let is_known = self.recorded.contains(name);
            return if is_known { Vec::new() } else { vec![format!("{name}: no rule records it")] };
        }
        // `meridian_hub_…` stands for several.
        if rest.starts_with('…') {
            return Vec::new();
        }
        let is_series = rest.starts_with(['{', '[']);
        let Metrics { metrics, values } = &self.metrics;
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| {
            let base = name.strip_suffix(suffix)?;
            metrics.get(base).filter(|(kind, _)| kind == "histogram").map(|_| base)
        });
        let base = base.unwrap_or(name);
        let Some((kind, own)) = metrics.get(base) else {
            return vec![format!("{name} is not in docs/metrics.md")];
        };
        if is_series && base == name && kind == "histogram" {
            return vec![format!("{name} is a histogram: append _bucket, _sum or _count")];
        }
        let targets =
            TARGETS.iter().find(|(prefix, _)| name.starts_with(prefix)).map_or(&[][..], |(_, it)| it);
        let mut complaints = Vec::new();
        for (label, operator, value) in selector(rest) {
            let is_own = own.contains(label);
            let is_bucket = label == "le" && name.ends_with("_bucket");
            if !is_own && !is_bucket && !targets.contains(&label) && !["job", "instance"].contains(&label) {
                complaints.push(format!("{name} has no label {label}"));
            }
            let Some(values) = values.get(&(base.to_owned(), label.to_owned())).filter(|_| is_own) else {
                continue;
            };
            let alternatives = value.split('|').filter(|_| operator.ends_with('~')).chain(
                // A regular expression such as `4..` or a variable of a dashboard is not compared.
                [value].into_iter().filter(|_| !operator.ends_with('~')),
            );
            let is_literal = |value: &&str| !value.contains(['*', '+', '$', '(', '.']);
            for value in alternatives.filter(is_literal).filter(|value| !values.contains(*value)) {
                complaints.push(format!("{name}: {label} is never {value}"));
            }
        }
        complaints
    }
}

fn is_part(sign: char) -> bool {
    sign.is_ascii_alphanumeric() || sign == '_' || sign == ':'
}

/// Returns each identifier with the text after it.
fn identifiers(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let from = &rest[rest.find(is_part)?..];
        let (name, after) = from.split_at(from.find(|sign| !is_part(sign)).unwrap_or(from.len()));
        rest = after;
        Some((name, after))
    })
}

/// Returns label, operator and value of each matcher of a selector at the start of a text, `{a="b",c=~"d|e"}`.
fn selector(text: &str) -> Vec<(&str, &str, &str)> {
    let mut matchers = Vec::new();
    let Some(mut rest) = text.strip_prefix('{') else { return matchers };
    while let Some((matcher, after)) = rest.split_once('"') {
        let Some((value, after)) = after.split_once('"') else { break };
        let matcher = matcher.trim_matches([',', ' ']);
        let operator = matcher.find(|sign| !is_part(sign)).unwrap_or(matcher.len());
        matchers.push((&matcher[..operator], &matcher[operator..], value));
        rest = after;
        if rest.starts_with('}') {
            break;
        }
    }
    matchers
}

#[test]
fn a_name_label_or_value_that_does_not_exist_is_found() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md")).unwrap();
    let mut names = Names::new(Metrics::read(&page));
    names.add_recorded("  - record: meridian_x:requests:rate5m\n  expr: label_replace(a, \"limit\", \"b c\", \"\", \"\") > 1\n");
    for correct in [
        "sum by (origin, outcome) (rate(meridian_gateway_requests_total{outcome=~\"ok|internal\",origin=~\"$origin\"}[5m]))",
        "histogram_quantile(0.9, sum by (le) (rate(meridian_gateway_stage_seconds_bucket{stage=\"queue\",le=\"0.5\"}[5m])))",
        "meridian_x:requests:rate5m > on (limit) 1 and meridian_hub_requests_total{path=\"/v1/keys/{id}\",status=~\"5..\"}",
        "the stages in meridian_gateway_stage_seconds: by (what is said) here; {{ $labels.limit }}",
    ] {
        assert_eq!(names.complaints("a", correct), Vec::<String>::new());
    }
    for (wrong, expected) in [
        (
            "rate(meridian_gateway_request_total[5m])",
            "meridian_gateway_request_total is not in docs/metrics.md",
        ),
        (
            "meridian_gateway_requests_total_bucket",
            "meridian_gateway_requests_total_bucket is not in docs/metrics.md",
        ),
        ("meridian_hub_leader{region=\"a\",tenant=\"b\"}", "meridian_hub_leader has no label tenant"),
        (
            "meridian_gateway_requests_total{region=\"a\"}",
            "meridian_gateway_requests_total has no label region",
        ),
        (
            "meridian_gateway_shed_total{reason!=\"full\"}",
            "meridian_gateway_shed_total: reason is never full",
        ),
        (
            "meridian_gateway_shed_total{reason=~\"over_share|full\"}",
            "meridian_gateway_shed_total: reason is never full",
        ),
        (
            "rate(meridian_hub_plan_seconds[5m])",
            "meridian_hub_plan_seconds is a histogram: append _bucket, _sum or _count",
        ),
        ("sum by (shard) (x)", "by (shard): no metric has this label"),
        ("meridian_y:requests:rate5m", "meridian_y:requests:rate5m: no rule records it"),
        ("{{ $labels.shard }}", "no metric has the label shard"),
    ] {
        assert_eq!(names.complaints("a", wrong), [format!("a: {expected}")]);
    }
    assert_eq!(names.legend_complaints("a", "{{region}} {{shard}}"), ["a: no metric has the label shard"]);
}
