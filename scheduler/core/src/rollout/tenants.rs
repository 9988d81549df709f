//! Rollout of desired tenants.
//!
//! All changes of a tenant (a revoked key, a deployment that it may no longer use, a narrower residency) are in force
//! with the next table, with one exception: a wider residency waits, like that of a deployment, until every reader runs
//! a table that announces it. Until then the tenant's requests go to the intersection of the old and the new residency.
//!
//! A tenant that was removed and is added again counts as new. No region rejects requests by tenant (regions apply the
//! residency policy that comes with a request), so a reader without the new table does less than it may, and no reader
//! does more.

use std::borrow::Cow;
use std::collections::BTreeMap;

use regions::tenant::{ApiKey, KeyDigest, MAX_RESIDENCY_LEN};
use regions::{Generation, RouteTable, TenantId, TenantRules};

use super::{Rollout, StagedTenants};

impl Rollout {
    /// Returns the tenants, with their created `keys`, of the table of generation `next`, which follows `last`. While the set of readers is
    /// `in_doubt`, nothing is widened.
    pub fn stage_tenants<'a>(
        &self,
        desired: &'a BTreeMap<TenantId, TenantRules>,
        keys: &BTreeMap<KeyDigest, ApiKey>,
        last: &RouteTable,
        next: Generation,
        in_doubt: bool,
    ) -> StagedTenants<'a> {
        let (all, widening) = (Cow::Borrowed(desired), BTreeMap::new());
        let mut staged = StagedTenants { all, widening, keys: published_keys(desired, keys) };
        let Some(last) = &last.tenants else { return staged };
        for (id, tenant) in desired {
            let Some(known) = last.all.get(id) else { continue };
            let announced = last.widening.get(id);
            let interim = self.interim_residency(
                &known.residency,
                &tenant.residency,
                announced,
                MAX_RESIDENCY_LEN,
                (next, in_doubt),
            );
            if let Some((residency, widening)) = interim {
                staged.widening.insert(id.clone(), widening);
                staged.all.to_mut().insert(id.clone(), TenantRules { residency, ..tenant.clone() });
            }
        }
        staged
    }
}

/// Returns the created keys of these tenants. A key that the rules of a tenant have too is left out.
fn published_keys(
    tenants: &BTreeMap<TenantId, TenantRules>,
    keys: &BTreeMap<KeyDigest, ApiKey>,
) -> BTreeMap<KeyDigest, ApiKey> {
    let is_used = |digest: &KeyDigest| tenants.values().any(|rules| rules.keys.contains(digest));
    let published = keys.iter().filter(|(digest, key)| tenants.contains_key(&key.tenant) && !is_used(digest));
    published.map(|(digest, key)| (*digest, key.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::some_instant;
    use regions::{Catalogue, Tenants, parse_tenants};
    use scheduler_api::reader::{Reader, Role};
    use std::sync::Arc;
    use std::time::Duration;

    fn tenants(residency: &str) -> BTreeMap<TenantId, TenantRules> {
        let allow = match residency {
            "anywhere" => String::new(),
            areas => format!("residency = {{ allow = [\"{}\"] }}\n", areas.replace(',', "\", \"")),
        };
        let text = format!("[[tenant]]\nname = \"acme\"\nissuer = \"i\"\n{allow}");
        parse_tenants(&text, &Catalogue::builtin()).unwrap()
    }

    fn generation(number: u64) -> Generation {
        Generation { epoch: 1, number }
    }

    /// Returns the table that follows `last`.
    fn next(rollout: &Rollout, desired: &BTreeMap<TenantId, TenantRules>, last: &RouteTable) -> RouteTable {
        let generation = generation(last.generation.number + 1);
        let StagedTenants { all, widening, keys } =
            rollout.stage_tenants(desired, &BTreeMap::new(), last, generation, false);
        let tenants = Some(Tenants { all: all.into_owned(), widening, keys });
        RouteTable { generation, tenants, ..RouteTable::empty() }
    }

    fn residency_and_announcement(table: &RouteTable) -> (String, Option<String>) {
        let Tenants { all, widening, keys: _ } = table.tenants.as_ref().unwrap();
        let residency = all.values().next().unwrap().residency.to_string();
        (residency, widening.values().next().map(|widening| widening.to.to_string()))
    }

    #[test]
    fn a_tenant_is_narrowed_at_once_and_widened_after_all_readers_acknowledged() {
        let mut rollout = Rollout::new(Arc::new(Catalogue::builtin()), Duration::ZERO, some_instant());
        let reader = Reader { role: Role::Gateway, region: "aws/us-east-1".parse().unwrap(), boot_id: 1 };
        let check = |table: &RouteTable, residency: &str, announced: Option<&str>| {
            assert_eq!(
                residency_and_announcement(table),
                (residency.to_owned(), announced.map(str::to_owned))
            );
        };
        let first = next(&rollout, &tenants("eu"), &RouteTable::empty());
        check(&first, "eu", None);
        rollout.acknowledged(reader.clone(), generation(1));
        let narrower = next(&rollout, &tenants("de"), &first);
        check(&narrower, "de", None);
        let announced = next(&rollout, &tenants("eu"), &narrower);
        check(&announced, "de", Some("eu"));
        let still = next(&rollout, &tenants("eu"), &announced);
        check(&still, "de", Some("eu"));
        rollout.acknowledged(reader.clone(), announced.generation);
        let wider = next(&rollout, &tenants("eu"), &still);
        check(&wider, "eu", None);
        // A change that narrows and widens uses the intersection.
        let both = next(&rollout, &tenants("de,us"), &wider);
        assert_eq!(residency_and_announcement(&both).1.as_deref(), Some("de,us"));
        assert!(
            residency_and_announcement(&both).0.contains("eu")
                && residency_and_announcement(&both).0.contains("de"),
            "{:?}",
            residency_and_announcement(&both)
        );
        assert_eq!(
            next(&rollout, &BTreeMap::new(), &wider).tenants,
            Some(Tenants::default()),
            "a removed tenant is removed at once"
        );
    }
}
