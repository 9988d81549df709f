//! What is counted of each tenant.
//!
//! There are as many rows as the newest table has tenants, and one more: whoever is in it no longer is forgotten, and what
//! was counted of him is added to what was counted of all such, so that no sum over tenants ever falls. What of his is
//! still under way is counted there as well.

use super::label::Outcome;
use super::{Count, Ending, Kind, Text};
use gateway_core::keys::KeyRing;
use regions::id::TenantId;
use std::collections::BTreeMap;
use supervision::RwLock;

/// The row of all who are tenants no longer. No tenant can have this name.
const FORMER: &str = "(former)";

/// Requests, inputs and tokens by tenant.
pub(crate) struct TenantMetrics(RwLock<Rows>);

#[derive(Default)]
struct Rows {
    now: BTreeMap<TenantId, ByTenant>,
    former: ByTenant,
}

#[derive(Default)]
struct ByTenant {
    outcomes: [Count; Outcome::ALL.len()],
    inputs: Count,
    tokens: Count,
}

/// One of a tenant's totals.
type Total = fn(&ByTenant) -> &Count;

impl ByTenant {
    fn counts(&self) -> impl Iterator<Item = &Count> {
        self.outcomes.iter().chain([&self.inputs, &self.tokens])
    }
}

impl Rows {
    fn named(&self) -> impl Iterator<Item = (&str, &ByTenant)> {
        // A row that nobody has ever been moved to says nothing.
        let former = self.former.counts().any(|count| count.get() > 0).then_some((FORMER, &self.former));
        self.now.iter().map(|(tenant, by)| (tenant.as_str(), by)).chain(former)
    }
}

impl TenantMetrics {
    /// Nothing yet, of these tenants.
    pub(super) fn of(keys: &KeyRing) -> TenantMetrics {
        let metrics = TenantMetrics(RwLock::default());
        metrics.adopt(keys);
        metrics
    }

    /// These are the tenants from now on. What was counted of whoever is one still stays his.
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

    /// A request of this tenant ended so.
    pub(crate) fn ended(&self, tenant: &TenantId, ending: Ending, inputs: u64, tokens: u64) {
        let rows = &*self.0.read();
        let by = rows.now.get(tenant).unwrap_or(&rows.former);
        by.outcomes[Outcome::of(ending) as usize].add(1);
        by.inputs.add(inputs);
        by.tokens.add(tokens);
    }

    pub(super) fn render(&self, text: &mut Text) {
        let rows = &*self.0.read();
        let name = "meridian_gateway_tenant_requests_total";
        text.head(name, Kind::Counter, "Requests of each tenant, by outcome.");
        for (tenant, by) in rows.named() {
            for outcome in Outcome::ALL {
                let labels = [("tenant", tenant), ("outcome", outcome.as_str())];
                text.sample(name, &labels, by.outcomes[outcome as usize].get());
            }
        }
        let totals: [(&str, &str, Total); 2] = [
            ("meridian_gateway_tenant_inputs_total", "Inputs of answered requests.", |by| &by.inputs),
            (
                "meridian_gateway_tenant_tokens_total",
                "Tokens that were computed, as regions counted them.",
                |by| &by.tokens,
            ),
        ];
        for (name, help, total) in totals {
            text.head(name, Kind::Counter, help);
            for (tenant, by) in rows.named() {
                text.sample(name, &[("tenant", tenant)], total(by).get());
            }
        }
    }
}
