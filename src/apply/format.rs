//! Text output of the hub's responses.

use super::{replicas, wait};
use regions::accelerator::millionths_to_text;
use scheduler_api::apply::{
    AppliedV1, ChangeKind, ChangeV1, DeploymentReplicasV1, DeploymentStatusV1, FieldV1, PendingWideningV1,
    ReaderV1, ResidencyChange, RolloutStatus, RolloutV1,
};
use scheduler_api::plan::{
    AllSharesV1, FloorV1, PlacementCandidateV1, PlacementDecisionV1, PlanV1, RegionFloorsV1, RowV1, ShareV1,
    TenantShareV1, TenantSharesV1, WeightsV1,
};
use scheduler_api::route::{InstanceRouteV1, RegionRouteV1};

/// Formats the changes, one line per field.
pub(super) fn difference(applied: &AppliedV1) -> String {
    let AppliedV1 { version: _, applied: _, base: _, changes, notes } = applied;
    if changes.is_empty() && notes.is_empty() {
        return "no changes".to_owned();
    }
    let mut lines = Vec::new();
    for ChangeV1 { kind, name, change, fields } in changes {
        let verb = match change {
            ChangeKind::Added => "added",
            ChangeKind::Changed => "changed",
            ChangeKind::Removed => "removed",
            ChangeKind::Other => "another change, which only the version of the hub knows",
        };
        lines.push(format!("{} {name}: {verb}", kind.as_str()));
        lines.extend(fields.iter().map(|field| format!("  {}", format_field(field))));
    }
    lines.extend(notes.iter().map(|note| format!("note: {note}")));
    lines.join("\n")
}

/// Formats the shares of the gateways in percent, one line per gateway and tenant.
pub(super) fn shares(shares: &AllSharesV1) -> String {
    if shares.gateways.is_empty() {
        return "no gateway shares the limits of tenants".to_owned();
    }
    let percent = |millionths: u32| format!("{:.1} %", f64::from(millionths) / 10_000.0);
    let mut lines = Vec::new();
    for TenantSharesV1 { epoch, generation, gateway, instance, default, tenants, .. } in &shares.gateways {
        let every = percent(*default);
        lines.push(format!(
            "{gateway} {instance:016x}: {every} of each limit (generation {epoch}.{generation})"
        ));
        for TenantShareV1 { tenant, requests, inputs, tokens, since: _ } in tenants {
            let [requests, inputs, tokens] = [requests, inputs, tokens].map(|share| percent(*share));
            lines.push(format!("  {tenant}: requests {requests}, inputs {inputs}, tokens {tokens}"));
        }
    }
    lines.join("\n")
}

fn format_field(FieldV1 { field, before, after, residency_change }: &FieldV1) -> String {
    let value = match (before, after) {
        (Some(before), Some(after)) => format!("{before} -> {after}"),
        (Some(before), None) => format!("- {before}"),
        (None, Some(after)) => format!("+ {after}"),
        (None, None) => String::new(),
    };
    let effect = match residency_change {
        None => "",
        Some(ResidencyChange::Narrows) => "  (narrows: effective immediately)",
        Some(ResidencyChange::Widens) => {
            "  (widens: effective when all gateways and spokes have the new table)"
        }
        Some(ResidencyChange::NarrowsAndWidens) => {
            "  (narrows immediately, and widens when all gateways and spokes have the new table)"
        }
        Some(ResidencyChange::Rewords) => "  (the same regions)",
        Some(ResidencyChange::Other) => "  (an effect that only the version of the hub knows)",
    };
    format!("{field:<10} {value}{effect}")
}

/// Formats the regions of the route table, with the models that they cannot start, and the replicas that run another model than
/// their deployment.
pub(super) fn regions(regions: &[RegionRouteV1], replicas: &[DeploymentReplicasV1]) -> String {
    let mut lines = vec![format!("{:<28} {:<16} {:<22} ready", "region", "instance", "endpoint")];
    for RegionRouteV1 { id, instances, deployments, .. } in regions {
        // The spokes of a region serve the same deployments, which are in the line of the first.
        let mut region = (id.as_str(), deployments.join(", "));
        for InstanceRouteV1 { name, endpoint } in instances {
            let (id, ready) = std::mem::take(&mut region);
            lines.push(format!("{id:<28} {name:<16} {endpoint:<22} {ready}").trim_end().to_owned());
        }
        lines.extend(replicas::failures(id, replicas).map(|line| format!("  {line}")));
        lines.extend(replicas::mismatches(id, replicas).map(|line| format!("  {line}")));
    }
    lines.join("\n")
}

/// Formats the traffic shares, the replicas that are reserved for the loss of a region, and the placements.
pub(super) fn plan(plan: &PlanV1) -> String {
    let PlanV1 { version: _, weights, floors, placements } = plan;
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
    let reserved = floors.iter().flat_map(|RegionFloorsV1 { region, floors, .. }| {
        floors.iter().map(move |FloorV1 { name, replicas }| format!("floor {region:<28} {name}: {replicas}"))
    });
    lines.extend(reserved);
    if lines.is_empty() {
        lines.push("no plan yet: gateways send requests to the nearest region".to_owned());
    }
    lines.extend(placements.iter().flat_map(placement));
    lines.join("\n")
}

/// Formats the placement of a deployment: its cost, and each candidate with price and reason.
fn placement(decision: &PlacementDecisionV1) -> Vec<String> {
    let PlacementDecisionV1 { deployment, infeasible, cost_millionths, max_cost_millionths, regions } =
        decision;
    let state = match (infeasible, cost_millionths, max_cost_millionths) {
        (Some(infeasible), ..) => format!("infeasible: {infeasible}"),
        (None, Some(cost), None) => format!("{} per hour", millionths_to_text(*cost)),
        (None, Some(cost), Some(max)) => {
            format!("{} per hour of at most {}", millionths_to_text(*cost), millionths_to_text(*max))
        }
        (None, None, _) => "the price of a region is unknown".to_owned(),
    };
    let mut lines = vec![
        format!("placement of {deployment}: {state}"),
        format!(
            "  {:<28} {:<12} {:<12} {:>9} {:>8}  reason",
            "region", "state", "accelerator", "price", "replicas"
        ),
    ];
    for PlacementCandidateV1 { region, state, accelerator, price_millionths, replicas_max, reason } in regions
    {
        let price = price_millionths.map_or_else(|| "-".to_owned(), millionths_to_text);
        let replicas = replicas_max.map_or_else(|| "-".to_owned(), |replicas| replicas.to_string());
        let (state, accelerator) = (state.as_str(), accelerator.as_deref().unwrap_or("-"));
        lines
            .push(format!("  {region:<28} {state:<12} {accelerator:<12} {price:>9} {replicas:>8}  {reason}"));
    }
    lines
}

/// Formats the state of the rollout. `statuses` are those of the applied deployments, as far as the hub reports them.
pub(super) fn rollout(rollout: &RolloutV1, statuses: &[DeploymentStatusV1]) -> String {
    let RolloutV1 { version: _, generation, pending, readers, deployments } = rollout;
    let mut lines = vec![format!("route table {generation}, {} readers", readers.len())];
    lines.extend(deployments.iter().flat_map(replicas::format_deployment));
    let mut regions = deployments.iter().flat_map(|known| &known.regions);
    let has_failed = regions.any(|region| region.failed.is_some());
    if pending.is_empty() && !has_failed && deployments.iter().all(|known| known.next.is_none()) {
        let is_complete = statuses.iter().all(|status| status.status == RolloutStatus::Ready);
        lines.push(match is_complete {
            true => "rollout complete: all processes have the applied state".to_owned(),
            false => "all processes have the applied state, but not all deployments are ready".to_owned(),
        });
    }
    lines.extend(statuses.iter().filter_map(wait::pending).map(|line| format!("Pending: {line}")));
    for PendingWideningV1 { kind, name, residency, to, since, outdated_readers } in pending {
        lines.push(format!("{} {name}: {residency} -> {to}, announced by table {since}", kind.as_str()));
        if outdated_readers.is_empty() {
            lines.push("  all known processes have the new table".to_owned());
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
    fn the_text_shows_the_changes_and_their_effect_on_residency() {
        let applied = json!({"version": 1, "applied": false, "base": 7, "notes": ["look"], "changes": [
            {"name": "a", "change": "changed", "fields": [
                {"field": "residency", "before": "eu", "after": "anywhere", "residency_change": "widens"},
                {"field": "regions", "before": "aws/eu-central-1", "after": null, "residency_change": null}]},
            {"name": "b", "change": "added", "fields": [{"field": "task", "before": null, "after": "embed", "residency_change": null}]},
        ]});
        let expected = "deployment a: changed\n  residency  eu -> anywhere  (widens: effective when all gateways and spokes have the new table)\n  \
                        regions    - aws/eu-central-1\ndeployment b: added\n  task       + embed\nnote: look";
        assert_eq!(difference(&serde_json::from_value(applied).expect("a response")), expected);
        let unchanged = json!({"version": 1, "applied": false, "base": 7, "notes": [], "changes": []});
        assert_eq!(difference(&serde_json::from_value(unchanged).expect("a response")), "no changes");
    }

    #[test]
    fn the_text_shows_the_traffic_shares_with_reasons() {
        let share = |region: &str, permille: u16, reason: &str| json!({"region": region, "permille": permille, "reason": reason});
        let row = json!({"deployment": "a", "residency": null, "origin": "aws/us-east-1",
                         "shares": [share("aws/us-east-1", 875, "nearest"), share("aws/us-west-2", 125, "room")]});
        let response = json!({"version": 1, "weights": [{"version": 1, "epoch": 1, "generation": 9, "gateway": "aws/us-east-1",
                          "rows": [row]}],
                          "floors": [{"version": 1, "epoch": 1, "generation": 9, "region": "aws/us-west-2",
                          "floors": [{"name": "a", "replicas": 2}]}]});
        let text = plan(&serde_json::from_value(response).expect("a response"));
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
    fn the_text_shows_the_candidates_of_a_placement_with_price_and_reason() {
        let row = |region: &str, state: &str, price: Option<u64>, reason: &str| {
            json!({"region": region, "state": state, "accelerator": price.map(|_| "l4"), "price_millionths": price,
                   "replicas_max": price.map(|_| 4), "reason": reason})
        };
        let response = json!({"version": 1, "weights": [], "floors": [], "placements": [
            {"deployment": "a", "cost_millionths": 1_410_000, "max_cost_millionths": 3_000_000, "regions": [
                row("gcp/us-central1", "chosen", Some(710_000), "in the cheapest feasible set"),
                row("gcp/us-west8", "some_day", None, "it is being drained")]},
            {"deployment": "b", "infeasible": "min_regions: 0 of 2 regions", "regions": []},
        ]});
        let text = plan(&serde_json::from_value(response).expect("a response"));
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[1].join(" "), "placement of a: 1.41 per hour of at most 3");
        assert_eq!(words[3][..5], ["gcp/us-central1", "chosen", "l4", "0.71", "4"]);
        assert_eq!(words[4][..5], ["gcp/us-west8", "unknown", "-", "-", "-"]);
        assert!(
            text.ends_with(" reason")
                && text.contains("placement of b: infeasible: min_regions: 0 of 2 regions")
        );
    }

    #[test]
    fn the_text_shows_the_processes_that_a_rollout_waits_for() {
        let reader = "gateway/aws/us-east-1/00000000000000ff";
        let response = json!({"version": 1, "generation": "1.9", "readers": [{"version": 1, "reader": reader, "generation": "1.7"}],
                          "pending": [{"name": "a", "residency": "eu", "to": "eu,us", "since": "1.8", "outdated_readers": [reader]}]});
        let text = rollout(&serde_json::from_value(response).expect("a response"), &[]);
        for line in
            ["deployment a: eu -> eu,us, announced by table 1.8", &format!("  waits for {reader} runs 1.7")]
        {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }

    #[test]
    fn a_rollout_is_complete_when_all_deployments_are_ready() {
        let response = json!({"version": 1, "generation": "1.9", "readers": [], "pending": []});
        let response: RolloutV1 = serde_json::from_value(response).expect("a response");
        let text = |statuses: serde_json::Value| {
            rollout(
                &response,
                &serde_json::from_value::<Vec<DeploymentStatusV1>>(statuses).expect("statuses"),
            )
        };
        let ready = json!({"name": "a", "status": "Ready", "regions": []});
        let complete = "rollout complete: all processes have the applied state";
        assert!(text(json!([])).ends_with(complete), "a hub that reports no status");
        assert!(text(json!([ready])).ends_with(complete));
        let region = json!({"region": "aws/us-east-1", "status": "Pending", "waiting": "no free device: 2 of 2 in use"});
        let pending = json!({"name": "b", "status": "Pending", "regions": [region]});
        let text = text(json!([ready, pending]));
        let line = "Pending: b: not ready in aws/us-east-1 (no free device: 2 of 2 in use)";
        assert!(!text.contains("rollout complete") && text.ends_with(line), "{text}");
    }

    #[test]
    fn the_spokes_of_a_region_are_listed_with_their_addresses() {
        let spoke = |name: &str, port: u16| json!({"name": name, "endpoint": format!("10.0.0.1:{port}")});
        let routes = json!([{"id": "aws/us-east-1", "instances": [spoke("a", 1), spoke("b", 2)], "deployments": ["m"]}]);
        let routes: Vec<RegionRouteV1> = serde_json::from_value(routes).expect("routes");
        let text = regions(&routes, &[]);
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[1], ["aws/us-east-1", "a", "10.0.0.1:1", "m"]);
        assert_eq!(words[2], ["b", "10.0.0.1:2"]);
    }
}
