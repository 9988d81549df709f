//! Gateways behind HAProxy, with the configurations of docs/deploy/edge.md: one is killed behind two load balancers of
//! layer 7, and the client's address arrives through one of layer 4.

use super::super::haproxy;
use super::super::local_fleet::LocalFleet;
use super::{GatewayProcess, KilledOnDrop, free_port};
use serde_json::json;
use std::net::IpAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use supervision::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval};

/// Time between two requests.
const PERIOD: Duration = Duration::from_millis(5);
const BEFORE_THE_KILL: Duration = Duration::from_secs(3);
const DURATION: Duration = Duration::from_secs(8);

struct LoadBalancer {
    _process: KilledOnDrop,
    url: String,
}

impl LoadBalancer {
    /// Starts a load balancer with the configuration below this heading of the page.
    fn start(
        fleet: &LocalFleet,
        number: usize,
        heading: &str,
        gateways: &[GatewayProcess; 2],
    ) -> LoadBalancer {
        let (file, listen) =
            (fleet.file(&format!("haproxy-{number}.cfg")), format!("127.0.0.1:{}", free_port()));
        let address =
            |gateway: &GatewayProcess| format!("127.0.0.1:{} port {}", gateway.listen, gateway.operations);
        let text = haproxy::configuration(heading, &listen, &gateways.each_ref().map(address));
        std::fs::write(&file, text).expect("written");
        let mut command = Command::new("haproxy");
        command.env("PATH", haproxy::path());
        let log = std::fs::File::create(fleet.file(&format!("haproxy-{number}.log"))).expect("a log");
        command.args(["-db", "-f"]).arg(&file).stdout(log.try_clone().expect("a file")).stderr(log);
        let process = command.spawn().expect("haproxy is installed (Debian: apt-get install haproxy)");
        LoadBalancer { _process: KilledOnDrop(process), url: format!("http://{listen}/v1/embeddings") }
    }
}

/// Waits until the gateways are ready, so that load balancers that are started then use both from the beginning.
async fn wait_until_ready(fleet: &LocalFleet, gateways: &[GatewayProcess; 2]) {
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    for gateway in gateways {
        let url = format!("http://127.0.0.1:{}/readyz", gateway.operations);
        fleet
            .wait_until(&format!("{url} responds with 200"), async || {
                client.get(&url).send().await.is_ok_and(|response| response.status() == 200)
            })
            .await;
    }
}

/// Sends a request; returns the status, or the error.
async fn send(client: &reqwest::Client, url: &str) -> Result<u16, String> {
    let body = json!({"model": "minilm", "input": "near"}).to_string();
    let request = client.post(url).bearer_auth("local").timeout(Duration::from_secs(30)).body(body);
    let response = request.send().await.map_err(|error| format!("{error:?}"))?;
    let status = response.status().as_u16();
    response.bytes().await.map_err(|error| format!("{error:?}"))?;
    Ok(status)
}

#[tokio::test]
async fn no_request_fails_behind_load_balancers_while_a_gateway_is_killed() {
    let fleet = LocalFleet::start(&["--regions", "1"]);
    let mut gateways = [2, 3].map(|number| GatewayProcess::start(&fleet, number));
    let client = reqwest::Client::builder().no_proxy().build().expect("a client");
    wait_until_ready(&fleet, &gateways).await;
    let balancers = [1, 2].map(|number| LoadBalancer::start(&fleet, number, "HAProxy at layer 7", &gateways));
    for balancer in &balancers {
        fleet
            .wait_until("the load balancer serves", async || send(&client, &balancer.url).await == Ok(200))
            .await;
    }

    let (failed, mut requests) = (Arc::new(Mutex::new(Vec::new())), JoinSet::new());
    let (mut ticks, begun) = (interval(PERIOD), Instant::now());
    let (mut sent, mut is_killed) = (0, false);
    while begun.elapsed() < DURATION {
        ticks.tick().await;
        if !is_killed && begun.elapsed() >= BEFORE_THE_KILL {
            let operations = format!("http://127.0.0.1:{}/metrics", gateways[0].operations);
            let metrics =
                client.get(operations).send().await.expect("a response").text().await.expect("text");
            let served = metrics.lines().any(|line| {
                line.starts_with("meridian_gateway_requests_total")
                    && line.contains("outcome=\"ok\"")
                    && line
                        .rsplit(' ')
                        .next()
                        .and_then(|count| count.parse().ok())
                        .is_some_and(|n: f64| n > 50.0)
            });
            assert!(served, "the gateway that is killed had a part of the load: {metrics}");
            gateways[0].process.kill();
            is_killed = true;
        }
        let (client, url) = (client.clone(), balancers[sent % balancers.len()].url.clone());
        let failed = failed.clone();
        requests.spawn(async move {
            match send(&client, &url).await {
                Ok(200) => {}
                other => failed.lock().push(format!("{other:?}")),
            }
        });
        sent += 1;
    }
    requests.join_all().await;
    let failed = failed.lock();
    println!("{sent} requests behind two load balancers, a gateway killed: {} failed", failed.len());
    assert!(failed.is_empty(), "{} of {sent} failed: {:?}", failed.len(), failed.first());
}

#[tokio::test]
async fn the_address_of_a_client_arrives_through_a_load_balancer_of_layer_4() {
    let fleet = LocalFleet::start(&["--regions", "1"]);
    let gateways = [2, 3].map(|number| {
        GatewayProcess::start_with(&fleet, number, |config| {
            config.insert("proxy_protocol_from".to_owned(), vec!["127.0.0.1"].into());
            config.insert("connections_per_address_max".to_owned(), 1.into());
        })
    });
    wait_until_ready(&fleet, &gateways).await;
    let balancer = LoadBalancer::start(&fleet, 1, "HAProxy at layer 4", &gateways);
    // With a persistent connection.
    let client = |address: [u8; 4]| {
        let builder = reqwest::Client::builder().no_proxy().local_address(IpAddr::from(address));
        builder.build().expect("a client")
    };
    let ready = client([127, 0, 0, 2]);
    fleet.wait_until("the load balancer serves", async || send(&ready, &balancer.url).await == Ok(200)).await;

    // Each gateway accepts one connection of an address, so the third one is rejected.
    let same: Vec<_> = (0..3).map(|_| client([127, 0, 0, 3])).collect();
    let mut statuses = Vec::new();
    for client in &same {
        statuses.push(send(client, &balancer.url).await.ok());
    }
    assert_eq!(statuses, [Some(200), Some(200), None], "connections of one address");
    let another = send(&client([127, 0, 0, 4]), &balancer.url).await;
    assert_eq!(another, Ok(200), "a connection of another address");

    let direct = format!("http://127.0.0.1:{}/v1/embeddings", gateways[0].listen);
    assert!(send(&client([127, 0, 0, 1]), &direct).await.is_err(), "a connection without a header");
    for gateway in &gateways {
        let metrics = format!("http://127.0.0.1:{}/metrics", gateway.operations);
        let metrics = ready.get(metrics).send().await.expect("a response").text().await.expect("text");
        let refused =
            metrics.lines().find(|line| line.contains("connections_refused_total{cause=\"proxy_header\"}"));
        let count = refused.and_then(|line| line.rsplit(' ').next()).unwrap_or_default();
        let expected = if gateway.listen == gateways[0].listen { "1" } else { "0" };
        assert_eq!(count, expected, "health checks are not counted: {metrics}");
    }
}
