use super::*;
use crate::some_instant;
use regions::health::Health;
use regions::{Generation, RegionRoute, ResidencyPolicy};
use scheduler_api::VERSION;
use scheduler_api::plan::GatewayBoot;
use scheduler_api::traffic::{GatewayTraffic, ObservedLoad, ObservedRegion, ServedTraffic};
use serde_json::{Value, json};

fn id(region: &str) -> RegionId {
    region.parse().unwrap()
}

fn rollout() -> RolloutV1 {
    RolloutV1 {
        version: VERSION,
        generation: "1.3".to_owned(),
        pending: Vec::new(),
        readers: Vec::new(),
        deployments: Vec::new(),
    }
}

fn deployments(count: usize) -> BTreeMap<DeploymentName, Deployment> {
    let text: String = (0..count)
        .map(|number| {
            format!(
                "[[deployment]]\nname = \"d{number:04}\"\ntask = \"embed\"\nmodel = \"pypi://m\"\n\
                 engine = {{ kind = \"cpu\", precision = \"f32\" }}\nresidency = {{ allow = [\"eu\"] }}\n"
            )
        })
        .collect();
    let read = regions::parse_deployments(&text, &Catalogue::builtin()).unwrap();
    read.into_iter().map(|deployment| (deployment.name.clone(), deployment)).collect()
}

fn table(deployment_count: usize) -> RouteTable {
    let route = RegionRoute {
        instances: BTreeMap::from([("spoke-1".parse().unwrap(), "10.0.0.1:7100".parse().unwrap())]),
        deployments: deployments(deployment_count).into_keys().collect(),
        draining: true,
    };
    RouteTable {
        generation: Generation { epoch: 1, number: 3 },
        regions: BTreeMap::from([(id("gcp/europe-west4"), route)]),
        deployments: deployments(deployment_count),
        ..RouteTable::empty()
    }
}

/// Returns the traffic of a gateway in America that sends requests to Europe.
fn traffic(deployment: &str, now: Instant) -> TrafficState {
    let observed = ObservedRegion {
        health: Health::Healthy,
        report_age: None,
        rtt: Duration::from_millis(92),
        in_flight: 2,
        loads: BTreeMap::from([(
            deployment.parse().unwrap(),
            ObservedLoad { ready: 1, pending_tokens: 70, tokens_per_second: 900, held_for: None },
        )]),
    };
    let mut latencies = LatencyHistogram::default();
    latencies.record(Duration::from_millis(100));
    let served = ServedTraffic { requests: 20, failed: 1, tokens: 400, latencies };
    let mut state = TrafficState::default();
    let report = GatewayTraffic {
        gateway: GatewayBoot { region: id("aws/us-east-1"), boot_id: 255 },
        generation: Some(Generation { epoch: 1, number: 2 }),
        interval: Duration::from_secs(2),
        in_flight: 2,
        regions: BTreeMap::from([(id("gcp/europe-west4"), observed)]),
        served: BTreeMap::from([((deployment.parse().unwrap(), Some(id("gcp/europe-west4"))), served)]),
        failures: BTreeMap::from([((deployment.parse().unwrap(), "overloaded".to_owned()), 1)]),
        tenants: BTreeMap::from([("acme".parse().unwrap(), Default::default())]),
        moves: Vec::new(),
        explained: BTreeMap::new(),
        searched: BTreeMap::new(),
    };
    state.record(report, now, 5_000).unwrap();
    state
}

#[test]
fn a_region_that_cannot_start_a_model_shows_the_reason() {
    let failed = |reason: &str| json!({"model": "hf://m", "failure": {"reason": reason, "message": "404"}});
    let deployment = json!({
        "name": "d0000", "model": "hf://m", "engine": {"kind": "cpu", "precision": "f32"}, "revision": null, "next": null,
        "regions": [{"region": "gcp/europe-west4", "target": 1, "models": [], "failed": failed("model_missing"),
                     "failed_next": failed("disk_full")}],
    });
    let rollout = RolloutV1 { deployments: vec![serde_json::from_value(deployment).unwrap()], ..rollout() };
    let (now, table, traffic) = (some_instant(), table(1), TrafficState::default());
    let (catalogue, capacity) = (Catalogue::builtin(), BTreeMap::new());
    let fleet = FleetView { catalogue: &catalogue, table: &table, rollout: &rollout, capacity: &capacity };
    let sums = TrafficSums::of(&traffic, now);
    let found = serde_json::to_value(FleetSnapshot::new(fleet, &traffic, &sums, (now, 9_000))).unwrap();
    let expected = json!([
        {"model": "hf://m", "reason": "model_missing", "message": "404", "is_next": false},
        {"model": "hf://m", "reason": "disk_full", "message": "404", "is_next": true},
    ]);
    assert_eq!(found["deployments"][0]["regions"][0]["failed"], expected);
}

fn shown(table: &RouteTable, traffic: &TrafficState, now: Instant) -> Value {
    let (catalogue, rollout, capacity) = (Catalogue::builtin(), rollout(), BTreeMap::new());
    let fleet = FleetView { catalogue: &catalogue, table, rollout: &rollout, capacity: &capacity };
    let sums = TrafficSums::of(traffic, now);
    serde_json::to_value(FleetSnapshot::new(fleet, traffic, &sums, (now, 9_000))).unwrap()
}

#[test]
fn a_snapshot_joins_the_table_with_the_traffic() {
    let now = some_instant();
    let found = shown(&table(2), &traffic("d0001", now), now);
    let region = &found["regions"][0];
    assert_eq!(region["id"], "gcp/europe-west4");
    assert_eq!(region["zones"], json!(["nl", "eea", "eu"]));
    assert_eq!(
        (&region["draining"], &region["state"], &region["registered"]),
        (&json!(true), &json!("healthy"), &json!(false))
    );
    assert_eq!((&region["pending_tokens"], &region["traffic"]["rate"]), (&json!(70), &json!(10.0)));
    let arc = &found["arcs"][0];
    assert_eq!((&arc["from"], &arc["to"]), (&json!("aws/us-east-1"), &json!("gcp/europe-west4")));
    assert_eq!((&arc["rtt_ms"], &arc["traffic"]["failed"]), (&json!(92.0), &json!(0.5)));
    let gateway = &found["gateways"][0];
    assert_eq!((&gateway["current"], &gateway["boot"]), (&json!(false), &json!("00000000000000ff")));
    let busiest = &found["deployments"][0];
    assert_eq!((&busiest["name"], &busiest["residency"]), (&json!("d0001"), &json!("eu")));
    assert_eq!(busiest["failures"], json!([["overloaded", 1]]));
    assert_eq!(found["tenants"][0]["applied"], false);
    assert_eq!(found["events"][0]["kind"], "gateway");
}

#[test]
fn limit_of_deployments_is_enforced_and_those_with_traffic_are_kept() {
    let now = some_instant();
    let last = format!("d{ROWS_MAX:04}");
    let found = shown(&table(ROWS_MAX + 1), &traffic(&last, now), now);
    assert_eq!(found["deployments"].as_array().map(Vec::len), Some(ROWS_MAX));
    assert_eq!((&found["deployments"][0]["name"], &found["deployments_omitted"]), (&json!(last), &json!(1)));
    let complete = shown(&table(ROWS_MAX), &TrafficState::default(), now);
    assert_eq!(
        (complete["deployments"].as_array().map(Vec::len), &complete["deployments_omitted"]),
        (Some(ROWS_MAX), &json!(0))
    );
}

#[test]
fn the_limits_of_an_applied_tenant_are_shown() {
    let text = "[[tenant]]\nname = \"acme\"\nkey_sha256 = [\"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\"]\n\
                residency = { allow = [\"eu\"] }\nlimits = { requests_per_second = 100 }\n";
    let tenants = regions::parse_tenants(text, &Catalogue::builtin()).unwrap();
    let tenants = Some(regions::Tenants { all: tenants, ..Default::default() });
    let found = shown(&RouteTable { tenants, ..table(1) }, &TrafficState::default(), some_instant());
    let tenant = &found["tenants"][0];
    assert_eq!((&tenant["applied"], &tenant["requests_per_second"]), (&json!(true), &json!(100)));
    assert!(!found.to_string().contains("9f86d081"), "no digest of a key");
}

#[test]
fn a_policy_is_shown_as_it_is_written() {
    assert_eq!(ResidencyPolicy::Anywhere.to_string(), "anywhere");
}
