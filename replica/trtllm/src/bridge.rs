//! Interface between Rust and C++. cxx generates both sides from this file and checks that they match.
//!
//! The only unsafe code of the crate is here: the declarations of the C++ functions, and the assertion that their
//! objects may be used from several threads.
#![expect(unsafe_code, reason = "declares foreign functions and the thread safety of their objects")]
#![expect(unreachable_pub, reason = "cxx generates `pub` items")]

pub(crate) use ffi::{
    Decoder, DecoderOutput, DecoderSettings, Encoder, EncoderInput, EncoderLimits, ResponseBatch,
    executor_version, open_decoder, open_encoder, tensorrt_version,
};

// Safety of the block `extern "C++"`: these functions may be called with any arguments of these types. They are
// noexcept and catch all exceptions (`cpp/guard.h`); slices that they receive are read only during the call; slices
// that they return point into the object of the method, as their elided lifetime states. `index` is checked by the
// callers: `decoder::collect` counts to `size`.
#[cxx::bridge(namespace = "meridian::trtllm")]
mod ffi {
    /// Output tensor of a decoder.
    #[derive(Debug)]
    #[repr(u8)]
    enum DecoderOutput {
        /// An additional output with one row for each sequence.
        Pooled,
        /// An additional output with one row for each token.
        States,
        /// One row for each token, as wide as the vocabulary.
        ContextLogits,
        /// One row, as wide as the vocabulary.
        GenerationLogits,
    }

    struct DecoderSettings {
        directory: String,
        output: DecoderOutput,
        /// Name of an additional output.
        tensor: String,
        max_batch_size: u32,
        max_batch_tokens: u32,
        max_queue: u32,
        cache_tokens: u32,
        cache_fraction: f32,
    }

    /// Error message; empty on success.
    struct Outcome {
        failure: Vec<u8>,
    }

    struct Submitted {
        id: u64,
        failure: Vec<u8>,
    }

    struct Statistics {
        iterations: u64,
        busy_ms: f64,
        completed: u64,
        active: u64,
        queued: u64,
        gpu_bytes: u64,
        failure: Vec<u8>,
    }

    struct EncoderInput<'a> {
        tokens: &'a [i32],
        types: &'a [i32],
        positions: &'a [i32],
        lengths: &'a [i32],
        longest: usize,
    }

    /// 0 if unknown.
    struct EncoderLimits {
        tokens: usize,
        sequences: usize,
        longest: usize,
    }

    unsafe extern "C++" {
        include!("trtllm/cpp/shim.h");

        type Decoder;
        fn open_decoder(settings: &DecoderSettings) -> UniquePtr<Decoder>;
        fn failure(self: &Decoder) -> &[u8];
        fn submit(self: &Decoder, tag: u64, tokens: &[i32]) -> Submitted;
        fn cancel(self: &Decoder, id: u64) -> Outcome;
        fn poll(self: &Decoder, timeout_ms: u32) -> UniquePtr<ResponseBatch>;
        fn statistics(self: &Decoder) -> Statistics;
        fn shutdown(self: &Decoder) -> Outcome;

        type ResponseBatch;
        fn failure(self: &ResponseBatch) -> &[u8];
        fn size(self: &ResponseBatch) -> usize;
        fn tag(self: &ResponseBatch, index: usize) -> u64;
        fn kind(self: &ResponseBatch, index: usize) -> u8;
        fn message(self: &ResponseBatch, index: usize) -> &[u8];
        fn format(self: &ResponseBatch, index: usize) -> u8;
        fn rows(self: &ResponseBatch, index: usize) -> usize;
        fn width(self: &ResponseBatch, index: usize) -> usize;
        fn data(self: &ResponseBatch, index: usize) -> &[u8];

        type Encoder;
        fn open_encoder(path: &str) -> UniquePtr<Encoder>;
        fn failure(self: &Encoder) -> &[u8];
        fn limits(self: &Encoder) -> EncoderLimits;
        fn run(self: &Encoder, input: &EncoderInput<'_>) -> UniquePtr<EncoderRows>;

        type EncoderRows;
        fn failure(self: &EncoderRows) -> &[u8];
        fn format(self: &EncoderRows) -> u8;
        fn rows(self: &EncoderRows) -> usize;
        fn width(self: &EncoderRows) -> usize;
        fn data(self: &EncoderRows) -> &[u8];

        fn executor_version() -> String;
        fn tensorrt_version() -> i32;
    }
}

// SAFETY: a decoder is not bound to a thread; any thread may destroy the executor.
unsafe impl Send for Decoder {}
// SAFETY: `submit` holds the shim's own mutex, since the executor's enqueueing is not thread-safe; `cancel`,
// `statistics` and `poll` each take a mutex of the executor; `shutdown` is called once, after the polling thread has
// been joined (`decoder::Decoder::shutdown`).
unsafe impl Sync for Decoder {}
// SAFETY: an encoder is not bound to a thread; CUDA's current device is the same in all threads, since it is never
// changed. It is not `Sync`: one thread at a time may run it.
unsafe impl Send for Encoder {}

/// Returns the error message, if there is one. Messages of the vendor need not be UTF-8.
pub(crate) fn failure(bytes: &[u8]) -> Option<String> {
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(bytes).into_owned())
}
