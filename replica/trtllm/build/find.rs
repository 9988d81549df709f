//! Locates the vendor's headers and libraries, and checks that the shim supports their versions.
//!
//! The functions use a [`Machine`], so that every layout can be tested without it. Missing files are reported in one
//! message, with the searched paths and the fix, because the feature is usually enabled on a machine that lacks one of
//! the libraries.

use std::path::{Path, PathBuf};

/// Files and variables of the machine.
pub(crate) trait Machine {
    fn variable(&self, name: &str) -> Option<String>;
    fn exists(&self, path: &Path) -> bool;
    /// Returns the subdirectories whose name begins with `prefix`.
    fn folders(&self, path: &Path, prefix: &str) -> Vec<PathBuf>;
    fn text(&self, path: &Path) -> Option<String>;
    fn contains(&self, path: &Path, bytes: &[u8]) -> bool;
}

/// Inputs of the compiler and the linker.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BuildInputs {
    pub(crate) includes: Vec<PathBuf>,
    /// Files, each with its directory: libraries from pip have a version in their name and no link without one.
    pub(crate) libraries: Vec<PathBuf>,
}

/// Release series with the C++ executor with which the shim was tested.
const SERIES: [&str; 2] = ["1.1", "1.2"];
/// Major version of TensorRT for this series. Its plugin header declares `ILogger` as a class; from 11 on it is an
/// alias, and no compiler accepts both.
const TENSORRT: u32 = 10;

/// A constructor of the executor with a string argument, mangled for the two C++ ABIs of GCC.
const NEW_ABI: &[u8] = b"8executor8ResponseC1EmNSt7__cxx11";
const OLD_ABI: &[u8] = b"8executor8ResponseC1EmSs";

/// Header or library, with its possible file names.
struct RequiredFile {
    what: &'static str,
    /// Below an include or library directory; any of them.
    names: &'static [&'static str],
}

const HEADERS: [RequiredFile; 3] = [
    RequiredFile { what: "TensorRT-LLM's headers", names: &["tensorrt_llm/executor/executor.h"] },
    RequiredFile { what: "TensorRT's headers", names: &["NvInferRuntime.h"] },
    RequiredFile { what: "CUDA's headers", names: &["cuda_runtime_api.h"] },
];

const LIBRARIES: [RequiredFile; 4] = [
    RequiredFile { what: "TensorRT-LLM's library", names: &["libtensorrt_llm.so"] },
    RequiredFile {
        what: "TensorRT-LLM's plugins",
        names: &["libnvinfer_plugin_tensorrt_llm.so", "libnvinfer_plugin_tensorrt_llm.so.10"],
    },
    RequiredFile { what: "TensorRT's library", names: &["libnvinfer.so", "libnvinfer.so.10"] },
    RequiredFile { what: "CUDA's runtime", names: &["libcudart.so", "libcudart.so.12", "libcudart.so.13"] },
];

/// Locates all files, or returns an error that lists the missing ones.
pub(crate) fn find(machine: &dyn Machine) -> Result<BuildInputs, String> {
    let roots = roots(machine);
    let below = |folders: &[&str]| -> Vec<PathBuf> {
        roots.iter().flat_map(|root| folders.iter().map(|folder| root.join(folder))).collect()
    };
    let include_folders = below(&["include", "cpp/include", "include/x86_64-linux-gnu", ""]);
    let library_folders = below(&[
        "lib",
        "libs",
        "lib64",
        "lib/x86_64-linux-gnu",
        "cpp/build/tensorrt_llm",
        "cpp/build/tensorrt_llm/plugins",
        "",
    ]);
    let first = |piece: &RequiredFile, folders: &[PathBuf]| {
        let files = folders.iter().flat_map(|folder| piece.names.iter().map(|name| folder.join(name)));
        files.into_iter().find(|file| machine.exists(file)).ok_or(piece.what)
    };
    let headers: Vec<_> = HEADERS.iter().map(|piece| first(piece, &include_folders)).collect();
    let libraries: Vec<_> = LIBRARIES.iter().map(|piece| first(piece, &library_folders)).collect();
    let missing: Vec<&str> =
        headers.iter().chain(&libraries).filter_map(|piece| piece.as_ref().err().copied()).collect();
    if !missing.is_empty() {
        let searched = roots.iter().map(|root| root.display().to_string()).collect::<Vec<_>>().join(", ");
        return Err(format!(
            "feature `tensorrt-llm` requires {}, not found below {searched}; set TRTLLM_ROOT to its directory, install the vendor's \
             container or wheels ({}.x), or build without the feature",
            list(&missing),
            SERIES[1],
        ));
    }
    let headers: Vec<PathBuf> = headers.into_iter().flatten().collect();
    let libraries: Vec<PathBuf> = libraries.into_iter().flatten().collect();
    check_executor(machine, &headers[0])?;
    check_tensorrt(machine, &headers[1])?;
    check_abi(machine, &libraries[0])?;
    let mut includes: Vec<PathBuf> = Vec::new();
    for (piece, header) in HEADERS.iter().zip(&headers) {
        let depth = Path::new(piece.names[0]).components().count();
        if let Some(folder) = header.ancestors().nth(depth).map(Path::to_owned) {
            // From release 13 on, CUDA's own headers are in one directory with those of its C++ library.
            let beside = folder.join("cccl");
            for folder in [folder, beside] {
                if machine.exists(&folder) && !includes.contains(&folder) {
                    includes.push(folder);
                }
            }
        }
    }
    Ok(BuildInputs { includes, libraries })
}

/// Returns the directories of installations, configured ones first.
fn roots(machine: &dyn Machine) -> Vec<PathBuf> {
    let named =
        ["TRTLLM_ROOT", "TENSORRT_ROOT", "CUDA_HOME"].map(|name| machine.variable(name).map(PathBuf::from));
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].map(|name| machine.variable(name).map(PathBuf::from));
    let mut roots: Vec<PathBuf> = named.into_iter().flatten().collect();
    let pythons = environments.into_iter().flatten().chain(["/usr/local", "/usr"].map(PathBuf::from));
    for lib in pythons.map(|root| root.join("lib")) {
        for python in machine.folders(&lib, "python3") {
            for packages in ["site-packages", "dist-packages"].map(|packages| python.join(packages)) {
                // The layout of pip packages.
                for package in
                    ["tensorrt_llm", "tensorrt_libs", "nvidia/cu13", "nvidia/cuda_runtime", "tensorrt"]
                {
                    let root = packages.join(package);
                    if machine.exists(&root) {
                        roots.push(root);
                    }
                }
            }
        }
    }
    roots.extend(["/app/tensorrt_llm", "/usr/local/tensorrt", "/usr/local/cuda", "/usr"].map(PathBuf::from));
    roots
}

fn check_executor(machine: &dyn Machine, header: &Path) -> Result<(), String> {
    let shown = header.display();
    if !machine
        .text(header)
        .is_some_and(|text| text.contains("class Executor\n") || text.contains("class Executor "))
    {
        return Err(format!(
            "{shown} has no class Executor: releases from 1.3 on have no C++ executor, so install TensorRT-LLM {}.x",
            SERIES[1]
        ));
    }
    let version = header.with_file_name("version.h");
    let version =
        machine.text(&version).and_then(|text| quoted(&text)).unwrap_or_else(|| "unknown".to_owned());
    let known = SERIES.iter().any(|series| version == *series || version.starts_with(&format!("{series}.")));
    known.then_some(()).ok_or_else(|| {
        format!("{shown} is of TensorRT-LLM {version}; the shim supports {}", SERIES.join(" and "))
    })
}

fn check_tensorrt(machine: &dyn Machine, header: &Path) -> Result<(), String> {
    let version = header.with_file_name("NvInferVersion.h");
    let text = machine.text(&version).unwrap_or_default();
    // The number follows the name, or an alias of it.
    let major = ["NV_TENSORRT_MAJOR", "TRT_MAJOR_ENTERPRISE"].iter().find_map(|name| defined(&text, name));
    match major {
        Some(TENSORRT) => Ok(()),
        Some(major) => Err(format!(
            "{} is of TensorRT {major}; TensorRT-LLM {} requires TensorRT {TENSORRT}",
            version.display(),
            SERIES[1]
        )),
        None => Err(format!("{} does not define the version of TensorRT", version.display())),
    }
}

/// Checks that the library's strings have the compiler's ABI: with the other one the program crashes, if it links at
/// all.
fn check_abi(machine: &dyn Machine, library: &Path) -> Result<(), String> {
    let shown = library.display();
    if machine.contains(library, NEW_ABI) {
        return Ok(());
    }
    let reason = if machine.contains(library, OLD_ABI) {
        "is built with the C++ ABI from before GCC 5 (_GLIBCXX_USE_CXX11_ABI=0)"
    } else {
        "does not export the executor"
    };
    Err(format!("{shown} {reason}; use the vendor's wheels or containers of {}.x", SERIES[1]))
}

/// Returns the string literal after the constant's name; the licence above it has quotes as well.
fn quoted(text: &str) -> Option<String> {
    let line = text.lines().find(|line| line.contains("kTensorRtLlmVersion"))?;
    line.split('"').nth(1).map(str::to_owned)
}

fn defined(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("#define") && words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

fn list(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [most @ .., last] => format!("{} and {last}", most.join(", ")),
    }
}
