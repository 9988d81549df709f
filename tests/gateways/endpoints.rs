//! A client with the endpoints of two gateways, of which one is killed.

use super::super::local_fleet::LocalFleet;
use super::GatewayProcess;
use loadtest::client::{Client, ClientSettings, EmbedOptions, EndpointSettings, Preference};
use std::sync::Arc;
use std::time::Duration;
use supervision::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval};

/// Time between two requests.
const PERIOD: Duration = Duration::from_millis(5);
const BEFORE_THE_KILL: Duration = Duration::from_secs(3);
const DURATION: Duration = Duration::from_secs(8);

/// Embeds one text; returns the number of attempts.
async fn embed(client: &Client) -> Result<u32, String> {
    let options = EmbedOptions { model: "minilm".to_owned(), ..EmbedOptions::default() };
    let embedded = client.embed(&["near"], &options, &Preference::default(), &mut |_| {}).await;
    let embedded = embedded.map_err(|error| error.to_string())?;
    assert_eq!(embedded.values.len(), 384, "one vector");
    Ok(embedded.run.requests[0].attempts)
}

#[tokio::test]
async fn no_request_fails_at_a_client_with_two_endpoints_while_a_gateway_is_killed() {
    let fleet = LocalFleet::start(&["--regions", "1"]);
    let mut gateways = [2, 3].map(|number| GatewayProcess::start(&fleet, number));
    let client = |gateways: &[GatewayProcess]| {
        let endpoints =
            gateways.iter().map(|gateway| EndpointSettings::new(&gateway.url, Some("local"))).collect();
        Client::new(&ClientSettings { endpoints, ..ClientSettings::default() }).expect("valid settings")
    };
    for gateway in &gateways {
        let alone = client(std::slice::from_ref(gateway));
        fleet.wait_until("the gateway serves", async || embed(&alone).await.is_ok()).await;
    }

    let client = Arc::new(client(&gateways));
    let (results, mut requests) = (Arc::new(Mutex::new(Vec::new())), JoinSet::new());
    let (mut ticks, begun, mut is_killed) = (interval(PERIOD), Instant::now(), false);
    while begun.elapsed() < DURATION {
        ticks.tick().await;
        if !is_killed && begun.elapsed() >= BEFORE_THE_KILL {
            gateways[0].process.kill();
            is_killed = true;
        }
        let (client, results) = (client.clone(), results.clone());
        requests.spawn(async move {
            let result = embed(&client).await;
            results.lock().push(result);
        });
    }
    requests.join_all().await;
    let results = results.lock();
    let failed: Vec<_> = results.iter().filter_map(|result| result.as_ref().err()).collect();
    let retried = results.iter().filter(|result| result.as_ref().is_ok_and(|attempts| *attempts > 1)).count();
    println!(
        "{} requests to two endpoints, a gateway killed: {retried} retried, {} failed",
        results.len(),
        failed.len()
    );
    assert!(failed.is_empty(), "{} of {} failed: {:?}", failed.len(), results.len(), failed.first());
    assert!(
        (1..=results.len() / 20).contains(&retried),
        "{retried} of {} requests met the killed gateway: it had load, and was ejected",
        results.len()
    );
}
