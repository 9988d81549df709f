//! Connections between a real gateway and real ingresses: authentication, routing of requests, and diagnostics.

pub(crate) mod authority;
mod fixture;

use authority::Authority;
use fixture::{AMERICA, EUROPE, Fixture, NetworkKind, PeerTls, SECRET};
use std::time::Duration;

#[tokio::test]
async fn traffic_between_gateway_and_region_is_encrypted_on_both_networks() {
    for http2 in [false, true] {
        check_secrecy(http2).await;
    }
}

fn edges<'a>(hop: PeerTls<'a>, http2: bool) -> PeerTls<'a> {
    if http2 { hop.http2() } else { hop }
}

async fn check_secrecy(http2: bool) {
    let authority = Authority::new();
    let fixture = Fixture::new(edges(PeerTls::tls(&authority), http2), PeerTls::tls(&authority)).await;
    fixture.wait_until_healthy(EUROPE).await;
    fixture.clear_recording();
    for _ in 0..3 {
        let response = fixture.send("anywhere").await;
        assert_eq!((response.status, response.region.as_str()), (200, AMERICA), "{}", response.text);
    }
    assert_eq!(fixture.requests(AMERICA), 3, "the replica has seen the requests");
    let recorded = fixture.recorded(AMERICA);
    assert!(recorded.len() > 1_000 && !contains(&recorded, SECRET), "the network has recorded no plaintext");

    assert_eq!(
        fixture.counts("meridian_gateway_region_connections").await,
        http2,
        "HTTP/2 is negotiated if it is configured"
    );

    let plaintext = Fixture::new(edges(PeerTls::plaintext(), http2), PeerTls::plaintext()).await;
    plaintext.wait_until_healthy(AMERICA).await;
    assert_eq!(plaintext.send("anywhere").await.status, 200);
    assert!(contains(&plaintext.recorded(AMERICA), SECRET), "the text is found in plaintext");
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
    let authority = Authority::new();
    let fixture = Fixture::new(edges(PeerTls::tls(&authority), http2), PeerTls::tls(&authority)).await;
    fixture.wait_until_healthy(EUROPE).await;
    let response = fixture.send("locked").await;
    assert_eq!((response.status, response.region.as_str()), (200, EUROPE), "{}", response.text);

    fixture.reroute(EUROPE, AMERICA);
    let response = fixture.send("locked").await;
    assert_eq!(response.status, 503, "{}", response.text);
    assert!(response.text.contains("no_capacity_in_allowed_regions"), "{}", response.text);
    assert_eq!(fixture.requests(AMERICA), 0);
    assert!(response.explained.contains("\"wrong_peer\""), "{}", response.explained);
    fixture.wait_until_edge_counts("meridian_gateway_hop_failures_total{cause=\"wrong_peer\"}").await;
    let counted = fixture.edge_metrics().await;
    let attempt = |line: &str| {
        line.starts_with("meridian_gateway_attempts_total") && line.contains("outcome=\"wrong_peer\"")
    };
    assert!(counted.lines().any(attempt), "{counted}");
    let response = fixture.send("anywhere").await;
    assert_eq!(
        (response.status, response.region.as_str()),
        (200, AMERICA),
        "the region is accepted at its own address"
    );

    fixture.reroute(EUROPE, EUROPE);
    fixture.wait_until_healthy(EUROPE).await;
    assert_eq!(fixture.send("locked").await.region, EUROPE);
}

#[tokio::test]
async fn a_region_with_an_invalid_certificate_fails_no_request() {
    for http2 in [false, true] {
        check_unproven(http2).await;
    }
}

async fn check_unproven(http2: bool) {
    let (authority, other) = (Authority::new(), Authority::new());
    let wrong = PeerTls { certificate_of: Some(&other), ..PeerTls::tls(&authority) };
    let fixture = Fixture::start(
        edges(PeerTls::tls(&authority), http2),
        [(AMERICA, wrong), (EUROPE, PeerTls::tls(&authority))],
    )
    .await;
    fixture.wait_until_healthy(EUROPE).await;
    let response = fixture.send("anywhere").await;
    assert_eq!((response.status, response.region.as_str()), (200, EUROPE), "{}", response.text);
    assert_eq!(fixture.requests(AMERICA), 0);
    fixture.wait_until_edge_counts("meridian_gateway_hop_failures_total{cause=\"untrusted\"}").await;
}

#[tokio::test]
async fn a_tls_mismatch_is_reported_and_no_request_is_sent() {
    let authority = Authority::new();
    let fixture = Fixture::new(PeerTls::tls(&authority), PeerTls::plaintext()).await;
    fixture.wait_until_edge_counts("meridian_gateway_hop_failures_total{cause=\"not_tls\"}").await;
    fixture
        .wait_until_region_counts(
            AMERICA,
            "meridian_ingress_connections_refused_total{cause=\"unexpected_tls\"}",
        )
        .await;
    assert_eq!(fixture.send("anywhere").await.status, 503);

    let fixture = Fixture::new(PeerTls::plaintext(), PeerTls::tls(&authority)).await;
    fixture
        .wait_until_region_counts(AMERICA, "meridian_ingress_connections_refused_total{cause=\"not_tls\"}")
        .await;
    assert_eq!(fixture.send("anywhere").await.status, 503);
    assert_eq!(fixture.requests(AMERICA) + fixture.requests(EUROPE), 0);
}

/// A silently cut link stalls every request that shares a connection; they are retried like those over HTTP/1.1, and
/// once the link is back the region is used again, on a working connection.
#[tokio::test]
async fn a_silently_cut_link_fails_no_request() {
    for http2 in [false, true] {
        let authority = Authority::new();
        let fixture = Fixture::new(edges(PeerTls::tls(&authority), http2), PeerTls::tls(&authority)).await;
        fixture.wait_until_healthy(AMERICA).await;
        fixture.wait_until_healthy(EUROPE).await;
        assert_eq!(fixture.send("anywhere").await.region, AMERICA);
        fixture.cut(AMERICA, true);
        let requests = (0..8).map(|_| fixture.send("anywhere"));
        for response in futures_util::future::join_all(requests).await {
            assert_eq!(
                (response.status, response.region.as_str()),
                (200, EUROPE),
                "{http2}: {}",
                response.text
            );
        }
        fixture.cut(AMERICA, false);
        fixture.wait_until_healthy(AMERICA).await;
        while fixture.send("anywhere").await.region != AMERICA {}
    }
}

/// Counts the connections of concurrent requests at the ingress of a region.
#[tokio::test]
async fn concurrent_requests_use_a_connection_each_over_http_1_and_few_over_http_2() {
    const AT_ONCE: usize = 48;
    let authority = Authority::new();
    let hop = PeerTls::tls(&authority);
    let mut connections = [0, 0];
    for (http2, connections) in [false, true].into_iter().zip(&mut connections) {
        let takes = Duration::from_millis(200);
        let fixture = Fixture::start_with(
            NetworkKind::Direct,
            takes,
            edges(hop, http2),
            [(AMERICA, hop), (EUROPE, hop)],
        )
        .await;
        fixture.wait_until_healthy(AMERICA).await;
        let requests = futures_util::future::join_all((0..AT_ONCE).map(|_| fixture.send("anywhere")));
        for response in requests.await {
            assert_eq!(response.status, 200, "{}", response.text);
        }
        let metrics = fixture.region_metrics(AMERICA).await;
        let open = metrics.lines().find_map(|line| line.strip_prefix("meridian_ingress_connections "));
        *connections = open.unwrap().parse().unwrap();
    }
    let [http1, http2] = connections;
    assert!(http1 > AT_ONCE / 2 && http2 <= 4, "{connections:?}");
}
