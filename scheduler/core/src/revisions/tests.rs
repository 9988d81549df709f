//! Pinning of model revisions, and changes from one to another.

use super::*;
use regions::{EngineKind, EngineSpec, Precision, RegionRoute, ResidencyPolicy, Scaling, Task};
use scheduler_api::revision::RevisionReplicas;
use std::collections::BTreeSet;

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
        order: Vec::new(),
        placement: None,
        scaling: Scaling::default(),
    }
}

/// Creates this many ready replicas of a revision.
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

/// Hub that publishes the staged deployments and revisions.
struct RevisionTest {
    desired: Deployments,
    promotions: Promotions,
    table: RouteTable,
    regions: BTreeMap<RegionId, BTreeMap<DeploymentName, ReplicaRevisions>>,
}

impl RevisionTest {
    fn of(deployment: Deployment) -> RevisionTest {
        let desired = Deployments::from([(name(), deployment)]);
        RevisionTest {
            desired,
            promotions: Promotions::default(),
            table: RouteTable::empty(),
            regions: BTreeMap::new(),
        }
    }

    fn apply(&mut self, deployment: Deployment) {
        self.desired = Deployments::from([(name(), deployment)]);
    }

    fn report(&mut self, region: &str, target: Option<u32>, models: &[RevisionReplicas]) {
        let reported = ReplicaRevisions { target, models: models.to_vec() };
        self.regions.insert(region.parse().unwrap(), BTreeMap::from([(name(), reported)]));
    }

    fn publish(&mut self) -> Published {
        let reports = self.regions.iter().collect();
        let (deployments, revisions) = stage(&self.desired, &self.promotions, &self.table, &reports, false);
        let deployments = deployments.into_owned();
        self.table = RouteTable { deployments, revisions: Some(revisions), ..RouteTable::empty() };
        let served = self.table.revision(&name());
        let next = served.and_then(|served| served.next.clone());
        let precision = self.table.deployments[&name()].engine.precision;
        (precision, served.map(|it| it.current), next.map(|next| (next.revision, next.held)))
    }
}

#[test]
fn a_deployment_is_pinned_to_the_first_revision_of_its_spec_and_stays_pinned() {
    let mut test = RevisionTest::of(deployment(M, F32));
    assert_eq!(test.publish(), (F32, None, None), "no replica has reported a model");
    test.report(EUROPE, None, &[ready("b", M, INT8, 5), ready("c", "pypi://other", F32, 5)]);
    assert_eq!(test.publish(), (F32, None, None), "these run other models");
    test.report(AMERICA, None, &[ready("a", M, F32, 1)]);
    assert_eq!(test.publish(), (F32, Some(revision("a")), None));
    test.report(AMERICA, None, &[]);
    assert_eq!(test.publish(), (F32, Some(revision("a")), None), "even without replicas");
}

#[test]
fn a_change_waits_until_each_region_has_as_many_ready_replicas() {
    let mut test = RevisionTest::of(deployment(M, F32));
    let old = |count| ready("a", M, F32, count);
    let new = |count| ready("b", M, INT8, count);
    test.report(EUROPE, Some(2), &[old(2)]);
    test.report(AMERICA, None, &[old(1)]);
    test.publish();
    test.apply(deployment(M, INT8));
    assert_eq!(test.publish(), (F32, Some(revision("a")), Some((None, false))));
    test.report(EUROPE, Some(2), &[old(2), new(1)]);
    let pending = (F32, Some(revision("a")), Some((Some(revision("b")), false)));
    assert_eq!(test.publish(), pending);
    test.report(EUROPE, Some(2), &[old(2), new(2)]);
    assert_eq!(test.publish(), pending, "America has none yet");
    test.report(AMERICA, None, &[old(1), new(1)]);
    assert_eq!(test.publish(), (INT8, Some(revision("b")), None));

    // The rollback works the same way.
    test.apply(deployment(M, F32));
    assert_eq!(test.publish(), (F32, Some(revision("a")), None), "the old replicas are still there");
}

#[test]
fn a_region_without_a_spoke_is_waited_for_as_long_as_it_keeps_its_route() {
    let mut test = RevisionTest::of(deployment(M, F32));
    test.report(EUROPE, None, &[ready("a", M, F32, 1)]);
    test.publish();
    test.apply(deployment(M, INT8));
    test.report(EUROPE, None, &[ready("a", M, F32, 1), ready("b", M, INT8, 1)]);
    let route = RegionRoute {
        instances: BTreeMap::from([("a".parse().unwrap(), ([10, 0, 0, 1], 1).into())]),
        deployments: BTreeSet::from([name()]),
        draining: false,
    };
    test.table.regions.insert(AMERICA.parse().unwrap(), route);
    let pending = (F32, Some(revision("a")), Some((Some(revision("b")), false)));
    assert_eq!(test.publish(), pending, "the hub was restarted, and America has not registered yet");
    assert_eq!(test.publish(), (INT8, Some(revision("b")), None), "its route has ended");
}

#[test]
fn an_autoscaled_region_is_ready_at_its_desired_number_of_replicas() {
    let mut test = RevisionTest::of(deployment(M, F32));
    test.report(EUROPE, Some(2), &[ready("a", M, F32, 2)]);
    test.publish();
    test.apply(deployment(M, INT8));
    // Traffic has decreased in the meantime, and one of four replicas is enough.
    test.report(EUROPE, Some(1), &[ready("a", M, F32, 4), ready("b", M, INT8, 1)]);
    assert_eq!(test.publish(), (INT8, Some(revision("b")), None));
}

#[test]
fn a_change_that_is_held_waits_for_its_promotion() {
    let mut test = RevisionTest::of(deployment(M, F32));
    test.report(EUROPE, None, &[ready("a", M, F32, 1), ready("b", "pypi://n", F32, 1)]);
    test.publish();
    test.promotions.held.insert(name());
    test.apply(deployment("pypi://n", F32));
    let held = (F32, Some(revision("a")), Some((Some(revision("b")), true)));
    assert_eq!((test.publish(), test.publish()), (held, held));
    test.promotions.promoted.insert(name(), revision("c"));
    assert_eq!(test.publish(), held, "another revision was promoted");
    test.promotions.promoted.insert(name(), revision("b"));
    assert_eq!(test.publish(), (F32, Some(revision("b")), None));
    assert_eq!(test.table.deployments[&name()].model, "pypi://n");
}

#[test]
fn changed_files_behind_the_same_reference_get_no_traffic_until_promoted() {
    let mut test = RevisionTest::of(deployment("/models/m", F32));
    let model = |text: &str, count| ready(text, "/models/m", F32, count);
    test.report(EUROPE, None, &[model("a", 1)]);
    test.publish();
    test.report(EUROPE, None, &[model("a", 1), model("b", 1)]);
    let held = (F32, Some(revision("a")), Some((Some(revision("b")), true)));
    assert_eq!(test.publish(), held);
    test.promotions.promoted.insert(name(), revision("b"));
    assert_eq!(test.publish(), (F32, Some(revision("b")), None));
    // The replica of the old files is the candidate now, and was not promoted.
    assert_eq!(test.publish(), (F32, Some(revision("b")), Some((Some(revision("a")), true))));
}

#[test]
fn while_the_set_of_regions_is_in_doubt_no_revision_replaces_another() {
    let mut test = RevisionTest::of(deployment(M, F32));
    test.report(EUROPE, None, &[ready("a", M, F32, 1), ready("b", M, INT8, 1)]);
    test.publish();
    let desired = Deployments::from([(name(), deployment(M, INT8))]);
    let reports = test.regions.iter().collect();
    let (deployments, revisions) = stage(&desired, &Promotions::default(), &test.table, &reports, true);
    assert_eq!(deployments[&name()].engine.precision, F32);
    assert_eq!(revisions[&name()].current, revision("a"));
}

#[test]
fn old_replicas_do_not_complete_a_change_of_the_reference() {
    let mut test = RevisionTest::of(deployment("/models/one", F32));
    test.report(EUROPE, None, &[ready("a", "/models/one", F32, 2)]);
    test.publish();
    test.apply(deployment("/models/two", F32));
    assert_eq!(test.publish(), (F32, Some(revision("a")), Some((None, false))));
    assert_eq!(test.table.deployments[&name()].model, "/models/one");
}
