//! Plans in a hub's life: when they are made, and what of them is written.

use super::super::{HubCommand, Event, StoreState, HubInitialState, HubState};
use super::*;
use crate::plan::capacity::{ReplicaCount, ReplicaPool};
use crate::plan::plan;
use crate::registry::{LAPSED_KEEP, Registration, RegisteredSpoke};
use crate::rollout::{Rollout, SETTLE, DesiredDeployments};
use crate::some_instant;
use regions::{EngineKind, EngineSpec, Precision, ResidencyPolicy, Scaling, Task};

const EUROPE: &str = "gcp/europe-west4";
const AMERICA: &str = "aws/us-east-1";
const JAPAN: &str = "oci/ap-tokyo-1";

fn region(name: &str) -> RegionId {
    name.parse().unwrap()
}

fn deployment(name: &str, residency: &str) -> Deployment {
    Deployment {
        name: name.parse().unwrap(),
        task: Task::Embed,
        model: "pypi://m".to_owned(),
        engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
        residency: residency.parse().unwrap(),
        regions: Vec::new(),
        scaling: Scaling::default(),
    }
}

/// A spoke whose two replicas compute so many tokens a second together, and that could start six more.
fn spoke(name: &str, tokens_per_second: u64) -> RegisteredSpoke {
    let names: BTreeSet<DeploymentName> = ["m", "m-eu"].map(|name| name.parse().unwrap()).into();
    let count = ReplicaCount { ready: 2, max: 8 };
    let deployments = names.iter().map(|name| (name.clone(), count)).collect();
    let capacity = RegionCapacity { pools: vec![ReplicaPool { ready: 2, tokens_per_second, deployments }] };
    let registration = Registration {
        region: region(name),
        endpoint: ([10, 0, 0, 1], 7100).into(),
        boot_id: 1,
        deployments: names,
        capacity,
        models: BTreeMap::new(),
    };
    RegisteredSpoke { registration, created: 1 }
}

/// The gateway in America is asked for so much.
fn asked(classes: &[(&str, &str, u64)]) -> GatewayDemand {
    let class = |(name, policy, tokens): &(&str, &str, u64)| {
        let residency: ResidencyPolicy = policy.parse().unwrap();
        ((TrafficClass { deployment: name.parse().unwrap(), residency }, region(AMERICA)), *tokens)
    };
    let gateway = GatewayBoot { region: region(AMERICA), boot_id: 1 };
    GatewayDemand { gateway, classes: classes.iter().map(class).collect(), reachable_regions: None }
}

/// A hub whose store takes everything.
struct World {
    hub: HubState,
    now: Instant,
    /// The parts of each plan of which something was written.
    written: Vec<Vec<PlanPart>>,
    published: BTreeMap<String, PlanPart>,
    plans: usize,
}

impl World {
    fn start(epoch: u64, parts: Vec<PlanPart>, spokes: Vec<RegisteredSpoke>) -> World {
        let now = some_instant();
        let deployments = [deployment("m", "anywhere"), deployment("m-eu", "eu")];
        let deployments = deployments.map(|deployment| (deployment.name.clone(), deployment));
        let wanted = DesiredDeployments { applied: true, deployments: deployments.into(), ..DesiredDeployments::default() };
        let all = StoreState { spokes, deployments: Some(wanted), ..StoreState::default() };
        let found = HubInitialState { epoch, table: None, plan: parts, all };
        let catalogue = Arc::new(Catalogue::builtin());
        let rollout = Rollout::new(catalogue.clone(), SETTLE, now);
        let hub = HubState::new(found, catalogue, LAPSED_KEEP, rollout, now);
        let mut world = World { hub, now, written: Vec::new(), published: BTreeMap::new(), plans: 0 };
        world.settle();
        world
    }

    fn with_three(tokens_per_second: u64) -> World {
        let spokes = [EUROPE, AMERICA, JAPAN].map(|name| spoke(name, tokens_per_second));
        World::start(4, Vec::new(), spokes.to_vec())
    }

    fn tell(&mut self, event: Event) {
        self.hub.handle(event, self.now);
        self.settle();
    }

    fn settle(&mut self) {
        while let Some(command) = self.hub.poll() {
            let event = match command {
                HubCommand::Persist(table) => Event::Persisted(table),
                HubCommand::Plan(problem, before) => {
                    self.plans += 1;
                    Event::PlanComputed(plan(&problem, &before))
                }
                HubCommand::PersistPlan(parts) => {
                    self.written.push(parts.clone());
                    Event::PlanPersisted(parts)
                }
                HubCommand::PublishPlan(parts) => {
                    for part in parts {
                        let name = match &part {
                            PlanPart::Weights(weights) => format!("rows {}", weights.gateway),
                            PlanPart::Floors(floors) => format!("floors {}", floors.region),
                        };
                        self.published.insert(name, part);
                    }
                    continue;
                }
                HubCommand::Publish(_) => continue,
            };
            self.hub.handle(event, self.now);
        }
    }

    fn passes(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(wakeup) = self.hub.next_wakeup().filter(|wakeup| *wakeup <= until) {
            self.now = wakeup.max(self.now);
            self.hub.handle_timeout(self.now);
            self.settle();
        }
        self.now = until;
        self.hub.handle_timeout(until);
    }

    /// The shares of a class at the gateway in America.
    fn shares(&self, name: &str, policy: &str) -> Vec<(String, u16)> {
        let Some(PlanPart::Weights(weights)) = self.published.get(&format!("rows {AMERICA}")) else {
            panic!("no rows: {:?}", self.published)
        };
        let class = TrafficClass { deployment: name.parse().unwrap(), residency: policy.parse().unwrap() };
        let row = weights.rows.get(&(class, region(AMERICA)));
        row.into_iter().flatten().map(|share| (share.region.to_string(), share.permille)).collect()
    }

    fn numbers(&self) -> Vec<String> {
        let first = |parts: &Vec<PlanPart>| parts[0].generation().to_string();
        self.written.iter().map(first).collect()
    }
}

fn share(name: &str, permille: u16) -> (String, u16) {
    (name.to_owned(), permille)
}

const SECOND: Duration = PLAN_PERIOD;

#[test]
fn there_is_a_plan_each_second_and_nothing_is_written_that_stands_there_already() {
    let mut world = World::with_three(4000);
    world.passes(60 * SECOND);
    assert_eq!(world.plans, 0, "nobody is asked for anything");
    world.tell(Event::DemandReported(asked(&[("m", "anywhere", 100)])));
    world.passes(10 * SECOND);
    assert_eq!((world.plans, world.numbers()), (10 + 1, vec!["4.1".to_owned()]));
    assert_eq!(world.shares("m", "anywhere"), [share(AMERICA, 1000)]);
    // 6000 fits into two regions of 3000 and goes there by steps.
    world.tell(Event::DemandReported(asked(&[("m", "anywhere", 6000)])));
    world.passes(20 * SECOND);
    assert_eq!(world.shares("m", "anywhere"), [share(AMERICA, 500), share(EUROPE, 500)]);
    let numbers: Vec<_> = (1..=6).map(|number| format!("4.{number}")).collect();
    assert_eq!(world.numbers(), numbers, "five steps, and then it rests");
}

#[test]
fn a_class_that_may_go_nowhere_else_is_given_the_room_and_the_policy_is_the_deployments_own() {
    let mut world = World::with_three(4000);
    world.tell(Event::DemandReported(asked(&[("m", "de,nl", 2900), ("m-eu", "anywhere", 50), ("gone", "eu", 9)])));
    world.passes(2 * SECOND);
    assert_eq!(world.shares("m", "de,nl"), [share(EUROPE, 1000)]);
    assert_eq!(
        world.shares("m-eu", "anywhere"),
        [share(EUROPE, 1000)],
        "whatever a gateway says of its policy"
    );
    assert_eq!(world.shares("gone", "eu"), []);
}

#[test]
fn what_a_region_had_whose_lease_ended_goes_elsewhere_at_once() {
    let mut world = World::with_three(4000);
    world.tell(Event::DemandReported(asked(&[("m", "anywhere", 100)])));
    world.passes(2 * SECOND);
    world.tell(Event::SpokeRemoved { region: region(AMERICA), boot_id: 1 });
    world.passes(SECOND);
    assert_eq!(world.shares("m", "anywhere"), [share(EUROPE, 1000)]);
}

#[test]
fn regions_whose_leases_end_all_at_once_are_still_planned_with() {
    let mut world = World::with_three(4000);
    world.tell(Event::DemandReported(asked(&[("m", "anywhere", 100)])));
    world.passes(2 * SECOND);
    for name in [EUROPE, AMERICA, JAPAN] {
        world.tell(Event::SpokeRemoved { region: region(name), boot_id: 1 });
    }
    assert!(world.hub.suspects_store_failure());
    world.passes(5 * SECOND);
    assert_eq!(world.shares("m", "anywhere"), [share(AMERICA, 1000)]);
}

#[test]
fn a_gateway_that_falls_silent_is_planned_for_a_little_longer_and_then_has_no_rows() {
    let mut world = World::with_three(4000);
    world.tell(Event::DemandReported(asked(&[("m", "anywhere", 100)])));
    world.passes(2 * SECOND);
    world.tell(Event::GatewayExpired(GatewayBoot { region: region(AMERICA), boot_id: 1 }));
    world.passes(DEMAND_KEPT - SECOND);
    assert_eq!(world.shares("m", "anywhere"), [share(AMERICA, 1000)]);
    world.passes(2 * SECOND);
    assert_eq!(world.shares("m", "anywhere"), []);
    assert_eq!(world.hub.next_wakeup(), None, "and then there is nothing to plan");
}

#[test]
fn a_drained_region_is_left_in_ten_steps_and_has_its_share_back_when_it_is_not_drained() {
    let mut world = World::with_three(4000);
    world.tell(Event::DemandReported(asked(&[("m", "anywhere", 100), ("m", "us", 10)])));
    world.passes(2 * SECOND);
    world.tell(Event::DrainStarted(region(AMERICA)));
    world.passes(SECOND);
    assert_eq!(world.shares("m", "anywhere"), [share(AMERICA, 900), share(EUROPE, 100)]);
    world.passes(9 * SECOND);
    assert_eq!(world.shares("m", "anywhere"), [share(EUROPE, 1000)]);
    assert_eq!(world.shares("m", "us"), [share(AMERICA, 1000)], "what may go nowhere else stays");
    world.tell(Event::DrainCancelled(region(AMERICA)));
    world.passes(10 * SECOND);
    assert_eq!(world.shares("m", "anywhere"), [share(AMERICA, 1000)]);
}

#[test]
fn a_region_is_told_how_many_replicas_it_keeps_for_the_loss_of_another() {
    let mut world = World::with_three(4000);
    // One replica takes 1500. Four of them in any two of three regions take what is asked for when the third is lost.
    world.tell(Event::DemandReported(asked(&[("m", "anywhere", 6000)])));
    world.passes(2 * SECOND);
    for name in [EUROPE, AMERICA, JAPAN] {
        let PlanPart::Floors(floors) = &world.published[&format!("floors {name}")] else { panic!("floors") };
        assert_eq!(floors.floors, [("m".parse().unwrap(), 2)].into(), "{name}");
    }
    // The most of the last hour counts.
    world.tell(Event::DemandReported(asked(&[("m", "anywhere", 10)])));
    world.passes(PEAK_KEPT / 2);
    let PlanPart::Floors(floors) = &world.published[&format!("floors {EUROPE}")] else { panic!("floors") };
    assert_eq!(floors.floors.len(), 1);
    world.passes(PEAK_KEPT);
    let total: u32 = [EUROPE, AMERICA, JAPAN]
        .iter()
        .filter_map(|name| match &world.published[&format!("floors {name}")] {
            PlanPart::Floors(floors) => floors.floors.get("m"),
            PlanPart::Weights(_) => None,
        })
        .sum();
    assert_eq!(total, 2, "one here and one there are enough for ten tokens a second");
}

#[test]
fn the_next_hub_goes_on_from_the_plan_that_stands_in_the_store() {
    let mut before = World::with_three(4000);
    before.tell(Event::DemandReported(asked(&[("m", "anywhere", 6000)])));
    before.passes(3 * SECOND);
    assert_eq!(before.shares("m", "anywhere"), [share(AMERICA, 700), share(EUROPE, 300)]);
    let record_part: Vec<PlanPart> = before.published.values().cloned().collect();

    let spokes = [EUROPE, AMERICA, JAPAN].map(|name| spoke(name, 4000));
    let mut after = World::start(4, record_part.clone(), spokes.to_vec());
    assert_eq!(after.published.len(), record_part.len(), "what record_part there is given out at once");
    after.tell(Event::DemandReported(asked(&[("m", "anywhere", 6000)])));
    after.passes(SECOND);
    assert_eq!(after.shares("m", "anywhere"), [share(AMERICA, 600), share(EUROPE, 400)]);
    assert_eq!(after.numbers(), ["4.4"]);

    let mut restored = World::start(5, record_part.clone(), spokes.to_vec());
    restored.tell(Event::DemandReported(asked(&[("m", "anywhere", 6000)])));
    restored.passes(SECOND);
    assert_eq!(restored.written[0].len(), record_part.len(), "a new epoch says everything anew");
    assert_eq!(restored.numbers(), ["5.4"]);
}

#[test]
fn a_plan_that_the_store_did_not_take_is_written_by_the_next_under_a_higher_number() {
    let mut world = World::with_three(4000);
    world.hub.handle(Event::DemandReported(asked(&[("m", "anywhere", 100)])), world.now);
    world.now += SECOND;
    world.hub.handle_timeout(world.now);
    let Some(HubCommand::Plan(problem, before)) = world.hub.poll() else { panic!("a plan is due") };
    assert_eq!(world.hub.poll(), None, "one at a time");
    world.hub.handle(Event::PlanComputed(plan(&problem, &before)), world.now);
    let Some(HubCommand::PersistPlan(parts)) = world.hub.poll() else { panic!("it has to be written") };
    assert_eq!(parts[0].generation().to_string(), "4.1");
    world.hub.handle(Event::PlanPersistFailed, world.now);
    world.passes(SECOND);
    assert_eq!(world.numbers(), ["4.2"]);
}
