//! Worlds whose hub stands on a real etcd of three members, and what they are worth when it fails.

use super::world::{World, meridian};
use super::{RATE, load_in_stages};
use serde_json::{Value, json};
use std::process::{Child, Stdio};
use std::time::Duration;

const AMERICA: &str = "aws/us-east-1";
const EUROPE: &str = "gcp/europe-west4";
/// In no world of two regions: the tests register it themselves.
const JAPAN: &str = "oci/ap-tokyo-1";

const MEMBERS: [&str; 3] = ["etcd%20m0", "etcd%20m1", "etcd%20m2"];

/// How long the etcd is dead, unless there is a wish for longer (`MERIDIAN_OUTAGE_SECONDS`).
const OUTAGE_SECONDS: u32 = 8;
/// What load goes on for before it, and after its end.
const AROUND_SECONDS: u32 = 12;

/// A hub, asked as a gateway would.
struct Hub {
    url: String,
    fleet_token: String,
    client: reqwest::Client,
}

impl Hub {
    /// The hub of this configuration file.
    fn of(config: &std::path::Path) -> Hub {
        let config: toml::Table = std::fs::read_to_string(config).unwrap().parse().unwrap();
        let url = format!("http://{}", config["listen"].as_str().unwrap());
        let fleet_token = std::fs::read_to_string(config["fleet_token_file"].as_str().unwrap()).unwrap();
        Hub { url, fleet_token, client: reqwest::Client::builder().no_proxy().build().unwrap() }
    }

    async fn routes(&self) -> Option<Value> {
        let answer = self.client.get(format!("{}/v1/routes", self.url)).bearer_auth(&self.fleet_token);
        let answer = answer.timeout(Duration::from_secs(1));
        answer.send().await.ok()?.json().await.ok()
    }

    async fn generation(&self) -> Option<(u64, u64)> {
        let routes = self.routes().await?;
        Some((routes["epoch"].as_u64()?, routes["generation"].as_u64()?))
    }

    /// Registers a spoke of a region; whether the hub has taken it.
    async fn register(&self, region: &str, port: u16, boot_id: u64) -> bool {
        let body = json!({"version": 1, "region": region, "endpoint": format!("127.0.0.1:{port}"), "boot_id": boot_id,
                          "deployments": []});
        let request = self.client.post(format!("{}/v1/spokes", self.url)).bearer_auth(&self.fleet_token);
        let request = request.body(body.to_string());
        request.timeout(Duration::from_secs(8)).send().await.is_ok_and(|answer| answer.status().is_success())
    }

    /// Where its table says that a region is reached.
    async fn endpoint(&self, region: &str) -> Option<String> {
        let routes = self.routes().await?;
        let found = routes["regions"].as_array()?.iter().find(|route| route["id"] == region)?;
        found["endpoint"].as_str().map(str::to_owned)
    }
}

/// Looks at a hub until `done`, and finds that its generation never falls.
async fn generations_rise(hub: &Hub, done: impl Future<Output = ()>) {
    let look = async {
        let mut last = (0, 0);
        loop {
            if let Some(now) = hub.generation().await {
                assert!(now >= last, "generation {now:?} after {last:?}");
                last = now;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        () = look => {}
        () = done => {}
    }
}

#[tokio::test]
async fn an_etcd_that_dies_under_load_costs_no_request_and_the_plan_goes_on_when_it_is_back() {
    let outage =
        std::env::var("MERIDIAN_OUTAGE_SECONDS").map_or(OUTAGE_SECONDS, |text| text.parse().unwrap());
    let world = World::up(&["--store", "etcd", "--regions", "2"]);
    let hub = Hub::of(&world.file("hub.toml"));
    let before = hub.generation().await.unwrap();
    let stages = [AROUND_SECONDS, outage, AROUND_SECONDS];
    let during = generations_rise(&hub, async {
        // As many as the first stage has.
        let of_the_first = u64::from(AROUND_SECONDS * RATE);
        world.until("its time has come", async || world.requests_at(AMERICA).await >= of_the_first).await;
        for member in MEMBERS {
            world.press(&format!("kill?process={member}")).await;
        }
        tokio::time::sleep(Duration::from_secs(u64::from(outage))).await;
        assert_eq!(hub.generation().await, Some(before), "the hub gives out what it has");
        for member in MEMBERS {
            world.press(&format!("restart?process={member}")).await;
        }
        world.until("the store takes registrations", async || hub.register(JAPAN, 7100, 7).await).await;
        world.until("the plan goes on", async || hub.endpoint(JAPAN).await.is_some()).await;
    });
    let report = load_in_stages(&world, &stages, during).await;
    let after = hub.generation().await.unwrap();
    println!("etcd dead for {outage} s; generation {before:?} to {after:?}");
    for (name, stage) in ["before", "during", "after"].iter().zip(report["stages"].as_array().unwrap()) {
        println!(
            "{name}: {} requests, {} failed, p50 {} ms, p99 {} ms, max {} ms",
            stage["requests"],
            stage["failed"],
            stage["latency_ms"]["p50"],
            stage["latency_ms"]["p99"],
            stage["latency_ms"]["max"]
        );
    }
    assert_eq!(report["total"]["failed"], json!(0), "{report:#}");
    assert!(after > before && after.0 == before.0, "{before:?} {after:?}");
}

/// A second hub on the etcd of a world, ended with the test.
struct Second(Child);

impl Second {
    fn start(world: &World) -> (Second, Hub) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let first: toml::Table = std::fs::read_to_string(world.file("hub.toml")).unwrap().parse().unwrap();
        let mut config = first;
        config.insert("listen".to_owned(), address.to_string().into());
        let file = world.file("second-hub.toml");
        std::fs::write(&file, config.to_string()).unwrap();
        let log = std::fs::File::create(world.file("second-hub.log")).unwrap();
        let process =
            meridian().args(["hub", "--config"]).arg(&file).stdout(Stdio::null()).stderr(log).spawn();
        (Second(process.unwrap()), Hub::of(&file))
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[tokio::test]
async fn a_leader_that_sleeps_through_its_term_finds_another_and_writes_nothing_of_its_own() {
    let world = World::up(&["--store", "etcd", "--regions", "1"]);
    let first_config = world.file("hub.toml");
    let first = Hub::of(&first_config);
    let (_second, second) = Second::start(&world);
    world
        .until("both give out the same", async || {
            let table = first.routes().await;
            table.is_some() && table == second.routes().await
        })
        .await;
    assert!(second.register(EUROPE, 7200, 1).await, "whoever is asked");
    for hub in [&first, &second] {
        world.until("both tell of Europe", async || hub.endpoint(EUROPE).await.is_some()).await;
    }
    let said = |name: &str, words: &str| std::fs::read_to_string(world.file(name)).unwrap().contains(words);
    assert!(said("logs/hub.log", "leadership acquired") && !said("second-hub.log", "leadership acquired"));

    let config = first_config.display().to_string();
    let sleeping = first.generation().await.unwrap();
    world.signal("-STOP", &["hub", &config]);
    // A lease that nobody keeps alive may end before somebody leads who could tell of it, so the region comes again.
    world
        .until("the other takes over", async || {
            second.register(JAPAN, 7300, 2).await && second.endpoint(JAPAN).await.is_some()
        })
        .await;
    let taken_over = second.generation().await.unwrap();
    assert!(taken_over > sleeping, "{taken_over:?} after {sleeping:?}");
    // A log is written beside the work, and a moment later.
    world.until("its log says so", async || said("second-hub.log", "leadership acquired")).await;

    world.signal("-CONT", &["hub", &config]);
    // What the first sees as it wakes would be news to write, if it still led.
    world.until("the first follows", async || first.generation().await >= Some(taken_over)).await;
    world.until("it has learnt why", async || said("logs/hub.log", "leadership lost")).await;
    assert!(second.register(JAPAN, 7301, 3).await);
    for hub in [&first, &second] {
        world
            .until("both tell of the new one", async || {
                hub.endpoint(JAPAN).await.as_deref() == Some("127.0.0.1:7301")
            })
            .await;
    }
    let (one, other) = (first.routes().await.unwrap(), second.routes().await.unwrap());
    assert!(one == other || first.generation().await == second.generation().await, "{one:#} {other:#}");
    let times = |name: &str| {
        std::fs::read_to_string(world.file(name)).unwrap().matches("leadership acquired").count()
    };
    assert_eq!((times("logs/hub.log"), times("second-hub.log")), (1, 1), "one term each");
}
