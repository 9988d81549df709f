//! Several gateways: the limits of tenants hold for all of them together, with and without the hub; and load balancers in
//! front of them, or a client that knows several.

mod balanced;
mod endpoints;

use super::local_fleet::{LocalFleet, meridian};
use serde_json::json;
use std::net::TcpListener;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// SHA-256 of the key `acme-old`.
const KEY_SHA256: &str = "48bd6392ce02329046a218ab6e718a0e1a245627e202f47d063f6a66c566367b";
const KEY: &str = "acme-old";
/// Limit of the tenant in requests per second.
const LIMIT: u64 = 40;
const GATEWAYS: usize = 4;

/// Additional gateway process of the fleet.
struct GatewayProcess {
    process: KilledOnDrop,
    url: String,
    /// Port for clients.
    listen: u16,
    /// Port for operators.
    operations: u16,
}

/// Process that is killed at the end of the test, or before.
struct KilledOnDrop(Child);

impl KilledOnDrop {
    /// Kills the process with SIGKILL and waits for its end.
    fn kill(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a free port").port()
}

impl GatewayProcess {
    /// Starts a gateway with the configuration of the fleet's gateway, and its own ports and files.
    fn start(fleet: &LocalFleet, number: usize) -> GatewayProcess {
        GatewayProcess::start_with(fleet, number, |_| {})
    }

    /// Starts a gateway with a changed configuration.
    fn start_with(
        fleet: &LocalFleet,
        number: usize,
        change: impl FnOnce(&mut toml::Table),
    ) -> GatewayProcess {
        let text = std::fs::read_to_string(fleet.file("gateway.toml")).expect("a configuration");
        let mut config: toml::Table = text.parse().expect("TOML");
        let (listen, operations) = (free_port(), free_port());
        config.insert("listen".to_owned(), format!("127.0.0.1:{listen}").into());
        config.insert("operations".to_owned(), format!("127.0.0.1:{operations}").into());
        for key in ["handover", "receipts", "explanations"] {
            config.remove(key);
        }
        let snapshot = fleet.file(&format!("gateway-{number}-routes"));
        config.insert("snapshot".to_owned(), snapshot.display().to_string().into());
        change(&mut config);
        let file = fleet.file(&format!("gateway-{number}.toml"));
        std::fs::write(&file, config.to_string()).expect("written");
        let log = std::fs::File::create(fleet.file(&format!("gateway-{number}.log"))).expect("a log");
        let mut command: Command = meridian();
        command.args(["gateway", "--config"]).arg(&file).stdout(log.try_clone().expect("a file")).stderr(log);
        let process = KilledOnDrop(command.spawn().expect("the binary starts"));
        GatewayProcess { process, url: format!("http://127.0.0.1:{listen}"), listen, operations }
    }
}

/// Runs `meridian key` as the operator of this fleet; returns the JSON that it prints.
fn key(fleet: &LocalFleet, arguments: &[&str]) -> serde_json::Value {
    let mut command = meridian();
    command.arg("key").args(arguments);
    command.args(["--json", "--hub", &fleet.hub, "--identity", &fleet.identity]);
    let output = command.output().expect("the binary starts");
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Returns the status of `GET /v1/models` with this key.
async fn status(client: &reqwest::Client, url: &str, key: &str) -> u16 {
    let response = client.get(format!("{url}/v1/models")).bearer_auth(key).send().await;
    response.map_or(0, |response| response.status().as_u16())
}

/// Waits until all gateways respond with this status; returns the time.
async fn wait_until_all(fleet: &LocalFleet, urls: &[String], key: &str, expected: u16) -> Duration {
    let (client, begun) = (reqwest::Client::builder().no_proxy().build().expect("a client"), Instant::now());
    for url in urls {
        fleet
            .wait_until(&format!("{url} responds with {expected}"), async || {
                status(&client, url, key).await == expected
            })
            .await;
    }
    begun.elapsed()
}

#[tokio::test]
async fn a_created_key_is_accepted_and_a_revoked_one_rejected_by_three_gateways_within_two_seconds() {
    let fleet = LocalFleet::start(&["--regions", "1"]);
    let further: Vec<_> = (2..=3).map(|number| GatewayProcess::start(&fleet, number)).collect();
    let urls: Vec<String> =
        std::iter::once(fleet.url.clone()).chain(further.iter().map(|gateway| gateway.url.clone())).collect();
    let file = fleet.file("tenants-to-apply.toml");
    std::fs::write(&file, format!("[[tenant]]\nname = \"acme\"\nkey_sha256 = [\"{KEY_SHA256}\"]\n"))
        .expect("written");
    apply(&fleet, &file);
    wait_until_all(&fleet, &urls, KEY, 200).await;

    let created =
        key(&fleet, &["create", "--tenant", "acme", "--name", "ci", "--owner", "team", "--expires", "3s"]);
    let (short_lived, begun) = (created["key"].as_str().expect("a key").to_owned(), Instant::now());
    let accepted = wait_until_all(&fleet, &urls, &short_lived, 200).await;
    let created = key(&fleet, &["create", "--tenant", "acme"]);
    let lasting = created["key"].as_str().expect("a key").to_owned();
    wait_until_all(&fleet, &urls, &lasting, 200).await;
    wait_until_all(&fleet, &urls, &short_lived, 401).await;
    let expired = begun.elapsed();
    let listed = key(&fleet, &["list"]).to_string();
    assert!(!listed.contains(&lasting) && listed.contains("\"owner\":\"team\""), "{listed}");

    key(&fleet, &["revoke", created["created"]["id"].as_str().expect("an identifier")]);
    let revoked = wait_until_all(&fleet, &urls, &lasting, 401).await;
    println!("three gateways: created {accepted:?}, expired (3 s) {expired:?}, revoked {revoked:?}");
    assert!(accepted < Duration::from_secs(2) && revoked < Duration::from_secs(2));
    assert!((2..6).contains(&expired.as_secs()), "{expired:?}");
    wait_until_all(&fleet, &urls, KEY, 200).await;
}

fn apply(fleet: &LocalFleet, file: &std::path::Path) {
    let applied = meridian()
        .args(["apply", "--yes", "--hub", &fleet.hub, "--identity", &fleet.identity])
        .arg(file)
        .output()
        .expect("the binary starts");
    assert!(applied.status.success(), "{applied:?}");
}

/// Load on all gateways.
struct GatewayLoad {
    /// Requests per second at each gateway.
    rates: Vec<Arc<AtomicU64>>,
    admitted: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
}

impl GatewayLoad {
    fn start(urls: &[String]) -> GatewayLoad {
        let load = GatewayLoad {
            rates: urls.iter().map(|_| Arc::default()).collect(),
            admitted: Arc::default(),
            failed: Arc::default(),
        };
        for (url, rate) in urls.iter().zip(&load.rates) {
            let (url, rate) = (format!("{url}/v1/embeddings"), rate.clone());
            let (admitted, failed) = (load.admitted.clone(), load.failed.clone());
            let client = reqwest::Client::builder().no_proxy().build().expect("a client");
            tokio::spawn(async move {
                let mut ticks = interval(Duration::from_millis(50));
                ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
                let mut due = 0;
                loop {
                    ticks.tick().await;
                    due += rate.load(Ordering::Relaxed) * 50;
                    while due >= 1000 {
                        due -= 1000;
                        let request = client.post(&url).bearer_auth(KEY).timeout(Duration::from_secs(30));
                        let request = request.body(json!({"model": "minilm", "input": "near"}).to_string());
                        let (admitted, failed) = (admitted.clone(), failed.clone());
                        tokio::spawn(async move {
                            match request.send().await.map(|response| response.status().as_u16()) {
                                Ok(200) => admitted.fetch_add(1, Ordering::Relaxed),
                                Ok(429) => 0,
                                Ok(_) | Err(_) => failed.fetch_add(1, Ordering::Relaxed),
                            };
                        });
                    }
                }
            });
        }
        load
    }

    /// Sets the rates; returns the admitted requests of each second divided by the limit.
    async fn run(&self, name: &str, seconds: usize, rates: [u64; GATEWAYS]) -> Vec<f64> {
        for (rate, requests) in self.rates.iter().zip(rates) {
            rate.store(requests, Ordering::Relaxed);
        }
        let mut ratios = Vec::new();
        for _ in 0..seconds {
            let (before, begun) = (self.admitted.load(Ordering::Relaxed), Instant::now());
            tokio::time::sleep(Duration::from_secs(1)).await;
            let admitted = self.admitted.load(Ordering::Relaxed) - before;
            ratios.push(admitted as f64 / begun.elapsed().as_secs_f64() / LIMIT as f64);
        }
        let shown: Vec<_> = ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
        println!("{name:<22} {rates:>3?}  {}", shown.join(" "));
        ratios
    }
}

fn mean(ratios: &[f64]) -> f64 {
    ratios.iter().sum::<f64>() / ratios.len() as f64
}

/// Seconds of a window: longer than the second whose requests a gateway may save, and shorter than a phase.
const WINDOW: usize = 5;

/// Returns the largest mean of [`WINDOW`] consecutive seconds.
fn largest_window(ratios: &[f64]) -> f64 {
    ratios.windows(WINDOW).map(mean).fold(0.0, f64::max)
}

#[tokio::test]
async fn four_gateways_admit_the_limit_of_a_tenant_together() {
    let fleet = LocalFleet::start(&["--regions", "1"]);
    let further: Vec<_> = (2..=GATEWAYS).map(|number| GatewayProcess::start(&fleet, number)).collect();
    let file = fleet.file("tenants-to-apply.toml");
    let limits = format!("limits = {{ requests_per_second = {LIMIT} }}");
    let text = format!("[[tenant]]\nname = \"acme\"\nkey_sha256 = [\"{KEY_SHA256}\"]\n{limits}\n");
    std::fs::write(&file, text).expect("written");
    apply(&fleet, &file);
    let urls: Vec<String> =
        std::iter::once(fleet.url.clone()).chain(further.iter().map(|gateway| gateway.url.clone())).collect();
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    for url in &urls {
        fleet
            .wait_until(&format!("{url} serves requests"), async || {
                let body = json!({"model": "minilm", "input": "near"}).to_string();
                let request = client.post(format!("{url}/v1/embeddings")).bearer_auth(KEY).body(body);
                request.send().await.is_ok_and(|response| response.status().as_u16() == 200)
            })
            .await;
    }

    println!("limit {LIMIT} requests/s; admitted/limit in each second, by requests/s at each gateway");
    let load = GatewayLoad::start(&urls);
    let near = |ratios: &[f64]| {
        let mean = mean(ratios);
        assert!((0.9..=1.1).contains(&mean), "{mean} in {ratios:?}");
        let largest = largest_window(ratios);
        println!("mean {mean:.3}, largest window of {WINDOW} s {largest:.3}");
        assert!(largest <= 1.1, "{largest} in {ratios:?}");
    };
    near(&load.run("skewed", 16, [80, 4, 2, 0]).await[6..]);
    near(&load.run("shifted", 16, [0, 4, 2, 80]).await[6..]);
    fleet.control_action("kill?process=hub").await;
    near(&load.run("hub killed", 10, [0, 4, 2, 80]).await[2..]);
    let ratios = load.run("shifted, hub dead", 8, [80, 4, 2, 0]).await;
    assert!(mean(&ratios[2..]) <= 1.1 && largest_window(&ratios[2..]) <= 1.1, "{ratios:?}");
    fleet.control_action("restart?process=hub").await;
    near(&load.run("hub back", 16, [80, 4, 2, 0]).await[10..]);
    assert_eq!(load.failed.load(Ordering::Relaxed), 0, "every request was admitted or rejected by the limit");
}
