//! A region with false reports: an empty queue, a speed beyond any machine, and unlimited grants.
//!
//! It can take only traffic that other regions cannot serve: no request that a nearer region serves in time, at most
//! seven tenths of the traffic of a full one, and none any longer once it does not respond.

use super::fixture::{BUSY, FAR, Fixture, NEAR, SPEED, serve};
use super::link::CountingLink;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use futures_util::{StreamExt, stream};
use serde_json::json;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Requests of each part.
const REQUESTS: u64 = 400;
/// Concurrent requests. With all of them at once the regions would be slow on a machine of two cores, which affects the
/// result.
const AT_ONCE: usize = 16;

#[derive(Default)]
struct MisreportingRegion {
    requests: AtomicU64,
    /// It rejects what it has granted.
    refuses: AtomicBool,
}

impl MisreportingRegion {
    async fn start() -> (Arc<MisreportingRegion>, SocketAddr) {
        let region = Arc::<MisreportingRegion>::default();
        let report = async |sequence: u64| {
            let load = json!({"name": "m", "ready": 1_000_000, "pending_tokens": 0, "interactive_tokens": 0,
                              "tokens_per_second": 1e300, "granted_tokens": u64::MAX});
            json!({"version": 1, "region": FAR, "instance": "a", "boot_id": 1, "sequence": sequence,
                   "draining": false, "deployments": [load]})
            .to_string()
        };
        let exchange = move |body: axum::body::Body| async move { crate::reports::respond(body, report) };
        let takes = region.clone();
        let compute = move || async move {
            takes.requests.fetch_add(1, Ordering::SeqCst);
            let status = if takes.refuses.load(Ordering::SeqCst) {
                StatusCode::INTERNAL_SERVER_ERROR
            } else {
                StatusCode::OK
            };
            (status, "{}").into_response()
        };
        let router = axum::Router::new()
            .route(scheduler_api::paths::EXCHANGE, axum::routing::post(exchange))
            .fallback(compute);
        (region, serve(router).await)
    }

    fn requests(&self) -> u64 {
        self.requests.load(Ordering::SeqCst)
    }
}

#[tokio::test]
async fn a_region_with_false_reports_gets_only_overflow_and_none_once_it_fails() {
    let (region, address) = MisreportingRegion::start().await;
    let fixture = Fixture::with((0, SPEED), (0, 0), async |_| CountingLink::start(address).await.1).await;
    fixture.wait_until_served_by(NEAR).await;
    let before = region.requests();
    for _ in 0..REQUESTS {
        assert_eq!(fixture.serving_region().await, NEAR, "the nearest region is idle");
    }
    assert_eq!(region.requests(), before);

    fixture.near.pending.store(BUSY, Ordering::SeqCst);
    fixture.wait_until_served_by(FAR).await;
    let taken = send_round(&fixture, &region).await;
    // Seven tenths of 400 are 280, with a standard deviation of 9.
    assert!((240..=320).contains(&taken), "{taken} of {REQUESTS}");

    region.refuses.store(true, Ordering::SeqCst);
    // Half of the requests within a second suffice. Requests in flight are not recalled; later a probe is sent, and if
    // it succeeds a tenth follow.
    let mut rounds = 0;
    while send_round(&fixture, &region).await > REQUESTS / 10 {
        rounds += 1;
        assert!(rounds < 20, "the failing region still receives requests");
    }
}

/// Sends [`REQUESTS`] requests and returns the number that reach the misreporting region.
async fn send_round(fixture: &Fixture, region: &MisreportingRegion) -> u64 {
    let before = region.requests();
    let requests = stream::iter((0..REQUESTS).map(|_| fixture.serving_region()));
    requests.buffer_unordered(AT_ONCE).collect::<Vec<String>>().await;
    region.requests() - before
}
