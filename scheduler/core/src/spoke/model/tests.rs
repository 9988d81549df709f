//! Replica selection by the table's pinned revisions and the replicas' reports.

use super::super::{NoReplica, PassiveHealth, ReplicaOutcome, ReplicaStatus};
use super::*;
use crate::fixtures::some_deployment;
use crate::some_instant;
use regions::{Catalogue, EngineKind, EngineSpec, Generation, ModelSpec, Precision, Task};

fn revision(text: &str) -> ModelRevision {
    text.repeat(16).parse().unwrap()
}

fn name() -> DeploymentName {
    "d".parse().unwrap()
}

fn engine() -> EngineSpec {
    EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 }
}

fn observed(model: Option<&str>) -> ReplicaStatus {
    let model = model.map(|text| ReportedModel {
        revision: revision(text),
        source: "pypi://m".to_owned(),
        task: Task::Embed,
        engine: engine(),
    });
    ReplicaStatus {
        model,
        failure: None,
        names: BTreeSet::from([name()]),
        ready: true,
        draining: false,
        pending_tokens: 0,
        interactive_tokens: None,
        tokens_per_second: 1000.0,
    }
}

/// Creates a region whose replicas report these models.
fn region(models: &[Option<&str>], now: Instant) -> Spoke {
    let endpoints = (1..=models.len()).map(|port| ([10, 0, 0, 1], port as u16).into()).collect();
    let mut spoke = Spoke::new("aws/us-east-1".parse().unwrap(), 7, endpoints);
    for (number, model) in models.iter().enumerate() {
        spoke.observe_replica(number, observed(*model), now);
    }
    spoke
}

fn table(served: Option<(&str, Option<&str>)>) -> RouteTable {
    let served = served.map(|(current, next)| {
        let spec = ModelSpec { task: Task::Embed, model: "pypi://n".to_owned(), engine: engine() };
        let next = next.map(|text| NextRevision { spec, revision: Some(revision(text)), held: false });
        (name(), ServedRevision { current: revision(current), next })
    });
    let generation = Generation { epoch: 1, number: 1 };
    RouteTable { generation, revisions: Some(served.into_iter().collect()), ..RouteTable::empty() }
}

fn apply_route_table(spoke: &mut Spoke, served: Option<(&str, Option<&str>)>) {
    spoke.apply_route_table(&table(served), &Catalogue::builtin());
}

/// Returns the number of the replica that a request is sent to.
fn chosen(spoke: &mut Spoke, requested: RequestedRevision, now: Instant) -> Result<usize, NoReplica> {
    let selected = spoke.select_replica_for(&name(), requested, 1, |_| PassiveHealth::HEALTHY, now)?;
    spoke.finished(&selected, ReplicaOutcome::Responded, now);
    Ok(selected.index)
}

const NO_REQUIREMENT: RequestedRevision = RequestedRevision { required: None, known: None };

#[test]
fn only_replicas_of_the_pinned_revision_get_requests() {
    let now = some_instant();
    let mut spoke = region(&[Some("a"), Some("b"), None, Some("b")], now);
    apply_route_table(&mut spoke, Some(("b", None)));
    for _ in 0..10 {
        assert!(matches!(chosen(&mut spoke, NO_REQUIREMENT, now), Ok(1 | 3)));
    }
    assert_eq!(spoke.loads(now)[&name()].ready, 2);
    let counts = |spoke: &Spoke| spoke.capacity(now).pools.iter().map(|pool| pool.ready).sum::<u32>();
    assert_eq!(counts(&spoke), 2);
    apply_route_table(&mut spoke, Some(("a", None)));
    assert_eq!(chosen(&mut spoke, NO_REQUIREMENT, now), Ok(0), "all traffic switches with the table");
    assert_eq!(counts(&spoke), 1);
}

#[test]
fn a_replica_that_restarts_with_another_model_gets_no_requests() {
    let now = some_instant();
    let mut spoke = region(&[Some("a"), Some("a")], now);
    apply_route_table(&mut spoke, Some(("a", None)));
    let mismatches = spoke.observe_replica(0, observed(Some("b")), now);
    let [RevisionMismatch { replica: 0, expected, found: Some(found), .. }] = &mismatches[..] else {
        panic!("{mismatches:?}")
    };
    assert_eq!((*expected, found.revision), (revision("a"), revision("b")));
    assert_eq!(spoke.observe_replica(0, observed(Some("b")), now), [], "it is reported once");
    assert_eq!(spoke.mismatches().by_deployment[&name()], (1, 1));
    for _ in 0..10 {
        assert_eq!(chosen(&mut spoke, NO_REQUIREMENT, now), Ok(1));
    }
    spoke.replica_failed(1, now);
    assert!(
        matches!(chosen(&mut spoke, NO_REQUIREMENT, now), Err(NoReplica::NoneReady { .. })),
        "not even the last one"
    );
    assert!(spoke.deployments_ready(now).is_empty());
    spoke.observe_replica(0, observed(Some("a")), now);
    assert_eq!(
        (chosen(&mut spoke, NO_REQUIREMENT, now), spoke.mismatches().by_deployment[&name()]),
        (Ok(0), (0, 1))
    );
}

#[test]
fn replicas_of_the_next_model_are_no_mismatch_and_get_no_requests_yet() {
    let now = some_instant();
    let mut spoke = region(&[Some("a"), Some("a")], now);
    apply_route_table(&mut spoke, Some(("a", Some("b"))));
    assert_eq!(spoke.observe_replica(1, observed(Some("b")), now), []);
    assert_eq!((chosen(&mut spoke, NO_REQUIREMENT, now), spoke.mismatches().by_deployment.len()), (Ok(0), 0));
    assert_eq!(
        spoke.observe_replica(1, observed(Some("c")), now).len(),
        1,
        "neither the pinned nor the next revision"
    );
}

#[test]
fn a_deployment_is_not_served_until_the_hub_has_pinned_a_revision() {
    let now = some_instant();
    let mut spoke = region(&[Some("a"), Some("b")], now);
    apply_route_table(&mut spoke, None);
    assert!(chosen(&mut spoke, NO_REQUIREMENT, now).is_err() && spoke.deployments_ready(now).is_empty());
    let known = RequestedRevision { known: Some(revision("b")), ..NO_REQUIREMENT };
    assert_eq!(chosen(&mut spoke, known, now), Ok(1), "a gateway has a newer table");
    let reported = &spoke.models(now)[&name()];
    assert_eq!((reported.ready(revision("a")), reported.ready(revision("b")), reported.target), (1, 1, None));
}

#[test]
fn without_a_table_a_region_serves_one_revision_or_the_one_of_the_gateways_table() {
    let now = some_instant();
    let mut spoke = region(&[Some("a"), Some("b")], now);
    assert_eq!(chosen(&mut spoke, NO_REQUIREMENT, now), Ok(0));
    let requests = |known: Option<&str>, required: Option<&str>| RequestedRevision {
        known: known.map(revision),
        required: required.map(revision),
    };
    assert_eq!(chosen(&mut spoke, requests(Some("b"), None), now), Ok(1));
    assert_eq!(chosen(&mut spoke, requests(Some("c"), None), now), Err(NoReplica::RevisionNotServed));
    spoke.replica_failed(0, now);
    assert_eq!(chosen(&mut spoke, NO_REQUIREMENT, now), Ok(1));
    spoke.observe_replica(0, observed(Some("a")), now);
    assert_eq!(chosen(&mut spoke, NO_REQUIREMENT, now), Ok(1), "it keeps its choice");
    apply_route_table(&mut spoke, Some(("a", None)));
    assert_eq!(
        chosen(&mut spoke, requests(Some("b"), None), now),
        Ok(0),
        "its own table is newer than the request's"
    );
    assert_eq!(
        chosen(&mut spoke, requests(None, Some("b")), now),
        Ok(1),
        "all parts of a split request need the same revision"
    );
    assert_eq!(chosen(&mut spoke, requests(None, Some("c")), now), Err(NoReplica::RevisionNotServed));
}

#[test]
fn replicas_that_report_no_model_are_served_where_nothing_is_pinned() {
    let now = some_instant();
    let mut spoke = region(&[None], now);
    assert_eq!(chosen(&mut spoke, NO_REQUIREMENT, now), Ok(0));
    apply_route_table(&mut spoke, Some(("a", None)));
    assert!(chosen(&mut spoke, NO_REQUIREMENT, now).is_err());
    let mismatch = spoke.observe_replica(0, observed(None), now);
    assert_eq!(mismatch[0].found, None);
}

#[test]
fn mismatches_of_names_that_only_replicas_know_use_bounded_memory() {
    let now = some_instant();
    let mut spoke = region(&[Some("a"), Some("b")], now);
    let named = |model, first: usize| {
        let names = (first..first + 50).map(|number| format!("n{number:05}").parse().unwrap());
        ReplicaStatus { names: names.collect(), ..observed(Some(model)) }
    };
    let before = spoke.mismatches();
    // The first replica decides the served revision of the names, and the second one runs another.
    for first in (0..500).step_by(50) {
        spoke.observe_replica(0, named("a", first), now);
        assert_eq!(spoke.observe_replica(1, named("b", first), now).len(), 50);
    }
    let MismatchCounts { by_deployment, others } = spoke.mismatches();
    assert_eq!(by_deployment.len(), MISMATCHED_DEPLOYMENTS_MAX);
    let (now_counted, ever) = by_deployment.values().fold(others, |sum, it| (sum.0 + it.0, sum.1 + it.1));
    let ever_before: u64 = before.by_deployment.values().map(|(_, ever)| ever).sum();
    assert_eq!((now_counted, ever), (50, 500 + ever_before), "none is lost");
    assert_eq!(others.0, 50, "the last names have no count of their own");
}

#[test]
fn the_deployments_of_the_table_are_configured_with_and_without_a_revision() {
    let now = some_instant();
    let mut spoke = region(&[Some("a")], now);
    assert!(!spoke.is_configured(&name()), "a replica has named it");
    let deployment = some_deployment("z");
    let deployments = [(deployment.name.clone(), deployment)].into();
    spoke.apply_route_table(&RouteTable { deployments, ..table(None) }, &Catalogue::builtin());
    assert!(spoke.is_configured(&"z".parse().unwrap()));
    assert!(!spoke.is_configured(&name()));
}
