//! Engines that NVIDIA's tools built: found beside the model, checked, and run on a GPU by the bridge in `trtllm`.
//!
//! A replica never builds one. `meridian model build` does, ahead of time, into the model cache under the digest of the model,
//! and writes a [`record::RecordV1`] beside it: for which model, precision, GPU and libraries it is. An engine that was built for anything
//! else than what is here is refused with a sentence; run all the same it would crash or, worse, answer.
//!
//! Without the feature `tensorrt-llm` (or its stand-in's) nothing of NVIDIA's is compiled in, and a replica that is told to be
//! of this kind says so and ends.

pub mod build;
pub mod here;
pub mod record;
#[cfg(feature = "tensorrt")]
mod run;

use std::path::Path;
use std::sync::Arc;

use replica_core::Precision;

use super::Engine;
use crate::model::ModelDir;

pub use self::record::{Form, RecordV1, Unfit};

/// Why there is no engine.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// This program has no such engine in it.
    #[error(
        "this program was built without the engine `tensorrt-llm`: build it with `--features tensorrt-llm` on a machine that \
         has TensorRT-LLM (docs/gpu.md), or write `kind = \"cpu\"`"
    )]
    NotBuiltIn,
    /// There is no engine, or one for something else.
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// The engine and the model's folder contradict each other.
    #[error("the engine does not fit the model: {0}")]
    Model(String),
    /// The library said no.
    #[error("{0}")]
    Library(String),
}

/// Opens the engine of the model with this digest, whose other files `model` is.
#[cfg(not(feature = "tensorrt"))]
pub fn open(_: &Path, _: &str, _: Precision, _: &ModelDir) -> Result<Arc<dyn Engine>, OpenError> {
    Err(OpenError::NotBuiltIn)
}

/// Opens the engine of the model with this digest, whose other files `model` is.
#[cfg(feature = "tensorrt")]
pub fn open(
    root: &Path,
    digest: &str,
    precision: Precision,
    model: &ModelDir,
) -> Result<Arc<dyn Engine>, OpenError> {
    let folder = record::folder(root, digest, precision);
    let record = RecordV1::read(&folder)?;
    record.check(&folder, digest, precision, &here())?;
    record.check_files(&folder)?;
    Ok(Arc::new(run::TensorrtEngine::open(&folder, &record, precision, model)?))
}

/// What this machine and this program have.
#[cfg(feature = "tensorrt")]
pub fn here() -> here::Here {
    let trtllm::Versions { tensorrt_llm, tensorrt, double } = trtllm::versions();
    let gpus =
        if double { vec![here::STAND_IN.to_owned()] } else { here::gpus(std::path::Path::new(here::DRIVER)) };
    here::Here { gpus, tensorrt, tensorrt_llm, stand_in: double }
}
