//! Tests of planning in the hub: when plans are computed, and which parts are written.

use super::super::{Event, HubCommand, HubInitialState, HubState, StoreState};
use super::*;
use crate::plan::plan;
use crate::registry::{LAPSED_KEEP, RegisteredSpoke};
use crate::rollout::{Rollout, SETTLE_TIME};
use crate::some_instant;
use regions::{EngineKind, EngineSpec, Precision, ResidencyPolicy, Scaling, Task};
use scheduler_api::deployment::DesiredDeployments;
use scheduler_api::plan::{ReplicaCount, ReplicaPool};
use scheduler_api::registration::Registration;

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
        order: Vec::new(),
        placement: None,
        scaling: Scaling::default(),
    }
}

/// Creates a spoke with two ready replicas of this total speed, which could start six more.
fn spoke(name: &str, tokens_per_second: u64) -> RegisteredSpoke {
    let names = ["m", "m-eu", "m-ordered"].map(|name| name.parse().unwrap());
    let names: BTreeSet<DeploymentName> = names.into();
    let count = ReplicaCount { ready: 2, max: 8 };
    let deployments = names.iter().map(|name| (name.clone(), count)).collect();
    let capacity = RegionCapacity { pools: vec![ReplicaPool { ready: 2, tokens_per_second, deployments }] };
    let registration = Registration {
        region: region(name),
        instance: "a".parse().unwrap(),
        endpoint: ([10, 0, 0, 1], 7100).into(),
        boot_id: 1,
        deployments: names,
        capacity,
        models: BTreeMap::new(),
        failures: BTreeMap::new(),
        engines: None,
        draining: false,
        scales: false,
        job_log: None,
        accelerators: regions::Accelerators::new(),
    };
    RegisteredSpoke { registration, created: 1 }
}

/// Creates the demand report of the gateway in America.
fn demand(classes: &[(&str, &str, u64)]) -> GatewayDemand {
    let class = |(name, policy, tokens): &(&str, &str, u64)| {
        let residency: ResidencyPolicy = policy.parse().unwrap();
        ((TrafficClass { deployment: name.parse().unwrap(), residency }, region(AMERICA)), *tokens)
    };
    let gateway = GatewayBoot { region: region(AMERICA), boot_id: 1 };
    GatewayDemand { gateway, classes: classes.iter().map(class).collect(), reachable_regions: None }
}

/// Hub whose store accepts all writes.
struct PlanningTest {
    hub: HubState,
    now: Instant,
    /// Written parts of each plan that changed any.
    written: Vec<Vec<PlanPart>>,
    published: BTreeMap<String, PlanPart>,
    plans: usize,
}

impl PlanningTest {
    fn start(epoch: u64, parts: Vec<PlanPart>, spokes: Vec<RegisteredSpoke>) -> PlanningTest {
        let now = some_instant();
        let order = vec![region(JAPAN), region(EUROPE)];
        let ordered = Deployment { regions: order.clone(), order, ..deployment("m-ordered", "anywhere") };
        let deployments = [deployment("m", "anywhere"), deployment("m-eu", "eu"), ordered];
        let deployments = deployments.map(|deployment| (deployment.name.clone(), deployment));
        let desired = DesiredDeployments {
            applied: true,
            deployments: deployments.into(),
            ..DesiredDeployments::default()
        };
        let all = StoreState { spokes, deployments: Some(desired), ..StoreState::default() };
        let initial = HubInitialState { epoch, table: None, plan: parts, all };
        let catalogue = Arc::new(Catalogue::builtin());
        let rollout = Rollout::new(catalogue.clone(), SETTLE_TIME, now);
        let hub = HubState::new(initial, catalogue, LAPSED_KEEP, rollout, now);
        let mut test = PlanningTest { hub, now, written: Vec::new(), published: BTreeMap::new(), plans: 0 };
        test.settle();
        test
    }

    fn with_three(tokens_per_second: u64) -> PlanningTest {
        let spokes = [EUROPE, AMERICA, JAPAN].map(|name| spoke(name, tokens_per_second));
        PlanningTest::start(4, Vec::new(), spokes.to_vec())
    }

    fn handle(&mut self, event: Event) {
        self.hub.handle(event, self.now);
        self.settle();
    }

    fn settle(&mut self) {
        while let Some(command) = self.hub.poll() {
            let event = match command {
                HubCommand::Persist(table) => Event::Persisted(table),
                HubCommand::Plan(input, previous) => {
                    self.plans += 1;
                    Event::PlanComputed(plan(&input, &previous))
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
                            PlanPart::Shares(_) => panic!("the planner makes no shares"),
                        };
                        self.published.insert(name, part);
                    }
                    continue;
                }
                HubCommand::Publish(_) => continue,
                HubCommand::PersistShares(_) => Event::SharesPersisted,
                HubCommand::PersistPlacements(_) => Event::PlacementsPersisted,
            };
            self.hub.handle(event, self.now);
        }
    }

    fn advance(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(wakeup) = self.hub.next_wakeup().filter(|wakeup| *wakeup <= until) {
            self.now = wakeup.max(self.now);
            self.hub.handle_timeout(self.now);
            self.settle();
        }
        self.now = until;
        self.hub.handle_timeout(until);
    }

    /// Returns the shares of a class at the gateway in America.
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
fn a_plan_is_computed_each_second_and_only_changes_are_written() {
    let mut test = PlanningTest::with_three(4000);
    test.advance(60 * SECOND);
    assert_eq!(test.plans, 0, "there is no demand");
    test.handle(Event::DemandReported(demand(&[("m", "anywhere", 100)])));
    test.advance(10 * SECOND);
    assert_eq!((test.plans, test.numbers()), (10 + 1, vec!["4.1".to_owned()]));
    assert_eq!(test.shares("m", "anywhere"), [share(AMERICA, 1000)]);
    // 6000 fits into two regions of 3000 and is shifted there in steps.
    test.handle(Event::DemandReported(demand(&[("m", "anywhere", 6000)])));
    test.advance(20 * SECOND);
    assert_eq!(test.shares("m", "anywhere"), [share(AMERICA, 500), share(EUROPE, 500)]);
    let numbers: Vec<_> = (1..=6).map(|number| format!("4.{number}")).collect();
    assert_eq!(test.numbers(), numbers, "five steps, and then no change");
}

#[test]
fn a_confined_class_gets_the_capacity_and_the_deployments_policy_applies() {
    let mut test = PlanningTest::with_three(4000);
    test.handle(Event::DemandReported(demand(&[
        ("m", "de,nl", 2900),
        ("m-eu", "anywhere", 50),
        ("removed", "eu", 9),
    ])));
    test.advance(2 * SECOND);
    assert_eq!(test.shares("m", "de,nl"), [share(EUROPE, 1000)]);
    assert_eq!(test.shares("m-eu", "anywhere"), [share(EUROPE, 1000)], "whatever policy the gateway reports");
    assert_eq!(test.shares("removed", "eu"), []);
}

#[test]
fn the_shares_of_a_region_whose_lease_ended_move_at_once() {
    let mut test = PlanningTest::with_three(4000);
    test.handle(Event::DemandReported(demand(&[("m", "anywhere", 100)])));
    test.advance(2 * SECOND);
    test.handle(Event::SpokeRemoved { region: region(AMERICA), boot_id: 1 });
    test.advance(SECOND);
    assert_eq!(test.shares("m", "anywhere"), [share(EUROPE, 1000)]);
}

#[test]
fn a_deployment_with_an_order_is_planned_into_its_first_region_and_without_that_into_the_next() {
    let mut test = PlanningTest::with_three(4000);
    test.handle(Event::DemandReported(demand(&[("m-ordered", "anywhere", 6000), ("m-ordered", "eu", 10)])));
    test.advance(2 * SECOND);
    assert_eq!(test.shares("m-ordered", "anywhere"), [share(JAPAN, 1000)], "also beyond its capacity");
    assert_eq!(test.shares("m-ordered", "eu"), [share(EUROPE, 1000)], "residency binds");
    let PlanPart::Floors(standby) = &test.published[&format!("floors {EUROPE}")] else { panic!("floors") };
    assert_eq!(standby.floors, [("m-ordered".parse().unwrap(), 5)].into(), "one replica serves 1500");
    test.handle(Event::SpokeRemoved { region: region(JAPAN), boot_id: 1 });
    test.advance(SECOND);
    assert_eq!(test.shares("m-ordered", "anywhere"), [share(EUROPE, 1000)]);
}

#[test]
fn regions_whose_leases_end_all_at_once_stay_in_the_plan() {
    let mut test = PlanningTest::with_three(4000);
    test.handle(Event::DemandReported(demand(&[("m", "anywhere", 100)])));
    test.advance(2 * SECOND);
    for name in [EUROPE, AMERICA, JAPAN] {
        test.handle(Event::SpokeRemoved { region: region(name), boot_id: 1 });
    }
    assert!(test.hub.suspects_store_failure());
    test.advance(5 * SECOND);
    assert_eq!(test.shares("m", "anywhere"), [share(AMERICA, 1000)]);
}

#[test]
fn an_expired_gateway_is_planned_for_a_while_and_then_has_no_rows() {
    let mut test = PlanningTest::with_three(4000);
    test.handle(Event::DemandReported(demand(&[("m", "anywhere", 100)])));
    test.advance(2 * SECOND);
    test.handle(Event::GatewayExpired(GatewayBoot { region: region(AMERICA), boot_id: 1 }));
    test.advance(DEMAND_RETENTION - SECOND);
    assert_eq!(test.shares("m", "anywhere"), [share(AMERICA, 1000)]);
    test.advance(2 * SECOND);
    assert_eq!(test.shares("m", "anywhere"), []);
    assert_eq!(test.hub.next_wakeup(), None, "without demand no plan is due");
}

#[test]
fn a_drained_region_loses_its_share_in_ten_steps_and_gets_it_back_when_the_drain_is_cancelled() {
    let mut test = PlanningTest::with_three(4000);
    test.handle(Event::DemandReported(demand(&[("m", "anywhere", 100), ("m", "us", 10)])));
    test.advance(2 * SECOND);
    test.handle(Event::DrainStarted(region(AMERICA)));
    test.advance(SECOND);
    assert_eq!(test.shares("m", "anywhere"), [share(AMERICA, 900), share(EUROPE, 100)]);
    test.advance(9 * SECOND);
    assert_eq!(test.shares("m", "anywhere"), [share(EUROPE, 1000)]);
    assert_eq!(test.shares("m", "us"), [share(AMERICA, 1000)], "a class without alternatives stays");
    test.handle(Event::DrainCancelled(region(AMERICA)));
    test.advance(10 * SECOND);
    assert_eq!(test.shares("m", "anywhere"), [share(AMERICA, 1000)]);
}

#[test]
fn a_region_gets_a_floor_against_the_loss_of_another() {
    let mut test = PlanningTest::with_three(4000);
    // One replica serves 1500. Four in any two of three regions serve the demand when the third region is lost.
    test.handle(Event::DemandReported(demand(&[("m", "anywhere", 6000)])));
    test.advance(2 * SECOND);
    for name in [EUROPE, AMERICA, JAPAN] {
        let PlanPart::Floors(floors) = &test.published[&format!("floors {name}")] else { panic!("floors") };
        assert_eq!(floors.floors, [("m".parse().unwrap(), 2)].into(), "{name}");
    }
    // The peak of the last hour counts.
    test.handle(Event::DemandReported(demand(&[("m", "anywhere", 10)])));
    test.advance(PEAK_WINDOW / 2);
    let PlanPart::Floors(floors) = &test.published[&format!("floors {EUROPE}")] else { panic!("floors") };
    assert_eq!(floors.floors.len(), 1);
    test.advance(PEAK_WINDOW);
    let total: u32 = [EUROPE, AMERICA, JAPAN]
        .iter()
        .filter_map(|name| match &test.published[&format!("floors {name}")] {
            PlanPart::Floors(floors) => floors.floors.get("m"),
            PlanPart::Weights(_) | PlanPart::Shares(_) => None,
        })
        .sum();
    assert_eq!(total, 2, "one replica in each of two regions is enough for ten tokens a second");
}

#[test]
fn the_next_hub_continues_from_the_plan_in_the_store() {
    let mut before = PlanningTest::with_three(4000);
    before.handle(Event::DemandReported(demand(&[("m", "anywhere", 6000)])));
    before.advance(3 * SECOND);
    assert_eq!(before.shares("m", "anywhere"), [share(AMERICA, 700), share(EUROPE, 300)]);
    let stored: Vec<PlanPart> = before.published.values().cloned().collect();

    let spokes = [EUROPE, AMERICA, JAPAN].map(|name| spoke(name, 4000));
    let mut after = PlanningTest::start(4, stored.clone(), spokes.to_vec());
    assert_eq!(after.published.len(), stored.len(), "the stored parts are published at once");
    after.handle(Event::DemandReported(demand(&[("m", "anywhere", 6000)])));
    after.advance(SECOND);
    assert_eq!(after.shares("m", "anywhere"), [share(AMERICA, 600), share(EUROPE, 400)]);
    assert_eq!(after.numbers(), ["4.4"]);

    let mut restored = PlanningTest::start(5, stored.clone(), spokes.to_vec());
    restored.handle(Event::DemandReported(demand(&[("m", "anywhere", 6000)])));
    restored.advance(SECOND);
    assert_eq!(restored.written[0].len(), stored.len(), "a new epoch writes all parts again");
    assert_eq!(restored.numbers(), ["5.4"]);
}

#[test]
fn a_plan_that_was_not_persisted_is_written_by_the_next_one_with_a_higher_number() {
    let mut test = PlanningTest::with_three(4000);
    test.hub.handle(Event::DemandReported(demand(&[("m", "anywhere", 100)])), test.now);
    test.now += SECOND;
    test.hub.handle_timeout(test.now);
    let Some(HubCommand::Plan(input, previous)) = test.hub.poll() else { panic!("a plan is due") };
    assert_eq!(test.hub.poll(), None, "one plan at a time");
    test.hub.handle(Event::PlanComputed(plan(&input, &previous)), test.now);
    let Some(HubCommand::PersistPlan(parts)) = test.hub.poll() else { panic!("the plan must be written") };
    assert_eq!(parts[0].generation().to_string(), "4.1");
    test.hub.handle(Event::PlanPersistFailed, test.now);
    test.advance(SECOND);
    assert_eq!(test.numbers(), ["4.2"]);
}
