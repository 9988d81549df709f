//! Deployments in the metrics of a spoke.
//!
//! Replicas report the names of their deployments, so their number has no bound of its own. [`DEPLOYMENTS_MAX`] of them have a row each:
//! those that are configured first, then in the order of the names. The row `(other)` has the rest, as at a gateway.

use crate::metrics::{DEPLOYMENTS_MAX, InGateway, OTHER_DEPLOYMENTS};
use metrics::{ByName, OneOf, Sparse};
use regions::DeploymentName;
use replica_api::start_failure::StartFailure;
use std::collections::{BTreeMap, BTreeSet};

/// Deployments that have a row of their own.
pub(super) struct ListedDeployments<'a>(BTreeSet<&'a DeploymentName>);

impl<'a> ListedDeployments<'a> {
    /// Selects those with a row of all `names`.
    pub(super) fn of(
        names: impl Iterator<Item = &'a DeploymentName>,
        is_configured: impl Fn(&DeploymentName) -> bool,
    ) -> ListedDeployments<'a> {
        let mut names: Vec<_> = names.map(|name| (!is_configured(name), name)).collect();
        names.sort_unstable();
        names.truncate(DEPLOYMENTS_MAX);
        ListedDeployments(names.into_iter().map(|(_, name)| name).collect())
    }

    fn row<'n>(&self, name: &'n DeploymentName) -> &'n str {
        if self.0.contains(name) { name.as_str() } else { OTHER_DEPLOYMENTS }
    }

    /// Returns a value for each row, with the values of the others added.
    pub(super) fn sum<'n, M>(
        &self,
        values: impl Iterator<Item = (&'n DeploymentName, M)>,
        add: impl Fn(M, M) -> M,
    ) -> ByName<M> {
        let mut rows: BTreeMap<&str, M> = BTreeMap::new();
        for (name, value) in values {
            let row = self.row(name);
            let value = match rows.remove(row) {
                Some(sum) => add(sum, value),
                None => value,
            };
            rows.insert(row, value);
        }
        rows.into_iter().collect()
    }

    /// Returns a row for each failed deployment; that of the others once for each of their reasons.
    pub(super) fn failed<'n>(
        &self,
        failed: impl Iterator<Item = (&'n DeploymentName, StartFailure)>,
    ) -> ByName<Sparse<OneOf<StartFailure, InGateway>, false>> {
        let rows: BTreeSet<_> = failed.map(|(name, reason)| (self.row(name), reason)).collect();
        rows.into_iter().map(|(row, reason)| (row, Sparse(OneOf::new(reason)))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metrics::{Format, metric_set};

    metric_set! {
        struct ListedSet {
            /// Sum.
            sum: ByName<u64> = "sum" ["deployment"],
            /// Failed.
            failed: ByName<Sparse<OneOf<StartFailure, InGateway>, false>> = "failed" ["deployment", "reason"],
        }
    }

    fn names(count: usize) -> Vec<DeploymentName> {
        (0..count).map(|number| format!("d{number:04}").parse().unwrap()).collect()
    }

    fn lines(count: usize, is_configured: impl Fn(&DeploymentName) -> bool) -> Vec<String> {
        let all = names(count);
        let rows = ListedDeployments::of(all.iter(), is_configured);
        let reasons = [StartFailure::ALL[0], StartFailure::ALL[1]].into_iter().cycle();
        let scrape = ListedSet {
            sum: rows.sum(all.iter().map(|name| (name, u64::MAX / 2)), u64::saturating_add),
            failed: rows.failed(all.iter().zip(reasons)),
        };
        let text = metrics::render("ingress", &scrape, Format::Prometheus);
        text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
    }

    #[test]
    fn deployments_past_the_limit_share_a_row() {
        let at_the_limit = lines(DEPLOYMENTS_MAX, |_| false);
        assert_eq!(at_the_limit.len(), 2 * DEPLOYMENTS_MAX);
        assert!(!at_the_limit.concat().contains(OTHER_DEPLOYMENTS));
        let past_it = lines(DEPLOYMENTS_MAX + 3, |name| name.as_str() == "d0202");
        let others: Vec<_> = past_it.iter().filter(|line| line.contains(OTHER_DEPLOYMENTS)).collect();
        assert_eq!(past_it.len(), 2 * DEPLOYMENTS_MAX + others.len());
        let sum = format!("sum{{deployment=\"(other)\"}} {}", u64::MAX);
        assert!(others.contains(&&sum), "{others:#?}");
        assert_eq!(others.len(), 3, "the sum, and two reasons: {others:#?}");
        let has_row = |name: &str| past_it.iter().any(|line| line.contains(name));
        assert!(has_row("d0202") && has_row("d0198") && !has_row("d0199"), "configured ones come first");
    }
}
