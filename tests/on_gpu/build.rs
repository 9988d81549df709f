//! `meridian model build` with fake tools that record their command lines.

use super::copy;
use crate::fixture;
use crate::world::meridian;
use replica::cache::ModelCache;
use replica::engine::tensorrt::record::{ENGINE, folder};
use replica::engine::tensorrt::{EngineRecordV1, Form};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Directory with fake tools, a model cache and a model.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new(family: &str) -> Machine {
        let machine = Machine { folder: tempfile::tempdir().unwrap() };
        copy(&fixture("families/bert"), &machine.at("model"), &["tokenizer.json", "tokenizer_config.json"]);
        copy(&fixture("families").join(family), &machine.at("model"), &[]);
        // Only the tools read the weights, so their content does not matter; the built engine is four times as wide.
        let config = machine.at("model").join("config.json");
        let text = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&config, text.replace("\"intermediate_size\": 64", "\"intermediate_size\": 128"))
            .unwrap();
        for name in ["tools", "cache", "examples"] {
            std::fs::create_dir(machine.at(name)).unwrap();
        }
        machine
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
        self.said(command.args(arguments).env("PATH", path).env("MERIDIAN_CACHE", self.at("cache")))
    }

    fn said(&self, command: &mut Command) -> (bool, String) {
        let output = command.output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap().replace(&*self.folder.path().to_string_lossy(), "HERE");
        (output.status.success(), said)
    }

    fn place(&self, precision: regions::Precision) -> PathBuf {
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
    let machine = Machine::new("bert_rerank");
    machine.tools();
    let (fine, said) = machine.build(&["--precision", "f16", "--max-batch-size", "4", "--max-tokens", "32"]);
    assert!(fine && said.contains("f16 for NVIDIA H200, TensorRT 10.14.1, TensorRT-LLM 1.2.1"), "{said}");
    let calls = machine.calls();
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
    let place = machine.place(regions::Precision::F16);
    let record = EngineRecordV1::read(&place).unwrap();
    record.check_files(&place).unwrap();
    let names: Vec<&String> = record.files.keys().collect();
    assert_eq!(names, ["config.json", ENGINE]);
    assert_eq!((record.form, record.max_batch_tokens, record.test_double), (Form::EncoderLabels, 128, false));

    let (fine, said) = machine.build(&["--precision", "f16"]);
    assert!(fine && said.contains("already built"), "{said}");
    assert_eq!(machine.calls(), calls, "nothing was run");
    let (fine, said) = machine.build(&["--precision", "f16", "--again"]);
    assert!(fine && machine.calls().len() == 2 * calls.len(), "{said}");
    // A damaged engine is rebuilt.
    std::fs::write(place.join(ENGINE), "other").unwrap();
    let (fine, said) = machine.build(&["--precision", "f16"]);
    assert!(fine && machine.calls().len() == 3 * calls.len(), "{said}");
}

#[test]
fn a_decoder_is_built_with_a_class_that_outputs_its_states() {
    let machine = Machine::new("llama_rerank");
    machine.tools();
    // The class is recorded when it is used.
    machine.tool("trtllm-build", "mkdir engine && cat prepare.py tap.py > engine/rank0.engine");
    let (fine, said) = machine.build(&["--precision", "fp8"]);
    assert!(fine, "{said}");
    assert!(machine.calls()[1].contains("HERE/examples/quantization/quantize.py --model_dir model"));
    assert!(machine.calls()[2].contains("--model_cls_file tap.py --model_cls_name Tapped"));
    let programs = std::fs::read_to_string(machine.place(regions::Precision::Fp8).join(ENGINE)).unwrap();
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
        let machine = Machine::new(family);
        let (fine, said) = machine.build(&["--precision", "bf16", "--dry-run"]);
        let from = said.find("from tensorrt_llm.models").expect("the class");
        let class = said[from..].split("\n# ").next().unwrap();
        let library = machine.at("tensorrt_llm");
        std::fs::create_dir(&library).unwrap();
        std::fs::write(library.join("__init__.py"), "").unwrap();
        std::fs::write(library.join("models.py"), DECODERS).unwrap();
        let calls =
            "import types\nassert Tapped(types.SimpleNamespace(dtype='bfloat16')).forward() == 'logits'";
        let mut python = Command::new("python3");
        python.args(["-c", &format!("{class}\n{calls}")]).current_dir(machine.folder.path());
        assert_eq!(
            (fine, machine.said(&mut python)),
            (true, (true, format!("{marked} is pooled in bfloat16\n")))
        );
    }
}

#[test]
fn failed_tools_leave_no_engine_and_missing_tools_are_reported() {
    let machine = Machine::new("bert");
    let place = machine.place(regions::Precision::F16);
    let refused = |arguments: &[&str], sentence: &str| {
        let (fine, said) = machine.build(arguments);
        assert!(!fine && said.contains(sentence) && is_empty(&place), "{said}");
    };
    refused(&["--precision", "f16"], "`trtllm-build` is not on PATH: run this in NVIDIA's container");
    refused(&["--precision", "int8"], "--precision int8: tensorrt-llm supports f32, f16, bf16, fp8");
    refused(&["--precision", "fp8"], "no fp8 for encoders");
    refused(&["--precision", "bf16", "--engine", "cpu"], "--engine cpu");
    machine.tools();
    machine.tool("trtllm-build", "exit 3");
    refused(&["--precision", "f16"], "NVIDIA's tools failed");
    machine.tool("trtllm-build", "mkdir engine");
    refused(&["--precision", "f16"], "created no rank0.engine");
    machine.tools();
    machine.tool("nvidia-smi", "");
    refused(&["--precision", "f16"], "has no line `gpu`");
}

#[test]
fn a_dry_run_prints_the_commands_for_this_machine_or_a_container() {
    let machine = Machine::new("bert");
    let (fine, said) = machine.build(&["--precision", "f16", "--dry-run"]);
    assert!(fine && said.contains("--model BertModel --model_dir model"), "{said}");
    assert!(
        said.contains("transformers.BertModel.from_pretrained")
            && said.contains("prepare.py HERE/model model"),
        "{said}"
    );
    let contained = ["--precision", "f16", "--container", "vendor/release:1.2.1"];
    let (fine, said) = machine.build(&[&contained[..], &["--dry-run"]].concat());
    assert!(fine && said.contains("/app/tensorrt_llm/examples/models/core/bert"), "{said}");
    assert!(said.contains("docker run --rm --gpus all") && said.contains("HERE/model:/model:ro"), "{said}");
    assert!(machine.calls().is_empty() && is_empty(&machine.at("cache").join("engines")), "{said}");

    machine.tool("docker", "exit 0");
    let (fine, said) = machine.build(&contained);
    assert!(!fine && said.contains("has no line"), "a container that does nothing: {said}");
    assert!(machine.calls()[0].ends_with("vendor/release:1.2.1 sh /build/build.sh"), "{:?}", machine.calls());
}
