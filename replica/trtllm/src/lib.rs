//! Rust interface of TensorRT-LLM's C++ executor and of TensorRT: tokens in, rows of numbers out.
//!
//! The foreign runtime has problems that this crate handles: it throws exceptions, it responds late, it fails a whole
//! batch for one request, and it must not be called from two threads at once. The interface is a [`Pending`] for each
//! sequence, which ends exactly once, with [`EngineRows`] or an [`ExecutorError`], and releases its slot when it is
//! dropped. In reading order:
//!
//! 1. [`result`]: results of requests; [`numbers`]: rows, from three number formats.
//! 2. [`decoder`]: models on the executor. Its `scheduler` decides the order of submission, and isolates failing
//!    requests.
//! 3. [`packed`]: a batch for an encoder: tokens, types and positions; [`encoder`]: models on plain TensorRT.
//! 4. `bridge`: the interface between Rust and C++, and the only unsafe code. `cpp/` is the other side.
//!
//! The steps after the last layer, pooling and label heads, are not part of this crate: a replica uses those of the CPU
//! engine.
//!
//! Without a feature the crate is empty. `tensorrt-llm` compiles `cpp/` with the vendor's headers and links the
//! vendor's libraries; `tensorrt-llm-double` compiles the same `cpp/` with `double/`, a test double, whose results a
//! test can compute. Assumptions about the vendor's side that were not tested on a GPU are listed in `docs/gpu.md`.
#![cfg(any(feature = "tensorrt-llm", feature = "tensorrt-llm-double"))]

mod bridge;
pub mod decoder;
pub mod encoder;
pub mod numbers;
pub mod packed;
pub mod result;

pub use decoder::{Decoder, DecoderConfig, OutputTensor};
pub use encoder::{Encoder, EncoderConfig};
pub use numbers::EngineRows;
pub use packed::{PackedBatch, Positions};
pub use result::{ExecutorError, Pending};

/// Versions of the libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versions {
    /// Version of TensorRT-LLM at compile time.
    pub tensorrt_llm: String,
    /// Version of the loaded TensorRT library, `major.minor.patch`.
    pub tensorrt: String,
    /// Whether both are the test double, whose results are meaningless.
    pub double: bool,
}

/// Returns the versions of the libraries.
pub fn versions() -> Versions {
    Versions {
        tensorrt_llm: bridge::executor_version(),
        tensorrt: format_version(bridge::tensorrt_version()),
        double: cfg!(feature = "tensorrt-llm-double"),
    }
}

/// Formats a version number: TensorRT encodes 10.14.1 as 101401, and 8.6.1 as 8601.
fn format_version(version: i32) -> String {
    let (major, rest) = if version >= 10_000 { (10_000, 100) } else { (1_000, 100) };
    format!("{}.{}.{}", version / major, version % major / rest, version % rest)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_version_of_tensorrt_is_formatted_with_dots() {
        assert_eq!(super::format_version(101_401), "10.14.1");
        assert_eq!(super::format_version(8_601), "8.6.1");
        assert_eq!(super::format_version(110_100), "11.1.0");
    }
}
