//! Engines that were built with NVIDIA's tools: loaded from the model cache, checked, and run on a GPU through
//! `trtllm`.
//!
//! A replica never builds one. `meridian model build` does, ahead of time, into the model cache under the digest of the
//! model, and writes a [`record::EngineRecordV1`] beside it: the model, precision, GPU and libraries that it was built for.
//! An engine that was built for a different environment is rejected with an error; running it could crash or, worse,
//! return wrong results.
//!
//! Without the feature `tensorrt-llm` (or that of its test double) no NVIDIA code is compiled in, and a replica that is
//! configured with this engine exits with an error.

pub mod build;
pub mod environment;
pub mod record;
#[cfg(feature = "tensorrt")]
mod run;

use std::path::Path;
use std::sync::Arc;

use replica_core::Precision;

use super::Engine;
use crate::model::ModelDir;

pub use self::record::{EngineMismatch, EngineRecordV1, Form};

/// Whether this program was compiled with the engine.
pub const IS_BUILT_IN: bool = cfg!(feature = "tensorrt");

/// Errors of [`open`].
#[derive(Debug, thiserror::Error)]
pub enum TensorrtOpenError {
    /// The program was compiled without the TensorRT-LLM engine.
    #[error(
        "this program was built without the engine `tensorrt-llm`: build it with `--features tensorrt-llm` on a machine that \
         has TensorRT-LLM (docs/gpu.md), or write `kind = \"cpu\"`"
    )]
    NotBuiltIn,
    /// The engine does not exist, or was built for another environment.
    #[error(transparent)]
    EngineMismatch(#[from] EngineMismatch),
    /// The engine and the directory of the model are inconsistent; the text has the cause. Build the engine again.
    #[error("the engine does not match the model: {0}")]
    Model(String),
    /// Error of the library.
    #[error("{0}")]
    Library(String),
}

/// Opens the engine of the model with this digest; `model` contains its other files.
#[cfg(not(feature = "tensorrt"))]
pub fn open(_: &Path, _: &str, _: Precision, _: &ModelDir) -> Result<Arc<dyn Engine>, TensorrtOpenError> {
    Err(TensorrtOpenError::NotBuiltIn)
}

/// Opens the engine of the model with this digest; `model` contains its other files.
#[cfg(feature = "tensorrt")]
pub fn open(
    root: &Path,
    digest: &str,
    precision: Precision,
    model: &ModelDir,
) -> Result<Arc<dyn Engine>, TensorrtOpenError> {
    let folder = record::folder(root, digest, precision);
    let record = EngineRecordV1::read(&folder)?;
    record.check(&folder, digest, precision, &environment())?;
    record.check_files(&folder)?;
    Ok(Arc::new(run::TensorrtEngine::open(&folder, &record, precision, model)?))
}

/// Returns the GPUs and libraries of this machine and this program.
#[cfg(feature = "tensorrt")]
pub fn environment() -> environment::EngineEnvironment {
    let trtllm::Versions { tensorrt_llm, tensorrt, double } = trtllm::versions();
    let gpus = if double {
        vec![environment::TEST_DOUBLE.to_owned()]
    } else {
        environment::gpus(std::path::Path::new(environment::DRIVER))
    };
    environment::EngineEnvironment { gpus, tensorrt, tensorrt_llm, test_double: double }
}
