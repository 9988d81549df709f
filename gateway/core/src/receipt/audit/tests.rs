//! Each property of receipts, held by a sound pair of chains and broken on purpose.

mod checkpoints;
mod keys;
mod outcomes;

use super::*;
use crate::receipt::entry::Why;
use crate::receipt::{AttemptKey, Essence};
use crate::words::{Ended, INVALID_HEADER, NOT_RESIDENT_HERE};
use std::borrow::Cow;

const EDGE: &str = "0e";
const SPOKE: &str = "05";
const EUROPE: &str = "gcp/europe-west4";
const AMERICA: &str = "aws/us-east-1";

fn file(chain: &'static str, role: Role, place: &'static str, number: u32, before: Head) -> Entry<'static> {
    Entry::File {
        version: VERSION,
        chain: chain.into(),
        role,
        place: place.into(),
        number,
        before: before.to_string().into(),
        at_ms: 1_000,
    }
}

fn policy(residency: &'static str, allowed: &[&'static str]) -> Entry<'static> {
    let allowed = allowed.iter().map(|region| Cow::from(*region)).collect();
    Entry::Policy { policy: 1, residency: residency.into(), allowed }
}

fn attempt(request: &'static str, number: u32, region: &'static str, end: Ended) -> Entry<'static> {
    let essence =
        Essence { chain: EDGE, request, attempt: number, region, residency: "eu", at_ms: 2_000, key: None };
    Entry::Attempt {
        id: essence.id().to_string().into(),
        request: request.into(),
        attempt: number,
        tenant: "a1".into(),
        deployment: "docs".into(),
        generation: "1.1".into(),
        policy: 1,
        tls: None,
        region: region.into(),
        at_ms: 2_000,
        took_us: 9_000,
        cause: "first".into(),
        end: end.as_str().into(),
        key: None,
    }
}

fn arrival(request: &'static str, number: u32, outcome: &'static str) -> Entry<'static> {
    Entry::Arrival {
        request: request.into(),
        attempt: number,
        tenant: Some("a1".into()),
        deployment: Some("docs".into()),
        residency: "eu".into(),
        at_ms: 2_001,
        took_us: 5_000,
        outcome: outcome.into(),
        key: None,
    }
}

/// The entries of an edge and of a region, both of which are sound.
struct Scene {
    edge: Vec<Entry<'static>>,
    spoke: Vec<Entry<'static>>,
    demands: Demands,
}

impl Scene {
    fn sound() -> Scene {
        Scene {
            edge: vec![
                file(EDGE, Role::Edge, AMERICA, 1, Head::default()),
                policy("eu", &[EUROPE, "aws/eu-central-1"]),
                attempt("a", 1, EUROPE, Ended::Ok),
                attempt("b", 1, EUROPE, Ended::Unreachable),
                attempt("b", 2, EUROPE, Ended::Elsewhere),
                attempt("b", 3, EUROPE, Ended::Abandoned),
                Entry::Closed { at_ms: 3_000 },
            ],
            spoke: vec![
                file(SPOKE, Role::Spoke, EUROPE, 1, Head::default()),
                arrival("a", 1, "ok"),
                arrival("b", 2, "not_ready"),
                arrival("b", 3, "client_gone"),
                Entry::Closed { at_ms: 3_000 },
            ],
            demands: Demands::default(),
        }
    }

    fn report(&self) -> Report {
        self.report_of(&[("edge", &written(&self.edge).1), ("spoke", &written(&self.spoke).1)])
    }

    fn report_of(&self, files: &[(&str, &[u8])]) -> Report {
        let catalogue = Catalogue::builtin();
        let mut audit = Audit::new(&catalogue, self.demands.clone());
        files.iter().for_each(|(name, content)| audit.file(name, content));
        audit.finish()
    }
}

/// A file of these entries, and its head.
fn written(entries: &[Entry<'_>]) -> (Head, Vec<u8>) {
    let mut content = Vec::new();
    let mut head: Head = match &entries[0] {
        Entry::File { before, .. } => before.parse().expect("a head"),
        other => panic!("{other:?} does not begin a file"),
    };
    entries.iter().for_each(|entry| head.append(entry, &mut content));
    (head, content)
}

fn kinds(report: &Report) -> Vec<(Kind, u64)> {
    report.counts.iter().map(|(kind, n)| (*kind, *n)).collect()
}

#[test]
fn sound_receipts_hold() {
    let report = Scene::sound().report();
    assert!(report.holds, "{report:#?}");
    assert_eq!((report.attempts, report.arrivals, report.confirmed, report.never_arrived), (4, 3, 3, 1));
    assert!(report.both_ends && report.chains.iter().all(|chain| chain.closed), "{report:#?}");
}

#[test]
fn each_property_that_is_broken_is_found_and_named() {
    let check = |story: &str, break_it: &dyn Fn(&mut Scene), expected: &[(Kind, u64)]| {
        let mut scene = Scene::sound();
        break_it(&mut scene);
        let report = scene.report();
        assert_eq!(kinds(&report), expected, "{story}: {report:#?}");
        assert!(
            !report.holds
                && report.findings.len() == expected.iter().map(|(_, n)| *n as usize).sum::<usize>()
        );
    };
    check(
        "a request is sent outside of its allowed set",
        &|scene| scene.edge[3] = attempt("b", 1, AMERICA, Ended::Unreachable),
        &[(Kind::ResidencyViolation, 1)],
    );
    check(
        "the allowed set is made wider than the policy",
        &|scene| {
            scene.edge[1] = policy("eu", &[EUROPE, AMERICA]);
            scene.edge[3] = attempt("b", 1, AMERICA, Ended::Unreachable);
        },
        &[(Kind::AllowedTooWide, 1)],
    );
    check(
        "a region that nobody knows is allowed",
        &|scene| scene.edge[1] = policy("eu", &[EUROPE, "aws/atlantis"]),
        &[(Kind::AllowedTooWide, 1)],
    );
    check("a policy is no policy", &|scene| scene.edge.insert(1, policy("", &[])), &[(Kind::Unreadable, 1)]);
    check(
        "an attempt names no policy",
        &|scene| drop(scene.edge.remove(1)),
        &[(Kind::ArrivalWithoutAttempt, 3), (Kind::Unreadable, 4)],
    );
    check(
        "an attempt is kept from the receipts",
        &|scene| drop(scene.edge.remove(5)),
        &[(Kind::ArrivalWithoutAttempt, 1)],
    );
    check(
        "an arrival is kept from the receipts",
        &|scene| drop(scene.spoke.remove(2)),
        &[(Kind::AttemptWithoutArrival, 1)],
    );
    check(
        "a request arrives twice and was sent once",
        &|scene| scene.spoke.insert(2, arrival("a", 1, "ok")),
        &[(Kind::ArrivalWithoutAttempt, 1)],
    );
    check(
        "a region takes what it must not see",
        &|scene| scene.spoke[0] = file(SPOKE, Role::Spoke, AMERICA, 1, Head::default()),
        &[(Kind::ResidencyViolation, 3), (Kind::ArrivalWithoutAttempt, 3), (Kind::AttemptWithoutArrival, 2)],
    );
    check(
        "the two ends name different policies",
        &|scene| {
            if let Entry::Arrival { residency, .. } = &mut scene.spoke[1] {
                *residency = "anywhere".into();
            }
        },
        &[(Kind::PoliciesDiffer, 1)],
    );
    check(
        "a receipt says something else than its identifier",
        &|scene| {
            if let Entry::Attempt { at_ms, .. } = &mut scene.edge[2] {
                *at_ms += 1;
            }
        },
        &[(Kind::WrongReceiptId, 1)],
    );
    check(
        "an end is no end",
        &|scene| {
            if let Entry::Attempt { end, .. } = &mut scene.edge[3] {
                *end = "whim".into();
            }
        },
        &[(Kind::Unreadable, 1)],
    );
    check(
        "receipts were lost",
        &|scene| {
            let gap = Entry::Gap { missing: 7, why: Why::QueueFull, since_ms: 1, at_ms: 2 };
            scene.edge.insert(4, gap);
        },
        &[(Kind::Gap, 1)],
    );
    check(
        "a writer died",
        &|scene| scene.spoke.insert(3, Entry::Resumed { at_ms: 5, clean: false, torn_bytes: 9 }),
        &[(Kind::UncleanEnd, 1)],
    );
    check(
        "a head that somebody noted is gone",
        &|scene| assert!(scene.demands.heads.insert("ab".repeat(32).parse().expect("a head"))),
        &[(Kind::UnknownHead, 1)],
    );
    check(
        "a receipt that somebody holds is gone",
        &|scene| assert!(scene.demands.receipts.insert("ab".repeat(16))),
        &[(Kind::UnknownReceipt, 1)],
    );
}

#[test]
fn what_somebody_holds_is_found_where_it_is() {
    let mut scene = Scene::sound();
    let (head, _) = written(&scene.edge[..3]);
    scene.demands.heads.insert(head);
    if let Entry::Attempt { id, .. } = &scene.edge[2] {
        scene.demands.receipts.insert(id.to_string());
    }
    assert!(scene.report().holds, "{:#?}", scene.report());
}

#[test]
fn a_line_changed_after_the_fact_is_found_by_its_hash() {
    let scene = Scene::sound();
    let edge = String::from_utf8(written(&scene.edge).1).expect("text");
    let spoke = written(&scene.spoke).1;
    let check = |edge: &str, expected: &[(Kind, u64)]| {
        let report = scene.report_of(&[("edge", edge.as_bytes()), ("spoke", &spoke)]);
        assert_eq!(kinds(&report), expected, "{report:#?}");
    };
    check(&edge, &[]);
    check(&edge.replacen("\"tenant\":\"a1\"", "\"tenant\":\"a2\"", 1), &[(Kind::BrokenChain, 1)]);
    let without: Vec<_> = edge.lines().filter(|line| !line.contains("unreachable")).collect();
    check(&(without.join("\n") + "\n"), &[(Kind::BrokenChain, 1)]);
    check(&edge.replacen("{\"kind\":\"closed\"", "{\"kind\":\"whim\"", 1), &[(Kind::BrokenChain, 1)]);
    check(&edge.replacen(" {\"kind\":\"closed\"", "-{\"kind\":\"closed\"", 1), &[(Kind::Unreadable, 1)]);
    let lost = [(Kind::ArrivalWithoutAttempt, 3), (Kind::Unreadable, 1)];
    let spoke_open = scene.report_of(&[("edge", b"nothing\n"), ("spoke", &spoke)]);
    assert_eq!(kinds(&spoke_open), &lost[1..], "one end alone cannot be joined");
    assert!(!spoke_open.both_ends);
}

#[test]
fn files_of_a_chain_follow_one_another() {
    let scene = Scene::sound();
    let spoke = written(&scene.spoke).1;
    let (head, first) = written(&scene.edge[..3]);
    let begin = |number, before| {
        let mut entries = vec![file(EDGE, Role::Edge, AMERICA, number, before), scene.edge[1].clone()];
        entries.extend_from_slice(&scene.edge[3..]);
        written(&entries).1
    };
    let check = |files: &[&[u8]], partial: bool, expected: &[Kind]| {
        let scene = Scene { demands: Demands { partial, ..Demands::default() }, ..Scene::sound() };
        let mut all: Vec<(&str, &[u8])> = files.iter().map(|content| ("edge", *content)).collect();
        all.push(("spoke", &spoke));
        let report = scene.report_of(&all);
        assert_eq!(report.counts.keys().copied().collect::<Vec<_>>(), expected, "{report:#?}");
    };
    check(&[&first, &begin(2, head)], false, &[]);
    check(&[&first, &begin(2, Head::default())], false, &[Kind::BrokenChain]);
    check(&[&first, &begin(3, head)], false, &[Kind::MissingFile]);
    check(&[&begin(2, head)], false, &[Kind::ArrivalWithoutAttempt, Kind::MissingFile]);
    check(&[&begin(2, head)], true, &[Kind::ArrivalWithoutAttempt]);
    check(
        &[&first[..10], &begin(2, head)],
        false,
        &[Kind::ArrivalWithoutAttempt, Kind::Unreadable, Kind::MissingFile],
    );
}

#[test]
fn what_is_too_young_to_tell_is_no_finding_until_it_is_old_or_everything_is_closed() {
    let check = |settle_ms: u64, closed: bool, expected: &[(Kind, u64)], too_young: u64| {
        let mut scene = Scene::sound();
        scene.demands.settle_ms = settle_ms;
        scene.spoke.remove(1);
        if !closed {
            scene.spoke.pop();
            // Another request, later, is the newest that is known.
            let mut later = arrival("c", 1, "ok");
            if let Entry::Arrival { at_ms, .. } = &mut later {
                *at_ms = 60_000;
            }
            scene.spoke.push(later);
        }
        let report = scene.report();
        assert_eq!((kinds(&report), report.too_young), (expected.to_vec(), too_young), "{report:#?}");
    };
    let found = [(Kind::AttemptWithoutArrival, 1)];
    check(60_000, true, &found, 0);
    check(62_996, false, &[], 2);
    check(30_000, false, &found, 1);
}

#[test]
fn a_line_that_is_not_finished_is_told_and_is_no_finding() {
    let scene = Scene::sound();
    let (edge, mut spoke) = (written(&scene.edge).1, written(&scene.spoke).1);
    spoke.extend_from_slice(b"0123");
    let report = scene.report_of(&[("edge", &edge), ("spoke", &spoke)]);
    assert!(report.holds, "{report:#?}");
    assert_eq!(report.chains.iter().map(|chain| chain.unfinished_bytes).collect::<Vec<_>>(), [4, 0]);
}

#[test]
fn findings_are_told_up_to_a_limit_and_counted_beyond_it() {
    let mut scene = Scene::sound();
    let gap = Entry::Gap { missing: 2, why: Why::Disk, since_ms: 1, at_ms: 2 };
    scene.edge.extend(std::iter::repeat_n(gap, FINDINGS_TOLD_MAX + 1));
    let report = scene.report();
    assert_eq!(report.findings.len(), FINDINGS_TOLD_MAX);
    assert_eq!(kinds(&report), [(Kind::Gap, FINDINGS_TOLD_MAX as u64 + 1)]);
    assert_eq!(report.missing, 2 * (FINDINGS_TOLD_MAX as u64 + 1));
}
