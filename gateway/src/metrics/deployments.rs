//! Metrics by deployment, from which the service level objectives are computed.
//!
//! The first [`DEPLOYMENTS_MAX`] deployments of the route table have a row each, and keep it for as long as they are in the
//! table; the row `(other)` has the rest, and the counts of former deployments, so sums over deployments never decrease.
//! A request is counted after its deployment was found in the table, so text of a client never creates a row.

use super::label::{ObjectiveResult, RequestOutcome};
use super::{Family, Histogram};
use metrics::{ByName, Exemplar, MetricDescription, MetricSet, MetricsSnapshot, metric_set};
use regions::id::DeploymentName;
use replica_api::priority::Priority;
use std::collections::BTreeMap;
use std::time::Duration;
use supervision::RwLock;

/// Maximum number of deployments with a row: with all of them in use and both priorities, 9600 series for each gateway. A
/// fleet with more deployments has objectives for these, and one for the rest.
pub(crate) const DEPLOYMENTS_MAX: usize = 200;
/// Row of the other deployments. No deployment can have this name.
pub(crate) const OTHER: &str = "(other)";

/// Requests, latencies and shed requests by deployment.
#[derive(Default)]
pub(crate) struct DeploymentMetrics(RwLock<DeploymentRows>);

#[derive(Default)]
struct DeploymentRows {
    now: BTreeMap<DeploymentName, DeploymentRow>,
    other: DeploymentRow,
}

#[derive(Default)]
struct DeploymentRow {
    results: Family<ObjectiveResult>,
    shed: Family<Priority>,
    seconds: Family<Priority, Histogram>,
}

metric_set! {
    /// Rows as metrics.
    struct DeploymentScrape<'a> {
        /// Requests of a deployment, by their result for its objective: ok, failed by a fault of Meridian, or excluded because the
        /// client is at fault, over a quota or disconnected.
        requests: ByName<&'a Family<ObjectiveResult>> =
            "meridian_gateway_deployment_requests_total" ["deployment", "result"],
        /// Time from the head of a request to the last byte of its response, of requests that are not excluded.
        seconds: ByName<Family<Priority, Option<&'a Histogram>>> =
            "meridian_gateway_deployment_request_seconds" ["deployment", "priority"],
        /// Requests that load shedding rejected, by deployment; those whose deployment was not known yet count as (other).
        shed: ByName<&'a Family<Priority>> =
            "meridian_gateway_deployment_shed_total" ["deployment", "priority"],
    }
}

impl DeploymentRow {
    fn is_empty(&self) -> bool {
        let counts = || self.results.iter().chain(self.shed.iter());
        counts().all(|count| count.get() == 0)
    }

    /// Adds the counts of a former deployment.
    fn merge(&self, former: &DeploymentRow) {
        let pairs = self.results.iter().zip(former.results.iter());
        pairs.chain(self.shed.iter().zip(former.shed.iter())).for_each(|(sum, count)| sum.add(count.get()));
        self.seconds.iter().zip(former.seconds.iter()).for_each(|(sum, times)| sum.merge(times));
    }
}

impl DeploymentRows {
    /// Returns the rows to be shown: a deployment from its first request on, so that a large catalogue of idle ones costs
    /// nothing.
    fn shown(&self) -> impl Iterator<Item = (&str, &DeploymentRow)> {
        let named = self.now.iter().map(|(deployment, by)| (deployment.as_str(), by));
        named.chain([(OTHER, &self.other)]).filter(|(_, by)| !by.is_empty())
    }

    fn of(&self, deployment: Option<&DeploymentName>) -> &DeploymentRow {
        deployment.and_then(|deployment| self.now.get(deployment)).unwrap_or(&self.other)
    }
}

impl DeploymentMetrics {
    /// Replaces the set of deployments; those that remain keep their rows.
    pub(crate) fn adopt<'a>(&self, deployments: impl Iterator<Item = &'a DeploymentName> + Clone) {
        let rows = &mut *self.0.write();
        let mut before = std::mem::take(&mut rows.now);
        let kept = deployments.clone().filter_map(|name| before.remove_entry(name));
        rows.now.extend(kept);
        before.values().for_each(|former| rows.other.merge(former));
        for name in deployments {
            if rows.now.len() == DEPLOYMENTS_MAX {
                break;
            }
            rows.now.entry(name.clone()).or_default();
        }
    }

    /// Counts a finished request of a deployment of the route table.
    pub(crate) fn ended(
        &self,
        deployment: &DeploymentName,
        priority: Priority,
        outcome: RequestOutcome,
        took: Duration,
        exemplar: Option<Exemplar>,
    ) {
        let rows = &*self.0.read();
        let (by, result) = (rows.of(Some(deployment)), ObjectiveResult::of(outcome));
        by.results.count(result);
        if result != ObjectiveResult::Excluded {
            by.seconds.of(priority).observe_traced(took, exemplar);
        }
    }

    /// Counts a request that load shedding rejected.
    pub(crate) fn shed(&self, deployment: Option<&DeploymentName>, priority: Priority) {
        self.0.read().of(deployment).shed.count(priority);
    }
}

impl MetricSet for DeploymentMetrics {
    fn describe(all: &mut Vec<MetricDescription>) {
        DeploymentScrape::describe(all);
    }

    fn collect(&self, into: &mut MetricsSnapshot) {
        let rows = &*self.0.read();
        let used = |times: &'_ Histogram| !times.is_empty();
        let scrape = DeploymentScrape {
            requests: rows.shown().map(|(name, by)| (name, &by.results)).collect(),
            seconds: rows
                .shown()
                .map(|(name, by)| {
                    (name, by.seconds.iter().map(|times| Some(times).filter(|it| used(it))).collect())
                })
                .collect(),
            shed: rows.shown().map(|(name, by)| (name, &by.shed)).collect(),
        };
        scrape.collect(into);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics::Format;

    const OK: RequestOutcome = RequestOutcome::Complete { status: 200, code: None };

    fn names(range: std::ops::Range<usize>) -> Vec<DeploymentName> {
        range.map(|n| format!("deployment-{n:04}").parse().unwrap()).collect()
    }

    fn ended(metrics: &DeploymentMetrics, name: &DeploymentName) {
        metrics.ended(name, Priority::Interactive, OK, Duration::from_millis(3), None);
    }

    /// Returns the number of successful requests in each row.
    fn rows(metrics: &DeploymentMetrics) -> BTreeMap<String, u64> {
        let text = metrics::render("gateway", metrics, Format::Prometheus);
        let ok = text.lines().filter(|line| line.contains("result=\"ok\""));
        let row = |line: &str| {
            let (_, rest) = line.split_once("deployment=\"")?;
            let (name, _) = rest.split_once('"')?;
            Some((name.to_owned(), line.rsplit_once(' ')?.1.parse().ok()?))
        };
        ok.filter_map(row).collect()
    }

    #[test]
    fn deployments_past_the_limit_share_a_row() {
        let (metrics, all) = (DeploymentMetrics::default(), names(0..DEPLOYMENTS_MAX + 1));
        metrics.adopt(all[..DEPLOYMENTS_MAX].iter());
        all[..DEPLOYMENTS_MAX].iter().for_each(|name| ended(&metrics, name));
        assert_eq!(rows(&metrics).len(), DEPLOYMENTS_MAX);
        assert_eq!(rows(&metrics).get(OTHER), None);
        metrics.adopt(all.iter());
        all.iter().for_each(|name| ended(&metrics, name));
        let rows = rows(&metrics);
        assert_eq!(rows.len(), DEPLOYMENTS_MAX + 1);
        assert_eq!((rows["deployment-0000"], rows[OTHER]), (2, 1));
    }

    #[test]
    fn a_deployment_keeps_its_row_when_others_are_added_and_leaves_its_counts_when_it_is_removed() {
        let (metrics, all) = (DeploymentMetrics::default(), names(0..2 * DEPLOYMENTS_MAX));
        let (first, last) = all.split_at(DEPLOYMENTS_MAX);
        metrics.adopt(last.iter());
        ended(&metrics, &last[7]);
        // The new ones sort before it, and there is no row left for them.
        metrics.adopt(all.iter());
        ended(&metrics, &last[7]);
        ended(&metrics, &first[0]);
        assert_eq!(
            rows(&metrics),
            BTreeMap::from([("deployment-0207".to_owned(), 2), (OTHER.to_owned(), 1)])
        );
        metrics.adopt(first.iter());
        ended(&metrics, &first[0]);
        assert_eq!(
            rows(&metrics),
            BTreeMap::from([("deployment-0000".to_owned(), 1), (OTHER.to_owned(), 3)])
        );
        let text = metrics::render("gateway", &metrics, Format::Prometheus);
        let count = "meridian_gateway_deployment_request_seconds_count{deployment=\"(other)\",priority=\"interactive\"} 3";
        assert!(text.contains(count) && !text.contains("priority=\"bulk\",le"), "{text}");
    }

    #[test]
    fn shed_requests_are_counted_by_deployment_and_excluded_ones_have_no_latency() {
        let (metrics, all) = (DeploymentMetrics::default(), names(0..1));
        metrics.adopt(all.iter());
        metrics.shed(Some(&all[0]), Priority::Bulk);
        metrics.shed(None, Priority::Interactive);
        metrics.ended(
            &all[0],
            Priority::Interactive,
            RequestOutcome::ClientDisconnected,
            Duration::ZERO,
            None,
        );
        let text = metrics::render("gateway", &metrics, Format::Prometheus);
        for line in [
            "meridian_gateway_deployment_shed_total{deployment=\"deployment-0000\",priority=\"bulk\"} 1",
            "meridian_gateway_deployment_shed_total{deployment=\"(other)\",priority=\"interactive\"} 1",
            "meridian_gateway_deployment_requests_total{deployment=\"deployment-0000\",result=\"excluded\"} 1",
        ] {
            assert!(text.lines().any(|given| given == line), "{line} in {text}");
        }
        assert!(!text.contains("seconds_bucket"), "{text}");
    }
}
