//! Parser of the `[fleet]` table.

use regions::document::{Problems, Table};
use regions::{Deployment, region_list};
use toml::Spanned;
use toml::de::DeValue;

use super::{ReadContext, number_of};
use crate::drill::{DrillEngine, DrillFleet, DrillStore};

/// Maximum number of regions of a fleet on one machine.
const REGIONS_MAX: usize = 12;
/// Maximum number of hubs.
const HUBS_MAX: u32 = 5;
/// Maximum number of replicas per region.
const REPLICAS_MAX: u32 = 16;

const WORLD_KEYS: &[&str] = &["regions", "store", "hubs", "deployments", "engine", "replicas", "capacity"];
const ENGINE_KEYS: &[&str] = &["kind", "inputs_per_second"];

/// Parses the fleet and loads its deployments.
pub(super) fn fleet(
    top: &Table<'_>,
    context: &ReadContext<'_>,
    problems: &mut Problems<'_>,
) -> (DrillFleet, Vec<Deployment>) {
    let mut fleet = DrillFleet {
        regions: Vec::new(),
        store: DrillStore::Embedded,
        hubs: 1,
        deployments: None,
        engine: DrillEngine::Cpu,
        capacity: None,
    };
    let mut deployments = Vec::new();
    let example = "{ regions = [\"aws/us-east-1\", \"gcp/europe-west4\"] }";
    let table =
        top.need("fleet", example, problems).and_then(|value| Table::of("fleet".to_owned(), value, problems));
    let Some(table) = table else { return (fleet, deployments) };
    table.refuse_other_keys(WORLD_KEYS, problems);
    let get = |key: &str| table.entries.get(key);
    if let Some(value) = table.need("regions", "[\"aws/us-east-1\", \"gcp/europe-west4\"]", problems) {
        let texts = table.texts("regions", value, problems).unwrap_or_default();
        if texts.is_empty() || texts.len() > REGIONS_MAX {
            problems.note(value.span(), format!("fleet: `regions`: name from 1 to {REGIONS_MAX} regions"));
        }
        for (text, at) in texts {
            match region_list::find_region(text, context.catalogue) {
                Ok(region) if fleet.regions.contains(&region) => {
                    problems.note(at, format!("fleet: `{text}` is listed twice: remove one"));
                }
                Ok(region) => fleet.regions.push(region),
                Err(problem) => problems.note(at, format!("fleet: {problem}")),
            }
        }
    }
    if let Some(value) = get("store")
        && let Some((text, at)) = table.text("store", value, problems)
    {
        match text {
            "embedded" => {}
            "etcd" => fleet.store = DrillStore::Etcd,
            _ => problems.note(at, format!("fleet: `store` is `{text}`: write \"embedded\" or \"etcd\"")),
        }
    }
    if let Some(value) = get("hubs")
        && let Some(hubs) = number_of(&table, "hubs", value, 1..=HUBS_MAX, problems)
    {
        fleet.hubs = hubs;
        if hubs > 1 && fleet.store == DrillStore::Embedded {
            let message = "fleet: several hubs need a shared store: set store = \"etcd\"";
            problems.note(value.span(), message);
        }
    }
    let file =
        get("deployments").and_then(|value| Some((table.text("deployments", value, problems)?, value)));
    fleet.deployments = file.as_ref().map(|((file, _), _)| (*file).to_owned());
    match (context.deployments)(fleet.deployments.as_deref()) {
        Ok(loaded) => deployments = loaded,
        Err(errors) => {
            let at = file.map_or(table.span.clone(), |(_, value)| value.span());
            errors
                .into_iter()
                .for_each(|error| problems.note(at.clone(), format!("fleet: deployments: {error}")));
        }
    }
    engine(&table, &mut fleet, problems);
    if let Some(value) = get("capacity") {
        match fleet.engine {
            DrillEngine::Cpu => fleet.capacity = table.number("capacity", value, problems).map(f64::from),
            DrillEngine::Scripted { .. } => {
                let message = "fleet: `capacity` follows from the scripted replicas: remove it";
                problems.note(value.span(), message);
            }
        }
    }
    (fleet, deployments)
}

/// Parses the engine and the replica counts of scripted replicas.
fn engine(table: &Table<'_>, fleet: &mut DrillFleet, problems: &mut Problems<'_>) {
    let replicas = table.entries.get("replicas");
    let Some(value) = table.entries.get("engine") else {
        if let Some(value) = replicas {
            let message = "fleet: `replicas` requires scripted replicas: set engine = { kind = \"scripted\", inputs_per_second = 100 }, or remove it";
            problems.note(value.span(), message);
        }
        return;
    };
    let Some(engine) = Table::of("fleet: engine".to_owned(), value, problems) else { return };
    engine.refuse_other_keys(ENGINE_KEYS, problems);
    let kind = engine.need_text("kind", "\"scripted\"", problems);
    match kind {
        None | Some(("scripted", _)) => {}
        Some((kind, at)) => {
            let message = format!(
                "fleet: engine: `{kind}`: write \"scripted\", or remove `engine` to run the deployed models"
            );
            problems.note(at, message);
        }
    }
    let speed = engine.need("inputs_per_second", "100", problems);
    let speed = speed
        .and_then(|value| number_of(&engine, "inputs_per_second", value, 1..=10_000, problems))
        .unwrap_or(1);
    let each = fleet.regions.len();
    let replicas = match replicas {
        None => vec![1; each],
        Some(value) => counts(table, value, each, problems).unwrap_or(vec![1; each]),
    };
    let all: u32 = replicas.iter().sum();
    fleet.capacity = Some(f64::from(speed) * f64::from(all));
    fleet.engine = DrillEngine::Scripted { inputs_per_second: speed, replicas };
}

/// Parses one number for all regions, or a list with one per region.
fn counts(
    table: &Table<'_>,
    value: &Spanned<DeValue<'_>>,
    regions: usize,
    problems: &mut Problems<'_>,
) -> Option<Vec<u32>> {
    let Some(list) = value.get_ref().as_array() else {
        return number_of(table, "replicas", value, 1..=REPLICAS_MAX, problems)
            .map(|count| vec![count; regions]);
    };
    let mut counts = Vec::new();
    for item in list {
        counts.extend(number_of(table, "replicas", item, 1..=REPLICAS_MAX, problems));
    }
    if list.len() != regions {
        let message = format!(
            "fleet: `replicas` has {} numbers: write one, or one for each of {regions} regions",
            list.len()
        );
        problems.note(value.span(), message);
    }
    (counts.len() == regions).then_some(counts)
}
