//! What computes: ragged batches in, rows of numbers out.
//!
//! [`Engine`] is the seam between the model server and whatever does the arithmetic. It is narrow on purpose: a batch is
//! token ids and offsets, an answer is rows of numbers in the same order, and everything that the server must know to
//! ask correctly stands in the [`Description`]. An engine is asked from as many threads as it wants batches ahead, one for
//! most, and uses as many of its own as it was given.
//!
//! 1. [`batch`] — what goes in; `check` — whether it can.
//! 2. [`cpu`] — the native engine for CPUs.
//! 3. [`tensorrt`] — engines that NVIDIA's tools built for a GPU, where the feature is there.

pub mod batch;
mod check;
pub mod cpu;
pub mod tensorrt;

use replica_core::{EngineSpec, Task};

pub use batch::{BatchBuffer, MalformedBatch, RaggedBatch};

/// What is wanted of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// One row per sequence, of [`Description::width`]: its vector, not normalised, or what its label head comes to.
    Pooled,
    /// One row per token, of [`Description::hidden`]: the last layer's.
    Tokens,
}

/// Computes rows of numbers from token sequences.
pub trait Engine: Send + Sync {
    /// What it is and what it can take.
    fn describe(&self) -> &Description;

    /// Writes what is wanted to `out`, row after row in the order of the batch.
    ///
    /// `out` has room for exactly [`Description::numbers`]. A sequence has the same rows alone and in any company.
    /// After an error the content of `out` means nothing.
    fn compute(&self, batch: &RaggedBatch<'_>, output: Output, out: &mut [f32]) -> Result<(), EngineError>;

    /// The same, of an engine on which one sequence may fail and not the others, which need not go on with those that
    /// nobody waits for, and which lets something more urgent go first: the rows of those that are named mean nothing.
    fn compute_each(
        &self,
        batch: &RaggedBatch<'_>,
        output: Output,
        meanwhile: &dyn Meanwhile,
        out: &mut [f32],
    ) -> Result<Vec<Failed>, EngineError> {
        let _ = meanwhile;
        self.compute(batch, output, out).map(|()| Vec::new())
    }

    /// Batches that it wants at the same time, so that it is never without one; each more is one that the next lookup waits
    /// behind.
    fn batches_ahead(&self) -> usize {
        1
    }

    /// What it counts itself, if it does.
    fn statistics(&self) -> Option<Statistics> {
        None
    }
}

/// What an engine may ask, while it computes a batch, of whoever gave it. Any of its threads may.
pub trait Meanwhile: Sync {
    /// Whether somebody still waits for the sequence of this index.
    fn is_wanted(&self, sequence: usize) -> bool;

    /// Whether something should be computed before the rest of this batch. It is asked between any two steps.
    fn is_urgent(&self) -> bool {
        false
    }

    /// Has that computed, by what computes beside this batch.
    fn let_in(&self, beside: &mut Beside<'_>) {
        let _ = beside;
    }
}

/// Computes another batch while one is at hand, as [`Engine::compute`] does.
pub type Beside<'a> = dyn FnMut(&RaggedBatch<'_>, Output, &mut [f32]) -> Result<(), EngineError> + 'a;

impl<W: Fn(usize) -> bool + Sync> Meanwhile for W {
    fn is_wanted(&self, sequence: usize) -> bool {
        self(sequence)
    }
}

/// A sequence without rows in a batch with rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Its place in the batch.
    pub sequence: usize,
    /// Why.
    pub reason: String,
}

/// What an engine behind a library counts since its start, and what it has now; 0 where it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Runs of the model.
    pub iterations: u64,
    /// Milliseconds that they took.
    pub busy_ms: u64,
    /// Sequences that were computed.
    pub completed: u64,
    /// Batches that failed and were computed again, one by one.
    pub taken_apart: u64,
    /// Sequences in the last run.
    pub active: u64,
    /// Sequences that waited for it.
    pub queued: u64,
    /// Memory of the GPU in use.
    pub gpu_bytes: u64,
}

/// What computes beside the processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accelerator {
    /// The GPU.
    pub gpu: String,
    /// The version of TensorRT.
    pub tensorrt: String,
    /// The version of TensorRT-LLM.
    pub tensorrt_llm: String,
    /// Whether all of it is our stand-in, whose numbers mean nothing.
    pub stand_in: bool,
    /// Tokens of the largest batch that it takes in one piece.
    pub max_batch_tokens: u64,
}

/// What an engine is and what it can take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its kind and the precision of its arithmetic.
    pub engine: EngineSpec,
    /// The family of the model, as `config.json` names it.
    pub architecture: String,
    /// What its rows mean.
    pub task: Task,
    /// Numbers of one pooled row: of a vector, or one per label.
    pub width: usize,
    /// Numbers of one token's row.
    pub hidden: usize,
    /// Whether it makes those.
    pub token_rows: bool,
    /// Tokens of the longest sequence, special tokens included.
    pub max_tokens: usize,
    /// Token ids are below this.
    pub vocabulary: usize,
    /// Token types are below this; a model that has none takes no notice of them.
    pub token_types: usize,
    /// The instructions that it computes with.
    pub instruction_set: String,
    /// Threads that compute.
    pub threads: usize,
    /// What computes beside the processor, if anything does.
    pub accelerator: Option<Accelerator>,
}

impl Description {
    /// Numbers that a batch comes to.
    pub fn numbers(&self, batch: &RaggedBatch<'_>, output: Output) -> usize {
        match output {
            Output::Pooled => batch.len() * self.width,
            Output::Tokens => batch.token_ids().len() * self.hidden,
        }
    }
}

/// Why there are no rows. The first four are faults of the caller and hold for the batch however often it is tried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// There is nothing to make a vector of.
    #[error("sequence {sequence} has no tokens; give at least one")]
    Empty {
        /// Its place in the batch.
        sequence: usize,
    },
    /// The model has not learnt so many positions.
    #[error("sequence {sequence} has {tokens} tokens and the model reads at most {max_tokens}")]
    TooLong {
        /// Its place in the batch.
        sequence: usize,
        /// Its length.
        tokens: usize,
        /// The limit.
        max_tokens: usize,
    },
    /// A token that the vocabulary does not have.
    #[error(
        "token {position} of sequence {sequence} is {token} and the vocabulary ends at {}",
        vocabulary - 1
    )]
    UnknownToken {
        /// Its sequence's place in the batch.
        sequence: usize,
        /// Its place in the sequence.
        position: usize,
        /// The token id.
        token: u32,
        /// Entries of the vocabulary.
        vocabulary: usize,
    },
    /// A token type that the model does not have.
    #[error(
        "token {position} of sequence {sequence} is of type {given} and the types end at {}",
        token_types - 1
    )]
    UnknownType {
        /// Its sequence's place in the batch.
        sequence: usize,
        /// Its place in the sequence.
        position: usize,
        /// The type.
        given: u32,
        /// Types of the model.
        token_types: usize,
    },
    /// The place for the answer has another size than the answer.
    #[error("the output has room for {given} numbers and the batch makes {wanted}")]
    OutputSize {
        /// What the batch makes.
        wanted: usize,
        /// What was given.
        given: usize,
    },
    /// The engine failed for reasons of its own.
    #[error("the engine failed: {reason}")]
    Broken {
        /// What it said.
        reason: String,
    },
}
