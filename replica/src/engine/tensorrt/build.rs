//! Build plan of an engine: a script of the vendor's documented commands for one model and precision.
//!
//! This module runs no command. The script is a value that can be shown, tested and run wherever the vendor's tools
//! are: on this machine, or in the vendor's container with other paths. It writes the engine to `engine/` and the
//! versions of its tools to [`BUILT_WITH`], as lines of `name value`, so that the record contains the reported versions
//! and not typed ones.

use std::path::PathBuf;

use replica_core::Precision;

use super::record::Form;
use crate::model::{Architecture, HeadPooling, LayerSpec, ModelDir, Pooling};

/// File to which the script writes the versions of its tools.
pub const BUILT_WITH: &str = "built-with";
/// File name of the script.
pub const SCRIPT: &str = "build.sh";
/// Program that converts the model to one that the converters accept.
const PREPARE: &str = "prepare.py";
/// Class of a decoder that has its states as an output.
const TAP: &str = "tap.py";

/// Options of a build that the model does not determine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineBuildOptions {
    /// The number format.
    pub precision: Precision,
    /// Sequences of a batch; absent: 8 for an encoder and 64 for a decoder.
    pub max_batch_size: Option<u32>,
    /// Tokens of the longest sequence; absent: the model's limit, but 512 at most.
    pub max_tokens: Option<u32>,
    /// Tokens of a batch of a decoder; absent: 8192. That of an encoder is the product of the other two.
    pub max_batch_tokens: Option<u32>,
}

/// Directories, as the script sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildDirectories {
    /// Model directory.
    pub model: PathBuf,
    /// Working directory of the script; the engine is written below it.
    pub work: PathBuf,
    /// Examples of TensorRT-LLM, which contain the converters.
    pub examples: PathBuf,
}

/// Script and properties of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineBuildPlan {
    /// Script for `sh`.
    pub script: String,
    /// Programs that the script runs besides the vendor's, by their file names in the working directory.
    pub programs: Vec<(&'static str, String)>,
    /// Output format of the engine.
    pub form: Form,
    /// Name of the additional output; empty for an encoder.
    pub tensor: String,
    /// Sequences of a batch.
    pub max_batch_size: u32,
    /// Tokens of a batch.
    pub max_batch_tokens: u32,
    /// Tokens of a sequence.
    pub max_tokens: u32,
}

/// Supported architectures and their conversion. The class is that of `transformers` which the converter expects; a
/// model of another class is saved as one of that class.
const FAMILIES: [(&str, EngineFamily); 8] = [
    ("bert", EngineFamily::Encoder("Bert")),
    ("roberta", EngineFamily::Encoder("Roberta")),
    // The same tensors and the same computation under another name.
    ("xlm-roberta", EngineFamily::Encoder("Roberta")),
    ("llama", EngineFamily::Decoder("LlamaForCausalLM", LLAMA)),
    ("mistral", EngineFamily::Decoder("MistralForCausalLM", LLAMA)),
    ("qwen2", EngineFamily::Decoder("Qwen2ForCausalLM", QWEN)),
    ("qwen3", EngineFamily::Decoder("Qwen3ForCausalLM", QWEN)),
    ("gemma2", EngineFamily::Decoder("Gemma2ForCausalLM", GEMMA)),
];

#[derive(Clone, Copy)]
enum EngineFamily {
    /// Prefix of the class names.
    Encoder(&'static str),
    /// Class and converter.
    Decoder(&'static str, Converter),
}

/// Converter of the vendor, a directory of `models/core`.
#[derive(Clone, Copy)]
struct Converter {
    folder: &'static str,
    /// The vendor's class that it creates.
    class: &'static str,
    /// Arguments besides the model and the number format.
    words: &'static [&'static str],
    /// Whether it requires a tensor `lm_head`, also where the model ties the logits to the embeddings. Otherwise it
    /// must not exist.
    head: bool,
}

const LLAMA: Converter = Converter { folder: "llama", class: "LLaMAForCausalLM", words: &[], head: true };
const QWEN: Converter = Converter { folder: "qwen", class: "QWenForCausalLM", words: &[], head: true };
const GEMMA: Converter =
    Converter { folder: "gemma", class: "GemmaForCausalLM", words: &["--ckpt-type", "hf"], head: false };

/// Default of the longest sequence: the length with which embedding models are trained.
const MAX_TOKENS: u32 = 512;

/// Returns the build plan of this model; an error names the unsupported property.
pub fn plan(
    model: &ModelDir,
    options: &EngineBuildOptions,
    folders: &BuildDirectories,
) -> Result<EngineBuildPlan, String> {
    let name = model.architecture.family.as_str();
    let Some((_, family)) = FAMILIES.iter().find(|(known, _)| *known == name) else {
        let known: Vec<&str> = FAMILIES.iter().map(|(known, _)| *known).collect();
        return Err(format!(
            "models of the architecture {name} are not supported; supported are {}",
            known.join(", ")
        ));
    };
    let of_model = u32::try_from(model.sentence.max_tokens).unwrap_or(u32::MAX);
    let max_tokens = options.max_tokens.unwrap_or(MAX_TOKENS).min(of_model);
    let default_size = match family {
        EngineFamily::Encoder(_) => 8,
        EngineFamily::Decoder(..) => 64,
    };
    let max_batch_size = options.max_batch_size.unwrap_or(default_size);
    if max_tokens == 0
        || max_batch_size == 0
        || options.max_batch_tokens.is_some_and(|most| most < max_tokens)
    {
        return Err(format!(
            "a batch must hold one sequence of {max_tokens} tokens: set --max-batch-size to at least 1 and \
             --max-batch-tokens of at least as many"
        ));
    }
    let sizes = BatchSizes { max_batch_size, max_tokens };
    let (lines, programs, form, max_batch_tokens) = match *family {
        EngineFamily::Encoder(begins) => {
            check_feed_forward_width(&model.architecture)?;
            let Some(product) = max_batch_size.checked_mul(max_tokens) else {
                return Err(
                    "--max-batch-size times --max-tokens exceeds 2³² tokens; reduce one of them".to_owned()
                );
            };
            let (form, ends) = match &model.head {
                Some(_) => (Form::EncoderLabels, "ForSequenceClassification"),
                None => (Form::EncoderStates, "Model"),
            };
            let class = format!("{begins}{ends}");
            let programs = vec![(PREPARE, prepare(&class, false, false))];
            (encoder(&class, options.precision, folders, sizes)?, programs, form, product)
        }
        EngineFamily::Decoder(class, converter) => {
            check_attention_reach(&model.architecture.layers, max_tokens)?;
            let last = match (&model.head, model.architecture.head_pooling) {
                (Some(_), HeadPooling::Last { .. }) => true,
                (Some(_), HeadPooling::First | HeadPooling::Mean) => false,
                (None, _) => model.sentence.pooling == Pooling::LastToken,
            };
            let form = if last { Form::DecoderPooled } else { Form::DecoderStates };
            let tokens = options.max_batch_tokens.unwrap_or(8192.max(max_tokens));
            // FP8 is calibrated on texts, which needs a tokenizer.
            let texts = options.precision == Precision::Fp8;
            let programs =
                vec![(PREPARE, prepare(class, converter.head, texts)), (TAP, tap(converter.class, form))];
            (decoder(converter, options.precision, folders, sizes, tokens), programs, form, tokens)
        }
    };
    let tapped = matches!(form, Form::DecoderPooled | Form::DecoderStates);
    Ok(EngineBuildPlan {
        script: script(&lines, folders),
        programs,
        form,
        tensor: if tapped { TENSOR.to_owned() } else { String::new() },
        max_batch_size,
        max_batch_tokens,
        max_tokens,
    })
}

/// Checks that the inner width of an encoder is four times its outer width, as TensorRT-LLM assumes.
fn check_feed_forward_width(architecture: &Architecture) -> Result<(), String> {
    let (outside, inside) = (architecture.hidden, architecture.feed_forward.width);
    if inside == 4 * outside {
        return Ok(());
    }
    Err(format!(
        "`intermediate_size` = {inside} is not four times `hidden_size` = {outside}, as it is in every encoder that \
         TensorRT-LLM builds; run it on the processor"
    ))
}

#[derive(Clone, Copy)]
struct BatchSizes {
    max_batch_size: u32,
    max_tokens: u32,
}

/// Checks that all tokens attend to all earlier ones and to no later ones, as in the executor's decoders.
fn check_attention_reach(layers: &[LayerSpec], max_tokens: u32) -> Result<(), String> {
    if layers.iter().any(|layer| layer.reach.behind > 0) {
        return Err("tokens of this model attend to later ones, which TensorRT-LLM's decoders do not support; run it \
                    on the processor"
            .to_owned());
    }
    // The token itself and those before it.
    let window = layers.iter().map(|layer| layer.reach.before.saturating_add(1)).min();
    match window {
        Some(window) if window < max_tokens as usize => Err(format!(
            "tokens of this model attend to {window} at most, and those of TensorRT-LLM's decoders to all {max_tokens}; set \
             --max-tokens of {window} at most"
        )),
        Some(_) | None => Ok(()),
    }
}

/// Name of the additional output.
const TENSOR: &str = "pooled";

type Line = Vec<String>;

fn line(words: &[&str]) -> Line {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn dtype(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "float32",
        Precision::F16 => "float16",
        // Format of the parts that are not quantized.
        Precision::Bf16 | Precision::Fp8 | Precision::Int8 => "bfloat16",
    }
}

fn encoder(
    class: &str,
    precision: Precision,
    folders: &BuildDirectories,
    BatchSizes { max_batch_size, max_tokens }: BatchSizes,
) -> Result<Vec<Line>, String> {
    if !matches!(precision, Precision::F32 | Precision::F16) {
        return Err(format!("TensorRT-LLM has no {precision} for encoders; use f16 or f32"));
    }
    let converter = folders.examples.join("models/core/bert/convert_checkpoint.py").display().to_string();
    let dtype = dtype(precision);
    let convert =
        ["python3", &converter, "--model", class, "--model_dir", PREPARED, "--output_dir", "checkpoint"];
    let (size, tokens) = (max_batch_size.to_string(), max_tokens.to_string());
    let plugin = format!("--bert_attention_plugin={dtype}");
    let build = ["trtllm-build", "--checkpoint_dir", "checkpoint", "--output_dir", "engine"];
    let build = [&build[..], &["--remove_input_padding=enable", &plugin, "--max_batch_size", &size]].concat();
    Ok(vec![
        prepared(folders),
        line(&[&convert[..], &["--dtype", dtype]].concat()),
        line(&[&build[..], &["--max_input_len", &tokens]].concat()),
    ])
}

fn decoder(
    converter: Converter,
    precision: Precision,
    folders: &BuildDirectories,
    BatchSizes { max_batch_size, max_tokens }: BatchSizes,
    max_batch_tokens: u32,
) -> Vec<Line> {
    let dtype = dtype(precision);
    let models = ["--model_dir", PREPARED, "--output_dir", "checkpoint", "--dtype", dtype];
    let convert = if precision == Precision::Fp8 {
        let quantize = folders.examples.join("quantization/quantize.py").display().to_string();
        let eight = ["--qformat", "fp8", "--calib_size", "512"];
        line(&[&["python3", &quantize], &models[..], &eight].concat())
    } else {
        let script = format!("models/core/{}/convert_checkpoint.py", converter.folder);
        let script = folders.examples.join(script).display().to_string();
        line(&[&["python3", &script], &models[..], converter.words].concat())
    };
    // One more than the longest input, since the executor generates one token.
    let length = max_tokens.saturating_add(1).to_string();
    let (size, tokens) = (max_batch_size.to_string(), max_batch_tokens.to_string());
    let build = line(&[
        "trtllm-build",
        "--checkpoint_dir",
        "checkpoint",
        "--output_dir",
        "engine",
        "--model_cls_file",
        TAP,
        "--model_cls_name",
        "Tapped",
        "--remove_input_padding",
        "enable",
        "--kv_cache_type",
        "paged",
        "--max_batch_size",
        &size,
        "--max_num_tokens",
        &tokens,
        "--max_seq_len",
        &length,
    ]);
    vec![prepared(folders), convert, build]
}

/// Directory in which [`PREPARE`] saves the model.
const PREPARED: &str = "model";

fn prepared(folders: &BuildDirectories) -> Line {
    line(&["python3", PREPARE, &folders.model.display().to_string(), PREPARED])
}

/// Returns a program that saves the model as one of this class. A converter depends on the class name in `config.json`
/// and on tensor names, and supports those of models that were published for text generation; an embedding model or a
/// classifier of the same architecture has others.
fn prepare(class: &str, head: bool, texts: bool) -> String {
    let mut text = format!(
        "# Written by `meridian model build`. Saves the model as one that the converters support.\n\
         import sys\n\n\
         import torch\n\
         import transformers\n\n\
         model, prepared = sys.argv[1:]\n\
         whole = transformers.{class}.from_pretrained(model, torch_dtype=\"auto\")\n"
    );
    if head {
        text.push_str(
            "# A separate tensor instead of the tied embeddings.\n\
             whole.lm_head.weight = torch.nn.Parameter(whole.lm_head.weight.detach().clone())\n\
             whole.config.tie_word_embeddings = False\n",
        );
    }
    text.push_str("whole.save_pretrained(prepared)\n");
    if texts {
        text.push_str("transformers.AutoTokenizer.from_pretrained(model).save_pretrained(prepared)\n");
    }
    text
}

/// Returns the model's class with one more output: the input of `lm_head`, which is the last token's state of each
/// sequence, or the output of the transformer, which is a state for each token.
fn tap(class: &str, form: Form) -> String {
    let (module, state) = match form {
        // With a cache of keys and values, those are returned together with the states.
        Form::DecoderStates => ("transformer", "(result[0] if isinstance(result, tuple) else result)"),
        Form::DecoderPooled | Form::EncoderStates | Form::EncoderLabels => ("lm_head", "given[0]"),
    };
    format!(
        "# Written by `meridian model build`. The model with the pooled states as an additional output.\n\
         from tensorrt_llm.models import {class}\n\n\n\
         class Tapped({class}):\n    def __init__(self, config):\n        super().__init__(config)\n        \
         forward = self.{module}.forward\n\n        def tapped(*given, **named):\n            \
         result = forward(*given, **named)\n            {state}.mark_output(\"{TENSOR}\", config.dtype)\n            \
         return result\n\n        self.{module}.forward = tapped\n"
    )
}

fn script(lines: &[Line], folders: &BuildDirectories) -> String {
    let mut text = format!(
        "#!/bin/sh\n# Builds an engine with NVIDIA's tools. Written by `meridian model build`.\nset -eu\ncd {}\n",
        quoted(&folders.work.display().to_string())
    );
    for line in lines {
        let words: Vec<String> = line.iter().map(|word| quoted(word)).collect();
        text.push_str(&words.join(" "));
        text.push('\n');
    }
    text.push_str(&format!(
        "{{\n    echo \"gpu $(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)\"\n    \
         echo \"tensorrt $(python3 -c 'import tensorrt; print(tensorrt.__version__)')\"\n    \
         echo \"tensorrt_llm $(python3 -c 'import tensorrt_llm; print(tensorrt_llm.__version__)' | tail -n 1)\"\n}} > {BUILT_WITH}\n"
    ));
    text
}

/// Quotes a word for `sh`.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Parses the output of the script: the GPU, and the versions of TensorRT and TensorRT-LLM.
pub fn parse_built_with(text: &str) -> Result<[String; 3], String> {
    let value = |name: &str| {
        let values = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = values.map(str::trim).filter(|value| !value.is_empty());
        value.map(str::to_owned).ok_or_else(|| format!("the output of the tools has no line `{name}`"))
    };
    // Its Python package has the build number as a fourth part, which the library does not have.
    let tensorrt: Vec<String> = value("tensorrt")?.split('.').take(3).map(str::to_owned).collect();
    Ok([value("gpu")?, tensorrt.join("."), value("tensorrt_llm")?])
}

#[cfg(test)]
mod tests;
