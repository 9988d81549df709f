//! Parser of `[[load]]` tables.

use std::ops::Range;
use std::time::Duration;

use regions::document::{Problems, Table};
use regions::{Deployment, DeploymentName, RegionId};
use toml::Spanned;
use toml::de::DeValue;

use super::{number_of, tables};
use crate::drill::action::parse_region;
use crate::drill::{ClientLoad, DrillEngine, DrillFleet};

/// Maximum number of loads.
const LOADS_MAX: usize = 16;
/// Default timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Highest rate of a load.
const RATE_MAX: f64 = 100_000.0;

const LOAD_KEYS: &[&str] = &["name", "model", "near", "rate", "arrival", "inputs", "timeout"];

/// Parses all loads.
pub(super) fn loads(
    top: &Table<'_>,
    fleet: &DrillFleet,
    deployments: &[Deployment],
    problems: &mut Problems<'_>,
) -> Vec<ClientLoad> {
    let tables = tables(top, "load", problems);
    if tables.is_empty() || tables.len() > LOADS_MAX {
        problems.note(0..0, format!("a drill has from 1 to {LOADS_MAX} loads: write tables headed [[load]]"));
    }
    let mut loads: Vec<ClientLoad> = Vec::new();
    for table in &tables {
        if let Some((load, at)) = load(table, fleet, deployments, problems) {
            if loads.iter().any(|other| other.name == load.name) {
                problems
                    .note(at, format!("{}: duplicate load `{}`: choose another name", table.what, load.name));
            }
            loads.push(load);
        }
    }
    loads
}

fn load(
    table: &Table<'_>,
    fleet: &DrillFleet,
    deployments: &[Deployment],
    problems: &mut Problems<'_>,
) -> Option<(ClientLoad, Range<usize>)> {
    table.refuse_other_keys(LOAD_KEYS, problems);
    let get = |key: &str| table.entries.get(key);
    let name = table.need_text("name", "\"europe\"", problems);
    if let Some((text, at)) = name.clone()
        && (text.is_empty() || text.contains(char::is_whitespace))
    {
        problems.note(at, format!("{}: `name` is {text:?}: write one word", table.what));
    }
    let near = table.need_text("near", "\"gcp/europe-west4\"", problems);
    let near = near.and_then(|(text, at)| match parse_region(text, fleet) {
        Ok(region) => Some(region),
        Err(problem) => {
            problems.note(at, format!("{}: `near`: {problem}", table.what));
            None
        }
    });
    let model = match get("model") {
        Some(value) => table.text("model", value, problems).and_then(|(text, at)| {
            let found = deployments.iter().find(|deployment| deployment.name.as_str() == text);
            if found.is_none() {
                let there: Vec<_> = deployments.iter().map(|deployment| deployment.name.as_str()).collect();
                let hint = regions::did_you_mean(text, there.iter().copied());
                let there = there.join(", ");
                problems.note(
                    at,
                    format!("{}: unknown deployment `{text}`{hint}; the deployments are {there}", table.what),
                );
            }
            found.map(|deployment| deployment.name.clone())
        }),
        None => deployments.first().map(|deployment| deployment.name.clone()),
    };
    let rate = table.need("rate", "40, or \"80 %\" of the capacity", problems);
    let inputs = get("inputs").map_or(Some(1), |value| number_of(table, "inputs", value, 1..=2048, problems));
    let rate = rate.and_then(|value| rate_of(table, value, inputs.unwrap_or(1), fleet, problems));
    let arrival = get("arrival").and_then(|value| {
        let (text, at) = table.text("arrival", value, problems)?;
        if !matches!(text, "constant" | "poisson") {
            let message = format!("{}: `arrival` is `{text}`: write \"constant\" or \"poisson\"", table.what);
            problems.note(at, message);
        }
        Some(text.to_owned())
    });
    let timeout = get("timeout").and_then(|value| {
        let timeout = table.time("timeout", value, problems)?;
        if timeout.is_zero() {
            problems.note(value.span(), format!("{}: `timeout`: write a time above zero", table.what));
        }
        Some(timeout)
    });
    // A load with problems is kept with placeholders, so that references to its name do not add further problems.
    let placeholder_region = || "none/none".parse::<RegionId>().expect("well formed");
    let placeholder_model = || "none".parse::<DeploymentName>().expect("well formed");
    let (name, at) = name?;
    let load = ClientLoad {
        name: name.to_owned(),
        model: model.unwrap_or_else(placeholder_model),
        near: near.unwrap_or_else(placeholder_region),
        rate: rate.unwrap_or(RATE_MAX),
        arrival: arrival.unwrap_or_else(|| "poisson".to_owned()),
        inputs: inputs.unwrap_or(1) as usize,
        timeout: timeout.unwrap_or(TIMEOUT),
    };
    Some((load, at))
}

/// Parses a rate: requests per second, or a share of the capacity. The capacity of scripted replicas is in inputs per
/// second.
fn rate_of(
    table: &Table<'_>,
    value: &Spanned<DeValue<'_>>,
    inputs: u32,
    fleet: &DrillFleet,
    problems: &mut Problems<'_>,
) -> Option<f64> {
    let in_range = |rate: f64| Some(rate).filter(|rate| *rate > 0.0 && *rate <= RATE_MAX);
    let (rate, problem) = match value.get_ref() {
        DeValue::Integer(integer) => (integer.as_str().parse().ok().and_then(in_range), None),
        DeValue::Float(float) => (float.as_str().parse().ok().and_then(in_range), None),
        DeValue::String(text) => {
            let share = text.strip_suffix('%').and_then(|share| share.trim().parse::<f64>().ok());
            let requests = match fleet.engine {
                DrillEngine::Cpu => fleet.capacity,
                DrillEngine::Scripted { .. } => fleet.capacity.map(|capacity| capacity / f64::from(inputs)),
            };
            match (share, requests) {
                (Some(_), None) => (
                    None,
                    Some(
                        "a share requires a capacity: set capacity = 200 (requests per second) under [fleet], or use scripted replicas",
                    ),
                ),
                (share, capacity) => {
                    let rate = share.zip(capacity).map(|(share, capacity)| share / 100.0 * capacity);
                    (rate.and_then(in_range), None)
                }
            }
        }
        DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => (None, None),
    };
    if rate.is_none() {
        let problem = problem.unwrap_or(
            "write requests per second above 0, such as 40, or a share of the capacity, such as \"80 %\"",
        );
        problems.note(value.span(), format!("{}: `rate`: {problem}", table.what));
    }
    rate
}
