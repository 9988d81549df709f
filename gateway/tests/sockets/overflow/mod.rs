//! Overflow over real sockets: an edge between two regions with a scripted replica each. The nearer one has too much to
//! do, and what goes past it is what the other has granted.

mod exchange;
mod liar;
mod scene;
mod wire;

use scene::{BUSY, FAR, NEAR, SPEED, Scene};
use scheduler_core::spoke::{GRANT_FOR, GRANT_PERIOD};
use std::sync::atomic::Ordering;
use std::time::Instant;

#[tokio::test]
async fn a_part_of_what_is_too_much_goes_where_it_was_offered_room() {
    let scene = Scene::start((BUSY, SPEED), (0, 100 * SPEED)).await;
    scene.until_answered_by(FAR).await;
    let mut far = 0;
    for _ in 0..200 {
        far += u32::from(scene.asks().await == FAR);
    }
    // Seven tenths of 200 are 140, give or take 6.5.
    assert!((100..=180).contains(&far), "{far} of 200 left");
    let sample =
        format!("meridian_gateway_attempts_total{{region=\"{FAR}\",cause=\"spillover\",end=\"ok\"}}");
    assert_eq!(
        scene.scraped(&sample).await,
        scene.far.requests.load(Ordering::SeqCst),
        "each is counted as what it is"
    );
    scene.near.pending.store(0, Ordering::SeqCst);
    scene.until_answered_by(NEAR).await;
    let mut calm = 0;
    // Once the near region has said that it is calm again, nobody leaves.
    while calm < 50 {
        calm = if scene.asks().await == NEAR { calm + 1 } else { 0 };
    }
}

#[tokio::test]
async fn nobody_goes_where_nothing_was_offered_however_long_the_queue() {
    // A region whose speed nobody has measured does not know what it could take.
    let scene = Scene::start((BUSY, SPEED), (0, 0)).await;
    scene.until_answered_by(NEAR).await;
    let since = Instant::now();
    while since.elapsed() < 4 * GRANT_PERIOD {
        assert_eq!(scene.asks().await, NEAR);
    }
    assert_eq!(scene.far.requests.load(Ordering::SeqCst), 0);
}

/// Invariant 7: what comes to a region as others' overflow is no more than it offered, whatever is asked.
#[tokio::test]
async fn overflow_never_exceeds_what_was_granted() {
    const FAR_SPEED: u64 = 500;
    let scene = Scene::start((BUSY, SPEED), (0, FAR_SPEED)).await;
    let since = Instant::now();
    scene.until_answered_by(FAR).await;
    while since.elapsed() < 6 * GRANT_PERIOD {
        scene.asks().await;
    }
    let periods = (since.elapsed() + GRANT_FOR).as_millis() / GRANT_PERIOD.as_millis() + 1;
    let offered =
        FAR_SPEED * GRANT_PERIOD.as_millis() as u64 / 1000 * 9 / 10 * u64::try_from(periods).unwrap();
    let came = scene.far.tokens.load(Ordering::SeqCst);
    assert!((1..=offered).contains(&came), "{came} tokens came of {offered} that were offered");
    assert!(scene.near.requests.load(Ordering::SeqCst) > scene.far.requests.load(Ordering::SeqCst));
}
