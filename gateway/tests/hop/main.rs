//! The hop between a real edge and the real doors of regions: who is let in, who is sent what, and what is told of it.

#![expect(clippy::unwrap_used, reason = "what is not as expected fails the test, there")]

mod authority;
mod scene;

use authority::Authority;
use scene::{AMERICA, EUROPE, Hop, SECRET, Scene};

#[tokio::test]
async fn what_crosses_between_edge_and_region_can_be_read_by_neither_of_the_networks() {
    let ours = Authority::new();
    let scene = Scene::new(Hop::tls(&ours), Hop::tls(&ours)).await;
    scene.until_healthy(EUROPE).await;
    scene.forget();
    for _ in 0..3 {
        let answer = scene.ask("anywhere").await;
        assert_eq!((answer.status, answer.region.as_str()), (200, AMERICA), "{}", answer.text);
    }
    assert_eq!(scene.seen(AMERICA), 3, "the replica has seen the requests");
    let crossed = scene.crossed(AMERICA);
    assert!(crossed.len() > 1_000 && !contains(&crossed, SECRET), "the network has not");

    let clear = Scene::new(Hop::clear(), Hop::clear()).await;
    clear.until_healthy(AMERICA).await;
    assert_eq!(clear.ask("anywhere").await.status, 200);
    assert!(contains(&clear.crossed(AMERICA), SECRET), "what is looked for would be found");
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// Invariant 1 (Lawful), broken on purpose: whoever routes the network, or the hub, leads an address of Europe to America.
#[tokio::test]
async fn a_region_that_answers_under_the_address_of_another_gets_not_a_byte() {
    let ours = Authority::new();
    let scene = Scene::new(Hop::tls(&ours), Hop::tls(&ours)).await;
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
        line.starts_with("meridian_gateway_attempts_total") && line.contains("end=\"wrong_peer\"")
    };
    assert!(counted.lines().any(attempt), "{counted}");
    let answer = scene.ask("anywhere").await;
    assert_eq!((answer.status, answer.region.as_str()), (200, AMERICA), "at its own address it is itself");

    scene.lead(EUROPE, EUROPE);
    scene.until_healthy(EUROPE).await;
    assert_eq!(scene.ask("locked").await.region, EUROPE);
}

#[tokio::test]
async fn a_region_that_cannot_prove_itself_costs_no_request() {
    let (ours, other) = (Authority::new(), Authority::new());
    let wrong = Hop { shows: Some(&other), ..Hop::tls(&ours) };
    let scene = Scene::of(Hop::tls(&ours), [(AMERICA, wrong), (EUROPE, Hop::tls(&ours))]).await;
    scene.until_healthy(EUROPE).await;
    let answer = scene.ask("anywhere").await;
    assert_eq!((answer.status, answer.region.as_str()), (200, EUROPE), "{}", answer.text);
    assert_eq!(scene.seen(AMERICA), 0);
    scene.until_edge_counts("meridian_gateway_hop_failures_total{cause=\"untrusted\"}").await;
}

#[tokio::test]
async fn two_ends_that_do_not_agree_on_tls_say_so_and_send_nothing() {
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
