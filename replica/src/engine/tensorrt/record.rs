//! Record of a built engine: the model, precision, GPU and libraries that it was built for, and the digests of its
//! files.
//!
//! ```text
//! <root>/engines/<digest of the model>/tensorrt-llm-<precision>/engine.json    the record
//! <root>/engines/<digest of the model>/tensorrt-llm-<precision>/rank0.engine   the engine
//! ```
//!
//! Everything is compared for equality: TensorRT engines are not compatible between versions, and the name of a GPU
//! decides which kernels were measured and selected.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use replica_core::Precision;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::environment::EngineEnvironment;

/// File name of the record.
pub const FILE: &str = "engine.json";
/// File name of the engine: rank 0, which is the only one.
pub const ENGINE: &str = "rank0.engine";

/// Returns the directory of the engine of a model.
pub fn folder(root: &Path, digest: &str, precision: Precision) -> PathBuf {
    root.join("engines").join(digest).join(format!("tensorrt-llm-{precision}"))
}

/// Output format of an engine, and the runtime that it requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// Plain TensorRT, packed: a row for each token.
    EncoderStates,
    /// Plain TensorRT, packed: a row of logits for each sequence.
    EncoderLabels,
    /// Executor: the last token's row, from the additional output.
    DecoderPooled,
    /// Executor: a row for each token, from the additional output.
    DecoderStates,
}

/// Record of a built engine, with its limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineRecordV1 {
    /// Version of the format: 1.
    pub version: u32,
    /// Digest of the model.
    pub model: String,
    /// Name of the number format.
    pub precision: String,
    /// Number of GPUs that the engine is sharded over.
    pub tensor_parallel: u32,
    /// Output format.
    pub form: Form,
    /// Name of the additional output; empty for an encoder.
    pub tensor: String,
    /// Sequences of a batch.
    pub max_batch_size: u32,
    /// Tokens of a batch.
    pub max_batch_tokens: u32,
    /// Tokens of a sequence.
    pub max_tokens: u32,
    /// The GPU.
    pub gpu: String,
    /// The version of TensorRT.
    pub tensorrt: String,
    /// The version of TensorRT-LLM.
    pub tensorrt_llm: String,
    /// Whether it is an engine of the test double, whose results are meaningless.
    pub test_double: bool,
    /// SHA-256 of the files, by name.
    pub files: BTreeMap<String, String>,
}

/// Reason why an engine is not usable.
#[derive(Debug, thiserror::Error)]
pub enum EngineMismatch {
    /// The replica is configured for TensorRT-LLM, and its model has no engine.
    #[error(
        "there is no engine at {}: build one on this kind of GPU with `meridian model build --engine tensorrt-llm` \
         (docs/gpu.md)", folder.display()
    )]
    Missing {
        /// Expected directory.
        folder: PathBuf,
    },
    /// A file of the model or its engine is missing or cannot be read.
    #[error("{} cannot be read: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        reason: io::Error,
    },
    /// The description of the engine is invalid: another version wrote it, or it was changed.
    #[error("{}: {problem}; build the engine again", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Problem of the content.
        problem: String,
    },
    /// The engine was built for another GPU or another version of TensorRT.
    #[error(
        "the engine at {} was built for the {what} {built}, and this machine has {environment}: build one here, with `meridian model build \
         --engine tensorrt-llm`", folder.display()
    )]
    Other {
        /// Directory.
        folder: PathBuf,
        /// Property that differs.
        what: &'static str,
        /// Value of the engine.
        built: String,
        /// Value of this machine.
        environment: String,
    },
    /// The engine was built for TensorRT and this program has its test double, or vice versa.
    #[error(
        "the engine at {} is {}: their engines are not compatible", folder.display(),
        if *engine { "one of the test double of TensorRT, and this program has TensorRT itself" }
        else { "one of TensorRT, and this program has its test double" }
    )]
    TestDouble {
        /// Directory.
        folder: PathBuf,
        /// Whether the engine is of the test double.
        engine: bool,
    },
}

impl EngineRecordV1 {
    /// Reads the record in this directory.
    pub fn read(folder: &Path) -> Result<EngineRecordV1, EngineMismatch> {
        let path = folder.join(FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(EngineMismatch::Missing { folder: folder.to_owned() });
            }
            Err(reason) => return Err(EngineMismatch::Read { path, reason }),
        };
        let record: EngineRecordV1 = serde_json::from_slice(&text)
            .map_err(|error| EngineMismatch::Content { path: path.clone(), problem: error.to_string() })?;
        let problem = match &record {
            EngineRecordV1 { version, .. } if *version != 1 => {
                format!("`version` is {version}; supported is 1")
            }
            EngineRecordV1 { files, .. } if !files.contains_key(ENGINE) => format!("`files` has no {ENGINE}"),
            EngineRecordV1 { max_batch_size: 0, .. }
            | EngineRecordV1 { max_batch_tokens: 0, .. }
            | EngineRecordV1 { max_tokens: 0, .. } => "a limit is 0".to_owned(),
            record if record.max_tokens > record.max_batch_tokens => {
                "`max_tokens` exceeds `max_batch_tokens`, so that the longest sequence fits no batch"
                    .to_owned()
            }
            _ => return Ok(record),
        };
        Err(EngineMismatch::Content { path, problem })
    }

    /// Checks that the engine was built for this model and precision, and for this environment.
    pub fn check(
        &self,
        folder: &Path,
        digest: &str,
        precision: Precision,
        environment: &EngineEnvironment,
    ) -> Result<(), EngineMismatch> {
        let EngineRecordV1 { model, gpu, tensorrt, tensorrt_llm, test_double, tensor_parallel, .. } = self;
        if *test_double != environment.test_double {
            return Err(EngineMismatch::TestDouble { folder: folder.to_owned(), engine: *test_double });
        }
        let gpus = if environment.gpus.is_empty() { "none".to_owned() } else { environment.gpus.join(", ") };
        let known_gpu = environment.gpus.contains(gpu);
        let differs = |what, built: &str, environment: &str| {
            let (built, environment) = (built.to_owned(), environment.to_owned());
            Err(EngineMismatch::Other { folder: folder.to_owned(), what, built, environment })
        };
        if model != digest {
            return differs("model", model, digest);
        }
        if self.precision != precision.as_str() {
            return differs("precision", &self.precision, precision.as_str());
        }
        if *tensor_parallel != 1 {
            return differs("number of GPUs", &tensor_parallel.to_string(), "one process with 1");
        }
        if !known_gpu {
            return differs("GPU", gpu, &gpus);
        }
        if *tensorrt != environment.tensorrt {
            return differs("TensorRT", tensorrt, &environment.tensorrt);
        }
        if *tensorrt_llm != environment.tensorrt_llm {
            return differs("TensorRT-LLM", tensorrt_llm, &environment.tensorrt_llm);
        }
        Ok(())
    }

    /// Checks the digests of its files.
    pub fn check_files(&self, folder: &Path) -> Result<(), EngineMismatch> {
        for (name, expected) in &self.files {
            let path = folder.join(name);
            let found =
                digest(&path).map_err(|reason| EngineMismatch::Read { path: path.clone(), reason })?;
            if found != *expected {
                let problem = format!(
                    "the file differs from the one that was built (SHA-256 {found}, {FILE} has {expected})"
                );
                return Err(EngineMismatch::Content { path, problem });
            }
        }
        Ok(())
    }
}

/// Returns the SHA-256 of a file, which may have gigabytes.
pub fn digest(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let (mut hasher, mut piece) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut piece)? {
            0 => break,
            read => hasher.update(&piece[..read]),
        }
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests;
