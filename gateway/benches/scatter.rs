//! Gain of sending one request with very many inputs to several regions, and the cost when one of them is killed in the
//! middle.
//!
//! `cargo bench -p gateway --bench scatter`; `-- 1` runs one round instead of three.
//!
//! The gateway and its sockets are real; the hub and the three regions are scripted, as in the tests
//! (`tests/sockets/scatter`). A region computes 5,000 inputs a second, one part after another, by waiting instead of
//! computing: so the three act as three machines, which three real models on the cores of one would not. Vectors have
//! few numbers, so that JSON is not what is measured; `cargo bench -p gateway-core --bench scatter` measures that.
//! Every response is compared with that of one replica without limits.

#![expect(clippy::unwrap_used, reason = "a bench of what it made itself")]

#[path = "../tests/sockets/address.rs"]
mod address;
#[path = "../tests/sockets/hub.rs"]
mod hub;
#[path = "../tests/sockets/scatter/replica.rs"]
mod replica;
#[path = "../tests/sockets/scatter/scene.rs"]
#[expect(dead_code, reason = "the tests have cases more")]
mod scene;

use scene::{AMERICA, EUROPE, JAPAN, Scene, Script, WIDTH};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const INPUTS: usize = 20_000;
const ROUNDS: usize = 3;
const AN_INPUT_TAKES: Duration = Duration::from_micros(200);
/// Requests of the killed region before it dies: about half of its share.
const OF_ITS_SHARE: u64 = 7;

/// Setup of a measurement.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Split, with all parts to one region, because the residency policy allows no other.
    OneRegion,
    ThreeRegions,
    /// One of three regions dies within a response, when it has computed half of its share.
    OneIsKilled,
}

/// Result of a measurement.
struct Came {
    took: Duration,
    attempts: u64,
    asked: [u64; 3],
}

fn main() {
    let rounds = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(ROUNDS);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.unwrap().block_on(async {
        println!(
            "{INPUTS} inputs, regions that need {AN_INPUT_TAKES:?} for each, the median of {rounds} rounds"
        );
        println!("| way | s | of one region | requests to regions | of which {AMERICA}, {EUROPE}, {JAPAN} |");
        println!("|---|---:|---:|---:|---|");
        let ways = [Way::OneRegion, Way::ThreeRegions, Way::OneIsKilled];
        let mut came = ways.map(|_| Vec::new());
        for _ in 0..rounds {
            for (way, came) in ways.into_iter().zip(&mut came) {
                came.push(goes(way).await);
            }
        }
        let middle = |came: &mut Vec<Came>| {
            came.sort_by_key(|came| came.took);
            came.swap_remove(came.len() / 2)
        };
        let came = came.each_mut().map(middle);
        let base = came[0].took.as_secs_f64();
        for (way, Came { took, attempts, asked }) in ways.iter().zip(came) {
            let seconds = took.as_secs_f64();
            println!("| {way:?} | {seconds:.2} | {:.2} | {attempts} | {asked:?} |", seconds / base);
        }
    });
}

async fn goes(way: Way) -> Came {
    let scene = Scene::with([Script::Computes(AN_INPUT_TAKES); 3]).await;
    let texts: Vec<String> = (0..INPUTS).map(|number| format!("text number {number}")).collect();
    let model = if matches!(way, Way::OneRegion) { "locked" } else { "anywhere" };
    let body = json!({"model": model, "input": texts});
    let victim = &scene.regions[EUROPE];
    let killed = async {
        if matches!(way, Way::OneIsKilled) {
            while victim.requests() < OF_ITS_SHARE {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            victim.follow(Script::DiesAfter(0));
        }
    };
    let begun = Instant::now();
    let asked = async {
        let answer = scene.ask("/v1/embeddings", &body, &[]).await;
        (begun.elapsed(), answer)
    };
    let ((took, answer), ()) = tokio::join!(asked, killed);
    assert_eq!(answer.status, 200, "{way:?}");
    let right = replica::answer("/v1/embeddings", body.to_string().as_bytes(), usize::MAX, WIDTH);
    assert!(
        answer.json() == serde_json::from_slice::<Value>(&right.body).unwrap(),
        "{way:?}: one right answer"
    );
    Came { took, attempts: answer.header("x-meridian-attempts").parse().unwrap(), asked: scene.requests() }
}
