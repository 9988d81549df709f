//! What is written for whom.

use std::path::Path;

use super::*;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/families");

fn folders() -> Folders {
    Folders { model: "/my model".into(), work: "/build".into(), examples: "/examples".into() }
}

fn wanted(precision: Precision) -> Wanted {
    Wanted { precision, max_batch_size: None, max_tokens: None, max_batch_tokens: None }
}

fn planned(family: &str, wanted: &Wanted) -> Result<Build, String> {
    let model = ModelDir::open(&Path::new(GOLDEN).join(family)).expect(family);
    plan(&model, wanted, &folders())
}

#[test]
fn an_encoder_is_converted_by_its_class_and_has_room_for_its_largest_batch() {
    let check = |family: &str, class: &str, form: Form| {
        let build = planned(family, &wanted(Precision::F16)).expect(family);
        assert_eq!((build.form, build.tap.as_deref()), (form, None), "{family}");
        let convert = format!(
            "python3 /examples/models/core/bert/convert_checkpoint.py --model {class} --model_dir '/my model' "
        );
        assert!(
            build.script.contains(&convert) && build.script.contains(" --dtype float16\n"),
            "{}",
            build.script
        );
        assert_eq!(build.max_batch_tokens, build.max_batch_size * build.max_tokens, "{family}");
        let sizes = format!(
            "--bert_attention_plugin=float16 --max_batch_size 8 --max_input_len {}\n",
            build.max_tokens
        );
        assert!(build.script.contains(&sizes), "{}", build.script);
    };
    check("bert", "BertModel", Form::EncoderStates);
    check("bert_rerank", "BertForSequenceClassification", Form::EncoderLabels);
    check("xlm_roberta_rerank", "RobertaForSequenceClassification", Form::EncoderLabels);
}

#[test]
fn a_decoder_is_tapped_where_its_vectors_are_made() {
    let check = |family: &str, precision, form: Form, module: &str, convert: &str| {
        let build = planned(family, &wanted(precision)).expect(family);
        assert_eq!((build.form, build.tensor.as_str()), (form, "pooled"), "{family}");
        let tap = build.tap.expect("a class");
        assert!(tap.contains(&format!("self.{module}.forward = tapped")), "{tap}");
        assert!(build.script.contains(convert), "{}", build.script);
        let length = format!("--max_num_tokens 8192 --max_seq_len {}\n", build.max_tokens + 1);
        assert!(build.script.contains(&length), "{}", build.script);
    };
    check(
        "llama",
        Precision::Bf16,
        Form::DecoderStates,
        "transformer",
        "models/core/llama/convert_checkpoint.py",
    );
    check(
        "llama_rerank",
        Precision::Fp8,
        Form::DecoderPooled,
        "lm_head",
        "quantize.py --model_dir '/my model'",
    );
    check(
        "qwen2_rerank",
        Precision::F16,
        Form::DecoderPooled,
        "lm_head",
        "models/core/qwen/convert_checkpoint.py",
    );
}

#[test]
fn what_cannot_be_built_is_said_before_anything_runs() {
    let refused = |family: &str, wanted: &Wanted, sentence: &str| {
        let error = planned(family, wanted).expect_err(family);
        assert!(error.contains(sentence), "{error}");
    };
    refused("bert", &wanted(Precision::Fp8), "no fp8 for encoders");
    refused("gemma2", &wanted(Precision::Bf16), "family gemma2; it is for bert, roberta");
    refused("bert", &Wanted { max_batch_size: Some(0), ..wanted(Precision::F16) }, "at least 1");
    refused(
        "llama",
        &Wanted { max_tokens: Some(9), max_batch_tokens: Some(8), ..wanted(Precision::F16) },
        "9 tokens",
    );
    let fits = Wanted { max_tokens: Some(9), max_batch_tokens: Some(9), ..wanted(Precision::F16) };
    assert_eq!(planned("llama", &fits).map(|build| build.max_batch_tokens), Ok(9));
}

#[test]
fn a_word_is_a_word_whatever_is_in_it() {
    assert_eq!(quoted("a-b/c.d=1"), "a-b/c.d=1");
    assert_eq!(quoted("it's; rm -r /"), "'it'\\''s; rm -r /'");
    assert_eq!(quoted(""), "''");
}

#[test]
fn what_the_tools_say_of_themselves_is_read() {
    let said = "gpu NVIDIA H200\ntensorrt 10.14.1.48\ntensorrt_llm 1.2.1\n";
    assert_eq!(found(said), Ok(["NVIDIA H200", "10.14.1", "1.2.1"].map(str::to_owned)));
    let error = found("gpu \ntensorrt 10.14.1\ntensorrt_llm 1.2.1\n").expect_err("no GPU");
    assert!(error.contains("`gpu`"), "{error}");
}
