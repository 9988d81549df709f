//! Tests of violations, of rejected requests, and of receipts that were written before their requests were forwarded.

use super::*;

fn sent(request: &'static str, number: u64, region: &'static str) -> Entry<'static> {
    let key = AttemptKey { gateway: 0xab, number };
    let content = ReceiptContent {
        chain: EDGE,
        request,
        attempt: 1,
        region,
        residency: "eu",
        at_ms: 2_000,
        key: Some(key),
    };
    Entry::Sent {
        id: content.id().to_string().into(),
        number,
        request: request.into(),
        attempt: 1,
        tenant: "a1".into(),
        deployment: "docs".into(),
        generation: "1.1".into(),
        policy: 1,
        tls: None,
        region: region.into(),
        at_ms: 2_000,
        cause: "first".into(),
        key: key.to_string().into(),
    }
}

fn received(request: &'static str, number: u64) -> Entry<'static> {
    Entry::Received {
        number,
        request: request.into(),
        attempt: 1,
        tenant: Some("a1".into()),
        deployment: Some("docs".into()),
        residency: "eu".into(),
        at_ms: 2_001,
        key: Some(AttemptKey { gateway: 0xab, number }.to_string().into()),
    }
}

fn outcome(number: u64, end: &'static str) -> Entry<'static> {
    Entry::Outcome { number, took_us: 7_000, end: end.into() }
}

/// One request whose receipts are required at both ends.
fn required() -> AuditScenario {
    let mut scenario = AuditScenario::valid();
    scenario.edge.splice(2..6, [sent("a", 1, EUROPE), outcome(1, "ok")]);
    scenario.spoke.splice(1..4, [received("a", 1), outcome(1, "ok")]);
    scenario
}

#[test]
fn a_receipt_written_before_its_request_is_joined_like_any_other() {
    let report = required().report();
    assert!(report.holds && report.verdict == AuditVerdict::Holds, "{report:#?}");
    assert_eq!((report.attempts, report.arrivals, report.confirmed), (1, 1, 1));
    assert_eq!(report.without_outcome, 0);
}

#[test]
fn the_region_of_a_request_is_known_without_its_outcome() {
    let mut scenario = required();
    scenario.edge.remove(3);
    scenario.spoke.remove(2);
    let report = scenario.report();
    assert!(report.holds, "{report:#?}");
    assert_eq!((report.confirmed, report.without_outcome), (1, 2));
    // After a restart the numbers start again.
    let resumed = Entry::Resumed { at_ms: 5_000, clean: true, torn_bytes: 0 };
    scenario.edge.splice(3..3, [resumed, sent("c", 1, EUROPE), outcome(1, "first_byte_timeout")]);
    let report = scenario.report();
    assert!(report.holds, "{report:#?}");
    assert_eq!((report.attempts, report.never_arrived, report.without_outcome), (2, 1, 2));
}

#[test]
fn an_outcome_without_attempt_and_a_missing_arrival_are_found() {
    let mut scenario = required();
    scenario.edge.insert(4, outcome(9, "ok"));
    assert_eq!(kinds(&scenario.report()), [(Kind::OutcomeWithoutAttempt, 1)]);
    scenario.options.partial = true;
    assert!(scenario.report().holds, "its start may be archived");
    let mut scenario = required();
    scenario.spoke.drain(1..3);
    assert_eq!(kinds(&scenario.report()), [(Kind::AttemptWithoutArrival, 1)]);
    let mut scenario = required();
    scenario.edge[2] = sent("a", 1, AMERICA);
    let report = scenario.report();
    let expected =
        [(Kind::ResidencyViolation, 1), (Kind::ArrivalWithoutAttempt, 1), (Kind::AttemptWithoutArrival, 1)];
    assert_eq!((kinds(&report), report.verdict), (expected.to_vec(), AuditVerdict::Violated));
}

#[test]
fn an_attempt_that_is_written_again_at_its_end_counts_once() {
    let mut scenario = required();
    // As after an fsync that failed: the entry exists, and the process does not know.
    let key = AttemptKey { gateway: 0xab, number: 1 };
    if let Entry::Sent {
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
        cause,
        ..
    } = scenario.edge[2].clone()
    {
        let (end, key) = ("receipt_unavailable".into(), Some(key.to_string().into()));
        scenario.edge[3] = Entry::Attempt {
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
            took_us: 5,
            cause,
            end,
            key,
        };
    }
    scenario.spoke.drain(1..3);
    let report = scenario.report();
    assert!(report.holds, "{report:#?}");
    assert_eq!((report.attempts, report.never_arrived), (1, 1));
}

#[test]
fn a_request_that_a_region_rejected_is_no_violation() {
    let mut scenario = AuditScenario::valid();
    scenario.spoke[2] = arrival("b", 2, NOT_RESIDENT_HERE);
    let report = scenario.report();
    assert!(report.holds, "{report:#?}");
    assert_eq!((report.refused, report.confirmed), (1, 3));
    assert!(report.refusals[0].contains("request b, attempt 2"), "{:?}", report.refusals);

    // A policy that the region could not parse: it rejected the request for that reason.
    let unreadable = |outcome| {
        let mut scenario = AuditScenario::valid();
        scenario.spoke[2] = arrival("b", 2, outcome);
        if let Entry::Arrival { residency, .. } = &mut scenario.spoke[2] {
            *residency = "no policy at all".into();
        }
        scenario.report()
    };
    let report = unreadable(INVALID_HEADER);
    assert_eq!((kinds(&report), report.refused), (vec![(Kind::PoliciesDiffer, 1)], 1), "{report:#?}");
    assert_eq!(
        report.verdict,
        AuditVerdict::NotProven,
        "the two ends have different policies, without a violation"
    );
    let report = unreadable("ok");
    assert_eq!(report.verdict, AuditVerdict::Violated, "it was accepted: {report:#?}");
    // In an allowed region, an invalid header is an error like any other.
    let mut scenario = AuditScenario::valid();
    scenario.spoke[2] = arrival("b", 2, INVALID_HEADER);
    assert_eq!(scenario.report().refused, 0);
}

#[test]
fn requests_that_were_rejected_for_lack_of_a_receipt_are_counted_and_no_finding() {
    let mut scenario = required();
    scenario.edge.insert(4, Entry::Rejected { requests: 7, since_ms: 2_500, at_ms: 2_600 });
    let report = scenario.report();
    assert!(report.holds && report.rejected == 7, "{report:#?}");
}

#[test]
fn a_filter_selects_receipts_and_every_chain_is_verified() {
    let with = |filter: Filter, change: &dyn Fn(&mut AuditScenario)| {
        let mut scenario = AuditScenario::valid();
        change(&mut scenario);
        scenario.options.filter = filter;
        scenario.report()
    };
    let of = |tenant: Option<&str>, deployment: Option<&str>| Filter {
        tenant: tenant.map(str::to_owned),
        deployment: deployment.map(str::to_owned),
        ..Filter::default()
    };
    let window =
        |from_ms, until_ms| Filter { from_ms: Some(from_ms), until_ms: Some(until_ms), ..Filter::default() };
    let violated = |scenario: &mut AuditScenario| {
        scenario.edge[3] = attempt("b", 1, AMERICA, AttemptResult::Unreachable)
    };
    let keep = |_: &mut AuditScenario| {};

    assert_eq!(with(of(Some("a1"), None), &violated).verdict, AuditVerdict::Violated);
    let other = with(of(Some("a2"), None), &violated);
    assert_eq!((other.verdict, other.attempts, other.confirmed), (AuditVerdict::Holds, 0, 0));
    assert_eq!(with(of(None, Some("docs")), &keep).attempts, 4);
    assert_eq!(with(of(None, Some("other")), &violated).verdict, AuditVerdict::Holds);
    assert_eq!(with(window(2_000, 2_001), &violated).verdict, AuditVerdict::Violated);
    assert_eq!(with(window(2_001, 3_000), &violated).verdict, AuditVerdict::Holds);
    // The attempts are in the time range and their arrivals are not: they are still pairs.
    let report = with(window(2_000, 2_001), &keep);
    assert_eq!((report.attempts, report.arrivals, report.confirmed), (4, 0, 3), "{report:#?}");
    assert!(report.holds);
    // A policy that is too wide concerns the requests that were sent under it.
    let wide = |scenario: &mut AuditScenario| scenario.edge[1] = policy("eu", &[EUROPE, AMERICA]);
    assert_eq!(kinds(&with(of(Some("a1"), None), &wide)), [(Kind::AllowedTooWide, 1)]);
    assert!(with(of(Some("a2"), None), &wide).holds);
    // A gap concerns all requests in its time range.
    let gap = |scenario: &mut AuditScenario| {
        scenario
            .edge
            .insert(4, Entry::Gap { missing: 7, reason: GapReason::Disk, since_ms: 1_500, at_ms: 1_900 });
    };
    assert_eq!(kinds(&with(of(Some("a2"), None), &gap)), [(Kind::Gap, 1)]);
    assert!(with(window(1_901, 9_000), &gap).holds && !with(window(1_900, 9_000), &gap).holds);
    // No filter hides a chain that was changed.
    let mut scenario = AuditScenario::valid();
    scenario.options.filter = of(Some("a2"), None);
    let edge = String::from_utf8(written(&scenario.edge).1).expect("text");
    let changed = edge.replacen("\"tenant\":\"a1\"", "\"tenant\":\"a2\"", 1);
    let report = scenario.report_of(&[("edge", changed.as_bytes()), ("spoke", &written(&scenario.spoke).1)]);
    assert!(report.counts.contains_key(&Kind::BrokenChain), "{report:#?}");
}
