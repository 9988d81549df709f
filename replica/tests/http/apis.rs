//! The APIs of Cohere, Voyage, Infinity, Jina and vLLM, and Hugging Face's at the base URL: the same vectors and scores
//! in other formats.

use replica_api::openai::response::Embedding;
use serde_json::{Value, json};

use crate::served::{HIDDEN, Kind, MAX_TOKENS, Response, TestReplica};

const LABELS: Kind = Kind::Labels(&["good", "bad", "neither"]);

fn numbers(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).unwrap_or_else(|_| panic!("numbers in {value}"))
}

/// Returns the vector of a text from OpenAI's API.
fn vector(replica: &TestReplica, text: &str, rest: Value) -> Vec<f32> {
    let mut body = json!({"model": "small", "input": text});
    body.as_object_mut().expect("an object").extend(rest.as_object().expect("an object").clone());
    numbers(&replica.post_ok("/v1/embeddings", &body)["data"][0]["embedding"])
}

fn base64(text: &Value) -> Vec<f32> {
    let text = text.as_str().expect("a text").to_owned();
    Embedding::Base64(text).values().expect("base64 of numbers")
}

/// Returns one bit for each number, as `numpy.packbits(row > 0)`.
fn bits(row: &[f32]) -> Vec<u8> {
    let byte = |eight: &[f32]| eight.iter().fold(0, |bits, number| bits << 1 | u8::from(*number > 0.0));
    row.chunks_exact(8).map(byte).collect()
}

#[track_caller]
fn check(response: &Response, status: u16, member: &str, expected_message: &str) {
    assert_eq!(response.status, status, "{}", response.text());
    let message = response.json()[member]
        .as_str()
        .unwrap_or_else(|| panic!("{member} in {}", response.text()))
        .to_owned();
    assert!(message.contains(expected_message), "{expected_message} in {message}");
}

#[test]
fn cohere_returns_vectors_bare_and_by_type() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let query = vector(&replica, "w1 w2", json!({"input_type": "query"}));
    let v1 = json!({"model": "small", "texts": ["w3", "w1 w2"], "input_type": "search_query"});
    let response = replica.post_ok("/v1/embed", &v1);
    assert_eq!(response["response_type"], "embeddings_floats");
    assert_eq!(numbers(&response["embeddings"][1]), query);
    assert_eq!(response["texts"], json!(["w3", "w1 w2"]));

    let types = json!(["float", "base64", "binary", "ubinary"]);
    let v2 =
        json!({"model": "small", "texts": ["w1 w2"], "input_type": "search_query", "embedding_types": types});
    let by_type = replica.post_ok("/v2/embed", &v2)["embeddings"].clone();
    assert_eq!(numbers(&by_type["float"][0]), query);
    assert_eq!(base64(&by_type["base64"][0]), query);
    let packed = bits(&query);
    assert_eq!(by_type["ubinary"][0], json!(packed));
    let signed: Vec<i16> = packed.iter().map(|byte| i16::from(*byte) - 128).collect();
    assert_eq!(by_type["binary"][0], json!(signed));

    let content = json!([{"content": [{"type": "text", "text": "w1 w2"}]}]);
    let v2 =
        json!({"model": "small", "inputs": content, "input_type": "search_query", "output_dimension": 8});
    let short = numbers(&replica.post_ok("/v2/embed", &v2)["embeddings"]["float"][0]);
    assert_eq!(short, vector(&replica, "w1 w2", json!({"input_type": "query", "dimensions": 8})));

    let long = "w1 ".repeat(400);
    let end = json!({"model": "small", "texts": [long], "input_type": "search_document"});
    assert_eq!(replica.post("/v2/embed", &end).status, 200, "Cohere truncates the end by default");
    let none =
        json!({"model": "small", "texts": [long], "input_type": "search_document", "truncate": "NONE"});
    check(&replica.post("/v2/embed", &none), 400, "message", "`texts[0]` has 403 tokens");
    let images = json!({"model": "small", "input_type": "image", "images": ["data:"]});
    check(&replica.post("/v2/embed", &images), 400, "message", "`images`");
    let int8 = json!({"model": "small", "texts": ["w1"], "embedding_types": ["int8"]});
    check(&replica.post("/v1/embed", &int8), 400, "message", "\"ubinary\"");
}

#[test]
fn bedrock_embeds_one_text() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let expected = vector(&replica, "w1 w2", json!({"dimensions": 16}));
    let body = json!({"inputText": "w1 w2", "embeddingTypes": ["float"], "dimensions": 16});
    let embedded = replica.post_ok("/bedrock/invoke", &body);
    assert_eq!(numbers(&embedded["embedding"]), expected);
    assert_eq!(numbers(&embedded["embeddingsByType"]["float"]), expected);
    assert!(embedded["inputTextTokenCount"].as_u64().is_some_and(|tokens| tokens > 2), "{embedded}");
    check(&replica.post("/bedrock/invoke", &json!({})), 400, "message", "inputText");
}

#[test]
fn voyage_embeds_and_ranks() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let expected = vector(&replica, "w1 w2", json!({"input_type": "document", "dimensions": 16}));
    let post_ok = |rest: Value| {
        let mut body =
            json!({"model": "small", "input": ["w1 w2"], "input_type": "document", "output_dimension": 16});
        body.as_object_mut().expect("an object").extend(rest.as_object().expect("an object").clone());
        replica.post_ok("/voyage/v1/embeddings", &body)
    };
    let plain = post_ok(json!({}));
    assert_eq!(numbers(&plain["data"][0]["embedding"]), expected);
    assert!(plain["usage"]["total_tokens"].as_u64().is_some_and(|tokens| tokens > 0));
    assert_eq!(base64(&post_ok(json!({"encoding_format": "base64"}))["data"][0]["embedding"]), expected);
    let packed = bits(&expected);
    assert_eq!(post_ok(json!({"output_dtype": "ubinary"}))["data"][0]["embedding"], json!(packed));
    let signed: Vec<i16> = packed.iter().map(|byte| i16::from(*byte) - 128).collect();
    assert_eq!(post_ok(json!({"output_dtype": "binary"}))["data"][0]["embedding"], json!(signed));

    let long = "w1 ".repeat(400);
    let whole = json!({"model": "small", "input": long, "truncation": false});
    check(&replica.post("/voyage/v1/embeddings", &whole), 400, "detail", "`input` has 402 tokens");
    let int8 = json!({"model": "small", "input": "w1", "output_dtype": "int8"});
    check(&replica.post("/voyage/v1/embeddings", &int8), 400, "detail", "output_dtype");

    let documents = json!(["w5 w6", "w1 w2", "w7"]);
    let cohere =
        replica.post_ok("/v2/rerank", &json!({"model": "small", "query": "w1", "documents": documents}));
    let body = json!({"model": "small", "query": "w1", "documents": documents, "top_k": 2, "return_documents": true});
    let ranked = replica.post_ok("/voyage/v1/rerank", &body);
    assert_eq!(ranked["data"].as_array().map(Vec::len), Some(2));
    for at in 0..2 {
        let (ours, theirs) = (&ranked["data"][at], &cohere["results"][at]);
        assert_eq!(
            (&ours["index"], &ours["relevance_score"]),
            (&theirs["index"], &theirs["relevance_score"])
        );
        assert_eq!(ours["document"], documents[ours["index"].as_u64().expect("an index") as usize]);
    }
    let top_n = json!({"model": "small", "query": "w1", "documents": documents, "top_n": 2});
    check(&replica.post("/voyage/v1/rerank", &top_n), 400, "detail", "`top_k`");
}

#[test]
fn infinity_returns_bare_documents_and_lists_of_labels() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let body = json!({"model": "small", "input": ["w1"], "dimensions": 0, "modality": "text"});
    let embedded = replica.post_ok("/infinity/embeddings", &body);
    assert_eq!(numbers(&embedded["data"][0]["embedding"]).len(), HIDDEN);
    let body =
        json!({"model": "small", "query": "w1", "documents": ["w5", "w1 w2"], "return_documents": true});
    let ranked = replica.post_ok("/infinity/rerank", &body);
    let index = ranked["results"][0]["index"].as_u64().expect("an index") as usize;
    assert_eq!(ranked["results"][0]["document"], ["w5", "w1 w2"][index]);
    let mut raw = body.clone();
    raw["raw_scores"] = json!(true);
    let raw = replica.post_ok("/infinity/rerank", &raw);
    let score = |ranked: &Value| ranked["results"][0]["relevance_score"].as_f64().expect("a score");
    assert!(
        (score(&ranked) - f64::midpoint(1.0, score(&raw))).abs() < 1e-6,
        "a cosine, and its transformed score"
    );

    let classifier = TestReplica::of(LABELS, "");
    let labels = classifier.post_ok("/infinity/classify", &json!({"model": "small", "input": ["w1", "w2"]}));
    assert_eq!(
        (labels["object"].as_str(), labels["data"][1].as_array().map(Vec::len)),
        (Some("classify"), Some(3))
    );
    let raw = classifier.post_ok("/classify", &json!({"model": "small", "input": "w1", "raw_scores": true}));
    let sum: f32 = numbers(&raw["data"][0]["probs"]).iter().sum();
    assert!((sum - 1.0).abs() > 1e-3, "logits do not sum to one");
}

#[test]
fn objects_with_a_text_are_accepted_as_texts() {
    let replica = TestReplica::start("");
    let expected = vector(&replica, "w1 w2", json!({}));
    let body = json!({"model": "small", "input": [{"text": "w1 w2"}], "task": "retrieval.query"});
    assert_eq!(numbers(&replica.post_ok("/v1/embeddings", &body)["data"][0]["embedding"]), expected);
    let image = replica.post("/v1/embeddings", &json!({"model": "small", "input": [{"image": "x"}]}));
    assert_eq!((image.status, &image.json()["error"]["param"]), (400, &json!("input")));
}

#[test]
fn pooling_returns_the_output_of_its_task() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let post_ok = |rest: Value| {
        let mut body = json!({"model": "small", "input": ["w1 w2", "w3"]});
        body.as_object_mut().expect("an object").extend(rest.as_object().expect("an object").clone());
        replica.post_ok("/pooling", &body)["data"].clone()
    };
    assert_eq!(numbers(&post_ok(json!({"task": "embed"}))[0]["data"]), vector(&replica, "w1 w2", json!({})));
    let tokens = post_ok(json!({}));
    assert_eq!(tokens[0]["data"].as_array().map(Vec::len), Some(4), "two words and two special tokens");
    let row = numbers(&tokens[1]["data"][2]);
    assert!((row.iter().map(|x| x * x).sum::<f32>().sqrt() - 1.0).abs() < 1e-5);
    let plain = post_ok(json!({"normalize": false}));
    let expected = replica.post_ok("/embed_all", &json!({"inputs": ["w1 w2", "w3"]}));
    assert_eq!(plain[1]["data"], expected[1]);
    assert_eq!(post_ok(json!({"truncate_prompt_tokens": 3}))[0]["data"].as_array().map(Vec::len), Some(3));

    let classifier = TestReplica::of(LABELS, "");
    let classes = classifier.post_ok("/classify", &json!({"model": "small", "input": "w1"}));
    let pooled = classifier.post_ok("/pooling", &json!({"model": "small", "input": "w1"}));
    assert_eq!(pooled["data"][0]["data"], classes["data"][0]["probs"]);
    let embed = classifier.post("/pooling", &json!({"model": "small", "input": "w1", "task": "embed"}));
    assert_eq!(embed.header("x-meridian-error"), Some("wrong_task"));
}

#[test]
fn a_prompt_is_tokenized_as_in_vllm() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let tokens = replica.post_ok("/tokenize", &json!({"model": "small", "prompt": "w1 w2"}));
    let expected =
        json!({"count": 4, "max_model_len": MAX_TOKENS, "tokens": [198, 1, 2, 199], "token_strs": null});
    assert_eq!(tokens, expected);
    let bare = json!({"prompt": "w1 w2", "add_special_tokens": false, "return_token_strs": true});
    assert_eq!(replica.post_ok("/tokenize", &bare)["token_strs"], json!(["w1", "w2"]));
    let unknown = replica.post("/tokenize", &json!({"model": "nope", "prompt": "w1"}));
    assert_eq!(unknown.header("x-meridian-error"), Some("model_not_found"));
}

#[test]
fn the_base_url_serves_hugging_faces_tasks() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let sentences = json!({"source_sentence": "w1 w2", "sentences": ["w1 w2", "w7"]});
    let similarities = numbers(&replica.post_ok("/", &json!({"inputs": sentences, "parameters": {}})));
    assert!((similarities[0] - 1.0).abs() < 1e-5 && similarities[1] < 0.999);
    let classifier = TestReplica::of(LABELS, "");
    let plain = classifier.post_ok("/", &json!({"inputs": "w1"}));
    let nested = classifier.post_ok("/", &json!({"inputs": "w1", "parameters": {}}));
    assert_eq!(nested[0], plain, "Hugging Face's clients take the first of a list");
    let best = json!({"inputs": "w1", "parameters": {"top_k": 1, "function_to_apply": "sigmoid"}});
    let best = classifier.post_ok("/", &best);
    assert_eq!(best[0].as_array().map(Vec::len), Some(1));
    assert_eq!(best[0][0]["label"], plain[0]["label"]);
    assert_ne!(best[0][0]["score"], plain[0]["score"], "another function");
}

#[test]
fn a_model_is_found_by_its_name() {
    let replica = TestReplica::start("");
    let model = replica.get("/v1/models/small");
    assert_eq!((&model["id"], &model["object"]), (&json!("small"), &json!("model")));
    let unknown = replica.call("GET", "/v1/models/large", &[], b"");
    assert_eq!((unknown.status, unknown.header("x-meridian-error")), (404, Some("model_not_found")));
}

#[test]
fn options_that_change_the_result_are_never_ignored() {
    let replica = TestReplica::of(Kind::Prompted, "");
    for (path, body, field) in [
        ("/v1/embeddings", json!({"model": "small", "input": "w1", "late_chunking": true}), "late_chunking"),
        ("/v1/embeddings", json!({"model": "small", "input": "w1", "output_dtype": "int8"}), "output_dtype"),
        ("/v1/rerank", json!({"query": "w1", "documents": ["w2"], "top_k": 1}), "top_k"),
        ("/embed", json!({"inputs": "w1", "input_type": "query"}), "input_type"),
        ("/embed_all", json!({"inputs": "w1", "dimensions": 4}), "dimensions"),
        ("/embed_all", json!({"inputs": "w1", "normalize": true}), "normalize"),
        (
            "/similarity",
            json!({"inputs": {"source_sentence": "w1", "sentences": ["w2"]}, "truncate": true}),
            "truncate",
        ),
        ("/score", json!({"text_1": "w1", "text_2": "w2", "use_activation": false}), "use_activation"),
        ("/pooling", json!({"input": "w1", "softmax": false}), "softmax"),
    ] {
        let response = replica.post(path, &body);
        assert!(matches!(response.status, 400 | 422), "{path} {body}: {}", response.text());
        assert!(response.text().contains(&format!("`{field}`")), "{path}: {}", response.text());
    }
}
