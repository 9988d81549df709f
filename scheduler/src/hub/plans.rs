//! The parts of the plan that are given out, whoever has made it: the leader as it writes them, others as they see them
//! written.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use supervision::{Mutex, MutexGuard};

use axum::body::Bytes;
use regions::{Generation, RegionId};
use scheduler_core::hub::planning::PlanPart;
use scheduler_core::wire::VERSION;
use scheduler_core::wire::plan::{
    FloorV1, GatewayWeights, PlanV1, RegionFloors, RegionFloorsV1, WeightsV1, floors_to_wire,
};

use super::records;

/// What is given out.
#[derive(Default)]
pub(super) struct Plans(Mutex<Parts>);

#[derive(Default)]
struct Parts {
    weights: BTreeMap<RegionId, Arc<Rows>>,
    floors: BTreeMap<RegionId, RegionFloors>,
}

/// The rows of the gateways at one place.
pub(super) struct Rows {
    weights: GatewayWeights,
    /// `WeightsV1` as JSON, made when somebody asks.
    body: OnceLock<Bytes>,
}

impl Rows {
    pub(super) fn body(&self) -> Bytes {
        self.body.get_or_init(|| records::bytes(&WeightsV1::from(&self.weights)).into()).clone()
    }
}

impl Plans {
    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.0.lock()
    }

    /// Gives this part out, if it supersedes the one that is: nobody is told an older one, whatever a store says.
    pub(super) fn publish(&self, part: PlanPart) {
        let (parts, generation) = (&mut *self.parts(), part.generation());
        let newer = |known: Option<Generation>| known.is_none_or(|known| generation > known);
        match part {
            PlanPart::Weights(weights) => {
                if newer(parts.weights.get(&weights.gateway).map(|rows| rows.weights.generation)) {
                    let place = weights.gateway.clone();
                    parts.weights.insert(place, Arc::new(Rows { weights, body: OnceLock::new() }));
                }
            }
            PlanPart::Floors(floors) => {
                if newer(parts.floors.get(&floors.region).map(|known| known.generation)) {
                    parts.floors.insert(floors.region.clone(), floors);
                }
            }
        }
    }

    /// For how many places there are rows.
    pub(super) fn places(&self) -> usize {
        self.parts().weights.len()
    }

    /// The rows for gateways at this place, if they are newer than these.
    pub(super) fn rows(&self, place: &RegionId, after: Option<Generation>) -> Option<Arc<Rows>> {
        let parts = self.parts();
        let rows = parts.weights.get(place)?;
        after.is_none_or(|after| rows.weights.generation > after).then(|| rows.clone())
    }

    /// All of it.
    pub(super) fn all(&self) -> PlanV1 {
        let parts = self.parts();
        PlanV1 {
            version: VERSION,
            weights: parts.weights.values().map(|rows| WeightsV1::from(&rows.weights)).collect(),
            floors: parts.floors.values().map(RegionFloorsV1::from).collect(),
        }
    }

    /// The floors of a region; none, where nobody has planned any yet.
    pub(super) fn floors(&self, region: &RegionId) -> Option<Vec<FloorV1>> {
        self.parts().floors.get(region).map(|floors| floors_to_wire(&floors.floors))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generation(text: &str) -> Generation {
        text.parse().unwrap()
    }

    #[test]
    fn a_part_that_does_not_supersede_is_not_given_out_and_is_given_to_whoever_has_an_older_one() {
        let plans = Plans::default();
        let place: RegionId = "aws/us-east-1".parse().unwrap();
        let weights = |text: &str| GatewayWeights {
            generation: generation(text),
            gateway: place.clone(),
            rows: BTreeMap::new(),
        };
        for (text, given_out) in [("4.2", "4.2"), ("4.1", "4.2"), ("3.9", "4.2"), ("5.1", "5.1")] {
            plans.publish(PlanPart::Weights(weights(text)));
            let now = plans.rows(&place, None).map(|rows| rows.weights.generation);
            assert_eq!(now, Some(generation(given_out)));
        }
        assert!(plans.rows(&place, Some(generation("5.0"))).is_some());
        assert!(plans.rows(&place, Some(generation("5.1"))).is_none());
        assert!(plans.rows(&"gcp/europe-west4".parse().unwrap(), None).is_none());
    }

    #[test]
    fn floors_are_told_once_somebody_has_planned_them() {
        let plans = Plans::default();
        let region: RegionId = "aws/us-east-1".parse().unwrap();
        let floors = |text: &str, replicas: &[(&str, u32)]| {
            let floors = replicas.iter().map(|(name, replicas)| (name.parse().unwrap(), *replicas)).collect();
            PlanPart::Floors(RegionFloors { generation: generation(text), region: region.clone(), floors })
        };
        assert_eq!(plans.floors(&region), None);
        plans.publish(floors("1.2", &[("m", 2)]));
        plans.publish(floors("1.1", &[("m", 9)]));
        assert_eq!(plans.floors(&region), Some(vec![FloorV1 { name: "m".to_owned(), replicas: 2 }]));
        plans.publish(floors("1.3", &[]));
        assert_eq!(plans.floors(&region), Some(Vec::new()), "none any longer, and that is told");
    }
}
