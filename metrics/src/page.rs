//! `docs/metrics.md`, rendered from the declarations.

use crate::declaration::{MetricDescription, MetricHead};
use crate::snapshot::MetricSet;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Role of a process, and the descriptions of its metrics.
#[derive(Debug)]
pub struct RoleMetrics {
    /// Role, as in the names of its metrics.
    pub role: &'static str,
    /// Its metrics, in the order of `/metrics`.
    pub metrics: Vec<MetricDescription>,
}

impl RoleMetrics {
    /// Returns the metrics of a role whose `/metrics` renders an `S`.
    pub fn of<S: MetricSet>(role: &'static str) -> RoleMetrics {
        let mut metrics = Vec::new();
        S::describe(&mut metrics);
        RoleMetrics { role, metrics }
    }

    /// Returns the names of its metrics.
    pub fn names(&self) -> impl Iterator<Item = String> {
        self.metrics.iter().map(|metric| metric.head.name.replace("{role}", self.role))
    }
}

/// Returns the unit of a metric, which its name contains.
fn unit(name: &str) -> &'static str {
    let name = name.trim_end_matches("_total").trim_end_matches("_max");
    let units = [
        ("_tokens_per_second", "tokens/s"),
        ("_milliseconds", "milliseconds"),
        ("_ms", "milliseconds"),
        ("_seconds", "seconds"),
        ("_duration", "seconds"),
        ("_bytes", "bytes"),
        ("_tokens", "tokens"),
    ];
    units.iter().find(|(suffix, _)| name.ends_with(suffix)).map_or("", |(_, unit)| unit)
}

/// Returns the page about the metrics of all roles.
pub fn markdown(roles: &[RoleMetrics]) -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         For operators: every metric of `/metrics`, by role. Rendered from the code by the test\n\
         `docs_metrics_md_is_the_page_that_the_code_renders`. A gateway serves `/metrics` on its operations port, a spoke (as `ingress`)\n\
         on its operations port or else on the port for gateways, a replica and a hub on their HTTP port. The same metrics can be sent to a\n\
         collector by OTLP ([metrics-export.md](metrics-export.md)).\n\n\
         Labels with a closed set of values are listed in [Label values](#label-values). The values of the other labels are names from the\n\
         configuration: regions, deployments, tenants, tasks, replicas, and facts about the engine. Buckets of histograms are 0.1 ms to\n\
         60 s, or powers of 2 up to 16384.\n",
    );
    let mut values: BTreeMap<(&str, &[&str]), Vec<String>> = BTreeMap::new();
    for role in roles {
        write!(
            page,
            "\n## Role `{}`\n\n| metric | type | unit | labels | help |\n|---|---|---|---|---|\n",
            role.role
        )
        .expect("writing to a String does not fail");
        for (metric, name) in role.metrics.iter().zip(role.names()) {
            let MetricDescription { head: MetricHead { name: _, help, labels }, kind, values: of_labels } =
                metric;
            for (label, of_label) in labels.iter().zip(of_labels) {
                of_label.iter().for_each(|list| values.entry((label, list)).or_default().push(name.clone()));
            }
            let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
            let (kind, unit, labels) = (kind.as_str(), unit(&name), labels.join(", "));
            writeln!(page, "| `{name}` | {kind} | {unit} | {labels} | {help} |")
                .expect("writing to a String does not fail");
        }
    }
    page.push_str("\n## Label values\n\n| label | metrics | values |\n|---|---|---|\n");
    for ((label, list), mut metrics) in values {
        metrics.dedup();
        let quoted =
            |names: &[String]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let list: Vec<String> = list.iter().map(ToString::to_string).collect();
        writeln!(page, "| `{label}` | {} | {} |", quoted(&metrics), quoted(&list))
            .expect("writing to a String does not fail");
    }
    page
}
