//! What an edge and a region say to each other five times a second, in bytes on the wire: in calm, and while the edge has
//! far more than it can place. Were it more in a crisis, a crisis would have one more cause.

use super::scene::{BUSY, NEAR, SPEED, Scene};
use super::wire::{Crossed, Wire};
use scheduler_core::spoke::GRANT_PERIOD;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Exchanges that are counted: the first of them may have begun before.
const COUNTED: u64 = 20;
/// What a question and its answer may differ by: the digits of the numbers in them, from none to a million tokens.
const DIGITS_MAX: u64 = 16;
/// A question to a region and its answer, heads and all, with one deployment.
const EXCHANGE_BYTES_MAX: u64 = 700;
const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes of a question and of an answer, over so many of them, while `meanwhile` goes on.
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
async fn a_gateway_and_a_region_exchange_as_many_bytes_in_a_crisis_as_in_calm() {
    // A region whose speed nobody has measured grants nothing: so nothing but the exchange is on its wire.
    let wire = std::sync::OnceLock::new();
    let scene = Scene::with((0, SPEED), (0, 0), async |door| {
        let (counting, address) = Wire::before(door).await;
        assert!(wire.set(counting).is_ok());
        address
    })
    .await;
    let wire = wire.get().unwrap();
    scene.until_answered_by(NEAR).await;
    let calm = each(wire, async || tokio::time::sleep(GRANT_PERIOD).await).await;
    scene.near.pending.store(10 * BUSY, Ordering::SeqCst);
    let crisis = each(wire, async || assert_eq!(scene.asks().await, NEAR)).await;
    assert_eq!(scene.far.requests.load(Ordering::SeqCst), 0, "nothing else was on the wire");

    let a_second = 1000 / GRANT_PERIOD.as_millis() as u64;
    for (when, [question, answer]) in [("calm", calm), ("crisis", crisis)] {
        println!(
            "in {when}: {question} bytes there and {answer} back, {} bytes a second for each gateway and region",
            a_second * (question + answer)
        );
        assert!(question + answer <= EXCHANGE_BYTES_MAX);
    }
    for (calm, crisis) in calm.into_iter().zip(crisis) {
        assert!(calm.abs_diff(crisis) <= DIGITS_MAX, "{calm} bytes in calm and {crisis} in a crisis");
    }
}
