//! Detection of unsupported model formats, with the command that converts them.
//!
//! A folder without `config.json`, `tokenizer.json` or `model.safetensors` is often a valid model in another format.
//! Reporting the missing file alone does not help; so the most common formats are detected by their file names, each
//! with a suggested fix. The commands are those of the libraries that wrote the files, tested with
//! sentence-transformers 6.2, transformers 5.23 and peft 0.21.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

/// File names of a folder, and access to its small files where available.
pub(crate) struct Listing<'a> {
    /// Paths relative to the folder, with `/`.
    pub(crate) paths: BTreeSet<&'a str>,
    /// Name by which Python libraries load it: the path of a folder, or `owner/name` on the hub; absent for an archive.
    pub(crate) name: Option<&'a str>,
    /// Whether `name` is a repository on the hub.
    pub(crate) is_hub: bool,
    /// Reads a file of the folder.
    pub(crate) read: &'a dyn Fn(&str) -> Option<String>,
}

/// Unsupported model format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Gguf,
    Adapter,
    StaticEmbedding,
    FirstStage,
    Pickle,
    TensorFlow,
    Onnx,
    OpenVino,
    OldTokenizer,
}

/// Returns the detected formats with the fix, one sentence each.
pub(crate) fn recognise(listing: &Listing<'_>) -> Vec<String> {
    let formats = Format::of(listing);
    let mut sentences: Vec<String> = formats.iter().map(|format| format.sentence(listing)).collect();
    // One command performs all conversions.
    if let Some(last) = formats.iter().rposition(|format| format.is_resaved()) {
        write!(sentences[last], ": {}", resave(listing)).expect("a string takes what is written");
    }
    sentences
}

impl Format {
    /// Returns the formats that explain why the folder is not a model.
    fn of(listing: &Listing<'_>) -> Vec<Format> {
        let Listing { paths, read, .. } = listing;
        let has = |path: &str| paths.contains(path);
        let any = |ends: &[&str]| paths.iter().any(|path| ends.iter().any(|end| path.ends_with(end)));
        let has_weights = has("model.safetensors") || has("model.safetensors.index.json");
        let has_pickle = any(&["pytorch_model.bin", "pytorch_model.bin.index.json"]);
        if has("adapter_config.json") && !has("config.json") {
            return vec![Format::Adapter];
        }
        let is_static = |path: &&str| path.starts_with("0_StaticEmbedding/");
        if paths.iter().any(is_static)
            || read("modules.json").is_some_and(|it| it.contains("StaticEmbedding"))
        {
            return vec![Format::StaticEmbedding];
        }
        let mut formats = Vec::new();
        if paths.iter().any(|path| path.starts_with("0_Transformer/")) && !has("config.json") {
            formats.push(Format::FirstStage);
        }
        match () {
            () if has_weights || paths.contains("0_Transformer/model.safetensors") => {}
            () if has_pickle => formats.push(Format::Pickle),
            () if any(&[".gguf"]) => return vec![Format::Gguf],
            () if any(&["tf_model.h5", "flax_model.msgpack", ".ckpt.index"]) => {
                formats.push(Format::TensorFlow)
            }
            () if any(&[".onnx"]) => formats.push(Format::Onnx),
            () if any(&["openvino_model.xml"]) => formats.push(Format::OpenVino),
            () => {}
        }
        let old = ["vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model"];
        if !any(&["tokenizer.json"]) && old.iter().any(|file| any(&[file])) {
            formats.push(Format::OldTokenizer);
        }
        formats
    }

    /// Returns whether loading the model and saving it again produces the supported format.
    fn is_resaved(self) -> bool {
        matches!(self, Format::FirstStage | Format::Pickle | Format::TensorFlow | Format::OldTokenizer)
    }

    fn sentence(self, listing: &Listing<'_>) -> String {
        match self {
            Format::Gguf => {
                "it is a GGUF file for llama.cpp, whose quantization is not supported; use the model from \
                 which it was made, which has model.safetensors"
                    .to_owned()
            }
            Format::Adapter => format!(
                "it is a LoRA adapter (PEFT), which holds the difference to a base model; merge the two: {}",
                merge(listing)
            ),
            Format::StaticEmbedding => {
                "it is a StaticEmbedding, a table of word vectors without a transformer, which is \
                 not supported; use a model whose first module is a Transformer"
                    .to_owned()
            }
            Format::FirstStage => {
                "its transformer is in the folder 0_Transformer, the layout of sentence-transformers \
                 before version 0.4; save it again"
                    .to_owned()
            }
            Format::Pickle => {
                "its weights are in pytorch_model.bin, a Python pickle, which executes code when it is \
                 loaded; save them as safetensors"
                    .to_owned()
            }
            Format::TensorFlow => {
                "its weights are in a format of TensorFlow or Flax; save them as safetensors, with a \
                 version of transformers below 5, which still reads them"
                    .to_owned()
            }
            Format::Onnx => {
                "it is an ONNX export, from which the weights cannot be recovered; use the model from which \
                 it was exported, which has model.safetensors"
                    .to_owned()
            }
            Format::OpenVino => {
                "it is an OpenVINO export, from which the weights cannot be recovered; use the model from \
                 which it was exported, which has model.safetensors"
                    .to_owned()
            }
            Format::OldTokenizer => {
                "its tokenizer is in the old format of a vocabulary without tokenizer.json; save it \
                 as tokenizer.json"
                    .to_owned()
            }
        }
    }
}

/// Returns the error message for a pickle in this folder, which is a model or one of its modules.
pub(super) fn pickle(folder: &Path) -> String {
    let is_stage = folder.file_name().is_some_and(|name| {
        name.to_str().is_some_and(|name| name.starts_with(|c: char| c.is_ascii_digit()) && name.contains('_'))
    });
    let model = folder.parent().filter(|_| is_stage).unwrap_or(folder);
    let model = model.canonicalize().unwrap_or_else(|_| model.to_owned());
    let read = |path: &str| std::fs::read_to_string(model.join(path)).ok();
    let listing = Listing { paths: BTreeSet::new(), name: model.to_str(), is_hub: false, read: &read };
    format!(
        "weights in Python's pickle format are not supported, because loading them executes their code; save the \
         model as safetensors: {}",
        resave(&listing)
    )
}

/// Returns the command that loads the model and saves it in the supported format.
fn resave(listing: &Listing<'_>) -> String {
    let config = (listing.read)("config.json").unwrap_or_default();
    let class =
        if config.contains("ForSequenceClassification") { "CrossEncoder" } else { "SentenceTransformer" };
    let (name, out) = (name(listing), out(listing));
    format!(
        "python3 -c \"from sentence_transformers import {class} as M; \
         M('{name}', device='cpu').save_pretrained('{out}-safetensors')\""
    )
}

/// Returns the command that merges an adapter into its base model.
fn merge(listing: &Listing<'_>) -> String {
    let config = (listing.read)("adapter_config.json").unwrap_or_default();
    let is_plain = !config.is_empty() && !config.contains("FEATURE_EXTRACTION");
    let class = if is_plain { "AutoPeftModel" } else { "AutoPeftModelForFeatureExtraction" };
    let (name, out) = (name(listing), out(listing));
    format!(
        "python3 -c \"from peft import {class} as P; from sentence_transformers import SentenceTransformer as M; \
         m = M('{name}', device='cpu'); m[0].model = P.from_pretrained('{name}').merge_and_unload(); \
         m.save_pretrained('{out}-merged')\""
    )
}

/// Returns the name by which Python libraries load the model.
fn name<'a>(listing: &Listing<'a>) -> &'a str {
    listing.name.filter(|name| is_plain(name)).unwrap_or("MODEL")
}

/// Returns the output path of a command without its suffix: beside the folder, or in the current directory for a hub
/// model.
fn out<'a>(listing: &Listing<'a>) -> &'a str {
    let name = name(listing).trim_end_matches('/');
    if listing.is_hub { name.rsplit('/').next().unwrap_or(name) } else { name }
}

/// Returns whether the text needs no quoting in a shell command.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || matches!(c, '/' | '-' | '_' | '.' | ' '))
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPLETE: [&str; 3] = ["config.json", "tokenizer.json", "model.safetensors"];

    fn of(paths: &[&str], file: (&str, &str)) -> Vec<String> {
        let read = |path: &str| (path == file.0).then(|| file.1.to_owned());
        let paths = paths.iter().copied().collect();
        recognise(&Listing { paths, name: Some("/models/x"), is_hub: false, read: &read })
    }

    #[test]
    fn an_unsupported_format_is_detected_with_its_fix() {
        const RESAVED: &str = "M('/models/x', device='cpu').save_pretrained('/models/x-safetensors')";
        for (paths, file, parts) in [
            (
                &["config.json", "tokenizer.json", "pytorch_model.bin"][..],
                ("", ""),
                &["a Python pickle", "import SentenceTransformer as M", RESAVED][..],
            ),
            (
                &["config.json", "tokenizer.json", "pytorch_model.bin"],
                ("config.json", r#"{"architectures": ["BertForSequenceClassification"]}"#),
                &["import CrossEncoder as M", RESAVED],
            ),
            (
                &[
                    "modules.json",
                    "0_Transformer/config.json",
                    "0_Transformer/pytorch_model.bin",
                    "0_Transformer/vocab.txt",
                ],
                ("", ""),
                &["0_Transformer", RESAVED],
            ),
            (
                &["config.json", "model.safetensors", "vocab.txt"],
                ("", ""),
                &["without tokenizer.json", RESAVED],
            ),
            (&["config.json", "tokenizer.json", "onnx/model.onnx"], ("", ""), &["ONNX export"]),
            (&["config.json", "tokenizer.json", "openvino/openvino_model.xml"], ("", ""), &["OpenVINO"]),
            (&["config.json", "tokenizer.json", "tf_model.h5"], ("", ""), &["TensorFlow", RESAVED]),
            (&["model-q4_0.gguf"], ("", ""), &["GGUF"]),
            (
                &["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"],
                ("adapter_config.json", r#"{"task_type": "FEATURE_EXTRACTION"}"#),
                &["LoRA", "AutoPeftModelForFeatureExtraction as P", "save_pretrained('/models/x-merged')"],
            ),
            (
                &["adapter_config.json", "adapter_model.safetensors"],
                ("adapter_config.json", r#"{"task_type": null}"#),
                &["AutoPeftModel as P"],
            ),
            (
                &["modules.json", "model.safetensors", "tokenizer.json"],
                ("modules.json", r#"[{"type": "sentence_transformers.models.StaticEmbedding"}]"#),
                &["StaticEmbedding", "not supported"],
            ),
            (&["modules.json", "0_StaticEmbedding/model.safetensors"], ("", ""), &["StaticEmbedding"]),
        ] {
            let sentences = of(paths, file);
            for part in parts {
                assert!(sentences.join("; ").contains(part), "{part:?} in {sentences:?}");
            }
        }
        assert_eq!(of(&COMPLETE, ("", "")), [] as [&str; 0]);
        assert_eq!(of(&["config.json"], ("", "")), [] as [&str; 0]);
    }

    #[test]
    fn all_formats_are_reported_and_one_command_converts_them() {
        let sentences = of(&["config.json", "pytorch_model.bin", "vocab.txt"], ("", ""));
        assert_eq!(sentences.len(), 2, "{sentences:?}");
        assert_eq!(sentences.iter().filter(|sentence| sentence.contains("python3 -c")).count(), 1);
    }

    #[test]
    fn a_name_with_shell_metacharacters_is_not_put_into_a_command() {
        let paths = || BTreeSet::from(["config.json", "pytorch_model.bin", "tokenizer.json"]);
        let of = |name, is_hub| {
            recognise(&Listing { paths: paths(), name: Some(name), is_hub, read: &|_| None }).join("; ")
        };
        assert!(of("/x'; rm -rf $HOME", false).contains("M('MODEL', "));
        assert!(
            of("owner/name", true)
                .contains("M('owner/name', device='cpu').save_pretrained('name-safetensors')")
        );
    }
}
