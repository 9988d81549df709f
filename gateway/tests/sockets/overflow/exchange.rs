//! Bytes on the wire of the report exchange between gateway and region, five times a second: in normal operation, and
//! while the gateway is overloaded. It has only what changes; under overload a request grows by the overflow of each
//! overloaded deployment, and no more, so that it does not make the overload worse.

use super::scene::{BUSY, NEAR, SPEED, Scene};
use super::wire::{Crossed, Wire};
use scheduler_api::report::EXCHANGE_PERIOD;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Number of counted exchanges; the first may have begun before.
const COUNTED: u64 = 20;
/// Maximum bytes by which a request grows for an overloaded deployment: its name and the tokens of its overflow.
const OVERFLOW_BYTES_MAX: u64 = 64;
/// Allowed difference of a response: the digits of its numbers, from zero to a million tokens.
const DIGITS_MAX: u64 = 16;
/// Maximum bytes of a request to a region and its response, with heads, for one deployment.
const EXCHANGE_BYTES_MAX: u64 = 700;
const PATIENCE: Duration = Duration::from_secs(20);

/// Returns the bytes of a request and of a response, averaged over [`COUNTED`], while `meanwhile` runs.
async fn each(wire: &Wire, meanwhile: impl AsyncFn()) -> [u64; 2] {
    let counted = || [&wire.there, &wire.back].map(Crossed::counted);
    let (before, begun) = (counted(), Instant::now());
    let since = || {
        let now = counted();
        [0, 1].map(|way| (now[way].0 - before[way].0, now[way].1 - before[way].1))
    };
    while since().iter().any(|(_, messages)| *messages < COUNTED) {
        assert!(begun.elapsed() < PATIENCE, "the edge asks no longer");
        meanwhile().await;
    }
    since().map(|(bytes, messages)| bytes / messages)
}

#[tokio::test]
async fn the_report_exchange_grows_under_overload_by_the_overflow_only() {
    // A region without a measured speed grants nothing: so only the exchange is on its wire.
    let wire = std::sync::OnceLock::new();
    let scene = Scene::with((0, SPEED), (0, 0), async |door| {
        let (counting, address) = Wire::before(door).await;
        assert!(wire.set(counting).is_ok());
        address
    })
    .await;
    let wire = wire.get().unwrap();
    scene.until_answered_by(NEAR).await;
    let calm = each(wire, async || tokio::time::sleep(EXCHANGE_PERIOD).await).await;
    scene.near.pending.store(10 * BUSY, Ordering::SeqCst);
    let crisis = each(wire, async || assert_eq!(scene.asks().await, NEAR)).await;
    assert_eq!(scene.far.requests.load(Ordering::SeqCst), 0, "nothing else was on the wire");

    let a_second = 1000 / EXCHANGE_PERIOD.as_millis() as u64;
    for (when, [question, answer]) in [("calm", calm), ("crisis", crisis)] {
        println!(
            "in {when}: {question} bytes there and {answer} back, {} bytes a second for each gateway and region",
            a_second * (question + answer)
        );
        assert!(question + answer <= EXCHANGE_BYTES_MAX);
    }
    let growth_max = [OVERFLOW_BYTES_MAX, DIGITS_MAX];
    for ((calm, crisis), growth_max) in calm.into_iter().zip(crisis).zip(growth_max) {
        assert!(crisis <= calm + growth_max, "{calm} bytes in calm and {crisis} in a crisis");
        assert!(calm <= crisis + DIGITS_MAX, "{calm} bytes in calm and {crisis} in a crisis");
    }
}
