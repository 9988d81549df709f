//! Client errors and client disconnects eject no region.

use super::clients::RegionProtocol;
use super::fixture::{AMERICA, EUROPE, Fixture, JAPAN};
use super::region::Script::*;
use reqwest::Method;
use serde_json::Value;
use std::time::Duration;

/// Number of HEAD requests that kept a healthy region ejected when HEAD was forwarded.
const MANY: usize = 45;

async fn fixture(region_protocol: RegionProtocol) -> Fixture {
    Fixture::start(region_protocol.config(), [(AMERICA, Responds), (EUROPE, Responds), (JAPAN, Responds)])
        .await
}

/// Returns the circuit breaker state of each region.
async fn circuits(fixture: &Fixture) -> Vec<String> {
    let routes = fixture.client.get(format!("{}/routes", fixture.operations)).send().await.unwrap();
    let routes: Value = routes.json().await.unwrap();
    let regions = routes["regions"].as_array().unwrap();
    regions.iter().map(|region| region["circuit"]["state"].as_str().unwrap_or("none").to_owned()).collect()
}

async fn nobody_is_ejected(fixture: &Fixture, after: &str) {
    assert_eq!(circuits(fixture).await, ["closed"; 3], "after {after}");
    let response = fixture.send("anywhere", &[]).await.unwrap();
    let region = response.headers()["x-meridian-region"].to_str().unwrap();
    assert_eq!((response.status().as_u16(), region), (200, AMERICA), "after {after}");
}

fn header(response: &reqwest::Response, name: &str) -> String {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap()).to_owned()
}

#[tokio::test]
async fn a_head_request_has_the_response_of_get_without_its_body_and_ejects_no_region() {
    for region_protocol in [RegionProtocol::Http1, RegionProtocol::Http2] {
        let fixture = fixture(region_protocol).await;
        let info = fixture.url.replace("/v1/embeddings", "/deployments/anywhere/info");
        let send = async |method: Method| {
            let request = fixture.client.request(method, &info).bearer_auth("k");
            request.header("x-meridian-timeout-ms", "2500").send().await.unwrap()
        };
        let get = send(Method::GET).await;
        let (status, length) = (get.status().as_u16(), header(&get, "content-length"));
        assert_eq!((status, get.bytes().await.unwrap().len().to_string()), (200, length.clone()));
        for _ in 0..MANY {
            let head = send(Method::HEAD).await;
            let seen = (head.status().as_u16(), header(&head, "content-length"));
            assert_eq!(seen, (200, length.clone()), "{region_protocol:?}");
            assert_eq!(head.bytes().await.unwrap().len(), 0, "{region_protocol:?}");
        }
        nobody_is_ejected(&fixture, "HEAD requests").await;
    }
}

#[tokio::test]
async fn an_unsupported_method_is_rejected_with_the_allowed_ones() {
    let fixture = fixture(RegionProtocol::Http1).await;
    let allowed = async |method: Method, path: &str| {
        let url = fixture.url.replace("/v1/embeddings", path);
        let response = fixture.client.request(method, url).bearer_auth("k").send().await.unwrap();
        (response.status().as_u16(), header(&response, "allow"))
    };
    for method in [Method::HEAD, Method::GET, Method::DELETE] {
        assert_eq!(allowed(method, "/v1/embeddings").await, (405, "POST".to_owned()));
    }
    assert_eq!(allowed(Method::POST, "/deployments/anywhere/info").await, (405, "GET, HEAD".to_owned()));
    assert_eq!(fixture.requests(), [0; 3], "no region receives it");
}

#[tokio::test]
async fn timeouts_chosen_by_clients_and_disconnects_eject_no_region() {
    let fixture = fixture(RegionProtocol::Http1).await;
    let america = &fixture.regions[AMERICA];
    // From here on the gateway knows the response time of the region.
    for _ in 0..20 {
        assert_eq!(fixture.send("anywhere", &[]).await.unwrap().status(), 200);
    }
    let slow = Takes(Duration::from_millis(60));
    america.script.send_replace(slow);
    for _ in 0..MANY {
        let response = fixture.send("anywhere", &[("x-meridian-timeout-ms", "5")]).await.unwrap();
        assert_eq!(response.status(), 504);
    }
    // A slower region would be hedged, so it is fast again before the next request.
    america.script.send_replace(Responds);
    nobody_is_ejected(&fixture, "short timeouts").await;
    america.script.send_replace(slow);
    for _ in 0..MANY {
        let disconnects =
            tokio::time::timeout(Duration::from_millis(10), fixture.send("anywhere", &[])).await;
        assert!(disconnects.is_err(), "the region takes longer");
    }
    america.script.send_replace(Responds);
    nobody_is_ejected(&fixture, "disconnects").await;
}

/// Both have almost no tokens, and so the same size class.
#[tokio::test]
async fn requests_without_computation_do_not_shorten_the_timeout_of_others() {
    let fixture = fixture(RegionProtocol::Http1).await;
    for _ in 0..MANY {
        assert_eq!(fixture.any("GET", "/deployments/anywhere/info", "").await.0, 200);
    }
    fixture.regions[AMERICA].script.send_replace(Takes(Duration::from_millis(250)));
    for _ in 0..4 {
        nobody_is_ejected(&fixture, "requests for /info").await;
    }
}
