//! Check of placements in files: whether the regions of the catalogue can meet the requirement.
//!
//! Every region of the catalogue counts as one with a spoke, so a placement that is rejected here cannot be met by more
//! spokes. Prices and numbers are those of the catalogue, or at a hub those that spokes have registered.
//!
//! When files are applied, only new and changed deployments are checked: a price that has risen for one deployment must not
//! prevent the change of another. Unchanged ones whose placement is infeasible are named in a note.

use std::collections::BTreeMap;

use super::fleet::{facts, requirement};
use super::{Infeasible, PlacementCandidate, PlacementDecision, PlacementVerdict, SpokeState, choose};
use crate::registry::{RegisteredSpoke, representatives};
use configuration::{ConfigFile, Problem};
use regions::accelerator::millionths_to_text;
use regions::deployment::{parse_deployments_with, read_deployments_with};
use regions::{Accelerators, Catalogue, Deployment, DeploymentName, RegionId, RegionSet};

/// Accelerators that the spokes of regions have registered in place of those of the catalogue.
pub type RegisteredAccelerators = BTreeMap<RegionId, Accelerators>;

/// Returns the accelerators that these spokes have registered.
pub fn registered_accelerators(spokes: &[RegisteredSpoke]) -> RegisteredAccelerators {
    let reporting = representatives(spokes).into_iter();
    let stated = reporting.map(|(region, spoke)| (region.clone(), spoke.registration.accelerators.clone()));
    stated.filter(|(_, accelerators)| !accelerators.is_empty()).collect()
}

/// Maximum number of deployments named in one note.
const NOTED_DEPLOYMENTS_MAX: usize = 8;

/// Parses a deployments file, and rejects new and changed placements that are infeasible with the catalogue. `before` are the
/// deployments that the file replaces.
pub fn parse_deployments(
    text: &str,
    catalogue: &Catalogue,
    registered: &RegisteredAccelerators,
    before: &BTreeMap<DeploymentName, Deployment>,
) -> Result<Vec<Deployment>, Vec<Problem>> {
    parse_deployments_with(text, catalogue, &|deployment| match before.get(&deployment.name) {
        Some(known) if known == deployment => Ok(()),
        Some(_) | None => check_feasible(deployment, catalogue, catalogue.all(), registered),
    })
}

/// Returns notes on the placements of deployments that replace `before`: where the hub would run new and changed ones, and which of
/// the unchanged ones are infeasible now.
pub fn notes(
    before: &BTreeMap<DeploymentName, Deployment>,
    deployments: &BTreeMap<DeploymentName, Deployment>,
    catalogue: &Catalogue,
    registered: &RegisteredAccelerators,
) -> Vec<String> {
    let is_changed = |deployment: &&Deployment| before.get(&deployment.name) != Some(*deployment);
    let (changed, unchanged): (Vec<_>, Vec<_>) = deployments.values().partition(is_changed);
    let summaries = changed.into_iter().filter_map(|deployment| summary(deployment, catalogue, registered));
    let infeasible = unchanged.into_iter().filter_map(|deployment| {
        let checked = check_feasible(deployment, catalogue, catalogue.all(), registered);
        let (key, problem) = checked.err()?;
        Some(format!("{}: {key}: {problem}", deployment.name))
    });
    let infeasible: Vec<_> = infeasible.collect();
    let note = (!infeasible.is_empty()).then(|| {
        let named = infeasible.iter().take(NOTED_DEPLOYMENTS_MAX).map(String::as_str);
        format!(
            "no set of regions meets the placement of {} unchanged deployments, which stay in their regions: {}",
            infeasible.len(),
            named.collect::<Vec<_>>().join("; ")
        )
    });
    summaries.chain(note).collect()
}

/// Reads a deployments file, and records placements that are infeasible with the catalogue as problems.
pub fn read_deployments(document: &ConfigFile<'_>, catalogue: &Catalogue) -> Option<Vec<Deployment>> {
    let none = RegisteredAccelerators::new();
    read_deployments_with(document, catalogue, &|deployment| {
        check_feasible(deployment, catalogue, catalogue.all(), &none)
    })
}

/// Checks that a deployment's placement is feasible with the regions of the catalogue that are in `within`.
///
/// # Errors
///
/// The key of the constraint that fails, and the problem with its fix.
pub fn check_feasible(
    deployment: &Deployment,
    catalogue: &Catalogue,
    within: RegionSet,
    registered: &RegisteredAccelerators,
) -> Result<(), (&'static str, String)> {
    let Some(decision) = choose_within(deployment, catalogue, within, registered) else { return Ok(()) };
    let Some(infeasible) = &decision.infeasible else { return Ok(()) };
    let key = match infeasible {
        Infeasible::Regions { .. } => "placement.min_regions",
        Infeasible::Replicas { .. } => "placement.min_replicas",
        Infeasible::Prices { .. } | Infeasible::Cost { .. } => "placement.max_cost",
    };
    let rejected = rejections(&decision);
    let regions = if rejected.is_empty() { String::new() } else { format!(" (rejected: {rejected})") };
    Err((key, format!("{infeasible}{regions}")))
}

/// Returns a sentence on the regions that would be chosen if every region of the catalogue had a spoke; `None` without a
/// feasible placement.
fn summary(
    deployment: &Deployment,
    catalogue: &Catalogue,
    registered: &RegisteredAccelerators,
) -> Option<String> {
    let PlacementDecision { regions, cost, infeasible: None, .. } =
        choose_within(deployment, catalogue, catalogue.all(), registered)?
    else {
        return None;
    };
    let cost = cost?;
    let names: Vec<_> = regions.iter().map(|region| catalogue.region(region).id.as_str()).collect();
    let cost = match cost.unpriced {
        0 => format!("{} per hour", millionths_to_text(cost.millionths)),
        unpriced => {
            format!("{} per hour, and {unpriced} without a price", millionths_to_text(cost.millionths))
        }
    };
    Some(format!(
        "the hub chooses the regions of {} among those with a spoke; the cheapest of the catalogue are {} ({cost})",
        deployment.name,
        names.join(", ")
    ))
}

/// Returns the choice among these regions.
fn choose_within(
    deployment: &Deployment,
    catalogue: &Catalogue,
    within: RegionSet,
    registered: &RegisteredAccelerators,
) -> Option<PlacementDecision> {
    let placement = deployment.placement.as_ref()?;
    let permitted = deployment.residency.permitted(catalogue);
    let candidates = within.iter().map(|index| (index, catalogue.region(index)));
    let candidates = candidates.map(|(index, region)| PlacementCandidate {
        is_permitted: permitted.contains(index),
        spokes: SpokeState::Available,
        ..facts(index, region, deployment, registered.get(&region.id))
    });
    let candidates: Vec<_> = candidates.collect();
    Some(choose(&candidates, &requirement(deployment, placement), RegionSet::EMPTY))
}

/// Returns the reasons for rejections with the number of regions, most regions first.
fn rejections(decision: &PlacementDecision) -> String {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (_, verdict) in &decision.verdicts {
        if let PlacementVerdict::Rejected(reason) = verdict {
            *counts.entry(reason.to_string()).or_default() += 1;
        }
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let each = counts.into_iter().map(|(reason, count)| format!("{count} because {reason}"));
    each.collect::<Vec<_>>().join("; ")
}
