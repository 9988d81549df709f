//! Options of `POST /v1/embeddings`: dimensions, prompts, normalization and truncation.

use replica_api::error::ErrorCode;
use serde_json::{Value, json};

use crate::check_refused;
use crate::served::{HIDDEN, Kind, MAX_TOKENS, PROMPTS, TestReplica};

fn vector(replica: &TestReplica, body: Value) -> (Vec<f32>, u64) {
    let response = replica.embed(&body);
    assert_eq!(response.status, 200, "{body}: {}", response.text());
    let tokens = response.json()["usage"]["total_tokens"].as_u64().expect("a number");
    (response.vectors().swap_remove(0), tokens)
}

fn length(vector: &[f32]) -> f32 {
    vector.iter().map(|x| x * x).sum::<f32>().sqrt()
}

#[test]
fn fewer_dimensions_are_the_first_ones_renormalized() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let (whole, _) = vector(&replica, json!({"model": "small", "input": "w1 w2"}));
    assert!((length(&whole) - 1.0).abs() < 1e-6);
    for (dimensions, format) in [(1, "float"), (16, "base64"), (HIDDEN, "float")] {
        let body =
            json!({"model": "small", "input": "w1 w2", "dimensions": dimensions, "encoding_format": format});
        let (short, _) = vector(&replica, body);
        assert_eq!(short.len(), dimensions);
        let scale = length(&whole[..dimensions]);
        for (short, whole) in short.iter().zip(&whole) {
            assert!((short - whole / scale).abs() < 1e-6, "{dimensions}");
        }
    }
}

#[test]
fn vectors_are_normalized_unless_the_request_or_the_configuration_disables_it() {
    let input = |rest: Value| {
        let mut body = json!({"model": "small", "input": "w1 w2"});
        body.as_object_mut().expect("an object").extend(rest.as_object().expect("an object").clone());
        body
    };
    // This model has no normalization module.
    let replica = TestReplica::start("");
    assert_eq!(replica.get("/info")["model"]["normalized"], true);
    let (whole, _) = vector(&replica, input(json!({})));
    let (short, _) = vector(&replica, input(json!({"dimensions": 8})));
    assert!((length(&whole) - 1.0).abs() < 1e-6 && (length(&short) - 1.0).abs() < 1e-6);
    let (plain, _) = vector(&replica, input(json!({"normalize": false})));
    assert!((length(&plain) - 1.0).abs() > 1e-3);
    let (jina, _) = vector(&replica, input(json!({"normalized": false})));
    assert_eq!(jina, plain);
    let scale = length(&plain);
    for (plain, whole) in plain.iter().zip(&whole) {
        assert!((plain / scale - whole).abs() < 1e-6);
    }

    let configured = TestReplica::start("[embeddings]\nnormalize = false\n");
    assert_eq!(configured.get("/info")["model"]["normalized"], false);
    assert_eq!(vector(&configured, input(json!({}))).0, plain);
    let (normalized, _) = vector(&configured, input(json!({"normalize": true})));
    assert!((length(&normalized) - 1.0).abs() < 1e-6);
    // A model with a normalization module keeps it.
    let own = TestReplica::of(Kind::Prompted, "[embeddings]\nnormalize = false\n");
    assert!((length(&vector(&own, input(json!({}))).0) - 1.0).abs() < 1e-6);
}

#[test]
fn long_inputs_are_truncated_if_the_request_or_the_configuration_enables_it() {
    let words = |count: usize| (0..count).map(|i| format!("w{}", i % 90 + 1)).collect::<Vec<_>>();
    let (room, long) = (MAX_TOKENS - 2, words(300).join(" "));
    let replica = TestReplica::of(Kind::Prompted, "");
    let body = |text: &str, rest: Value| {
        let mut body = json!({"model": "small", "input": text});
        body.as_object_mut().expect("an object").extend(rest.as_object().expect("an object").clone());
        body
    };
    let refused = replica.embed(&body(&long, json!({})));
    check_refused(&refused, ErrorCode::InputTooLong, Some("input"), "302 tokens");
    let first = vector(&replica, body(&words(room).join(" "), json!({})));
    let last = vector(&replica, body(&words(300)[300 - room..].join(" "), json!({})));
    for (rest, expected) in [
        (json!({"truncate": true}), &first),
        (json!({"truncate": "END"}), &first),
        (json!({"truncate_prompt_tokens": -1}), &first),
        (json!({"truncate_prompt_tokens": MAX_TOKENS}), &first),
        (json!({"truncate": true, "truncation_direction": "left"}), &last),
        (json!({"truncate": "START"}), &last),
        (json!({"truncate_prompt_tokens": -1, "truncation_side": "left"}), &last),
    ] {
        assert_eq!(vector(&replica, body(&long, rest.clone())), *expected, "{rest}");
    }
    let five = vector(&replica, body("w1 w2 w3 w4 w5", json!({"truncate_prompt_tokens": 5})));
    assert_eq!(five, vector(&replica, body("w1 w2 w3", json!({}))), "special tokens are among the five");
    for wrong in [2, MAX_TOKENS + 1] {
        let refused = replica.embed(&body("w1", json!({"truncate_prompt_tokens": wrong})));
        check_refused(&refused, ErrorCode::InvalidValue, Some("input"), "3 to 128");
    }

    let configured = TestReplica::of(Kind::Prompted, "[embeddings]\nauto_truncate = true\n");
    assert_eq!(configured.get("/info")["auto_truncate"], true);
    assert_eq!(vector(&configured, body(&long, json!({}))), first);
    let refused = configured.embed(&body(&long, json!({"truncate": false})));
    check_refused(&refused, ErrorCode::InputTooLong, Some("input"), "302 tokens");
    assert_eq!(configured.post("/embed", &json!({"inputs": long})).status, 200);
}

#[test]
fn a_prompt_equals_the_text_with_it_and_its_tokens_count() {
    let replica = TestReplica::of(Kind::Prompted, "");
    for (name, prompt) in PROMPTS {
        let by_hand = json!({"model": "small", "input": format!("{prompt}w1 w2")});
        let named = json!({"model": "small", "input": "w1 w2", "prompt_name": name});
        let typed = json!({"model": "small", "input": "w1 w2", "input_type": name});
        let expected = vector(&replica, by_hand);
        assert_eq!(
            expected.1,
            prompt.split_whitespace().count() as u64 + 4,
            "two words and two special tokens"
        );
        assert_eq!(vector(&replica, named), expected);
        assert_eq!(vector(&replica, typed), expected);
    }
    let none = vector(&replica, json!({"model": "small", "input": "w1 w2"}));
    assert_eq!(none.1, 4, "this model has no default");
}

#[test]
fn an_unknown_prompt_is_rejected() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let check = |body: Value, expected_message: &str| {
        let param = Some("prompt_name").filter(|_| !expected_message.contains("token ids")).or(Some("input"));
        check_refused(&replica.embed(&body), ErrorCode::InvalidValue, param, expected_message);
    };
    check(json!({"model": "small", "input": "w1", "prompt_name": "passage"}), "\"document\", \"query\"");
    check(json!({"model": "small", "input": [1], "prompt_name": "query"}), "token ids");
    let plain = TestReplica::start("");
    let body = json!({"model": "small", "input": "w1", "prompt_name": "query"});
    check_refused(&plain.embed(&body), ErrorCode::InvalidValue, Some("prompt_name"), "leave it out");
    let body = json!({"model": "small", "input": "w1", "input_type": "query"});
    assert_eq!(plain.embed(&body).status, 200, "a model without prompts makes no difference between texts");
}
