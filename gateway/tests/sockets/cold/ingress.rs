//! Held requests at an ingress.

use super::fixture::{ClientResponse, NEAR, Region, name, wait_until};
use regions::catalogue::Catalogue;
use regions::deployment::parse_deployments;
use regions::route::RouteTable;
use scheduler_core::spoke::RAMP_TOKENS;
use scheduler_core::spoke::hold::HoldLimits;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

const S: Duration = Duration::from_secs(1);
const BODY: &[u8] = br#"{"model":"m","input":"a question of a few words"}"#;

/// Concurrent connects: with too many half-open connections the kernel drops some, which is not tested here.
const CONNECT: usize = 100;

/// Sends `count` concurrent requests of `tenant`; returns when they are held.
async fn burst(region: &Arc<Region>, count: usize, tenant: &'static str) -> JoinSet<ClientResponse> {
    let start = region.spoke().held(&name()).requests;
    let mut asking = JoinSet::new();
    for number in 0..count {
        let shared = region.clone();
        asking.spawn(async move {
            shared.send(&number.to_string(), &[("x-meridian-tenant", tenant)], BODY).await
        });
        if number % CONNECT == CONNECT - 1 {
            region.wait_until_held(start + number + 1).await;
        }
    }
    region.wait_until_held(start + count).await;
    asking
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_held_requests_are_served_when_a_replica_is_ready() {
    let region = Arc::new(Region::cold(NEAR, 5 * S).await);
    let begun = Instant::now();
    let wake = region.signals.wake.clone();
    let asking = burst(&region, 1000, "t").await;
    // The scaler is notified once, with the deployment to start.
    tokio::time::timeout(S, wake.notified()).await.expect("the first held request notifies the scaler");
    assert_eq!(region.scraped("meridian_ingress_wakes_total").await, "1");
    region.spoke().set_provisioning(&name(), vec![2 * S], Instant::now());
    let status = region.status().await;
    let shown = &status["deployments"][0];
    assert_eq!((&shown["held"], &shown["ready"]), (&json!(1000), &json!(0)), "{status}");
    assert!((1..=2000).contains(&shown["ready_in_ms"].as_u64().unwrap()), "{status}");
    assert_eq!(region.scraped("meridian_ingress_held_requests").await, "1000");
    assert_eq!(region.scraped("meridian_ingress_held_bytes").await, (1000 * BODY.len()).to_string());

    region.replica.response_time_ms.store(5, Ordering::SeqCst);
    region.replica.ready.store(true, Ordering::SeqCst);
    let ready = begun.elapsed().as_millis() as u64;
    let responses = asking.join_all().await;
    assert!(
        responses.iter().all(|response| response.status == 200),
        "{:?}",
        responses.iter().find(|a| a.status != 200)
    );
    for response in &responses {
        let (held, cold) =
            (response.number("x-meridian-held-ms"), response.number("x-meridian-cold-start-ms"));
        assert!(
            cold <= ready + 2000 && held <= begun.elapsed().as_millis() as u64,
            "{held} and {cold} of {ready}"
        );
    }
    let mut ids: Vec<u64> = region.replica.ids().iter().map(|id| id.parse().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..1000).collect::<Vec<_>>(), "the replica received each request once");
    wait_until("no request is held", async || region.spoke().held_totals() == (0, 0)).await;
    // On a slow machine some were released, exceeded the first-byte timeout, and were held again.
    let waits: u64 = region.scraped("meridian_ingress_held_seconds_count").await.parse().unwrap();
    assert!(waits >= 1000, "{waits}");
    assert!(region.status().await["deployments"][0]["ready_in_ms"].is_null());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_request_is_released_at_once_without_polling() {
    let mut late = Vec::new();
    for _ in 0..20 {
        let region = Arc::new(Region::cold(NEAR, 5 * S).await);
        let asking = burst(&region, 1, "t").await;
        let ready = Instant::now();
        region.mark_ready();
        assert_eq!(asking.join_all().await[0].status, 200);
        late.push(region.replica.received.lock()[0].1.saturating_duration_since(ready));
    }
    late.sort_unstable();
    println!(
        "a request is at the replica {:?} after it was seen to be ready, at most {:?}",
        late[10], late[19]
    );
    assert!(late[10] < Duration::from_millis(50), "the next status poll would be 200 ms later: {late:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_requests_are_released_by_priority_and_deadline() {
    let region = Arc::new(Region::cold(NEAR, 2 * S).await);
    // Each is as much as a newly ready replica accepts, so they are released one after another.
    let body = vec![b' '; 4 * RAMP_TOKENS as usize];
    let mut asking = JoinSet::new();
    let order = [
        ("bulk", "20000"),
        ("interactive", "30000"),
        ("interactive", "10000"),
        ("bulk", "9000"),
        ("", "20000"),
    ];
    for (number, (priority, timeout)) in order.into_iter().enumerate() {
        let (shared, body) = (region.clone(), body.clone());
        asking.spawn(async move {
            let mut headers = vec![("x-meridian-timeout-ms", timeout)];
            headers.extend((!priority.is_empty()).then_some(("x-meridian-priority", priority)));
            shared.send(&number.to_string(), &headers, &body).await
        });
        region.wait_until_held(number + 1).await;
    }
    // So slow that the port is closed at a time.
    region.replica.speed.store(1, Ordering::SeqCst);
    region.mark_ready();
    assert!(asking.join_all().await.iter().all(|response| response.status == 200));
    assert_eq!(region.replica.ids(), ["2", "4", "1", "3", "0"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_is_limited_to_its_share_and_a_disconnect_frees_capacity_at_once() {
    let region = Arc::new(Region::cold(NEAR, 5 * S).await);
    let mut asking = burst(&region, HoldLimits::DEFAULT.tenant_requests, "greedy").await;
    let refused = region.send("x", &[("x-meridian-tenant", "greedy")], BODY).await;
    assert_eq!(
        (refused.status, refused.header("x-meridian-error")),
        (429, Some("overloaded")),
        "{refused:?}"
    );
    assert_eq!((refused.number("retry-after"), refused.number("retry-after-ms")), (5, 5000));
    let others = burst(&region, 1, "modest").await;
    assert_eq!(region.scraped("meridian_ingress_not_held_total{reason=\"tenant_requests\"}").await, "1");

    let all = HoldLimits::DEFAULT.tenant_requests + 1;
    // Aborting disconnects the client.
    let mut gone = 0;
    while gone < 10 {
        asking.abort_all();
        gone = asking.len();
    }
    region.wait_until_held(1).await;
    drop(asking);
    let again = burst(&region, 10, "greedy").await;
    assert_eq!(region.spoke().held(&name()).requests, 11, "of {all}");
    region.mark_ready();
    for responses in [again, others] {
        assert!(responses.join_all().await.iter().all(|response| response.status == 200));
    }
    assert_eq!(region.replica.ids().len(), 11, "disconnected clients cost the replica no work");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_beyond_the_limit_of_held_bytes_gets_retry_after() {
    const TENANTS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let region = Arc::new(Region::cold(NEAR, 30 * S).await);
    let body = Arc::new(vec![b' '; 32 << 20]);
    let mut asking = JoinSet::new();
    for tenant in TENANTS {
        let (region, body) = (region.clone(), body.clone());
        let headers = [("x-meridian-tenant", tenant), ("x-meridian-timeout-ms", "600000")];
        asking.spawn(async move { region.send(tenant, &headers, &body).await });
    }
    region.wait_until_held(TENANTS.len()).await;
    assert_eq!(region.spoke().held_totals().1, HoldLimits::DEFAULT.bytes);
    let headers = |tenant| [("x-meridian-tenant", tenant), ("x-meridian-timeout-ms", "600000")];
    let refused = region.send("x", &headers("i"), BODY).await;
    assert_eq!((refused.status, refused.header("x-meridian-error")), (503, Some("saturated")), "{refused:?}");
    assert_eq!(refused.number("retry-after"), 30);
    let refused = region.send("x", &headers("a"), BODY).await;
    assert_eq!(
        (refused.status, refused.header("x-meridian-error")),
        (429, Some("overloaded")),
        "{refused:?}"
    );
    asking.shutdown().await;
    region.wait_until_held(0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_with_a_short_deadline_or_a_faster_region_is_not_held() {
    let region = Region::cold(NEAR, 2 * S).await;
    let hurried = region.send("x", &[("x-meridian-timeout-ms", "1500")], BODY).await;
    assert_eq!(
        (hurried.status, hurried.header("x-meridian-error")),
        (503, Some("cold_start")),
        "{hurried:?}"
    );
    assert_eq!((hurried.number("retry-after"), hurried.number("retry-after-ms")), (2, 2000));
    assert!(hurried.body.contains("2000 ms"), "{}", hurried.body);
    let elsewhere = region.send("x", &[("x-meridian-alternative-ms", "300")], BODY).await;
    assert_eq!(
        (elsewhere.status, elsewhere.header("x-meridian-error")),
        (503, Some("not_ready")),
        "{elsewhere:?}"
    );
    assert_eq!(elsewhere.number("retry-after"), 2);
    assert!(region.replica.ids().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_request_fails_at_its_deadline_and_at_once_without_a_scaler() {
    let region = Arc::new(Region::cold(NEAR, S / 10).await);
    let late = region.send("x", &[("x-meridian-timeout-ms", "300")], BODY).await;
    assert_eq!((late.status, late.header("x-meridian-error")), (504, Some("deadline_exceeded")), "{late:?}");
    assert!((290..5000).contains(&late.number("x-meridian-held-ms")), "{late:?}");
    let asking = burst(&region, 3, "t").await;
    region.set_start_time(None);
    for response in asking.join_all().await {
        assert_eq!(
            (response.status, response.header("x-meridian-error")),
            (503, Some("not_ready")),
            "{response:?}"
        );
    }
    assert!(region.replica.ids().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_becomes_ready_and_fails_delays_held_requests_only() {
    let region = Arc::new(Region::cold(NEAR, 5 * S).await);
    let asking = burst(&region, 50, "t").await;
    region.replica.fails_next.store(true, Ordering::SeqCst);
    region.replica.response_time_ms.store(2, Ordering::SeqCst);
    region.mark_ready();
    wait_until("it was received and released", async || !region.replica.fails_next.load(Ordering::SeqCst))
        .await;
    region.replica.ready.store(true, Ordering::SeqCst);
    let responses = asking.join_all().await;
    assert!(
        responses.iter().all(|response| response.status == 200),
        "{:?}",
        responses.iter().find(|a| a.status != 200)
    );
    wait_until("no request is held", async || region.spoke().held_totals() == (0, 0)).await;
}

/// Invariant 1 (Residency): a held request has not been sent, and the newest residency policy applies to it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_narrowed_during_the_hold_applies_to_the_held_request() {
    let region = Arc::new(Region::cold(NEAR, 5 * S).await);
    let asking = burst(&region, 3, "t").await;
    let catalogue = Catalogue::builtin();
    let text = "[[deployment]]\nname = \"m\"\ntask = \"embed\"\nmodel = \"pypi://m\"\n\
                engine = { kind = \"cpu\", precision = \"f32\" }\nresidency = { allow = [\"eu\"] }";
    let mut table = RouteTable::empty();
    table.deployments.insert(name(), parse_deployments(text, &catalogue).unwrap().remove(0));
    region.spoke().apply_route_table(&table, &catalogue);
    region.mark_ready();
    for response in asking.join_all().await {
        assert_eq!(
            (response.status, response.header("x-meridian-error")),
            (403, Some("not_resident_here")),
            "{response:?}"
        );
    }
    assert!(region.replica.ids().is_empty());
}
