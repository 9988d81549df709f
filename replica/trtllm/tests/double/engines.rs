//! Engines of the test double and their expected results: a second implementation of `double/src/plan.h` and its
//! neighbours.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use trtllm::{
    Decoder, DecoderConfig, Encoder, EncoderConfig, EngineRows, ExecutorError, OutputTensor, PackedBatch,
    Pending, Positions,
};

/// Timeout; longer than any operation takes.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Temporary directory with an engine.
pub(crate) struct Engine {
    folder: tempfile::TempDir,
}

/// Sizes of the test decoders.
pub(crate) const HIDDEN: u64 = 8;
pub(crate) const VOCABULARY: u32 = 32;
pub(crate) const LONGEST: u32 = 64;

impl Engine {
    /// Creates an engine with these lines besides the usual sizes.
    pub(crate) fn new(lines: &str) -> Engine {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("rank0.engine"), format!("stand-in 1\n{lines}\n")).expect("a file");
        Engine { folder }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Releases the held requests.
    pub(crate) fn release(&self) {
        std::fs::write(self.path().join("release"), "").expect("a file");
    }

    pub(crate) fn config(&self, output: OutputTensor) -> DecoderConfig {
        DecoderConfig {
            directory: self.path().to_owned(),
            output,
            max_batch_size: 16,
            max_batch_tokens: 512,
            max_tokens: LONGEST,
            vocabulary: VOCABULARY,
            cache_fraction: 0.5,
        }
    }

    pub(crate) fn decoder(&self) -> Decoder {
        Decoder::open(&self.config(pooled())).expect("an engine of the test double")
    }

    pub(crate) fn encoder(&self) -> Encoder {
        Encoder::open(&EncoderConfig { engine: self.engine() }).expect("an engine of the test double")
    }

    pub(crate) fn engine(&self) -> PathBuf {
        self.path().join("rank0.engine")
    }
}

pub(crate) fn pooled() -> OutputTensor {
    OutputTensor::Pooled("pooled".to_owned())
}

/// Returns the result, or fails the test after a timeout.
#[track_caller]
pub(crate) fn outcome(pending: Pending) -> Result<EngineRows, ExecutorError> {
    pending.wait_until(Instant::now() + TIMEOUT).expect("every request ends")
}

/// Waits until the condition is true.
#[track_caller]
pub(crate) fn wait_until(description: &str, mut so: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !so() {
        assert!(Instant::now() < end, "{description}");
        std::thread::yield_now();
    }
}

fn mixed(a: u64, b: u64) -> f32 {
    ((a * 31 + b * 7) % 251) as f32
}

/// Returns the expected output of a decoder for each token.
pub(crate) fn decoded(tokens: &[u32], width: u64, salt: u64) -> Vec<Vec<f32>> {
    let mut state = salt;
    let rows = tokens.iter().map(|token| {
        state = (state * 33 + u64::from(*token) + 1) % 1_000_003;
        (0..width).map(|column| mixed(state, column)).collect()
    });
    rows.collect()
}

/// Returns the expected state of the last token.
pub(crate) fn pooled_of(tokens: &[u32]) -> EngineRows {
    let numbers = decoded(tokens, HIDDEN, 3).pop().expect("a token");
    EngineRows { width: HIDDEN as usize, numbers }
}

/// Returns the expected output of an encoder for each token, and for the sequence.
pub(crate) fn encoded(tokens: &[u32], types: &[u32], first: u32, width: u64) -> (Vec<f32>, Vec<f32>) {
    let states: Vec<u64> = tokens
        .iter()
        .zip(types)
        .zip(first..)
        .map(|((token, kind), position)| {
            u64::from(*token) * 13 + u64::from(*kind) * 101 + u64::from(position) * 17
        })
        .collect();
    let sum: u64 = states.iter().sum();
    let row = |state: u64| (0..width).map(move |column| mixed(state, column));
    (states.iter().flat_map(|state| row(sum + state)).collect(), row(sum).collect())
}

/// Packs a batch of sequences without types.
pub(crate) fn packed(sequences: &[&[u32]], positions: Positions) -> PackedBatch {
    let mut packed = PackedBatch::default();
    for sequence in sequences {
        packed.push(sequence, None, positions).expect("a sequence");
    }
    packed
}
