//! Local fleets whose hub uses a real etcd cluster of three members, and failures of that cluster.

use super::local_fleet::{LocalFleet, meridian};
use super::{RATE, load_in_stages};
use identity::{IdentityFiles, OwnName, ProcessIdentity, Transport};
use regions::spiffe::Role;
use reqwest::Method;
use resolver::{DnsSection, Resolver};
use scheduler_api::paths;
use scheduler_client::hub::{ControlPlaneClient, HubRequest};
use scheduler_core::hubs::Hubs;
use serde_json::{Value, json};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

const AMERICA: &str = "aws/us-east-1";
const EUROPE: &str = "gcp/europe-west4";
/// In no fleet of two regions: the tests register it themselves.
const JAPAN: &str = "oci/ap-tokyo-1";

const MEMBERS: [&str; 3] = ["etcd%20m0", "etcd%20m1", "etcd%20m2"];

/// Default duration of the etcd outage; `MERIDIAN_OUTAGE_SECONDS` overrides it.
const OUTAGE_SECONDS: u32 = 8;
/// Duration of the load before the outage and after it.
const AROUND_SECONDS: u32 = 12;

/// Client of a hub, with the identity of the fleet's operator if the hub has an identity.
struct Hub(ControlPlaneClient);

impl Hub {
    /// Creates a client of the hub with this configuration file.
    fn of(config: &std::path::Path) -> Hub {
        let text: toml::Table = std::fs::read_to_string(config).unwrap().parse().unwrap();
        let (scheme, transport) = if text.contains_key("identity") {
            let files = IdentityFiles::in_directory(&config.parent().unwrap().join("pki/operator"));
            let name = OwnName { roles: &[Role::Operator], region: None };
            ("https", Transport::Tls(Arc::new(ProcessIdentity::load(files, &name, None).unwrap())))
        } else {
            ("http", Transport::Loopback)
        };
        let url = format!("{scheme}://{}", text["listen"].as_str().unwrap());
        Hub(ControlPlaneClient::new(&Hubs::one(url), &transport, Resolver::new(&DnsSection::default()))
            .unwrap())
    }

    async fn routes(&self) -> Option<Value> {
        self.0.send(&HubRequest::new(Method::GET, paths::ROUTES, Duration::from_secs(1))).await.ok()
    }

    async fn generation(&self) -> Option<(u64, u64)> {
        let routes = self.routes().await?;
        Some((routes["epoch"].as_u64()?, routes["generation"].as_u64()?))
    }

    /// Registers a spoke of a region; returns whether the hub has accepted it.
    async fn register(&self, region: &str, port: u16, boot_id: u64) -> bool {
        let body = json!({"version": 1, "region": region, "instance": boot_id.to_string(), "boot_id": boot_id,
                          "endpoint": format!("127.0.0.1:{port}"), "deployments": []});
        let request = HubRequest::post(paths::SPOKES, &body, Duration::from_secs(8));
        self.0.send::<Value>(&request).await.is_ok()
    }

    /// Returns the endpoint of a region's last spoke in its route table.
    async fn endpoint(&self, region: &str) -> Option<String> {
        let routes = self.routes().await?;
        let found = routes["regions"].as_array()?.iter().find(|route| route["id"] == region)?;
        found["instances"].as_array()?.last()?["endpoint"].as_str().map(str::to_owned)
    }
}

/// Polls a hub until `done` and asserts that its generation never decreases.
async fn generations_rise(hub: &Hub, done: impl Future<Output = ()>) {
    let poll = async {
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
        () = poll => {}
        () = done => {}
    }
}

#[tokio::test]
async fn an_etcd_outage_under_load_fails_no_request_and_planning_continues_afterwards() {
    let outage =
        std::env::var("MERIDIAN_OUTAGE_SECONDS").map_or(OUTAGE_SECONDS, |text| text.parse().unwrap());
    let fleet = LocalFleet::start(&["--store", "etcd", "--regions", "2"]);
    let hub = Hub::of(&fleet.file("hub.toml"));
    let (_second, second) = SecondHub::start(&fleet);
    fleet.wait_until("the second hub serves a table", async || second.routes().await.is_some()).await;
    let before = hub.generation().await.unwrap();
    let stages = [AROUND_SECONDS, outage, AROUND_SECONDS];
    let during = generations_rise(&hub, async {
        // The requests of the first stage.
        let of_the_first = u64::from(AROUND_SECONDS * RATE);
        fleet
            .wait_until("the first stage is over", async || fleet.requests_at(AMERICA).await >= of_the_first)
            .await;
        for member in MEMBERS {
            fleet.control_action(&format!("kill?process={member}")).await;
        }
        tokio::time::sleep(Duration::from_secs(u64::from(outage))).await;
        assert_eq!(hub.generation().await, Some(before), "the hub serves its last table");
        for member in MEMBERS {
            fleet.control_action(&format!("restart?process={member}")).await;
        }
        fleet
            .wait_until("the store accepts registrations", async || second.register(JAPAN, 7100, 7).await)
            .await;
        fleet.wait_until("planning continues", async || hub.endpoint(JAPAN).await.is_some()).await;
    });
    let report = load_in_stages(&fleet, &stages, during).await;
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

/// Second hub on a fleet's etcd, killed when dropped. It has no identity, so that the tests can register any spoke.
struct SecondHub(Child);

impl SecondHub {
    fn start(fleet: &LocalFleet) -> (SecondHub, Hub) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let first: toml::Table = std::fs::read_to_string(fleet.file("hub.toml")).unwrap().parse().unwrap();
        let mut config = first;
        config.remove("identity");
        config.remove("authority");
        // Their addresses are those of the first hub.
        config.remove("console");
        config.remove("operations");
        config.insert("listen".to_owned(), address.to_string().into());
        let file = fleet.file("second-hub.toml");
        std::fs::write(&file, config.to_string()).unwrap();
        let log = std::fs::File::create(fleet.file("second-hub.log")).unwrap();
        let process =
            meridian().args(["hub", "--config"]).arg(&file).stdout(Stdio::null()).stderr(log).spawn();
        (SecondHub(process.unwrap()), Hub::of(&file))
    }
}

impl Drop for SecondHub {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[tokio::test]
async fn a_paused_leader_is_replaced_and_writes_nothing_after_it_resumes() {
    let fleet = LocalFleet::start(&["--store", "etcd", "--regions", "1"]);
    let first_config = fleet.file("hub.toml");
    let first = Hub::of(&first_config);
    let (_second, second) = SecondHub::start(&fleet);
    fleet
        .wait_until("both hubs serve the same table", async || {
            let table = first.routes().await;
            table.is_some() && table == second.routes().await
        })
        .await;
    assert!(second.register(EUROPE, 7200, 1).await, "any hub accepts a registration");
    for hub in [&first, &second] {
        fleet.wait_until("both tables contain Europe", async || hub.endpoint(EUROPE).await.is_some()).await;
    }
    let has_logged =
        |name: &str, words: &str| std::fs::read_to_string(fleet.file(name)).unwrap().contains(words);
    assert!(
        has_logged("logs/hub.log", "leadership acquired")
            && !has_logged("second-hub.log", "leadership acquired")
    );

    let config = first_config.display().to_string();
    let sleeping = first.generation().await.unwrap();
    fleet.signal("-STOP", &["hub", &config]);
    // The region's lease may expire before the second hub leads, so the region registers repeatedly.
    fleet
        .wait_until("the other takes over", async || {
            second.register(JAPAN, 7300, 2).await && second.endpoint(JAPAN).await.is_some()
        })
        .await;
    let taken_over = second.generation().await.unwrap();
    assert!(taken_over > sleeping, "{taken_over:?} after {sleeping:?}");
    // The log is written asynchronously.
    fleet
        .wait_until("its log reports the leadership", async || {
            has_logged("second-hub.log", "leadership acquired")
        })
        .await;

    fleet.signal("-CONT", &["hub", &config]);
    // The changes that the first hub observes when it resumes would cause writes if it still led.
    fleet.wait_until("the first follows", async || first.generation().await >= Some(taken_over)).await;
    fleet
        .wait_until("its log reports the lost leadership", async || {
            has_logged("logs/hub.log", "leadership lost")
        })
        .await;
    assert!(second.register(JAPAN, 7301, 3).await);
    for hub in [&first, &second] {
        fleet
            .wait_until("both tables contain the new endpoint", async || {
                hub.endpoint(JAPAN).await.as_deref() == Some("127.0.0.1:7301")
            })
            .await;
    }
    let (one, other) = (first.routes().await.unwrap(), second.routes().await.unwrap());
    assert!(one == other || first.generation().await == second.generation().await, "{one:#} {other:#}");
    let times = |name: &str| {
        std::fs::read_to_string(fleet.file(name)).unwrap().matches("leadership acquired").count()
    };
    assert_eq!((times("logs/hub.log"), times("second-hub.log")), (1, 1), "one term each");
}

#[tokio::test]
async fn the_members_of_a_local_fleet_accept_the_certificate_of_the_hubs_only() {
    use scheduler_store::{EtcdConfig, EtcdStore, EtcdTls, Store};
    let fleet = LocalFleet::start(&["--store", "etcd", "--regions", "1"]);
    let config: toml::Table = std::fs::read_to_string(fleet.file("hub.toml")).unwrap().parse().unwrap();
    let section = config["store"].as_table().unwrap();
    let endpoints = section["endpoints"].as_array().unwrap();
    let endpoints: Vec<_> = endpoints.iter().map(|url| url.as_str().unwrap().to_owned()).collect();
    let read = |path: &std::path::Path| std::fs::read(path).unwrap();
    let configured = |key: &str| read(std::path::Path::new(section[key].as_str().unwrap()));
    let ca = configured("ca");
    let reads = async |urls: Vec<String>, tls: Option<EtcdTls>| {
        let keep_alive = scheduler_store::KEEP_ALIVE;
        let config =
            EtcdConfig { endpoints: urls, prefix: "meridian/".to_owned(), keep_alive, user: None, tls };
        EtcdStore::new(config)
            .range("")
            .await
            .map(|range| range.entries.len())
            .map_err(|error| error.to_string())
    };
    let with = |certificate: Option<(Vec<u8>, Vec<u8>)>| {
        let certificate = certificate.as_ref().map(|(certificate, key)| (&certificate[..], &key[..]));
        EtcdTls::new(&ca, certificate).unwrap()
    };
    let hub = with(Some((configured("certificate"), configured("key"))));
    // A certificate of the fleet is not one of etcd.
    let operator = fleet.file("pki/operator");
    let operator = (read(&operator.join("certificate.pem")), read(&operator.join("key.pem")));
    let plaintext = endpoints.iter().map(|url| url.replace("https://", "http://")).collect();
    let (hub, operator, anonymous, plaintext) = tokio::join!(
        reads(endpoints.clone(), Some(hub)),
        reads(endpoints.clone(), Some(with(Some(operator)))),
        reads(endpoints.clone(), Some(with(None))),
        reads(plaintext, None),
    );
    assert!(hub.as_ref().is_ok_and(|entries| *entries > 0), "{hub:?}");
    for (caller, result) in [("operator", operator), ("no certificate", anonymous), ("plaintext", plaintext)]
    {
        assert!(result.is_err(), "{caller}: {result:?}");
    }
    for key in ["member.key", "hub.key"] {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(fleet.file("etcd-pki").join(key)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{key}");
    }
}
