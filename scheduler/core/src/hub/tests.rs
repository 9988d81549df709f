//! Tests of the hub, as sequences of events.

use super::*;
use crate::fixtures::{some_deployment, some_registration};
use crate::registry::LAPSED_KEEP;
use crate::rollout::SETTLE_TIME;
use crate::some_instant;
use regions::{Catalogue, EngineKind, PlacementSpec, Scaling};
use scheduler_api::reader::Role;
use scheduler_api::registration::Registration;
use std::collections::BTreeSet;
use std::sync::Arc;

const EUROPE: &str = "gcp/europe-west4";
const AMERICA: &str = "aws/us-east-1";

fn spoke(region: &str, created: u64) -> RegisteredSpoke {
    let registration = Registration {
        boot_id: created,
        deployments: BTreeSet::from(["minilm".parse().unwrap()]),
        scales: false,
        ..some_registration(region)
    };
    RegisteredSpoke { registration, created }
}

fn desired(deployments: impl IntoIterator<Item = Deployment>) -> DesiredDeployments {
    let named = deployments.into_iter().map(|deployment| (deployment.name.clone(), deployment));
    DesiredDeployments { applied: true, deployments: named.collect(), promotions: Promotions::default() }
}

/// Hub whose store accepts every table, with a clock that the test controls.
struct HubTest {
    hub: HubState,
    now: Instant,
    published: Vec<RouteTable>,
    /// Decisions on placements in the store.
    decided: DecidedPlacements,
}

impl HubTest {
    fn start(table: Option<RouteTable>, epoch: u64, spokes: Vec<RegisteredSpoke>) -> HubTest {
        let deployments = Some(desired([some_deployment("minilm")]));
        let all = StoreState { spokes, deployments, ..StoreState::default() };
        HubTest::from_state(HubInitialState { epoch, table, plan: Vec::new(), all })
    }

    fn from_state(initial: HubInitialState) -> HubTest {
        let (now, catalogue) = (some_instant(), Arc::new(Catalogue::builtin()));
        let rollout = Rollout::new(catalogue.clone(), SETTLE_TIME, now);
        let hub = HubState::new(initial, catalogue, LAPSED_KEEP, rollout, now);
        HubTest { hub, now, published: Vec::new(), decided: DecidedPlacements::new() }
    }

    fn handle(&mut self, event: Event) {
        self.hub.handle(event, self.now);
    }

    /// Executes the hub's commands until there are none.
    fn settle(&mut self) {
        while let Some(command) = self.hub.poll() {
            match command {
                HubCommand::Persist(table) => self.handle(Event::Persisted(table)),
                HubCommand::Publish(table) => self.published.push(table),
                HubCommand::PersistPlacements(decided) => {
                    self.decided = decided;
                    self.handle(Event::PlacementsPersisted);
                }
                HubCommand::Plan(..)
                | HubCommand::PersistPlan(_)
                | HubCommand::PublishPlan(_)
                | HubCommand::PersistShares(_) => {
                    panic!("there is no demand: {command:?}")
                }
            }
        }
    }

    /// Advances the clock to the hub's next wakeup.
    fn sleep(&mut self) {
        self.now = self.hub.next_wakeup().expect("a wakeup is scheduled");
        self.hub.handle_timeout(self.now);
    }

    fn generations(&self) -> Vec<String> {
        self.published.iter().map(|table| table.generation.to_string()).collect()
    }

    fn routed(&self) -> Vec<&str> {
        self.published.last().expect("a table was published").regions.keys().map(RegionId::as_str).collect()
    }
}

#[test]
fn a_region_is_published_when_it_registers_and_for_a_while_after_its_lease_ended() {
    let mut test = HubTest::start(None, 1, Vec::new());
    test.settle();
    assert_eq!(test.generations(), ["1.1"], "the deployments are new");
    test.handle(Event::SpokeRegistered(spoke(EUROPE, 5)));
    test.settle();
    assert_eq!((test.generations(), test.routed()), (vec!["1.1".into(), "1.2".into()], vec![EUROPE]));

    test.handle(Event::SpokeRemoved { region: EUROPE.parse().unwrap(), boot_id: 5 });
    test.settle();
    assert_eq!(test.generations().len(), 2, "no change for a gateway");
    let removed_at = test.now;
    test.sleep();
    test.settle();
    assert_eq!(test.now - removed_at, LAPSED_KEEP);
    assert_eq!((test.generations().len(), test.routed()), (3, vec![]));
    assert_eq!(test.hub.next_wakeup(), None);
}

#[test]
fn a_restarted_hub_publishes_the_last_table_at_once() {
    let mut before = HubTest::start(None, 4, vec![spoke(EUROPE, 1), spoke(AMERICA, 2)]);
    before.settle();
    let last = before.published.pop();

    let mut after = HubTest::start(last.clone(), 4, Vec::new());
    assert_eq!(after.hub.poll(), last.map(HubCommand::Publish));
    assert_eq!(after.hub.poll(), None, "no spoke has registered yet, and no region is removed");
    after.handle(Event::SpokeRegistered(spoke(AMERICA, 9)));
    after.sleep();
    after.settle();
    assert_eq!((after.generations(), after.routed()), (vec!["4.2".into()], vec![AMERICA]));
}

#[test]
fn a_store_with_a_new_epoch_has_its_table_published_again() {
    let mut before = HubTest::start(None, 4, vec![spoke(EUROPE, 1)]);
    before.settle();
    let mut after = HubTest::start(before.published.pop(), 5, vec![spoke(EUROPE, 1)]);
    after.settle();
    assert_eq!(after.generations(), ["4.1", "5.2"]);
}

#[test]
fn a_table_is_published_after_it_is_persisted_and_changes_are_collected() {
    let mut test = HubTest::start(None, 1, Vec::new());
    let Some(HubCommand::Persist(first)) = test.hub.poll() else { panic!("the first table") };
    test.handle(Event::SpokeRegistered(spoke(EUROPE, 1)));
    test.handle(Event::SpokeRegistered(spoke(AMERICA, 2)));
    test.handle(Event::DeploymentsChanged(desired([
        some_deployment("minilm"),
        some_deployment("minilm-eu"),
    ])));
    assert_eq!(test.hub.poll(), None, "one table at a time");
    test.handle(Event::Persisted(first.clone()));
    assert_eq!(test.hub.poll(), Some(HubCommand::Publish(first)));
    test.settle();
    assert_eq!((test.generations(), test.routed()), (vec!["1.2".into()], vec![AMERICA, EUROPE]));
    assert_eq!(test.published[0].deployments.len(), 2);
}

#[test]
fn a_failed_persist_is_retried_with_the_newest_table() {
    let mut test = HubTest::start(None, 1, Vec::new());
    assert!(matches!(test.hub.poll(), Some(HubCommand::Persist(_))));
    test.handle(Event::PersistFailed);
    test.handle(Event::SpokeRegistered(spoke(EUROPE, 1)));
    assert_eq!(test.hub.poll(), None);
    let failed = test.now;
    test.sleep();
    assert_eq!(test.now - failed, PERSIST_RETRY);
    test.settle();
    let first = Generation { epoch: 1, number: 1 };
    assert_eq!((test.published[0].generation, test.routed()), (first, vec![EUROPE]));
}

#[test]
fn a_table_that_was_persisted_after_all_is_published_and_then_superseded() {
    let mut test = HubTest::start(None, 1, Vec::new());
    let Some(HubCommand::Persist(first)) = test.hub.poll() else { panic!("the first table") };
    test.handle(Event::PersistFailed);
    test.handle(Event::SpokeRegistered(spoke(EUROPE, 1)));
    test.sleep();
    assert!(matches!(test.hub.poll(), Some(HubCommand::Persist(_))), "another table of the same generation");
    test.handle(Event::Persisted(first));
    test.settle();
    assert_eq!((test.generations(), test.routed()), (vec!["1.1".into(), "1.2".into()], vec![EUROPE]));
}

#[test]
#[should_panic(expected = "NotMonotone")]
fn a_store_that_holds_an_older_table_breaks_monotone_plans() {
    let mut test = HubTest::start(None, 1, vec![spoke(EUROPE, 1)]);
    test.settle();
    test.handle(Event::Persisted(RouteTable::empty()));
}

#[test]
fn a_list_replaces_the_events_that_were_missed() {
    let mut test = HubTest::start(None, 1, vec![spoke(EUROPE, 1)]);
    test.settle();
    let listed = |deployments| {
        let spokes = vec![spoke(AMERICA, 2)];
        Event::Listed(StoreState { spokes, deployments, ..StoreState::default() })
    };
    test.handle(listed(Some(desired([some_deployment("minilm-eu")]))));
    test.settle();
    assert_eq!(test.routed(), [AMERICA, EUROPE], "Europe has lapsed and keeps its route");
    test.handle(listed(None));
    test.settle();
    assert_eq!(test.published.last().unwrap().deployments.len(), 1, "an unreadable record changes nothing");
    test.handle(Event::DeploymentsChanged(DesiredDeployments::default()));
    test.settle();
    assert!(test.published.last().unwrap().deployments.is_empty());
}

#[test]
fn a_hub_that_cannot_read_the_desired_deployments_keeps_the_published_ones() {
    let mut before = HubTest::start(None, 4, vec![spoke(EUROPE, 1)]);
    before.settle();
    let table = before.published.pop();
    let all = StoreState { spokes: vec![spoke(EUROPE, 1)], ..StoreState::default() };
    let mut after =
        HubTest::from_state(HubInitialState { epoch: 5, table: table.clone(), plan: Vec::new(), all });
    after.settle();
    assert_eq!(after.generations(), ["4.1", "5.2"]);
    assert_eq!(after.published.last().unwrap().deployments, table.unwrap().deployments);
}

#[test]
fn an_announced_widening_is_completed_by_the_next_hub() {
    let policy =
        |policy: &str| Deployment { residency: policy.parse().unwrap(), ..some_deployment("minilm") };
    let gateway = Reader { role: Role::Gateway, region: AMERICA.parse().unwrap(), boot_id: 1 };
    let residency = |test: &HubTest| {
        let table = test.published.last().unwrap();
        let to = table.widening.values().map(|widening| widening.to.to_string()).next();
        (table.generation.to_string(), table.deployments["minilm"].residency.to_string(), to)
    };
    let mut first = HubTest::start(None, 1, Vec::new());
    first.handle(Event::DeploymentsChanged(desired([policy("eu")])));
    first.settle();
    first.handle(Event::Acknowledged(gateway.clone(), "1.1".parse().unwrap()));
    first.handle(Event::DeploymentsChanged(desired([policy("eu,us")])));
    first.settle();
    assert_eq!(residency(&first), ("1.2".into(), "eu".into(), Some("eu,us".into())));
    first.handle(Event::Acknowledged(gateway.clone(), "1.2".parse().unwrap()));
    first.settle();
    assert_eq!(first.published.len(), 2, "not during the settle time");

    let all = StoreState {
        deployments: Some(desired([policy("eu,us")])),
        readers: BTreeMap::from([(gateway.clone(), "1.1".parse().unwrap())]),
        ..StoreState::default()
    };
    let table = first.published.pop();
    let mut second = HubTest::from_state(HubInitialState { epoch: 1, table, plan: Vec::new(), all });
    let begun = second.now;
    second.settle();
    second.sleep();
    second.settle();
    assert_eq!((second.now - begun, residency(&second).2), (SETTLE_TIME, Some("eu,us".into())));
    second.handle(Event::Acknowledged(gateway, "1.2".parse().unwrap()));
    second.settle();
    assert_eq!(residency(&second), ("1.3".into(), "eu,us".into(), None));
}

#[test]
fn the_epoch_of_a_restored_store_is_the_time_and_later_than_the_present_one() {
    for (present, now, expected) in
        [(0, 100, 100), (7, 100, 100), (99, 100, 100), (100, 100, 101), (500, 100, 501)]
    {
        assert_eq!(restored_epoch(present, now), expected, "{present} {now}");
    }
    assert_eq!(restored_epoch(0, 0), 1);
    assert_eq!(restored_epoch(u64::MAX, 100), u64::MAX, "a damaged backup does not end the process");
}

#[test]
fn a_store_that_was_set_back_begins_a_new_epoch() {
    let check = |known: Option<&str>, epoch: u64, table: Option<&str>, begins: Option<u64>| {
        let generation = |text: Option<&str>| text.map(|text| text.parse().unwrap());
        assert_eq!(
            required_epoch(generation(known), epoch, generation(table)),
            begins,
            "{known:?} {table:?}"
        );
    };
    check(None, 4, Some("4.7"), None);
    check(Some("4.7"), 4, Some("4.7"), None);
    check(Some("4.7"), 4, Some("4.8"), None);
    check(Some("4.7"), 4, Some("4.6"), Some(5));
    check(Some("4.7"), 4, None, Some(5));
    check(Some("4.7"), 3, Some("3.9"), Some(5));
    check(Some("4.7"), 5, Some("4.6"), None);
    check(Some("4.7"), 5, None, None);
}

#[test]
fn a_lapsed_region_keeps_its_placement_with_the_accelerators_that_it_registered() {
    let accelerators = vec!["h100".parse().unwrap()];
    let placement = PlacementSpec { accelerators, min_regions: 1, min_replicas: 0, max_cost: None };
    let deployments = Some(desired([Deployment { placement: Some(placement), ..some_deployment("minilm") }]));
    let offering = |price| regions::Offering { count: Some(8), price: Some(price) };
    let with_price = |region: &str, created, price| {
        let mut spoke = spoke(region, created);
        spoke.registration.accelerators.insert("h100".parse().unwrap(), offering(price));
        spoke
    };
    // The prices of the catalogue are higher for both regions.
    let spokes = vec![with_price(EUROPE, 5, 1), with_price(AMERICA, 6, 2)];
    let all = StoreState { deployments, spokes, ..StoreState::default() };
    let mut test = HubTest::from_state(HubInitialState { epoch: 1, table: None, plan: Vec::new(), all });
    let regions = |test: &HubTest| {
        let published = test.published.last().expect("a table was published");
        published.deployments.get("minilm").map(|known| known.regions.clone())
    };
    test.settle();
    assert_eq!(regions(&test), Some(vec![EUROPE.parse().unwrap()]));
    test.handle(Event::SpokeRemoved { region: EUROPE.parse().unwrap(), boot_id: 5 });
    test.settle();
    assert_eq!(regions(&test), Some(vec![EUROPE.parse().unwrap()]), "its spoke may come back");
    let removed_at = test.now;
    test.sleep();
    test.settle();
    assert_eq!(test.now - removed_at, LAPSED_KEEP);
    assert_eq!(regions(&test), Some(vec![AMERICA.parse().unwrap()]));
}

#[test]
fn decisions_on_placements_beyond_the_budget_follow_in_the_next_polls() {
    let catalogue = Catalogue::builtin();
    let with_cpu = catalogue.iter().filter(|(_, region)| region.engines.contains(&EngineKind::Cpu));
    let spokes = with_cpu.take(16).zip(1..).map(|((_, region), created)| {
        let mut spoke = spoke(region.id.as_str(), created);
        spoke.registration.scales = true;
        spoke
    });
    let spokes: Vec<_> = spokes.collect();
    assert_eq!(spokes.len(), 16);
    let placement =
        PlacementSpec { accelerators: Vec::new(), min_regions: 16, min_replicas: 256, max_cost: None };
    let scaling = Scaling { max: 64, ..Scaling::default() };
    let placed = (0..100).map(|number| Deployment {
        placement: Some(placement.clone()),
        scaling: scaling.clone(),
        ..some_deployment(&format!("m{number}"))
    });
    let all = StoreState { deployments: Some(desired(placed)), spokes, ..StoreState::default() };
    let mut test = HubTest::from_state(HubInitialState { epoch: 1, table: None, plan: Vec::new(), all });
    let Some(HubCommand::Persist(first)) = test.hub.poll() else { panic!("the first table") };
    assert!((1..100).contains(&first.deployments.len()), "{}", first.deployments.len());
    test.handle(Event::Persisted(first));
    let mut polls = 0;
    loop {
        test.settle();
        if !test.hub.has_pending_placements() {
            break;
        }
        assert_eq!(test.hub.next_wakeup(), Some(test.now), "the next poll is due at once");
        test.sleep();
        polls += 1;
        assert!(polls < 100, "the hub does not come to an end");
    }
    let last = test.published.last().expect("a table was published");
    assert_eq!((last.deployments.len(), test.decided.len()), (100, 100));
    assert!(last.deployments.values().all(|known| known.regions.len() == 16));
    test.handle(Event::DeploymentsChanged(desired(test.hub.deployments.clone().into_values())));
    test.decided.clear();
    test.settle();
    assert_eq!(test.decided.len(), 100, "recorded for the new revision of the deployments");
}

#[test]
fn the_chosen_regions_of_a_placement_are_published_and_a_lost_one_is_replaced() {
    let placement =
        PlacementSpec { accelerators: Vec::new(), min_regions: 1, min_replicas: 0, max_cost: None };
    let deployments = Some(desired([Deployment { placement: Some(placement), ..some_deployment("minilm") }]));
    let all = StoreState { deployments, ..StoreState::default() };
    let mut test = HubTest::from_state(HubInitialState { epoch: 1, table: None, plan: Vec::new(), all });
    let regions = |test: &HubTest| {
        let published = test.published.last().expect("a table was published");
        published.deployments.get("minilm").map(|known| known.regions.clone())
    };
    test.settle();
    assert_eq!(regions(&test), None, "no region has a spoke");
    assert_eq!(test.hub.infeasible_placements().len(), 1);
    test.handle(Event::SpokeRegistered(spoke(EUROPE, 5)));
    test.settle();
    assert_eq!(regions(&test), Some(vec![EUROPE.parse().unwrap()]));
    assert!(test.hub.infeasible_placements().is_empty());
    let decided = |test: &HubTest| test.decided.values().next().map(|decision| decision.regions.clone());
    assert_eq!(decided(&test), Some(vec![EUROPE.parse().unwrap()]));
    test.handle(Event::SpokeRegistered(spoke(AMERICA, 6)));
    test.settle();
    assert_eq!(regions(&test), Some(vec![EUROPE.parse().unwrap()]), "equally expensive");

    test.handle(Event::SpokeRemoved { region: EUROPE.parse().unwrap(), boot_id: 5 });
    test.settle();
    assert_eq!(regions(&test), Some(vec![EUROPE.parse().unwrap()]), "its spoke may come back");
    test.sleep();
    test.settle();
    assert_eq!(regions(&test), Some(vec![AMERICA.parse().unwrap()]));
    let table = test.published.last().unwrap();
    assert!(table.deployments.values().all(|known| known.placement.is_none()), "readers get a list");
    assert_eq!(decided(&test), Some(vec![AMERICA.parse().unwrap()]));
    let placed: Vec<_> = test.hub.placed_regions(table).into_values().collect();
    assert_eq!(placed, [[AMERICA.parse().unwrap()]]);
    assert_eq!(test.routed(), [AMERICA]);
}
