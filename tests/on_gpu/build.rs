//! `meridian model build` with fake tools that record their command lines.

use super::copy;
use crate::fixture;
use crate::local_fleet::meridian;
use replica::cache::ModelCache;
use replica::engine::tensorrt::record::{ENGINE, folder};
use replica::engine::tensorrt::{EngineRecordV1, Form};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Directory with fake tools, a model cache and a model.
struct BuildDirectory {
    folder: tempfile::TempDir,
}

impl BuildDirectory {
    fn new(family: &str) -> BuildDirectory {
        let directory = BuildDirectory { folder: tempfile::tempdir().unwrap() };
        copy(&fixture("families/bert"), &directory.at("model"), &["tokenizer.json", "tokenizer_config.json"]);
        copy(&fixture("families").join(family), &directory.at("model"), &[]);
        // Only the tools read the weights, so their content does not matter; the built engine is four times as wide.
        let config = directory.at("model").join("config.json");
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&config, text.replace("\"intermediate_size\": 64", "\"intermediate_size\": 128"))
            .unwrap();
        for name in ["tools", "cache", "examples"] {
            std::fs::create_dir(directory.at(name)).unwrap();
        }
        directory
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Creates a program that records its command line and then runs `does`.
    fn tool(&self, name: &str, does: &str) {
        let (file, calls) = (self.at("tools").join(name), self.at("calls"));
        let text = format!("#!/bin/sh\necho \"{name} $*\" >> '{}'\n{does}\n", calls.display());
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Creates fakes of NVIDIA's tools.
    fn tools(&self) {
        self.tool("nvidia-smi", "echo 'NVIDIA H200'");
        let version =
            "case \"$2\" in *tensorrt_llm*) echo 'a notice'; echo 1.2.1;; *tensorrt*) echo 10.14.1.48;; esac";
        self.tool("python3", version);
        self.tool(
            "trtllm-build",
            "mkdir engine && echo engine > engine/rank0.engine && echo {} > engine/config.json",
        );
    }

    fn calls(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.at("calls")).unwrap_or_default();
        text.lines().map(|line| line.replace(&*self.folder.path().to_string_lossy(), "HERE")).collect()
    }

    /// Runs the build; returns whether it succeeded and its output.
    fn build(&self, arguments: &[&str]) -> (bool, String) {
        let mut command = meridian();
        let path = format!("{}:/usr/bin:/bin", self.at("tools").display());
        command.args(["model", "build"]).arg(self.at("model")).arg("--examples").arg(self.at("examples"));
        self.run(command.args(arguments).env("PATH", path).env("MERIDIAN_CACHE", self.at("cache")))
    }

    fn run(&self, command: &mut Command) -> (bool, String) {
        let output = command.output().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.success(), text.replace(&*self.folder.path().to_string_lossy(), "HERE"))
    }

    fn engine_folder(&self, precision: regions::Precision) -> PathBuf {
        let source = self.at("model").display().to_string().parse().unwrap();
        let digest = ModelCache::new(self.at("cache")).resolve(&source).unwrap().digest;
        folder(&self.at("cache"), &digest, precision)
    }
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_err()
}

#[test]
fn an_engine_is_built_by_the_documented_commands_once_and_described() {
    let directory = BuildDirectory::new("bert_rerank");
    directory.tools();
    let (is_built, output) =
        directory.build(&["--precision", "f16", "--max-batch-size", "4", "--max-tokens", "32"]);
    assert!(
        is_built && output.contains("f16 for NVIDIA H200, TensorRT 10.14.1, TensorRT-LLM 1.2.1"),
        "{output}"
    );
    let calls = directory.calls();
    assert_eq!(
        calls[..3],
        [
            "python3 prepare.py HERE/model model",
            "python3 HERE/examples/models/core/bert/convert_checkpoint.py --model BertForSequenceClassification \
             --model_dir model --output_dir checkpoint --dtype float16",
            "trtllm-build --checkpoint_dir checkpoint --output_dir engine --remove_input_padding=enable \
             --bert_attention_plugin=float16 --max_batch_size 4 --max_input_len 32",
        ]
    );
    let engine_folder = directory.engine_folder(regions::Precision::F16);
    let record = EngineRecordV1::read(&engine_folder).unwrap();
    record.check_files(&engine_folder).unwrap();
    let names: Vec<&String> = record.files.keys().collect();
    assert_eq!(names, ["config.json", ENGINE]);
    assert_eq!((record.form, record.max_batch_tokens, record.test_double), (Form::EncoderLabels, 128, false));

    let (is_built, output) = directory.build(&["--precision", "f16"]);
    assert!(is_built && output.contains("already built"), "{output}");
    assert_eq!(directory.calls(), calls, "nothing was run");
    let (is_built, output) = directory.build(&["--precision", "f16", "--again"]);
    assert!(is_built && directory.calls().len() == 2 * calls.len(), "{output}");
    // A damaged engine is rebuilt.
    std::fs::write(engine_folder.join(ENGINE), "other").unwrap();
    let (is_built, output) = directory.build(&["--precision", "f16"]);
    assert!(is_built && directory.calls().len() == 3 * calls.len(), "{output}");
}

#[test]
fn a_decoder_is_built_with_a_class_that_outputs_its_states() {
    let directory = BuildDirectory::new("llama_rerank");
    directory.tools();
    // The class is recorded when it is used.
    directory.tool("trtllm-build", "mkdir engine && cat prepare.py tap.py > engine/rank0.engine");
    let (is_built, output) = directory.build(&["--precision", "fp8"]);
    assert!(is_built, "{output}");
    assert!(directory.calls()[1].contains("HERE/examples/quantization/quantize.py --model_dir model"));
    assert!(directory.calls()[2].contains("--model_cls_file tap.py --model_cls_name Tapped"));
    let programs =
        std::fs::read_to_string(directory.engine_folder(regions::Precision::Fp8).join(ENGINE)).unwrap();
    assert!(
        programs.contains("transformers.LlamaForCausalLM.")
            && programs.contains("self.lm_head.forward = tapped")
    );
}

/// Fake of TensorRT-LLM's decoders as a subclass sees them: the transformer is called by its `forward` and returns the keys and
/// values with the states, the head is called as a whole, and a tensor prints the name under which it was marked.
const DECODERS: &str = r#"
class Tensor(str):
    def mark_output(self, name, dtype):
        print(f"{self} is {name} in {dtype}")


class Module:
    def __init__(self, answer):
        self.answer = answer

    def forward(self, *given, **named):
        return self.answer

    def __call__(self, *given, **named):
        return self.forward(*given, **named)


class LLaMAForCausalLM:
    def __init__(self, config):
        self.transformer = Module((Tensor("states"), ()))
        self.lm_head = Module(Tensor("logits"))

    def forward(self):
        states, _ = self.transformer.forward(input_ids=Tensor("ids"), use_cache=True)
        return self.lm_head(Tensor(f"last of {states}"))
"#;

#[test]
fn the_tapped_class_outputs_the_states_that_are_pooled() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("no python3 on this machine: the tapped class is not run");
        return;
    }
    for (family, marked) in [("llama", "states"), ("llama_rerank", "last of states")] {
        let directory = BuildDirectory::new(family);
        let (is_built, output) = directory.build(&["--precision", "bf16", "--dry-run"]);
        let from = output.find("from tensorrt_llm.models").expect("the class");
        let class = output[from..].split("\n# ").next().unwrap();
        let library = directory.at("tensorrt_llm");
        std::fs::create_dir(&library).unwrap();
        std::fs::write(library.join("__init__.py"), "").unwrap();
        std::fs::write(library.join("models.py"), DECODERS).unwrap();
        let calls =
            "import types\nassert Tapped(types.SimpleNamespace(dtype='bfloat16')).forward() == 'logits'";
        let mut python = Command::new("python3");
        python.args(["-c", &format!("{class}\n{calls}")]).current_dir(directory.folder.path());
        assert_eq!(
            (is_built, directory.run(&mut python)),
            (true, (true, format!("{marked} is pooled in bfloat16\n")))
        );
    }
}

#[test]
fn failed_tools_leave_no_engine_and_missing_tools_are_reported() {
    let directory = BuildDirectory::new("bert");
    let engine_folder = directory.engine_folder(regions::Precision::F16);
    let refused = |arguments: &[&str], sentence: &str| {
        let (is_built, output) = directory.build(arguments);
        assert!(!is_built && output.contains(sentence) && is_empty(&engine_folder), "{output}");
    };
    refused(&["--precision", "f16"], "`trtllm-build` is not on PATH: run this in NVIDIA's container");
    refused(&["--precision", "int8"], "--precision int8: tensorrt-llm supports f32, f16, bf16, fp8");
    refused(&["--precision", "fp8"], "no fp8 for encoders");
    refused(&["--precision", "bf16", "--engine", "cpu"], "--engine cpu");
    directory.tools();
    directory.tool("trtllm-build", "exit 3");
    refused(&["--precision", "f16"], "NVIDIA's tools failed");
    directory.tool("trtllm-build", "mkdir engine");
    refused(&["--precision", "f16"], "created no rank0.engine");
    directory.tools();
    directory.tool("nvidia-smi", "");
    refused(&["--precision", "f16"], "has no line `gpu`");
}

#[test]
fn a_dry_run_prints_the_commands_for_this_machine_or_a_container() {
    let directory = BuildDirectory::new("bert");
    let (is_built, output) = directory.build(&["--precision", "f16", "--dry-run"]);
    assert!(is_built && output.contains("--model BertModel --model_dir model"), "{output}");
    assert!(
        output.contains("transformers.BertModel.from_pretrained")
            && output.contains("prepare.py HERE/model model"),
        "{output}"
    );
    let contained = ["--precision", "f16", "--container", "vendor/release:1.2.1"];
    let (is_built, output) = directory.build(&[&contained[..], &["--dry-run"]].concat());
    assert!(is_built && output.contains("/app/tensorrt_llm/examples/models/core/bert"), "{output}");
    assert!(
        output.contains("docker run --rm --gpus all") && output.contains("HERE/model:/model:ro"),
        "{output}"
    );
    assert!(directory.calls().is_empty() && is_empty(&directory.at("cache").join("engines")), "{output}");

    directory.tool("docker", "exit 0");
    let (is_built, output) = directory.build(&contained);
    assert!(!is_built && output.contains("has no line"), "a container that does nothing: {output}");
    assert!(
        directory.calls()[0].ends_with("vendor/release:1.2.1 sh /build/build.sh"),
        "{:?}",
        directory.calls()
    );
}
