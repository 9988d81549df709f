//! Placements as `meridian get plan` shows them: every candidate with its price and the reason.

use super::fleet::{StagedPlacement, current_regions, decide, leaving};
use super::{Eligible, Fleet, PlacementVerdict};
use regions::{Deployment, RegionIndex, RegionSet, RouteTable};
use scheduler_api::placements::DecidedPlacements;
use scheduler_api::plan::{CandidateStateV1, PlacementCandidateV1, PlacementDecisionV1};

/// Returns the placement of each of these deployments that states one. The leader's decisions `decided` stay as long as they are
/// feasible: only the leader knows whether the dwell time is over.
pub fn report<'a>(
    desired: impl IntoIterator<Item = &'a Deployment>,
    last: &RouteTable,
    decided: &DecidedPlacements,
    fleet: &Fleet<'_>,
) -> Vec<PlacementDecisionV1> {
    let each = desired.into_iter().filter_map(|deployment| {
        let placement = deployment.placement.as_ref()?;
        let current = current_regions(last.deployments.get(&deployment.name), fleet);
        let dwells_in = decided.get(&deployment.name).map(|decision| fleet.indices(&decision.regions));
        let staged = decide(deployment, placement, current, dwells_in, fleet);
        let decision = &staged.decision;
        let leaving = leaving(deployment, decision.regions, current, fleet);
        let cost = decision.cost.filter(|cost| cost.unpriced == 0);
        let regions = decision
            .verdicts
            .iter()
            .map(|(index, verdict)| candidate(*index, verdict, &staged, leaving, fleet));
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
    StagedPlacement { decision, later, is_held: _ }: &StagedPlacement,
    leaving: RegionSet,
    fleet: &Fleet<'_>,
) -> PlacementCandidateV1 {
    let (state, eligible, reason) = match verdict {
        PlacementVerdict::Chosen(eligible) if !later.is_empty() && !later.contains(index) => {
            let reason = "in a feasible set that was chosen before; stays for the dwell time after a move";
            (CandidateStateV1::Chosen, Some(eligible), reason.to_owned())
        }
        PlacementVerdict::Chosen(eligible) => {
            (CandidateStateV1::Chosen, Some(eligible), "in the cheapest feasible set".to_owned())
        }
        PlacementVerdict::Kept => {
            let reason = match decision.infeasible {
                Some(_) => "runs it now, and no set of regions is feasible",
                None => {
                    "runs it now; the accelerators of a lapsed region are unknown until it registers again"
                }
            };
            (CandidateStateV1::Kept, None, reason.to_owned())
        }
        PlacementVerdict::NotNeeded(eligible) if later.contains(index) => {
            let reason =
                "eligible, and in the cheapest feasible set; chosen after the dwell time since the last move";
            (CandidateStateV1::NotNeeded, Some(eligible), reason.to_owned())
        }
        PlacementVerdict::NotNeeded(eligible) => {
            (CandidateStateV1::NotNeeded, Some(eligible), "eligible; the chosen set is cheaper".to_owned())
        }
        PlacementVerdict::Rejected(rejection) => (CandidateStateV1::Rejected, None, rejection.to_string()),
    };
    let (state, reason) = match leaving.contains(index) {
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
