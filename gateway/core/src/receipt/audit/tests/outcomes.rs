//! What is a violation, what is a refusal, and receipts that were written before their requests were forwarded.

use super::*;

fn sent(request: &'static str, number: u64, region: &'static str) -> Entry<'static> {
    let key = AttemptKey { gateway: 0xab, number };
    let essence =
        Essence { chain: EDGE, request, attempt: 1, region, residency: "eu", at_ms: 2_000, key: Some(key) };
    Entry::Sent {
        id: essence.id().to_string().into(),
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
fn required() -> Scene {
    let mut scene = Scene::sound();
    scene.edge.splice(2..6, [sent("a", 1, EUROPE), outcome(1, "ok")]);
    scene.spoke.splice(1..4, [received("a", 1), outcome(1, "ok")]);
    scene
}

#[test]
fn a_receipt_written_before_its_request_is_joined_like_any_other() {
    let report = required().report();
    assert!(report.holds && report.verdict == Verdict::Holds, "{report:#?}");
    assert_eq!((report.attempts, report.arrivals, report.confirmed), (1, 1, 1));
    assert_eq!(report.without_outcome, 0);
}

#[test]
fn where_a_request_went_is_known_although_its_outcome_is_not() {
    let mut scene = required();
    scene.edge.remove(3);
    scene.spoke.remove(2);
    let report = scene.report();
    assert!(report.holds, "{report:#?}");
    assert_eq!((report.confirmed, report.without_outcome), (1, 2));
    // After a restart the numbers begin again.
    let resumed = Entry::Resumed { at_ms: 5_000, clean: true, torn_bytes: 0 };
    scene.edge.splice(3..3, [resumed, sent("c", 1, EUROPE), outcome(1, "late")]);
    let report = scene.report();
    assert!(report.holds, "{report:#?}");
    assert_eq!((report.attempts, report.never_arrived, report.without_outcome), (2, 1, 2));
}

#[test]
fn an_outcome_of_nothing_and_a_missing_arrival_are_found() {
    let mut scene = required();
    scene.edge.insert(4, outcome(9, "ok"));
    assert_eq!(kinds(&scene.report()), [(Kind::OutcomeWithoutAttempt, 1)]);
    scene.demands.partial = true;
    assert!(scene.report().holds, "its beginning may be archived");
    let mut scene = required();
    scene.spoke.drain(1..3);
    assert_eq!(kinds(&scene.report()), [(Kind::AttemptWithoutArrival, 1)]);
    let mut scene = required();
    scene.edge[2] = sent("a", 1, AMERICA);
    let report = scene.report();
    let expected =
        [(Kind::ResidencyViolation, 1), (Kind::ArrivalWithoutAttempt, 1), (Kind::AttemptWithoutArrival, 1)];
    assert_eq!((kinds(&report), report.verdict), (expected.to_vec(), Verdict::Violated));
}

#[test]
fn an_attempt_that_is_written_again_when_it_is_over_counts_once() {
    let mut scene = required();
    // As after an fsync that failed: the entry is there, and the process does not know.
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
    } = scene.edge[2].clone()
    {
        let (end, key) = ("receipt_unavailable".into(), Some(key.to_string().into()));
        scene.edge[3] = Entry::Attempt {
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
    scene.spoke.drain(1..3);
    let report = scene.report();
    assert!(report.holds, "{report:#?}");
    assert_eq!((report.attempts, report.never_arrived), (1, 1));
}

#[test]
fn a_request_that_a_region_refused_is_no_violation() {
    let mut scene = Scene::sound();
    scene.spoke[2] = arrival("b", 2, NOT_RESIDENT_HERE);
    let report = scene.report();
    assert!(report.holds, "{report:#?}");
    assert_eq!((report.refused, report.confirmed), (1, 3));
    assert!(report.refusals[0].contains("request b, attempt 2"), "{:?}", report.refusals);

    // A policy that the region could not read: it refused the request for that.
    let unreadable = |outcome| {
        let mut scene = Scene::sound();
        scene.spoke[2] = arrival("b", 2, outcome);
        if let Entry::Arrival { residency, .. } = &mut scene.spoke[2] {
            *residency = "no policy at all".into();
        }
        scene.report()
    };
    let report = unreadable(INVALID_HEADER);
    assert_eq!((kinds(&report), report.refused), (vec![(Kind::PoliciesDiffer, 1)], 1), "{report:#?}");
    assert_eq!(report.verdict, Verdict::NotProven, "the two ends do not agree, and nothing was violated");
    let report = unreadable("ok");
    assert_eq!(report.verdict, Verdict::Violated, "it was taken: {report:#?}");
    // In a region that may see it, a header that cannot be read is an error like any other.
    let mut scene = Scene::sound();
    scene.spoke[2] = arrival("b", 2, INVALID_HEADER);
    assert_eq!(scene.report().refused, 0);
}

#[test]
fn requests_that_were_rejected_for_want_of_a_receipt_are_counted_and_no_finding() {
    let mut scene = required();
    scene.edge.insert(4, Entry::Rejected { requests: 7, since_ms: 2_500, at_ms: 2_600 });
    let report = scene.report();
    assert!(report.holds && report.rejected == 7, "{report:#?}");
}

#[test]
fn a_filter_judges_what_it_selects_and_checks_every_chain() {
    let with = |filter: Filter, change: &dyn Fn(&mut Scene)| {
        let mut scene = Scene::sound();
        change(&mut scene);
        scene.demands.filter = filter;
        scene.report()
    };
    let of = |tenant: Option<&str>, deployment: Option<&str>| Filter {
        tenant: tenant.map(str::to_owned),
        deployment: deployment.map(str::to_owned),
        ..Filter::default()
    };
    let window =
        |from_ms, until_ms| Filter { from_ms: Some(from_ms), until_ms: Some(until_ms), ..Filter::default() };
    let violated = |scene: &mut Scene| scene.edge[3] = attempt("b", 1, AMERICA, Ended::Unreachable);
    let keep = |_: &mut Scene| {};

    assert_eq!(with(of(Some("a1"), None), &violated).verdict, Verdict::Violated);
    let other = with(of(Some("a2"), None), &violated);
    assert_eq!((other.verdict, other.attempts, other.confirmed), (Verdict::Holds, 0, 0));
    assert_eq!(with(of(None, Some("docs")), &keep).attempts, 4);
    assert_eq!(with(of(None, Some("other")), &violated).verdict, Verdict::Holds);
    assert_eq!(with(window(2_000, 2_001), &violated).verdict, Verdict::Violated);
    assert_eq!(with(window(2_001, 3_000), &violated).verdict, Verdict::Holds);
    // The attempts are in the window and their arrivals are not: they are pairs all the same.
    let report = with(window(2_000, 2_001), &keep);
    assert_eq!((report.attempts, report.arrivals, report.confirmed), (4, 0, 3), "{report:#?}");
    assert!(report.holds);
    // A policy that is too wide concerns those who were sent under it.
    let wide = |scene: &mut Scene| scene.edge[1] = policy("eu", &[EUROPE, AMERICA]);
    assert_eq!(kinds(&with(of(Some("a1"), None), &wide)), [(Kind::AllowedTooWide, 1)]);
    assert!(with(of(Some("a2"), None), &wide).holds);
    // A gap concerns everybody whose time it is.
    let gap = |scene: &mut Scene| {
        scene.edge.insert(4, Entry::Gap { missing: 7, why: Why::Disk, since_ms: 1_500, at_ms: 1_900 });
    };
    assert_eq!(kinds(&with(of(Some("a2"), None), &gap)), [(Kind::Gap, 1)]);
    assert!(with(window(1_901, 9_000), &gap).holds && !with(window(1_900, 9_000), &gap).holds);
    // No filter hides a chain that was changed.
    let mut scene = Scene::sound();
    scene.demands.filter = of(Some("a2"), None);
    let edge = String::from_utf8(written(&scene.edge).1).expect("text");
    let changed = edge.replacen("\"tenant\":\"a1\"", "\"tenant\":\"a2\"", 1);
    let report = scene.report_of(&[("edge", changed.as_bytes()), ("spoke", &written(&scene.spoke).1)]);
    assert!(report.counts.contains_key(&Kind::BrokenChain), "{report:#?}");
}
