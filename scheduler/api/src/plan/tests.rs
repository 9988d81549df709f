//! Round trips of the plan's messages, and rejection of invalid ones.

use super::super::{VERSION, any};
use super::*;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::select;
use regions::Generation;
use regions::weights::{ShareReason, WHOLE_PERMILLE};
use serde_json::{Value, json};

prop_compose! {
    fn row()(
        deployment in any::name(),
        residency in select(vec!["anywhere", "eu", "de,eu,aws/us-east-1", "de,fr & eu"]),
        origin in any::region(),
    ) -> (TrafficClass, RegionId) {
        (TrafficClass { deployment, residency: residency.parse().unwrap() }, origin)
    }
}

prop_compose! {
    fn shares()(
        first in 1..1000u16, regions in proptest::collection::btree_set(any::region(), 2), reason in select(&ShareReason::ALL[..]),
    ) -> Vec<NamedShare> {
        let permilles = [first, WHOLE_PERMILLE - first];
        regions.into_iter().zip(permilles).map(|(region, permille)| NamedShare { region, permille, reason }).collect()
    }
}

prop_compose! {
    fn pool()(ready: u32, tokens_per_second: u64, counts in vec((any::<u32>(), any::<u32>()), 0..3)) -> (u32, u64, Vec<(u32, u32)>) {
        (ready, tokens_per_second, counts)
    }
}

proptest! {
    #[test]
    fn demand_survives_a_round_trip(
        region in any::region(), boot_id: u64, classes in btree_map(row(), any::<u64>(), 0..4),
        reachable_regions in proptest::option::of(proptest::collection::btree_set(any::region(), 0..4)),
    ) {
        let demand = GatewayDemand { gateway: GatewayBoot { region, boot_id }, classes, reachable_regions };
        let text = serde_json::to_string(&DemandV1::from(&demand)).unwrap();
        let wire: DemandV1 = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(GatewayDemand::try_from(wire), Ok(demand));
    }

    #[test]
    fn rows_survive_a_round_trip(
        epoch: u64, number: u64, gateway in any::region(), rows in btree_map(row(), shares(), 0..4),
    ) {
        let weights = GatewayWeights { generation: Generation { epoch, number }, gateway, rows };
        let text = serde_json::to_string(&WeightsV1::from(&weights)).unwrap();
        let wire: WeightsV1 = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(GatewayWeights::try_from(wire), Ok(weights));
    }

    #[test]
    fn floors_survive_a_round_trip(
        epoch: u64, number: u64, region in any::region(), floors in btree_map(any::name(), any::<u32>(), 0..4),
    ) {
        let floors = RegionFloors { generation: Generation { epoch, number }, region, floors };
        let text = serde_json::to_string(&RegionFloorsV1::from(&floors)).unwrap();
        let wire: RegionFloorsV1 = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(RegionFloors::try_from(wire), Ok(floors));
    }

    #[test]
    fn capacity_survives_a_round_trip(pools in vec(pool(), 0..4)) {
        let mut number = 0;
        let mut name = || {
            number += 1;
            format!("d{number}").parse().unwrap()
        };
        let pools = pools.into_iter().map(|(ready, tokens_per_second, counts)| {
            let deployments = counts.into_iter().map(|(ready, max)| (name(), ReplicaCount { ready, max })).collect();
            ReplicaPool { ready, tokens_per_second, deployments }
        });
        let capacity = RegionCapacity { pools: pools.collect() };
        let text = serde_json::to_string(&Vec::<PoolV1>::from(&capacity)).unwrap();
        let wire: Vec<PoolV1> = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(RegionCapacity::try_from(wire), Ok(capacity));
    }
}

fn weights() -> Value {
    let share =
        |region: &str, permille: u16| json!({"region": region, "permille": permille, "reason": "nearest"});
    let row = |deployment: &str| {
        json!({"deployment": deployment, "residency": null, "origin": "aws/us-east-1",
                   "shares": [share("aws/us-east-1", 600), share("gcp/europe-west4", 400)]})
    };
    json!({"version": 1, "epoch": 1, "generation": 7, "gateway": "aws/us-east-1", "rows": [row("a"), row("b")]})
}

#[test]
fn rows_with_one_invalid_entry_are_rejected_as_a_whole() {
    let check = |pointer: &str, value: Value, field: &str| {
        let mut message = weights();
        *message.pointer_mut(pointer).unwrap() = value;
        let wire: WeightsV1 = serde_json::from_value(message).unwrap();
        assert_eq!(GatewayWeights::try_from(wire).unwrap_err().field, field);
    };
    check("/gateway", json!("here"), "gateway");
    check("/rows/1/deployment", json!("a"), "rows[1]");
    check("/rows/1/deployment", json!("a b"), "rows[1].deployment");
    check("/rows/0/residency", json!(""), "rows[0].residency");
    check("/rows/0/origin", json!("mars"), "rows[0].origin");
    check("/rows/0/shares/0/permille", json!(599), "rows[0].shares");
    check("/rows/0/shares/0/permille", json!(601), "rows[0].shares");
    check("/rows/0/shares", json!([]), "rows[0].shares");
    check("/rows/0/shares/1/region", json!("aws/us-east-1"), "rows[0].shares[1].region");
    check("/rows/0/shares/1/reason", json!("because"), "rows[0].shares[1].reason");
    let mut lost = weights();
    lost["rows"][0].as_object_mut().unwrap().remove("residency");
    let error = serde_json::from_value::<WeightsV1>(lost).unwrap_err();
    assert!(error.to_string().contains("missing field `residency`"), "{error}");
}

#[test]
fn the_maximum_number_of_rows_is_accepted_and_one_more_is_not() {
    let rows = |count: usize| {
        let class = |number: usize| ClassDemandV1 {
            deployment: format!("d{number}"),
            residency: None,
            origin: "aws/us-east-1".to_owned(),
            tokens_per_second: 1,
        };
        let gateway = "aws/us-east-1".to_owned();
        DemandV1 {
            version: VERSION,
            gateway,
            boot_id: 1,
            classes: (0..count).map(class).collect(),
            reachable_regions: None,
        }
    };
    assert_eq!(GatewayDemand::try_from(rows(ROWS_MAX)).map(|demand| demand.classes.len()), Ok(ROWS_MAX));
    assert_eq!(GatewayDemand::try_from(rows(ROWS_MAX + 1)).unwrap_err().field, "classes");
}

#[test]
fn a_deployment_has_one_capacity() {
    let count = || CountV1 { name: "a".to_owned(), ready: 1, max: 1 };
    let pool = |deployments| PoolV1 { ready: 1, tokens_per_second: 1, deployments };
    let twice = RegionCapacity::try_from(vec![pool(vec![count()]), pool(vec![count()])]);
    assert_eq!(twice.unwrap_err().field, "capacity[1].deployments[0].name");
}
