//! Table of all files and batches, with the indexes that follow from it.

use super::tenant_files::{FileUsage, KeyOwner, TenantFiles};
use super::types::{
    Batch, BatchChunk, BatchProgress, BatchRow, BatchSpec, ChunkResult, ChunkState, PlannedChunk,
    UploadedFile,
};
use crate::batch::id::{BatchFileId, BatchId, UploadId};
use crate::job::{BatchChunkRef, DurableJobId, IdempotencyKey, JobOperation, StoredRange, UnixMillis};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

/// Files and batches.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BatchTable {
    files: BTreeMap<UploadId, Arc<UploadedFile>>,
    batches: BTreeMap<BatchId, Arc<Batch>>,
    /// Number of ranges in each stored object.
    objects: BTreeMap<u64, u64>,
    /// Batches of which all chunks have ended, without an error file.
    finalizing: BTreeSet<BatchId>,
    /// Files and batches of each tenant that has any.
    tenants: BTreeMap<String, TenantFiles>,
}

/// Effect of a request to delete a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileDeletion {
    /// It is deleted.
    Deleted,
    /// An unfinished batch reads or writes it.
    InUse,
    /// There is no such file.
    Unknown,
}

impl BatchTable {
    /// Returns all rows, for a snapshot.
    pub fn rows(&self) -> Vec<BatchRow> {
        let files = self.files.iter().map(|(id, file)| BatchRow::File(*id, file.clone()));
        let batches = self.batches.iter().map(|(id, batch)| BatchRow::Batch(*id, batch.clone()));
        files.chain(batches).collect()
    }

    /// Restores the rows of a snapshot.
    pub(crate) fn restore(rows: Vec<BatchRow>) -> BatchTable {
        let mut table = BatchTable::default();
        for row in rows {
            match row {
                BatchRow::File(id, file) => table.add_file(id, file),
                BatchRow::Batch(id, batch) => table.add_batch(id, batch),
            }
        }
        table
    }

    /// Whether a file or a batch has lines in a stored object.
    pub(crate) fn refers_to(&self, object: u64) -> bool {
        self.objects.contains_key(&object)
    }

    /// Returns a file of a tenant.
    pub fn file(&self, tenant: &str, id: UploadId) -> Option<&Arc<UploadedFile>> {
        self.files.get(&id).filter(|file| file.tenant == tenant)
    }

    /// Returns the file or the batch of a tenant that has an idempotency key.
    pub fn with_key(&self, tenant: &str, key: &IdempotencyKey) -> Option<KeyOwner> {
        let (number, request) = self.tenants.get(tenant)?.keys.get(&key.key)?;
        Some(KeyOwner { number: *number, same_request: *request == key.request })
    }

    /// Returns the file of a batch.
    pub fn file_of(&self, batch: &Batch) -> Option<&Arc<UploadedFile>> {
        self.files.get(&batch.spec.file)
    }

    /// Returns a batch.
    pub fn batch(&self, id: BatchId) -> Option<&Arc<Batch>> {
        self.batches.get(&id)
    }

    /// Returns the batches of a tenant, the newest first; those before one.
    pub fn batches_of(
        &self,
        tenant: &str,
        before: Option<BatchId>,
    ) -> impl Iterator<Item = (BatchId, &Arc<Batch>)> {
        let end = before.map_or(Bound::Unbounded, Bound::Excluded);
        let own = self.tenants.get(tenant).into_iter();
        let ids = own.flat_map(move |own| own.batches.range((Bound::Unbounded, end)).rev());
        ids.filter_map(|id| Some((*id, self.batch(*id)?)))
    }

    /// Returns the uploaded files of a tenant.
    pub fn files_of(&self, tenant: &str) -> impl Iterator<Item = (UploadId, &Arc<UploadedFile>)> {
        let ids = self.tenants.get(tenant).into_iter().flat_map(|own| &own.files);
        ids.filter_map(|id| Some((*id, self.files.get(id)?)))
    }

    /// Returns the sums over the files and batches of a tenant.
    pub fn usage_of(&self, tenant: &str) -> FileUsage {
        self.tenants.get(tenant).map(|own| own.usage).unwrap_or_default()
    }

    /// Returns the batches of a tenant that have ended and whose files were deleted or have no line, the oldest first, with the
    /// numbers of their chunks.
    pub fn without_files(&self, tenant: &str) -> impl Iterator<Item = (BatchId, usize)> {
        let ids = self.tenants.get(tenant).into_iter().flat_map(|own| &own.batches);
        let batches = ids.filter_map(|id| Some((*id, self.batch(*id)?)));
        let gone = |batch: &Batch| batch.progress.ended.is_some() && batch.written_bytes() == 0;
        batches.filter(move |(_, batch)| gone(batch)).map(|(id, batch)| (id, batch.chunks.len()))
    }

    /// Returns the batches of which all chunks have ended and that have no error file yet.
    pub fn finalizing(&self) -> impl Iterator<Item = BatchId> + '_ {
        self.finalizing.iter().copied()
    }

    /// Returns at most this number of batches that ended, and of files that were uploaded, by a time: their retention has
    /// passed. A file of an unfinished batch is kept.
    pub fn retired(&self, by: UnixMillis, count: usize) -> (Vec<BatchId>, Vec<UploadId>) {
        let ended = self.batches.iter().take_while(|(id, _)| id.created() <= by);
        let ended = ended.filter(|(_, batch)| batch.progress.ended.is_some_and(|at| at <= by));
        let old = self.files.iter().take_while(|(id, _)| id.0.submitted() <= by);
        let old = old.filter(|(id, file)| !self.is_used(**id, &file.tenant));
        (ended.map(|(id, _)| *id).take(count).collect(), old.map(|(id, _)| *id).take(count).collect())
    }

    /// Returns where the lines that a batch has written are stored; empty if there is no such batch.
    pub fn ranges_of_batch(&self, id: BatchId) -> Vec<StoredRange> {
        self.batch(id).into_iter().flat_map(|batch| batch.ranges()).collect()
    }

    /// Returns where a file is stored; empty if there is no such file.
    pub fn ranges_of_file(&self, id: UploadId) -> Vec<StoredRange> {
        let segments = self.files.get(&id).into_iter().flat_map(|file| &file.segments);
        segments.map(|segment| segment.range).collect()
    }

    fn is_used(&self, file: UploadId, tenant: &str) -> bool {
        self.tenants.get(tenant).is_some_and(|own| own.unfinished.contains_key(&file))
    }

    /// Changes the index of a tenant.
    fn update(&mut self, tenant: &str, change: impl FnOnce(&mut TenantFiles)) {
        let own = self.tenants.entry(tenant.to_owned()).or_default();
        change(own);
        (own.usage.files, own.usage.batches) = (own.files.len(), own.batches.len());
        if own.files.is_empty() && own.batches.is_empty() {
            self.tenants.remove(tenant);
        }
    }

    pub(crate) fn add_file(&mut self, id: UploadId, file: Arc<UploadedFile>) {
        self.remove_file(id);
        self.update(&file.tenant, |own| {
            own.files.insert(id);
            own.keys.extend(file.idempotency.map(|key| (key.key, (id.0, key.request))));
            own.usage.bytes += file.bytes;
            own.usage.parts += file.segments.len();
        });
        for segment in &file.segments {
            refer(&mut self.objects, segment.range);
        }
        self.files.insert(id, file);
    }

    fn add_batch(&mut self, id: BatchId, batch: Arc<Batch>) {
        for range in batch.ranges() {
            refer(&mut self.objects, range);
        }
        self.update(&batch.spec.tenant, |own| {
            own.batches.insert(id);
            own.keys.extend(batch.spec.idempotency.map(|key| (key.key, (id.0, key.request))));
            own.usage.bytes += batch.written_bytes();
            own.usage.parts += batch.chunks.len();
            if batch.progress.ended.is_none() {
                *own.unfinished.entry(batch.spec.file).or_default() += 1;
            }
        });
        if batch.progress.open == 0 && batch.progress.ended.is_none() {
            self.finalizing.insert(id);
        }
        self.batches.insert(id, batch);
    }

    /// Adds a batch; returns the payloads of its chunks, or none if its file does not exist any more.
    pub(crate) fn create(
        &mut self,
        id: BatchId,
        spec: &BatchSpec,
        chunks: &[PlannedChunk],
    ) -> Option<Vec<StoredRange>> {
        let file = self.files.get(&spec.file)?;
        let payload = |chunk: &PlannedChunk| Some(file.segments.get(chunk.segment as usize)?.range);
        let payloads = chunks.iter().map(payload).collect::<Option<Vec<_>>>()?;
        if self.batches.contains_key(&id) {
            return None;
        }
        let created = id.created();
        let lines: u32 = chunks.iter().map(|chunk| chunk.lines).sum();
        let has_failed = !spec.problems.is_empty();
        let progress = BatchProgress {
            open: chunks.len() as u32,
            failed: spec.total.saturating_sub(lines),
            finalizing: chunks.is_empty().then_some(created),
            ended: has_failed.then_some(created),
            ..BatchProgress::default()
        };
        let chunks =
            chunks.iter().map(|PlannedChunk { segment, deployment, lines, inputs: _, tokens: _, job }| {
                let (deployment, state) = (deployment.clone(), ChunkState::Open(*job));
                BatchChunk { segment: *segment, deployment, lines: *lines, state }
            });
        let chunks = chunks.collect();
        let batch = Batch { spec: spec.clone(), chunks, progress, uncomputed: Vec::new() };
        self.add_batch(id, Arc::new(batch));
        Some(payloads)
    }

    /// Records the start of a chunk.
    pub(crate) fn chunk_started(&mut self, chunk: BatchChunkRef, at: UnixMillis) {
        if let Some(batch) = self.batch_mut(BatchId(chunk.batch)) {
            batch.progress.started.get_or_insert(at);
        }
    }

    /// Records the result of a chunk that is open.
    pub(crate) fn chunk_computed(&mut self, chunk: BatchChunkRef, result: &ChunkResult, at: UnixMillis) {
        let ChunkResult { output, errors, completed, failed, output_bytes, error_bytes } = *result;
        let Some(progress) = self.end_chunk(chunk, ChunkState::Computed { output, errors }, at) else {
            return;
        };
        progress.completed += completed;
        progress.failed += failed;
        progress.output_bytes += output_bytes;
        progress.error_bytes += error_bytes;
        self.charge(BatchId(chunk.batch), output_bytes + error_bytes);
        for range in [output, errors].into_iter().flatten() {
            refer(&mut self.objects, range);
        }
    }

    /// Records the end of an open chunk without a result. Its lines have failed.
    pub(crate) fn chunk_lost(&mut self, chunk: BatchChunkRef, state: ChunkState, at: UnixMillis) {
        let batch = self.batches.get(&BatchId(chunk.batch));
        let lines = batch.and_then(|batch| Some(batch.chunks.get(chunk.chunk as usize)?.lines));
        let expired = state == ChunkState::Expired;
        if let Some(progress) = self.end_chunk(chunk, state, at) {
            progress.failed += lines.unwrap_or_default();
            progress.has_expired |= expired;
        }
    }

    fn end_chunk(
        &mut self,
        chunk: BatchChunkRef,
        state: ChunkState,
        at: UnixMillis,
    ) -> Option<&mut BatchProgress> {
        let id = BatchId(chunk.batch);
        let state_before = &self.batch(id)?.chunks.get(chunk.chunk as usize)?.state;
        if !matches!(state_before, ChunkState::Open(_)) {
            return None;
        }
        let batch = Arc::make_mut(self.batches.get_mut(&id)?);
        let chunk = batch.chunks.get_mut(chunk.chunk as usize)?;
        chunk.state = state;
        batch.progress.open -= 1;
        if batch.progress.open == 0 {
            batch.progress.finalizing = Some(at);
            self.finalizing.insert(id);
        }
        Some(&mut batch.progress)
    }

    /// Cancels a batch that is in progress; returns the jobs of its open chunks.
    pub(crate) fn cancel(&mut self, id: BatchId, at: UnixMillis) -> Option<Vec<DurableJobId>> {
        let progress = self.batch(id)?.progress;
        if progress.ended.is_some() || progress.cancelled.is_some() {
            return None;
        }
        let batch = self.batch_mut(id)?;
        batch.progress.cancelled = Some(at);
        let mut jobs = Vec::new();
        let chunks = batch.chunks.len() as u32;
        for chunk in 0..chunks {
            let state = self.batches.get(&id).map(|batch| &batch.chunks[chunk as usize].state);
            if let Some(ChunkState::Open(job)) = state {
                jobs.push(*job);
                let chunk = BatchChunkRef { batch: id.0, chunk, tokens: 0 };
                self.chunk_lost(chunk, ChunkState::Cancelled, at);
            }
        }
        Some(jobs)
    }

    /// Records the error lines of the lines that no chunk has computed. Without effect on a batch that is not finalizing.
    pub(crate) fn finalize(
        &mut self,
        id: BatchId,
        uncomputed: &[(u32, StoredRange)],
        error_bytes: u64,
        at: UnixMillis,
    ) -> bool {
        if !self.finalizing.remove(&id) {
            return false;
        }
        let Some(batch) = self.batch_mut(id) else { return false };
        batch.uncomputed = uncomputed.to_vec();
        batch.progress.error_bytes += error_bytes;
        batch.progress.ended = Some(at);
        let (tenant, file) = (batch.spec.tenant.clone(), batch.spec.file);
        self.update(&tenant, |own| own.batch_ended(file));
        self.charge(id, error_bytes);
        for (_, range) in uncomputed {
            refer(&mut self.objects, *range);
        }
        true
    }

    /// Deletes a file of a tenant.
    pub(crate) fn delete_file(&mut self, tenant: &str, id: BatchFileId) -> FileDeletion {
        let (batch, of_errors) = match id {
            BatchFileId::Upload(id) => {
                return match self.file(tenant, id).is_some() {
                    true if self.is_used(id, tenant) => FileDeletion::InUse,
                    true => {
                        self.remove_file(id);
                        FileDeletion::Deleted
                    }
                    false => FileDeletion::Unknown,
                };
            }
            BatchFileId::Output(batch) => (batch, false),
            BatchFileId::Errors(batch) => (batch, true),
        };
        if self.written(tenant, batch, of_errors).is_none() {
            return FileDeletion::Unknown;
        }
        let Some(batch) = self.batches.get_mut(&batch).map(Arc::make_mut) else {
            return FileDeletion::Unknown;
        };
        if let Some(own) = self.tenants.get_mut(tenant) {
            let BatchProgress { output_bytes, error_bytes, .. } = batch.progress;
            own.usage.bytes -= if of_errors { error_bytes } else { output_bytes };
        }
        for chunk in &mut batch.chunks {
            if let ChunkState::Computed { output, errors } = &mut chunk.state
                && let Some(range) = if of_errors { errors.take() } else { output.take() }
            {
                release(&mut self.objects, range);
            }
        }
        if of_errors {
            batch.progress.errors_deleted = true;
            for (_, range) in std::mem::take(&mut batch.uncomputed) {
                release(&mut self.objects, range);
            }
        } else {
            batch.progress.output_deleted = true;
        }
        FileDeletion::Deleted
    }

    /// Returns an ended batch of a tenant whose output file or error file exists.
    pub fn written(&self, tenant: &str, id: BatchId, of_errors: bool) -> Option<&Batch> {
        let batch = self.batches.get(&id).filter(|batch| batch.spec.tenant == tenant)?;
        batch.progress.has_file(of_errors).then_some(batch)
    }

    fn remove_file(&mut self, id: UploadId) {
        let Some(file) = self.files.remove(&id) else { return };
        self.update(&file.tenant, |own| {
            own.files.remove(&id);
            own.usage.bytes -= file.bytes;
            own.usage.parts -= file.segments.len();
            own.forget_key(file.idempotency, id.0);
        });
        for segment in &file.segments {
            release(&mut self.objects, segment.range);
        }
    }

    /// Removes those of the batches that have ended, and those of the files that no unfinished batch reads.
    pub(crate) fn remove(&mut self, batches: &[BatchId], files: &[UploadId]) {
        for id in batches {
            if self.batches.get(id).is_some_and(|batch| batch.progress.ended.is_some())
                && let Some(batch) = self.batches.remove(id)
            {
                self.update(&batch.spec.tenant, |own| {
                    own.batches.remove(id);
                    own.usage.bytes -= batch.written_bytes();
                    own.usage.parts -= batch.chunks.len();
                    own.forget_key(batch.spec.idempotency, id.0);
                });
                batch.ranges().for_each(|range| release(&mut self.objects, range));
            }
        }
        for id in files {
            let is_used = |file: &UploadedFile| self.is_used(*id, &file.tenant);
            if self.files.get(id).is_some_and(|file| !is_used(file)) {
                self.remove_file(*id);
            }
        }
    }

    fn batch_mut(&mut self, id: BatchId) -> Option<&mut Batch> {
        self.batches.get_mut(&id).map(Arc::make_mut)
    }

    /// Adds bytes that a batch has written to those of its tenant.
    fn charge(&mut self, batch: BatchId, bytes: u64) {
        let tenant = self.batches.get(&batch).map(|batch| batch.spec.tenant.as_str());
        if let Some(own) = tenant.and_then(|tenant| self.tenants.get_mut(tenant)) {
            own.usage.bytes += bytes;
        }
    }
}

fn refer(objects: &mut BTreeMap<u64, u64>, range: StoredRange) {
    *objects.entry(range.object).or_default() += 1;
}

fn release(objects: &mut BTreeMap<u64, u64>, range: StoredRange) {
    if let Some(count) = objects.get_mut(&range.object) {
        *count -= 1;
        if *count == 0 {
            objects.remove(&range.object);
        }
    }
}

/// Plans the chunks of a batch: the lines of each segment that its endpoint can compute, by deployment. `job` makes the
/// identifiers of their jobs.
pub fn plan(
    file: &UploadedFile,
    operation: JobOperation,
    mut job: impl FnMut() -> DurableJobId,
) -> Vec<PlannedChunk> {
    let mut chunks = Vec::new();
    for (index, segment) in file.segments.iter().enumerate() {
        for group in segment.groups.iter().filter(|group| group.operation == operation) {
            chunks.push(PlannedChunk {
                segment: index as u32,
                deployment: group.deployment.clone(),
                lines: group.lines,
                inputs: group.inputs,
                tokens: group.tokens,
                job: job(),
            });
        }
    }
    chunks
}
