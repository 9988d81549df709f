//! Models in other formats than the one that is read: what they are, and the command that converts them.
//!
//! A folder without `config.json`, `tokenizer.json` or `model.safetensors` is often a good model in another form. "It has
//! no model.safetensors" is true and does not help; so the forms that are met most are told apart by the names of their
//! files, and each comes with what to do. The commands are those of the libraries that wrote the files, and were run with
//! sentence-transformers 6.2, transformers 5.23 and peft 0.21.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

/// The names of a folder's files, and the content of the small ones where it can be had.
pub(crate) struct Listing<'a> {
    /// Paths below the folder, with `/`.
    pub(crate) paths: BTreeSet<&'a str>,
    /// What Python's libraries load it by: the path of a folder, or `owner/name` on the hub; absent for an archive.
    pub(crate) name: Option<&'a str>,
    /// Whether it is a name on the hub.
    pub(crate) is_hub: bool,
    /// Reads a file of the folder.
    pub(crate) read: &'a dyn Fn(&str) -> Option<String>,
}

/// A form in which models come and that is not read.
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

/// Returns what the model is and what to do, one sentence for each form that is recognised.
pub(crate) fn recognise(listing: &Listing<'_>) -> Vec<String> {
    let formats = Format::of(listing);
    let mut sentences: Vec<String> = formats.iter().map(|format| format.sentence(listing)).collect();
    // One conversion does for all that it can do.
    if let Some(last) = formats.iter().rposition(|format| format.is_resaved()) {
        write!(sentences[last], ": {}", resave(listing)).expect("a string takes what is written");
    }
    sentences
}

impl Format {
    /// The forms that explain why the folder is no model.
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

    /// Whether loading the model and saving it again makes what is read.
    fn is_resaved(self) -> bool {
        matches!(self, Format::FirstStage | Format::Pickle | Format::TensorFlow | Format::OldTokenizer)
    }

    fn sentence(self, listing: &Listing<'_>) -> String {
        match self {
            Format::Gguf => "it is a GGUF file for llama.cpp, whose weights are quantised in a way that is not read; take \
                             the model that it was made of, which has model.safetensors"
                .to_owned(),
            Format::Adapter => format!(
                "it is a LoRA adapter (PEFT), which holds the difference to a base model; merge the two: {}",
                merge(listing)
            ),
            Format::StaticEmbedding => "it is a StaticEmbedding, a table of word vectors without a transformer, which is \
                                        not supported; take a model whose first stage is a Transformer"
                .to_owned(),
            Format::FirstStage => "its transformer lies in 0_Transformer, the layout of sentence-transformers before \
                                   version 0.4; save it again"
                .to_owned(),
            Format::Pickle => "its weights are in pytorch_model.bin, a Python pickle, which runs a program when it is \
                               read; save them as safetensors"
                .to_owned(),
            Format::TensorFlow => "its weights are those of TensorFlow or Flax; save them as safetensors, with a version \
                                   of transformers below 5, which still reads them"
                .to_owned(),
            Format::Onnx => "it is an ONNX export, from which the weights cannot be had back; take the model that it was \
                             exported from, which has model.safetensors"
                .to_owned(),
            Format::OpenVino => "it is an OpenVINO export, from which the weights cannot be had back; take the model that \
                                 it was exported from, which has model.safetensors"
                .to_owned(),
            Format::OldTokenizer => "its tokenizer is in the older form of a vocabulary without tokenizer.json; save it as \
                                     tokenizer.json"
                .to_owned(),
        }
    }
}

/// Returns what to do about a pickle in this folder, which is a model or a stage of one.
pub(super) fn pickle(folder: &Path) -> String {
    let is_stage = folder.file_name().is_some_and(|name| {
        name.to_str().is_some_and(|name| name.starts_with(|c: char| c.is_ascii_digit()) && name.contains('_'))
    });
    let model = folder.parent().filter(|_| is_stage).unwrap_or(folder);
    let model = model.canonicalize().unwrap_or_else(|_| model.to_owned());
    let read = |path: &str| std::fs::read_to_string(model.join(path)).ok();
    let listing = Listing { paths: BTreeSet::new(), name: model.to_str(), is_hub: false, read: &read };
    format!(
        "weights in Python's pickle format are not read, since reading them runs what is in them; save the model as \
         safetensors: {}",
        resave(&listing)
    )
}

/// The command that loads the model and saves it in the form that is read.
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

/// The command that adds an adapter to its base model and saves the sum.
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

/// What the libraries load the model by.
fn name<'a>(listing: &Listing<'a>) -> &'a str {
    listing.name.filter(|name| is_plain(name)).unwrap_or("MODEL")
}

/// The beginning of the folder's name that a command writes to: beside a folder, or here for a model of the hub.
fn out<'a>(listing: &Listing<'a>) -> &'a str {
    let name = name(listing).trim_end_matches('/');
    if listing.is_hub { name.rsplit('/').next().unwrap_or(name) } else { name }
}

/// Whether the text can stand between quotes in a command as it is.
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
    fn a_model_in_another_form_is_named_with_what_to_do() {
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
    fn every_form_is_told_and_one_command_converts_them_all() {
        let sentences = of(&["config.json", "pytorch_model.bin", "vocab.txt"], ("", ""));
        assert_eq!(sentences.len(), 2, "{sentences:?}");
        assert_eq!(sentences.iter().filter(|sentence| sentence.contains("python3 -c")).count(), 1);
    }

    #[test]
    fn a_name_that_a_shell_would_read_is_not_put_into_a_command() {
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
