//! `meridian model build`, with tools that write down how they were called in the place of NVIDIA's.

use super::copy;
use crate::fixture;
use crate::world::meridian;
use replica::cache::ModelCache;
use replica::engine::tensorrt::record::{ENGINE, folder};
use replica::engine::tensorrt::{Form, RecordV1};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A machine with tools, a cache and a model.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new(family: &str) -> Machine {
        let machine = Machine { folder: tempfile::tempdir().unwrap() };
        copy(&fixture("families/bert"), &machine.at("model"), &["tokenizer.json", "tokenizer_config.json"]);
        copy(&fixture("families").join(family), &machine.at("model"), &[]);
        for name in ["tools", "cache", "examples"] {
            std::fs::create_dir(machine.at(name)).unwrap();
        }
        machine
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A program of this name that writes down how it was called, and then does this.
    fn tool(&self, name: &str, does: &str) {
        let (file, calls) = (self.at("tools").join(name), self.at("calls"));
        let text = format!("#!/bin/sh\necho \"{name} $*\" >> '{}'\n{does}\n", calls.display());
        std::fs::write(&file, text).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Those of the vendor.
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

    /// Whether it went well, and what was said.
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
        calls[..2],
        [
            "python3 HERE/examples/models/core/bert/convert_checkpoint.py --model BertForSequenceClassification \
             --model_dir HERE/model --output_dir checkpoint --dtype float16",
            "trtllm-build --checkpoint_dir checkpoint --output_dir engine --remove_input_padding=enable \
             --bert_attention_plugin=float16 --max_batch_size 4 --max_input_len 32",
        ]
    );
    let place = machine.place(regions::Precision::F16);
    let record = RecordV1::read(&place).unwrap();
    record.check_files(&place).unwrap();
    let names: Vec<&String> = record.files.keys().collect();
    assert_eq!(names, ["config.json", ENGINE]);
    assert_eq!((record.form, record.max_batch_tokens, record.stand_in), (Form::EncoderLabels, 128, false));

    let (fine, said) = machine.build(&["--precision", "f16"]);
    assert!(fine && said.contains("built already"), "{said}");
    assert_eq!(machine.calls(), calls, "nothing was run");
    let (fine, said) = machine.build(&["--precision", "f16", "--again"]);
    assert!(fine && machine.calls().len() == 2 * calls.len(), "{said}");
    // A damaged engine is no engine.
    std::fs::write(place.join(ENGINE), "other").unwrap();
    let (fine, said) = machine.build(&["--precision", "f16"]);
    assert!(fine && machine.calls().len() == 3 * calls.len(), "{said}");
}

#[test]
fn a_decoder_is_built_with_a_class_that_gives_out_its_states() {
    let machine = Machine::new("llama_rerank");
    machine.tools();
    // What the class says is what was there when it was used.
    machine.tool("trtllm-build", "mkdir engine && cp tap.py engine/rank0.engine");
    let (fine, said) = machine.build(&["--precision", "fp8"]);
    assert!(fine, "{said}");
    assert!(machine.calls()[0].contains("HERE/examples/quantization/quantize.py --model_dir HERE/model"));
    assert!(machine.calls()[1].contains("--model_cls_file tap.py --model_cls_name Tapped"));
    let place = machine.place(regions::Precision::Fp8);
    assert!(std::fs::read_to_string(place.join(ENGINE)).unwrap().contains("self.lm_head.forward = tapped"));
}

#[test]
fn tools_that_fail_leave_no_engine_and_tools_that_are_missing_are_named() {
    let machine = Machine::new("bert");
    let place = machine.place(regions::Precision::Bf16);
    let refused = |arguments: &[&str], sentence: &str| {
        let (fine, said) = machine.build(arguments);
        assert!(!fine && said.contains(sentence) && is_empty(&place), "{said}");
    };
    refused(&["--precision", "bf16"], "`trtllm-build` is not on PATH: run this in the vendor's container");
    refused(&["--precision", "int8"], "--precision int8: tensorrt-llm has f32, f16, bf16, fp8");
    refused(&["--precision", "fp8"], "no fp8 for encoders");
    refused(&["--precision", "bf16", "--engine", "cpu"], "--engine cpu");
    machine.tools();
    machine.tool("trtllm-build", "exit 3");
    refused(&["--precision", "bf16"], "the vendor's tools failed");
    machine.tool("trtllm-build", "mkdir engine");
    refused(&["--precision", "bf16"], "left no rank0.engine");
    machine.tools();
    machine.tool("nvidia-smi", "");
    refused(&["--precision", "bf16"], "did not say what `gpu`");
}

#[test]
fn a_dry_run_shows_what_would_be_run_here_or_in_a_container() {
    let machine = Machine::new("bert");
    let (fine, said) = machine.build(&["--precision", "bf16", "--dry-run"]);
    assert!(fine && said.contains("--model BertModel --model_dir HERE/model"), "{said}");
    let contained = ["--precision", "bf16", "--container", "vendor/release:1.2.1"];
    let (fine, said) = machine.build(&[&contained[..], &["--dry-run"]].concat());
    assert!(fine && said.contains("/app/tensorrt_llm/examples/models/core/bert"), "{said}");
    assert!(said.contains("docker run --rm --gpus all") && said.contains("HERE/model:/model:ro"), "{said}");
    assert!(machine.calls().is_empty() && is_empty(&machine.at("cache").join("engines")), "{said}");

    machine.tool("docker", "exit 0");
    let (fine, said) = machine.build(&contained);
    assert!(!fine && said.contains("did not say what"), "a container that does nothing: {said}");
    assert!(machine.calls()[0].ends_with("vendor/release:1.2.1 sh /build/build.sh"), "{:?}", machine.calls());
}
