//! Invalid input. Every row is sent to every path that could parse it: the response is a success or an error of the
//! request, and never an error of the replica.

use std::collections::BTreeMap;

use serde_json::json;

use crate::served::{Kind, TestReplica, VOCABULARY};

/// JSON text, with a description.
fn strings() -> Vec<(&'static str, String)> {
    vec![
        ("empty", r#""""#.to_owned()),
        ("only spaces", r#""   \t\n  ""#.to_owned()),
        ("NUL bytes", r#""\u0000\u0000""#.to_owned()),
        ("NUL among words", r#""w1\u0000w2""#.to_owned()),
        ("half of a pair", r#""\ud800""#.to_owned()),
        ("the other half", r#""w1 \udc00 w2""#.to_owned()),
        ("halves in the wrong order", r#""\udc00\ud800""#.to_owned()),
        ("a whole pair", r#""\ud83d\ude00""#.to_owned()),
        ("emoji", format!("{:?}", "👩‍👩‍👧‍👦 🏳️‍🌈 w1 🇯🇵")),
        ("right to left", format!("{:?}", "שלום w1 مرحبا")),
        ("direction marks", r#""\u202e w1 \u202c\u200f""#.to_owned()),
        ("combining marks", format!("\"{}\"", "e\u{301}".repeat(500))),
        ("not a character", r#""\uffff\ufffe""#.to_owned()),
        ("a special token", r#""[CLS] [SEP] w1 [UNK]""#.to_owned()),
        ("a megabyte of one character", format!("\"{}\"", "a".repeat(1 << 20))),
        ("a megabyte of spaces", format!("\"{}\"", " ".repeat(1 << 20))),
        ("a megabyte of words", format!("\"{}\"", "w1 ".repeat(350_000))),
        ("a megabyte of one emoji", format!("\"{}\"", "🙂".repeat(1 << 18))),
    ]
}

/// JSON value in place of a text or a list, with a description.
fn values() -> Vec<(&'static str, String)> {
    let ids = |ids: &[i64]| json!(ids).to_string();
    vec![
        ("null", "null".to_owned()),
        ("a number", "7".to_owned()),
        ("a truth", "true".to_owned()),
        ("an object", "{}".to_owned()),
        ("an empty list", "[]".to_owned()),
        ("a list of an empty list", "[[]]".to_owned()),
        ("a list of nulls", "[null]".to_owned()),
        ("a mixed list", r#"["w1", 1, ["w1"]]"#.to_owned()),
        ("the last id", ids(&[VOCABULARY as i64 - 1])),
        ("one past the last id", ids(&[VOCABULARY as i64])),
        ("an id below zero", ids(&[-1])),
        ("an id of 32 bits", ids(&[u32::MAX.into()])),
        ("an id of 33 bits", ids(&[1 << 32])),
        ("an invalid id", "[1.5]".to_owned()),
        ("a number beyond numbers", "[1e999]".to_owned()),
        ("a hundred lists in each other", "[".repeat(100) + &"]".repeat(100)),
        ("a thousand lists in each other", "[".repeat(1000) + &"]".repeat(1000)),
    ]
}

/// Bodies by path, with `@` in place of a value.
const PLACES: &[(&str, &str)] = &[
    ("/v1/embeddings", r#"{"model": "small", "input": @}"#),
    ("/v1/embeddings", r#"{"model": "small", "input": ["w1", @]}"#),
    ("/v1/embeddings", r#"{"model": @, "input": "w1"}"#),
    ("/v1/embeddings", r#"{"model": "small", "input": "w1", "dimensions": @}"#),
    ("/v1/embeddings", r#"{"model": "small", "input": "w1", "encoding_format": @}"#),
    ("/v1/embeddings", r#"{"model": "small", "input": "w1", "prompt_name": @}"#),
    ("/v1/embeddings", r#"{"model": "small", "input": "w1", "user": @}"#),
    ("/v1/rerank", r#"{"query": @, "documents": ["w1"]}"#),
    ("/v1/rerank", r#"{"query": "w1", "documents": @}"#),
    ("/v2/rerank", r#"{"query": "w1", "documents": ["w1", @]}"#),
    ("/v2/rerank", r#"{"query": "w1", "documents": [{"text": @}]}"#),
    ("/v2/rerank", r#"{"query": "w1", "documents": [{"a": @}], "rank_fields": ["a", "b"]}"#),
    ("/v2/rerank", r#"{"query": "w1", "documents": ["w1"], "rank_fields": @}"#),
    ("/v2/rerank", r#"{"query": "w1", "documents": ["w1"], "top_n": @}"#),
    ("/v2/rerank", r#"{"query": "w1", "documents": ["w1"], "max_tokens_per_doc": @}"#),
    ("/embed", r#"{"inputs": @}"#),
    ("/embed", r#"{"inputs": @, "truncate": true}"#),
    ("/embed", r#"{"inputs": [@], "truncate": true, "truncation_direction": "left"}"#),
    ("/embed", r#"{"inputs": "w1", "normalize": @}"#),
    ("/embed_all", r#"{"inputs": @, "truncate": true}"#),
    ("/", r#"{"inputs": @}"#),
    ("/rerank", r#"{"query": @, "texts": ["w1"]}"#),
    ("/rerank", r#"{"query": "w1", "texts": [@], "truncate": true}"#),
    ("/predict", r#"{"inputs": @}"#),
    ("/predict", r#"{"inputs": [[@], ["w1", @]], "truncate": true}"#),
    ("/similarity", r#"{"inputs": {"source_sentence": @, "sentences": ["w1"]}}"#),
    (
        "/similarity",
        r#"{"inputs": {"source_sentence": "w1", "sentences": [@]}, "parameters": {"truncate": true}}"#,
    ),
    ("/similarity", r#"{"inputs": @}"#),
    ("/tokenize", r#"{"inputs": @}"#),
    ("/decode", r#"{"ids": @}"#),
    ("/score", r#"{"text_1": @, "text_2": [@]}"#),
    ("/classify", r#"{"input": @}"#),
];

#[test]
fn invalid_input_never_causes_a_server_error() {
    let replicas = [Kind::Plain, Kind::Prompted, Kind::Labels(&["LABEL_0"]), Kind::Labels(&["a", "b"])]
        .map(|kind| (kind, TestReplica::of(kind, "")));
    let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
    for (description, value) in strings().into_iter().chain(values()) {
        for (path, place) in PLACES {
            let body = place.replace('@', &value);
            for (kind, replica) in &replicas {
                // A megabyte is sent to one path that reads it: the others reject it unread.
                let of_labels = ["/v1/rerank", "/v2/rerank", "/rerank", "/predict", "/score", "/classify"];
                let reads = match kind {
                    Kind::Plain | Kind::Labels([_, _, ..]) => false,
                    Kind::Prompted => !of_labels.contains(path),
                    Kind::Labels(_) | Kind::Instructed(_) => of_labels.contains(path),
                };
                if value.len() > 1 << 16 && !reads {
                    continue;
                }
                let response = replica.call("POST", path, &[], body.as_bytes());
                *statuses.entry(response.status).or_default() += 1;
                let refused = response.header("x-meridian-error").is_some();
                let text = response.text();
                assert!(
                    response.status == 200 || (response.status < 500 && refused),
                    "{description} at {path} {place}: {text}"
                );
            }
        }
    }
    println!("{statuses:?}");
    assert!(statuses.contains_key(&200) && statuses.len() > 3, "several kinds of successes and rejections");
    for (kind, replica) in &replicas {
        let path = if matches!(kind, Kind::Labels(_)) { "/predict" } else { "/embed" };
        replica.post_ok(path, &json!({"inputs": "w1"}));
    }
}

#[test]
fn a_body_that_is_not_json_is_rejected_on_every_path() {
    let replica = TestReplica::start("");
    for (path, _) in PLACES {
        for body in [&b""[..], b"{", b"[]", b"null", b"\xff\xfe", b"{\"a\": \"\xc3\"}", b"{}"] {
            let response = replica.call("POST", path, &[], body);
            let code = response.header("x-meridian-error").unwrap_or_default();
            assert!(
                ["invalid_json", "missing_field"].contains(&code),
                "{path} {body:?}: {}",
                response.text()
            );
        }
    }
}
