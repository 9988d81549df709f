//! Placements as `meridian get plan` shows them: every candidate with its price and the reason.

use super::fleet::{StagedPlacement, stage_one};
use super::{Eligible, Fleet, PlacementVerdict};
use regions::{Deployment, RegionIndex, RouteTable};
use scheduler_api::plan::{CandidateStateV1, PlacementCandidateV1, PlacementDecisionV1};

/// Returns the placement of each of these deployments that states one.
pub fn report<'a>(
    desired: impl IntoIterator<Item = &'a Deployment>,
    last: &RouteTable,
    fleet: &Fleet<'_>,
) -> Vec<PlacementDecisionV1> {
    let each = desired.into_iter().filter_map(|deployment| {
        let placement = deployment.placement.as_ref()?;
        let staged = stage_one(deployment, placement, last.deployments.get(&deployment.name), fleet);
        let StagedPlacement { decision, leaving } = &staged;
        let cost = decision.cost.filter(|cost| cost.unpriced == 0);
        let regions = decision
            .verdicts
            .iter()
            .map(|(index, verdict)| candidate(*index, verdict, leaving.contains(*index), fleet));
        Some(PlacementDecisionV1 {
            deployment: deployment.name.to_string(),
            infeasible: decision.infeasible.as_ref().map(|why| format!("{}: {why}", why.key())),
            cost_millionths: cost.map(|cost| cost.millionths),
            max_cost_millionths: placement.max_cost,
            regions: regions.collect(),
        })
    });
    each.collect()
}

fn candidate(
    index: RegionIndex,
    verdict: &PlacementVerdict,
    is_leaving: bool,
    fleet: &Fleet<'_>,
) -> PlacementCandidateV1 {
    let (state, eligible, reason) = match verdict {
        PlacementVerdict::Chosen(eligible) => {
            (CandidateStateV1::Chosen, Some(eligible), "in the cheapest feasible set".to_owned())
        }
        PlacementVerdict::Kept => {
            (CandidateStateV1::Kept, None, "runs it now, and no set of regions is feasible".to_owned())
        }
        PlacementVerdict::NotNeeded(eligible) => {
            (CandidateStateV1::NotNeeded, Some(eligible), "eligible; the chosen set is cheaper".to_owned())
        }
        PlacementVerdict::Rejected(rejection) => (CandidateStateV1::Rejected, None, rejection.to_string()),
    };
    let (state, reason) = match is_leaving {
        true => (CandidateStateV1::Leaving, format!("until the chosen regions are ready; {reason}")),
        false => (state, reason),
    };
    let accelerator = eligible.and_then(|Eligible { accelerator, .. }| accelerator.as_ref());
    PlacementCandidateV1 {
        region: fleet.catalogue.region(index).id.to_string(),
        state,
        accelerator: accelerator.map(ToString::to_string),
        price_millionths: eligible.and_then(|eligible| eligible.price),
        replicas_max: eligible.map(|eligible| eligible.capacity),
        reason,
    }
}
