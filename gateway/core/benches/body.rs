//! Throughput of the body scanner, compared with serde_json: `cargo bench -p gateway-core --bench body`.
//!
//! The edge scans each body once, before any decision, so every request pays this time. The bodies are those of the
//! APIs: one query, a batch of passages, a backfill of long texts, many short ones, token ids instead of texts, and
//! texts full of escapes and of letters beyond ASCII; some of them also as Python's `json` writes them, which is what
//! most clients send: a space after each comma, and `\u` for every letter beyond ASCII. serde_json is measured twice:
//! into a tree, as in a gateway that also modifies the body, and skipping everything but `model`, the least that a
//! gateway with serde can do.

#![expect(clippy::disallowed_methods, reason = "a bench has a clock")]
#![expect(clippy::unwrap_used, reason = "an unexpected value ends the bench")]

use gateway_core::body;
use serde_json::{Value, json};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Duration of one measurement; the best of [`ROUNDS`] counts, because disturbances only slow it down.
const TIME: Duration = Duration::from_millis(60);
const ROUNDS: usize = 5;

/// Smallest structure for serde.
#[derive(serde::Deserialize)]
struct ModelOnly {
    model: Option<String>,
}

fn main() {
    let passage =
        "The night train leaves at half past nine from the old platform, and the next one at five o'clock. ";
    let texts = |count: usize, bytes: usize| -> Vec<String> {
        (0..count)
            .map(|number| format!("{number} {}", passage.repeat(bytes / passage.len() + 1)))
            .map(|mut text| {
                text.truncate(bytes);
                text
            })
            .collect()
    };
    let embed = |input: Value| serde_json::to_vec(&json!({"model": "docs-embed", "input": input})).unwrap();
    let escaped: Vec<String> =
        texts(64, 120).iter().map(|text| text.replace(' ', "\n\"").replace('e', "é\u{1F600}")).collect();
    let ids: Vec<Vec<u32>> =
        (0..64).map(|row| (0..512).map(|at| (row * 7919 + at * 104_729) % 30_522).collect()).collect();
    let spaced = |body: Vec<u8>| String::from_utf8(body).unwrap().replace(',', ", ").into_bytes();
    let words: Vec<&str> = passage.split(' ').cycle().take(4_096).collect();
    let chinese =
        "\\u591c\\u884c\\u5217\\u8f66\\u5728\\u4e5d\\u70b9\\u534a\\u79bb\\u5f00\\u65e7\\u7ad9\\u53f0\\u3002";
    let bodies = [
        ("300 B, one text", embed(json!(texts(1, 260)))),
        ("8 KB, 16 texts", embed(json!(texts(16, 500)))),
        ("1 MB, 2,048 texts", embed(json!(texts(2048, 508)))),
        ("10 MB, 2,048 texts", embed(json!(texts(2048, 5_116)))),
        ("190 KB of token ids", embed(json!(ids))),
        ("220 KB of ids, spaced", spaced(embed(json!(ids)))),
        ("17 KB full of escapes", embed(json!(escaped))),
        (
            "350 KB of \\u escapes",
            format!(
                r#"{{"model": "docs-embed", "input": [{}]}}"#,
                vec![format!("\"{}\"", chinese.repeat(64)); 64].join(", ")
            )
            .into(),
        ),
        ("30 KB, 4,096 words", embed(json!(words))),
        (
            "8 KB, model last",
            serde_json::to_vec(&json!({"input": texts(16, 500), "model": "docs-embed"})).unwrap(),
        ),
    ];
    println!(
        "{:<24}{:>10}{:>12}{:>16}{:>18}",
        "body", "bytes", "GB/s, scanner", "serde, model", "serde, tree"
    );
    for (name, bytes) in &bodies {
        assert_eq!(body::read(bytes).unwrap().model.as_deref(), Some("docs-embed"));
        let ours = speed(bytes, |bytes| body::read(bytes).unwrap().inputs as usize);
        let model =
            speed(bytes, |bytes| serde_json::from_slice::<ModelOnly>(bytes).unwrap().model.unwrap().len());
        let tree =
            speed(bytes, |bytes| serde_json::from_slice::<Value>(bytes).unwrap().as_object().unwrap().len());
        println!("{name:<24}{:>10}{ours:>12.2}{model:>16.2}{tree:>18.2}", bytes.len());
    }
}

/// Returns the GB/s of the best round.
fn speed(bytes: &[u8], read: impl Fn(&[u8]) -> usize) -> f64 {
    let round = || {
        let (began, mut times) = (Instant::now(), 0u64);
        while began.elapsed() < TIME {
            for _ in 0..16 {
                black_box(read(black_box(bytes)));
            }
            times += 16;
        }
        times as f64 * bytes.len() as f64 / began.elapsed().as_secs_f64() / 1e9
    };
    (0..ROUNDS).map(|_| round()).fold(0.0, f64::max)
}
