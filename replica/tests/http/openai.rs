//! What `POST /v1/embeddings` has beside the inputs: dimensions and prompts.

use replica_core::wire::error::ErrorCode;
use serde_json::{Value, json};

use crate::check_refused;
use crate::served::{HIDDEN, Kind, PROMPTS, Served};

fn vector(replica: &Served, body: Value) -> (Vec<f32>, u64) {
    let answer = replica.embed(&body);
    assert_eq!(answer.status, 200, "{body}: {}", answer.text());
    let tokens = answer.json()["usage"]["total_tokens"].as_u64().expect("a number");
    (answer.vectors().swap_remove(0), tokens)
}

fn length(vector: &[f32]) -> f32 {
    vector.iter().map(|x| x * x).sum::<f32>().sqrt()
}

#[test]
fn fewer_dimensions_are_the_first_ones_at_length_one_again() {
    let replica = Served::of(Kind::Prompted, "");
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
fn a_model_that_does_not_normalise_is_not_normalised_for() {
    let replica = Served::start("");
    let (whole, _) = vector(&replica, json!({"model": "small", "input": "w1 w2"}));
    let (short, _) = vector(&replica, json!({"model": "small", "input": "w1 w2", "dimensions": 8}));
    assert!((length(&whole) - 1.0).abs() > 1e-3);
    assert_eq!(short, whole[..8]);
}

#[test]
fn a_prompt_is_the_same_as_the_text_with_it_and_its_tokens_count() {
    let replica = Served::of(Kind::Prompted, "");
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
fn a_prompt_that_cannot_be_is_refused() {
    let replica = Served::of(Kind::Prompted, "");
    let check = |body: Value, says: &str| {
        let param = Some("prompt_name").filter(|_| !says.contains("token ids")).or(Some("input"));
        check_refused(&replica.embed(&body), ErrorCode::InvalidValue, param, says);
    };
    check(json!({"model": "small", "input": "w1", "prompt_name": "passage"}), "\"document\", \"query\"");
    check(json!({"model": "small", "input": [1], "prompt_name": "query"}), "token ids");
    let plain = Served::start("");
    let body = json!({"model": "small", "input": "w1", "prompt_name": "query"});
    check_refused(&plain.embed(&body), ErrorCode::InvalidValue, Some("prompt_name"), "leave it out");
    let body = json!({"model": "small", "input": "w1", "input_type": "query"});
    assert_eq!(plain.embed(&body).status, 200, "a model without prompts makes no difference between texts");
}
