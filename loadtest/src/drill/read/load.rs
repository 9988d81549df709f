//! Reader of `[[load]]` tables.

use std::time::Duration;

use configuration::{ConfigField, ConfigFile, ConfigValue, NoLimit, Rule, section};
use regions::{Deployment, DeploymentName, RegionId};
use toml::de::DeValue;

use crate::arrival::ArrivalProcess;
use crate::drill::action::parse_region;
use crate::drill::{ClientLoad, DrillEngine, DrillFleet};

/// Maximum number of loads.
pub(super) const LOADS_MAX: usize = 16;
/// Default timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Highest rate of a load.
const RATE_MAX: f64 = 100_000.0;

section! {
    /// Load of clients at one place.
    pub(super) partial struct LoadEntry {
        /// Name, one word.
        name: String, like "\"europe\"", check is_word;
        /// Deployment; the first one if absent.
        model: Option<String>;
        /// Region of the fleet near the clients.
        near: String, like "\"gcp/europe-west4\"";
        /// Requests per second, or a share of the capacity such as `80 %`.
        rate: Rate, like "40, or \"80 %\" of the capacity";
        /// Arrival process.
        arrival: ArrivalProcess = ArrivalProcess::Poisson;
        /// Inputs of one request.
        inputs: u32 = 1, in 1..=2048;
        /// Timeout of a request.
        timeout: Duration = TIMEOUT, in Duration::from_millis(1)..;
    }
}

/// Rate of a load.
#[derive(Clone, Copy)]
enum Rate {
    /// Requests per second.
    PerSecond(f64),
    /// Percentage of the fleet's capacity.
    Percent(f64),
}

const RATE_FIX: &str =
    "write requests per second above 0, such as 40, or a share of the capacity, such as \"80 %\"";

impl ConfigValue for Rate {
    type Limit = NoLimit;
    type Item = Rate;

    fn type_name() -> String {
        "number, or percentage".to_owned()
    }

    fn read(field: &ConfigField<'_>, _: &Rule<Rate>) -> Option<Rate> {
        let rate = match field.value.get_ref() {
            DeValue::Integer(number) => number.as_str().parse().ok().map(Rate::PerSecond),
            DeValue::Float(number) => number.as_str().parse().ok().map(Rate::PerSecond),
            DeValue::String(text) => {
                let share = text.strip_suffix('%').and_then(|share| share.trim().parse().ok());
                share.map(Rate::Percent)
            }
            _ => None,
        };
        if rate.is_none() {
            field.problem(format!("is no rate; {RATE_FIX}"));
        }
        rate
    }
}

fn is_word(text: &str) -> Result<(), String> {
    if text.is_empty() || text.contains(char::is_whitespace) {
        return Err("is not one word; write one word".to_owned());
    }
    Ok(())
}

/// Validates all loads.
pub(super) fn loads(
    document: &ConfigFile<'_>,
    entries: Vec<LoadEntry>,
    fleet: &DrillFleet,
    deployments: &[Deployment],
) -> Vec<ClientLoad> {
    let mut loads: Vec<ClientLoad> = Vec::new();
    for (index, entry) in entries.into_iter().enumerate() {
        let path = format!("load[{index}]");
        let Some(load) = entry.validate(document, &path, fleet, deployments) else { continue };
        if loads.iter().any(|other| other.name == load.name) {
            let problem = format!("duplicate load `{}`; choose another name", load.name);
            document.problem(&format!("{path}.name"), problem);
        }
        loads.push(load);
    }
    loads
}

impl LoadEntry {
    fn validate(
        self,
        document: &ConfigFile<'_>,
        path: &str,
        fleet: &DrillFleet,
        deployments: &[Deployment],
    ) -> Option<ClientLoad> {
        let LoadEntry { name, model, near, rate, arrival, inputs, timeout } = self;
        let near = near.and_then(|text| {
            let parsed = parse_region(&text, fleet);
            parsed.map_err(|problem| document.problem(&format!("{path}.near"), problem)).ok()
        });
        let model = match model.flatten() {
            Some(text) => {
                let found = deployments.iter().find(|deployment| deployment.name.as_str() == text);
                if found.is_none() {
                    let known: Vec<_> =
                        deployments.iter().map(|deployment| deployment.name.as_str()).collect();
                    let hint = regions::did_you_mean(&text, known.iter().copied());
                    let known = known.join(", ");
                    let problem = format!("unknown deployment `{text}`{hint}; the deployments are {known}");
                    document.problem(&format!("{path}.model"), problem);
                }
                found
            }
            None => deployments.first(),
        };
        let inputs = inputs.unwrap_or(1);
        let rate = rate.and_then(|rate| rate.per_second(document, path, inputs, fleet));
        // A load with problems is kept with placeholders, so that references to its name do not add further problems.
        let placeholder_region = || "none/none".parse::<RegionId>().expect("well formed");
        let placeholder_model = || "none".parse::<DeploymentName>().expect("well formed");
        Some(ClientLoad {
            name: name?,
            model: model.map_or_else(placeholder_model, |deployment| deployment.name.clone()),
            near: near.unwrap_or_else(placeholder_region),
            rate: rate.unwrap_or(RATE_MAX),
            arrival: arrival.unwrap_or(ArrivalProcess::Poisson).to_string(),
            inputs: inputs as usize,
            timeout: timeout.unwrap_or(TIMEOUT),
        })
    }
}

impl Rate {
    /// Returns the requests per second. The capacity of scripted replicas is in inputs per second.
    fn per_second(
        self,
        document: &ConfigFile<'_>,
        path: &str,
        inputs: u32,
        fleet: &DrillFleet,
    ) -> Option<f64> {
        let path = format!("{path}.rate");
        let capacity = match fleet.engine {
            DrillEngine::Cpu => fleet.capacity,
            DrillEngine::Scripted { .. } => fleet.capacity.map(|capacity| capacity / f64::from(inputs)),
        };
        let rate = match (self, capacity) {
            (Rate::PerSecond(rate), _) => rate,
            (Rate::Percent(share), Some(capacity)) => share / 100.0 * capacity,
            (Rate::Percent(_), None) => {
                let fix = "set capacity = 200 (requests per second) under [fleet], or use scripted replicas";
                document.problem(&path, format!("a share requires a capacity; {fix}"));
                return None;
            }
        };
        if !(rate > 0.0 && rate <= RATE_MAX) {
            document.problem(&path, format!("{rate} requests per second are out of range; {RATE_FIX}"));
            return None;
        }
        Some(rate)
    }
}
