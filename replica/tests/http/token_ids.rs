//! Token ids in `/v1/embeddings`: their tokenizer must be known.

use replica_api::error::ErrorCode;
use serde_json::json;

use crate::check_refused;
use crate::served::TestReplica;

#[test]
fn token_ids_require_the_name_of_their_tokenizer() {
    let replica = TestReplica::start("token_inputs = false\n");
    let of_text = replica.embed(&json!({"model": "small", "input": "w5 w6 w7"}));
    assert_eq!(of_text.status, 200);
    for input in [json!([5, 6, 7]), json!([[5, 6, 7]])] {
        let unnamed = replica.embed(&json!({"model": "small", "input": input}));
        check_refused(&unnamed, ErrorCode::InvalidValue, Some("input"), "check_embedding_ctx_length=False");
        let other = replica.embed(&json!({"model": "small", "input": input, "tokenizer": "cl100k_base"}));
        check_refused(
            &other,
            ErrorCode::InvalidValue,
            Some("tokenizer"),
            "is the tokenizer of another model",
        );
        let digest = replica.get("/info")["model_sha"].clone();
        let named = replica.embed(&json!({"model": "small", "input": input, "tokenizer": digest}));
        assert_eq!((named.status, &named.json()["data"]), (200, &of_text.json()["data"]));
    }
}

#[test]
fn a_deployment_that_accepts_token_ids_rejects_those_of_another_tokenizer() {
    let replica = TestReplica::start("token_inputs = true\n");
    let ids = json!({"model": "small", "input": [5, 6, 7]});
    assert_eq!(replica.embed(&ids).status, 200);
    let other = replica.embed(&json!({"model": "small", "input": [5, 6, 7], "tokenizer": "cl100k_base"}));
    check_refused(&other, ErrorCode::InvalidValue, Some("tokenizer"), "is the tokenizer of another model");
}
