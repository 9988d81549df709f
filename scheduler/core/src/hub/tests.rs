//! A hub's life, told as what happens to it.

use super::*;
use crate::plan::capacity::RegionCapacity;
use crate::registry::{LAPSED_KEEP, Registration};
use crate::rollout::{Role, SETTLE};
use crate::some_instant;
use regions::{Catalogue, EngineKind, EngineSpec, Precision, ResidencyPolicy, Scaling, Task};
use std::collections::BTreeSet;
use std::sync::Arc;

const EUROPE: &str = "gcp/europe-west4";
const AMERICA: &str = "aws/us-east-1";

fn standing(region: &str, created: u64) -> RegisteredSpoke {
    let registration = Registration {
        region: region.parse().unwrap(),
        endpoint: ([10, 0, 0, 1], 7100).into(),
        boot_id: created,
        deployments: BTreeSet::from(["minilm".parse().unwrap()]),
        capacity: RegionCapacity::default(),
        models: BTreeMap::new(),
    };
    RegisteredSpoke { registration, created }
}

fn deployment(name: &str) -> Deployment {
    Deployment {
        name: name.parse().unwrap(),
        task: Task::Embed,
        model: "pypi://m".to_owned(),
        engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
        residency: ResidencyPolicy::Anywhere,
        regions: Vec::new(),
        scaling: Scaling::default(),
    }
}

fn wanted(deployments: impl IntoIterator<Item = Deployment>) -> DesiredDeployments {
    let named = deployments.into_iter().map(|deployment| (deployment.name.clone(), deployment));
    DesiredDeployments { applied: true, deployments: named.collect(), orders: Orders::default() }
}

/// A hub whose store takes every table, in a time that passes when the test says so.
struct World {
    hub: HubState,
    now: Instant,
    published: Vec<RouteTable>,
}

impl World {
    fn start(table: Option<RouteTable>, epoch: u64, spokes: Vec<RegisteredSpoke>) -> World {
        let deployments = Some(wanted([deployment("minilm")]));
        let all = StoreState { spokes, deployments, ..StoreState::default() };
        World::found(HubInitialState { epoch, table, plan: Vec::new(), all })
    }

    fn found(found: HubInitialState) -> World {
        let (now, catalogue) = (some_instant(), Arc::new(Catalogue::builtin()));
        let rollout = Rollout::new(catalogue.clone(), SETTLE, now);
        let hub = HubState::new(found, catalogue, LAPSED_KEEP, rollout, now);
        World { hub, now, published: Vec::new() }
    }

    fn tell(&mut self, event: Event) {
        self.hub.handle(event, self.now);
    }

    /// Does what the hub wants until it wants nothing.
    fn settle(&mut self) {
        while let Some(command) = self.hub.poll() {
            match command {
                HubCommand::Persist(table) => self.tell(Event::Persisted(table)),
                HubCommand::Publish(table) => self.published.push(table),
                HubCommand::Plan(..) | HubCommand::PersistPlan(_) | HubCommand::PublishPlan(_) => {
                    panic!("nobody asks for anything: {command:?}")
                }
            }
        }
    }

    /// Sleeps until the hub wants to be woken.
    fn sleep(&mut self) {
        self.now = self.hub.next_wakeup().expect("something to wait for");
        self.hub.handle_timeout(self.now);
    }

    fn generations(&self) -> Vec<String> {
        self.published.iter().map(|table| table.generation.to_string()).collect()
    }

    fn routed(&self) -> Vec<&str> {
        self.published.last().expect("something was published").regions.keys().map(RegionId::as_str).collect()
    }
}

#[test]
fn a_region_is_published_when_it_registers_and_for_a_while_after_it_fell_silent() {
    let mut world = World::start(None, 1, Vec::new());
    world.settle();
    assert_eq!(world.generations(), ["1.1"], "the deployments are news");
    world.tell(Event::SpokeRegistered(standing(EUROPE, 5)));
    world.settle();
    assert_eq!((world.generations(), world.routed()), (vec!["1.1".into(), "1.2".into()], vec![EUROPE]));

    world.tell(Event::SpokeRemoved { region: EUROPE.parse().unwrap(), boot_id: 5 });
    world.settle();
    assert_eq!(world.generations().len(), 2, "nothing has changed for a gateway");
    let gone = world.now;
    world.sleep();
    world.settle();
    assert_eq!(world.now - gone, LAPSED_KEEP);
    assert_eq!((world.generations().len(), world.routed()), (3, vec![]));
    assert_eq!(world.hub.next_wakeup(), None);
}

#[test]
fn a_hub_that_starts_again_publishes_at_once_what_it_published_last() {
    let mut before = World::start(None, 4, vec![standing(EUROPE, 1), standing(AMERICA, 2)]);
    before.settle();
    let last = before.published.pop();

    let mut after = World::start(last.clone(), 4, Vec::new());
    assert_eq!(after.hub.poll(), last.map(HubCommand::Publish));
    assert_eq!(after.hub.poll(), None, "no spoke has come forward, and no region is taken away for it");
    after.tell(Event::SpokeRegistered(standing(AMERICA, 9)));
    after.sleep();
    after.settle();
    assert_eq!((after.generations(), after.routed()), (vec!["4.2".into()], vec![AMERICA]));
}

#[test]
fn a_store_that_was_restored_and_given_a_new_epoch_has_its_table_published_again() {
    let mut before = World::start(None, 4, vec![standing(EUROPE, 1)]);
    before.settle();
    let mut after = World::start(before.published.pop(), 5, vec![standing(EUROPE, 1)]);
    after.settle();
    assert_eq!(after.generations(), ["4.1", "5.2"]);
}

#[test]
fn nothing_is_published_before_it_is_persisted_and_changes_gather_meanwhile() {
    let mut world = World::start(None, 1, Vec::new());
    let Some(HubCommand::Persist(first)) = world.hub.poll() else { panic!("the first table") };
    world.tell(Event::SpokeRegistered(standing(EUROPE, 1)));
    world.tell(Event::SpokeRegistered(standing(AMERICA, 2)));
    world.tell(Event::DeploymentsChanged(wanted([deployment("minilm"), deployment("minilm-eu")])));
    assert_eq!(world.hub.poll(), None, "one table at a time");
    world.tell(Event::Persisted(first.clone()));
    assert_eq!(world.hub.poll(), Some(HubCommand::Publish(first)));
    world.settle();
    assert_eq!((world.generations(), world.routed()), (vec!["1.2".into()], vec![AMERICA, EUROPE]));
    assert_eq!(world.published[0].deployments.len(), 2);
}

#[test]
fn a_store_that_does_not_take_a_table_is_asked_again_with_the_newest() {
    let mut world = World::start(None, 1, Vec::new());
    assert!(matches!(world.hub.poll(), Some(HubCommand::Persist(_))));
    world.tell(Event::PersistFailed);
    world.tell(Event::SpokeRegistered(standing(EUROPE, 1)));
    assert_eq!(world.hub.poll(), None);
    let failed = world.now;
    world.sleep();
    assert_eq!(world.now - failed, PERSIST_RETRY);
    world.settle();
    let first = Generation { epoch: 1, number: 1 };
    assert_eq!((world.published[0].generation, world.routed()), (first, vec![EUROPE]));
}

#[test]
fn a_table_that_the_store_holds_after_all_is_published_and_then_superseded() {
    let mut world = World::start(None, 1, Vec::new());
    let Some(HubCommand::Persist(first)) = world.hub.poll() else { panic!("the first table") };
    world.tell(Event::PersistFailed);
    world.tell(Event::SpokeRegistered(standing(EUROPE, 1)));
    world.sleep();
    assert!(matches!(world.hub.poll(), Some(HubCommand::Persist(_))), "another table of the same generation");
    world.tell(Event::Persisted(first));
    world.settle();
    assert_eq!((world.generations(), world.routed()), (vec!["1.1".into(), "1.2".into()], vec![EUROPE]));
}

#[test]
#[should_panic(expected = "NotMonotone")]
fn a_store_that_holds_an_older_table_breaks_monotone_plans() {
    let mut world = World::start(None, 1, vec![standing(EUROPE, 1)]);
    world.settle();
    world.tell(Event::Persisted(RouteTable::empty()));
}

#[test]
fn a_list_of_everything_stands_for_the_events_that_were_missed() {
    let mut world = World::start(None, 1, vec![standing(EUROPE, 1)]);
    world.settle();
    let everything = |deployments| {
        let spokes = vec![standing(AMERICA, 2)];
        Event::Listed(StoreState { spokes, deployments, ..StoreState::default() })
    };
    world.tell(everything(Some(wanted([deployment("minilm-eu")]))));
    world.settle();
    assert_eq!(world.routed(), [AMERICA, EUROPE], "Europe has lapsed and keeps its route");
    world.tell(everything(None));
    world.settle();
    assert_eq!(world.published.last().unwrap().deployments.len(), 1, "what cannot be read changes nothing");
    world.tell(Event::DeploymentsChanged(DesiredDeployments::default()));
    world.settle();
    assert!(world.published.last().unwrap().deployments.is_empty());
}

#[test]
fn a_hub_that_cannot_read_what_is_wanted_goes_on_with_what_was_published() {
    let mut before = World::start(None, 4, vec![standing(EUROPE, 1)]);
    before.settle();
    let table = before.published.pop();
    let all = StoreState { spokes: vec![standing(EUROPE, 1)], ..StoreState::default() };
    let mut after = World::found(HubInitialState { epoch: 5, table: table.clone(), plan: Vec::new(), all });
    after.settle();
    assert_eq!(after.generations(), ["4.1", "5.2"]);
    assert_eq!(after.published.last().unwrap().deployments, table.unwrap().deployments);
}

#[test]
fn what_a_hub_has_announced_its_successor_carries_out() {
    let policy = |policy: &str| Deployment { residency: policy.parse().unwrap(), ..deployment("minilm") };
    let gateway = Reader { role: Role::Gateway, region: AMERICA.parse().unwrap(), boot_id: 1 };
    let said = |world: &World| {
        let table = world.published.last().unwrap();
        let to = table.widening.values().map(|widening| widening.to.to_string()).next();
        (table.generation.to_string(), table.deployments["minilm"].residency.to_string(), to)
    };
    let mut first = World::start(None, 1, Vec::new());
    first.tell(Event::DeploymentsChanged(wanted([policy("eu")])));
    first.settle();
    first.tell(Event::Acknowledged(gateway.clone(), "1.1".parse().unwrap()));
    first.tell(Event::DeploymentsChanged(wanted([policy("eu,us")])));
    first.settle();
    assert_eq!(said(&first), ("1.2".into(), "eu".into(), Some("eu,us".into())));
    first.tell(Event::Acknowledged(gateway.clone(), "1.2".parse().unwrap()));
    first.settle();
    assert_eq!(first.published.len(), 2, "not while a term is young");

    let all = StoreState {
        deployments: Some(wanted([policy("eu,us")])),
        readers: BTreeMap::from([(gateway.clone(), "1.1".parse().unwrap())]),
        ..StoreState::default()
    };
    let table = first.published.pop();
    let mut second = World::found(HubInitialState { epoch: 1, table, plan: Vec::new(), all });
    let begun = second.now;
    second.settle();
    second.sleep();
    second.settle();
    assert_eq!((second.now - begun, said(&second).2), (SETTLE, Some("eu,us".into())));
    second.tell(Event::Acknowledged(gateway, "1.2".parse().unwrap()));
    second.settle();
    assert_eq!(said(&second), ("1.3".into(), "eu,us".into(), None));
}

#[test]
fn a_store_that_knows_less_than_it_did_begins_a_new_epoch() {
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
