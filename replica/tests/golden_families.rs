//! Tests of every family and task against transformers, and of their consistency.
//!
//! The models and references are in `golden/families/`, made by `golden/make_families.py` and, for LLM rerankers, by
//! `golden/make_yes_no.py`. [`FIXTURES`] lists the expected configuration of each; a test per fixture compares the
//! engine with the reference on every code path for this processor, so that the name of a failing test is the name of
//! the family. The checks are tested as well: an engine with another configuration than `config.json` must fail.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

#[path = "golden/compare.rs"]
mod compare;
#[path = "golden/fixtures.rs"]
mod fixtures;

use std::fs;

use compare::{difference, size, within};
use fixtures::{Case, Reference, compute, engine, families, folder};
use replica::engine::cpu::{CpuEngine, Isa};
use replica::engine::{Engine, Output};
use replica::model::{LabelActivation, ModelDir, Pooling};
use replica_core::Precision;
use serde_json::Value;

use LabelActivation::{Identity, Sigmoid, Softmax};
use Pooling::{Cls, LastToken, Max, Mean, MeanSqrtLength, WeightedMean};

/// Expected configuration of a fixture.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ExpectedConfiguration {
    /// Pooling, number of dimensions, and whether the vector is normalized.
    Vector(Pooling, usize, bool),
    /// Number of labels, and the activation.
    Labels(usize, LabelActivation),
}

use ExpectedConfiguration::{Labels, Vector};

/// Generates the tests of each fixture, and the table of all fixtures.
macro_rules! fixtures {
    ($($name:ident: $expected:expr,)*) => {
        const FIXTURES: &[(&str, ExpectedConfiguration)] = &[$((stringify!($name), $expected),)*];

        mod comes_to_what_transformers_computes_on_every_path {
            $(#[test] fn $name() { super::check_reference(stringify!($name)); })*
        }

        mod a_row_alone_is_the_row_in_any_batch {
            $(#[test] fn $name() { super::check_alone(stringify!($name)); })*
        }
    };
}

fixtures! {
    bert: Vector(Cls, 32, true),
    bert_f16: Vector(Mean, 20, false),
    bert_rerank: Labels(1, Sigmoid),
    bert_classify: Labels(3, Softmax),
    bert_labels: Labels(5, Sigmoid),
    jina_bert: Vector(Mean, 36, false),
    roberta: Vector(Mean, 32, false),
    roberta_rerank: Labels(1, Sigmoid),
    roberta_labels: Labels(5, Sigmoid),
    xlm_roberta: Vector(Cls, 32, true),
    xlm_roberta_rerank: Labels(1, Sigmoid),
    xlm_roberta_classify: Labels(5, Softmax),
    distilbert: Vector(MeanSqrtLength, 40, false),
    distilbert_rerank: Labels(1, Sigmoid),
    distilbert_classify: Labels(2, Softmax),
    mpnet: Vector(Mean, 32, true),
    mpnet_rerank: Labels(1, Sigmoid),
    mpnet_labels: Labels(5, Sigmoid),
    electra: Vector(Mean, 32, false),
    electra_rerank: Labels(1, Sigmoid),
    modernbert: Vector(Cls, 32, false),
    modernbert_rerank: Labels(1, Sigmoid),
    modernbert_classify: Labels(5, Softmax),
    nomic_bert: Vector(Mean, 32, true),
    nomic_bert_rerank: Labels(1, Sigmoid),
    mistral: Vector(LastToken, 32, true),
    mistral_rerank: Labels(1, Sigmoid),
    mistral_labels: Labels(5, Sigmoid),
    llama: Vector(WeightedMean, 32, false),
    llama_rerank: Labels(1, Identity),
    llama_classify: Labels(5, Softmax),
    llama_yes_no: Labels(1, Identity),
    qwen2: Vector(LastToken, 32, false),
    qwen2_rerank: Labels(1, Sigmoid),
    qwen2_labels: Labels(5, Sigmoid),
    qwen3: Vector(LastToken, 32, false),
    qwen3_rerank: Labels(1, Sigmoid),
    qwen3_classify: Labels(5, Softmax),
    qwen3_yes_no: Labels(1, Sigmoid),
    gemma2: Vector(Mean, 32, false),
    gemma2_rerank: Labels(1, Sigmoid),
    gemma3: Vector(Mean, 32, true),
    gemma3_classify: Labels(5, Softmax),
}

/// Names of poolings in sentence-transformers.
const POOLINGS: [(&str, Pooling); 6] = [
    ("mean", Mean),
    ("cls", Cls),
    ("lasttoken", LastToken),
    ("weightedmean", WeightedMean),
    ("max", Max),
    ("mean_sqrt_len_tokens", MeanSqrtLength),
];

fn open(name: &str) -> ModelDir {
    ModelDir::open(&folder(name)).unwrap_or_else(|error| panic!("{error}"))
}

fn load(model: &ModelDir, precision: Precision, isa: Isa, threads: usize) -> CpuEngine {
    engine(model, precision, isa, threads).unwrap_or_else(|error| panic!("{error}"))
}

fn check_reference(name: &str) {
    let reference = Reference::read(name);
    let model = open(name);
    for isa in Isa::available() {
        for threads in [1, 2] {
            check_outputs(&load(&model, Precision::F32, isa, threads), &reference, model.head.is_some())
                .unwrap_or_else(|error| panic!("{name}, {isa:?}, {threads} threads: {error}"));
        }
        if model.head.is_none() {
            check_poolings(name, isa, &reference);
        }
    }
}

/// Checks every output of the whole model.
fn check_outputs(engine: &dyn Engine, reference: &Reference, classifies: bool) -> Result<(), String> {
    if classifies {
        return reference.check(engine, "logits");
    }
    reference.check(engine, "tokens")?;
    reference.check(engine, "pooled")
}

/// Checks the other poolings of the same transformer.
fn check_poolings(name: &str, isa: Isa, reference: &Reference) {
    let mut model = open(name);
    model.sentence.dense.clear();
    for (output, pooling) in POOLINGS {
        model.sentence.pooling = pooling;
        reference
            .check(&load(&model, Precision::F32, isa, 1), output)
            .unwrap_or_else(|error| panic!("{name}, {isa:?}: {error}"));
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot =
        |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn check_alone(name: &str) {
    let model = open(name);
    let Reference { cases, .. } = Reference::read(name);
    // Token rows are served for embedding models only.
    let outputs =
        if model.head.is_some() { &[Output::Pooled][..] } else { &[Output::Pooled, Output::Tokens] };
    for precision in [Precision::F32, Precision::Int8] {
        for isa in Isa::available() {
            for output in outputs {
                let one = load(&model, precision, isa, 1);
                let alone: Vec<Vec<Vec<f32>>> =
                    cases.iter().map(|case| compute(&one, std::slice::from_ref(case), *output)).collect();
                for threads in [1, 2] {
                    check_company(&load(&model, precision, isa, threads), &cases, *output, &alone)
                        .unwrap_or_else(|error| {
                            panic!("{name}, {precision:?}, {isa:?}, {threads} threads, {output:?}: {error}")
                        });
                }
            }
        }
    }
}

/// Computes each sequence in batches with its neighbours, and all of them in both orders.
fn check_company(
    engine: &dyn Engine,
    cases: &[Case],
    output: Output,
    alone: &[Vec<Vec<f32>>],
) -> Result<(), String> {
    let mut orders: Vec<Vec<usize>> = (1..cases.len()).map(|index| vec![index, index - 1]).collect();
    orders.push((0..cases.len()).collect());
    orders.push((0..cases.len()).rev().collect());
    for order in orders {
        let batch: Vec<Case> = order.iter().map(|index| cases[*index].clone()).collect();
        let found = compute(engine, &batch, output);
        let expected: Vec<&Vec<f32>> = order.iter().flat_map(|index| &alone[*index]).collect();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            let difference = difference(found, expected, size(expected));
            if !within(difference, 1e-6) {
                return Err(format!("off by {difference:e} in the batch of {order:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn every_fixture_has_a_test_and_every_test_a_fixture() {
    let mut made: Vec<String> = fs::read_dir(families())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    made.sort();
    let mut tested: Vec<&str> = FIXTURES.iter().map(|(name, _)| *name).collect();
    tested.sort_unstable();
    assert_eq!(made, tested);
}

#[test]
fn the_files_of_every_fixture_are_read() {
    for (name, expected) in FIXTURES {
        let model = open(name);
        let found = match &model.head {
            Some(head) => Labels(head.labels.len(), head.activation),
            None => {
                let width = model.sentence.width(model.architecture.hidden);
                Vector(model.sentence.pooling, width, model.sentence.normalize)
            }
        };
        assert_eq!(found, *expected, "{name}");
        // The chat template needs some of the positions.
        let max_tokens = if name.ends_with("_yes_no") { 96 } else { 48 };
        assert_eq!(
            (model.sentence.max_tokens, model.template.is_some()),
            (max_tokens, max_tokens == 96),
            "{name}"
        );
    }
    assert_eq!(open("bert_labels").head.unwrap().labels, ["joy", "anger", "fear", "trust", "surprise"]);
    assert_eq!(open("bert_rerank").head.unwrap().labels, ["LABEL_0"]);
    assert_eq!(open("bert").prompts.by_name["query"], "query: ");
}

/// Modifications of a fixture's `config.json` that make the engine compute another model.
const WRONG_CONFIGURATIONS: &[(&str, &str, &str)] = &[
    ("bert", "hidden_act", r#""relu""#),
    ("bert", "layer_norm_eps", "0.01"),
    ("bert", "num_attention_heads", "2"),
    ("jina_bert", "layer_norm_eps", "0.01"),
    ("roberta", "pad_token_id", "0"),
    ("xlm_roberta_rerank", "pad_token_id", "0"),
    ("distilbert", "activation", r#""relu""#),
    ("mpnet", "layer_norm_eps", "0.01"),
    ("electra", "layer_norm_eps", "0.01"),
    ("modernbert", "local_attention", "16"),
    ("modernbert", "global_rope_theta", "20000.0"),
    ("modernbert", "local_rope_theta", "160000.0"),
    ("modernbert", "global_attn_every_n_layers", "2"),
    ("modernbert_rerank", "classifier_pooling", r#""cls""#),
    ("nomic_bert", "rotary_emb_base", "10000.0"),
    ("nomic_bert_rerank", "rope_parameters", r#"{"rope_type": "default", "rope_theta": 10000.0}"#),
    ("mistral", "sliding_window", "9"),
    ("mistral", "sliding_window", "null"),
    ("mistral", "rms_norm_eps", "0.01"),
    ("llama", "rope_theta", "10000.0"),
    ("llama", "rope_scaling", "null"),
    ("llama_classify", "rope_scaling", "null"),
    ("qwen2", "use_sliding_window", "false"),
    ("qwen2", "max_window_layers", "0"),
    ("qwen2_rerank", "rope_parameters", r#"{"rope_type": "default", "rope_theta": 10000.0}"#),
    ("qwen3", "hidden_act", r#""gelu""#),
    ("qwen3_yes_no", "rms_norm_eps", "0.01"),
    ("gemma2", "query_pre_attn_scalar", "12"),
    ("gemma2", "attn_logit_softcapping", "null"),
    ("gemma2", "sliding_window", "4"),
    ("gemma3", "use_bidirectional_attention", "false"),
    ("gemma3", "query_pre_attn_scalar", "12"),
    ("gemma3_classify", "sliding_window_pattern", "3"),
    ("gemma3_classify", "rope_local_base_freq", "1000000.0"),
];

#[test]
fn an_engine_with_another_configuration_fails_the_check() {
    for (name, key, lie) in WRONG_CONFIGURATIONS {
        let copy = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(folder(name)).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() {
                fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
            }
        }
        let config = copy.path().join("config.json");
        let mut said: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
        let lie: Value = serde_json::from_str(lie).unwrap();
        let truth = said.as_object_mut().unwrap().insert((*key).to_owned(), lie.clone());
        assert!(truth.is_some_and(|truth| truth != lie), "{name}: `{key}` is not a lie");
        fs::write(&config, said.to_string()).unwrap();
        // Only the transformer is compared, so that only the modification differs.
        fs::remove_file(copy.path().join("modules.json")).ok();
        let model = ModelDir::open(copy.path()).unwrap_or_else(|error| panic!("{error}"));
        let output = if model.head.is_some() { "logits" } else { "tokens" };
        let checked = Reference::read(name).check(&load(&model, Precision::F32, Isa::best(), 1), output);
        assert!(checked.is_err(), "{name} with `{key}` = {lie} passes");
    }
}

/// The weights are random and large, which is harder than for real models: 0.998 is the minimum observed (November
/// 2026). The test verifies that every layer has an int8 path, not the accuracy, which is measured on real weights.
#[test]
fn int8_computes_the_same_model() {
    for (name, _) in FIXTURES {
        let model = open(name);
        let reference = Reference::read(name);
        let expected = reference.rows(if model.head.is_some() { "logits" } else { "pooled" }).concat();
        for isa in Isa::available() {
            let rows = |precision| {
                compute(&load(&model, precision, isa, 2), &reference.cases, Output::Pooled).concat()
            };
            let found = rows(Precision::Int8);
            let cosine = cosine(&found, &expected);
            assert!(within(1.0 - cosine, 0.005), "{name}, {isa:?}: cosine {cosine}");
            assert_ne!(found, rows(Precision::F32), "{name}, {isa:?}: nothing was rounded");
        }
    }
}

/// Returns a copy of the fixture with its folders, in which this file is modified.
fn changed(name: &str, file: &str, change: impl FnOnce(Value) -> Value) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for (from, to) in
        [(folder(name), copy.path().to_owned()), (folder(name).join(STAGE), copy.path().join(STAGE))]
    {
        fs::create_dir_all(&to).unwrap();
        for path in
            fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file())
        {
            fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
    let path = copy.path().join(file);
    let said = change(serde_json::from_slice(&fs::read(&path).unwrap()).unwrap());
    fs::write(&path, said.to_string()).unwrap();
    copy
}

const STAGE: &str = "1_LogitScore";

/// An LLM reranker uses the rows of its two tokens only, from the layer that its files specify.
#[test]
fn an_llm_reranker_with_other_tokens_or_another_layer_fails_the_check() {
    let set = |key: &'static str, value: Value| {
        move |mut said: Value| {
            assert_ne!(said[key], value, "`{key}` is not a lie");
            said[key] = value;
            said
        }
    };
    let stage = "1_LogitScore/config.json";
    for (name, file, key, lie) in [
        ("qwen3_yes_no", stage, "true_token_id", Value::from(320)),
        ("qwen3_yes_no", stage, "false_token_id", Value::from(320)),
        ("qwen3_yes_no", stage, "false_token_id", Value::Null),
        ("llama_yes_no", stage, "true_token_id", Value::from(305)),
        ("llama_yes_no", stage, "false_token_id", Value::from(305)),
    ] {
        let copy = changed(name, file, set(key, lie.clone()));
        let model = ModelDir::open(copy.path()).unwrap_or_else(|error| panic!("{error}"));
        let checked = Reference::read(name).check(&load(&model, Precision::F32, Isa::best(), 1), "logits");
        assert!(checked.is_err(), "{name} with `{key}` = {lie} passes");
    }
}

#[test]
fn an_llm_reranker_without_modules_uses_the_tokens_yes_and_no() {
    let copy = changed("qwen3_yes_no", "config.json", |said| said);
    fs::remove_file(copy.path().join("modules.json")).unwrap();
    let model = ModelDir::open(copy.path()).unwrap_or_else(|error| panic!("{error}"));
    let engine = load(&model, Precision::F32, Isa::best(), 1);
    Reference::read("qwen3_yes_no").check(&engine, "logits").unwrap();
    // The vocabulary of the other one does not contain them.
    let copy = changed("llama_yes_no", "config.json", |said| said);
    fs::remove_file(copy.path().join("modules.json")).unwrap();
    let error = ModelDir::open(copy.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json: there is no token `yes`"), "{error}");
}

#[test]
fn an_llm_reranker_with_contradictory_files_is_rejected_with_the_file() {
    let check = |file: &str, change: fn(&mut Value), sentence: &str| {
        let copy = changed("qwen3_yes_no", file, |mut said| {
            change(&mut said);
            said
        });
        let opened = ModelDir::open(copy.path()).map_err(|error| error.to_string());
        let error = opened.map(drop).unwrap_err();
        assert!(error.contains(sentence), "{error}");
    };
    let stage = "1_LogitScore/config.json";
    check(
        stage,
        |said| said["true_token_id"] = 330.into(),
        "1_LogitScore/config.json: `true_token_id` = 330 is not a token",
    );
    check(
        "config.json",
        |said| said["architectures"] = vec!["Qwen3Model"].into(),
        "config.json: `architectures` = Qwen3Model is not supported for a cross-encoder",
    );
    check(
        "sentence_bert_config.json",
        |said| drop(said.as_object_mut().unwrap().remove("modality_config")),
        "`modality_config` has no `message`",
    );
    let copy = changed("qwen3_yes_no", stage, |said| said);
    fs::remove_file(copy.path().join("chat_template.jinja")).unwrap();
    let error = ModelDir::open(copy.path()).map(drop).unwrap_err().to_string();
    assert!(error.contains("there is no chat template"), "{error}");
}

/// From the tokens of pairs, as sentence-transformers made them with the chat template.
#[test]
fn an_llm_reranker_scores_pairs_like_sentence_transformers() {
    #[derive(serde::Deserialize)]
    struct Pairs {
        pairs: Vec<Pair>,
    }
    #[derive(serde::Deserialize)]
    struct Pair {
        ids: Vec<u32>,
        raw: f32,
    }
    for name in ["qwen3_yes_no", "llama_yes_no"] {
        let Pairs { pairs } =
            serde_json::from_slice(&fs::read(folder(name).join("pairs.json")).unwrap()).unwrap();
        assert_eq!(pairs.len(), 30, "{name}");
        let cases: Vec<Case> =
            pairs.iter().map(|pair| Case { ids: pair.ids.clone(), types: vec![0; pair.ids.len()] }).collect();
        let expected: Vec<f32> = pairs.iter().map(|pair| pair.raw).collect();
        for isa in Isa::available() {
            let found = compute(&load(&open(name), Precision::F32, isa, 2), &cases, Output::Pooled).concat();
            let off = difference(&found, &expected, size(&expected));
            assert!(within(off, 2e-5), "{name}, {isa:?}: off by {off:e}");
        }
    }
}

#[test]
fn a_damaged_shard_is_rejected_with_its_name_and_the_tensor() {
    let copy = tempfile::tempdir().unwrap();
    let second = "model-00002-of-00003.safetensors";
    for entry in fs::read_dir(folder("mistral")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    fs::remove_file(copy.path().join("modules.json")).unwrap();
    ModelDir::open(copy.path()).unwrap();
    let whole = fs::read(copy.path().join(second)).unwrap();
    fs::write(copy.path().join(second), &whole[..whole.len() / 2]).unwrap();
    let error = ModelDir::open(copy.path()).unwrap_err().to_string();
    assert!(error.contains(second) && error.contains("tensor `layers."), "{error}");
    assert!(error.contains("the file is truncated; replace it with a complete one"), "{error}");
}
