//! What TLS between edge and region costs, in processor time and in time that a client waits.
//!
//! `cargo bench -p gateway --bench hop`. A real edge and the real door of a region, its replica and the client in one process, on
//! one thread: requests one after the other, in rounds that alternate between a hop in the clear and one over TLS. The
//! difference is what both ends do for it. Every connection between the two passes a relay that copies; it does so in both
//! kinds of rounds.

#![expect(clippy::unwrap_used, reason = "what is not as expected ends the bench, there")]

#[path = "../../tests/hop/authority.rs"]
mod authority;
#[path = "../../tests/hop/scene.rs"]
#[expect(dead_code, reason = "tests look at more of the scene than a bench does")]
mod scene;

use authority::Authority;
use scene::{AMERICA, ANSWER_BYTES, EUROPE, Hop, Scene};
use std::time::{Duration, Instant};

/// Requests of a round.
const REQUESTS: u32 = 2_000;
/// Of each kind; the figure is the middle one.
const ROUNDS: usize = 7;

/// Processor time of this process, all threads, user and system.
fn processor() -> Duration {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let of_thread = |entry: std::fs::DirEntry| {
        let text = std::fs::read_to_string(entry.path().join("schedstat")).unwrap_or_default();
        text.split(' ').next().and_then(|nanoseconds| nanoseconds.parse().ok()).unwrap_or(0)
    };
    Duration::from_nanos(threads.map(|entry| of_thread(entry.unwrap())).sum())
}

/// Processor time of each request, and the time in the middle that the client waited.
async fn round(scene: &Scene) -> (Duration, Duration) {
    let mut waited = Vec::new();
    let before = processor();
    for _ in 0..REQUESTS {
        let begun = Instant::now();
        assert_eq!(scene.request("anywhere").await.bytes().await.unwrap().len(), ANSWER_BYTES + 11);
        waited.push(begun.elapsed());
    }
    let used = processor() - before;
    waited.sort_unstable();
    (used / REQUESTS, waited[waited.len() / 2])
}

fn middle(mut rounds: Vec<(Duration, Duration)>) -> (Duration, Duration) {
    rounds.sort_unstable();
    rounds[rounds.len() / 2]
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let ours = Authority::new();
    let clear = Scene::new(Hop::clear(), Hop::clear()).await;
    let tls = Scene::new(Hop::tls(&ours), Hop::tls(&ours)).await;
    for scene in [&clear, &tls] {
        scene.until_healthy(AMERICA).await;
        scene.until_healthy(EUROPE).await;
    }
    let mut rounds = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (scene, rounds) in [&clear, &tls].into_iter().zip(&mut rounds) {
            rounds.push(round(scene).await);
            scene.forget();
        }
    }
    for (what, (used, waited)) in ["in the clear", "over TLS"].into_iter().zip(rounds.map(middle)) {
        println!(
            "a request of 100 bytes, an answer of 8 KiB, {what:<12}: processor {used:>8.1?}, waited {waited:>8.1?}"
        );
    }
}
