//! Files and batches of a queue: the part of its state that the records about them change.
//!
//! A batch counts its lines when one of its chunks ends, so its status costs the same for any number of lines.

mod table;
mod tenant_files;
mod types;

pub use table::{BatchTable, FileDeletion, plan};
pub use tenant_files::{FileUsage, KeyOwner};
pub use types::{
    Batch, BatchChunk, BatchPhase, BatchProgress, BatchRow, BatchSpec, ChunkResult, ChunkState, FileProblem,
    PlannedChunk, UploadedFile,
};
