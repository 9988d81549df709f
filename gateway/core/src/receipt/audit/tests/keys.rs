//! Requests with one identifier, joined by the keys of their attempts, and without keys as well as that goes.

use super::*;

/// Gives an attempt its key and its policy, by the number of its policy.
fn keyed(entry: Entry<'static>, number: u64, policy: &'static str) -> Entry<'static> {
    let key = AttemptKey { gateway: 0xab, number };
    match entry {
        Entry::Attempt {
            request,
            attempt,
            tenant,
            deployment,
            generation,
            tls,
            region,
            at_ms,
            took_us,
            cause,
            end,
            ..
        } => {
            let number = if policy == "eu" { 1 } else { 2 };
            let essence = Essence {
                chain: EDGE,
                request: &request,
                attempt,
                region: &region,
                residency: policy,
                at_ms,
                key: Some(key),
            };
            let id = essence.id().to_string().into();
            let key = Some(key.to_string().into());
            Entry::Attempt {
                id,
                request,
                attempt,
                tenant,
                deployment,
                generation,
                policy: number,
                tls,
                region,
                at_ms,
                took_us,
                cause,
                end,
                key,
            }
        }
        Entry::Arrival { request, attempt, tenant, deployment, at_ms, took_us, outcome, .. } => {
            let (residency, key) = (policy.into(), Some(key.to_string().into()));
            Entry::Arrival { request, attempt, tenant, deployment, residency, at_ms, took_us, outcome, key }
        }
        other => panic!("{other:?} has no key"),
    }
}

fn second_policy() -> Entry<'static> {
    Entry::Policy { policy: 2, residency: "nl".into(), allowed: vec![EUROPE.into()] }
}

/// Two requests with one identifier under two policies, both permitted, which arrive in the other order.
fn two_of_one_name(with_keys: bool) -> Scene {
    let mut scene = Scene::sound();
    let strip = |entry: Entry<'static>| match entry {
        Entry::Attempt {
            id: _,
            request,
            attempt,
            tenant,
            deployment,
            generation,
            policy,
            tls,
            region,
            at_ms,
            took_us,
            cause,
            end,
            key: _,
        } => {
            let residency = if policy == 1 { "eu" } else { "nl" };
            let essence = Essence {
                chain: EDGE,
                request: &request,
                attempt,
                region: &region,
                residency,
                at_ms,
                key: None,
            };
            let id = essence.id().to_string().into();
            Entry::Attempt {
                id,
                request,
                attempt,
                tenant,
                deployment,
                generation,
                policy,
                tls,
                region,
                at_ms,
                took_us,
                cause,
                end,
                key: None,
            }
        }
        Entry::Arrival {
            request,
            attempt,
            tenant,
            deployment,
            residency,
            at_ms,
            took_us,
            outcome,
            key: _,
        } => Entry::Arrival {
            request,
            attempt,
            tenant,
            deployment,
            residency,
            at_ms,
            took_us,
            outcome,
            key: None,
        },
        other => other,
    };
    let strip = |entry| if with_keys { entry } else { strip(entry) };
    scene.edge.splice(
        2..6,
        [
            second_policy(),
            strip(keyed(attempt("a", 1, EUROPE, Ended::Ok), 1, "eu")),
            strip(keyed(attempt("a", 1, EUROPE, Ended::Ok), 2, "nl")),
        ],
    );
    scene.spoke.splice(
        1..4,
        [strip(keyed(arrival("a", 1, "ok"), 2, "nl")), strip(keyed(arrival("a", 1, "ok"), 1, "eu"))],
    );
    scene
}

#[test]
fn two_permitted_requests_with_one_identifier_hold() {
    for with_keys in [true, false] {
        let report = two_of_one_name(with_keys).report();
        assert!(report.holds, "with keys: {with_keys}: {report:#?}");
        assert_eq!((report.confirmed, report.attempts, report.arrivals), (2, 2, 2));
    }
}

#[test]
fn the_policies_of_every_pair_are_compared_and_not_only_those_of_the_first() {
    let mut scene = two_of_one_name(true);
    // The second request arrives under the policy of the first.
    scene.spoke[1] = keyed(arrival("a", 1, "ok"), 2, "eu");
    assert_eq!(kinds(&scene.report()), [(Kind::PoliciesDiffer, 1)]);
    // Without keys the same is found by counting.
    let mut scene = two_of_one_name(false);
    scene.spoke[1] = arrival("a", 1, "ok");
    assert_eq!(kinds(&scene.report()), [(Kind::PoliciesDiffer, 1)]);
}

#[test]
fn an_arrival_of_another_attempt_does_not_stand_in_for_the_one_that_is_missing() {
    let mut scene = two_of_one_name(true);
    scene.spoke[1] = keyed(arrival("a", 1, "ok"), 3, "nl");
    let expected = [(Kind::ArrivalWithoutAttempt, 1), (Kind::AttemptWithoutArrival, 1)];
    assert_eq!(kinds(&scene.report()), expected);
}

#[test]
fn one_end_of_an_older_version_is_joined_with_the_other() {
    for (edge, spoke) in [(true, false), (false, true)] {
        let (with, without) = (two_of_one_name(true), two_of_one_name(false));
        let mut scene = Scene::sound();
        scene.edge = if edge { with.edge } else { without.edge };
        scene.spoke = if spoke { two_of_one_name(true).spoke } else { without.spoke };
        let report = scene.report();
        assert!(report.holds && report.confirmed == 2, "{edge} {spoke}: {report:#?}");
    }
}

#[test]
fn many_requests_with_one_identifier_are_joined_in_time() {
    // A quadratic join of 10,000 on each side would take a minute.
    let many = 10_000;
    let mut scene = two_of_one_name(true);
    let edge_end = scene.edge.len() - 1;
    let attempts = (10..many).map(|number| keyed(attempt("a", 1, EUROPE, Ended::Ok), number, "eu"));
    let attempts: Vec<_> = attempts.collect();
    scene.edge.splice(edge_end..edge_end, attempts);
    // Half of the arrivals have no key.
    let arrivals = (10..many).map(|number| match number % 2 {
        0 => arrival("a", 1, "ok"),
        _ => keyed(arrival("a", 1, "ok"), number, "eu"),
    });
    let arrivals: Vec<_> = arrivals.collect();
    scene.spoke.splice(1..1, arrivals);
    let report = scene.report();
    assert!(report.holds && report.confirmed == many - 8, "{} of {many}", report.confirmed);
}
