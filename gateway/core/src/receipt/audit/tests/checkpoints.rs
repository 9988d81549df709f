//! Chains that are compared with the last checkpoint.

use super::*;

/// The edge's chain as a file of so many of its entries, with the whole chain of the spoke.
fn audited(scene: &Scene, edge_entries: usize) -> Report {
    let edge = written(&scene.edge[..edge_entries]).1;
    scene.report_of(&[("edge", &edge), ("spoke", &written(&scene.spoke).1)])
}

/// A scene in which nothing but the chains is compared, and the checkpoint after so many entries of the edge.
fn with_checkpoint(edge_entries: usize) -> (Scene, Checkpoint) {
    let mut scene = Scene::sound();
    scene.demands.settle_ms = u64::MAX;
    let first = audited(&scene, edge_entries);
    let checkpoint = Checkpoint::after(None, &first, 10).expect("sound chains");
    scene.demands.checkpoint = Some(checkpoint.clone());
    (scene, checkpoint)
}

#[test]
fn a_chain_that_went_on_holds_and_the_next_checkpoint_follows() {
    let (scene, checkpoint) = with_checkpoint(4);
    assert_eq!((checkpoint.number, checkpoint.chains.len()), (1, 2));
    assert_eq!((checkpoint.chains[1].file, checkpoint.chains[1].line), (1, 4));
    for entries in [4, 5, 7] {
        let report = audited(&scene, entries);
        assert!(report.holds && report.checkpoint == Some(1), "{entries}: {report:#?}");
    }
    let report = audited(&scene, 7);
    let next = Checkpoint::after(Some(&checkpoint), &report, 20).expect("sound chains");
    assert_eq!((next.number, next.at_ms, next.chains[1].line), (2, 20, 7));
    assert!(next.chains[1].closed);
}

#[test]
fn a_chain_that_was_truncated_rewritten_or_removed_is_found() {
    let (scene, checkpoint) = with_checkpoint(4);
    let check = |report: &Report, word: &str| {
        assert_eq!(report.counts.get(&Kind::RolledBack), Some(&1), "{word}: {report:#?}");
        let message =
            &report.findings.iter().find(|found| found.kind == Kind::RolledBack).expect("told").message;
        assert!(message.contains(word), "{message}");
        assert_eq!(report.verdict, Verdict::NotProven);
        assert_eq!(Checkpoint::after(Some(&checkpoint), report, 20), None, "the old one stays");
    };
    check(&audited(&scene, 3), "it was truncated");
    let mut rewritten = Scene::sound();
    rewritten.demands = scene.demands.clone();
    rewritten.edge[3] = attempt("b", 1, EUROPE, Ended::Late);
    check(&audited(&rewritten, 7), "rewritten");
    let spoke = written(&scene.spoke).1;
    check(&scene.report_of(&[("spoke", &spoke)]), "it was removed");
}

#[test]
fn files_of_a_checkpoint_that_were_archived_are_told_by_the_next_file() {
    let (mut scene, checkpoint) = with_checkpoint(7);
    scene.demands.partial = true;
    let (head, _) = written(&scene.edge);
    let spoke = written(&scene.spoke).1;
    let second =
        |before| written(&[file(EDGE, Role::Edge, AMERICA, 2, before), Entry::Closed { at_ms: 9_000 }]).1;
    let sound = scene.report_of(&[("edge", &second(head)), ("spoke", &spoke)]);
    assert!(!sound.counts.contains_key(&Kind::RolledBack), "{sound:#?}");
    let other = scene.report_of(&[("edge", &second(Head::default())), ("spoke", &spoke)]);
    assert_eq!(other.counts.get(&Kind::RolledBack), Some(&1), "{other:#?}");
    // It was closed, so all of it may be archived; what is known of it stays.
    let report = scene.report_of(&[("spoke", &spoke)]);
    assert_eq!(report.counts.get(&Kind::RolledBack), None, "{report:#?}");
    let next = Checkpoint::after(Some(&checkpoint), &report, 20).expect("sound chains");
    assert_eq!(next.chains, checkpoint.chains);
    scene.demands.partial = false;
    assert!(scene.report_of(&[("spoke", &spoke)]).counts.contains_key(&Kind::RolledBack));
}

#[test]
fn receipts_of_version_1_are_read_and_of_a_later_one_than_ours_are_not() {
    let mut scene = Scene::sound();
    let mut versions = |number: u32| {
        for entries in [&mut scene.edge, &mut scene.spoke] {
            if let Entry::File { version, .. } = &mut entries[0] {
                *version = number;
            }
        }
        scene.report()
    };
    assert!(versions(1).holds && versions(2).holds);
    assert_eq!(kinds(&versions(3)), [(Kind::Unreadable, 2)]);
    assert_eq!(kinds(&versions(0)), [(Kind::Unreadable, 2)]);
}
