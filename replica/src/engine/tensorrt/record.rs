//! What stands beside an engine: for which model, precision, GPU and libraries it was built, and what its files are.
//!
//! ```text
//! <root>/engines/<digest of the model>/tensorrt-llm-<precision>/engine.json    the record
//! <root>/engines/<digest of the model>/tensorrt-llm-<precision>/rank0.engine   and what it describes
//! ```
//!
//! Everything is compared for equality: TensorRT promises nothing between versions, and the name of a GPU decides which
//! kernels were measured and chosen.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use replica_core::Precision;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::here::Here;

/// The name of the record.
pub const FILE: &str = "engine.json";
/// The engine itself: of rank 0, and there is no other.
pub const ENGINE: &str = "rank0.engine";

/// Where the engine of a model is.
pub fn folder(root: &Path, digest: &str, precision: Precision) -> PathBuf {
    root.join("engines").join(digest).join(format!("tensorrt-llm-{precision}"))
}

/// What an engine answers with, and which runtime runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// Plain TensorRT, packed: a row for each token.
    EncoderStates,
    /// Plain TensorRT, packed: a row of logits for each sequence.
    EncoderLabels,
    /// The executor: the last token's row, from the output that was tapped.
    DecoderPooled,
    /// The executor: a row for each token, from the output that was tapped.
    DecoderStates,
}

/// What was built, for what, and how large its batches may be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordV1 {
    /// 1.
    pub version: u32,
    /// The digest of the model.
    pub model: String,
    /// The number format, by its name.
    pub precision: String,
    /// GPUs that it was cut over.
    pub tensor_parallel: u32,
    /// What it answers with.
    pub form: Form,
    /// The name of the output that was tapped; empty of an encoder.
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
    /// Whether it is an engine of the stand-in, which computes nothing that means anything.
    pub stand_in: bool,
    /// SHA-256 of the files, by name.
    pub files: BTreeMap<String, String>,
}

/// Why an engine is not run.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// There is none.
    #[error(
        "there is no engine at {}: build one on this kind of GPU with `meridian model build --engine tensorrt-llm` \
         (docs/gpu.md)", folder.display()
    )]
    Missing {
        /// Where it would be.
        folder: PathBuf,
    },
    /// A file cannot be read.
    #[error("{} cannot be read: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the disk said.
        reason: io::Error,
    },
    /// The record is none.
    #[error("{}: {problem}; build the engine again", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// It was built for something else.
    #[error(
        "the engine at {} was built for the {what} {built}, and here is {here}: build one here, with `meridian model build \
         --engine tensorrt-llm`", folder.display()
    )]
    Other {
        /// Where it is.
        folder: PathBuf,
        /// What differs.
        what: &'static str,
        /// What it was built for.
        built: String,
        /// What there is instead.
        here: String,
    },
    /// The stand-in for the library, or the library for the stand-in.
    #[error(
        "the engine at {} is {}: they do not run each other's engines", folder.display(),
        if *engine { "one of the stand-in for TensorRT, and this program has TensorRT itself" }
        else { "one of TensorRT, and this program has our stand-in for it" }
    )]
    StandIn {
        /// Where it is.
        folder: PathBuf,
        /// Whether the engine is the stand-in's.
        engine: bool,
    },
}

impl RecordV1 {
    /// The record in this folder.
    pub fn read(folder: &Path) -> Result<RecordV1, Unfit> {
        let path = folder.join(FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Unfit::Missing { folder: folder.to_owned() });
            }
            Err(reason) => return Err(Unfit::Read { path, reason }),
        };
        let record: RecordV1 = serde_json::from_slice(&text)
            .map_err(|error| Unfit::Content { path: path.clone(), problem: error.to_string() })?;
        let problem = match &record {
            RecordV1 { version, .. } if *version != 1 => {
                format!("`version` is {version}, and 1 is read here")
            }
            RecordV1 { files, .. } if !files.contains_key(ENGINE) => format!("`files` has no {ENGINE}"),
            RecordV1 { max_batch_size: 0, .. }
            | RecordV1 { max_batch_tokens: 0, .. }
            | RecordV1 { max_tokens: 0, .. } => "a limit is 0".to_owned(),
            record if record.max_tokens > record.max_batch_tokens => {
                "`max_tokens` is more than `max_batch_tokens`, so that the longest sequence is in no batch"
                    .to_owned()
            }
            _ => return Ok(record),
        };
        Err(Unfit::Content { path, problem })
    }

    /// Whether it was built for this model and precision, and for what is here.
    pub fn check(&self, folder: &Path, digest: &str, precision: Precision, here: &Here) -> Result<(), Unfit> {
        let RecordV1 { model, gpu, tensorrt, tensorrt_llm, stand_in, tensor_parallel, .. } = self;
        if *stand_in != here.stand_in {
            return Err(Unfit::StandIn { folder: folder.to_owned(), engine: *stand_in });
        }
        let gpus = if here.gpus.is_empty() { "none".to_owned() } else { here.gpus.join(", ") };
        let known_gpu = here.gpus.contains(gpu);
        let differs = |what, built: &str, here: &str| {
            let (built, here) = (built.to_owned(), here.to_owned());
            Err(Unfit::Other { folder: folder.to_owned(), what, built, here })
        };
        if model != digest {
            return differs("model", model, digest);
        }
        if self.precision != precision.as_str() {
            return differs("precision", &self.precision, precision.as_str());
        }
        if *tensor_parallel != 1 {
            return differs("number of GPUs", &tensor_parallel.to_string(), "one process, which has 1");
        }
        if !known_gpu {
            return differs("GPU", gpu, &gpus);
        }
        if *tensorrt != here.tensorrt {
            return differs("TensorRT", tensorrt, &here.tensorrt);
        }
        if *tensorrt_llm != here.tensorrt_llm {
            return differs("TensorRT-LLM", tensorrt_llm, &here.tensorrt_llm);
        }
        Ok(())
    }

    /// Whether its files are those that were written.
    pub fn check_files(&self, folder: &Path) -> Result<(), Unfit> {
        for (name, wanted) in &self.files {
            let path = folder.join(name);
            let found = digest(&path).map_err(|reason| Unfit::Read { path: path.clone(), reason })?;
            if found != *wanted {
                let problem =
                    format!("it is not the file that was built (SHA-256 {found}, and {FILE} has {wanted})");
                return Err(Unfit::Content { path, problem });
            }
        }
        Ok(())
    }
}

/// SHA-256 of a file, which may be gigabytes.
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
