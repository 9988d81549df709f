//! Deployments on `tensorrt-llm`, from a client's request to the returned rows, over the stand-in for NVIDIA's libraries.
//!
//! The binary under test contains the stand-in (see `[dev-dependencies]`), whose results are arbitrary but can be computed
//! here. The test shows that every token, type and position of a request reaches the engine of its model, and that its
//! rows are returned in order. Models and tokenizers are real and small; engines are written as by `meridian model build`.

mod build;
mod verify;

use crate::local_fleet::{ClientResponse, LocalFleet, meridian};
use crate::{ASHBURN, fixture};
use replica::cache::ModelCache;
use replica::engine::tensorrt::record::{ENGINE, FILE, digest, folder};
use replica::engine::tensorrt::{EngineRecordV1, Form, environment};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const REGION: &str = "aws/us-east-1";
const TEXTS: [&str; 3] = ["a cat in the box", "the sea was calm", "eight foxes"];

/// Cache with engines and their models.
struct Models {
    folder: tempfile::TempDir,
}

impl Models {
    fn new() -> Models {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("cache")).unwrap();
        Models { folder }
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    /// Adds a model of the golden tests, and an engine of the stand-in with these lines. `change` edits its record.
    fn add(
        &self,
        family: &str,
        form: Form,
        lines: &str,
        change: impl FnOnce(&mut EngineRecordV1),
    ) -> PathBuf {
        // All models share one tokenizer, which only some directories contain.
        let tokenizer = ["tokenizer.json", "tokenizer_config.json"];
        copy(&fixture("families/bert"), &self.folder.path().join(family), &tokenizer);
        self.add_from(&fixture("families").join(family), family, form, lines, change)
    }

    /// Like `add`, for the model in a directory.
    fn add_from(
        &self,
        from: &Path,
        name: &str,
        form: Form,
        lines: &str,
        change: impl FnOnce(&mut EngineRecordV1),
    ) -> PathBuf {
        let model = self.folder.path().join(name);
        copy(from, &model, &[]);
        let source = model.display().to_string().parse().unwrap();
        let found = ModelCache::new(self.cache()).resolve(&source).unwrap();
        let precision = regions::Precision::F16;
        let engine = folder(&self.cache(), &found.digest, precision);
        std::fs::create_dir_all(&engine).unwrap();
        std::fs::write(engine.join(ENGINE), format!("stand-in 1\nformat fp16\n{lines}\n")).unwrap();
        let here = environment();
        let mut record = EngineRecordV1 {
            version: 1,
            model: found.digest,
            precision: precision.to_string(),
            tensor_parallel: 1,
            form,
            tensor: String::new(),
            max_batch_size: 2,
            max_batch_tokens: 64,
            max_tokens: 32,
            gpu: here.gpus[0].clone(),
            tensorrt: here.tensorrt,
            tensorrt_llm: here.tensorrt_llm,
            test_double: here.test_double,
            files: BTreeMap::from([(ENGINE.to_owned(), digest(&engine.join(ENGINE)).unwrap())]),
        };
        change(&mut record);
        std::fs::write(engine.join(FILE), serde_json::to_vec(&record).unwrap()).unwrap();
        model
    }

    fn write(&self, name: &str, text: &str) -> String {
        let file = self.folder.path().join(name);
        std::fs::write(&file, text).unwrap();
        file.display().to_string()
    }
}

/// Copies the files of a directory, or those with these names, recursively.
fn copy(from: &Path, to: &Path, names: &[&str]) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let name = entry.file_name();
        if !names.is_empty() && !names.iter().any(|wanted| name == *wanted) {
            continue;
        }
        if entry.path().is_dir() {
            copy(&entry.path(), &to.join(name), &[]);
        } else {
            std::fs::copy(entry.path(), to.join(name)).unwrap();
        }
    }
}

/// Returns the stand-in's state of a token. A second implementation of `replica/trtllm/double/src/tensorrt.cc` and its
/// neighbour.
fn state(token: u64, kind: u64, position: u64) -> u64 {
    token * 13 + kind * 101 + position * 17
}

fn mixed(state: u64, column: u64) -> f32 {
    ((state * 31 + column * 7) % 251) as f32
}

/// Returns the states of a sequence, which identify it.
fn states(tokens: &[u64], types: &[u64]) -> Vec<u64> {
    let each = tokens.iter().zip(types).zip(0..);
    each.map(|((token, kind), position)| state(*token, *kind, position)).collect()
}

async fn tokens(fleet: &LocalFleet, deployment: &str, texts: &[&str]) -> Vec<Vec<u64>> {
    let path = format!("/deployments/{deployment}/tokenize");
    let response = fleet.post_to(&path, json!({"inputs": texts}).to_string(), &[]).await;
    assert_eq!(response.status, 200, "{}", response.body);
    let ids = |text: &Value| -> Vec<u64> {
        text.as_array().unwrap().iter().map(|token| token["id"].as_u64().unwrap()).collect()
    };
    response.body.as_array().unwrap().iter().map(ids).collect()
}

async fn post(fleet: &LocalFleet, path: &str, body: Value) -> ClientResponse {
    let response = fleet.post_to(path, body.to_string(), &[ASHBURN]).await;
    assert_eq!(
        (response.status, response.header("x-meridian-region")),
        (200, REGION),
        "{path}: {}",
        response.body
    );
    response
}

#[tokio::test]
async fn embeddings_reranks_and_predictions_come_from_engines_on_a_gpu() {
    let models = Models::new();
    let same = |_: &mut EngineRecordV1| {};
    let deployments = [
        ("embed", "embed", models.add("bert", Form::EncoderStates, "hidden 32", same)),
        ("rank", "rerank", models.add("bert_rerank", Form::EncoderLabels, "output logits\nlabels 1", same)),
        (
            "feel",
            "classify",
            models.add("bert_classify", Form::EncoderLabels, "output logits\nlabels 3", same),
        ),
    ]
    .map(|(name, task, model)| {
        let model = model.display();
        format!(
            "[[deployment]]\nname = \"{name}\"\ntask = \"{task}\"\nmodel = \"{model}\"\n\
             engine = {{ kind = \"tensorrt-llm\", precision = \"f16\", tensor_parallel = 1 }}\n"
        )
    });
    let deployments = models.write("deployments.toml", &deployments.concat());
    let catalogue = include_str!("../../configs/regions.toml").replacen(
        "city = \"Ashburn\" }",
        "city = \"Ashburn\", engines = [\"cpu\", \"tensorrt-llm\"] }",
        1,
    );
    let catalogue = models.write("regions.toml", &catalogue);
    let arguments = ["--regions", REGION, "--deployments", &deployments, "--catalogue", &catalogue];
    let fleet = LocalFleet::start_with(&arguments, &[("MERIDIAN_CACHE", &models.cache())]);

    // Three texts for an engine with a batch size of two.
    let response = post(&fleet, "/v1/embeddings", json!({"model": "embed", "input": TEXTS})).await;
    let read = tokens(&fleet, "embed", &TEXTS).await;
    for (tokens, row) in read.iter().zip(response.vectors()) {
        let states = states(tokens, &vec![0; tokens.len()]);
        // The normalised row of the first token.
        let first = states.iter().sum::<u64>() + states[0];
        let expected: Vec<f32> = (0..32).map(|column| mixed(first, column)).collect();
        let length = expected.iter().map(|number| number * number).sum::<f32>().sqrt();
        // Tolerance of two roundings.
        let near = |(row, expected): (&f32, &f32)| (row - expected / length).abs() < 1e-6;
        assert!(row.len() == 32 && row.iter().zip(&expected).all(near), "{row:?} and {expected:?}");
    }

    let query = "the box";
    let body = json!({"query": query, "texts": TEXTS, "raw_scores": true});
    let response = post(&fleet, "/deployments/rank/rerank", body).await;
    let requests = tokens(&fleet, "rank", &[query]).await.remove(0);
    let mut expected: Vec<(u64, f32)> = tokens(&fleet, "rank", &TEXTS)
        .await
        .iter()
        .zip(0..)
        .map(|(document, index)| {
            // `[CLS] query [SEP]` of type 0, and `document [SEP]` of type 1.
            let pair = [&requests[..], &document[1..]].concat();
            let types = [vec![0; requests.len()], vec![1; document.len() - 1]].concat();
            (index, mixed(states(&pair, &types).iter().sum(), 0))
        })
        .collect();
    expected.sort_by(|one, other| other.1.total_cmp(&one.1));
    let ranked: Vec<(u64, f32)> = response
        .body
        .as_array()
        .unwrap()
        .iter()
        .map(|result| (result["index"].as_u64().unwrap(), result["score"].as_f64().unwrap() as f32))
        .collect();
    assert_eq!(ranked, expected);

    let inputs: Vec<[&str; 1]> = TEXTS.iter().map(|text| [*text]).collect();
    let response =
        post(&fleet, "/deployments/feel/predict", json!({"inputs": inputs, "raw_scores": true})).await;
    let read = tokens(&fleet, "feel", &TEXTS).await;
    for (tokens, labels) in read.iter().zip(response.body.as_array().unwrap()) {
        let sum = states(tokens, &vec![0; tokens.len()]).iter().sum();
        for (column, label) in ["joy", "anger", "fear"].into_iter().enumerate() {
            let found = labels.as_array().unwrap().iter().find(|one| one["label"] == label).unwrap();
            assert_eq!(
                found["score"].as_f64(),
                Some(f64::from(mixed(sum, column as u64))),
                "{label}: {labels}"
            );
        }
    }

    let info = fleet.get("/deployments/embed/info").await.body;
    let (engine, accelerator) = (&info["engine"], &info["engine"]["accelerator"]);
    assert_eq!((&engine["kind"], &engine["precision"]), (&json!("tensorrt-llm"), &json!("f16")), "{info}");
    assert_eq!(
        (&accelerator["test_double"], &accelerator["gpu"]),
        (&json!(true), &json!("stand-in")),
        "{info}"
    );
    // One iteration to warm up, and two for three texts.
    assert_eq!((&accelerator["iterations"], &accelerator["completed"]), (&json!(3), &json!(4)), "{info}");
    assert_eq!(accelerator["tensorrt_llm"], environment().tensorrt_llm);
}

#[test]
fn a_replica_does_not_run_an_engine_that_was_built_for_another_gpu() {
    let models = Models::new();
    let start = |model: &Path| {
        let config = format!(
            "listen = \"127.0.0.1:0\"\nnames = [\"a\"]\nmodel = \"{}\"\ncache = \"{}\"\n\
             engine = {{ kind = \"tensorrt-llm\", precision = \"f16\" }}\n",
            model.display(),
            models.cache().display()
        );
        let config = models.write("replica.toml", &config);
        let output = meridian().args(["replica", "--config", &config]).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let other = |record: &mut EngineRecordV1| record.gpu = "NVIDIA H200".to_owned();
    let (fine, output) = start(&models.add("bert", Form::EncoderStates, "hidden 32", other));
    assert!(
        !fine && output.contains("built for the GPU NVIDIA H200, and this machine has stand-in"),
        "{output}"
    );
    let (fine, output) = start(&models.add("roberta", Form::EncoderStates, "hidden 16", |_| {}));
    assert!(!fine && output.contains("rows of 16 numbers, and the model requires"), "{output}");
    let (fine, output) =
        start(&models.add("bert_labels", Form::EncoderLabels, "", |record| record.test_double = false));
    assert!(!fine && output.contains("this program has its test double"), "{output}");
}
