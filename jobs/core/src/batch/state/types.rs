//! Files, batches and their chunks, as they are stored.

use crate::batch::id::{BatchId, UploadId};
use crate::batch::output::LostReason;
use crate::batch::segment::FileSegment;
use crate::job::{DurableJobId, IdempotencyKey, JobOperation, StoredRange, UnixMillis};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Uploaded file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadedFile {
    /// Tenant.
    pub tenant: String,
    /// Name that the client gave it.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// Deployments that its lines name and that the tenant may use.
    pub models: BTreeSet<String>,
    /// Lines.
    pub segments: Vec<FileSegment>,
    /// Residency policy under which it was accepted, as text; absent if an earlier version has accepted it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<String>,
    /// Idempotency key of the upload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotency: Option<IdempotencyKey>,
}

/// Error of a file, for a batch without a line that can be computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileProblem {
    /// Code.
    pub code: String,
    /// Sentence for a person.
    pub message: String,
    /// Number of the line.
    pub line: u32,
}

/// Request for a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchSpec {
    /// Tenant.
    pub tenant: String,
    /// Input file.
    pub file: UploadId,
    /// Operation of its endpoint.
    pub operation: JobOperation,
    /// Completion window as the client wrote it.
    pub completion_window: String,
    /// End of the completion window.
    pub expires: UnixMillis,
    /// Metadata of the client.
    pub metadata: BTreeMap<String, String>,
    /// Number of lines.
    pub total: u32,
    /// Problems of the file, if no line can be computed.
    pub problems: Vec<FileProblem>,
    /// Residency policy of its file, which may be deleted before the batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<String>,
    /// Models of its file. Error lines quote lines of all of them, and their policies apply when these are read.
    #[serde(default)]
    pub models: BTreeSet<String>,
    /// Idempotency key of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotency: Option<IdempotencyKey>,
    /// Span of the request that created it, as in the header `traceparent`, if the spoke records traces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<String>,
}

/// Chunk of a new batch, and the job that computes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedChunk {
    /// Index of the segment.
    pub segment: u32,
    /// Deployment.
    pub deployment: String,
    /// Number of lines.
    pub lines: u32,
    /// Number of inputs.
    pub inputs: u64,
    /// Estimated tokens of the inputs; 0 in a file of an earlier version.
    #[serde(default)]
    pub tokens: u64,
    /// Job.
    pub job: DurableJobId,
}

/// Results of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkResult {
    /// Lines for the output file.
    pub output: Option<StoredRange>,
    /// Lines for the error file.
    pub errors: Option<StoredRange>,
    /// Number of lines with a response.
    pub completed: u32,
    /// Number of lines with an error.
    pub failed: u32,
    /// Bytes of the lines for the output file.
    pub output_bytes: u64,
    /// Bytes of the lines for the error file.
    pub error_bytes: u64,
}

/// State of a chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkState {
    /// Its job waits or is computed.
    Open(DurableJobId),
    /// It was computed.
    Computed {
        /// Lines for the output file, until that is deleted.
        output: Option<StoredRange>,
        /// Lines for the error file, until that is deleted.
        errors: Option<StoredRange>,
    },
    /// All attempts failed, with the reason.
    Failed(String),
    /// The completion window has passed.
    Expired,
    /// The batch was cancelled.
    Cancelled,
}

/// Chunk of a batch: the lines of a segment for one deployment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchChunk {
    /// Index of the segment.
    pub segment: u32,
    /// Deployment.
    pub deployment: String,
    /// Number of lines.
    pub lines: u32,
    /// State.
    pub state: ChunkState,
}

/// Progress of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchProgress {
    /// Chunks that have not ended.
    pub open: u32,
    /// Lines with a response.
    pub completed: u32,
    /// Lines with an error, and those that cannot be computed.
    pub failed: u32,
    /// Bytes of the output file.
    pub output_bytes: u64,
    /// Bytes of the error file.
    pub error_bytes: u64,
    /// Whether a chunk has expired.
    pub has_expired: bool,
    /// Start of the first chunk.
    pub started: Option<UnixMillis>,
    /// Cancellation.
    pub cancelled: Option<UnixMillis>,
    /// End of the last chunk.
    pub finalizing: Option<UnixMillis>,
    /// Time from which the files are complete.
    pub ended: Option<UnixMillis>,
    /// The client has deleted the output file.
    pub output_deleted: bool,
    /// The client has deleted the error file.
    pub errors_deleted: bool,
}

impl BatchProgress {
    /// Whether the batch has ended and its output file or its error file exists.
    pub fn has_file(&self, of_errors: bool) -> bool {
        let BatchProgress { ended, output_bytes, error_bytes, output_deleted, errors_deleted, .. } = *self;
        let (bytes, deleted) =
            if of_errors { (error_bytes, errors_deleted) } else { (output_bytes, output_deleted) };
        ended.is_some() && bytes > 0 && !deleted
    }
}

/// Batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batch {
    /// Request.
    pub spec: BatchSpec,
    /// Chunks, in the order of the file.
    pub chunks: Vec<BatchChunk>,
    /// Progress.
    pub progress: BatchProgress,
    /// Error lines for the lines that no chunk has computed, by segment.
    pub uncomputed: Vec<(u32, StoredRange)>,
}

/// Status of a batch, in the words of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchPhase {
    /// Chunks wait or are computed.
    InProgress,
    /// All chunks have ended; the error file is being written.
    Finalizing,
    /// All lines have a response or an error.
    Completed,
    /// No line could be computed.
    Failed,
    /// The completion window has passed before all lines were computed.
    Expired,
    /// It was cancelled, and the error file is being written.
    Cancelling,
    /// It was cancelled.
    Cancelled,
}

/// Row of a snapshot. It shares its content with the queue, which copies a file or a batch before it changes one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchRow {
    /// File.
    File(UploadId, #[serde(with = "shared")] Arc<UploadedFile>),
    /// Batch.
    Batch(BatchId, #[serde(with = "shared")] Arc<Batch>),
}

/// Serializes a shared value like the value.
mod shared {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use std::sync::Arc;

    pub(super) fn serialize<T: Serialize, S: Serializer>(
        value: &Arc<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        T::serialize(value, serializer)
    }

    pub(super) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<T>, D::Error> {
        T::deserialize(deserializer).map(Arc::new)
    }
}

impl Batch {
    /// Returns its status.
    pub fn phase(&self) -> BatchPhase {
        let BatchProgress { cancelled, ended, open, has_expired, .. } = self.progress;
        match (cancelled, ended) {
            (Some(_), None) => BatchPhase::Cancelling,
            (Some(_), Some(_)) => BatchPhase::Cancelled,
            (None, None) if open > 0 => BatchPhase::InProgress,
            (None, None) => BatchPhase::Finalizing,
            (None, Some(_)) if !self.spec.problems.is_empty() => BatchPhase::Failed,
            (None, Some(_)) if has_expired => BatchPhase::Expired,
            (None, Some(_)) => BatchPhase::Completed,
        }
    }

    /// Returns the segments with lines that no chunk has computed, each with the reasons by deployment.
    pub fn uncomputed_segments(&self, file: &UploadedFile) -> BTreeMap<u32, BTreeMap<&str, LostReason>> {
        let mut computed = BTreeMap::<u32, u32>::new();
        let mut lost = BTreeMap::<u32, BTreeMap<&str, LostReason>>::new();
        for chunk in &self.chunks {
            let reason = match &chunk.state {
                ChunkState::Open(_) | ChunkState::Computed { .. } => {
                    *computed.entry(chunk.segment).or_default() += chunk.lines;
                    continue;
                }
                ChunkState::Failed(reason) => ("request_failed", reason.clone()),
                ChunkState::Expired => (
                    "batch_expired",
                    "The completion window of the batch has passed before the request was computed."
                        .to_owned(),
                ),
                ChunkState::Cancelled => {
                    ("batch_cancelled", "The batch was cancelled before the request was computed.".to_owned())
                }
            };
            lost.entry(chunk.segment).or_default().insert(chunk.deployment.as_str(), reason);
        }
        let segments = file.segments.iter().zip(0u32..);
        let uncomputed = segments
            .filter(|(segment, index)| segment.requests > computed.get(index).copied().unwrap_or_default());
        uncomputed.map(|(_, index)| (index, lost.remove(&index).unwrap_or_default())).collect()
    }

    /// Returns the bytes of its files that exist.
    pub(super) fn written_bytes(&self) -> u64 {
        let BatchProgress { output_bytes, error_bytes, output_deleted, errors_deleted, .. } = self.progress;
        output_bytes * u64::from(!output_deleted) + error_bytes * u64::from(!errors_deleted)
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = StoredRange> + '_ {
        let computed = self.chunks.iter().flat_map(|chunk| match &chunk.state {
            ChunkState::Computed { output, errors } => [*output, *errors],
            _ => [None, None],
        });
        computed.flatten().chain(self.uncomputed.iter().map(|(_, range)| *range))
    }

    /// Returns the stored lines of its output file or of its error file, by segment.
    pub fn parts(&self, of_errors: bool) -> BTreeMap<u32, Vec<StoredRange>> {
        let mut parts = BTreeMap::<u32, Vec<StoredRange>>::new();
        for chunk in &self.chunks {
            if let ChunkState::Computed { output, errors } = &chunk.state
                && let Some(range) = if of_errors { errors } else { output }
            {
                parts.entry(chunk.segment).or_default().push(*range);
            }
        }
        for (segment, range) in self.uncomputed.iter().filter(|_| of_errors) {
            parts.entry(*segment).or_default().push(*range);
        }
        parts
    }
}
