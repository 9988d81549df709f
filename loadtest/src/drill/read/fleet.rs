//! Reader of the `[fleet]` table.

use configuration::{ConfigFile, OneOrMany, section, words};
use regions::{Deployment, region_list};

use super::context::ReadContext;
use crate::drill::{
    DrillEngine, DrillFleet, DrillStore, LOCAL_HUBS_MAX, LOCAL_REGIONS_MAX, LOCAL_SPOKES_MAX,
};

/// Maximum number of scripted replicas per region.
const SCRIPTED_REPLICAS_MAX: u32 = 16;

section! {
    /// Fleet under test.
    pub(super) partial struct FleetSection {
        /// Regions by name.
        regions: Vec<String>, in 1..=LOCAL_REGIONS_MAX, like "[\"aws/us-east-1\", \"gcp/europe-west4\"]";
        /// Store of the hubs; several hubs need etcd.
        store: StoreName = StoreName::Embedded;
        /// Number of hubs.
        hubs: u32 = 1, in 1..=LOCAL_HUBS_MAX;
        /// Number of spokes in each region.
        spokes: u32 = 1, in 1..=LOCAL_SPOKES_MAX;
        /// Deployments file; that of `meridian up` if absent.
        deployments: Option<String>;
        /// Scripted replicas; replicas run the deployed models without this table.
        engine: Option<ScriptedSection>;
        /// Number of scripted replicas per region: one for all regions, or a list; 1 if absent.
        replicas: Option<OneOrMany<u32>>, check is_replica_count;
        /// Capacity in requests per second, to which rates in percent refer; follows from scripted replicas.
        capacity: Option<u32>;
    }
}

section! {
    /// Scripted replicas, which compute nothing.
    struct ScriptedSection {
        /// Kind of engine.
        kind: EngineName, like "\"scripted\"";
        /// Speed of one replica.
        inputs_per_second: u32, in 1..=10_000, like "100";
    }
}

words! {
    /// Kind of the store.
    enum StoreName {
        /// File of the hub.
        Embedded = "embedded",
        /// An etcd.
        Etcd = "etcd",
    }
}

words! {
    /// Kind of engine.
    enum EngineName {
        /// Deterministic latencies.
        Scripted = "scripted",
    }
}

fn is_replica_count(count: &u32) -> Result<(), String> {
    let fix = format!("write a whole number from 1 to {SCRIPTED_REPLICAS_MAX}");
    if (1..=SCRIPTED_REPLICAS_MAX).contains(count) { Ok(()) } else { Err(format!("is out of range; {fix}")) }
}

/// Validates the fleet and loads its deployments.
pub(super) fn fleet(
    document: &ConfigFile<'_>,
    section: Option<FleetSection>,
    context: &ReadContext<'_>,
) -> (DrillFleet, Vec<Deployment>) {
    let mut fleet = DrillFleet {
        regions: Vec::new(),
        store: DrillStore::Embedded,
        hubs: 1,
        spokes: 1,
        deployments: None,
        engine: DrillEngine::Cpu,
        capacity: None,
    };
    let mut deployments = Vec::new();
    let Some(section) = section else { return (fleet, deployments) };
    for (index, text) in section.regions.iter().flatten().enumerate() {
        let path = format!("fleet.regions[{index}]");
        match region_list::find_region(text, context.catalogue) {
            Ok(region) if fleet.regions.contains(&region) => {
                document.problem(&path, format!("`{text}` is listed twice; remove one"));
            }
            Ok(region) => fleet.regions.push(region),
            Err(problem) => document.problem(&path, problem),
        }
    }
    if section.store == Some(StoreName::Etcd) {
        fleet.store = DrillStore::Etcd;
    }
    fleet.hubs = section.hubs.unwrap_or(1);
    fleet.spokes = section.spokes.unwrap_or(1);
    if fleet.hubs > 1 && section.store == Some(StoreName::Embedded) {
        document.problem("fleet.hubs", "several hubs need a shared store; set store = \"etcd\"");
    }
    fleet.deployments = section.deployments.flatten();
    match (context.deployments)(fleet.deployments.as_deref()) {
        Ok(loaded) => deployments = loaded,
        Err(errors) => errors.into_iter().for_each(|error| document.problem("fleet.deployments", error)),
    }
    let each = fleet.regions.len();
    let replicas = section.replicas.flatten();
    match section.engine.flatten() {
        Some(ScriptedSection { kind: _, inputs_per_second }) => {
            let replicas = match replicas.map(|OneOrMany(counts)| counts) {
                None => vec![1; each],
                Some(counts) => match counts[..] {
                    [one] if !document.has("fleet.replicas[0]") => vec![one; each],
                    _ if counts.len() == each => counts,
                    _ => {
                        let problem = format!(
                            "has {} numbers; write one, or one for each of {each} regions",
                            counts.len()
                        );
                        document.problem("fleet.replicas", problem);
                        vec![1; each]
                    }
                },
            };
            let all: u32 = replicas.iter().sum();
            fleet.capacity = Some(f64::from(inputs_per_second) * f64::from(all));
            fleet.engine = DrillEngine::Scripted { inputs_per_second, replicas };
        }
        None if !document.has("fleet.engine") => {
            fleet.capacity = section.capacity.flatten().map(f64::from);
            if replicas.is_some() {
                let fix = "set engine = { kind = \"scripted\", inputs_per_second = 100 }, or remove it";
                document.problem("fleet.replicas", format!("requires scripted replicas; {fix}"));
            }
        }
        // Another capacity would be a second problem of each load.
        None => fleet.capacity = Some(1.0),
    }
    if document.has("fleet.engine") && document.has("fleet.capacity") {
        document.problem("fleet.capacity", "follows from the scripted replicas; remove it");
    }
    (fleet, deployments)
}
