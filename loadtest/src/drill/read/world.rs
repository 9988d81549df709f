//! `[world]`: where a drill happens.

use regions::document::{Problems, Table};
use regions::{Deployment, region_list};
use toml::Spanned;
use toml::de::DeValue;

use super::{Surroundings, number_of};
use crate::drill::{Engine, Store, World};

/// How many regions a world on one machine has at most.
const REGIONS_MAX: usize = 12;
/// How many hubs one has at most.
const HUBS_MAX: u32 = 5;
/// How many replicas a region has at most.
const REPLICAS_MAX: u32 = 16;

const WORLD_KEYS: &[&str] = &["regions", "store", "hubs", "deployments", "engine", "replicas", "capacity"];
const ENGINE_KEYS: &[&str] = &["kind", "inputs_per_second"];

/// The world, and what is deployed in it.
pub(super) fn world(
    top: &Table<'_>,
    around: &Surroundings<'_>,
    problems: &mut Problems<'_>,
) -> (World, Vec<Deployment>) {
    let mut world = World {
        regions: Vec::new(),
        store: Store::Embedded,
        hubs: 1,
        deployments: None,
        engine: Engine::Cpu,
        capacity: None,
    };
    let mut deployments = Vec::new();
    let example = "{ regions = [\"aws/us-east-1\", \"gcp/europe-west4\"] }";
    let table =
        top.need("world", example, problems).and_then(|value| Table::of("world".to_owned(), value, problems));
    let Some(table) = table else { return (world, deployments) };
    table.refuse_other_keys(WORLD_KEYS, problems);
    let get = |key: &str| table.entries.get(key);
    if let Some(value) = table.need("regions", "[\"aws/us-east-1\", \"gcp/europe-west4\"]", problems) {
        let texts = table.texts("regions", value, problems).unwrap_or_default();
        if texts.is_empty() || texts.len() > REGIONS_MAX {
            problems.note(value.span(), format!("world: `regions`: name from 1 to {REGIONS_MAX} regions"));
        }
        for (text, at) in texts {
            match region_list::find_region(text, around.catalogue) {
                Ok(region) if world.regions.contains(&region) => {
                    problems.note(at, format!("world: `{text}` stands twice: keep one"));
                }
                Ok(region) => world.regions.push(region),
                Err(problem) => problems.note(at, format!("world: {problem}")),
            }
        }
    }
    if let Some(value) = get("store")
        && let Some((text, at)) = table.text("store", value, problems)
    {
        match text {
            "embedded" => {}
            "etcd" => world.store = Store::Etcd,
            _ => problems.note(at, format!("world: `store` is `{text}`: write \"embedded\" or \"etcd\"")),
        }
    }
    if let Some(value) = get("hubs")
        && let Some(hubs) = number_of(&table, "hubs", value, 1..=HUBS_MAX, problems)
    {
        world.hubs = hubs;
        if hubs > 1 && world.store == Store::Embedded {
            let message = "world: several hubs need a store that they share: write store = \"etcd\"";
            problems.note(value.span(), message);
        }
    }
    let named =
        get("deployments").and_then(|value| Some((table.text("deployments", value, problems)?, value)));
    world.deployments = named.as_ref().map(|((file, _), _)| (*file).to_owned());
    match (around.deployments)(world.deployments.as_deref()) {
        Ok(found) => deployments = found,
        Err(wrong) => {
            let at = named.map_or(table.span.clone(), |(_, value)| value.span());
            wrong
                .into_iter()
                .for_each(|wrong| problems.note(at.clone(), format!("world: deployments: {wrong}")));
        }
    }
    engine(&table, &mut world, problems);
    if let Some(value) = get("capacity") {
        match world.engine {
            Engine::Cpu => world.capacity = table.number("capacity", value, problems).map(f64::from),
            Engine::Scripted { .. } => {
                let message = "world: `capacity` is what scripted replicas come to: leave it out";
                problems.note(value.span(), message);
            }
        }
    }
    (world, deployments)
}

/// What computes: what is deployed, or something that takes its time.
fn engine(table: &Table<'_>, world: &mut World, problems: &mut Problems<'_>) {
    let replicas = table.entries.get("replicas");
    let Some(value) = table.entries.get("engine") else {
        if let Some(value) = replicas {
            let message = "world: `replicas` counts scripted ones: write engine = { kind = \"scripted\", inputs_per_second = 100 }, or leave it out";
            problems.note(value.span(), message);
        }
        return;
    };
    let Some(engine) = Table::of("world: engine".to_owned(), value, problems) else { return };
    engine.refuse_other_keys(ENGINE_KEYS, problems);
    let kind = engine.need_text("kind", "\"scripted\"", problems);
    match kind {
        None | Some(("scripted", _)) => {}
        Some((kind, at)) => {
            let message = format!(
                "world: engine: `{kind}`: write \"scripted\", or leave `engine` out to run what is deployed"
            );
            problems.note(at, message);
        }
    }
    let speed = engine.need("inputs_per_second", "100", problems);
    let speed = speed
        .and_then(|value| number_of(&engine, "inputs_per_second", value, 1..=10_000, problems))
        .unwrap_or(1);
    let each = world.regions.len();
    let replicas = match replicas {
        None => vec![1; each],
        Some(value) => counts(table, value, each, problems).unwrap_or(vec![1; each]),
    };
    let all: u32 = replicas.iter().sum();
    world.capacity = Some(f64::from(speed) * f64::from(all));
    world.engine = Engine::Scripted { inputs_per_second: speed, replicas };
}

/// One number for all regions, or a list with one for each.
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
            "world: `replicas` has {} numbers: write one, or one for each of {regions} regions",
            list.len()
        );
        problems.note(value.span(), message);
    }
    (counts.len() == regions).then_some(counts)
}
