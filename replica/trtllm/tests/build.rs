//! Tests of the error messages for missing or unsupported files of the vendor.

#[path = "../build/find.rs"]
mod find;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use find::{Machine, find};

/// In-memory machine: files with their content.
#[derive(Default)]
struct InMemoryMachine {
    variables: BTreeMap<String, String>,
    files: BTreeMap<PathBuf, String>,
}

impl Machine for InMemoryMachine {
    fn variable(&self, name: &str) -> Option<String> {
        self.variables.get(name).cloned()
    }

    fn exists(&self, path: &Path) -> bool {
        self.files.keys().any(|file| file.starts_with(path))
    }

    fn folders(&self, path: &Path, prefix: &str) -> Vec<PathBuf> {
        let below = self.files.keys().filter_map(|file| file.strip_prefix(path).ok()?.components().next());
        let named =
            below.map(|name| name.as_os_str()).filter(|name| name.to_string_lossy().starts_with(prefix));
        let mut folders: Vec<PathBuf> = named.map(|name| path.join(name)).collect();
        folders.dedup();
        folders
    }

    fn text(&self, path: &Path) -> Option<String> {
        self.files.get(path).cloned()
    }

    fn contains(&self, path: &Path, bytes: &[u8]) -> bool {
        self.text(path).is_some_and(|text| text.as_bytes().windows(bytes.len()).any(|part| part == bytes))
    }
}

impl InMemoryMachine {
    fn with(mut self, path: &str, content: &str) -> InMemoryMachine {
        self.files.insert(path.into(), content.to_owned());
        self
    }

    /// Adds the executor of this version, below this directory.
    fn executor(self, root: &str, version: &str) -> InMemoryMachine {
        let headers = format!("{root}/include/tensorrt_llm/executor");
        // The vendor's header has a licence with quoted words above it.
        let version = format!("// under the \"License\"\nconstexpr kTensorRtLlmVersion = \"{version}\";");
        self.with(&format!("{headers}/executor.h"), "class Executor\n{")
            .with(&format!("{headers}/version.h"), &version)
    }

    fn tensorrt(self, root: &str, major: u32) -> InMemoryMachine {
        self.with(&format!("{root}/include/NvInferRuntime.h"), "").with(
            &format!("{root}/include/NvInferVersion.h"),
            &format!(
                "#define TRT_MAJOR_ENTERPRISE {major}\n#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE //!< x"
            ),
        )
    }

    /// Returns the layout of the vendor's container.
    fn container(version: &str, tensorrt: u32, symbol: &str) -> InMemoryMachine {
        InMemoryMachine::default()
            .executor("/app/tensorrt_llm", version)
            .with("/app/tensorrt_llm/lib/libtensorrt_llm.so", symbol)
            .with("/app/tensorrt_llm/lib/libnvinfer_plugin_tensorrt_llm.so", "")
            .tensorrt("/usr/local/tensorrt", tensorrt)
            .with("/usr/local/tensorrt/lib/libnvinfer.so.10", "")
            .with("/usr/local/cuda/include/cuda_runtime_api.h", "")
            .with("/usr/local/cuda/lib64/libcudart.so", "")
    }
}

const NEW: &str = "_ZN12tensorrt_llm8executor8ResponseC1EmNSt7__cxx1112basic_string";
const OLD: &str = "_ZN12tensorrt_llm8executor8ResponseC1EmSsSt8optional";

#[track_caller]
fn refused(machine: &InMemoryMachine, expected_message: &[&str]) {
    let sentence = find(machine).expect_err("it is rejected");
    for part in expected_message {
        assert!(sentence.contains(part), "{sentence:?} does not contain {part:?}");
    }
    assert!(!sentence.contains('\n'), "{sentence:?} has several lines");
}

#[test]
fn the_vendors_container_has_everything() {
    let found = find(&InMemoryMachine::container("1.2.1", 10, NEW)).unwrap();
    let includes = ["/app/tensorrt_llm/include", "/usr/local/tensorrt/include", "/usr/local/cuda/include"];
    assert_eq!(found.includes, includes.map(PathBuf::from));
    assert_eq!(found.libraries[2], Path::new("/usr/local/tensorrt/lib/libnvinfer.so.10"));
}

#[test]
fn files_are_found_in_the_layout_of_pip() {
    let packages = "/venv/lib/python3.12/site-packages";
    let mut machine = InMemoryMachine::default()
        .executor(&format!("{packages}/tensorrt_llm"), "1.2.0")
        .with(&format!("{packages}/tensorrt_llm/libs/libtensorrt_llm.so"), NEW)
        .with(&format!("{packages}/tensorrt_llm/libs/libnvinfer_plugin_tensorrt_llm.so"), "")
        .with(&format!("{packages}/tensorrt_libs/libnvinfer.so.10"), "")
        .with(&format!("{packages}/nvidia/cu13/include/cuda_runtime_api.h"), "")
        .with(&format!("{packages}/nvidia/cu13/include/cccl/nv/target"), "")
        .with(&format!("{packages}/nvidia/cu13/lib/libcudart.so.13"), "");
    machine.variables.insert("VIRTUAL_ENV".to_owned(), "/venv".to_owned());
    // The wheels of TensorRT have no headers: the message names them.
    refused(&machine, &["requires TensorRT's headers, not found", "TRTLLM_ROOT"]);
    machine = machine.tensorrt("/opt/tensorrt", 10);
    machine.variables.insert("TENSORRT_ROOT".to_owned(), "/opt/tensorrt".to_owned());
    let found = find(&machine).unwrap();
    assert_eq!(found.includes.last().unwrap(), &Path::new(packages).join("nvidia/cu13/include/cccl"));
    assert_eq!(found.libraries[3], Path::new(packages).join("nvidia/cu13/lib/libcudart.so.13"));
}

#[test]
fn configured_directories_come_first() {
    let mut machine = InMemoryMachine::container("1.2.1", 10, NEW)
        .executor("/mine", "1.2.0")
        .with("/mine/lib/libtensorrt_llm.so", NEW);
    machine.variables.insert("TRTLLM_ROOT".to_owned(), "/mine".to_owned());
    let found = find(&machine).unwrap();
    assert_eq!(
        (found.includes[0].as_path(), found.libraries[0].as_path()),
        (Path::new("/mine/include"), Path::new("/mine/lib/libtensorrt_llm.so"))
    );
}

#[test]
fn unsupported_versions_are_rejected_by_name() {
    refused(
        &InMemoryMachine::container("1.0.0", 10, NEW),
        &["executor.h is of TensorRT-LLM 1.0.0", "1.1 and 1.2"],
    );
    refused(&InMemoryMachine::container("1.20.0", 10, NEW), &["1.20.0"]);
    let later = InMemoryMachine::container("1.3.0", 10, NEW)
        .with("/app/tensorrt_llm/include/tensorrt_llm/executor/executor.h", "class AdditionalModelOutput\n");
    refused(&later, &["has no class Executor", "1.2.x"]);
    for other in [9, 11] {
        let expected_message =
            [&*format!("is of TensorRT {other};"), "TensorRT-LLM 1.2 requires TensorRT 10"];
        refused(&InMemoryMachine::container("1.2.1", other, NEW), &expected_message);
    }
    refused(
        &InMemoryMachine::container("1.2.1", 10, OLD),
        &["libtensorrt_llm.so", "_GLIBCXX_USE_CXX11_ABI=0"],
    );
    refused(
        &InMemoryMachine::container("1.2.1", 10, ""),
        &["libtensorrt_llm.so", "does not export the executor"],
    );
}

#[test]
fn missing_files_are_named_with_the_searched_directories() {
    let everything = [
        "requires TensorRT-LLM's headers, TensorRT's headers, CUDA's headers, TensorRT-LLM's library",
        "TensorRT's library and CUDA's runtime, not found below /app/tensorrt_llm, /usr/local/tensorrt",
        "or build without the feature",
    ];
    refused(&InMemoryMachine::default(), &everything);
    let mut machine = InMemoryMachine::container("1.2.1", 10, NEW);
    machine.files.remove(Path::new("/usr/local/cuda/lib64/libcudart.so"));
    refused(&machine, &["requires CUDA's runtime, not found"]);
}

/// A build without the vendor's files ends with this message and not with a compiler error.
#[test]
fn a_build_with_the_feature_and_without_the_vendors_files_ends_with_one_message() {
    if Path::new("/app/tensorrt_llm").exists() || Path::new("/usr/local/tensorrt").exists() {
        return;
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args([
        "check",
        "--release",
        "--locked",
        "--offline",
        "--package",
        "trtllm",
        "--features",
        "tensorrt-llm",
    ]);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    for variable in ["TRTLLM_ROOT", "TENSORRT_ROOT", "CUDA_HOME", "VIRTUAL_ENV", "CONDA_PREFIX"] {
        cargo.env_remove(variable);
    }
    let output = cargo.output().unwrap();
    let output_text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{output_text}");
    let errors: Vec<&str> = output_text.lines().filter(|line| line.starts_with("error: trtllm")).collect();
    assert_eq!(errors.len(), 1, "{output_text}");
    assert!(errors[0].contains("feature `tensorrt-llm` requires TensorRT-LLM's headers"), "{output_text}");
}
