//! Each limit, at it and one past it, with its name, its value and the given value.

use replica_api::error::ErrorCode;
use serde_json::{Value, json};

use crate::check_refused;
use crate::served::{Kind, TestReplica};

const LIMITS: &str = "[limits]\nmax_inputs = 3\nmax_documents = 4\nmax_pairs = 5\nmax_sentences = 6\n\
                      max_request_tokens = 40\nmax_body_bytes = 2000\n";

fn texts(count: usize) -> Vec<&'static str> {
    vec!["w1"; count]
}

/// Checks that a request of `most` elements succeeds, and that one more is rejected with the name of the limit.
#[track_caller]
fn check(replica: &TestReplica, path: &str, key: &str, most: usize, body: impl Fn(usize) -> Value) {
    let response = replica.post(path, &body(most));
    assert_eq!(response.status, 200, "{path}: {}", response.text());
    let refused = replica.post(path, &body(most + 1));
    assert_eq!(refused.header("x-meridian-error"), Some("too_many_inputs"), "{path}: {}", refused.text());
    assert!([400, 413].contains(&refused.status), "{path}");
    let text = refused.text();
    let expected_message =
        [format!("has {} elements", most + 1), format!("limit is {most}"), format!("`{key}`")];
    for part in expected_message {
        assert!(text.contains(&part), "{path}: {part:?} in {text}");
    }
}

#[test]
fn limits_of_lists_apply_one_past_them() {
    let embed = TestReplica::start(LIMITS);
    check(&embed, "/v1/embeddings", "max_inputs", 3, |n| json!({"model": "small", "input": texts(n)}));
    check(&embed, "/embed", "max_inputs", 3, |n| json!({"inputs": texts(n)}));
    check(&embed, "/embed", "max_inputs", 3, |n| json!({"inputs": vec![[1]; n]}));
    check(&embed, "/embed_all", "max_inputs", 3, |n| json!({"inputs": texts(n)}));
    check(&embed, "/tokenize", "max_inputs", 3, |n| json!({"inputs": texts(n)}));
    check(&embed, "/decode", "max_inputs", 3, |n| json!({"ids": vec![[1]; n]}));
    let sentences = |n| json!({"inputs": {"source_sentence": "w1", "sentences": texts(n)}});
    check(&embed, "/similarity", "max_sentences", 6, sentences);
    let labels = TestReplica::of(Kind::Labels(&["LABEL_0"]), LIMITS);
    for replica in [&embed, &labels] {
        let documents = |n| json!({"query": "w1", "documents": texts(n)});
        check(replica, "/v1/rerank", "max_documents", 4, documents);
        check(replica, "/v2/rerank", "max_documents", 4, documents);
        check(replica, "/rerank", "max_documents", 4, documents);
        check(replica, "/rerank", "max_documents", 4, |n| json!({"query": "w1", "texts": texts(n)}));
        check(replica, "/score", "max_pairs", 5, |n| json!({"text_1": "w1", "text_2": texts(n)}));
    }
    check(&labels, "/predict", "max_pairs", 5, |n| json!({"inputs": vec![["w1", "w2"]; n]}));
    check(&labels, "/classify", "max_pairs", 5, |n| json!({"input": texts(n)}));
}

#[test]
fn the_limit_of_tokens_of_a_request_applies_one_past_it() {
    let replica = TestReplica::start(LIMITS);
    let post = |lengths: [usize; 3]| {
        let input: Vec<String> = lengths.iter().map(|length| vec!["w1"; *length].join(" ")).collect();
        replica.embed(&json!({"model": "small", "input": input}))
    };
    assert_eq!(post([20, 10, 10]).status, 200);
    let expected_message = "the request has 41 tokens and the limit is 40 (`max_request_tokens`)";
    check_refused(&post([20, 10, 11]), ErrorCode::TooManyTokens, None, expected_message);
}

#[test]
fn the_limit_of_bytes_is_reported_in_the_format_of_tei() {
    let replica = TestReplica::start(LIMITS);
    let post = |bytes: usize| {
        let body = json!({"inputs": "w1"}).to_string();
        let body = body.clone() + &" ".repeat(bytes - body.len());
        replica.call("POST", "/embed", &[], body.as_bytes())
    };
    assert_eq!(post(2000).status, 200);
    let refused = post(2001);
    assert_eq!((refused.status, &refused.json()["error_type"]), (413, &json!("Validation")));
    assert!(refused.text().contains("2001 bytes and the limit is 2000"), "{}", refused.text());
}
