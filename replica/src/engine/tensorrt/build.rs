//! How an engine is built: a script of the vendor's own documented commands, written for one model and precision.
//!
//! Nothing here runs. The script is a value that can be shown, tested and started wherever the vendor's tools are: on this
//! machine, or in the vendor's container with other folders. It leaves the engine in `engine/` and what it was built with in [`FOUND`],
//! by lines of `name value`, so that the record says what the tools said and not what somebody typed.

use std::path::PathBuf;

use replica_core::Precision;

use super::record::Form;
use crate::model::{HeadPooling, ModelDir, Pooling};

/// Where the script writes what it was built with.
pub const FOUND: &str = "built-with";
/// The script, and the model's class that it is given.
pub const SCRIPT: &str = "build.sh";
/// The class of a decoder whose states are an output.
pub const TAP: &str = "tap.py";

/// What is wanted, as far as it is not the model's to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The number format.
    pub precision: Precision,
    /// Sequences of a batch; absent = 8 of an encoder and 64 of a decoder.
    pub max_batch_size: Option<u32>,
    /// Tokens of the longest sequence; absent = the model's own, but 512 at most.
    pub max_tokens: Option<u32>,
    /// Tokens of a batch of a decoder; absent = 8192. That of an encoder is the product of the other two.
    pub max_batch_tokens: Option<u32>,
}

/// The folders, as whoever runs the script sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folders {
    /// The model.
    pub model: PathBuf,
    /// Where the script works; the engine comes to be below it.
    pub work: PathBuf,
    /// The examples of TensorRT-LLM, which hold the converters.
    pub examples: PathBuf,
}

/// What there is to run, and what comes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Build {
    /// For `sh`.
    pub script: String,
    /// [`TAP`], of a decoder.
    pub tap: Option<String>,
    /// What the engine answers with.
    pub form: Form,
    /// The name of the output that is tapped; empty of an encoder.
    pub tensor: String,
    /// Sequences of a batch.
    pub max_batch_size: u32,
    /// Tokens of a batch.
    pub max_batch_tokens: u32,
    /// Tokens of a sequence.
    pub max_tokens: u32,
}

/// Families that are built, and how each is converted.
const FAMILIES: [(&str, Family); 6] = [
    ("bert", Family::Encoder("Bert")),
    ("roberta", Family::Encoder("Roberta")),
    ("xlm-roberta", Family::Encoder("Roberta")),
    ("llama", Family::Decoder("llama", "LLaMAForCausalLM")),
    ("mistral", Family::Decoder("llama", "LLaMAForCausalLM")),
    ("qwen2", Family::Decoder("qwen", "QWenForCausalLM")),
];

#[derive(Clone, Copy)]
enum Family {
    /// What the names of its classes begin with.
    Encoder(&'static str),
    /// Its converter, and its class.
    Decoder(&'static str, &'static str),
}

/// The longest sequence, unless somebody says otherwise: what embedders are trained with.
const MAX_TOKENS: u32 = 512;

/// How the engine of this model is built; an error says what of it cannot be.
pub fn plan(model: &ModelDir, wanted: &Wanted, folders: &Folders) -> Result<Build, String> {
    let name = model.architecture.family.as_str();
    let Some((_, family)) = FAMILIES.iter().find(|(known, _)| *known == name) else {
        let known: Vec<&str> = FAMILIES.iter().map(|(known, _)| *known).collect();
        return Err(format!(
            "no engine is built for models of the family {name}; it is for {}",
            known.join(", ")
        ));
    };
    let of_model = u32::try_from(model.sentence.max_tokens).unwrap_or(u32::MAX);
    let max_tokens = wanted.max_tokens.unwrap_or(MAX_TOKENS).min(of_model);
    let default_size = match family {
        Family::Encoder(_) => 8,
        Family::Decoder(..) => 64,
    };
    let max_batch_size = wanted.max_batch_size.unwrap_or(default_size);
    if max_tokens == 0 || max_batch_size == 0 || wanted.max_batch_tokens.is_some_and(|most| most < max_tokens)
    {
        return Err(format!(
            "a batch must have room for one sequence of {max_tokens} tokens: give --max-batch-size of at least 1 and \
             --max-batch-tokens of at least as many"
        ));
    }
    let sizes = (max_batch_size, max_tokens);
    let (lines, tap, form, max_batch_tokens) = match *family {
        Family::Encoder(class) => {
            let Some(product) = max_batch_size.checked_mul(max_tokens) else {
                return Err(
                    "--max-batch-size times --max-tokens is more than 2³² tokens; give less".to_owned()
                );
            };
            let form = if model.head.is_some() { Form::EncoderLabels } else { Form::EncoderStates };
            (encoder(class, form, wanted.precision, folders, sizes)?, None, form, product)
        }
        Family::Decoder(converter, class) => {
            let last = match (&model.head, model.architecture.head_pooling) {
                (Some(_), HeadPooling::Last { .. }) => true,
                (Some(_), HeadPooling::First | HeadPooling::Mean) => false,
                (None, _) => model.sentence.pooling == Pooling::LastToken,
            };
            let form = if last { Form::DecoderPooled } else { Form::DecoderStates };
            let tokens = wanted.max_batch_tokens.unwrap_or(8192.max(max_tokens));
            let lines = decoder(converter, wanted.precision, folders, sizes, tokens);
            (lines, Some(tap(class, form)), form, tokens)
        }
    };
    Ok(Build {
        script: script(&lines, folders),
        tensor: if tap.is_some() { TENSOR.to_owned() } else { String::new() },
        tap,
        form,
        max_batch_size,
        max_batch_tokens,
        max_tokens,
    })
}

/// The output that is tapped.
const TENSOR: &str = "pooled";

type Line = Vec<String>;

fn line(words: &[&str]) -> Line {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn dtype(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "float32",
        Precision::F16 => "float16",
        // What is not in eight bits.
        Precision::Bf16 | Precision::Fp8 | Precision::Int8 => "bfloat16",
    }
}

fn encoder(
    class: &str,
    form: Form,
    precision: Precision,
    folders: &Folders,
    (max_batch_size, max_tokens): (u32, u32),
) -> Result<Vec<Line>, String> {
    if precision == Precision::Fp8 {
        return Err("TensorRT-LLM has no fp8 for encoders; give f16 or bf16".to_owned());
    }
    let class = match form {
        Form::EncoderLabels => format!("{class}ForSequenceClassification"),
        Form::EncoderStates | Form::DecoderPooled | Form::DecoderStates => format!("{class}Model"),
    };
    let converter = folders.examples.join("models/core/bert/convert_checkpoint.py").display().to_string();
    let (model, dtype) = (folders.model.display().to_string(), dtype(precision));
    let convert =
        ["python3", &converter, "--model", &class, "--model_dir", &model, "--output_dir", "checkpoint"];
    let (size, tokens) = (max_batch_size.to_string(), max_tokens.to_string());
    let plugin = format!("--bert_attention_plugin={dtype}");
    let build = ["trtllm-build", "--checkpoint_dir", "checkpoint", "--output_dir", "engine"];
    let build = [&build[..], &["--remove_input_padding=enable", &plugin, "--max_batch_size", &size]].concat();
    Ok(vec![
        line(&[&convert[..], &["--dtype", dtype]].concat()),
        line(&[&build[..], &["--max_input_len", &tokens]].concat()),
    ])
}

fn decoder(
    converter: &str,
    precision: Precision,
    folders: &Folders,
    (max_batch_size, max_tokens): (u32, u32),
    max_batch_tokens: u32,
) -> Vec<Line> {
    let (model, dtype) = (folders.model.display().to_string(), dtype(precision));
    let convert = if precision == Precision::Fp8 {
        let quantize = folders.examples.join("quantization/quantize.py").display().to_string();
        line(&[
            "python3",
            &quantize,
            "--model_dir",
            &model,
            "--output_dir",
            "checkpoint",
            "--dtype",
            dtype,
            "--qformat",
            "fp8",
            "--calib_size",
            "512",
        ])
    } else {
        let script = format!("models/core/{converter}/convert_checkpoint.py");
        let script = folders.examples.join(script).display().to_string();
        line(&["python3", &script, "--model_dir", &model, "--output_dir", "checkpoint", "--dtype", dtype])
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
    vec![convert, build]
}

/// The model's class with one output more: what goes into `lm_head`, which is the last token's state of each sequence, or what comes
/// out of the transformer, which is a state for each token.
fn tap(class: &str, form: Form) -> String {
    let (module, state) = match form {
        Form::DecoderStates => ("transformer", "result"),
        Form::DecoderPooled | Form::EncoderStates | Form::EncoderLabels => ("lm_head", "given[0]"),
    };
    format!(
        "# Written by `meridian model build`. The model, with the states that vectors are made of as an output.\n\
         from tensorrt_llm.models import {class}\n\n\n\
         class Tapped({class}):\n    def __init__(self, config):\n        super().__init__(config)\n        \
         forward = self.{module}.forward\n\n        def tapped(*given, **named):\n            \
         result = forward(*given, **named)\n            {state}.mark_output(\"{TENSOR}\", config.dtype)\n            \
         return result\n\n        self.{module}.forward = tapped\n"
    )
}

fn script(lines: &[Line], folders: &Folders) -> String {
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
         echo \"tensorrt_llm $(python3 -c 'import tensorrt_llm; print(tensorrt_llm.__version__)' | tail -n 1)\"\n}} > {FOUND}\n"
    ));
    text
}

/// As one word for `sh`, whatever is in it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// What the script found: the GPU, and the versions of TensorRT and TensorRT-LLM.
pub fn found(text: &str) -> Result<[String; 3], String> {
    let value = |name: &str| {
        let values = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = values.map(str::trim).filter(|value| !value.is_empty());
        value.map(str::to_owned).ok_or_else(|| format!("the tools did not say what `{name}` they were of"))
    };
    // Its Python package counts builds as a fourth part, which the library does not.
    let tensorrt: Vec<String> = value("tensorrt")?.split('.').take(3).map(str::to_owned).collect();
    Ok([value("gpu")?, tensorrt.join("."), value("tensorrt_llm")?])
}

#[cfg(test)]
mod tests;
