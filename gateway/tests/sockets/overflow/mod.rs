//! Spillover over real sockets: a gateway between two regions with a scripted replica each. The nearer one is
//! overloaded, and the overflow is limited by the grants of the other.

mod exchange;
mod false_reports;
pub(crate) mod fixture;
mod link;

use fixture::{BUSY, FAR, Fixture, NEAR, SPEED};
use scheduler_api::report::EXCHANGE_PERIOD;
use scheduler_core::spoke::GRANT_TTL;
use std::sync::atomic::Ordering;
use std::time::Instant;

#[tokio::test]
async fn a_part_of_the_overflow_goes_to_the_region_that_granted_credit() {
    let fixture = Fixture::start((BUSY, SPEED), (0, 100 * SPEED)).await;
    fixture.wait_until_served_by(FAR).await;
    let mut far = 0;
    for _ in 0..200 {
        far += u32::from(fixture.serving_region().await == FAR);
    }
    // Seven tenths of 200 are 140, give or take 6.5.
    assert!((100..=180).contains(&far), "{far} of 200 spilled over");
    let sample =
        format!("meridian_gateway_attempts_total{{region=\"{FAR}\",cause=\"spillover\",outcome=\"ok\"}}");
    assert_eq!(
        fixture.scraped(&sample).await,
        fixture.far.requests.load(Ordering::SeqCst),
        "each attempt is counted as spillover"
    );
    fixture.near.pending.store(0, Ordering::SeqCst);
    fixture.wait_until_served_by(NEAR).await;
    let mut calm = 0;
    // Once the near region reports a short queue again, no request spills over.
    while calm < 50 {
        calm = if fixture.serving_region().await == NEAR { calm + 1 } else { 0 };
    }
}

#[tokio::test]
async fn no_request_spills_over_without_credit() {
    // A region without a measured speed cannot grant credit.
    let fixture = Fixture::start((BUSY, SPEED), (0, 0)).await;
    fixture.wait_until_served_by(NEAR).await;
    let since = Instant::now();
    while since.elapsed() < 4 * EXCHANGE_PERIOD {
        assert_eq!(fixture.serving_region().await, NEAR);
    }
    assert_eq!(fixture.far.requests.load(Ordering::SeqCst), 0);
}

/// Invariant 7: the overflow that a region receives never exceeds its grants.
#[tokio::test]
async fn overflow_never_exceeds_what_was_granted() {
    const FAR_SPEED: u64 = 500;
    let fixture = Fixture::start((BUSY, SPEED), (0, FAR_SPEED)).await;
    let since = Instant::now();
    fixture.wait_until_served_by(FAR).await;
    while since.elapsed() < 6 * EXCHANGE_PERIOD {
        fixture.serving_region().await;
    }
    let periods = (since.elapsed() + GRANT_TTL).as_millis() / EXCHANGE_PERIOD.as_millis() + 1;
    let offered =
        FAR_SPEED * EXCHANGE_PERIOD.as_millis() as u64 / 1000 * 9 / 10 * u64::try_from(periods).unwrap();
    let received = fixture.far.tokens.load(Ordering::SeqCst);
    assert!((1..=offered).contains(&received), "{received} tokens received, {offered} granted");
    assert!(fixture.near.requests.load(Ordering::SeqCst) > fixture.far.requests.load(Ordering::SeqCst));
}
