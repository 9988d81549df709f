//! The published parts of the plan: on the leader as it writes them, on followers as they see them in the store.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use supervision::{Mutex, MutexGuard};

use axum::body::Bytes;
use regions::{Generation, RegionId};
use scheduler_api::VERSION;
use scheduler_api::plan::{
    AllSharesV1, FloorV1, GatewayInstance, GatewayWeights, PlanV1, RegionFloors, RegionFloorsV1,
    TenantShares, TenantSharesV1, WeightsV1, floors_to_wire,
};
use scheduler_core::hub::planning::PlanPart;

use super::records;

/// Published plan.
#[derive(Default)]
pub(super) struct PublishedPlan(Mutex<PlanParts>);

#[derive(Default)]
struct PlanParts {
    weights: BTreeMap<RegionId, Arc<CachedWeights>>,
    floors: BTreeMap<RegionId, RegionFloors>,
    shares: BTreeMap<GatewayInstance, TenantShares>,
}

/// Weight rows for the gateways in one region.
pub(super) struct CachedWeights {
    weights: GatewayWeights,
    /// `WeightsV1` as JSON, serialised at the first request.
    body: OnceLock<Bytes>,
}

impl CachedWeights {
    pub(super) fn body(&self) -> Bytes {
        self.body.get_or_init(|| records::bytes(&WeightsV1::from(&self.weights)).into()).clone()
    }
}

impl PublishedPlan {
    fn parts(&self) -> MutexGuard<'_, PlanParts> {
        self.0.lock()
    }

    /// Publishes this part if it is newer than the published one, so that no generation falls, whatever the store
    /// holds.
    pub(super) fn publish(&self, part: PlanPart) {
        let (parts, generation) = (&mut *self.parts(), part.generation());
        let newer = |known: Option<Generation>| known.is_none_or(|known| generation > known);
        match part {
            PlanPart::Weights(weights) => {
                if newer(parts.weights.get(&weights.gateway).map(|rows| rows.weights.generation)) {
                    let place = weights.gateway.clone();
                    parts.weights.insert(place, Arc::new(CachedWeights { weights, body: OnceLock::new() }));
                }
            }
            PlanPart::Floors(floors) => {
                if newer(parts.floors.get(&floors.region).map(|known| known.generation)) {
                    parts.floors.insert(floors.region.clone(), floors);
                }
            }
            PlanPart::Shares(shares) => {
                if newer(parts.shares.get(&shares.gateway).map(|known| known.generation)) {
                    parts.shares.insert(shares.gateway.clone(), shares);
                }
            }
        }
    }

    /// Returns the number of gateway regions with rows.
    pub(super) fn places(&self) -> usize {
        self.parts().weights.len()
    }

    /// Returns the rows for gateways in this region, if they are newer than `after`.
    pub(super) fn rows(&self, place: &RegionId, after: Option<Generation>) -> Option<Arc<CachedWeights>> {
        let parts = self.parts();
        let rows = parts.weights.get(place)?;
        after.is_none_or(|after| rows.weights.generation > after).then(|| rows.clone())
    }

    /// Removes the shares of a gateway that is gone.
    pub(super) fn remove_shares(&self, gateway: &GatewayInstance) {
        self.parts().shares.remove(gateway);
    }

    /// Returns the number of gateways that share the tenants' limits with this one, and what it lacks of its shares.
    pub(super) fn shares(
        &self,
        gateway: &GatewayInstance,
        running: Option<Generation>,
    ) -> (u32, Option<TenantShares>) {
        let parts = self.parts();
        match parts.shares.get(gateway) {
            Some(shares) => (shares.gateways, shares.newer_than(running)),
            None => {
                let newest = parts.shares.values().max_by_key(|shares| shares.generation);
                (newest.map_or(0, |shares| shares.gateways) + 1, None)
            }
        }
    }

    /// Returns the shares of all gateways.
    pub(super) fn all_shares(&self) -> AllSharesV1 {
        let gateways = self.parts().shares.values().map(TenantSharesV1::from).collect();
        AllSharesV1 { version: VERSION, gateways }
    }

    /// Returns the number of gateways with shares.
    pub(super) fn sharing_gateways(&self) -> usize {
        self.parts().shares.len()
    }

    /// Returns the whole plan, without placements, which follow from other records.
    pub(super) fn all(&self) -> PlanV1 {
        let parts = self.parts();
        PlanV1 {
            version: VERSION,
            weights: parts.weights.values().map(|rows| WeightsV1::from(&rows.weights)).collect(),
            floors: parts.floors.values().map(RegionFloorsV1::from).collect(),
            placements: Vec::new(),
        }
    }

    /// Returns the floors of a region; `None` if no plan has floors for it yet.
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
    fn older_parts_are_not_published_and_clients_with_older_ones_get_the_newest() {
        let plans = PublishedPlan::default();
        let place: RegionId = "aws/us-east-1".parse().unwrap();
        let weights = |text: &str| GatewayWeights {
            generation: generation(text),
            gateway: place.clone(),
            rows: BTreeMap::new(),
        };
        for (text, published) in [("4.2", "4.2"), ("4.1", "4.2"), ("3.9", "4.2"), ("5.1", "5.1")] {
            plans.publish(PlanPart::Weights(weights(text)));
            let now = plans.rows(&place, None).map(|rows| rows.weights.generation);
            assert_eq!(now, Some(generation(published)));
        }
        assert!(plans.rows(&place, Some(generation("5.0"))).is_some());
        assert!(plans.rows(&place, Some(generation("5.1"))).is_none());
        assert!(plans.rows(&"gcp/europe-west4".parse().unwrap(), None).is_none());
    }

    #[test]
    fn floors_are_published_once_planned() {
        let plans = PublishedPlan::default();
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
        assert_eq!(plans.floors(&region), Some(Vec::new()), "an empty list is published too");
    }
}
