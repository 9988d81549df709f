//! Tests of the audit: a sound pair of chains, and violations of each property.

mod checkpoints;
mod keys;
mod outcomes;

use super::*;
use crate::labels::{AttemptResult, INVALID_HEADER, NOT_RESIDENT_HERE};
use crate::receipt::entry::GapReason;
use crate::receipt::{AttemptKey, ReceiptContent};
use std::borrow::Cow;

const EDGE: &str = "0e";
const SPOKE: &str = "05";
const EUROPE: &str = "gcp/europe-west4";
const AMERICA: &str = "aws/us-east-1";

fn file(
    chain: &'static str,
    role: Role,
    region: &'static str,
    number: u32,
    before: ChainHash,
) -> Entry<'static> {
    Entry::File {
        version: VERSION,
        chain: chain.into(),
        role,
        region: region.into(),
        number,
        before: before.to_string().into(),
        at_ms: 1_000,
    }
}

fn policy(residency: &'static str, allowed: &[&'static str]) -> Entry<'static> {
    let allowed = allowed.iter().map(|region| Cow::from(*region)).collect();
    Entry::Policy { policy: 1, residency: residency.into(), allowed }
}

fn attempt(request: &'static str, number: u32, region: &'static str, end: AttemptResult) -> Entry<'static> {
    let content = ReceiptContent {
        chain: EDGE,
        request,
        attempt: number,
        region,
        residency: "eu",
        at_ms: 2_000,
        key: None,
    };
    Entry::Attempt {
        id: content.id().to_string().into(),
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

/// Valid entries of an edge and of a region.
struct AuditScenario {
    edge: Vec<Entry<'static>>,
    spoke: Vec<Entry<'static>>,
    options: AuditOptions,
}

impl AuditScenario {
    fn valid() -> AuditScenario {
        AuditScenario {
            edge: vec![
                file(EDGE, Role::Edge, AMERICA, 1, ChainHash::default()),
                policy("eu", &[EUROPE, "aws/eu-central-1"]),
                attempt("a", 1, EUROPE, AttemptResult::Ok),
                attempt("b", 1, EUROPE, AttemptResult::Unreachable),
                attempt("b", 2, EUROPE, AttemptResult::Declined),
                attempt("b", 3, EUROPE, AttemptResult::Cancelled),
                Entry::Closed { at_ms: 3_000 },
            ],
            spoke: vec![
                file(SPOKE, Role::Spoke, EUROPE, 1, ChainHash::default()),
                arrival("a", 1, "ok"),
                arrival("b", 2, "not_ready"),
                arrival("b", 3, "client_gone"),
                Entry::Closed { at_ms: 3_000 },
            ],
            options: AuditOptions::default(),
        }
    }

    fn report(&self) -> Report {
        self.report_of(&[("edge", &written(&self.edge).1), ("spoke", &written(&self.spoke).1)])
    }

    fn report_of(&self, files: &[(&str, &[u8])]) -> Report {
        let catalogue = Catalogue::builtin();
        let mut audit = Audit::new(&catalogue, self.options.clone());
        files.iter().for_each(|(name, content)| audit.file(name, content));
        audit.finish()
    }
}

/// Returns a file of these entries, and its head.
fn written(entries: &[Entry<'_>]) -> (ChainHash, Vec<u8>) {
    let mut content = Vec::new();
    let mut head: ChainHash = match &entries[0] {
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
    let report = AuditScenario::valid().report();
    assert!(report.holds, "{report:#?}");
    assert_eq!((report.attempts, report.arrivals, report.confirmed, report.never_arrived), (4, 3, 3, 1));
    assert!(report.both_ends && report.chains.iter().all(|chain| chain.closed), "{report:#?}");
}

/// Files that were written before policies, regions and results of attempts had their present names.
#[test]
fn receipts_with_the_former_names_hold() {
    let former = |entries: &[Entry<'_>]| {
        let mut content = Vec::new();
        let mut head = ChainHash::default();
        for entry in entries {
            let mut text = serde_json::to_string(entry).expect("an entry serialises to JSON");
            if matches!(entry, Entry::File { .. }) {
                text = text.replace("\"region\":", "\"place\":");
            }
            for (name, former) in [
                ("\"kind\":\"policy\"", "\"kind\":\"law\""),
                ("\"policy\":", "\"law\":"),
                ("\"end\":\"declined\"", "\"end\":\"elsewhere\""),
                ("\"end\":\"cancelled\"", "\"end\":\"abandoned\""),
            ] {
                text = text.replace(name, former);
            }
            head = head.after(text.as_bytes());
            content.extend_from_slice(format!("{head} {text}\n").as_bytes());
        }
        content
    };
    let scenario = AuditScenario::valid();
    let (edge, spoke) = (former(&scenario.edge), former(&scenario.spoke));
    let has = |name: &str| String::from_utf8_lossy(&edge).contains(name);
    assert!(
        ["\"kind\":\"law\"", "\"law\":1", "\"place\":", "\"elsewhere\"", "\"abandoned\""]
            .into_iter()
            .all(has)
    );
    let report = scenario.report_of(&[("edge", &edge), ("spoke", &spoke)]);
    assert!(report.holds, "{report:#?}");
    assert_eq!((report.attempts, report.arrivals, report.confirmed, report.never_arrived), (4, 3, 3, 1));
}

#[test]
fn each_violation_is_found_with_its_kind() {
    let check = |violation: &str, break_it: &dyn Fn(&mut AuditScenario), expected: &[(Kind, u64)]| {
        let mut scenario = AuditScenario::valid();
        break_it(&mut scenario);
        let report = scenario.report();
        assert_eq!(kinds(&report), expected, "{violation}: {report:#?}");
        assert!(
            !report.holds
                && report.findings.len() == expected.iter().map(|(_, n)| *n as usize).sum::<usize>()
        );
    };
    check(
        "a request is sent outside of its allowed set",
        &|scenario| scenario.edge[3] = attempt("b", 1, AMERICA, AttemptResult::Unreachable),
        &[(Kind::ResidencyViolation, 1)],
    );
    check(
        "the allowed set is made wider than the policy",
        &|scenario| {
            scenario.edge[1] = policy("eu", &[EUROPE, AMERICA]);
            scenario.edge[3] = attempt("b", 1, AMERICA, AttemptResult::Unreachable);
        },
        &[(Kind::AllowedTooWide, 1)],
    );
    check(
        "an unknown region is allowed",
        &|scenario| scenario.edge[1] = policy("eu", &[EUROPE, "aws/atlantis"]),
        &[(Kind::AllowedTooWide, 1)],
    );
    check(
        "a policy is invalid",
        &|scenario| scenario.edge.insert(1, policy("", &[])),
        &[(Kind::Unreadable, 1)],
    );
    check(
        "an attempt has an undefined policy",
        &|scenario| drop(scenario.edge.remove(1)),
        &[(Kind::ArrivalWithoutAttempt, 3), (Kind::Unreadable, 4)],
    );
    check(
        "an attempt is missing",
        &|scenario| drop(scenario.edge.remove(5)),
        &[(Kind::ArrivalWithoutAttempt, 1)],
    );
    check(
        "an arrival is missing",
        &|scenario| drop(scenario.spoke.remove(2)),
        &[(Kind::AttemptWithoutArrival, 1)],
    );
    check(
        "a request arrives twice and was sent once",
        &|scenario| scenario.spoke.insert(2, arrival("a", 1, "ok")),
        &[(Kind::ArrivalWithoutAttempt, 1)],
    );
    check(
        "a region accepts a request that it must not see",
        &|scenario| scenario.spoke[0] = file(SPOKE, Role::Spoke, AMERICA, 1, ChainHash::default()),
        &[(Kind::ResidencyViolation, 3), (Kind::ArrivalWithoutAttempt, 3), (Kind::AttemptWithoutArrival, 2)],
    );
    check(
        "the two ends have different policies",
        &|scenario| {
            if let Entry::Arrival { residency, .. } = &mut scenario.spoke[1] {
                *residency = "anywhere".into();
            }
        },
        &[(Kind::PoliciesDiffer, 1)],
    );
    check(
        "the content of a receipt does not match its identifier",
        &|scenario| {
            if let Entry::Attempt { at_ms, .. } = &mut scenario.edge[2] {
                *at_ms += 1;
            }
        },
        &[(Kind::WrongReceiptId, 1)],
    );
    check(
        "a result is invalid",
        &|scenario| {
            if let Entry::Attempt { end, .. } = &mut scenario.edge[3] {
                *end = "whim".into();
            }
        },
        &[(Kind::Unreadable, 1)],
    );
    check(
        "receipts were lost",
        &|scenario| {
            let gap = Entry::Gap { missing: 7, reason: GapReason::QueueFull, since_ms: 1, at_ms: 2 };
            scenario.edge.insert(4, gap);
        },
        &[(Kind::Gap, 1)],
    );
    check(
        "a writer died",
        &|scenario| scenario.spoke.insert(3, Entry::Resumed { at_ms: 5, clean: false, torn_bytes: 9 }),
        &[(Kind::UncleanEnd, 1)],
    );
    check(
        "a recorded head is missing",
        &|scenario| assert!(scenario.options.heads.insert("ab".repeat(32).parse().expect("a head"))),
        &[(Kind::UnknownHead, 1)],
    );
    check(
        "a receipt of a client is missing",
        &|scenario| assert!(scenario.options.receipts.insert("ab".repeat(16))),
        &[(Kind::UnknownReceipt, 1)],
    );
}

#[test]
fn a_recorded_head_and_a_held_receipt_are_found() {
    let mut scenario = AuditScenario::valid();
    let (head, _) = written(&scenario.edge[..3]);
    scenario.options.heads.insert(head);
    if let Entry::Attempt { id, .. } = &scenario.edge[2] {
        scenario.options.receipts.insert(id.to_string());
    }
    assert!(scenario.report().holds, "{:#?}", scenario.report());
}

#[test]
fn a_changed_line_is_found_by_its_hash() {
    let scenario = AuditScenario::valid();
    let edge = String::from_utf8(written(&scenario.edge).1).expect("text");
    let spoke = written(&scenario.spoke).1;
    let check = |edge: &str, expected: &[(Kind, u64)]| {
        let report = scenario.report_of(&[("edge", edge.as_bytes()), ("spoke", &spoke)]);
        assert_eq!(kinds(&report), expected, "{report:#?}");
    };
    check(&edge, &[]);
    check(&edge.replacen("\"tenant\":\"a1\"", "\"tenant\":\"a2\"", 1), &[(Kind::BrokenChain, 1)]);
    let without: Vec<_> = edge.lines().filter(|line| !line.contains("unreachable")).collect();
    check(&(without.join("\n") + "\n"), &[(Kind::BrokenChain, 1)]);
    check(&edge.replacen("{\"kind\":\"closed\"", "{\"kind\":\"whim\"", 1), &[(Kind::BrokenChain, 1)]);
    check(&edge.replacen(" {\"kind\":\"closed\"", "-{\"kind\":\"closed\"", 1), &[(Kind::Unreadable, 1)]);
    let lost = [(Kind::ArrivalWithoutAttempt, 3), (Kind::Unreadable, 1)];
    let spoke_open = scenario.report_of(&[("edge", b"nothing\n"), ("spoke", &spoke)]);
    assert_eq!(kinds(&spoke_open), &lost[1..], "receipts of one end cannot be joined");
    assert!(!spoke_open.both_ends);
}

#[test]
fn the_files_of_a_chain_must_be_consecutive() {
    let scenario = AuditScenario::valid();
    let spoke = written(&scenario.spoke).1;
    let (head, first) = written(&scenario.edge[..3]);
    let begin = |number, before| {
        let mut entries = vec![file(EDGE, Role::Edge, AMERICA, number, before), scenario.edge[1].clone()];
        entries.extend_from_slice(&scenario.edge[3..]);
        written(&entries).1
    };
    let check = |files: &[&[u8]], partial: bool, expected: &[Kind]| {
        let scenario = AuditScenario {
            options: AuditOptions { partial, ..AuditOptions::default() },
            ..AuditScenario::valid()
        };
        let mut all: Vec<(&str, &[u8])> = files.iter().map(|content| ("edge", *content)).collect();
        all.push(("spoke", &spoke));
        let report = scenario.report_of(&all);
        assert_eq!(report.counts.keys().copied().collect::<Vec<_>>(), expected, "{report:#?}");
    };
    check(&[&first, &begin(2, head)], false, &[]);
    check(&[&first, &begin(2, ChainHash::default())], false, &[Kind::BrokenChain]);
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
fn a_recent_receipt_without_counterpart_is_no_finding_until_it_is_old_or_all_chains_are_closed() {
    let check = |settle_ms: u64, closed: bool, expected: &[(Kind, u64)], too_young: u64| {
        let mut scenario = AuditScenario::valid();
        scenario.options.settle_ms = settle_ms;
        scenario.spoke.remove(1);
        if !closed {
            scenario.spoke.pop();
            // A later request is the newest one.
            let mut later = arrival("c", 1, "ok");
            if let Entry::Arrival { at_ms, .. } = &mut later {
                *at_ms = 60_000;
            }
            scenario.spoke.push(later);
        }
        let report = scenario.report();
        assert_eq!((kinds(&report), report.too_young), (expected.to_vec(), too_young), "{report:#?}");
    };
    let found = [(Kind::AttemptWithoutArrival, 1)];
    check(60_000, true, &found, 0);
    check(62_996, false, &[], 2);
    check(30_000, false, &found, 1);
}

#[test]
fn an_incomplete_line_is_reported_and_is_no_finding() {
    let scenario = AuditScenario::valid();
    let (edge, mut spoke) = (written(&scenario.edge).1, written(&scenario.spoke).1);
    spoke.extend_from_slice(b"0123");
    let report = scenario.report_of(&[("edge", &edge), ("spoke", &spoke)]);
    assert!(report.holds, "{report:#?}");
    assert_eq!(report.chains.iter().map(|chain| chain.unfinished_bytes).collect::<Vec<_>>(), [4, 0]);
}

#[test]
fn findings_are_listed_up_to_a_limit_and_counted_beyond_it() {
    let mut scenario = AuditScenario::valid();
    let gap = Entry::Gap { missing: 2, reason: GapReason::Disk, since_ms: 1, at_ms: 2 };
    scenario.edge.extend(std::iter::repeat_n(gap, FINDINGS_LISTED_MAX + 1));
    let report = scenario.report();
    assert_eq!(report.findings.len(), FINDINGS_LISTED_MAX);
    assert_eq!(kinds(&report), [(Kind::Gap, FINDINGS_LISTED_MAX as u64 + 1)]);
    assert_eq!(report.missing, 2 * (FINDINGS_LISTED_MAX as u64 + 1));
}
