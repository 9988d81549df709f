//! Arguments of the compiler and the linker.

use std::path::PathBuf;

/// If this variable is set, the C++ side is compiled with AddressSanitizer and UBSan: `scripts/sanitize`.
const SANITIZE: &str = "TRTLLM_SANITIZE";

const SHIM: [&str; 4] = ["cpp/response_batch.cc", "cpp/decoder.cc", "cpp/encoder.cc", "cpp/plugins.cc"];

pub(crate) fn compile() {
    for path in ["cpp", "double", "build", "src/bridge.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
    for variable in [SANITIZE, "TRTLLM_ROOT", "TENSORRT_ROOT", "CUDA_HOME", "VIRTUAL_ENV", "CONDA_PREFIX"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let (includes, sources) = match sources() {
        Ok(sources) => sources,
        Err(sentence) => {
            println!("cargo::error={sentence}");
            return;
        }
    };
    let mut build = cxx_build::bridge("src/bridge.rs");
    build.std("c++17").flag("-pthread").files(SHIM).files(sources).include("cpp").include("double/src");
    for include in includes {
        // As system headers, so that warnings are about our own code only.
        build.flag("-isystem").flag(include.display().to_string());
    }
    if std::env::var_os(SANITIZE).is_some() {
        build
            .flag("-fsanitize=address,undefined")
            .flag("-fno-sanitize-recover=all")
            .flag("-fno-omit-frame-pointer");
        // rustc links, and its stable channel does not support sanitizers; so they are named, and preloaded at run
        // time.
        for argument in ["-Wl,--no-as-needed", "-lasan", "-lubsan"] {
            println!("cargo::rustc-link-arg={argument}");
        }
    }
    build.compile("trtllm_shim");
}

#[cfg(all(feature = "tensorrt-llm-double", not(feature = "tensorrt-llm")))]
const DOUBLE: [&str; 5] = [
    "double/src/responses.cc",
    "double/src/executor.cc",
    "double/src/tensorrt.cc",
    "double/src/signatures.cc",
    "double/src/signatures_tensorrt.cc",
];

/// Include directories, and sources that are compiled together with the shim.
type Sources = (Vec<PathBuf>, Vec<&'static str>);

#[cfg(all(feature = "tensorrt-llm", feature = "tensorrt-llm-double"))]
fn sources() -> Result<Sources, String> {
    Err("features `tensorrt-llm` and `tensorrt-llm-double` exclude each other: the second is a test double of the first".to_owned())
}

#[cfg(all(feature = "tensorrt-llm-double", not(feature = "tensorrt-llm")))]
fn sources() -> Result<Sources, String> {
    Ok((vec!["double/include".into()], DOUBLE.to_vec()))
}

#[cfg(all(feature = "tensorrt-llm", not(feature = "tensorrt-llm-double")))]
fn sources() -> Result<Sources, String> {
    let found = crate::find::find(&ThisMachine)?;
    for library in found.libraries {
        if let (Some(folder), Some(name)) = (library.parent(), library.file_name()) {
            println!("cargo::rustc-link-search=native={}", folder.display());
            println!("cargo::rustc-link-lib=dylib:+verbatim={}", name.to_string_lossy());
            // For the library's own dependencies.
            println!("cargo::rustc-link-arg=-Wl,-rpath-link,{}", folder.display());
        }
    }
    Ok((found.includes, Vec::new()))
}

#[cfg(all(feature = "tensorrt-llm", not(feature = "tensorrt-llm-double")))]
struct ThisMachine;

#[cfg(all(feature = "tensorrt-llm", not(feature = "tensorrt-llm-double")))]
impl crate::find::Machine for ThisMachine {
    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    fn exists(&self, path: &std::path::Path) -> bool {
        path.exists()
    }

    fn folders(&self, path: &std::path::Path, prefix: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
        let mut folders: Vec<PathBuf> = named.map(|entry| entry.path()).collect();
        folders.sort();
        folders
    }

    fn text(&self, path: &std::path::Path) -> Option<String> {
        std::fs::read_to_string(path).ok()
    }

    fn contains(&self, path: &std::path::Path, bytes: &[u8]) -> bool {
        use std::io::Read;
        // Libraries of gigabytes are read in blocks, each with the end of the previous one.
        let Ok(mut file) = std::fs::File::open(path) else { return false };
        let mut window: Vec<u8> = Vec::new();
        let mut piece = vec![0; 1 << 20];
        while let Ok(read @ 1..) = file.read(&mut piece) {
            window.extend_from_slice(&piece[..read]);
            if window.windows(bytes.len()).any(|part| part == bytes) {
                return true;
            }
            let keep = window.len().saturating_sub(bytes.len());
            window.drain(..keep);
        }
        false
    }
}
