//! Index of the files and batches of a tenant.

use crate::batch::id::{BatchId, UploadId};
use crate::job::{DurableJobId, IdempotencyKey};
use std::collections::{BTreeMap, BTreeSet};

/// Files and batches of a tenant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TenantFiles {
    pub(super) files: BTreeSet<UploadId>,
    pub(super) batches: BTreeSet<BatchId>,
    /// Number of unfinished batches of each file that has any.
    pub(super) unfinished: BTreeMap<UploadId, u32>,
    pub(super) usage: FileUsage,
    /// Idempotency keys, each with the file or the batch that has it and the hash of its request. The keys of uploads and of
    /// batches differ, because their hashes contain the path.
    pub(super) keys: BTreeMap<[u8; 32], (DurableJobId, [u8; 32])>,
}

impl TenantFiles {
    /// Removes the idempotency key of a file or a batch, unless another one has it.
    pub(super) fn forget_key(&mut self, key: Option<IdempotencyKey>, number: DurableJobId) {
        if let Some(key) = key
            && self.keys.get(&key.key).is_some_and(|(owner, _)| *owner == number)
        {
            self.keys.remove(&key.key);
        }
    }

    /// Records the end of a batch of a file.
    pub(super) fn batch_ended(&mut self, file: UploadId) {
        if let Some(count) = self.unfinished.get_mut(&file) {
            *count -= 1;
            if *count == 0 {
                self.unfinished.remove(&file);
            }
        }
    }
}

/// File or batch that has an idempotency key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyOwner {
    /// Number of the file or the batch.
    pub number: DurableJobId,
    /// Whether it has the same request.
    pub same_request: bool,
}

/// Sums over the files and batches of a tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FileUsage {
    /// Uploaded files.
    pub files: usize,
    /// Batches.
    pub batches: usize,
    /// Bytes of the files, with those that batches have written.
    pub bytes: u64,
    /// Segments of the files and chunks of the batches: what they need in memory.
    pub parts: usize,
}
