//! Engines: they compute rows of numbers from ragged batches.
//!
//! [`Engine`] is the interface between the model server and the code that computes. It is deliberately narrow: a batch
//! is token ids and offsets, the result is rows of numbers in the same order, and the properties that the server needs
//! are in the [`Description`]. The server calls an engine from [`Engine::batches_ahead`] threads, one for most engines;
//! an engine uses its configured number of its own threads.
//!
//! 1. [`batch`]: input of an engine; `check`: its validation.
//! 2. [`cpu`]: the native engine for CPUs.
//! 3. [`tensorrt`]: engines that NVIDIA's tools built for a GPU, if the feature is enabled.

pub mod batch;
mod check;
pub mod cpu;
pub mod tensorrt;

use replica_core::{EngineSpec, Task};

pub use batch::{BatchBuffer, MalformedBatch, RaggedBatch};
pub use replica_api::info::Statistics;

/// Requested output of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// One row per sequence, of [`Description::width`] numbers: its vector, not normalized, or the output of its label
    /// head.
    Pooled,
    /// One row per token, of [`Description::hidden`] numbers: the output of the last layer.
    Tokens,
}

/// Computes rows of numbers from token sequences.
pub trait Engine: Send + Sync {
    /// Returns the properties and limits of the engine.
    fn describe(&self) -> &Description;

    /// Writes the requested rows to `out`, in the order of the batch.
    ///
    /// `out` holds exactly [`Description::numbers`] numbers. The rows of a sequence do not depend on the other
    /// sequences of the batch. After an error the content of `out` is unspecified.
    fn compute(&self, batch: &RaggedBatch<'_>, output: Output, out: &mut [f32]) -> Result<(), EngineError>;

    /// Computes a batch as [`Engine::compute`] does, on an engine on which single sequences may fail. The engine may
    /// skip sequences that no request needs any more, and may run a more urgent batch first. The rows of the returned
    /// sequences are unspecified.
    fn compute_each(
        &self,
        batch: &RaggedBatch<'_>,
        output: Output,
        callbacks: &dyn BatchCallbacks,
        out: &mut [f32],
    ) -> Result<Vec<FailedSequence>, EngineError> {
        let _ = callbacks;
        self.compute(batch, output, out).map(|()| Vec::new())
    }

    /// Returns the number of batches to submit concurrently, so that the engine never idles. Each further batch delays
    /// the next interactive request.
    fn batches_ahead(&self) -> usize {
        1
    }

    /// Returns the engine's own counters, if it has any.
    fn statistics(&self) -> Option<Statistics> {
        None
    }
}

/// Step of the computation of a batch, for its trace. What is before the first one is preparation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineStep {
    /// All layers.
    Forward,
    /// Rows of the sequences, from the states of the last layer.
    Pool,
}

/// Callbacks of an engine to its caller while it computes a batch; any of its threads may call them.
pub trait BatchCallbacks: Sync {
    /// Returns whether a request still needs the sequence with this index.
    fn is_needed(&self, sequence: usize) -> bool;

    /// Returns whether another batch should be computed before the rest of this one. Called between any two steps.
    fn has_urgent(&self) -> bool {
        false
    }

    /// Records that a step begins. Called a few times for each batch, and never for each layer.
    fn began(&self, step: EngineStep) {
        let _ = step;
    }

    /// Computes that batch with `compute`, which runs beside the current batch.
    fn run_urgent(&self, compute: &mut ComputeNested<'_>) {
        let _ = compute;
    }
}

/// Computes another batch while one is in progress, as [`Engine::compute`] does.
pub type ComputeNested<'a> = dyn FnMut(&RaggedBatch<'_>, Output, &mut [f32]) -> Result<(), EngineError> + 'a;

impl<W: Fn(usize) -> bool + Sync> BatchCallbacks for W {
    fn is_needed(&self, sequence: usize) -> bool {
        self(sequence)
    }
}

/// Sequence without rows in a batch with rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedSequence {
    /// Index in the batch.
    pub sequence: usize,
    /// Error of the sequence.
    pub reason: String,
}

/// Accelerator of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accelerator {
    /// The GPU.
    pub gpu: String,
    /// The version of TensorRT.
    pub tensorrt: String,
    /// The version of TensorRT-LLM.
    pub tensorrt_llm: String,
    /// Whether the runtime is a test double, whose results are meaningless.
    pub test_double: bool,
    /// Tokens of the largest batch that it computes in one run.
    pub max_batch_tokens: u64,
}

/// Properties and limits of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Kind and precision of the engine.
    pub engine: EngineSpec,
    /// Architecture of the model, as named in `config.json`.
    pub architecture: String,
    /// Task of the model, which defines the meaning of the rows.
    pub task: Task,
    /// Numbers of a pooled row: of a vector, or one per label.
    pub width: usize,
    /// Numbers of a token's row.
    pub hidden: usize,
    /// Whether it can return rows of tokens.
    pub token_rows: bool,
    /// Tokens of the longest sequence, special tokens included.
    pub max_tokens: usize,
    /// Size of the vocabulary; token ids are smaller.
    pub vocabulary: usize,
    /// Number of token types; ids of types are smaller. A model without token types ignores them.
    pub token_types: usize,
    /// Instruction set in use.
    pub instruction_set: String,
    /// Compute threads.
    pub threads: usize,
    /// Accelerator, if there is one.
    pub accelerator: Option<Accelerator>,
}

impl Description {
    /// Returns the number of output numbers of a batch.
    pub fn numbers(&self, batch: &RaggedBatch<'_>, output: Output) -> usize {
        match output {
            Output::Pooled => batch.len() * self.width,
            Output::Tokens => batch.token_ids().len() * self.hidden,
        }
    }
}

/// Errors of an engine. The first four are errors of the caller, and retrying the same batch does not help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// A text became an empty sequence of tokens.
    #[error("sequence {sequence} has no tokens; give at least one")]
    Empty {
        /// Index in the batch.
        sequence: usize,
    },
    /// A text has more tokens than the model accepts.
    #[error("sequence {sequence} has {tokens} tokens and the limit of the model is {max_tokens}")]
    TooLong {
        /// Index in the batch.
        sequence: usize,
        /// Length of the sequence.
        tokens: usize,
        /// The limit.
        max_tokens: usize,
    },
    /// A token id is outside the vocabulary: the tokenizer and the weights belong to different models.
    #[error(
        "token {position} of sequence {sequence} is {token} and the vocabulary ends at {}",
        vocabulary - 1
    )]
    UnknownToken {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// Index of the token in the sequence.
        position: usize,
        /// The token id.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
    /// A token type is outside the types of the model.
    #[error(
        "token {position} of sequence {sequence} is of type {given} and the types end at {}",
        token_types - 1
    )]
    UnknownType {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// Index of the token in the sequence.
        position: usize,
        /// The type.
        given: u32,
        /// Number of the model's types.
        token_types: usize,
    },
    /// A defect: the buffer for the results of a batch has the wrong size. Report it.
    #[error("the output buffer has {given} numbers and the batch needs {expected}")]
    OutputSize {
        /// Size of the output.
        expected: usize,
        /// Size of the buffer.
        given: usize,
    },
    /// The engine failed with an error of its own; the text has the cause.
    #[error("the engine failed: {reason}")]
    Broken {
        /// Error message of the engine.
        reason: String,
    },
}
