//! Accepted tenants: those of this gateway's own file, until an operator has applied tenants through the hub; from then on those
//! of the route table, which are the same on all gateways.
//!
//! Tenants are part of the table ([`super::table`]): they have its generation, are on disk before they are used, and a table
//! with one invalid tenant is refused as a whole, so the last valid one stays. A table without a tenants field comes from an
//! older hub that does not support tenants: the last applied tenants stay, on disk as well, because a tenant in the file may
//! have been removed since it was written. A request takes its tenant and its routes from the same view. Issuers always come
//! from the file: their keys are in files of this gateway.
//!
//! The state of each tenant (rate limits, metrics) is kept by its index for as long as the tenant is in the newest table: a
//! changed tenant keeps its state. The state of a removed tenant is deleted, and its index is not reused in the lifetime of
//! this process; if the tenant is added again, it is a new one.

use super::tenant_limiters::{TenantLimiters, TenantSource};
use crate::metrics::EdgeMetrics;
use gateway_core::keys::KeyRing;
use gateway_core::priority::Priorities;
use gateway_core::tenant::{GatewayShares, RateLimits, Tenant};
use regions::id::TenantId;
use regions::route::{self, RouteTable};
use regions::tenant::{ApiKey, TenantLimits, TenantRules};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;
use supervision::{Mutex, RwLock};

/// Accepted tenants and their state.
pub(crate) struct Tenants {
    /// Tenants of the file, as last read.
    file: RwLock<Arc<KeyRing>>,
    indexes: Mutex<TenantIndexes>,
    pub(super) limiters: TenantLimiters,
    metrics: Arc<EdgeMetrics>,
}

/// Indexes of the current tenants.
struct TenantIndexes {
    by_id: BTreeMap<TenantId, usize>,
    /// Index of the next new tenant.
    next: usize,
    /// Tenants of the last table with a tenants field.
    applied: Option<route::Tenants>,
}

impl Tenants {
    /// Creates the tenants of the file, and applies `shares` to the limits of the tenants of a table.
    pub(crate) fn from_file(file: &KeyRing, shares: GatewayShares, metrics: Arc<EdgeMetrics>) -> Tenants {
        let by_id: BTreeMap<_, _> = file.tenants().map(|tenant| (tenant.id.clone(), tenant.index)).collect();
        let indexes = TenantIndexes { next: by_id.len(), by_id, applied: None };
        let limiters = TenantLimiters::new(file, shares, Instant::now());
        Tenants { file: RwLock::new(Arc::new(file.clone())), indexes: Mutex::new(indexes), limiters, metrics }
    }

    /// Returns the tenants of the file, which apply as long as there is no table.
    pub(super) fn file_key_ring(&self) -> Arc<KeyRing> {
        self.file.read().clone()
    }

    /// Applies the file after it was read again. Returns its tenants with their indexes; `None` if tenants were applied through
    /// the hub: then the file is ignored.
    pub(super) fn file_changed(&self, file: &KeyRing) -> Option<Arc<KeyRing>> {
        let indexes = &mut *self.indexes.lock();
        if indexes.applied.is_some() {
            return None;
        }
        let mut previous = std::mem::take(&mut indexes.by_id);
        let ring = file.reindexed(|id| indexes.index_of(&mut previous, id));
        self.limiters.update(&ring, TenantSource::File, Instant::now());
        self.metrics.tenants.adopt(&ring);
        let ring = Arc::new(ring);
        *self.file.write() = ring.clone();
        Some(ring)
    }

    /// Returns the tenants that were applied last, for a table without a tenants field.
    pub(super) fn applied_tenants(&self) -> Option<route::Tenants> {
        self.indexes.lock().applied.clone()
    }

    /// Applies the tenants of a table and returns the accepted keys.
    pub(crate) fn apply_table(&self, table: &RouteTable) -> Arc<KeyRing> {
        let Some(tenants) = &table.tenants else { return self.file_key_ring() };
        let indexes = &mut *self.indexes.lock();
        let mut previous = std::mem::take(&mut indexes.by_id);
        let mut ring = KeyRing::default();
        for rules in tenants.all.values() {
            let index = indexes.index_of(&mut previous, &rules.id);
            let added = ring.add_at_index(tenant(rules, index));
            let is_unique = added && rules.keys.iter().all(|key| ring.add_digest((*key).into(), &rules.id));
            assert!(is_unique, "a table with a duplicate tenant name or key is refused when it is read");
        }
        for (digest, ApiKey { tenant, expires_at }) in &tenants.keys {
            let added = ring.add_expiring_digest((*digest).into(), tenant, *expires_at);
            assert!(added, "a table with a key of two tenants or of none is refused when it is read");
        }
        indexes.applied = Some(tenants.clone());
        self.limiters.update(&ring, TenantSource::Table, Instant::now());
        self.metrics.tenants.adopt(&ring);
        Arc::new(ring)
    }
}

impl TenantIndexes {
    /// Returns the index of a tenant: its previous one, or the next one that was never used.
    fn index_of(&mut self, previous: &mut BTreeMap<TenantId, usize>, id: &TenantId) -> usize {
        let index = previous.remove(id).unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        self.by_id.insert(id.clone(), index);
        index
    }
}

/// Returns the tenant with these rules.
pub(crate) fn tenant(rules: &TenantRules, index: usize) -> Tenant {
    let TenantRules { id, keys: _, issuer, deployments, residency, priority, weight, limits } = rules;
    let TenantLimits { requests_per_second, inputs_per_second, tokens_per_minute } = *limits;
    Tenant {
        id: id.clone(),
        index,
        issuer: issuer.clone(),
        deployments: deployments.clone(),
        residency: residency.clone(),
        priorities: priority.map_or(Priorities::Both, Priorities::Only),
        weight: NonZeroU32::new(*weight).unwrap_or(NonZeroU32::MIN),
        limits: RateLimits { requests_per_second, inputs_per_second, tokens_per_minute },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::RequestOutcome;
    use gateway_core::keys::Credential;
    use gateway_core::tenant::Cost;
    use regions::catalogue::Catalogue;
    use regions::parse_tenants;

    fn table(text: &str) -> RouteTable {
        let all = parse_tenants(text, &Catalogue::builtin()).expect("valid tenants");
        RouteTable { tenants: Some(regions::Tenants { all, ..Default::default() }), ..RouteTable::empty() }
    }

    /// Entry of a tenant whose API key is its name.
    fn entry(name: &str, more: &str) -> String {
        use sha2::{Digest as _, Sha256};
        let digest: String = Sha256::digest(name).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[tenant]]\nname = \"{name}\"\nkey_sha256 = [\"{digest}\"]\n{more}\n")
    }

    fn index(ring: &KeyRing, key: &str) -> Option<usize> {
        let header = format!("Bearer {key}");
        let credential = Credential::read(Some(header.as_bytes())).expect("a credential");
        ring.tenant(&credential, || std::time::Duration::ZERO).ok().map(|tenant| tenant.index)
    }

    #[test]
    fn applied_tenants_replace_the_file_and_keep_their_indexes() {
        let limited = "limits = { requests_per_second = 1 }";
        let first = table(&(entry("a", limited) + &entry("b", "")));
        let mut file = KeyRing::default();
        let own = first.tenants.as_ref().and_then(|tenants| tenants.all.values().next()).expect("a tenant");
        assert!(file.add(tenant(own, 0)) && file.add_key("of-the-file", &own.id));
        let metrics = Arc::new(EdgeMetrics::new(&Catalogue::builtin(), &file));
        let tenants = Tenants::from_file(&file, GatewayShares::equal(1), metrics);
        let ring = tenants.apply_table(&RouteTable::empty());
        assert_eq!((index(&ring, "of-the-file"), index(&ring, "a")), (Some(0), None));

        let ring = tenants.apply_table(&first);
        assert_eq!(
            (index(&ring, "of-the-file"), index(&ring, "a"), index(&ring, "b")),
            (None, Some(0), Some(1))
        );
        let a = ring.tenants().next().expect("a").clone();
        assert!(tenants.limiters.charge_head(&a, 0).is_ok());
        assert!(tenants.limiters.charge_head(&a, 0).is_err(), "the limit is one request per second");
        let ring = tenants.apply_table(&table(&(entry("c", "") + &entry("a", limited))));
        assert_eq!((index(&ring, "a"), index(&ring, "b"), index(&ring, "c")), (Some(0), None, Some(2)));
        assert!(tenants.limiters.charge_head(&a, 0).is_err(), "a new table does not refill the limits");
        let ring = tenants.apply_table(&table(&entry("a", "")));
        let a = ring.tenants().next().expect("a").clone();
        assert!((0..3).all(|_| tenants.limiters.charge_head(&a, 0).is_ok()), "changed limits start full");
        assert_eq!(
            tenants.apply_table(&table("tenant = []")).tenants().len(),
            0,
            "an empty list accepts no tenant"
        );
    }

    #[test]
    fn state_of_removed_tenants_is_deleted_and_their_metrics_are_aggregated() {
        let file = KeyRing::default();
        let metrics = Arc::new(EdgeMetrics::new(&Catalogue::builtin(), &file));
        let tenants = Tenants::from_file(&file, GatewayShares::equal(1), metrics.clone());
        let limited = "limits = { requests_per_second = 1 }";
        let ring = tenants.apply_table(&table(&entry("a", limited)));
        let a = ring.tenants().next().expect("a").clone();
        let in_flight = tenants.limiters.charge_head(&a, 0);
        metrics.tenants.ended(&a.id, RequestOutcome::ClientDisconnected, 3, 0);
        for number in 0..100 {
            tenants.apply_table(&table(&entry(&format!("t{number}"), "")));
        }
        assert_eq!((tenants.indexes.lock().by_id.len(), tenants.limiters.count()), (1, 1));
        assert!(
            in_flight
                .is_ok_and(|charge| charge.charge_body(&a, Cost { inputs: 1, tokens: 1 }, false).is_ok()),
            "the request in flight continues"
        );
        assert!(
            tenants.limiters.charge_head(&a, 0).is_ok(),
            "and so does a request admitted under the previous table"
        );
        metrics.tenants.ended(&a.id, RequestOutcome::ClientDisconnected, 4, 0);
        let text = metrics::render("gateway", &*metrics, metrics::Format::Prometheus);
        let inputs = text.lines().filter(|line| line.starts_with("meridian_gateway_tenant_inputs_total"));
        let inputs: Vec<_> = inputs.collect();
        let name = "meridian_gateway_tenant_inputs_total";
        let expected = [format!("{name}{{tenant=\"t99\"}} 0"), format!("{name}{{tenant=\"(former)\"}} 7")];
        assert_eq!(inputs, expected);
        let ring = tenants.apply_table(&table(&entry("a", limited)));
        let re_added = ring.tenants().next().expect("a").clone();
        assert!(
            re_added.index > a.index && tenants.limiters.charge_head(&re_added, 0).is_ok(),
            "it is a new tenant"
        );
    }
}
