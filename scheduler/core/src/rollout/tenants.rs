//! Tenants on their way from what an operator wants to what is published.
//!
//! Everything about a tenant is in force with the next table (a key that is gone, a deployment that it may no longer use, a
//! residency that is narrower) but for one thing: a residency that is wider waits, as that of a deployment does, until every
//! reader runs a table that announces it. Until then a tenant's requests go where both its old and its new residency permit.
//!
//! A tenant that was taken away and comes back is a new one. No region refuses what a tenant may not (regions go by the residency policy
//! that travels with a request), so whoever has not heard of it does less than it may, and nobody more.

use std::borrow::Cow;
use std::collections::BTreeMap;

use regions::tenant::MAX_RESIDENCY_LEN;
use regions::{Generation, RouteTable, TenantId, TenantRules};

use super::{Rollout, StagedTenants};

impl Rollout {
    /// What the table of generation `next`, which follows `last`, says of the tenants that an operator wants. In `doubt` of
    /// who lives nothing is widened.
    pub fn stage_tenants<'a>(
        &self,
        wanted: &'a BTreeMap<TenantId, TenantRules>,
        last: &RouteTable,
        next: Generation,
        doubt: bool,
    ) -> StagedTenants<'a> {
        let mut staged = StagedTenants { all: Cow::Borrowed(wanted), widening: BTreeMap::new() };
        let Some(last) = &last.tenants else { return staged };
        for (id, tenant) in wanted {
            let Some(known) = last.all.get(id) else { continue };
            let announced = last.widening.get(id);
            let meanwhile = self.meanwhile(
                &known.residency,
                &tenant.residency,
                announced,
                MAX_RESIDENCY_LEN,
                (next, doubt),
            );
            if let Some((residency, widening)) = meanwhile {
                staged.widening.insert(id.clone(), widening);
                staged.all.to_mut().insert(id.clone(), TenantRules { residency, ..tenant.clone() });
            }
        }
        staged
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Reader, Role};
    use super::*;
    use crate::some_instant;
    use regions::{Catalogue, Tenants, parse_tenants};
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

    /// A table that follows one another, and what its tenants' residency and announcement are.
    fn next(rollout: &Rollout, wanted: &BTreeMap<TenantId, TenantRules>, last: &RouteTable) -> RouteTable {
        let generation = generation(last.generation.number + 1);
        let StagedTenants { all, widening } = rollout.stage_tenants(wanted, last, generation, false);
        let tenants = Some(Tenants { all: all.into_owned(), widening });
        RouteTable { generation, tenants, ..RouteTable::empty() }
    }

    fn said(table: &RouteTable) -> (String, Option<String>) {
        let Tenants { all, widening } = table.tenants.as_ref().unwrap();
        let residency = all.values().next().unwrap().residency.to_string();
        (residency, widening.values().next().map(|widening| widening.to.to_string()))
    }

    #[test]
    fn a_tenant_is_narrower_at_once_and_wider_when_everybody_has_heard_of_it() {
        let mut rollout = Rollout::new(Arc::new(Catalogue::builtin()), Duration::ZERO, some_instant());
        let reader = Reader { role: Role::Gateway, place: "aws/us-east-1".parse().unwrap(), boot_id: 1 };
        let check = |table: &RouteTable, residency: &str, announced: Option<&str>| {
            assert_eq!(said(table), (residency.to_owned(), announced.map(str::to_owned)));
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
        // What is both goes on with what both permit.
        let both = next(&rollout, &tenants("de,us"), &wider);
        assert_eq!(said(&both).1.as_deref(), Some("de,us"));
        assert!(said(&both).0.contains("eu") && said(&both).0.contains("de"), "{:?}", said(&both));
        assert_eq!(
            next(&rollout, &BTreeMap::new(), &wider).tenants,
            Some(Tenants::default()),
            "who is gone is gone"
        );
    }
}
