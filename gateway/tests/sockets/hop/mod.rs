//! Connections between a real gateway and real ingresses: authentication, routing of requests, and diagnostics.

mod authority;
mod scene;

use authority::Authority;
use scene::{AMERICA, EUROPE, Hop, Link, SECRET, Scene};
use std::time::Duration;

#[tokio::test]
async fn traffic_between_gateway_and_region_is_encrypted_on_both_networks() {
    for http2 in [false, true] {
        check_secrecy(http2).await;
    }
}

fn edges<'a>(hop: Hop<'a>, http2: bool) -> Hop<'a> {
    if http2 { hop.http2() } else { hop }
}

async fn check_secrecy(http2: bool) {
    let ours = Authority::new();
    let scene = Scene::new(edges(Hop::tls(&ours), http2), Hop::tls(&ours)).await;
    scene.until_healthy(EUROPE).await;
    scene.forget();
    for _ in 0..3 {
        let answer = scene.ask("anywhere").await;
        assert_eq!((answer.status, answer.region.as_str()), (200, AMERICA), "{}", answer.text);
    }
    assert_eq!(scene.seen(AMERICA), 3, "the replica has seen the requests");
    let crossed = scene.crossed(AMERICA);
    assert!(crossed.len() > 1_000 && !contains(&crossed, SECRET), "the network has not");

    assert_eq!(
        scene.counts("meridian_gateway_region_connections").await,
        http2,
        "HTTP/2 is agreed on, if it is wanted"
    );

    let clear = Scene::new(edges(Hop::clear(), http2), Hop::clear()).await;
    clear.until_healthy(AMERICA).await;
    assert_eq!(clear.ask("anywhere").await.status, 200);
    assert!(contains(&clear.crossed(AMERICA), SECRET), "what is looked for would be found");
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// Invariant 1 (Residency), attacked: the network, or the hub, routes an address of Europe to America.
#[tokio::test]
async fn a_region_at_the_address_of_another_gets_no_byte() {
    for http2 in [false, true] {
        check_led_astray(http2).await;
    }
}

async fn check_led_astray(http2: bool) {
    let ours = Authority::new();
    let scene = Scene::new(edges(Hop::tls(&ours), http2), Hop::tls(&ours)).await;
    scene.until_healthy(EUROPE).await;
    let answer = scene.ask("locked").await;
    assert_eq!((answer.status, answer.region.as_str()), (200, EUROPE), "{}", answer.text);

    scene.lead(EUROPE, AMERICA);
    let answer = scene.ask("locked").await;
    assert_eq!(answer.status, 503, "{}", answer.text);
    assert!(answer.text.contains("no_capacity_in_allowed_regions"), "{}", answer.text);
    assert_eq!(scene.seen(AMERICA), 0);
    assert!(answer.explained.contains("\"wrong_peer\""), "{}", answer.explained);
    scene.until_edge_counts("meridian_gateway_hop_failures_total{cause=\"wrong_peer\"}").await;
    let counted = scene.edge_metrics().await;
    let attempt = |line: &str| {
        line.starts_with("meridian_gateway_attempts_total") && line.contains("outcome=\"wrong_peer\"")
    };
    assert!(counted.lines().any(attempt), "{counted}");
    let answer = scene.ask("anywhere").await;
    assert_eq!((answer.status, answer.region.as_str()), (200, AMERICA), "at its own address it is itself");

    scene.lead(EUROPE, EUROPE);
    scene.until_healthy(EUROPE).await;
    assert_eq!(scene.ask("locked").await.region, EUROPE);
}

#[tokio::test]
async fn a_region_with_an_invalid_certificate_fails_no_request() {
    for http2 in [false, true] {
        check_unproven(http2).await;
    }
}

async fn check_unproven(http2: bool) {
    let (ours, other) = (Authority::new(), Authority::new());
    let wrong = Hop { shows: Some(&other), ..Hop::tls(&ours) };
    let scene = Scene::of(edges(Hop::tls(&ours), http2), [(AMERICA, wrong), (EUROPE, Hop::tls(&ours))]).await;
    scene.until_healthy(EUROPE).await;
    let answer = scene.ask("anywhere").await;
    assert_eq!((answer.status, answer.region.as_str()), (200, EUROPE), "{}", answer.text);
    assert_eq!(scene.seen(AMERICA), 0);
    scene.until_edge_counts("meridian_gateway_hop_failures_total{cause=\"untrusted\"}").await;
}

#[tokio::test]
async fn a_tls_mismatch_is_reported_and_no_request_is_sent() {
    let ours = Authority::new();
    let scene = Scene::new(Hop::tls(&ours), Hop::clear()).await;
    scene.until_edge_counts("meridian_gateway_hop_failures_total{cause=\"not_tls\"}").await;
    scene
        .until_region_counts(AMERICA, "meridian_ingress_connections_refused_total{cause=\"unexpected_tls\"}")
        .await;
    assert_eq!(scene.ask("anywhere").await.status, 503);

    let scene = Scene::new(Hop::clear(), Hop::tls(&ours)).await;
    scene.until_region_counts(AMERICA, "meridian_ingress_connections_refused_total{cause=\"not_tls\"}").await;
    assert_eq!(scene.ask("anywhere").await.status, 503);
    assert_eq!(scene.seen(AMERICA) + scene.seen(EUROPE), 0);
}

/// A silently cut link stalls every request that shares a connection; they are retried like those over HTTP/1.1, and
/// once the link is back the region is used again, on a working connection.
#[tokio::test]
async fn a_silently_cut_link_fails_no_request() {
    for http2 in [false, true] {
        let ours = Authority::new();
        let scene = Scene::new(edges(Hop::tls(&ours), http2), Hop::tls(&ours)).await;
        scene.until_healthy(AMERICA).await;
        scene.until_healthy(EUROPE).await;
        assert_eq!(scene.ask("anywhere").await.region, AMERICA);
        scene.cut(AMERICA, true);
        let asked = (0..8).map(|_| scene.ask("anywhere"));
        for answer in futures_util::future::join_all(asked).await {
            assert_eq!((answer.status, answer.region.as_str()), (200, EUROPE), "{http2}: {}", answer.text);
        }
        scene.cut(AMERICA, false);
        scene.until_healthy(AMERICA).await;
        while scene.ask("anywhere").await.region != AMERICA {}
    }
}

/// Counts the connections of concurrent requests at the ingress of a region.
#[tokio::test]
async fn concurrent_requests_use_a_connection_each_over_http_1_and_few_over_http_2() {
    const AT_ONCE: usize = 48;
    let ours = Authority::new();
    let hop = Hop::tls(&ours);
    let mut connections = [0, 0];
    for (http2, connections) in [false, true].into_iter().zip(&mut connections) {
        let takes = Duration::from_millis(200);
        let scene =
            Scene::over(Link::Direct, takes, edges(hop, http2), [(AMERICA, hop), (EUROPE, hop)]).await;
        scene.until_healthy(AMERICA).await;
        let asked = futures_util::future::join_all((0..AT_ONCE).map(|_| scene.ask("anywhere")));
        for answer in asked.await {
            assert_eq!(answer.status, 200, "{}", answer.text);
        }
        let metrics = scene.region_metrics(AMERICA).await;
        let open = metrics.lines().find_map(|line| line.strip_prefix("meridian_ingress_connections "));
        *connections = open.unwrap().parse().unwrap();
    }
    let [http1, http2] = connections;
    assert!(http1 > AT_ONCE / 2 && http2 <= 4, "{connections:?}");
}
