//! Tests of chains that are compared with the last checkpoint.

use super::*;

/// Audits a file with the first entries of the edge's chain, and the whole chain of the spoke.
fn audited(scenario: &AuditScenario, edge_entries: usize) -> Report {
    let edge = written(&scenario.edge[..edge_entries]).1;
    scenario.report_of(&[("edge", &edge), ("spoke", &written(&scenario.spoke).1)])
}

/// Returns a scenario in which only the chains are compared, and the checkpoint after this number of entries of the
/// edge.
fn with_checkpoint(edge_entries: usize) -> (AuditScenario, AuditCheckpoint) {
    let mut scenario = AuditScenario::valid();
    scenario.options.settle_ms = u64::MAX;
    let first = audited(&scenario, edge_entries);
    let checkpoint = AuditCheckpoint::after(None, &first, 10).expect("sound chains");
    scenario.options.checkpoint = Some(checkpoint.clone());
    (scenario, checkpoint)
}

#[test]
fn a_continued_chain_holds_and_the_next_checkpoint_follows() {
    let (scenario, checkpoint) = with_checkpoint(4);
    assert_eq!((checkpoint.number, checkpoint.chains.len()), (1, 2));
    assert_eq!((checkpoint.chains[1].file, checkpoint.chains[1].line), (1, 4));
    for entries in [4, 5, 7] {
        let report = audited(&scenario, entries);
        assert!(report.holds && report.checkpoint == Some(1), "{entries}: {report:#?}");
    }
    let report = audited(&scenario, 7);
    let next = AuditCheckpoint::after(Some(&checkpoint), &report, 20).expect("sound chains");
    assert_eq!((next.number, next.at_ms, next.chains[1].line), (2, 20, 7));
    assert!(next.chains[1].closed);
}

#[test]
fn a_chain_that_was_truncated_rewritten_or_removed_is_found() {
    let (scenario, checkpoint) = with_checkpoint(4);
    let check = |report: &Report, word: &str| {
        assert_eq!(report.counts.get(&Kind::RolledBack), Some(&1), "{word}: {report:#?}");
        let message =
            &report.findings.iter().find(|found| found.kind == Kind::RolledBack).expect("listed").message;
        assert!(message.contains(word), "{message}");
        assert_eq!(report.verdict, AuditVerdict::NotProven);
        assert_eq!(AuditCheckpoint::after(Some(&checkpoint), report, 20), None, "the old one stays");
    };
    check(&audited(&scenario, 3), "it was truncated");
    let mut rewritten = AuditScenario::valid();
    rewritten.options = scenario.options.clone();
    rewritten.edge[3] = attempt("b", 1, EUROPE, AttemptResult::FirstByteTimeout);
    check(&audited(&rewritten, 7), "rewritten");
    let spoke = written(&scenario.spoke).1;
    check(&scenario.report_of(&[("spoke", &spoke)]), "it was removed");
}

#[test]
fn the_next_file_confirms_a_checkpoint_in_an_archived_one() {
    let (mut scenario, checkpoint) = with_checkpoint(7);
    scenario.options.partial = true;
    let (head, _) = written(&scenario.edge);
    let spoke = written(&scenario.spoke).1;
    let second =
        |before| written(&[file(EDGE, Role::Edge, AMERICA, 2, before), Entry::Closed { at_ms: 9_000 }]).1;
    let valid = scenario.report_of(&[("edge", &second(head)), ("spoke", &spoke)]);
    assert!(!valid.counts.contains_key(&Kind::RolledBack), "{valid:#?}");
    let other = scenario.report_of(&[("edge", &second(ChainHash::default())), ("spoke", &spoke)]);
    assert_eq!(other.counts.get(&Kind::RolledBack), Some(&1), "{other:#?}");
    // It was closed, so all of it may be archived; its head stays in the checkpoint.
    let report = scenario.report_of(&[("spoke", &spoke)]);
    assert_eq!(report.counts.get(&Kind::RolledBack), None, "{report:#?}");
    let next = AuditCheckpoint::after(Some(&checkpoint), &report, 20).expect("sound chains");
    assert_eq!(next.chains, checkpoint.chains);
    scenario.options.partial = false;
    assert!(scenario.report_of(&[("spoke", &spoke)]).counts.contains_key(&Kind::RolledBack));
}

#[test]
fn receipts_of_version_1_are_read_and_of_a_future_version_are_not() {
    let mut scenario = AuditScenario::valid();
    let mut versions = |number: u32| {
        for entries in [&mut scenario.edge, &mut scenario.spoke] {
            if let Entry::File { version, .. } = &mut entries[0] {
                *version = number;
            }
        }
        scenario.report()
    };
    assert!(versions(1).holds && versions(2).holds);
    assert_eq!(kinds(&versions(3)), [(Kind::Unreadable, 2)]);
    assert_eq!(kinds(&versions(0)), [(Kind::Unreadable, 2)]);
}
