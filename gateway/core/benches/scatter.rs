//! Cost of splitting a request and joining the responses at the edge, in bytes a second of one core.
//!
//! `cargo bench -p gateway-core --bench scatter`. The cost of a tree of JSON values, which this design avoids, is
//! printed for comparison.

#![expect(clippy::unwrap_used, reason = "the bench creates all of its inputs")]

use gateway_core::scatter::join::{PartialResponse, ResponseJoiner};
use gateway_core::scatter::split::SplittableBody;
use replica_api::api::ResponseShape;
use serde_json::{Value, json};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Number of rounds, of which the best counts: other activity of the machine only slows it down.
const ROUNDS: usize = 7;

#[expect(clippy::disallowed_methods, reason = "a bench owns a clock")]
fn now() -> Instant {
    Instant::now()
}

fn best<T>(mut work: impl FnMut() -> T) -> Duration {
    let round = |_| {
        let begun = now();
        black_box(work());
        begun.elapsed()
    };
    (0..ROUNDS).map(round).min().unwrap()
}

fn show(label: &str, bytes: usize, took: Duration) {
    let megabytes = bytes as f64 / 1e6;
    let ms = took.as_secs_f64() * 1e3;
    println!("{label:<58} {megabytes:>7.1} MB {ms:>9.2} ms {:>9.0} MB/s", megabytes / took.as_secs_f64());
}

fn main() {
    let short: Vec<String> = (0..20_000).map(|number| format!("a short text, number {number}")).collect();
    let long: Vec<String> = (0..20_000).map(|number| format!("{number} {}", "words ".repeat(250))).collect();
    let ids: Vec<Vec<u32>> = (0..20_000).map(|number| (number..number + 200).collect()).collect();
    for (label, input) in
        [("short texts", json!(short)), ("long texts", json!(long)), ("token ids", json!(ids))]
    {
        let body = json!({"model": "m", "input": input}).to_string().into_bytes();
        let read = || SplittableBody::read("/v1/embeddings", &body).unwrap().unwrap();
        show(&format!("20,000 {label}: find the inputs"), body.len(), best(read));
        let splittable = read();
        let sub_requests = || {
            splittable
                .sub_requests(16_384)
                .iter()
                .map(|sub_request| splittable.body(&body, sub_request).len())
                .sum::<usize>()
        };
        show(&format!("20,000 {label}: make the bodies"), body.len(), best(sub_requests));
        let tree = || serde_json::from_slice::<Value>(&body).unwrap();
        show(&format!("20,000 {label}: (JSON tree)"), body.len(), best(tree));
    }

    let vector: Vec<f32> = (0..384).map(|number| (number as f32).sin() / 19.6).collect();
    let row = |index: usize| json!({"object": "embedding", "index": index, "embedding": vector});
    let usage = json!({"prompt_tokens": 5_120, "total_tokens": 5_120});
    let floats = json!({"object": "list", "data": (0..512).map(row).collect::<Vec<_>>(), "model": "m", "usage": usage});
    let row = |index: usize| json!({"object": "embedding", "index": index, "embedding": "x".repeat(2_048)});
    let base64 = json!({"object": "list", "data": (0..512).map(row).collect::<Vec<_>>(), "model": "m", "usage": usage});
    for (label, response) in [("numbers", floats), ("base64", base64)] {
        let response = response.to_string().into_bytes();
        let join = || {
            let (mut join, mut out) = (ResponseJoiner::new(1_024, None), Vec::new());
            for first in [0, 512] {
                join.push(
                    PartialResponse::read(ResponseShape::Data, &response, 512, first).unwrap(),
                    &mut out,
                );
            }
            join.finish(&mut out);
            out.iter().map(Vec::len).sum::<usize>()
        };
        show(&format!("2 x 512 vectors as {label}: join"), 2 * response.len(), best(join));
        let tree = || serde_json::from_slice::<Value>(&response).unwrap();
        show(&format!("1 x 512 vectors as {label}: (JSON tree)"), response.len(), best(tree));
    }
}
