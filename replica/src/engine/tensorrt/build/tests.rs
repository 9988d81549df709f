//! Tests of the generated scripts.

use std::path::Path;

use super::*;
use crate::model::Reach;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/families");

fn folders() -> BuildDirectories {
    BuildDirectories { model: "/my model".into(), work: "/build".into(), examples: "/examples".into() }
}

fn options(precision: Precision) -> EngineBuildOptions {
    EngineBuildOptions { precision, max_batch_size: None, max_tokens: None, max_batch_tokens: None }
}

/// With sequences as long as the windows of these models.
fn short(precision: Precision) -> EngineBuildOptions {
    EngineBuildOptions { max_tokens: Some(8), ..options(precision) }
}

fn program<'b>(build: &'b EngineBuildPlan, name: &str) -> Option<&'b str> {
    build.programs.iter().find(|(known, _)| *known == name).map(|(_, text)| text.as_str())
}

fn planned(family: &str, options: &EngineBuildOptions) -> Result<EngineBuildPlan, String> {
    let mut model = opened(family);
    // The small test models have narrower feed-forward layers.
    model.architecture.feed_forward.width = 4 * model.architecture.hidden;
    plan(&model, options, &folders())
}

fn opened(family: &str) -> ModelDir {
    ModelDir::open(&Path::new(GOLDEN).join(family)).expect(family)
}

#[test]
fn an_encoder_is_converted_by_its_class_with_the_limits_of_its_largest_batch() {
    let check = |family: &str, class: &str, form: Form| {
        let build = planned(family, &options(Precision::F16)).expect(family);
        assert_eq!((build.form, program(&build, TAP)), (form, None), "{family}");
        assert!(program(&build, PREPARE).expect("a program").contains(&format!("transformers.{class}.from")));
        let convert = format!(
            "python3 prepare.py '/my model' model\n\
             python3 /examples/models/core/bert/convert_checkpoint.py --model {class} --model_dir model "
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
fn a_decoder_has_the_states_that_are_pooled_as_output() {
    let check = |family: &str, precision, form: Form, module: &str, convert: &str| {
        let build = planned(family, &short(precision)).expect(family);
        assert_eq!((build.form, build.tensor.as_str()), (form, "pooled"), "{family}");
        let tap = program(&build, TAP).expect("a class");
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
        "quantize.py --model_dir model --output_dir checkpoint --dtype bfloat16 --qformat fp8",
    );
    check(
        "qwen2_rerank",
        Precision::F16,
        Form::DecoderPooled,
        "lm_head",
        "models/core/qwen/convert_checkpoint.py",
    );
    check(
        "qwen3",
        Precision::Bf16,
        Form::DecoderPooled,
        "lm_head",
        "models/core/qwen/convert_checkpoint.py --model_dir model --output_dir checkpoint --dtype bfloat16\n",
    );
    check(
        "gemma2_rerank",
        Precision::Bf16,
        Form::DecoderPooled,
        "lm_head",
        "models/core/gemma/convert_checkpoint.py --model_dir model --output_dir checkpoint --dtype bfloat16 --ckpt-type hf\n",
    );
}

/// Qwen's converter requires that `lm_head` is absent if it is tied, and Gemma's supports no other.
#[test]
fn a_model_is_saved_as_one_that_its_converter_supports() {
    let prepared = |family: &str, precision| {
        let build = planned(family, &short(precision)).expect(family);
        program(&build, PREPARE).expect("a program").to_owned()
    };
    let own_head = "lm_head.weight = torch.nn.Parameter(";
    for (family, class, own) in [
        ("llama", "LlamaForCausalLM", true),
        ("mistral_rerank", "MistralForCausalLM", true),
        ("qwen2", "Qwen2ForCausalLM", true),
        ("qwen3_classify", "Qwen3ForCausalLM", true),
        ("gemma2", "Gemma2ForCausalLM", false),
        ("xlm_roberta_rerank", "RobertaForSequenceClassification", false),
    ] {
        let text = prepared(family, Precision::F16);
        assert!(text.contains(&format!("transformers.{class}.from_pretrained(model")), "{family}: {text}");
        assert_eq!((text.contains(own_head), text.contains("Tokenizer")), (own, false), "{family}: {text}");
    }
    assert!(prepared("llama_rerank", Precision::Fp8).contains("AutoTokenizer"), "it is calibrated on texts");
}

#[test]
fn unsupported_builds_are_rejected_before_a_command_runs() {
    let refused = |family: &str, options: &EngineBuildOptions, sentence: &str| {
        let error = planned(family, options).expect_err(family);
        assert!(error.contains(sentence), "{error}");
    };
    refused("bert", &options(Precision::Fp8), "no fp8 for encoders");
    refused("bert", &options(Precision::Bf16), "no bf16 for encoders; use f16 or f32");
    refused("gemma2", &options(Precision::Bf16), "attend to 8 at most");
    assert!(planned("gemma2", &short(Precision::Bf16)).is_ok(), "within the window of all layers");
    let narrow = plan(&opened("bert"), &options(Precision::F16), &folders()).expect_err("a narrow one");
    assert!(narrow.contains("`intermediate_size` = 64 is not four times `hidden_size` = 32"), "{narrow}");
    let mut both = opened("llama");
    both.architecture.layers[1].reach = Reach::ALL;
    let error = plan(&both, &options(Precision::F16), &folders()).expect_err("a bidirectional model");
    assert!(error.contains("attend to later ones"), "{error}");
    refused(
        "gemma3",
        &options(Precision::Bf16),
        "architecture gemma3_text are not supported; supported are bert, roberta",
    );
    refused("bert", &EngineBuildOptions { max_batch_size: Some(0), ..options(Precision::F16) }, "at least 1");
    refused(
        "llama",
        &EngineBuildOptions { max_tokens: Some(9), max_batch_tokens: Some(8), ..options(Precision::F16) },
        "9 tokens",
    );
    let fits =
        EngineBuildOptions { max_tokens: Some(9), max_batch_tokens: Some(9), ..options(Precision::F16) };
    assert_eq!(planned("llama", &fits).map(|build| build.max_batch_tokens), Ok(9));
}

#[test]
fn words_are_quoted_for_the_shell() {
    assert_eq!(quoted("a-b/c.d=1"), "a-b/c.d=1");
    assert_eq!(quoted("it's; rm -r /"), "'it'\\''s; rm -r /'");
    assert_eq!(quoted(""), "''");
}

#[test]
fn versions_of_the_tools_are_parsed() {
    let output = "gpu NVIDIA H200\ntensorrt 10.14.1.48\ntensorrt_llm 1.2.1\n";
    assert_eq!(parse_built_with(output), Ok(["NVIDIA H200", "10.14.1", "1.2.1"].map(str::to_owned)));
    let error = parse_built_with("gpu \ntensorrt 10.14.1\ntensorrt_llm 1.2.1\n").expect_err("no GPU");
    assert!(error.contains("`gpu`"), "{error}");
}
