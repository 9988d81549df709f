//! Tests of the budget of the decisions of one table.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::fixtures::{some_deployment, some_registration};
use crate::some_instant;
use regions::deployment::MAX_DEPLOYMENTS;
use scheduler_api::registration::Registration;

const REGION: &str = "aws/us-east-1";

fn deployment(number: usize, placement: PlacementSpec) -> Deployment {
    Deployment { placement: Some(placement), ..some_deployment(&format!("m{number:05}")) }
}

/// Requirement at the limit of the product of both numbers.
fn largest() -> PlacementSpec {
    PlacementSpec { accelerators: Vec::new(), min_regions: 16, min_replicas: 256, max_cost: None }
}

/// Fleet of one region, in which all deployments run.
struct BudgetTest {
    catalogue: Catalogue,
    desired: Deployments,
    registration: Registration,
    last: RouteTable,
    placements: Placements,
}

impl BudgetTest {
    fn new(deployments: usize) -> BudgetTest {
        let all = (0..deployments).map(|number| deployment(number, largest()));
        let desired: Deployments = all.map(|it| (it.name.clone(), it)).collect();
        let mut last = RouteTable::empty();
        last.deployments = desired.clone();
        for known in last.deployments.values_mut() {
            (known.regions, known.placement) = (vec![REGION.parse().unwrap()], None);
        }
        BudgetTest {
            catalogue: Catalogue::builtin(),
            desired,
            registration: some_registration(REGION),
            last,
            placements: Placements::default(),
        }
    }

    /// Stages one table. All deployments stay in it, and the work stays within the budget.
    fn stage(&mut self) {
        let drains = BTreeSet::new();
        let region = &self.registration.region;
        let fleet = Fleet {
            catalogue: &self.catalogue,
            regions: [(region, Some(&self.registration))].into(),
            lapsed: BTreeMap::new(),
            drains: &drains,
            in_doubt: false,
        };
        let staged = self.placements.stage(&self.desired, &self.last, &fleet, some_instant());
        let expected = std::slice::from_ref(region);
        assert!(staged.values().all(|known| known.regions == expected && known.placement.is_none()));
        assert_eq!(staged.len(), self.desired.len());
        assert!(self.placements.work() <= WORK_MAX, "{}", self.placements.work());
    }

    fn decided(&self) -> DecidedPlacements {
        self.placements.decided(&self.desired, &self.catalogue)
    }
}

#[test]
fn ten_thousand_decisions_at_the_limit_take_several_tables_within_the_budget() {
    let mut test = BudgetTest::new(MAX_DEPLOYMENTS);
    let each = work(&largest(), 1);
    let tables = MAX_DEPLOYMENTS.div_ceil(usize::try_from(WORK_MAX / each).unwrap());
    for table in 1..=tables {
        test.stage();
        assert_eq!(test.placements.has_pending(), table < tables, "table {table} of {tables}");
    }
    assert!(tables > 5, "{tables}");
    assert_eq!(
        (test.decided().len(), test.placements.decisions()),
        (MAX_DEPLOYMENTS, MAX_DEPLOYMENTS as u64)
    );
    test.stage();
    assert_eq!(test.placements.work(), 0, "nothing has changed");
}

#[test]
fn every_decision_has_its_turn_while_facts_change_and_a_changed_deployment_comes_first() {
    let per_table = usize::try_from(WORK_MAX / work(&largest(), 1)).unwrap();
    let mut test = BudgetTest::new(3 * per_table);
    (0..3).for_each(|_| test.stage());
    assert!(!test.placements.has_pending());
    // The facts change with each table, and so does the input of all decisions.
    let change_facts = |test: &mut BudgetTest| test.registration.draining ^= true;
    for _ in 0..3 {
        change_facts(&mut test);
        test.stage();
    }
    let first = 3 * per_table as u64;
    assert!(test.placements.known.values().all(|known| known.number > first), "all are decided again");

    let changed = deployment(3 * per_table - 1, PlacementSpec { min_regions: 15, ..largest() });
    let name = changed.name.clone();
    test.desired.insert(name.clone(), changed);
    assert!(!test.decided().contains_key(&name), "the last decision is that on the earlier version");
    change_facts(&mut test);
    test.stage();
    assert!(test.decided().contains_key(&name) && test.placements.has_pending());
}

#[test]
fn a_pending_decision_keeps_no_region_that_residency_forbids() {
    let per_table = usize::try_from(WORK_MAX / work(&largest(), 1)).unwrap();
    let mut test = BudgetTest::new(per_table + 2);
    test.stage();
    assert!(test.placements.has_pending());
    let (catalogue, drains) = (test.catalogue.clone(), BTreeSet::new());
    let fleet = Fleet::new(&catalogue, [], [], [], &drains, false);
    for deployment in test.desired.values_mut() {
        deployment.residency = "eu".parse().unwrap();
    }
    let staged = test.placements.stage(&test.desired, &test.last, &fleet, some_instant());
    assert!(staged.is_empty(), "no region in the EU is registered");
}
