//! Tests of the hub over HTTP.

use super::world::{
    AMERICA, EUROPE, Hub, Lease, config, port, ports, ready, registration, table, wait_until,
};
use regions::{Generation, RouteTable, parse_deployments};
use scheduler::config::HubConfig;
use scheduler_api::paths;
use scheduler_api::route::RouteTableV1;
use scheduler_api::route::changes::{self, TableChangesV1};
use scheduler_core::registry::SPOKES_PER_REGION_MAX;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

#[tokio::test]
async fn a_region_is_in_the_route_table_once_registered() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let first = hub.routes().await;
    assert!(first.regions.is_empty() && first.deployments.len() == 2);

    let lease = hub.register(EUROPE, 7100, 1, &["minilm"]).await;
    let routes = hub.wait_for_routes("Europe is there", |table| port(table, EUROPE) == Some(7100)).await;
    assert_eq!(ready(&routes, EUROPE), BTreeSet::from(["minilm".to_owned()]));

    let (status, body) = hub.keep_alive(&lease, &["minilm", "minilm-eu"]).await;
    assert_eq!((status, &body["lease"], body["ttl_ms"].as_u64()), (200, &json!(lease.id), Some(5000)));
    let routes = hub.wait_for_routes("more is ready", |table| ready(table, EUROPE).len() == 2).await;
    let (status, unchanged) = hub.keep_alive_unchanged(&lease).await;
    assert_eq!((status, &unchanged), (200, &body), "the response to the state that the hub has");
    assert_eq!(hub.routes().await.generation, routes.generation);
    hub.keep_alive(&lease, &[]).await;
    hub.wait_for_routes("nothing is ready", |table| ready(table, EUROPE).is_empty()).await;
    hub.stop().await;
}

#[tokio::test]
async fn a_long_poll_returns_on_a_change_or_at_its_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let now = hub.routes().await.generation;
    let (status, _, _) = hub.get(&format!("/v1/routes?after={now}&wait_ms=1")).await;
    assert_eq!(status, 204, "nothing has changed");
    let path = format!("/v1/routes?after={now}&wait_ms=30000");
    let ((status, _, body), _) = tokio::join!(hub.get(&path), hub.register(EUROPE, 7100, 1, &[]));
    assert_eq!((status, port(&table(body), EUROPE)), (200, Some(7100)));
    hub.stop().await;
}

#[tokio::test]
async fn a_reader_of_one_of_the_last_tables_receives_the_changes_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<String> = (0..40).map(|number| format!("minilm-{number}")).collect();
    let deployment = |name: &String| {
        format!(
            "[[deployment]]\nname = \"{name}\"\nmodel = \"pypi://m\"\ntask = \"embed\"\nengine = {{ kind = \"cpu\", precision = \"f32\" }}\n"
        )
    };
    let text: String = all.iter().map(deployment).collect();
    let fleet = config(dir.path());
    let deployments = parse_deployments(&text, &fleet.catalogue).unwrap();
    let hub = Hub::start(HubConfig { deployments, ..fleet }).await;
    let names: Vec<&str> = all.iter().map(String::as_str).collect();
    let lease = hub.register(EUROPE, 7100, 1, &names[1..]).await;
    let before = hub
        .wait_for_routes("all but one are ready", |table| {
            table.regions.values().any(|route| route.deployments.len() == 39)
        })
        .await;
    hub.keep_alive(&lease, &names).await;
    let after = hub.wait_for_routes("all are ready", |table| ready(table, EUROPE).len() == 40).await;
    let query = |generation: &Generation| format!("{}?after={generation}&wait_ms=0", paths::ROUTES);
    let (_, _, body) = hub.get(&format!("{}&changes=true", query(&before.generation))).await;
    let steps: Vec<TableChangesV1> = serde_json::from_value(body["changes"].clone()).unwrap();
    let changed: Vec<_> = steps.iter().flat_map(|step| &step.regions).map(|region| &region.added).collect();
    assert_eq!(changed, [&["minilm-0".to_owned()]], "{body}");
    let applied = changes::apply(RouteTableV1::from(&before), steps).unwrap();
    assert_eq!(RouteTable::try_from(applied).as_ref(), Ok(&after));
    let whole = |body: Value| table(body).generation;
    let (_, _, body) = hub.get(&query(&before.generation)).await;
    assert_eq!(whole(body), after.generation, "a reader that requests no changes");
    let unknown = Generation { epoch: 0, number: 1 };
    let (_, _, body) = hub.get(&format!("{}&changes=true", query(&unknown))).await;
    assert_eq!(whole(body), after.generation, "a reader with a table that the hub does not know");
    hub.stop().await;
}

#[tokio::test]
async fn a_silent_spoke_is_removed_after_its_lease_and_the_grace_period() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.lease_ttl = Duration::from_millis(1);
    config.lapsed_keep = Duration::from_millis(1);
    let hub = Hub::start(config).await;
    let before = hub.routes().await.generation.number;
    let lease = hub.register(EUROPE, 7100, 1, &[]).await;
    let gone = hub
        .wait_for_routes("it was received and released", |table| {
            table.regions.is_empty() && table.generation.number > before
        })
        .await;
    assert_eq!(gone.generation.number, before + 2);
    let (status, body) = hub.keep_alive(&lease, &[]).await;
    assert_eq!((status, &body["error"]["code"]), (404, &json!("lease_not_found")));
    hub.stop().await;
}

#[tokio::test]
async fn a_region_keeps_its_route_for_the_grace_period_after_its_last_spoke() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let lease = hub.register(EUROPE, 7100, 1, &["minilm"]).await;
    hub.wait_for_routes("Europe is there", |table| port(table, EUROPE).is_some()).await;
    assert_eq!(hub.deregister(&lease).await, 204);
    // The hub sees changes in order: when America is there, it has seen that Europe has deregistered.
    hub.register(AMERICA, 7200, 2, &[]).await;
    let routes = hub.wait_for_routes("America is there", |table| port(table, AMERICA).is_some()).await;
    assert_eq!((port(&routes, EUROPE), ready(&routes, EUROPE).len()), (Some(7100), 1));
    hub.stop().await;
}

#[tokio::test]
async fn all_spokes_of_a_region_are_in_the_route_table_until_they_deregister() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let old = hub.register(EUROPE, 7100, 1, &[]).await;
    let new = hub.register(EUROPE, 7200, 2, &[]).await;
    hub.wait_for_routes("both are there", |table| ports(table, EUROPE) == [7100, 7200]).await;
    assert_eq!(hub.keep_alive(&old, &["minilm"]).await.0, 200, "their leases are independent");
    let draining = json!({"version": 1, "state": {"deployments": [], "draining": true}}).to_string();
    assert_eq!(hub.post(&new.keep_alive_path(), draining).await.0, 200);
    // The hub sees changes in order: when America is there, it has seen that the spoke drains.
    hub.register(AMERICA, 7300, 3, &[]).await;
    let routes = hub.wait_for_routes("America is there", |table| port(table, AMERICA).is_some()).await;
    assert_eq!(ports(&routes, EUROPE), [7100, 7200], "its replicas are not replaced yet");
    assert_eq!(hub.deregister(&new).await, 204);
    hub.wait_for_routes("it has left", |table| ports(table, EUROPE) == [7100]).await;
    assert_eq!(hub.deregister(&new).await, 404);

    let again = hub.register(EUROPE, 7101, 1, &[]).await;
    assert_ne!(again, old);
    assert_eq!(hub.keep_alive(&old, &[]).await.0, 404, "registering again replaces the lease");
    hub.wait_for_routes("it has moved", |table| ports(table, EUROPE) == [7101]).await;
    hub.stop().await;
}

#[tokio::test]
async fn generations_rise_across_restarts_and_registrations_survive() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let lease = hub.register(EUROPE, 7100, 1, &["minilm"]).await;
    let before = hub.wait_for_routes("Europe is there", |table| port(table, EUROPE).is_some()).await;
    hub.stop().await;

    let hub = Hub::start(config(dir.path())).await;
    assert_eq!(hub.routes().await, before, "the table is unchanged");
    assert_eq!(hub.keep_alive(&lease, &["minilm"]).await.0, 200);
    hub.register(AMERICA, 7200, 2, &[]).await;
    let after = hub.wait_for_routes("America is there", |table| port(table, AMERICA).is_some()).await;
    assert!(after.generation > before.generation && port(&after, EUROPE).is_some());
    hub.kill().await;

    let mut less = config(dir.path());
    less.deployments.retain(|deployment| deployment.name.as_str() == "minilm-eu");
    let mut hub = None;
    wait_until("the store of the killed hub is free", async || {
        hub = Hub::try_start(less.clone()).await.ok();
        hub.is_some()
    })
    .await;
    let hub = hub.unwrap();
    let last = hub.wait_for_routes("minilm is gone", |table| table.deployments.len() == 1).await;
    assert!(last.generation > after.generation);
    assert!(ready(&last, EUROPE).is_empty(), "a removed deployment is not ready anywhere");
    hub.stop().await;
}

#[tokio::test]
async fn a_hub_that_lost_its_disk_publishes_a_higher_generation() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let before = hub.routes().await.generation;
    hub.stop().await;
    let later = Generation { epoch: before.epoch + 1, ..before };
    wait_until("a second has passed", async || {
        std::fs::remove_dir_all(dir.path().join("hub")).unwrap();
        let hub = Hub::start(config(dir.path())).await;
        let after = hub.routes().await.generation;
        hub.stop().await;
        after >= later
    })
    .await;
}

#[tokio::test]
async fn a_second_hub_on_the_same_store_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let error = Hub::try_start(config(dir.path())).await.err().expect("the request is sent").to_string();
    assert!(error.contains("hub.redb") && error.contains("another hub"), "{error}");
    let mut taken = config(&dir.path().join("elsewhere"));
    taken.listen = hub.url.trim_start_matches("http://").parse().unwrap();
    let error = Hub::try_start(taken).await.err().expect("the port is taken").to_string();
    assert!(error.contains("cannot listen on") && error.contains("another port"), "{error}");
    hub.stop().await;
}

#[tokio::test]
async fn ready_but_unknown_deployments_are_reported_and_not_in_the_route_table() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let message = registration(EUROPE, 7100, 1, &["minilm", "other"]);
    let (status, _, body) = hub.post(paths::SPOKES, message).await;
    assert_eq!((status, &body["unknown"]), (200, &json!(["other"])));
    let routes = hub.wait_for_routes("Europe is there", |table| port(table, EUROPE).is_some()).await;
    assert_eq!(ready(&routes, EUROPE), BTreeSet::from(["minilm".to_owned()]));
    let (status, body) = hub.keep_alive(&Lease::of(EUROPE, 1, &body), &["other"]).await;
    assert_eq!((status, &body["unknown"]), (200, &json!(["other"])));
    hub.stop().await;
}

#[tokio::test]
async fn limit_of_spokes_per_region_is_enforced() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    for boot_id in 1..=SPOKES_PER_REGION_MAX as u64 {
        hub.register(EUROPE, 7100, boot_id, &[]).await;
    }
    let (status, code, _) = hub.post(paths::SPOKES, registration(EUROPE, 7100, 99, &[])).await;
    assert_eq!((status, code.as_str()), (429, "overloaded"));
    hub.register(EUROPE, 7100, 1, &[]).await;
    hub.register(AMERICA, 7100, 99, &[]).await;
    hub.stop().await;
}

/// Two spokes with one name would replace each other in the table and in the views of operators.
#[tokio::test]
async fn an_instance_name_belongs_to_one_spoke_until_its_lease_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let named = |boot_id: u64| {
        let mut message: Value = serde_json::from_str(&registration(EUROPE, 7100, boot_id, &[])).unwrap();
        message["instance"] = json!("a");
        message.to_string()
    };
    let (status, _, first) = hub.post(paths::SPOKES, named(1)).await;
    assert_eq!(status, 200);
    let (status, code, body) = hub.post(paths::SPOKES, named(2)).await;
    assert_eq!(
        (status, code.as_str(), &body["error"]["param"]),
        (409, "instance_in_use", &json!("instance"))
    );
    let (status, _, again) = hub.post(paths::SPOKES, named(1)).await;
    assert_eq!(status, 200, "the same process registers again");
    assert_ne!(first["lease"], again["lease"]);
    // The lease of the first registration has been revoked, and the name stays.
    let (status, ..) = hub.post(paths::SPOKES, named(2)).await;
    assert_eq!(status, 409);
    assert_eq!(hub.deregister(&Lease::of(EUROPE, 1, &again)).await, 204);
    let (status, ..) = hub.post(paths::SPOKES, named(2)).await;
    assert_eq!(status, 200, "it was deregistered");
    hub.stop().await;
}

/// Gateways look for a job at one spoke of its region, but both spokes serve all other requests.
#[tokio::test]
async fn a_region_with_several_queues_of_jobs_is_counted_until_one_of_them_ends() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let is_counted = async |count: u8| {
        let response = client.get(format!("{}/metrics", hub.url)).send().await.unwrap();
        let line = format!("meridian_hub_regions_with_several_job_queues {count}");
        response.text().await.unwrap().lines().any(|given| given == line)
    };
    let mut leases = Vec::new();
    for (region, boot_id) in [(EUROPE, 1), (AMERICA, 2), (EUROPE, 3)] {
        assert!(is_counted(0).await);
        let mut message: Value = serde_json::from_str(&registration(region, 7100, boot_id, &[])).unwrap();
        message["job_log"] = json!("file");
        let (status, _, lease) = hub.post(paths::SPOKES, message.to_string()).await;
        assert_eq!(status, 200, "{lease}");
        leases.push(lease);
    }
    wait_until("Europe is counted", async || is_counted(1).await).await;
    assert_eq!(hub.deregister(&Lease::of(EUROPE, 1, &leases[0])).await, 204);
    wait_until("Europe has one queue", async || is_counted(0).await).await;
    hub.stop().await;
}

/// Returns the holder of the scaler lease in a response, and the revision of its epoch.
fn scaler(body: &Value) -> Option<(u64, u64)> {
    Some((body["scaler"]["boot_id"].as_u64()?, body["scaler"]["epoch"]["revision"].as_u64()?))
}

/// Registers a spoke in Europe; returns its lease and the response.
async fn register_scaling(hub: &Hub, boot_id: u64, scales: bool) -> (Lease, Value) {
    let mut message: Value = serde_json::from_str(&registration(EUROPE, 7100, boot_id, &[])).unwrap();
    message["scales"] = json!(scales);
    let (status, _, body) = hub.post(paths::SPOKES, message.to_string()).await;
    assert_eq!(status, 200, "{body}");
    (Lease::of(EUROPE, boot_id, &body), body)
}

#[tokio::test]
async fn one_spoke_of_a_region_holds_the_scaler_lease_and_another_gets_it_when_that_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let (none, body) = register_scaling(&hub, 9, false).await;
    assert_eq!(scaler(&body), None, "it cannot start replicas");
    let (first, body) = register_scaling(&hub, 1, true).await;
    let (holder, epoch) = scaler(&body).unwrap();
    assert_eq!(holder, 1);
    let (second, body) = register_scaling(&hub, 2, true).await;
    assert_eq!(scaler(&body), Some((1, epoch)));
    assert_eq!(
        scaler(&hub.keep_alive_unchanged(&none).await.1),
        Some((1, epoch)),
        "every spoke learns the holder"
    );
    assert_eq!(scaler(&hub.keep_alive_unchanged(&first).await.1), Some((1, epoch)), "the epoch stays");
    let (again, body) = register_scaling(&hub, 1, true).await;
    assert_eq!(scaler(&body), Some((1, epoch)), "it has registered again");

    assert_eq!(hub.deregister(&again).await, 204);
    let (holder, next) = scaler(&hub.keep_alive_unchanged(&second).await.1).unwrap();
    assert!(holder == 2 && next > epoch, "{holder} has {next} after {epoch}");

    let (third, body) = register_scaling(&hub, 3, true).await;
    assert_eq!(scaler(&body), Some((2, next)));
    let draining = json!({"version": 1, "state": {"deployments": [], "draining": true}}).to_string();
    let (status, _, body) = hub.post(&second.keep_alive_path(), draining.clone()).await;
    assert_eq!((status, scaler(&body)), (200, None), "a spoke that drains gives it up");
    let (_, _, body) = hub.post(&second.keep_alive_path(), draining).await;
    assert_eq!(scaler(&body), None, "and does not get it again");
    let (holder, last) = scaler(&hub.keep_alive_unchanged(&third).await.1).unwrap();
    assert!(holder == 3 && last > next);
    hub.stop().await;
}

#[tokio::test]
async fn the_scaler_lease_of_a_silent_spoke_goes_to_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.lease_ttl = Duration::from_millis(500);
    let hub = Hub::start(config).await;
    register_scaling(&hub, 1, true).await;
    let (second, body) = register_scaling(&hub, 2, true).await;
    let (holder, epoch) = scaler(&body).unwrap();
    assert_eq!(holder, 1);
    wait_until("the other spoke has the lease", async || {
        let (status, body) = hub.keep_alive_unchanged(&second).await;
        assert_eq!(status, 200, "{body}");
        scaler(&body).is_some_and(|(holder, next)| holder == 2 && next > epoch)
    })
    .await;
    hub.stop().await;
}

#[tokio::test]
async fn invalid_input_is_a_4xx_that_names_the_field() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    let check = |response: (u16, String, Value), status: u16, code: &str, param: Value, word: &str| {
        let (given, header, body) = response;
        let error = &body["error"];
        assert_eq!((given, header.as_str(), &error["code"]), (status, code, &json!(code)), "{body}");
        assert_eq!(error["param"], param, "{body}");
        assert!(error["message"].as_str().unwrap().contains(word), "{word} in {body}");
        assert!(error["type"].is_string());
    };
    let with = |field: &str, value: Value| {
        let mut message: Value = serde_json::from_str(&registration(EUROPE, 7100, 1, &[])).unwrap();
        message[field] = value;
        hub.post(paths::SPOKES, message.to_string())
    };
    let invalid = "invalid_value";
    check(
        with("region", json!("gcp/europe-west44")).await,
        400,
        invalid,
        json!("region"),
        "gcp/europe-west4",
    );
    check(with("region", json!("europe")).await, 400, invalid, json!("region"), "cloud/name");
    check(with("instance", json!("a b")).await, 400, invalid, json!("instance"), "spoke-a");
    check(with("endpoint", json!("here")).await, 400, invalid, json!("endpoint"), "HOST:PORT");
    check(with("deployments", json!(["a b"])).await, 400, invalid, json!("deployments[0]"), "a b");
    check(with("version", json!(2)).await, 400, "invalid_json", json!(null), "version 2");
    check(hub.post(paths::SPOKES, "{").await, 400, "invalid_json", json!(null), "EOF");
    check(
        hub.post(paths::SPOKES, vec![b' '; (2 << 20) + 1]).await,
        413,
        "body_too_large",
        json!(null),
        "2097152",
    );
    check(
        hub.post("/v1/leases/one/keepalive", "{}").await,
        400,
        invalid,
        json!("lease"),
        "32 hexadecimal digits",
    );
    check(hub.get("/v1/routes?after=1").await, 400, invalid, json!("after"), "epoch.number");
    check(hub.get("/v1/routes?wait_ms=soon").await, 400, invalid, json!("wait_ms"), "20000");
    check(hub.get(paths::SPOKES).await, 405, "method_not_allowed", json!(null), "method");
    check(hub.get("/v2").await, 404, "not_found", json!(null), "path");
    for path in [paths::LIVEZ, paths::READYZ] {
        assert_eq!(hub.get(path).await.0, 200, "{path}");
    }
    hub.stop().await;
}
