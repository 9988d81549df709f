//! Tests of requests with the same identifier, joined by their attempt keys, and without keys as far as possible.

use super::*;

/// Sets the key and the policy of an attempt, by the number of its policy.
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
            let content = ReceiptContent {
                chain: EDGE,
                request: &request,
                attempt,
                region: &region,
                residency: policy,
                at_ms,
                key: Some(key),
            };
            let id = content.id().to_string().into();
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

/// Two requests with the same identifier under two policies, both allowed, which arrive in reverse order.
fn two_requests_with_one_identifier(with_keys: bool) -> AuditScenario {
    let mut scenario = AuditScenario::valid();
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
            let content = ReceiptContent {
                chain: EDGE,
                request: &request,
                attempt,
                region: &region,
                residency,
                at_ms,
                key: None,
            };
            let id = content.id().to_string().into();
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
    scenario.edge.splice(
        2..6,
        [
            second_policy(),
            strip(keyed(attempt("a", 1, EUROPE, AttemptResult::Ok), 1, "eu")),
            strip(keyed(attempt("a", 1, EUROPE, AttemptResult::Ok), 2, "nl")),
        ],
    );
    scenario.spoke.splice(
        1..4,
        [strip(keyed(arrival("a", 1, "ok"), 2, "nl")), strip(keyed(arrival("a", 1, "ok"), 1, "eu"))],
    );
    scenario
}

#[test]
fn two_allowed_requests_with_one_identifier_hold() {
    for with_keys in [true, false] {
        let report = two_requests_with_one_identifier(with_keys).report();
        assert!(report.holds, "with keys: {with_keys}: {report:#?}");
        assert_eq!((report.confirmed, report.attempts, report.arrivals), (2, 2, 2));
    }
}

#[test]
fn the_policies_of_every_pair_are_compared_and_not_only_those_of_the_first() {
    let mut scenario = two_requests_with_one_identifier(true);
    // The second request arrives under the policy of the first.
    scenario.spoke[1] = keyed(arrival("a", 1, "ok"), 2, "eu");
    assert_eq!(kinds(&scenario.report()), [(Kind::PoliciesDiffer, 1)]);
    // Without keys the same is found by counting.
    let mut scenario = two_requests_with_one_identifier(false);
    scenario.spoke[1] = arrival("a", 1, "ok");
    assert_eq!(kinds(&scenario.report()), [(Kind::PoliciesDiffer, 1)]);
}

#[test]
fn an_arrival_of_another_attempt_does_not_replace_the_missing_one() {
    let mut scenario = two_requests_with_one_identifier(true);
    scenario.spoke[1] = keyed(arrival("a", 1, "ok"), 3, "nl");
    let expected = [(Kind::ArrivalWithoutAttempt, 1), (Kind::AttemptWithoutArrival, 1)];
    assert_eq!(kinds(&scenario.report()), expected);
}

#[test]
fn one_end_of_an_older_version_is_joined_with_the_other() {
    for (edge, spoke) in [(true, false), (false, true)] {
        let (with, without) =
            (two_requests_with_one_identifier(true), two_requests_with_one_identifier(false));
        let mut scenario = AuditScenario::valid();
        scenario.edge = if edge { with.edge } else { without.edge };
        scenario.spoke = if spoke { two_requests_with_one_identifier(true).spoke } else { without.spoke };
        let report = scenario.report();
        assert!(report.holds && report.confirmed == 2, "{edge} {spoke}: {report:#?}");
    }
}

#[test]
fn many_requests_with_one_identifier_are_joined_in_time() {
    // A quadratic join of 10,000 on each side would take a minute.
    let many = 10_000;
    let mut scenario = two_requests_with_one_identifier(true);
    let edge_end = scenario.edge.len() - 1;
    let attempts = (10..many).map(|number| keyed(attempt("a", 1, EUROPE, AttemptResult::Ok), number, "eu"));
    let attempts: Vec<_> = attempts.collect();
    scenario.edge.splice(edge_end..edge_end, attempts);
    // Half of the arrivals have no key.
    let arrivals = (10..many).map(|number| match number % 2 {
        0 => arrival("a", 1, "ok"),
        _ => keyed(arrival("a", 1, "ok"), number, "eu"),
    });
    let arrivals: Vec<_> = arrivals.collect();
    scenario.spoke.splice(1..1, arrivals);
    let report = scenario.report();
    assert!(report.holds && report.confirmed == many - 8, "{} of {many}", report.confirmed);
}
