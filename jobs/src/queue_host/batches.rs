//! Files and batches of a queue: uploads, creation, results, and their deletion.

use super::{QueueError, QueueHost, Shared, check_recent, now, since_epoch};
use crate::objects::ObjectError;
use crate::space::StoredContent;
use bytes::Bytes;
use jobs_core::batch::id::{BatchFileId, BatchId, UploadId};
use jobs_core::batch::output;
use jobs_core::batch::segment::FileSegment;
use jobs_core::batch::state::{
    self, Batch, BatchProgress, BatchSpec, ChunkResult, FileDeletion, UploadedFile,
};
use jobs_core::decide;
use jobs_core::erasure::{ContentOwner, PARTS_MAX};
use jobs_core::job::{BatchChunkRef, DurableJobId, IdempotencyKey, JobOperation, StoredRange, UnixMillis};
use jobs_core::queue::RecordEffect;
use jobs_core::record::JobRecord;
use rand::Rng;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Batches, and files, that are removed at once.
const RETIRED_MAX: usize = 1_000;
/// Stored parts of them, a twentieth of those that may wait for their erasure. One file or batch may have more.
const RETIRED_PARTS_MAX: usize = PARTS_MAX / 20;

/// File to be stored.
#[derive(Debug, Clone)]
pub struct NewUpload {
    /// Tenant.
    pub tenant: String,
    /// Name that the client gave it.
    pub name: String,
    /// Content.
    pub text: Bytes,
    /// Deployments that it names and that the tenant may use.
    pub models: BTreeSet<String>,
    /// Its segments.
    pub segments: Vec<(Range<usize>, FileSegment)>,
    /// Residency policy under which it is accepted.
    pub residency: Option<String>,
    /// Idempotency key of the upload.
    pub idempotency: Option<IdempotencyKey>,
}

/// File of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileInfo {
    /// Identifier.
    pub id: BatchFileId,
    /// Name.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// Creation.
    pub created: UnixMillis,
    /// Time from which it is deleted.
    pub expires: UnixMillis,
}

/// Files of a tenant as the queue has them, so that they can be rendered elsewhere than under its lock.
#[derive(Debug)]
pub struct FileRows {
    uploads: Vec<(UploadId, Arc<UploadedFile>)>,
    batches: Vec<(BatchId, BatchProgress)>,
    retention: Duration,
}

impl FileRows {
    /// Returns the files, the newest first.
    pub fn files(&self) -> Vec<FileInfo> {
        let uploads = self.uploads.iter().map(|(id, file)| uploaded(*id, file, self.retention));
        let of_batch = |(id, progress): &(BatchId, BatchProgress)| {
            [false, true].map(|of_errors| written(*id, progress, of_errors, self.retention))
        };
        let mut files: Vec<_> = uploads.chain(self.batches.iter().flat_map(of_batch).flatten()).collect();
        // A gateway sorts the lists of several regions by the text of the identifiers.
        files.sort_by_cached_key(|file| Reverse((file.id.number(), file.id.to_string())));
        files
    }
}

fn uploaded(id: UploadId, file: &UploadedFile, retention: Duration) -> FileInfo {
    let (id, created) = (BatchFileId::Upload(id), id.0.submitted());
    FileInfo { id, name: file.name.clone(), bytes: file.bytes, created, expires: created.after(retention) }
}

/// Returns the output file or the error file of a batch, if it exists.
fn written(id: BatchId, progress: &BatchProgress, of_errors: bool, retention: Duration) -> Option<FileInfo> {
    let BatchProgress { ended, output_bytes, error_bytes, .. } = *progress;
    let created = ended.filter(|_| progress.has_file(of_errors))?;
    let (id, bytes, name) = match of_errors {
        false => (BatchFileId::Output(id), output_bytes, format!("{id}_output.jsonl")),
        true => (BatchFileId::Errors(id), error_bytes, format!("{id}_error.jsonl")),
    };
    Some(FileInfo { id, name, bytes, created, expires: created.after(retention) })
}

/// Origin of the content of a file or a batch: what decides who may read it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContentOrigin {
    /// Residency policy under which it was accepted; absent if an earlier version has accepted it.
    pub residency: Option<String>,
    /// Deployments that its lines name.
    pub deployments: BTreeSet<String>,
}

/// Stored content of a file: what is read and merged together, in the order of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileContent {
    /// Bytes.
    pub bytes: u64,
    /// Parts.
    pub parts: Vec<Vec<StoredRange>>,
}

/// File or batch of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Created<T> {
    /// Its identifier.
    pub id: T,
    /// Whether the request has created it, and no earlier one with the same idempotency key.
    pub is_new: bool,
}

/// Work of the job of a chunk, beside its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkWork {
    /// Batch.
    pub batch: BatchId,
    /// Operation.
    pub operation: JobOperation,
    /// Segment of the payload.
    pub segment: FileSegment,
    /// Models of the file.
    pub models: BTreeSet<String>,
}

/// Lines that a chunk has produced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChunkLines {
    /// Lines for the output file.
    pub output: Bytes,
    /// Lines for the error file.
    pub errors: Bytes,
    /// Number of lines with a response.
    pub completed: u32,
    /// Number of lines with an error.
    pub failed: u32,
}

impl ChunkLines {
    /// Returns the parts that are stored.
    pub(super) fn parts(&self) -> impl Iterator<Item = Bytes> {
        [self.output.clone(), self.errors.clone()].into_iter().filter(|part| !part.is_empty())
    }

    /// Returns the result when its [parts](ChunkLines::parts) are stored in these ranges.
    pub(super) fn stored(&self, ranges: &mut impl Iterator<Item = StoredRange>) -> ChunkResult {
        let ChunkLines { output, errors, completed, failed } = self;
        let mut range = |part: &Bytes| if part.is_empty() { None } else { ranges.next() };
        ChunkResult {
            output: range(output),
            errors: range(errors),
            completed: *completed,
            failed: *failed,
            output_bytes: output.len() as u64,
            error_bytes: errors.len() as u64,
        }
    }
}

/// Returns the file or the batch that has an idempotency key, if it was created by the same request.
fn same_or_conflict(number: DurableJobId, same_request: bool) -> Result<DurableJobId, QueueError> {
    if same_request { Ok(number) } else { Err(QueueError::OtherRequest(number)) }
}

fn number() -> DurableJobId {
    DurableJobId::new(now(), rand::rng().random())
}

/// Returns the numbers of jobs that are created together, in increasing order: jobs with the same deadline are computed in the
/// order of their numbers.
fn in_order(at: UnixMillis) -> impl FnMut() -> DurableJobId {
    // Half of the range is left, so the numbers do not wrap around.
    let mut next = rand::rng().random::<u128>() & ((1 << 79) - 1);
    move || {
        next += 1;
        DurableJobId::new(at, next)
    }
}

impl QueueHost {
    /// Waits until everything is applied that was confirmed before this call, also by another process.
    ///
    /// # Errors
    ///
    /// When the log cannot be read.
    pub async fn catch_up(&self) -> Result<(), QueueError> {
        self.shared.catch_up().await
    }

    /// Stores a file and returns its identifier when it is durable, or that of the file with the same idempotency key. The tenant's
    /// files have at most `limit` bytes with it.
    ///
    /// # Errors
    ///
    /// When the limit would be exceeded, the key belongs to another file, or the store cannot be written.
    pub async fn store_file(&self, file: NewUpload, limit: u64) -> Result<Created<UploadId>, QueueError> {
        let NewUpload { tenant, name, text, models, segments, residency, idempotency } = file;
        let bytes = text.len() as u64;
        // While the log cannot be written, each attempt would leave the file.
        self.shared.catch_up().await?;
        if let Some(earlier) = self.with_key(&tenant, idempotency)? {
            return Ok(Created { id: UploadId(earlier), is_new: false });
        }
        let usage = self.shared.applied.lock().queue.batches().usage_of(&tenant);
        decide::check_file(usage, bytes, segments.len(), limit)?;
        self.shared.objects.check_space(StoredContent::NewWork).await?;
        let parts: Vec<_> = segments.iter().map(|(range, _)| text.slice(range.clone())).collect();
        let ranges = self.shared.objects.put(&parts, since_epoch()).await?;
        check_recent(&ranges)?;
        let segments = segments.into_iter().zip(ranges.clone());
        let segments = segments.map(|((_, segment), range)| FileSegment { range, ..segment }).collect();
        let file = UploadedFile { tenant, name, bytes, models, segments, residency, idempotency };
        let id = UploadId(number());
        let record = JobRecord::FileUploaded { id, file: Box::new(file) };
        match self.shared.append(vec![record]).await?.1.pop() {
            // The same upload at the same time.
            Some(RecordEffect::AlreadyExists { id, same_request }) => {
                self.shared.discard(ranges);
                let id = same_or_conflict(id, same_request).map(UploadId)?;
                Ok(Created { id, is_new: false })
            }
            _ => Ok(Created { id, is_new: true }),
        }
    }

    /// Returns the number of the file or the batch of a tenant that has an idempotency key.
    ///
    /// # Errors
    ///
    /// When it was created by another request.
    pub fn with_key(
        &self,
        tenant: &str,
        key: Option<IdempotencyKey>,
    ) -> Result<Option<DurableJobId>, QueueError> {
        let owner = key.and_then(|key| self.shared.applied.lock().queue.batches().with_key(tenant, &key));
        owner.map(|owner| same_or_conflict(owner.number, owner.same_request)).transpose()
    }

    /// Returns an uploaded file of a tenant with its segments.
    pub fn upload(&self, tenant: &str, id: UploadId) -> Option<Arc<UploadedFile>> {
        self.shared.applied.lock().queue.batches().file(tenant, id).cloned()
    }

    /// Returns a file of a tenant.
    pub fn file(&self, tenant: &str, id: BatchFileId) -> Option<FileInfo> {
        let applied = self.shared.applied.lock();
        let (table, retention) = (applied.queue.batches(), self.shared.config.retention);
        let (batch, of_errors) = match id {
            BatchFileId::Upload(id) => return Some(uploaded(id, table.file(tenant, id)?, retention)),
            BatchFileId::Output(batch) => (batch, false),
            BatchFileId::Errors(batch) => (batch, true),
        };
        written(batch, &table.written(tenant, batch, of_errors)?.progress, of_errors, retention)
    }

    /// Returns the files of a tenant as the queue has them.
    pub fn file_rows(&self, tenant: &str) -> FileRows {
        let applied = self.shared.applied.lock();
        let table = applied.queue.batches();
        FileRows {
            uploads: table.files_of(tenant).map(|(id, file)| (id, file.clone())).collect(),
            batches: table.batches_of(tenant, None).map(|(id, batch)| (id, batch.progress)).collect(),
            retention: self.shared.config.retention,
        }
    }

    /// Returns the origin of the content of a file of a tenant.
    pub fn origin(&self, tenant: &str, id: BatchFileId) -> Option<ContentOrigin> {
        let batch = match id {
            BatchFileId::Upload(id) => {
                let applied = self.shared.applied.lock();
                let file = applied.queue.batches().file(tenant, id)?;
                let (residency, deployments) = (file.residency.clone(), file.models.clone());
                return Some(ContentOrigin { residency, deployments });
            }
            BatchFileId::Output(batch) | BatchFileId::Errors(batch) => batch,
        };
        self.batch_origin(tenant, batch)
    }

    /// Returns the origin of the content of a batch of a tenant.
    pub fn batch_origin(&self, tenant: &str, id: BatchId) -> Option<ContentOrigin> {
        let (batch, file) = {
            let applied = self.shared.applied.lock();
            let table = applied.queue.batches();
            let batch = table.batch(id).filter(|batch| batch.spec.tenant == tenant)?;
            (batch.clone(), table.file_of(batch).cloned())
        };
        // The file may be deleted, and an earlier version has not copied its models. Then the computed lines are those of the
        // chunks.
        let mut deployments = batch.spec.models.clone();
        deployments.extend(batch.chunks.iter().map(|chunk| chunk.deployment.clone()));
        deployments.extend(file.into_iter().flat_map(|file| file.models.clone()));
        Some(ContentOrigin { residency: batch.spec.residency.clone(), deployments })
    }

    /// Returns where the content of a file of a tenant is stored.
    pub fn content(&self, tenant: &str, id: BatchFileId) -> Option<FileContent> {
        let applied = self.shared.applied.lock();
        let table = applied.queue.batches();
        let (batch, of_errors) = match id {
            BatchFileId::Upload(id) => {
                let file = table.file(tenant, id)?;
                let parts = file.segments.iter().map(|segment| vec![segment.range]).collect();
                return Some(FileContent { bytes: file.bytes, parts });
            }
            BatchFileId::Output(batch) => (batch, false),
            BatchFileId::Errors(batch) => (batch, true),
        };
        let batch = table.written(tenant, batch, of_errors)?;
        let bytes = if of_errors { batch.progress.error_bytes } else { batch.progress.output_bytes };
        Some(FileContent { bytes, parts: batch.parts(of_errors).into_values().collect() })
    }

    /// Reads the next bytes of a file of a tenant.
    ///
    /// # Errors
    ///
    /// When the file was deleted meanwhile, or the store cannot be read.
    pub async fn read_part(
        &self,
        tenant: &str,
        id: BatchFileId,
        part: &[StoredRange],
    ) -> Result<Bytes, QueueError> {
        let mut read = Vec::with_capacity(part.len());
        for range in part {
            read.push(self.shared.objects.get(*range).await?);
        }
        // The bytes of a deleted file may have been overwritten with zeros, by another process as well.
        self.shared.catch_up().await?;
        self.file(tenant, id).ok_or(QueueError::Unknown)?;
        match read.as_slice() {
            [one] => Ok(one.clone()),
            several => {
                let bytes = several.iter().map(Bytes::len).sum();
                let merge =
                    move || output::merge(&read.iter().map(AsRef::as_ref).collect::<Vec<&[u8]>>()).into();
                Ok(self.shared.cpu.run(bytes, merge).await)
            }
        }
    }

    /// Deletes a file of a tenant.
    ///
    /// # Errors
    ///
    /// When the log cannot be written.
    pub async fn delete_file(&self, tenant: &str, id: BatchFileId) -> Result<FileDeletion, QueueError> {
        let content = self.content(tenant, id);
        let record = JobRecord::FileDeleted { tenant: tenant.to_owned(), id };
        let ranges = content.into_iter().flat_map(|content| content.parts).flatten().collect();
        let owner = match id {
            BatchFileId::Upload(id) => ContentOwner::Upload(id),
            BatchFileId::Output(id) | BatchFileId::Errors(id) => ContentOwner::Batch(id),
        };
        match self.shared.append(vec![record]).await {
            Ok((_, mut effects)) => match effects.pop() {
                Some(RecordEffect::FileDeletion(deletion)) => {
                    if deletion == FileDeletion::Deleted {
                        self.shared.discard_of(owner, ranges);
                    }
                    Ok(deletion)
                }
                _ => Ok(FileDeletion::Unknown),
            },
            // The record may be stored, and the client does not find the file when it tries again.
            Err(error) => {
                self.shared.removals.lock().add(owner, ranges);
                Err(error)
            }
        }
    }

    /// Creates a batch and returns its identifier when it is durable, or that of the batch with the same idempotency key. The
    /// tenant's files have less than `limit` bytes before it.
    ///
    /// # Errors
    ///
    /// When its file does not exist, a limit of the tenant would be exceeded, the key belongs to another batch, or the log cannot
    /// be written.
    pub async fn create_batch(&self, spec: BatchSpec, limit: u64) -> Result<Created<BatchId>, QueueError> {
        let mut records = Vec::with_capacity(2);
        let chunks = {
            let applied = self.shared.applied.lock();
            let table = applied.queue.batches();
            let file = table.file(&spec.tenant, spec.file).ok_or(QueueError::Unknown)?;
            let chunks = match spec.problems.is_empty() {
                true => state::plan(file, spec.operation, in_order(now())),
                false => Vec::new(),
            };
            let without_files = table.without_files(&spec.tenant);
            let batches =
                decide::check_batch(table.usage_of(&spec.tenant), chunks.len(), limit, without_files)?;
            if !batches.is_empty() {
                records.push(JobRecord::BatchesRemoved { batches, files: Vec::new() });
            }
            let (usage, limits) = (applied.queue.usage(&spec.tenant), &self.shared.config.limits);
            decide::check_batch_work(usage, limits, &chunks, file.bytes)?;
            chunks
        };
        self.shared.objects.check_space(StoredContent::NewWork).await?;
        let id = BatchId(number());
        records.push(JobRecord::BatchCreated { id, spec: Box::new(spec), chunks });
        match self.shared.append(records).await?.1.pop() {
            Some(RecordEffect::Changed) => Ok(Created { id, is_new: true }),
            Some(RecordEffect::AlreadyExists { id, same_request }) => {
                let id = same_or_conflict(id, same_request).map(BatchId)?;
                Ok(Created { id, is_new: false })
            }
            _ => Err(QueueError::Unknown),
        }
    }

    /// Returns a batch of a tenant.
    pub fn batch(&self, tenant: &str, id: BatchId) -> Option<Arc<Batch>> {
        let applied = self.shared.applied.lock();
        applied.queue.batches().batch(id).filter(|batch| batch.spec.tenant == tenant).cloned()
    }

    /// Returns a batch of any tenant.
    pub fn batch_of_any_tenant(&self, id: BatchId) -> Option<Arc<Batch>> {
        self.shared.applied.lock().queue.batches().batch(id).cloned()
    }

    /// Returns a page of the batches of a tenant, the newest first.
    pub fn batches(&self, tenant: &str, before: Option<BatchId>, count: usize) -> Vec<(BatchId, Arc<Batch>)> {
        let applied = self.shared.applied.lock();
        let page = applied.queue.batches().batches_of(tenant, before).take(count);
        page.map(|(id, batch)| (id, batch.clone())).collect()
    }

    /// Cancels a batch; returns false if it has ended or is being cancelled.
    ///
    /// # Errors
    ///
    /// When the log cannot be written.
    pub async fn cancel_batch(&self, id: BatchId) -> Result<bool, QueueError> {
        let (_, effects) = self.shared.append(vec![JobRecord::BatchCancelled { id, at: now() }]).await?;
        Ok(effects.last() == Some(&RecordEffect::Changed))
    }

    /// Returns the work of a chunk.
    pub fn chunk_work(&self, chunk: BatchChunkRef) -> Option<ChunkWork> {
        let applied = self.shared.applied.lock();
        let table = applied.queue.batches();
        let batch = table.batch(BatchId(chunk.batch))?;
        let file = table.file_of(batch)?;
        let segment = batch.chunks.get(chunk.chunk as usize)?.segment;
        Some(ChunkWork {
            batch: BatchId(chunk.batch),
            operation: batch.spec.operation,
            segment: file.segments.get(segment as usize)?.clone(),
            models: file.models.clone(),
        })
    }

    /// Returns the batches of which all chunks have ended and that wait for their error file.
    pub fn finalizing_batches(&self) -> Vec<BatchId> {
        self.shared.applied.lock().queue.batches().finalizing().collect()
    }

    /// Writes the error lines of the lines that no chunk has computed, and ends a batch. Another process may do the same at the
    /// same time; the second has no effect.
    ///
    /// # Errors
    ///
    /// When the store cannot be read or written.
    pub async fn finalize_batch(&self, id: BatchId) -> Result<(), QueueError> {
        // While the log cannot be written, each attempt would leave an object.
        self.shared.catch_up().await?;
        let (batch, file) = {
            let applied = self.shared.applied.lock();
            let table = applied.queue.batches();
            let Some(batch) = table.batch(id) else { return Ok(()) };
            let Some(file) = table.file_of(batch) else { return Err(QueueError::Unknown) };
            (batch.clone(), file.clone())
        };
        let operation = batch.spec.operation;
        let uncomputed = batch.uncomputed_segments(&file);
        let mut parts = Vec::with_capacity(uncomputed.len());
        for (index, lost) in uncomputed {
            let segment = &file.segments[index as usize];
            let text = match self.shared.objects.get(segment.range).await {
                Ok(text) => text,
                // Otherwise the batch would never end.
                Err(error @ (ObjectError::Missing(_) | ObjectError::Undecryptable(_))) => {
                    let message = format!(
                        "The stored lines from this one on ({} requests) cannot be read: {error}.",
                        segment.requests
                    );
                    let (mut line, of_line) = (String::new(), (segment.first_line, id));
                    output::push_error(&mut line, of_line, None, "request_failed", &message);
                    parts.push((index, Bytes::from(line)));
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let lost: Vec<_> =
                lost.into_iter().map(|(deployment, reason)| (deployment.to_owned(), reason)).collect();
            let (bytes, file) = (text.len(), file.clone());
            let write = move || {
                let lost =
                    lost.iter().map(|(deployment, reason)| (deployment.as_str(), reason.clone())).collect();
                let segment = &file.segments[index as usize];
                output::uncomputed(id, operation, (&text, segment, &file.models), &lost)
            };
            let lines = self.shared.cpu.run(bytes, write).await;
            if !lines.is_empty() {
                parts.push((index, Bytes::from(lines)));
            }
        }
        let error_bytes = parts.iter().map(|(_, part)| part.len() as u64).sum();
        let ranges = match parts.is_empty() {
            true => Vec::new(),
            false => {
                let lines: Vec<_> = parts.iter().map(|(_, part)| part.clone()).collect();
                self.shared.objects.check_space(StoredContent::Result).await?;
                self.shared.objects.put(&lines, since_epoch()).await?
            }
        };
        check_recent(&ranges)?;
        let uncomputed = parts.iter().map(|(index, _)| *index).zip(ranges.clone()).collect();
        let record = JobRecord::BatchFinalized { id, uncomputed, error_bytes, at: now() };
        let (_, effects) = self.shared.append(vec![record]).await?;
        if effects.last() != Some(&RecordEffect::Changed) {
            self.shared.discard(ranges);
        }
        Ok(())
    }
}

impl Shared {
    /// Removes the files and batches whose retention time has passed.
    pub(super) async fn remove_retired_batches(&self, retention: Duration) -> Result<(), QueueError> {
        let by = UnixMillis(now().0.saturating_sub(retention.as_millis() as u64));
        let (batches, files) = {
            let applied = self.applied.lock();
            let table = applied.queue.batches();
            let (batches, files) = table.retired(by, RETIRED_MAX);
            let mut parts = 0;
            let mut removals = self.removals.lock();
            let mut fits = |owner: ContentOwner| {
                let ranges = applied.queue.stored(owner);
                parts += ranges.len();
                let fits = parts == ranges.len() || parts <= RETIRED_PARTS_MAX;
                if fits {
                    removals.add(owner, ranges);
                }
                fits
            };
            let batches: Vec<_> =
                batches.into_iter().take_while(|id| fits(ContentOwner::Batch(*id))).collect();
            let files: Vec<_> = files.into_iter().take_while(|id| fits(ContentOwner::Upload(*id))).collect();
            (batches, files)
        };
        if batches.is_empty() && files.is_empty() {
            return Ok(());
        }
        self.append(vec![JobRecord::BatchesRemoved { batches, files }]).await.map(drop)
    }
}
