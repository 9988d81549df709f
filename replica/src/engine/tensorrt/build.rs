//! How an engine is built: a script of the vendor's own documented commands, written for one model and precision.
//!
//! Nothing here runs. The script is a value that can be shown, tested and started wherever the vendor's tools are: on this
//! machine, or in the vendor's container with other folders. It leaves the engine in `engine/` and what it was built with in [`FOUND`],
//! by lines of `name value`, so that the record says what the tools said and not what somebody typed.

use std::path::PathBuf;

use replica_core::Precision;

use super::record::Form;
use crate::model::{Architecture, HeadPooling, LayerSpec, ModelDir, Pooling};

/// Where the script writes what it was built with.
pub const FOUND: &str = "built-with";
/// The script.
pub const SCRIPT: &str = "build.sh";
/// What makes of the model one that the converters take.
const PREPARE: &str = "prepare.py";
/// The class of a decoder whose states are an output.
const TAP: &str = "tap.py";

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
    /// The programs that the script runs beside the vendor's, by their names in the folder where it works.
    pub programs: Vec<(&'static str, String)>,
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

/// Families that are built, and how each is converted. The class is that of `transformers` which the converter expects; to be read
/// as another, the model is saved as one.
const FAMILIES: [(&str, Family); 8] = [
    ("bert", Family::Encoder("Bert")),
    ("roberta", Family::Encoder("Roberta")),
    // The same tensors and the same computation by another name.
    ("xlm-roberta", Family::Encoder("Roberta")),
    ("llama", Family::Decoder("LlamaForCausalLM", LLAMA)),
    ("mistral", Family::Decoder("MistralForCausalLM", LLAMA)),
    ("qwen2", Family::Decoder("Qwen2ForCausalLM", QWEN)),
    ("qwen3", Family::Decoder("Qwen3ForCausalLM", QWEN)),
    ("gemma2", Family::Decoder("Gemma2ForCausalLM", GEMMA)),
];

#[derive(Clone, Copy)]
enum Family {
    /// What the names of its classes begin with.
    Encoder(&'static str),
    /// Its class, and what converts it.
    Decoder(&'static str, Converter),
}

/// One of the vendor's folders of `models/core`.
#[derive(Clone, Copy)]
struct Converter {
    folder: &'static str,
    /// The vendor's class that it makes.
    class: &'static str,
    /// What it must be told beside the model and the number format.
    words: &'static [&'static str],
    /// Whether it looks for `lm_head` by that name, also where the model computes its logits with the embeddings. Otherwise it
    /// knows no such tensor.
    head: bool,
}

const LLAMA: Converter = Converter { folder: "llama", class: "LLaMAForCausalLM", words: &[], head: true };
const QWEN: Converter = Converter { folder: "qwen", class: "QWenForCausalLM", words: &[], head: true };
const GEMMA: Converter =
    Converter { folder: "gemma", class: "GemmaForCausalLM", words: &["--ckpt-type", "hf"], head: false };

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
    let sizes = Sizes { max_batch_size, max_tokens };
    let (lines, programs, form, max_batch_tokens) = match *family {
        Family::Encoder(begins) => {
            is_as_wide_as_the_vendors(&model.architecture)?;
            let Some(product) = max_batch_size.checked_mul(max_tokens) else {
                return Err(
                    "--max-batch-size times --max-tokens is more than 2³² tokens; give less".to_owned()
                );
            };
            let (form, ends) = match &model.head {
                Some(_) => (Form::EncoderLabels, "ForSequenceClassification"),
                None => (Form::EncoderStates, "Model"),
            };
            let class = format!("{begins}{ends}");
            let programs = vec![(PREPARE, prepare(&class, false, false))];
            (encoder(&class, wanted.precision, folders, sizes)?, programs, form, product)
        }
        Family::Decoder(class, converter) => {
            sees_what_the_executor_sees(&model.architecture.layers, max_tokens)?;
            let last = match (&model.head, model.architecture.head_pooling) {
                (Some(_), HeadPooling::Last { .. }) => true,
                (Some(_), HeadPooling::First | HeadPooling::Mean) => false,
                (None, _) => model.sentence.pooling == Pooling::LastToken,
            };
            let form = if last { Form::DecoderPooled } else { Form::DecoderStates };
            let tokens = wanted.max_batch_tokens.unwrap_or(8192.max(max_tokens));
            // Eight bits are chosen on texts, and texts want a tokenizer.
            let texts = wanted.precision == Precision::Fp8;
            let programs =
                vec![(PREPARE, prepare(class, converter.head, texts)), (TAP, tap(converter.class, form))];
            (decoder(converter, wanted.precision, folders, sizes, tokens), programs, form, tokens)
        }
    };
    let tapped = matches!(form, Form::DecoderPooled | Form::DecoderStates);
    Ok(Build {
        script: script(&lines, folders),
        programs,
        form,
        tensor: if tapped { TENSOR.to_owned() } else { String::new() },
        max_batch_size,
        max_batch_tokens,
        max_tokens,
    })
}

/// TensorRT-LLM takes the width inside of an encoder for four times the width outside.
fn is_as_wide_as_the_vendors(architecture: &Architecture) -> Result<(), String> {
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
struct Sizes {
    max_batch_size: u32,
    max_tokens: u32,
}

/// The executor's decoders look at all that came before and at nothing behind, whatever the model's own do.
fn sees_what_the_executor_sees(layers: &[LayerSpec], max_tokens: u32) -> Result<(), String> {
    if layers.iter().any(|layer| layer.reach.behind > 0) {
        return Err("tokens of this model look at those behind them, and those of TensorRT-LLM's decoders do not; run it \
                    on the processor"
            .to_owned());
    }
    // Itself beside those before.
    let window = layers.iter().map(|layer| layer.reach.before.saturating_add(1)).min();
    match window {
        Some(window) if window < max_tokens as usize => Err(format!(
            "tokens of this model look at {window} at most, and those of TensorRT-LLM's decoders at all {max_tokens}; give \
             --max-tokens of {window} at most"
        )),
        Some(_) | None => Ok(()),
    }
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
    precision: Precision,
    folders: &Folders,
    Sizes { max_batch_size, max_tokens }: Sizes,
) -> Result<Vec<Line>, String> {
    if !matches!(precision, Precision::F32 | Precision::F16) {
        return Err(format!("TensorRT-LLM has no {precision} for encoders; give f16 or f32"));
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
    folders: &Folders,
    Sizes { max_batch_size, max_tokens }: Sizes,
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

/// Where [`PREPARE`] leaves the model.
const PREPARED: &str = "model";

fn prepared(folders: &Folders) -> Line {
    line(&["python3", PREPARE, &folders.model.display().to_string(), PREPARED])
}

/// Saves the model as one of this class. A converter goes by the name of the class in `config.json` and by the names of tensors, and
/// knows those of a model that was published to go on with texts; an embedder or a classifier of the same family has others.
fn prepare(class: &str, head: bool, texts: bool) -> String {
    let mut text = format!(
        "# Written by `meridian model build`. The model as one that the converters know.\n\
         import sys\n\n\
         import torch\n\
         import transformers\n\n\
         model, prepared = sys.argv[1:]\n\
         whole = transformers.{class}.from_pretrained(model, torch_dtype=\"auto\")\n"
    );
    if head {
        text.push_str(
            "# A tensor of its own, where it was that of the embeddings.\n\
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

/// The model's class with one output more: what goes into `lm_head`, which is the last token's state of each sequence, or what comes
/// out of the transformer, which is a state for each token.
fn tap(class: &str, form: Form) -> String {
    let (module, state) = match form {
        // With a cache of keys and values, those come beside the states.
        Form::DecoderStates => ("transformer", "(result[0] if isinstance(result, tuple) else result)"),
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
