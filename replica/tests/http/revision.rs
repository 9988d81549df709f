//! Model revision of a replica: on every response, and required by its region.

use serde_json::{Value, json};

use crate::served::TestReplica;

const REVISION: &str = "x-meridian-model-revision";

fn revision(replica: &TestReplica) -> String {
    replica.get("/info")["identity"]["revision"].as_str().expect("a revision").to_owned()
}

#[test]
fn every_response_has_the_revision_and_another_one_is_rejected_before_computing() {
    let replica = TestReplica::start("");
    let ours = revision(&replica);
    let body = serde_json::to_vec(&json!({"model": "small", "input": "w1"})).unwrap();
    let status: Value = replica.get("/status");
    assert_eq!(status["identity"]["revision"], ours.as_str());
    for path in ["/v1/embeddings", "/embed"] {
        let check = |headers: &[(&str, &str)], status: u16| {
            let response = replica.call("POST", path, headers, &body);
            assert_eq!(response.status, status, "{path}: {}", response.text());
            assert_eq!(response.header(REVISION), Some(&*ours), "{path}");
            response
        };
        let computed = if path == "/embed" { 422 } else { 200 };
        check(&[], computed);
        check(&[(REVISION, &ours)], computed);
        let refused = check(&[(REVISION, "00000000000000aa")], 503);
        assert_eq!(refused.header("x-meridian-error"), Some("model_revision_unavailable"));
        assert!(refused.text().contains("00000000000000aa") && refused.text().contains(&ours));
    }
}

#[test]
fn the_precision_changes_the_revision_and_unrelated_settings_do_not() {
    let [usual, int8, batches] = ["", "engine = { precision = \"int8\" }\n", "[batch]\nbatch_tokens = 200\n"]
        .map(|toml| revision(&TestReplica::start(toml)));
    // Each has a copy of the same files.
    assert_eq!(usual, batches);
    assert_ne!(usual, int8);
}
