//! Receipts on disk: one chain per process, written by one thread off the request path.
//!
//! A finished request hands its record over ([`Recorder::record`]): one move into a bounded queue, which never waits. A
//! [`writer`] thread converts it into entries, appends them to the current file and makes them durable at least once a
//! second. Receipts that cannot be written are counted, and recorded as a gap as soon as a write succeeds: none is
//! dropped silently, and no request waits for a disk.
//!
//! With `required = true` a request of a locked deployment is admitted only with a [`QueueSlot`], and forwarded only
//! when its write-ahead receipt is durable ([`Recorder::commit`]): the writer makes one fsync for all requests that
//! wait for one (group commit). If that fails, the request is rejected and not forwarded.
//!
//! The process that owns the chain closes it ([`WriterHandle::finish`]), even while others still hold a [`Recorder`].

mod audit;
mod batch;
mod file;
mod pending;
mod write_ahead;
mod writer;

pub use audit::{audit, files_in};
pub(crate) use file::try_lock;
pub(crate) use write_ahead::{Receiving, Sending, WriteAhead};

use crate::events::FinishedRequest;
use crate::metrics::{Counter, Family, Histogram, InGateway};
use configuration::{ConfigFile, Files};
use gateway_core::labels::AttemptResult;
use gateway_core::receipt::entry::{GapReason, Role};
use gateway_core::receipt::{AttemptKey, PseudonymKey, ReceiptContent, ReceiptId};
use metrics::{Label, metric_set};
use pending::PendingSince;
use rand::Rng;
use regions::id::{DeploymentName, RegionId};
use scheduler_core::receipts::ReceiptsSection;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot};

/// Maximum number of queued messages: a second of a busy gateway, at about 300 bytes each.
pub const QUEUE_MAX: usize = 16_384;
/// File size at which the next file is begun: ten minutes of 250 requests/s. An audit reads one file at a time.
pub const FILE_BYTES_MAX: u64 = 64 << 20;
/// Timeout for a receipt to become durable. A disk that takes longer for one fsync is considered failed.
const COMMIT_MAX: Duration = Duration::from_secs(5);

/// Configuration of receipts.
#[derive(Clone)]
pub struct ReceiptsConfig {
    /// Directory of the files.
    pub dir: PathBuf,
    /// Key of the tenants' pseudonyms.
    pub key: PseudonymKey,
    /// Whether requests of locked deployments are rejected when their receipts cannot be written.
    pub required: bool,
    /// Queue capacity: [`QUEUE_MAX`], and less in tests.
    pub queue: usize,
    /// File size limit: [`FILE_BYTES_MAX`], and less in tests.
    pub file_bytes: u64,
}

impl ReceiptsConfig {
    /// Validates the `[receipts]` section, and reads the key from its file or environment variable.
    pub fn read(
        section: ReceiptsSection,
        document: &ConfigFile<'_>,
        files: &Files<'_>,
    ) -> Option<ReceiptsConfig> {
        let ReceiptsSection { dir, key_file, key_env, required } = section;
        if key_file.is_none() && key_env.is_none() {
            document.problem("receipts", "needs one of key_file and key_env: the key of tenants' pseudonyms");
        }
        let key = files.secret(document, "receipts.key", key_file.as_deref(), key_env.as_deref(), |secret| {
            PseudonymKey::new(secret.trim().as_bytes()).ok_or_else(|| {
                let least = PseudonymKey::SECRET_BYTES_MIN;
                format!("holds a key of fewer than {least} bytes, which could be guessed; make it longer")
            })
        });
        let (queue, file_bytes) = (QUEUE_MAX, FILE_BYTES_MAX);
        Some(ReceiptsConfig { dir: files.path(dir), key: key?, required, queue, file_bytes })
    }
}

/// Record of a finished request at the ingress.
pub(crate) struct Received {
    pub(crate) request: String,
    pub(crate) attempt: u32,
    pub(crate) tenant: Option<String>,
    pub(crate) deployment: Option<DeploymentName>,
    /// Residency header as received; absent where there is none.
    pub(crate) residency: Option<String>,
    pub(crate) at_ms: u64,
    pub(crate) took: Duration,
    pub(crate) outcome: &'static str,
    /// Key of the attempt, if its gateway sent one.
    pub(crate) key: Option<AttemptKey>,
    /// Number of its [`Receiving`] entry, if there is one.
    pub(crate) number: Option<u64>,
}

/// Message to the writer.
pub(crate) enum WriterMessage {
    /// Finished request of a gateway.
    Finished(Arc<FinishedRequest>),
    /// Finished request of an ingress.
    Received(Box<Received>),
    /// Entry that is made durable before a request is forwarded, and the channel that reports it.
    WriteAhead(Box<WriteAhead>, oneshot::Sender<bool>),
    /// End of the chain. No message follows.
    Close,
}

impl WriterMessage {
    /// Returns the number of receipts in the message. A write-ahead entry counts as none: if it cannot be written, the
    /// request is not forwarded, so no receipt is missing.
    fn receipts(&self) -> u64 {
        match self {
            // A request is sent only after it was parsed and authenticated.
            WriterMessage::Finished(request) => {
                let sent = |end| AttemptResult::from(end) != AttemptResult::ReceiptUnavailable;
                request.trail.attempts().filter(|attempt| sent(attempt.end)).count() as u64
            }
            WriterMessage::Received(_) => 1,
            WriterMessage::WriteAhead(..) | WriterMessage::Close => 0,
        }
    }

    /// Returns the end of the request in milliseconds since 1970, when the message was queued; `None` for the other messages.
    fn ended_ms(&self) -> Option<u64> {
        match self {
            WriterMessage::Finished(request) => Some(request.at_ms + request.total.as_millis() as u64),
            WriterMessage::Received(request) => Some(request.at_ms + request.took.as_millis() as u64),
            WriterMessage::WriteAhead(..) | WriterMessage::Close => None,
        }
    }
}

/// State shared by the writer and its recorders.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Receipts that did not fit into the queue and are not in a gap yet, and since when.
    overflowed: AtomicU64,
    overflowed_since_ms: AtomicU64,
    /// Whether the last write failed.
    failing: AtomicBool,
    /// Age of the oldest receipt that is not durable.
    pending: PendingSince,
    /// Time of the first request rejected for lack of a receipt that is not recorded yet.
    rejected_since_ms: AtomicU64,
    counts: ReceiptCounts,
}

impl Label<InGateway> for GapReason {
    fn values() -> Vec<&'static str> {
        vec!["queue_full", "disk", "unsynced"]
    }

    fn index(self) -> usize {
        self as usize
    }
}

metric_set! {
    /// Counters of a writer and its recorders.
    #[derive(Debug, Default)]
    struct ReceiptCounts {
        /// Receipts that were written.
        written: Counter = "meridian_receipts_written_total",
        /// Bytes written to receipts files.
        bytes: Counter = "meridian_receipts_bytes_total",
        /// Fsyncs of receipts files.
        syncs: Counter = "meridian_receipts_syncs_total",
        /// Requests that were rejected because their receipt could not be made durable.
        rejected: Counter = "meridian_receipts_rejected_total",
        /// Receipts that could not be written and are part of a gap, by reason.
        lost: Family<GapReason> = "meridian_receipts_missing_total" ["reason"],
        /// Time that requests waited for their receipts to be durable.
        commits: Histogram = "meridian_receipts_commit_seconds",
    }
}

metric_set! {
    /// Metrics of receipts.
    pub(crate) struct ReceiptScrape<'a> {
        /// Counters.
        counts: &'a ReceiptCounts = set,
        /// 1 while receipts cannot be written to disk.
        failing: bool = "meridian_receipts_failing",
        /// Age of the oldest receipt that is queued or written and not durable yet; 0 without one.
        oldest_pending: Duration = "meridian_receipts_oldest_pending_seconds",
        /// Requests whose receipts wait to be written.
        waiting: Option<usize> = "meridian_receipts_waiting",
        /// Capacity of the queue of receipts.
        waiting_max: Option<usize> = "meridian_receipts_waiting_max",
    }
}

impl Shared {
    fn failing(&self) -> bool {
        self.failing.load(Ordering::Relaxed)
    }

    /// Counts a request that was rejected, or an attempt that was not made, for lack of a receipt.
    fn reject(&self) {
        let _ = self.rejected_since_ms.compare_exchange(0, now_ms(), Ordering::Relaxed, Ordering::Relaxed);
        self.counts.rejected.add(1);
    }
}

/// Error that prevents receipts.
#[derive(Debug, thiserror::Error)]
pub enum ReceiptsError {
    /// The directory of the receipts or a file in it cannot be used. The process does not start.
    #[error(
        "receipts cannot be written in {dir}: {source}; make the directory writable, or set receipts.dir to another"
    )]
    Dir {
        /// Directory.
        dir: String,
        /// Cause.
        source: io::Error,
    },
}

/// Handle by which requests submit receipts.
#[derive(Clone)]
pub(crate) struct Recorder {
    queue: mpsc::Sender<WriterMessage>,
    shared: Arc<Shared>,
    chain: Arc<str>,
    required: bool,
    /// Prefix of the keys of this process's attempts.
    process: u64,
    numbers: Arc<AtomicU64>,
    writer: Thread,
}

/// Handle of the writer, with which the owner closes the chain.
pub(crate) struct WriterHandle {
    queue: mpsc::Sender<WriterMessage>,
    done: oneshot::Receiver<()>,
}

/// Reserved slot of the queue.
pub(crate) struct QueueSlot(mpsc::OwnedPermit<WriterMessage>);

/// Error: a receipt could not be made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CommitFailed;

impl Recorder {
    /// Opens a chain for this process, or continues one that another process left, and starts its writer.
    ///
    /// # Errors
    ///
    /// Fails if the directory cannot be used.
    pub(crate) fn start(
        config: &ReceiptsConfig,
        role: Role,
        location: &RegionId,
        regions: Vec<RegionId>,
    ) -> Result<(Recorder, WriterHandle), ReceiptsError> {
        let (queue, messages) = mpsc::channel(config.queue);
        let shared = Arc::new(Shared::default());
        let process = rand::rng().random();
        let dir_problem = |source| ReceiptsError::Dir { dir: config.dir.display().to_string(), source };
        let writer = writer::Writer::open(config, role, location, regions, process, shared.clone())
            .map_err(dir_problem)?;
        let chain: Arc<str> = writer.chain().into();
        let (ended, done) = oneshot::channel();
        let run = move || {
            writer.run(messages);
            // The owner may have stopped waiting.
            ended.send(()).ok();
        };
        let thread = supervision::task::thread("receipts", run).map_err(dir_problem)?;
        let writing = WriterHandle { queue: queue.clone(), done };
        let (required, writer) = (config.required, thread.thread().clone());
        let numbers = Arc::new(AtomicU64::new(1));
        Ok((Recorder { queue, shared, chain, required, process, numbers, writer }, writing))
    }

    /// Returns whether a request of a locked deployment needs a [`QueueSlot`], and a durable receipt before it is
    /// forwarded.
    pub(crate) fn required(&self) -> bool {
        self.required
    }

    /// Returns the next number of an attempt or arrival of this process.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the key of the attempt with this number.
    pub(crate) fn key(&self, number: u64) -> AttemptKey {
        AttemptKey { gateway: self.process, number }
    }

    /// Reserves a slot for one request's receipts; `None` if the queue is full or the last write failed.
    pub(crate) fn reserve(&self) -> Option<QueueSlot> {
        let failing = self.shared.failing();
        let slot = (!failing).then(|| self.queue.clone().try_reserve_owned().ok()).flatten();
        if slot.is_none() {
            self.shared.reject();
        }
        slot.map(QueueSlot)
    }

    /// Makes the receipt of a request durable before the request is forwarded.
    ///
    /// # Errors
    ///
    /// Fails if the receipt is not known to be durable; the request must not be forwarded then.
    pub(crate) async fn commit(&self, entry: WriteAhead) -> Result<(), CommitFailed> {
        let started = Instant::now();
        self.shared.pending.queued(now_ms());
        let (reply, durable) = oneshot::channel();
        if self.queue.try_send(WriterMessage::WriteAhead(Box::new(entry), reply)).is_err() {
            self.shared.reject();
            return Err(CommitFailed);
        }
        self.writer.unpark();
        let durable = tokio::time::timeout(COMMIT_MAX, durable).await;
        self.shared.counts.commits.observe(started.elapsed());
        if matches!(durable, Ok(Ok(true))) {
            return Ok(());
        }
        self.shared.reject();
        Err(CommitFailed)
    }

    /// Submits a message. Never waits: if the queue is full and no slot was reserved, its receipts are counted and
    /// become part of a gap.
    pub(crate) fn record(&self, message: WriterMessage, slot: Option<QueueSlot>) {
        if message.receipts() > 0 {
            self.shared.pending.queued(now_ms());
        }
        if let Some(QueueSlot(slot)) = slot {
            drop(slot.send(message));
            return;
        }
        if message.receipts() == 0 {
            return;
        }
        if let Err(mpsc::error::TrySendError::Full(message) | mpsc::error::TrySendError::Closed(message)) =
            self.queue.try_send(message)
        {
            let receipts = message.receipts();
            let _ = self.shared.overflowed_since_ms.compare_exchange(
                0,
                now_ms(),
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            self.shared.overflowed.fetch_add(receipts, Ordering::Release);
            self.shared.counts.lost.of(GapReason::QueueFull).add(receipts);
        }
    }

    /// Returns the identifier that the receipt of an attempt has or will have.
    pub(crate) fn id(
        &self,
        request: &str,
        attempt: u32,
        region: &str,
        residency: &str,
        at_ms: u64,
        number: u64,
    ) -> ReceiptId {
        let key = Some(self.key(number));
        ReceiptContent { chain: &self.chain, request, attempt, region, residency, at_ms, key }.id()
    }

    /// Returns the metrics. They do not keep the writer from ending.
    pub(crate) fn metrics(&self) -> ReceiptMetrics {
        ReceiptMetrics { queue: self.queue.downgrade(), shared: self.shared.clone() }
    }
}

/// Metrics of a [`Recorder`].
#[derive(Clone)]
pub(crate) struct ReceiptMetrics {
    queue: mpsc::WeakSender<WriterMessage>,
    shared: Arc<Shared>,
}

impl ReceiptMetrics {
    pub(crate) fn scrape(&self) -> ReceiptScrape<'_> {
        let queue = self.queue.upgrade();
        let waiting = queue.as_ref().map(|queue| queue.max_capacity() - queue.capacity());
        ReceiptScrape {
            counts: &self.shared.counts,
            failing: self.shared.failing(),
            oldest_pending: self.shared.pending.age(waiting.unwrap_or(0) > 0, now_ms()),
            waiting,
            waiting_max: queue.as_ref().map(mpsc::Sender::max_capacity),
        }
    }
}

impl WriterHandle {
    /// Closes the chain after all messages submitted before are written; waits for that at most `within`.
    pub(crate) async fn finish(self, within: Duration) {
        let WriterHandle { queue, done } = self;
        let written = async {
            if queue.send(WriterMessage::Close).await.is_ok() {
                done.await.ok();
            }
        };
        if tokio::time::timeout(within, written).await.is_err() {
            // Receipts of the last requests may be missing. Check the disk.
            tracing::error!(?within, "writing the last receipts timed out");
        }
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
