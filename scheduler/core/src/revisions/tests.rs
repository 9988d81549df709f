//! How a deployment comes to a model revision, and from one to another.

use super::*;
use regions::{EngineKind, EngineSpec, Precision, RegionRoute, ResidencyPolicy, Scaling, Task};

const EUROPE: &str = "gcp/europe-west4";
const AMERICA: &str = "aws/us-east-1";

fn revision(text: &str) -> ModelRevision {
    text.repeat(16).parse().unwrap()
}

fn engine(precision: Precision) -> EngineSpec {
    EngineSpec { kind: EngineKind::Cpu, precision }
}

fn name() -> DeploymentName {
    "d".parse().unwrap()
}

fn deployment(model: &str, precision: Precision) -> Deployment {
    Deployment {
        name: name(),
        task: Task::Embed,
        model: model.to_owned(),
        engine: engine(precision),
        residency: ResidencyPolicy::Anywhere,
        regions: Vec::new(),
        scaling: Scaling::default(),
    }
}

/// So many ready replicas of a revision.
fn ready(text: &str, source: &str, precision: Precision, count: u32) -> RevisionReplicas {
    let model = ReportedModel {
        revision: revision(text),
        source: source.to_owned(),
        task: Task::Embed,
        engine: engine(precision),
    };
    RevisionReplicas { model, replicas: count, ready: count }
}

const F32: Precision = Precision::F32;
const INT8: Precision = Precision::Int8;
const M: &str = "pypi://m";

/// Precision and revision that are served, and the next revision with whether it is held.
type Published = (Precision, Option<ModelRevision>, Option<(Option<ModelRevision>, bool)>);

/// A hub that publishes what is staged.
struct World {
    desired: Deployments,
    orders: Orders,
    table: RouteTable,
    regions: BTreeMap<RegionId, BTreeMap<DeploymentName, ReplicaRevisions>>,
}

impl World {
    fn of(deployment: Deployment) -> World {
        let desired = Deployments::from([(name(), deployment)]);
        World { desired, orders: Orders::default(), table: RouteTable::empty(), regions: BTreeMap::new() }
    }

    fn wants(&mut self, deployment: Deployment) {
        self.desired = Deployments::from([(name(), deployment)]);
    }

    fn report(&mut self, region: &str, target: Option<u32>, models: &[RevisionReplicas]) {
        let reported = ReplicaRevisions { target, models: models.to_vec() };
        self.regions.insert(region.parse().unwrap(), BTreeMap::from([(name(), reported)]));
    }

    fn publish(&mut self) -> Published {
        let reports = self.regions.iter().collect();
        let (deployments, revisions) = stage(&self.desired, &self.orders, &self.table, &reports, false);
        let deployments = deployments.into_owned();
        self.table = RouteTable { deployments, revisions: Some(revisions), ..RouteTable::empty() };
        let served = self.table.revision(&name());
        let next = served.and_then(|served| served.next.clone());
        let precision = self.table.deployments[&name()].engine.precision;
        (precision, served.map(|it| it.current), next.map(|next| (next.revision, next.held)))
    }
}

#[test]
fn a_deployment_is_pinned_to_the_first_revision_of_its_spec_and_stays_there() {
    let mut world = World::of(deployment(M, F32));
    assert_eq!(world.publish(), (F32, None, None), "no replica has reported a model");
    world.report(EUROPE, None, &[ready("b", M, INT8, 5), ready("c", "pypi://other", F32, 5)]);
    assert_eq!(world.publish(), (F32, None, None), "these run something else");
    world.report(AMERICA, None, &[ready("a", M, F32, 1)]);
    assert_eq!(world.publish(), (F32, Some(revision("a")), None));
    world.report(AMERICA, None, &[]);
    assert_eq!(world.publish(), (F32, Some(revision("a")), None), "also when its replicas are gone");
}

#[test]
fn a_change_waits_until_each_region_is_as_ready_as_it_was() {
    let mut world = World::of(deployment(M, F32));
    let old = |count| ready("a", M, F32, count);
    let new = |count| ready("b", M, INT8, count);
    world.report(EUROPE, Some(2), &[old(2)]);
    world.report(AMERICA, None, &[old(1)]);
    world.publish();
    world.wants(deployment(M, INT8));
    assert_eq!(world.publish(), (F32, Some(revision("a")), Some((None, false))));
    world.report(EUROPE, Some(2), &[old(2), new(1)]);
    let under_way = (F32, Some(revision("a")), Some((Some(revision("b")), false)));
    assert_eq!(world.publish(), under_way);
    world.report(EUROPE, Some(2), &[old(2), new(2)]);
    assert_eq!(world.publish(), under_way, "America has none yet");
    world.report(AMERICA, None, &[old(1), new(1)]);
    assert_eq!(world.publish(), (INT8, Some(revision("b")), None));

    // Back again, the same way.
    world.wants(deployment(M, F32));
    assert_eq!(world.publish(), (F32, Some(revision("a")), None), "the old replicas are still there");
}

#[test]
fn a_region_without_a_spoke_is_waited_for_as_long_as_it_keeps_its_route() {
    let mut world = World::of(deployment(M, F32));
    world.report(EUROPE, None, &[ready("a", M, F32, 1)]);
    world.publish();
    world.wants(deployment(M, INT8));
    world.report(EUROPE, None, &[ready("a", M, F32, 1), ready("b", M, INT8, 1)]);
    let route = RegionRoute {
        endpoint: ([10, 0, 0, 1], 1).into(),
        deployments: BTreeSet::from([name()]),
        draining: false,
    };
    world.table.regions.insert(AMERICA.parse().unwrap(), route);
    let under_way = (F32, Some(revision("a")), Some((Some(revision("b")), false)));
    assert_eq!(world.publish(), under_way, "the hub was restarted, and has not heard of America yet");
    assert_eq!(world.publish(), (INT8, Some(revision("b")), None), "its route has ended");
}

#[test]
fn a_region_that_scales_is_ready_when_it_has_as_many_as_it_should() {
    let mut world = World::of(deployment(M, F32));
    world.report(EUROPE, Some(2), &[ready("a", M, F32, 2)]);
    world.publish();
    world.wants(deployment(M, INT8));
    // Traffic has gone down meanwhile, and one of four is enough.
    world.report(EUROPE, Some(1), &[ready("a", M, F32, 4), ready("b", M, INT8, 1)]);
    assert_eq!(world.publish(), (INT8, Some(revision("b")), None));
}

#[test]
fn a_change_that_is_held_waits_for_its_promotion() {
    let mut world = World::of(deployment(M, F32));
    world.report(EUROPE, None, &[ready("a", M, F32, 1), ready("b", "pypi://n", F32, 1)]);
    world.publish();
    world.orders.held.insert(name());
    world.wants(deployment("pypi://n", F32));
    let held = (F32, Some(revision("a")), Some((Some(revision("b")), true)));
    assert_eq!((world.publish(), world.publish()), (held, held));
    world.orders.promoted.insert(name(), revision("c"));
    assert_eq!(world.publish(), held, "another one was promoted");
    world.orders.promoted.insert(name(), revision("b"));
    assert_eq!(world.publish(), (F32, Some(revision("b")), None));
    assert_eq!(world.table.deployments[&name()].model, "pypi://n");
}

#[test]
fn other_files_behind_the_same_reference_get_no_traffic_until_they_are_promoted() {
    let mut world = World::of(deployment("/models/m", F32));
    let model = |text: &str, count| ready(text, "/models/m", F32, count);
    world.report(EUROPE, None, &[model("a", 1)]);
    world.publish();
    world.report(EUROPE, None, &[model("a", 1), model("b", 1)]);
    let held = (F32, Some(revision("a")), Some((Some(revision("b")), true)));
    assert_eq!(world.publish(), held);
    world.orders.promoted.insert(name(), revision("b"));
    assert_eq!(world.publish(), (F32, Some(revision("b")), None));
    // The replica of the old files is the candidate now, and was not promoted.
    assert_eq!(world.publish(), (F32, Some(revision("b")), Some((Some(revision("a")), true))));
}

#[test]
fn while_the_store_is_in_doubt_nothing_replaces_another() {
    let mut world = World::of(deployment(M, F32));
    world.report(EUROPE, None, &[ready("a", M, F32, 1), ready("b", M, INT8, 1)]);
    world.publish();
    let desired = Deployments::from([(name(), deployment(M, INT8))]);
    let reports = world.regions.iter().collect();
    let (deployments, revisions) = stage(&desired, &Orders::default(), &world.table, &reports, true);
    assert_eq!(deployments[&name()].engine.precision, F32);
    assert_eq!(revisions[&name()].current, revision("a"));
}

#[test]
fn a_change_of_the_reference_is_not_taken_for_done_by_old_replicas() {
    let mut world = World::of(deployment("/models/one", F32));
    world.report(EUROPE, None, &[ready("a", "/models/one", F32, 2)]);
    world.publish();
    world.wants(deployment("/models/two", F32));
    assert_eq!(world.publish(), (F32, Some(revision("a")), Some((None, false))));
    assert_eq!(world.table.deployments[&name()].model, "/models/one");
}
