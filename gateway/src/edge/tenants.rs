//! Who may come in: the tenants of this gateway's own file, until an operator has applied some; from then on those of the
//! route table, which all gateways have.
//!
//! They come with the table ([`super::table`]), so they rise with its generation, are on disk before they are used, and a
//! table of which one tenant cannot be read is refused whole, the last good one staying. A table that says nothing of
//! tenants is of a hub that knows of none, an older one: those that were known last stay, on disk as well, because whoever
//! was let in by a file long ago may have been shut out since. A request takes its tenant and its routes from one view.
//! Issuers are of the file always: what they sign with is in files of this gateway.
//!
//! What is kept for each tenant (what it has left, what was counted) is kept by its place for as long as it is in the newest
//! table: whoever is changed does not begin anew. Whoever is gone is forgotten, and his place is nobody else's for as long
//! as this process lives; should he come back, he is a new one.

use super::allowances::Allowances;
use crate::metrics::EdgeMetrics;
use gateway_core::keys::KeyRing;
use gateway_core::priority::{Priorities, Priority};
use gateway_core::tenant::{RateLimits, Tenant};
use regions::id::TenantId;
use regions::route::{self, RouteTable};
use regions::tenant::{TenantLimits, TenantPriority, TenantRules};
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;
use supervision::{Mutex, RwLock};

/// Everybody who is known, and what is kept for them.
pub(crate) struct Tenants {
    /// Those of the file, as it was last read.
    file: RwLock<Arc<KeyRing>>,
    known: Mutex<Known>,
    pub(super) allowances: Allowances,
    metrics: Arc<EdgeMetrics>,
}

struct Known {
    places: BTreeMap<TenantId, usize>,
    /// The place of the next who comes.
    next: usize,
    /// Those that a table had last.
    applied: Option<route::Tenants>,
}

impl Tenants {
    /// Those of the file.
    pub(crate) fn of_file(file: &KeyRing, metrics: Arc<EdgeMetrics>) -> Tenants {
        let places: BTreeMap<_, _> = file.tenants().map(|tenant| (tenant.id.clone(), tenant.index)).collect();
        let known = Known { next: places.len(), places, applied: None };
        let allowances = Allowances::new(file, Instant::now());
        Tenants { file: RwLock::new(Arc::new(file.clone())), known: Mutex::new(known), allowances, metrics }
    }

    /// Those of the file; for as long as there is no table.
    pub(super) fn before_any_table(&self) -> Arc<KeyRing> {
        self.file.read().clone()
    }

    /// The file was read again, and says this now. Returns its tenants at their places; nothing, where tenants were applied:
    /// then the file does not count any longer.
    pub(super) fn file_changed(&self, file: &KeyRing) -> Option<Arc<KeyRing>> {
        let known = &mut *self.known.lock();
        if known.applied.is_some() {
            return None;
        }
        let mut before = std::mem::take(&mut known.places);
        let ring = file.reindexed(|id| known.place(&mut before, id));
        self.allowances.adopt(&ring, Instant::now());
        self.metrics.tenants.adopt(&ring);
        let ring = Arc::new(ring);
        *self.file.write() = ring.clone();
        Some(ring)
    }

    /// Those that were applied last, for a table that says nothing of them.
    pub(super) fn applied(&self) -> Option<route::Tenants> {
        self.known.lock().applied.clone()
    }

    /// Those who may come in under this table, and from now on.
    pub(crate) fn under(&self, table: &RouteTable) -> Arc<KeyRing> {
        let Some(tenants) = &table.tenants else { return self.before_any_table() };
        let known = &mut *self.known.lock();
        let mut before = std::mem::take(&mut known.places);
        let mut ring = KeyRing::default();
        for rules in tenants.all.values() {
            let place = known.place(&mut before, &rules.id);
            let added = ring.add_at_index(tenant(rules, place));
            let all = added && rules.keys.iter().all(|key| ring.add_digest((*key).into(), &rules.id));
            assert!(all, "a table in which a name or a key stands twice is refused when it is read");
        }
        known.applied = Some(tenants.clone());
        self.allowances.adopt(&ring, Instant::now());
        self.metrics.tenants.adopt(&ring);
        Arc::new(ring)
    }
}

impl Known {
    /// The place of this tenant: the one that it had, or the next that nobody had.
    fn place(&mut self, before: &mut BTreeMap<TenantId, usize>, id: &TenantId) -> usize {
        let place = before.remove(id).unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        self.places.insert(id.clone(), place);
        place
    }
}

fn tenant(rules: &TenantRules, place: usize) -> Tenant {
    let TenantRules { id, keys: _, issuer, deployments, residency, priority, weight, limits } = rules;
    let TenantLimits { requests_per_second, inputs_per_second, tokens_per_minute } = *limits;
    Tenant {
        id: id.clone(),
        index: place,
        issuer: issuer.clone(),
        deployments: deployments.clone(),
        residency: residency.clone(),
        priorities: match priority {
            None => Priorities::Both,
            Some(TenantPriority::Interactive) => Priorities::Only(Priority::Interactive),
            Some(TenantPriority::Bulk) => Priorities::Only(Priority::Bulk),
        },
        weight: NonZeroU32::new(*weight).unwrap_or(NonZeroU32::MIN),
        limits: RateLimits { requests_per_second, inputs_per_second, tokens_per_minute },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{MetricsText, RequestOutcome};
    use gateway_core::keys::Credential;
    use gateway_core::tenant::Cost;
    use regions::catalogue::Catalogue;
    use regions::parse_tenants;

    fn table(text: &str) -> RouteTable {
        let all = parse_tenants(text, &Catalogue::builtin()).expect("sound");
        RouteTable { tenants: Some(regions::Tenants { all, ..Default::default() }), ..RouteTable::empty() }
    }

    /// One whose key is its own name.
    fn one(name: &str, more: &str) -> String {
        use sha2::{Digest as _, Sha256};
        let digest: String = Sha256::digest(name).iter().map(|byte| format!("{byte:02x}")).collect();
        format!("[[tenant]]\nname = \"{name}\"\nkey_sha256 = [\"{digest}\"]\n{more}\n")
    }

    fn place(ring: &KeyRing, key: &str) -> Option<usize> {
        let header = format!("Bearer {key}");
        let credential = Credential::read(Some(header.as_bytes())).expect("a credential");
        ring.tenant(&credential).ok().map(|tenant| tenant.index)
    }

    #[test]
    fn what_was_applied_takes_the_place_of_the_file_and_every_name_keeps_its_own() {
        let limited = "limits = { requests_per_second = 1 }";
        let first = table(&(one("a", limited) + &one("b", "")));
        let mut file = KeyRing::default();
        let own = first.tenants.as_ref().and_then(|tenants| tenants.all.values().next()).expect("one");
        assert!(file.add(tenant(own, 0)) && file.add_key("of-the-file", &own.id));
        let metrics = Arc::new(EdgeMetrics::new(&Catalogue::builtin(), &file));
        let tenants = Tenants::of_file(&file, metrics);
        let ring = tenants.under(&RouteTable::empty());
        assert_eq!((place(&ring, "of-the-file"), place(&ring, "a")), (Some(0), None));

        let ring = tenants.under(&first);
        assert_eq!(
            (place(&ring, "of-the-file"), place(&ring, "a"), place(&ring, "b")),
            (None, Some(0), Some(1))
        );
        let a = ring.tenants().next().expect("a").clone();
        assert!(tenants.allowances.enter(&a, 0).is_ok());
        assert!(tenants.allowances.enter(&a, 0).is_err(), "it has one a second");
        let ring = tenants.under(&table(&(one("c", "") + &one("a", limited))));
        assert_eq!((place(&ring, "a"), place(&ring, "b"), place(&ring, "c")), (Some(0), None, Some(2)));
        assert!(tenants.allowances.enter(&a, 0).is_err(), "another table gives nobody anything back");
        let ring = tenants.under(&table(&one("a", "")));
        let a = ring.tenants().next().expect("a").clone();
        assert!((0..3).all(|_| tenants.allowances.enter(&a, 0).is_ok()), "other limits are");
        assert_eq!(tenants.under(&table("tenant = []")).tenants().len(), 0, "and nobody is nobody");
    }

    #[test]
    fn whoever_is_in_no_table_any_longer_is_forgotten_and_counted_with_his_like() {
        let file = KeyRing::default();
        let metrics = Arc::new(EdgeMetrics::new(&Catalogue::builtin(), &file));
        let tenants = Tenants::of_file(&file, metrics.clone());
        let limited = "limits = { requests_per_second = 1 }";
        let ring = tenants.under(&table(&one("a", limited)));
        let a = ring.tenants().next().expect("a").clone();
        let under_way = tenants.allowances.enter(&a, 0);
        metrics.tenants.ended(&a.id, RequestOutcome::ClientDisconnected, 3, 0);
        for number in 0..100 {
            tenants.under(&table(&one(&format!("t{number}"), "")));
        }
        assert_eq!((tenants.known.lock().places.len(), tenants.allowances.kept()), (1, 1));
        assert!(
            under_way.is_ok_and(|entered| entered.charge(&a, Cost { inputs: 1, tokens: 1 }, false).is_ok()),
            "it goes on"
        );
        assert!(tenants.allowances.enter(&a, 0).is_ok(), "as does who came under the table before");
        metrics.tenants.ended(&a.id, RequestOutcome::ClientDisconnected, 4, 0);
        let mut text = MetricsText::default();
        metrics.render(&mut text, &Catalogue::builtin());
        let text = text.finish();
        let inputs = text.lines().filter(|line| line.starts_with("meridian_gateway_tenant_inputs_total"));
        let inputs: Vec<_> = inputs.collect();
        let name = "meridian_gateway_tenant_inputs_total";
        let expected = [format!("{name}{{tenant=\"t99\"}} 0"), format!("{name}{{tenant=\"(former)\"}} 7")];
        assert_eq!(inputs, expected);
        let ring = tenants.under(&table(&one("a", limited)));
        let back = ring.tenants().next().expect("a").clone();
        assert!(back.index > a.index && tenants.allowances.enter(&back, 0).is_ok(), "he begins anew");
    }
}
