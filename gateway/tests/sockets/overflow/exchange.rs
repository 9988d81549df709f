//! Bytes on the wire of the report exchange between gateway and region, five times a second: in normal operation, and
//! while the gateway is overloaded. It has only what changes; under overload a request grows by the overflow of each
//! overloaded deployment, and no more, so that it does not make the overload worse.

use super::fixture::{BUSY, Fixture, NEAR, SPEED};
use super::link::{CountingLink, TrafficCounter};
use scheduler_api::report::EXCHANGE_PERIOD;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Number of counted exchanges; the first may have begun before.
const COUNTED: u64 = 20;
/// Maximum bytes by which a request grows for an overloaded deployment: its name and the tokens of its overflow.
const OVERFLOW_BYTES_MAX: u64 = 64;
/// Allowed difference of the mean of a message: the digits of its numbers, from zero to a million tokens, and a complete
/// message that one of the means contains and the other does not: some 350 bytes, of 20 messages.
const DIFFERENCE_MAX: u64 = 16 + 18;
/// Maximum bytes of a request to a region and its response above TCP, for one deployment.
const EXCHANGE_BYTES_MAX: u64 = 150;
const TIMEOUT: Duration = Duration::from_secs(20);

/// Returns the bytes of a request and of a response, averaged over [`COUNTED`], while `action` runs.
async fn mean_bytes(link: &CountingLink, action: impl AsyncFn()) -> [u64; 2] {
    let counted = || [&link.requests, &link.responses].map(TrafficCounter::counted);
    let (before, begun) = (counted(), Instant::now());
    let since = || {
        let now = counted();
        [0, 1].map(|way| (now[way].0 - before[way].0, now[way].1 - before[way].1))
    };
    while since().iter().any(|(_, messages)| *messages < COUNTED) {
        assert!(begun.elapsed() < TIMEOUT, "the gateway sends no more exchange requests");
        action().await;
    }
    since().map(|(bytes, messages)| bytes / messages)
}

#[tokio::test]
async fn the_report_exchange_grows_under_overload_by_the_overflow_only() {
    // A region without a measured speed grants nothing: so only the exchange is on its wire.
    let link = std::sync::OnceLock::new();
    let fixture = Fixture::with((0, SPEED), (0, 0), async |address| {
        let (counting, address) = CountingLink::start(address).await;
        assert!(link.set(counting).is_ok());
        address
    })
    .await;
    let link = link.get().unwrap();
    fixture.wait_until_served_by(NEAR).await;
    let normal = mean_bytes(link, async || tokio::time::sleep(EXCHANGE_PERIOD).await).await;
    fixture.near.pending.store(10 * BUSY, Ordering::SeqCst);
    let overloaded = mean_bytes(link, async || assert_eq!(fixture.serving_region().await, NEAR)).await;
    assert_eq!(fixture.far.requests.load(Ordering::SeqCst), 0, "no other traffic was sent");

    let a_second = 1000 / EXCHANGE_PERIOD.as_millis() as u64;
    for (when, [question, response]) in [("normal operation", normal), ("overload", overloaded)] {
        println!(
            "in {when}: {question} bytes to the region and {response} back, {} bytes a second for each gateway and region",
            a_second * (question + response)
        );
        assert!(question + response <= EXCHANGE_BYTES_MAX);
    }
    let growth_max = [OVERFLOW_BYTES_MAX + DIFFERENCE_MAX, DIFFERENCE_MAX];
    for ((normal, overloaded), growth_max) in normal.into_iter().zip(overloaded).zip(growth_max) {
        assert!(overloaded <= normal + growth_max, "{normal} bytes in calm and {overloaded} in a crisis");
        assert!(normal <= overloaded + DIFFERENCE_MAX, "{normal} bytes in calm and {overloaded} in a crisis");
    }
}
