//! TensorRT-LLM's C++ executor and TensorRT itself, as a model server needs them: tokens in, rows of numbers out.
//!
//! A foreign runtime is a bad neighbour: it throws, it answers late, it fails a whole batch for one request, and it must not
//! be asked from two threads at once. All of that ends here. What comes out is a [`Pending`] for each sequence, which ends
//! exactly once, with [`Rows`] or an [`EngineError`], and gives its place up when it is dropped. In reading order:
//!
//! 1. [`answer`] — how a request ends; [`numbers`] — rows, out of three number formats.
//! 2. [`decoder`] — models over the executor. Its `desk` decides who goes to the executor when, and who goes alone.
//! 3. [`packed`] — a batch for an encoder: tokens, types and positions; [`encoder`] — models over plain TensorRT.
//! 4. `bridge` — what both sides of C++ agree on, and the only unsafe code. `cpp/` is the other side.
//!
//! What stands behind the last layer, pooling and label heads, is not here: a replica has the CPU engine's for both.
//!
//! Without a feature this is empty. `tensorrt-llm` compiles `cpp/` against the vendor's headers and links the vendor's
//! libraries; `tensorrt-llm-double` compiles the same `cpp/` against `double/`, our own stand-in, whose answers a test can
//! compute. What is known of the vendor's side and was not tried without a GPU is said in `docs/gpu.md`.
#![cfg(any(feature = "tensorrt-llm", feature = "tensorrt-llm-double"))]

pub mod answer;
mod bridge;
pub mod decoder;
pub mod encoder;
pub mod numbers;
pub mod packed;

pub use answer::{EngineError, Pending};
pub use decoder::{Decoder, DecoderConfig, DecoderOutput};
pub use encoder::{Encoder, EncoderConfig};
pub use numbers::Rows;
pub use packed::{Packed, Positions};

/// What this was built against and what it runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Versions {
    /// Of TensorRT-LLM, whose headers were compiled against.
    pub tensorrt_llm: String,
    /// Of the TensorRT library that is loaded, `major.minor.patch`.
    pub tensorrt: String,
    /// Whether all of it is our stand-in, which computes nothing that means anything.
    pub double: bool,
}

/// What this was built against and what it runs on.
pub fn versions() -> Versions {
    Versions {
        tensorrt_llm: bridge::executor_version(),
        tensorrt: written(bridge::tensorrt_version()),
        double: cfg!(feature = "tensorrt-llm-double"),
    }
}

/// TensorRT counts 10.14.1 as 101401, and 8.6.1 as 8601.
fn written(version: i32) -> String {
    let (major, rest) = if version >= 10_000 { (10_000, 100) } else { (1_000, 100) };
    format!("{}.{}.{}", version / major, version % major / rest, version % rest)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_version_of_tensorrt_is_written_as_people_write_it() {
        assert_eq!(super::written(101_401), "10.14.1");
        assert_eq!(super::written(8_601), "8.6.1");
        assert_eq!(super::written(110_100), "11.1.0");
    }
}
