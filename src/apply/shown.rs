//! What the hub says, for a person.

use super::replicas;
use scheduler_core::wire::apply::{
    AppliedV1, ChangeKind, ChangeV1, DeploymentReplicasV1, FieldV1, PendingWideningV1, ReaderV1,
    ResidencyChange, RolloutV1,
};
use scheduler_core::wire::plan::{FloorV1, PlanV1, RegionFloorsV1, RowV1, ShareV1, WeightsV1};
use scheduler_core::wire::route::RegionRouteV1;

/// The difference, one line for each field.
pub(super) fn difference(seen: &AppliedV1) -> String {
    let AppliedV1 { version: _, applied: _, base: _, changes, notes } = seen;
    if changes.is_empty() && notes.is_empty() {
        return "nothing changes".to_owned();
    }
    let mut lines = Vec::new();
    for ChangeV1 { kind, name, change, fields } in changes {
        let word = match change {
            ChangeKind::Added => "added",
            ChangeKind::Changed => "changed",
            ChangeKind::Removed => "removed",
        };
        lines.push(format!("{} {name}: {word}", kind.as_str()));
        lines.extend(fields.iter().map(|field| format!("  {}", one(field))));
    }
    lines.extend(notes.iter().map(|note| format!("note: {note}")));
    lines.join("\n")
}

fn one(FieldV1 { field, before, after, residency_change }: &FieldV1) -> String {
    let value = match (before, after) {
        (Some(before), Some(after)) => format!("{before} -> {after}"),
        (Some(before), None) => format!("- {before}"),
        (None, Some(after)) => format!("+ {after}"),
        (None, None) => String::new(),
    };
    let effect = match residency_change {
        None => "",
        Some(ResidencyChange::Narrows) => "  (narrows: at once)",
        Some(ResidencyChange::Widens) => "  (widens: when everybody has heard of it)",
        Some(ResidencyChange::NarrowsAndWidens) => {
            "  (narrows at once, and widens when everybody has heard of it)"
        }
        Some(ResidencyChange::Rewords) => "  (the same regions)",
    };
    format!("{field:<10} {value}{effect}")
}

/// The regions of the route table, with the replicas that do not run what their deployment is served with.
pub(super) fn regions(regions: &[RegionRouteV1], replicas: &[DeploymentReplicasV1]) -> String {
    let mut lines = vec![format!("{:<28} {:<22} ready", "region", "endpoint")];
    for RegionRouteV1 { id, endpoint, deployments, .. } in regions {
        lines.push(format!("{id:<28} {endpoint:<22} {}", deployments.join(", ")));
        lines.extend(replicas::mismatches(id, replicas).map(|line| format!("  {line}")));
    }
    lines.join("\n")
}

/// How what is asked for is divided, and how many replicas are kept for the loss of a region.
pub(super) fn plan(plan: &PlanV1) -> String {
    let PlanV1 { version: _, weights, floors } = plan;
    let mut lines = Vec::new();
    for WeightsV1 { epoch, generation, gateway, rows, version: _ } in weights {
        lines.push(format!("gateways at {gateway}, plan {epoch}.{generation}"));
        for RowV1 { deployment, residency, origin, shares } in rows {
            let policy = residency.as_deref().unwrap_or("anywhere");
            lines.push(format!("  {deployment} ({policy}) from {origin}"));
            let line = |ShareV1 { region, permille, reason }: &ShareV1| {
                format!("    {region:<28} {:>5.1} %  {reason}", f64::from(*permille) / 10.0)
            };
            lines.extend(shares.iter().map(line));
        }
    }
    let kept = floors.iter().flat_map(|RegionFloorsV1 { region, floors, .. }| {
        floors.iter().map(move |FloorV1 { name, replicas }| format!("floor {region:<28} {name}: {replicas}"))
    });
    lines.extend(kept);
    if lines.is_empty() {
        lines.push("no plan has been made: gateways ask the nearest region".to_owned());
    }
    lines.join("\n")
}

/// What is waited for.
pub(super) fn rollout(rollout: &RolloutV1) -> String {
    let RolloutV1 { version: _, generation, pending, readers, deployments } = rollout;
    let mut lines = vec![format!("route table {generation}, {} readers", readers.len())];
    lines.extend(deployments.iter().flat_map(replicas::of));
    if pending.is_empty() && deployments.iter().all(|known| known.next.is_none()) {
        lines.push("nothing waits: what was applied is so everywhere".to_owned());
    }
    for PendingWideningV1 { kind, name, residency, to, since, outdated_readers } in pending {
        lines.push(format!("{} {name}: {residency} -> {to}, announced by table {since}", kind.as_str()));
        if outdated_readers.is_empty() {
            lines.push("  everybody who is known has heard of it".to_owned());
        }
        let runs = |reader: &String| {
            let known = readers.iter().find(|known| known.reader == *reader);
            known.map(|ReaderV1 { generation, .. }| format!(" runs {generation}")).unwrap_or_default()
        };
        lines.extend(outdated_readers.iter().map(|reader| format!("  waits for {reader}{}", runs(reader))));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_person_reads_what_changes_and_what_that_means_for_the_policy() {
        let seen = json!({"version": 1, "applied": false, "base": 7, "notes": ["look"], "changes": [
            {"name": "a", "change": "changed", "fields": [
                {"field": "residency", "before": "eu", "after": "anywhere", "residency_change": "widens"},
                {"field": "regions", "before": "aws/eu-central-1", "after": null, "residency_change": null}]},
            {"name": "b", "change": "added", "fields": [{"field": "task", "before": null, "after": "embed", "residency_change": null}]},
        ]});
        let expected = "deployment a: changed\n  residency  eu -> anywhere  (widens: when everybody has heard of it)\n  \
                        regions    - aws/eu-central-1\ndeployment b: added\n  task       + embed\nnote: look";
        assert_eq!(difference(&serde_json::from_value(seen).expect("an answer")), expected);
        let nothing = json!({"version": 1, "applied": false, "base": 7, "notes": [], "changes": []});
        assert_eq!(difference(&serde_json::from_value(nothing).expect("an answer")), "nothing changes");
    }

    #[test]
    fn a_person_reads_where_requests_go_and_why() {
        let share = |region: &str, permille: u16, why: &str| json!({"region": region, "permille": permille, "reason": why});
        let row = json!({"deployment": "a", "residency": null, "origin": "aws/us-east-1",
                         "shares": [share("aws/us-east-1", 875, "nearest"), share("aws/us-west-2", 125, "room")]});
        let said = json!({"version": 1, "weights": [{"version": 1, "epoch": 1, "generation": 9, "gateway": "aws/us-east-1",
                          "rows": [row]}],
                          "floors": [{"version": 1, "epoch": 1, "generation": 9, "region": "aws/us-west-2",
                          "floors": [{"name": "a", "replicas": 2}]}]});
        let text = plan(&serde_json::from_value(said).expect("an answer"));
        for line in [
            "gateways at aws/us-east-1, plan 1.9",
            "  a (anywhere) from aws/us-east-1",
            " 87.5 %  nearest",
            " a: 2",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
        let none: PlanV1 =
            serde_json::from_value(json!({"version": 1, "weights": [], "floors": []})).expect("none");
        assert!(plan(&none).contains("no plan"));
    }

    #[test]
    fn a_person_reads_who_is_waited_for() {
        let reader = "gateway/aws/us-east-1/00000000000000ff";
        let said = json!({"version": 1, "generation": "1.9", "readers": [{"version": 1, "reader": reader, "generation": "1.7"}],
                          "pending": [{"name": "a", "residency": "eu", "to": "eu,us", "since": "1.8", "outdated_readers": [reader]}]});
        let text = rollout(&serde_json::from_value(said).expect("an answer"));
        for line in
            ["deployment a: eu -> eu,us, announced by table 1.8", &format!("  waits for {reader} runs 1.7")]
        {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }
}
