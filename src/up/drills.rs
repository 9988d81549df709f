//! Drills in the local fleet of `meridian up`, started from the console or the control API: one at a time, by the runner of
//! `meridian drill` ([`crate::drill::run`]), with load on the gateways of this fleet.
//!
//! A drill whose fleet this one is not cannot be started, with the reason. When a drill has ended or was stopped, the state of the fleet
//! before it is restored ([`super::fleet_state`] lists what that is), and the gateways observe all regions as healthy; the next drill
//! can be started after that.

pub(super) mod board;
mod requirements;

use super::fleet::LocalFleet;
use super::fleet_control::FleetControl;
use super::fleet_state::FleetState;
use super::plan::FleetPlan;
use super::readiness::{self, ServedRegions};
use crate::cli::UpOptions;
use crate::drill::observer::Observer;
use crate::drill::run::{self, ActionExecutor};
use anyhow::{Context, Result};
use board::{DrillBoard, ListedDrill, Verdict};
use configuration::ConfigFile;
use loadtest::drill::{self, Action, Drill};
use regions::{Catalogue, RegionId};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Drills of the repository.
const SHIPPED: [(&str, &str); 11] = [
    ("flapping-region", include_str!("../../configs/drills/flapping-region.toml")),
    ("grey-region", include_str!("../../configs/drills/grey-region.toml")),
    ("hub-loss", include_str!("../../configs/drills/hub-loss.toml")),
    ("hub-takeover", include_str!("../../configs/drills/hub-takeover.toml")),
    ("region-kill", include_str!("../../configs/drills/region-kill.toml")),
    ("residency-under-outage", include_str!("../../configs/drills/residency-under-outage.toml")),
    ("rolling-restart", include_str!("../../configs/drills/rolling-restart.toml")),
    ("rolling-upgrade", include_str!("../../configs/drills/rolling-upgrade.toml")),
    ("silent-partition", include_str!("../../configs/drills/silent-partition.toml")),
    ("store-loss", include_str!("../../configs/drills/store-loss.toml")),
    ("surge", include_str!("../../configs/drills/surge.toml")),
];

/// Parts of the fleet that a drill needs.
pub(super) struct DrillContext {
    catalogue: Catalogue,
    /// Base URL of the gateway near each region of the fleet.
    urls: Vec<(RegionId, String)>,
    operations: Vec<(RegionId, SocketAddr)>,
    hubs: Vec<SocketAddr>,
    operator: PathBuf,
    key: String,
    control: FleetControl,
    /// Regions and deployments that are served before and after a drill.
    served: ServedRegions,
}

impl DrillContext {
    pub(super) fn new(
        fleet: &LocalFleet,
        plan: &FleetPlan,
        key: &str,
        control: FleetControl,
    ) -> DrillContext {
        let urls = fleet.urls();
        let near = |region: &RegionId| (region.clone(), urls[plan.nearest_gateway(region)].clone());
        DrillContext {
            catalogue: plan.catalogue.clone(),
            urls: plan.regions.iter().map(near).collect(),
            operations: fleet.operations(),
            hubs: fleet.hubs(),
            operator: fleet.operator().to_owned(),
            key: key.to_owned(),
            control,
            served: ServedRegions::of(plan),
        }
    }

    /// Returns the URL for callers near a region of a drill, which is one of the fleet's.
    fn url_near(&self, region: &RegionId) -> String {
        let found = self.urls.iter().find(|(near, _)| near == region).or(self.urls.first());
        found.map(|(_, url)| url.clone()).unwrap_or_default()
    }
}

/// Reads the drills of a directory, or the shipped ones, and checks which of them this fleet can run.
///
/// # Errors
///
/// Returns the problems of the files.
pub(super) fn read(options: &UpOptions, plan: &FleetPlan) -> Result<Vec<ListedDrill>, Vec<String>> {
    let base = options.drills.as_deref().unwrap_or(Path::new("configs/drills"));
    let files = match &options.drills {
        None => SHIPPED.map(|(name, text)| (name.to_owned(), text.to_owned())).to_vec(),
        Some(dir) => files_in(dir).map_err(|error| vec![format!("--drills {}: {error}", dir.display())])?,
    };
    let (mut listed, mut problems) = (Vec::new(), Vec::new());
    for (name, text) in files {
        let read = ConfigFile::read(&text, |document| {
            crate::drill::read_document(document, base, &plan.catalogue, false)
        });
        match read {
            Ok(drill) => {
                let unmet = requirements::unmet(&drill, options, plan);
                listed.push(ListedDrill { name, drill, unmet });
            }
            Err(found) if options.drills.is_some() => {
                problems.extend(configuration::named(&base.join(format!("{name}.toml")), found));
            }
            // A catalogue of the user may not have the regions of a shipped drill.
            Err(_) => {}
        }
    }
    if problems.is_empty() { Ok(listed) } else { Err(problems) }
}

fn files_in(dir: &Path) -> std::io::Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str()).map(str::to_owned);
        if let Some(name) = name.filter(|_| path.extension().is_some_and(|extension| extension == "toml")) {
            files.push((name, std::fs::read_to_string(&path)?));
        }
    }
    files.sort();
    Ok(files)
}

/// Runs the drills that are started, for ever.
pub(super) async fn serve(board: Arc<DrillBoard>, context: DrillContext) {
    loop {
        let at = board.next().await;
        let Some(listed) = board.drills().get(at) else { continue };
        let before = match FleetState::note(&context.control, &drained_regions(&listed.drill)).await {
            Ok(before) => before,
            Err(problem) => {
                let problem = format!("the state of the fleet before the drill is unknown: {problem}");
                board.ended(Verdict::Failed(problem), Vec::new());
                continue;
            }
        };
        let verdict = tokio::select! {
            // A drill that has ended is evaluated, also if it was stopped at that moment.
            biased;
            ran = run_one(&board, &listed.drill, &context) => {
                ran.unwrap_or_else(|error| Verdict::Failed(format!("{error:#}")))
            }
            () = board.stopped() => Verdict::Stopped,
        };
        board.restoring();
        // An action that has begun is completed first.
        let mut problems = before.restore(&context.control).await;
        if problems.is_empty() && before.is_undisturbed() {
            problems = unhealthy(&context).await;
        }
        board.ended(verdict, problems);
    }
}

/// Returns the regions that a drill drains, or whose drain it ends.
fn drained_regions(drill: &Drill) -> BTreeSet<RegionId> {
    let actions = drill.steps.iter().flat_map(|step| &step.actions);
    let drained = actions.filter_map(|(_, action)| match action {
        Action::Drain(region) | Action::Undrain(region) => Some(region.clone()),
        Action::Process(..) | Action::Link(..) | Action::SlowReplicas(..) | Action::Surge { .. } => None,
    });
    drained.collect()
}

/// Waits until each gateway observes all regions as healthy. Returns the problems of those that do not.
async fn unhealthy(context: &DrillContext) -> Vec<String> {
    let mut problems = Vec::new();
    for (_, operations) in &context.operations {
        let healthy = readiness::until_healthy(*operations, &context.served).await;
        problems.extend(healthy.err().map(|error| format!("{error:#}")));
    }
    problems
}

async fn run_one(board: &Arc<DrillBoard>, drill: &Drill, context: &DrillContext) -> Result<Verdict> {
    let url_near = |region: &RegionId| context.url_near(region);
    let loads = run::loads(drill, &url_near, &context.key, &context.catalogue, true);
    let loads = loads.map_err(|found| anyhow::anyhow!(found.join("\n")))?;
    let observer = Observer::new(&context.operations, &context.hubs, &context.operator)
        .context("the fleet cannot be observed")?;
    let executor = ActionExecutor::LocalFleet(context.control.clone());
    board.began();
    let noted = board.clone();
    let ran = run::run(drill, loads, executor, observer, move |event| noted.note(event)).await?;
    let results = drill::evaluate(drill, &ran.report.record, &ran.observations, &context.catalogue);
    Ok(Verdict::Evaluated(results))
}
