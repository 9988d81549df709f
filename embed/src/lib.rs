//! Files of texts to files of vectors: readers, writers and checkpoints of `meridian embed`.
//!
//! Embedding a corpus takes hours, so the command must survive a kill at any moment, and its memory must not grow with the
//! corpus. The crate has everything but the computation, which is behind [`backend::EmbeddingBackend`]; so its tests need
//! no model.
//!
//! 1. [`row`] and [`input`]: rows and the readers of the formats.
//! 2. [`packing`]: texts to batches.
//! 3. [`output`]: formats of outputs.
//! 4. [`checkpoint`]: the state from which a run continues; [`storage`]: the files of an output.
//! 5. [`job`]: the loop over windows of rows.

pub mod backend;
pub mod checkpoint;
pub mod input;
pub mod job;
pub mod output;
pub mod packing;
pub mod row;
pub mod storage;
