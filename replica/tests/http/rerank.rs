//! Reranking, by a cross-encoder and by the similarity of vectors, in the formats of Cohere, Jina, TEI and vLLM.

use serde_json::{Value, json};

use crate::served::{Kind, MAX_TOKENS, PROMPTS, Response, TestReplica};

const RERANKER: Kind = Kind::Labels(&["LABEL_0"]);
const DOCUMENTS: [&str; 4] = ["w10 w11", "w20 w21 w22", "w10 w11", "w30"];

/// Returns `(index, score)` of each result, in the order of the response.
fn ranks(results: &Value, score: &str) -> Vec<(usize, f64)> {
    let rank = |rank: &Value| {
        let index = rank["index"].as_u64().expect("an index") as usize;
        (index, rank[score].as_f64().expect("a score"))
    };
    results.as_array().expect("a list").iter().map(rank).collect()
}

#[track_caller]
fn check_sorted(ranks: &[(usize, f64)]) {
    for pair in ranks.windows(2) {
        assert!(pair[0].1 > pair[1].1 || (pair[0].1 == pair[1].1 && pair[0].0 < pair[1].0), "{ranks:?}");
    }
    assert!(ranks.iter().all(|(_, score)| (0.0..=1.0).contains(score)), "{ranks:?}");
}

#[track_caller]
fn check_close(given: &[(usize, f64)], expected: &[(usize, f64)]) {
    assert_eq!(given.len(), expected.len());
    for (given, expected) in given.iter().zip(expected) {
        assert!(given.0 == expected.0 && (given.1 - expected.1).abs() < 1e-5, "{given:?} and {expected:?}");
    }
}

#[test]
fn a_cross_encoder_returns_the_same_scores_on_every_path() {
    let replica = TestReplica::of(RERANKER, "");
    let raw = replica.post_ok("/rerank", &json!({"query": "w1 w2", "texts": DOCUMENTS, "raw_scores": true}));
    let raw = ranks(&raw, "score");
    let expected: Vec<(usize, f64)> =
        raw.iter().map(|(index, logit)| (*index, 1.0 / (1.0 + (-logit).exp()))).collect();
    check_sorted(&expected);
    let tei = replica.post_ok("/rerank", &json!({"query": "w1 w2", "texts": DOCUMENTS}));
    check_close(&ranks(&tei, "score"), &expected);
    let cohere = json!({"model": "small", "query": "w1 w2", "documents": DOCUMENTS});
    for path in ["/v1/rerank", "/v2/rerank", "/rerank"] {
        let response = replica.post_ok(path, &cohere);
        check_close(&ranks(&response["results"], "relevance_score"), &expected);
        let version = if path == "/v2/rerank" { "2" } else { "1" };
        assert_eq!(response["meta"]["api_version"]["version"], version, "{path}");
        assert_eq!(response["meta"]["billed_units"]["search_units"], 1);
        // [CLS] and two [SEP] each, the query's two words four times, and eight words of documents.
        assert_eq!(response["usage"]["total_tokens"], 4 * (3 + 2) + 8, "{path}");
        assert_eq!(response["model"], "small");
    }
    let score = replica.post_ok("/score", &json!({"text_1": "w1 w2", "text_2": DOCUMENTS}));
    let mut scores = ranks(&score["data"], "score");
    scores.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    check_close(&scores, &expected);
    let pair = replica.post_ok("/predict", &json!({"inputs": ["w1 w2", DOCUMENTS[1]], "raw_scores": true}));
    let logit = raw.iter().find(|(index, _)| *index == 1).expect("a rank").1;
    assert!((pair[0]["score"].as_f64().expect("a score") - logit).abs() < 1e-5, "{pair} and {logit}");
    assert_eq!(replica.get("/info")["model"]["rerank"], "cross-encoder");
}

/// As in sentence-transformers: the prompt precedes a text, and the first text of a pair.
#[test]
fn a_model_with_labels_uses_its_default_prompt_before_the_first_text() {
    let (plain, instructed) =
        (TestReplica::of(RERANKER, ""), TestReplica::of(Kind::Instructed(&["LABEL_0"]), ""));
    let check = |path: &str, by_hand: Value, short: Value| {
        let given = instructed.post_ok(path, &short);
        assert_eq!(given, plain.post_ok(path, &by_hand), "{path}: {short}");
        assert_ne!(given, plain.post_ok(path, &short), "{path}: the prompt changes the result");
    };
    let with = |query: &str| format!("{}{query}", PROMPTS[0].1);
    let predict = |inputs: Value| json!({"inputs": inputs, "raw_scores": true});
    check("/predict", predict(json!([with("w1"), "w2"])), predict(json!(["w1", "w2"])));
    check("/predict", predict(json!(with("w1"))), predict(json!("w1")));
    let rerank = |query: String| json!({"query": query, "texts": DOCUMENTS, "raw_scores": true});
    check("/rerank", rerank(with("w1 w2")), rerank("w1 w2".to_owned()));
}

#[test]
fn the_order_of_a_pair_and_its_types_matter() {
    let replica = TestReplica::of(RERANKER, "");
    let score = |first: &str, second: &str| {
        let body = json!({"inputs": [first, second], "raw_scores": true});
        replica.post_ok("/predict", &body)[0]["score"].as_f64().expect("a score")
    };
    assert!((score("w1", "w2") - score("w2", "w1")).abs() > 1e-4);
    let joined = json!({"inputs": "w1 [SEP] w2", "raw_scores": true});
    let joined = replica.post_ok("/predict", &joined)[0]["score"].as_f64().expect("a score");
    assert!((score("w1", "w2") - joined).abs() > 1e-4, "the same tokens, of one type, are another input");
}

#[test]
fn the_best_n_are_returned_with_the_documents_as_sent() {
    let replica = TestReplica::of(RERANKER, "");
    let documents = json!(["w10", {"text": "w20 w21", "id": 7}, {"title": "w30", "text": "w31"}]);
    let body = json!({"query": "w1", "documents": documents, "return_documents": true});
    let all = replica.post_ok("/v2/rerank", &body);
    for result in all["results"].as_array().expect("a list") {
        let sent = &documents[result["index"].as_u64().expect("an index") as usize];
        let expected = if sent.is_string() { json!({"text": sent}) } else { sent.clone() };
        assert_eq!(result["document"], expected);
    }
    let mut body = body;
    body["top_n"] = json!(2);
    body["return_documents"] = json!(false);
    let best = replica.post_ok("/v2/rerank", &body);
    let best_ranks = ranks(&best["results"], "relevance_score");
    assert_eq!(best_ranks, ranks(&all["results"], "relevance_score")[..2]);
    assert_eq!(best["results"][0].get("document"), None);
    let texts = json!({"query": "w1", "texts": ["w10", "w20 w21"], "return_text": true});
    for rank in replica.post_ok("/rerank", &texts).as_array().expect("a list") {
        assert_eq!(rank["text"], texts["texts"][rank["index"].as_u64().expect("an index") as usize]);
    }
}

#[test]
fn an_embedding_model_ranks_by_the_cosine_of_its_vectors() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let vector = |text: &str, kind: &str| {
        replica.embed(&json!({"model": "small", "input": text, "input_type": kind})).vectors().swap_remove(0)
    };
    let query = vector("w1 w2", "query");
    let cosine = |document: &str| -> f64 {
        vector(document, "document").iter().zip(&query).map(|(a, b)| f64::from(a * b)).sum()
    };
    let mut expected: Vec<(usize, f64)> = DOCUMENTS.iter().map(|text| cosine(text)).enumerate().collect();
    expected.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let raw = replica.post_ok("/rerank", &json!({"query": "w1 w2", "texts": DOCUMENTS, "raw_scores": true}));
    check_close(&ranks(&raw, "score"), &expected);
    let scores: Vec<(usize, f64)> = expected.iter().map(|(i, cosine)| (*i, (1.0 + cosine) / 2.0)).collect();
    check_sorted(&scores);
    let cohere = replica.post_ok("/v2/rerank", &json!({"query": "w1 w2", "documents": DOCUMENTS}));
    check_close(&ranks(&cohere["results"], "relevance_score"), &scores);
    let vllm = replica.post_ok("/v1/score", &json!({"text_1": "w1 w2", "text_2": DOCUMENTS}));
    let mut cosines = ranks(&vllm["data"], "score");
    cosines.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    check_close(&cosines, &expected);
    assert_eq!(replica.get("/info")["model"]["rerank"], "similarity");
}

fn words(count: usize) -> String {
    (0..count).map(|i| format!("w{}", i % 90 + 1)).collect::<Vec<_>>().join(" ")
}

#[test]
fn documents_are_truncated_by_cohere_and_by_tei_on_request() {
    let replica = TestReplica::of(RERANKER, "");
    let room = MAX_TOKENS - 3;
    let raw = |query: &str, text: &str| {
        let body = json!({"query": query, "texts": [text], "raw_scores": true});
        replica.post_ok("/rerank", &body)[0]["score"].as_f64().expect("a score")
    };
    let cohere = |query: &str, document: &str, most: Option<usize>| {
        let body = json!({"query": query, "documents": [document], "max_tokens_per_doc": most});
        let score = &replica.post_ok("/v2/rerank", &body)["results"][0]["relevance_score"];
        let score = score.as_f64().expect("a score");
        (score / (1.0 - score)).ln()
    };
    #[track_caller]
    fn check(given: f64, expected: f64) {
        assert!((given - expected).abs() < 1e-3, "{given} and {expected}");
    }
    check(cohere("w1 w2", &words(2000), None), raw("w1 w2", &words(room - 2)));
    check(cohere("w1 w2", &words(2000), Some(5)), raw("w1 w2", &words(5)));
    check(cohere(&words(room), &words(2000), None), raw(&words(room / 2), &words(room - room / 2)));
    check(cohere(&words(2000), "w7 w8", None), raw(&words(room - 2), "w7 w8"));

    let tei = |extra: Value| -> Response {
        let mut body = json!({"query": words(100), "texts": ["w3", words(100)], "raw_scores": true});
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        replica.post("/rerank", &body)
    };
    let refused = tei(json!({}));
    assert_eq!((refused.status, &refused.json()["error_type"]), (413, &json!("Validation")));
    let message = refused.json()["error"].as_str().expect("a sentence").to_owned();
    assert!(message.contains("`texts[1]` has 203 tokens and the limit of this model is 128"), "{message}");
    let cut = tei(json!({"truncate": true})).json();
    let of_second = cut.as_array().expect("a list").iter().find(|rank| rank["index"] == 1).expect("a rank");
    // Both are longer than half of the limit: the second text gets the odd token.
    check(of_second["score"].as_f64().expect("a score"), raw(&words(room / 2), &words(room - room / 2)));
}

#[test]
fn a_long_document_is_truncated_for_an_embedding_model() {
    let replica = TestReplica::of(Kind::Prompted, "");
    let score = |document: String| {
        let body = json!({"query": "w1", "documents": [document]});
        replica.post_ok("/v1/rerank", &body)["results"][0]["relevance_score"].as_f64().expect("a score")
    };
    // One token of the prompt and two special ones.
    assert!((score(words(2000)) - score(words(MAX_TOKENS - 3))).abs() < 1e-5);
}

/// Pairs and the scores of `transformers`, computed from the texts; absent if the pair is too long for the model.
#[derive(serde::Deserialize)]
struct Reference {
    pairs: Vec<ReferencePair>,
}

#[derive(serde::Deserialize)]
struct ReferencePair {
    first: String,
    second: String,
    logits: Option<Vec<f64>>,
}

#[test]
fn cross_encoders_return_the_scores_of_transformers_over_http() {
    for fixture in ["bert_rerank", "roberta_rerank", "xlm_roberta_rerank"] {
        let folder = format!("{}/tests/golden/families/{fixture}", env!("CARGO_MANIFEST_DIR"));
        let reference = std::fs::read(format!("{folder}/tokens.json")).expect("the reference");
        let Reference { pairs } = serde_json::from_slice(&reference).expect("the reference");
        // transformers treats an empty second text as missing, if it gets a single pair.
        let pairs: Vec<ReferencePair> =
            pairs.into_iter().filter(|pair| pair.logits.is_some() && !pair.second.is_empty()).collect();
        assert!(pairs.len() >= 2, "{fixture}");
        let cache = tempfile::tempdir().expect("a folder");
        let config = format!(
            "listen = \"127.0.0.1:0\"\nnames = [\"small\"]\nmodel = {folder:?}\ncache = {:?}\n",
            cache.path().to_str().expect("a path")
        );
        let replica = TestReplica::with(config.parse().expect("a configuration"));
        let inputs: Vec<[&str; 2]> =
            pairs.iter().map(|pair| [pair.first.as_str(), pair.second.as_str()]).collect();
        let response = replica.post_ok("/predict", &json!({"inputs": inputs, "raw_scores": true}));
        for (pair, given) in pairs.iter().zip(response.as_array().expect("a list")) {
            let expected = pair.logits.as_ref().expect("filtered pairs have logits")[0];
            let given = given[0]["score"].as_f64().expect("a score");
            assert!(
                (given - expected).abs() <= 2e-5 * expected.abs().max(1.0),
                "{fixture}: {given} and {expected}"
            );
        }
    }
}

/// Pair, its score in sentence-transformers, and the logit.
#[derive(serde::Deserialize)]
struct ScoredPair {
    query: String,
    document: String,
    most: usize,
    ids: Vec<u32>,
    raw: f64,
    score: f64,
    whole: bool,
}

#[derive(serde::Deserialize)]
struct ScoredPairs {
    pairs: Vec<ScoredPair>,
}

/// Starts a replica of this fixture.
fn start_replica(fixture: &str) -> (TestReplica, tempfile::TempDir) {
    let folder = format!("{}/tests/golden/families/{fixture}", env!("CARGO_MANIFEST_DIR"));
    let cache = tempfile::tempdir().expect("a folder");
    let config = format!(
        "listen = \"127.0.0.1:0\"\nnames = [\"small\"]\nmodel = {folder:?}\ncache = {:?}\n",
        cache.path().to_str().expect("a path")
    );
    (TestReplica::with(config.parse().expect("a configuration")), cache)
}

#[test]
fn an_llm_reranker_returns_the_scores_of_sentence_transformers_over_http() {
    for fixture in ["qwen3_yes_no", "llama_yes_no"] {
        let path = format!("{}/tests/golden/families/{fixture}/pairs.json", env!("CARGO_MANIFEST_DIR"));
        let ScoredPairs { pairs } =
            serde_json::from_slice(&std::fs::read(path).expect("the reference")).expect("the reference");
        // An empty query is rejected here.
        let pairs: Vec<ScoredPair> = pairs
            .into_iter()
            .filter(|pair| pair.most == 96 && pair.whole && !pair.query.is_empty())
            .collect();
        let (replica, _cache) = start_replica(fixture);
        let info = replica.get("/info");
        assert_eq!(
            (&info["model"]["task"], &info["model"]["rerank"]),
            (&json!("rerank"), &json!("cross-encoder"))
        );
        #[track_caller]
        fn close(given: &Value, expected: f64) {
            let given = given.as_f64().expect("a score");
            assert!((given - expected).abs() <= 2e-5 * expected.abs().max(1.0), "{given} and {expected}");
        }
        let mut cut = 0;
        for ScoredPair { query, document, ids, raw, score, .. } in &pairs {
            let sigmoid = 1.0 / (1.0 + (-raw).exp());
            let cohere = replica.post_ok("/v2/rerank", &json!({"query": query, "documents": [document]}));
            close(&cohere["results"][0]["relevance_score"], sigmoid);
            assert_eq!(cohere["usage"]["total_tokens"], ids.len());
            if ids.len() == 96 {
                cut += 1;
                continue;
            }
            let raws = json!({"query": query, "texts": [document], "raw_scores": true});
            close(&replica.post_ok("/rerank", &raws)[0]["score"], *raw);
            // The result of `predict`, with the model's own function.
            close(&replica.post_ok("/predict", &json!({"inputs": [query, document]}))[0]["score"], *score);
        }
        assert!(
            pairs.len() >= 6 && (cut >= 3 || fixture == "llama_yes_no"),
            "{fixture}: {} and {cut}",
            pairs.len()
        );
    }
}

#[test]
fn an_llm_reranker_accepts_pairs_only() {
    let (replica, _cache) = start_replica("qwen3_yes_no");
    for (path, body, place) in [
        ("/predict", json!({"inputs": "one text"}), "inputs"),
        ("/predict", json!({"inputs": [["a", "pair"], ["one text"]]}), "inputs[1]"),
        ("/classify", json!({"input": ["one text"]}), "input[0]"),
    ] {
        let refused = replica.post(path, &body);
        let message = refused.text();
        assert_eq!(refused.status, if path == "/classify" { 400 } else { 422 }, "{path}: {message}");
        assert!(
            message.contains(&format!("`{place}` is one text, and this model is a cross-encoder")),
            "{path}: {message}"
        );
    }
    let long = json!({"query": "wind", "texts": ["wind ".repeat(100)]});
    let refused = replica.post("/rerank", &long);
    assert!(refused.text().contains("and the limit of this model is 96"), "{}", refused.text());
    let embed = replica.post("/v1/embeddings", &json!({"model": "small", "input": "x"}));
    assert!(embed.text().contains("a reranker (one label)"), "{}", embed.text());
}
