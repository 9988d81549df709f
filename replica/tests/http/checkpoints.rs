//! Effects of the files of a checkpoint and the task of a deployment on the API.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::served::{HIDDEN, Kind, TestReplica, config, write_kind};

/// Starts a replica with a copy of a fixture without these files; an error is the reason why it cannot start.
fn of_fixture(fixture: &str, without: &[&str], toml: &str) -> Result<(TestReplica, TempDir), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/families").join(fixture);
    let copy = tempfile::tempdir().expect("a folder");
    for entry in fs::read_dir(folder).expect("the fixture").flatten().map(|entry| entry.path()) {
        let name = entry.file_name().expect("a name").to_string_lossy().into_owned();
        if entry.is_file() && !without.contains(&name.as_str()) {
            fs::copy(&entry, copy.path().join(name)).expect("a copy");
        }
    }
    replica::model::ModelDir::open_for(copy.path(), task(toml)).map_err(|error| error.to_string())?;
    Ok((TestReplica::with(config("127.0.0.1:0", copy.path(), toml)), copy))
}

fn task(toml: &str) -> Option<replica_core::DeploymentTask> {
    let (_, task) = toml.split_once("task = \"")?;
    task.split('"').next()?.parse().ok()
}

#[test]
fn a_language_model_without_a_head_ranks_only_if_its_task_is_stated() {
    let post_ok = json!({"query": "a", "texts": ["b", "c"]});
    let embed = json!({"model": "small", "input": "a"});
    let (replica, _folder) = of_fixture("qwen3", &[], "").expect("a replica");
    assert_eq!(replica.embed(&embed).status, 200);
    for path in ["/rerank", "/v1/rerank", "/score"] {
        let body = match path {
            "/rerank" => post_ok.clone(),
            "/v1/rerank" => json!({"model": "small", "query": "a", "documents": ["b"]}),
            _ => json!({"text_1": "a", "text_2": "b"}),
        };
        let response = replica.post(path, &body);
        assert_eq!(response.status, if path == "/rerank" { 424 } else { 400 }, "{path}: {}", response.text());
        assert!(response.text().contains("with `task` set"), "{path}: {}", response.text());
    }
    assert_eq!(replica.get("/info")["model"]["rerank"], "none");
    drop(replica);
    let (replica, _folder) = of_fixture("qwen3", &[], "task = \"embed\"\n").expect("a replica");
    assert_eq!(replica.post("/rerank", &post_ok).status, 200);
    drop(replica);
    let refused = of_fixture("qwen3", &[], "task = \"rerank\"\n").map(drop).unwrap_err();
    assert!(refused.contains("there is no token `yes`"), "{refused}");
    let refused = of_fixture("qwen3", &[], "task = \"classify\"\n").map(drop).unwrap_err();
    assert!(
        refused.contains("the deployment's `task` is classify, but the model has no classification head"),
        "{refused}"
    );
}

#[test]
fn a_language_model_with_a_reranker_template_is_a_reranker() {
    let without = ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"];
    let (replica, _folder) = of_fixture("qwen3_yes_no", &without, "").expect("a replica");
    assert_eq!(replica.get("/info")["model"]["task"], "rerank");
    assert_eq!(replica.get("/info")["model"]["rerank"], "cross-encoder");
    assert_eq!(replica.post("/rerank", &json!({"query": "a", "texts": ["b"]})).status, 200);
}

#[test]
fn a_vector_is_truncated_to_the_dimensions_of_the_checkpoint() {
    const KEEP: usize = 16;
    let cut = |toml: &str| {
        let folder = tempfile::tempdir().expect("a folder");
        write_kind(folder.path(), Kind::Prompted);
        let file = folder.path().join("config_sentence_transformers.json");
        let mut settings: Value = serde_json::from_slice(&fs::read(&file).expect("a file")).expect("JSON");
        settings["truncate_dim"] = json!(KEEP);
        fs::write(&file, settings.to_string()).expect("a file");
        (TestReplica::with(config("127.0.0.1:0", folder.path(), toml)), folder)
    };
    let vector = |replica: &TestReplica| replica.vectors(&["w1 w2 w3".to_owned()]).remove(0);
    let length = |vector: &[f32]| vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    let whole = vector(&TestReplica::of(Kind::Prompted, ""));
    assert_eq!(whole.len(), HIDDEN);
    // Without normalization: the modules of the model normalize first, and then the vector is truncated.
    let (replica, _folder) = cut("[embeddings]\nnormalize = false\n");
    assert_eq!(replica.get("/info")["model"]["dimensions"], KEEP);
    let plain = vector(&replica);
    assert_eq!(plain.len(), KEEP);
    assert!(plain.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-6), "{plain:?}");
    assert!(length(&plain) < 0.99);
    drop(replica);
    // With normalization, as in text-embeddings-inference.
    let (replica, _folder) = cut("");
    let scaled = vector(&replica);
    assert!((length(&scaled) - 1.0).abs() < 1e-5);
    let factor = 1.0 / length(&plain);
    assert!(scaled.iter().zip(&plain).all(|(a, b)| (a - b * factor).abs() < 1e-6));
    let more = replica.embed(&json!({"model": "small", "input": "w1", "dimensions": KEEP + 1}));
    assert_eq!(more.status, 400, "{}", more.text());
}
