//! Requirement of a deployment's placement, from which the hub chooses its regions.
//!
//! A deployment names its regions (`regions`), or states what they must have (`[deployment.placement]`). The hub then
//! chooses the cheapest set of regions with these properties (`scheduler_core::placement`):
//!
//! - Residency: each region is allowed by the deployment's policy. Nothing widens it.
//! - Each region has its engine, one of the accelerator types if there are any, and enough of them for the minimum number
//!   of replicas.
//! - There are at least `min_regions` regions.
//! - After the loss of the largest region, the others can hold `min_replicas` replicas in total.
//! - The minimum numbers of replicas of all regions together cost at most `max_cost` per hour.

use configuration::{ConfigField, ConfigFile, ConfigValue, NoLimit, Rule, section};

use super::scaling::REPLICAS_MAX;
use crate::accelerator::{PRICE_MAX, millionths_to_text, to_millionths};
use crate::catalogue::Catalogue;
use crate::id::AcceleratorType;
use crate::written::list;

/// Maximum of `min_regions`. The work of the choice grows with it; few fleets have as many regions.
pub const MIN_REGIONS_MAX: u32 = 16;
/// Maximum of `min_replicas`: the replicas of four regions at their limit. The work of the choice grows with it.
pub const MIN_REPLICAS_MAX: u32 = 4 * REPLICAS_MAX;
/// Maximum of `min_regions` × `min_replicas`. The choice keeps a set of regions for each number of regions and of replicas, and
/// a hub repeats it for each deployment when a price changes: with 64 regions, this limit is 260 000 steps each time.
pub const REGIONS_TIMES_REPLICAS_MAX: u32 = 4096;
/// Maximum number of accelerator types of a requirement.
pub const ACCELERATORS_MAX: usize = 16;

/// Requirement of a deployment's placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementSpec {
    /// Accelerator types, of which each region has at least one; without any, no accelerator is needed.
    pub accelerators: Vec<AcceleratorType>,
    /// Minimum number of regions.
    pub min_regions: u32,
    /// Replicas that the regions can hold in total after the loss of the largest one; 0 for no further requirement.
    pub min_replicas: u32,
    /// Maximum cost per hour of the minimum numbers of replicas, in millionths of the operator's currency unit.
    pub max_cost: Option<u64>,
}

section! {
    /// Requirement from which the hub chooses the regions of a deployment; in place of `regions`.
    pub(super) partial struct PlacementEntry {
        /// Accelerator type, or a list of types of which each region has one; none is needed if absent.
        accelerator: Option<AcceleratorList>;
        /// Minimum number of regions; with 2 or more, the loss of one leaves a region.
        min_regions: u32, in 1..=MIN_REGIONS_MAX, like "2";
        /// Replicas that the regions can hold in total after the loss of the one that holds most; 0 for no further requirement.
        min_replicas: u32 = 0, in 0..=MIN_REPLICAS_MAX;
        /// Maximum cost per hour of the minimum replica counts of all regions, in the unit of the catalogue; unlimited if absent.
        max_cost: Option<f64>, in 0.0..=PRICE_MAX, fix "the cost per hour, as max_cost = 12.5";
    }
}

/// Accelerator types, written as a string or a list of strings.
pub(super) struct AcceleratorList(Vec<AcceleratorType>);

impl ConfigValue for AcceleratorList {
    type Limit = NoLimit;
    type Item = AcceleratorType;

    fn type_name() -> String {
        "accelerator type, or list of them".to_owned()
    }

    fn read(field: &ConfigField<'_>, rule: &Rule<AcceleratorList>) -> Option<AcceleratorList> {
        let one = Rule { check: rule.check, ..Rule::default() };
        if field.value.get_ref().as_str().is_some() {
            return AcceleratorType::read(field, &one).map(|only| AcceleratorList(vec![only]));
        }
        let items = field.items("an accelerator type such as \"l4\", or a list of them")?;
        if !(1..=ACCELERATORS_MAX).contains(&items.len()) {
            let fix = format!("write 1 to {ACCELERATORS_MAX}, or remove the key if no accelerator is needed");
            field.problem(format!("has {} entries; {fix}", items.len()));
            return None;
        }
        let types: Vec<_> = items.iter().map(|item| AcceleratorType::read(item, &one)).collect();
        types.into_iter().collect::<Option<Vec<_>>>().map(AcceleratorList)
    }
}

impl PlacementEntry {
    /// Returns the requirement; `None` after a problem.
    pub(super) fn validate(
        self,
        document: &ConfigFile<'_>,
        path: &str,
        catalogue: &Catalogue,
    ) -> Option<PlacementSpec> {
        let PlacementEntry { accelerator, min_regions, min_replicas, max_cost } = self;
        let AcceleratorList(accelerators) = accelerator?.unwrap_or(AcceleratorList(Vec::new()));
        let mut valid = true;
        for (index, kind) in accelerators.iter().enumerate() {
            let mut problem = |message: String| {
                document.problem(&format!("{path}.accelerator"), message);
                valid = false;
            };
            if accelerators[..index].contains(kind) {
                problem(format!("`{kind}` is listed twice; keep one"));
            } else if !catalogue.accelerator_types().contains(kind) {
                let types = catalogue.accelerator_types();
                let near =
                    configuration::did_you_mean(kind.as_str(), types.iter().map(|known| known.as_str()));
                problem(format!(
                    "no region of the catalogue offers `{kind}`{near}; write a type of its [[accelerators]], or add one"
                ));
            }
        }
        let (min_regions, min_replicas) = (min_regions?, min_replicas?);
        // Not a limit of `PlacementSpec::problem`: a record of an earlier version may exceed it, and must stay readable.
        if min_regions.saturating_mul(min_replicas) > REGIONS_TIMES_REPLICAS_MAX {
            let most = REGIONS_TIMES_REPLICAS_MAX / min_regions;
            let message = format!(
                "min_regions ({min_regions}) times min_replicas ({min_replicas}) is more than \
                 {REGIONS_TIMES_REPLICAS_MAX}; lower min_replicas to {most}, or lower min_regions"
            );
            document.problem(&format!("{path}.min_replicas"), message);
            valid = false;
        }
        let max_cost = max_cost?.map(to_millionths);
        let placement = PlacementSpec { accelerators, min_regions, min_replicas, max_cost };
        valid.then_some(placement)
    }
}

impl PlacementSpec {
    /// Returns each key with its value as written in a file; `None` for a key that is omitted.
    pub fn key_values(&self) -> [(&'static str, Option<String>); 4] {
        let PlacementSpec { accelerators, min_regions, min_replicas, max_cost } = self;
        [
            ("accelerator", (!accelerators.is_empty()).then(|| list(accelerators))),
            ("min_regions", Some(min_regions.to_string())),
            ("min_replicas", (*min_replicas > 0).then(|| min_replicas.to_string())),
            // A whole number is written as one: TOML readers take either.
            ("max_cost", max_cost.map(millionths_to_text)),
        ]
    }

    /// Returns the first value outside its limits, with its key; for values that do not come from a file.
    pub fn problem(&self) -> Option<(&'static str, String)> {
        let PlacementSpec { accelerators, min_regions, min_replicas, max_cost: _ } = self;
        if accelerators.len() > ACCELERATORS_MAX {
            return Some((
                "accelerator",
                format!("has {} types: at most {ACCELERATORS_MAX}", accelerators.len()),
            ));
        }
        if !(1..=MIN_REGIONS_MAX).contains(min_regions) {
            return Some(("min_regions", format!("is {min_regions}: 1 to {MIN_REGIONS_MAX}")));
        }
        (*min_replicas > MIN_REPLICAS_MAX)
            .then(|| ("min_replicas", format!("is {min_replicas}: at most {MIN_REPLICAS_MAX}")))
    }
}
