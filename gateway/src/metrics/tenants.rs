//! Metrics by tenant.
//!
//! There is a row for each tenant of the newest table, and one for all former tenants: when a tenant is removed, its
//! row is deleted and its counts are added to the former row, so sums over tenants never decrease. Requests in flight
//! of a removed tenant are counted there as well.

use super::label::OutcomeClass;
use super::{Counter, Family, RequestOutcome};
use gateway_core::keys::KeyRing;
use metrics::{ByName, MetricDescription, MetricSet, MetricsSnapshot, metric_set};
use regions::id::TenantId;
use std::collections::BTreeMap;
use supervision::RwLock;

/// Row of all former tenants. No tenant can have this name.
const FORMER: &str = "(former)";

/// Requests, inputs and tokens by tenant.
#[derive(Default)]
pub(crate) struct TenantMetrics(RwLock<TenantRows>);

/// Rows of the current tenants, and the row of the former ones.
#[derive(Default)]
struct TenantRows {
    now: BTreeMap<TenantId, ByTenant>,
    former: ByTenant,
}

#[derive(Default)]
struct ByTenant {
    outcomes: Family<OutcomeClass>,
    inputs: Counter,
    tokens: Counter,
}

impl ByTenant {
    fn counts(&self) -> impl Iterator<Item = &Counter> {
        self.outcomes.iter().chain([&self.inputs, &self.tokens])
    }
}

metric_set! {
    /// Rows as metrics.
    struct TenantScrape<'a> {
        /// Requests of each tenant, by outcome.
        requests: ByName<&'a Family<OutcomeClass>> =
            "meridian_gateway_tenant_requests_total" ["tenant", "outcome"],
        /// Inputs of requests with a response.
        inputs: ByName<&'a Counter> = "meridian_gateway_tenant_inputs_total" ["tenant"],
        /// Computed tokens, as counted by regions.
        tokens: ByName<&'a Counter> = "meridian_gateway_tenant_tokens_total" ["tenant"],
    }
}

impl TenantRows {
    fn named(&self) -> impl Iterator<Item = (&str, &ByTenant)> {
        // The former row is shown only if it has counts.
        let former = self.former.counts().any(|count| count.get() > 0).then_some((FORMER, &self.former));
        self.now.iter().map(|(tenant, by)| (tenant.as_str(), by)).chain(former)
    }
}

impl TenantMetrics {
    /// Creates empty metrics for these tenants.
    pub(super) fn of(keys: &KeyRing) -> TenantMetrics {
        let metrics = TenantMetrics(RwLock::default());
        metrics.adopt(keys);
        metrics
    }

    /// Replaces the set of tenants; those that remain keep their counts.
    pub(crate) fn adopt(&self, keys: &KeyRing) {
        let rows = &mut *self.0.write();
        let mut before = std::mem::take(&mut rows.now);
        for tenant in keys.tenants() {
            rows.now.insert(tenant.id.clone(), before.remove(&tenant.id).unwrap_or_default());
        }
        for by in before.values() {
            by.counts().zip(rows.former.counts()).for_each(|(count, total)| total.add(count.get()));
        }
    }

    /// Counts a finished request of a tenant.
    pub(crate) fn ended(&self, tenant: &TenantId, outcome: RequestOutcome, inputs: u64, tokens: u64) {
        let rows = &*self.0.read();
        let by = rows.now.get(tenant).unwrap_or(&rows.former);
        by.outcomes.count(OutcomeClass::of(outcome));
        by.inputs.add(inputs);
        by.tokens.add(tokens);
    }
}

impl MetricSet for TenantMetrics {
    fn describe(all: &mut Vec<MetricDescription>) {
        TenantScrape::describe(all);
    }

    fn collect(&self, into: &mut MetricsSnapshot) {
        let rows = &*self.0.read();
        let scrape = TenantScrape {
            requests: rows.named().map(|(tenant, by)| (tenant, &by.outcomes)).collect(),
            inputs: rows.named().map(|(tenant, by)| (tenant, &by.inputs)).collect(),
            tokens: rows.named().map(|(tenant, by)| (tenant, &by.tokens)).collect(),
        };
        scrape.collect(into);
    }
}
