//! Routes of TEI and BEI, and those shared with vLLM.

use replica_api::error::ErrorCode;
use serde_json::{Value, json};

use crate::check_refused;
use crate::served::{HIDDEN, Kind, MAX_TOKENS, SPECIAL, TestReplica, VOCABULARY};

const CLASSIFIER: Kind = Kind::Labels(&["good", "bad", "neither"]);

fn rows(value: &Value) -> Vec<Vec<f64>> {
    serde_json::from_value(value.clone()).expect("rows of numbers")
}

#[track_caller]
fn check_close(given: &[f64], expected: &[f64]) {
    assert_eq!(given.len(), expected.len());
    for (given, expected) in given.iter().zip(expected) {
        assert!((given - expected).abs() < 1e-5, "{given} and {expected}");
    }
}

fn length(row: &[f64]) -> f64 {
    row.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Expected error response on a path of TEI.
#[track_caller]
fn check_tei(replica: &TestReplica, path: &str, body: &Value, code: ErrorCode, expected_message: &str) {
    let response = replica.post(path, body);
    let (error_type, status) = replica_api::tei::error::type_and_status(code);
    assert_eq!(response.status, status, "{path}: {}", response.text());
    assert_eq!(response.header("x-meridian-error"), Some(code.as_str()), "{path}");
    let json = response.json();
    assert_eq!(json["error_type"], format!("{error_type:?}"), "{path}");
    let message = json["error"].as_str().expect("a sentence");
    assert!(message.contains(expected_message), "{path}: {expected_message:?} in {message}");
}

#[test]
fn embed_returns_bare_vectors() {
    let replica = TestReplica::start("");
    let openai = replica.vectors(&["w1 w2".to_owned(), "w3".to_owned()]);
    let both = json!({"inputs": ["w1 w2", "w3"]});
    for (row, expected) in rows(&replica.post_ok("/embed", &both)).iter().zip(&openai) {
        check_close(row, &expected.iter().map(|x| f64::from(*x)).collect::<Vec<_>>());
    }
    let whole = rows(&replica.post_ok("/embed", &json!({"inputs": "w1 w2"})));
    assert!((length(&whole[0]) - 1.0).abs() < 1e-6, "vectors are normalized by default");
    assert_eq!(rows(&replica.post_ok("/", &json!({"inputs": "w1 w2"}))), whole, "the path of TEI clients");
    assert_eq!(rows(&replica.post_ok("/embed", &json!({"inputs": [1, 2]}))), whole, "token ids");
    let short = rows(&replica.post_ok("/embed", &json!({"inputs": [[1, 2]], "dimensions": 8})));
    let scale = length(&whole[0][..8]);
    check_close(&short[0], &whole[0][..8].iter().map(|x| x / scale).collect::<Vec<_>>());
}

#[test]
fn embed_all_returns_a_row_per_token() {
    let replica = TestReplica::start("");
    let all = replica.post_ok("/embed_all", &json!({"inputs": ["w1 w2 w3", "w4"]}));
    let all: Vec<Vec<Vec<f64>>> = serde_json::from_value(all).expect("rows of tokens");
    assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [3, 1]);
    // This model's vector is the mean of them.
    let mean: Vec<f64> = (0..HIDDEN).map(|i| all[0].iter().map(|row| row[i]).sum::<f64>() / 3.0).collect();
    let pooled = replica.post_ok("/embed", &json!({"inputs": "w1 w2 w3", "normalize": false}));
    check_close(&rows(&pooled)[0], &mean);
}

#[test]
fn long_inputs_are_truncated_only_if_the_request_enables_it() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let words: Vec<String> = (0..300).map(|i| format!("w{}", i % 90 + 1)).collect();
    let (room, long) = (MAX_TOKENS - 2, words.join(" "));
    let embed = |text: &str, extra: &[(&str, Value)]| {
        let mut body = json!({"inputs": [text]});
        extra.iter().for_each(|(name, value)| body[*name] = value.clone());
        rows(&replica.post_ok("/embed", &body)).swap_remove(0)
    };
    let expected_message = "`inputs[0]` has 302 tokens and the limit of this model is 128";
    check_tei(&replica, "/embed", &json!({"inputs": [long]}), ErrorCode::InputTooLong, expected_message);
    let cut = ("truncate", json!(true));
    check_close(&embed(&long, std::slice::from_ref(&cut)), &embed(&words[..room].join(" "), &[]));
    let left = ("truncation_direction", json!("left"));
    check_close(&embed(&long, &[cut.clone(), left]), &embed(&words[300 - room..].join(" "), &[]));
    let prompt = ("prompt_name", json!("query"));
    let prompted = embed(&long, &[cut, prompt.clone()]);
    check_close(&prompted, &embed(&words[..room - 2].join(" "), &[prompt]));
}

#[test]
fn a_classifier_returns_the_labels_with_their_scores_in_descending_order() {
    let replica = TestReplica::of(CLASSIFIER, "");
    let raw = replica.post_ok("/predict", &json!({"inputs": "w1 w2", "raw_scores": true}));
    let logits: Vec<f64> = raw.as_array().expect("a list").iter().map(score).collect();
    let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
    let expected: Vec<f64> = logits.iter().map(|logit| logit.exp() / sum).collect();
    let one = replica.post_ok("/predict", &json!({"inputs": "w1 w2"}));
    let list = one.as_array().expect("a list");
    check_close(&list.iter().map(score).collect::<Vec<_>>(), &expected);
    let mut labels: Vec<&str> = list.iter().filter_map(|label| label["label"].as_str()).collect();
    assert!(expected.is_sorted_by(|a, b| a >= b) && labels.len() == 3, "{one}");
    labels.sort_unstable();
    assert_eq!(labels, ["bad", "good", "neither"]);
    assert_eq!(replica.post_ok("/", &json!({"inputs": "w1 w2"})), one, "as TEI routes it");
    let batch = replica.post_ok("/predict", &json!({"inputs": [["w1 w2"], ["w3", "w4"]]}));
    assert_eq!(batch[0].as_array().map(Vec::len), Some(3));
    check_close(&batch[0].as_array().expect("a list").iter().map(score).collect::<Vec<_>>(), &expected);
    let vllm = replica.post_ok("/classify", &json!({"model": "small", "input": ["w1 w2"]}));
    assert_eq!(vllm["data"][0]["label"], one[0]["label"]);
    assert_eq!(vllm["data"][0]["probs"].as_array().map(Vec::len), Some(3));
    assert_eq!(vllm["usage"]["total_tokens"], 4);
    let info = replica.get("/info");
    assert_eq!(info["model"]["labels"], json!(["good", "bad", "neither"]));
    assert_eq!(info["model_type"]["classifier"]["id2label"]["1"], "bad");
}

fn score(label: &Value) -> f64 {
    label["score"].as_f64().expect("a score")
}

#[test]
fn similarities_are_the_cosines_of_the_sentences_with_the_source() {
    let replica = TestReplica::start("");
    let body = json!({"inputs": {"source_sentence": "w1 w2", "sentences": ["w1 w2", "w3", "w4 w5"]}});
    let cosines: Vec<f64> = serde_json::from_value(replica.post_ok("/similarity", &body)).expect("numbers");
    let vectors = rows(&replica.post_ok("/embed", &json!({"inputs": ["w1 w2", "w1 w2", "w3", "w4 w5"]})));
    let dot = |row: &Vec<f64>| row.iter().zip(&vectors[0]).map(|(a, b)| a * b).sum::<f64>();
    check_close(&cosines, &vectors[1..].iter().map(dot).collect::<Vec<_>>());
}

#[test]
fn tokens_are_returned_with_offsets_and_decode_to_the_text() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let special =
        |id: u32, text: &str| json!({"id": id, "text": text, "special": true, "start": null, "stop": null});
    let token = |id: u32, text: &str, start: usize, stop: usize| json!({"id": id, "text": text, "special": false, "start": start, "stop": stop});
    let (first, last) = (special(SPECIAL[0], "[CLS]"), special(SPECIAL[1], "[SEP]"));
    let words = [token(1, "w1", 0, 2), token(0, "é", 3, 5), token(22, "w22", 6, 9)];
    let whole = json!([[first, words[0], words[1], words[2], last]]);
    assert_eq!(replica.post_ok("/tokenize", &json!({"inputs": "w1 é w22"})), whole);
    assert_eq!(replica.post_ok("/tokenize", &json!({"inputs": ["w1 é w22"]})), whole);
    let bare = json!({"inputs": "w1 é w22", "add_special_tokens": false});
    assert_eq!(replica.post_ok("/tokenize", &bare), json!([words]));
    let prompted = json!({"inputs": "w1", "add_special_tokens": false, "prompt_name": "document"});
    assert_eq!(
        replica.post_ok("/tokenize", &prompted),
        json!([[token(8, "w8", 0, 2), token(1, "w1", 3, 5)]])
    );
    let ids = json!({"ids": [SPECIAL[0], 1, 22, SPECIAL[1]]});
    assert_eq!(replica.post_ok("/decode", &ids), json!(["w1 w22"]));
    let ids = json!({"ids": [[SPECIAL[0], 1], [22]], "skip_special_tokens": false});
    assert_eq!(replica.post_ok("/decode", &ids), json!(["[CLS] w1", "w22"]));
    let unknown = json!({"ids": [[1], [VOCABULARY]]});
    check_tei(&replica, "/decode", &unknown, ErrorCode::InvalidValue, "`ids[1]` has the token id 200");
}

#[test]
fn a_request_for_another_task_names_the_task_of_the_model() {
    let embed = TestReplica::start("");
    let rerank = TestReplica::of(Kind::Labels(&["LABEL_0"]), "");
    let classify = TestReplica::of(CLASSIFIER, "");
    let text = json!({"inputs": "w1"});
    let similarity = json!({"inputs": {"source_sentence": "w1", "sentences": ["w1"]}});
    let texts = json!({"query": "w1", "texts": ["w1"]});
    let documents = json!({"query": "w1", "documents": ["w1"]});
    for (replica, path, body, expected_message) in [
        (&embed, "/predict", &text, "is one that embeds"),
        (&rerank, "/embed", &text, "is a reranker"),
        (&rerank, "/embed_all", &text, "is a reranker"),
        (&rerank, "/similarity", &similarity, "is a reranker"),
        (&classify, "/embed", &text, "is a classifier of 3 labels"),
        (&classify, "/rerank", &texts, "is a classifier of 3 labels"),
    ] {
        check_tei(replica, path, body, ErrorCode::WrongTask, expected_message);
    }
    let input = json!({"model": "small", "input": "w1"});
    for (replica, path, body, expected_message) in [
        (&rerank, "/v1/embeddings", &input, "is a reranker"),
        (&classify, "/v1/rerank", &documents, "is a classifier of 3 labels"),
        (&classify, "/v2/rerank", &documents, "is a classifier of 3 labels"),
        (&embed, "/classify", &input, "is one that embeds"),
    ] {
        check_refused(&replica.post(path, body), ErrorCode::WrongTask, None, expected_message);
    }
    for (replica, task, kind) in [
        (&embed, "embed", "embedding"),
        (&rerank, "rerank", "reranker"),
        (&classify, "classify", "classifier"),
    ] {
        let info = replica.get("/info");
        assert_eq!(info["model"]["task"], task);
        assert!(info["model_type"].get(kind).is_some(), "{}", info["model_type"]);
    }
    assert_eq!(classify.get("/info")["model"]["rerank"], "none");
}

#[test]
fn info_and_metrics_have_the_fields_that_tei_clients_expect() {
    let replica = TestReplica::of(Kind::Prompted, "[limits]\nmax_inputs = 5\n");
    replica.post_ok("/embed", &json!({"inputs": "w1"}));
    let info = replica.get("/info");
    for (pointer, expected) in [
        ("/model_type/embedding/pooling", json!("mean")),
        ("/model_dtype", json!("f32")),
        ("/served_model_name", json!("small")),
        ("/max_input_length", json!(MAX_TOKENS)),
        ("/max_client_batch_size", json!(5)),
        ("/auto_truncate", json!(false)),
        ("/model/prompts", json!(["document", "query"])),
        ("/model/default_prompt", json!(null)),
        ("/model/normalized", json!(true)),
        ("/limits/max_documents", json!(10_000)),
        ("/limits/max_pairs", json!(2048)),
        ("/limits/max_sentences", json!(2048)),
        ("/limits/max_request_tokens", json!(1 << 20)),
    ] {
        assert_eq!(info.pointer(pointer), Some(&expected), "{pointer} in {info}");
    }
    assert_eq!(info["model_sha"], info["model"]["digest"]);
    let metrics = replica.call("GET", "/metrics", &[], b"");
    let text = String::from_utf8(metrics.body).expect("text");
    assert!(text.lines().any(|line| line == "te_request_count 1"), "{text}");
    for name in ["te_request_duration", "te_request_queue_duration", "te_batch_next_size", "te_queue_size"] {
        assert!(text.contains(name), "{name}");
    }
}

#[test]
fn the_priority_header_is_used_and_an_unknown_priority_is_rejected() {
    let replica = TestReplica::start("");
    let body = json!({"inputs": "w1"}).to_string();
    let call = |priority: &str| {
        replica.call("POST", "/embed", &[("x-meridian-priority", priority)], body.as_bytes())
    };
    assert_eq!((call("bulk").status, call("interactive").status), (200, 200));
    let refused = call("express");
    assert_eq!(refused.status, 400);
    let message = refused.json()["error"].as_str().expect("a sentence").to_owned();
    assert!(message.contains("x-meridian-priority") && message.contains("express"), "{message}");
}
