//! Receipts on disk: one chain for each process, written off the request path by one thread.
//!
//! A request hands over what there is to say of it when it is over ([`Recorder::record`]): one move into a bounded queue,
//! which never waits. A [`writer`] thread turns it into entries, appends them to the current file and makes them durable
//! at least once a second. What cannot be written is counted, and written as a gap as soon as something can be: nothing is
//! dropped silently, and no request waits for a disk.
//!
//! With `required = true` a request of a locked deployment is admitted only with a [`Promise`] of a place in the queue, and
//! forwarded only when the receipt of that is durable ([`Recorder::commit`]): the writer makes one fsync for all requests
//! that wait for one (group commit). Without it nothing is forwarded, and the request is rejected.
//!
//! The process that owns the chain ends it ([`Writing::finish`]); it does not depend on who else still has a [`Recorder`].

mod audit;
mod batch;
mod before;
mod file;
mod writer;

pub use audit::{audit, files_in};
pub(crate) use before::{Before, Receiving, Sending};

use crate::events::Finished;
use crate::metrics::{Count, Histogram, Kind, Text};
use gateway_core::labels::AttemptResult;
use gateway_core::receipt::entry::{GapReason, Role};
use gateway_core::receipt::{AttemptKey, PseudonymKey, ReceiptContent, ReceiptId};
use rand::Rng;
use regions::id::{DeploymentName, RegionId};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot};

/// Requests whose receipts wait to be written: a second of a busy edge, at about 300 bytes each.
pub const QUEUE_MAX: usize = 16_384;
/// A file that has grown to this is followed by another: ten minutes of 250 requests/s, and read by an audit at once.
pub const FILE_BYTES_MAX: u64 = 64 << 20;
/// Timeout for a receipt to become durable. A disk that takes longer for one fsync does not respond.
const COMMIT_MAX: Duration = Duration::from_secs(5);

/// How receipts are kept.
#[derive(Clone)]
pub struct ReceiptsConfig {
    /// The folder of their files.
    pub dir: PathBuf,
    /// What makes a tenant's pseudonym.
    pub key: PseudonymKey,
    /// Whether requests of locked deployments are refused when their receipts cannot be kept.
    pub required: bool,
    /// [`QUEUE_MAX`], and in tests less.
    pub queue: usize,
    /// [`FILE_BYTES_MAX`], and in tests less.
    pub file_bytes: u64,
}

impl ReceiptsConfig {
    /// Receipts in `dir` under the key that stands in a file or in the environment, which are what a person wrote under
    /// `[receipts]`.
    ///
    /// # Errors
    ///
    /// Every problem, each naming the key, the value and what to write instead.
    pub fn read(
        raw: RawReceipts,
        base: &Path,
        environment: &BTreeMap<String, String>,
    ) -> Result<ReceiptsConfig, Vec<String>> {
        let RawReceipts { dir, key_file, key_env, required } = raw;
        let secret = match (&key_file, &key_env) {
            (Some(path), None) => std::fs::read_to_string(base.join(path)).map_err(|error| {
                format!("receipts.key_file = \"{}\" cannot be read: {error}", path.display())
            }),
            (None, Some(variable)) => environment
                .get(variable)
                .cloned()
                .ok_or_else(|| format!("receipts.key_env = \"{variable}\" is not set in the environment")),
            (None, None) | (Some(_), Some(_)) => {
                Err("receipts needs one of key_file and key_env: the key of tenants' pseudonyms".to_owned())
            }
        };
        let key = secret.and_then(|secret| {
            PseudonymKey::new(secret.trim().as_bytes()).ok_or_else(|| {
                let least = PseudonymKey::SECRET_BYTES_MIN;
                format!(
                    "the key of receipts has fewer than {least} bytes and could be guessed; make it longer"
                )
            })
        });
        match key {
            Ok(key) => {
                let (queue, file_bytes) = (QUEUE_MAX, FILE_BYTES_MAX);
                Ok(ReceiptsConfig { dir: base.join(dir), key, required, queue, file_bytes })
            }
            Err(problem) => Err(vec![problem]),
        }
    }
}

/// `[receipts]`, as a person writes it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawReceipts {
    /// The folder of their files.
    pub dir: PathBuf,
    /// The file with the key of tenants' pseudonyms,
    pub key_file: Option<PathBuf>,
    /// or the variable that holds it.
    pub key_env: Option<String>,
    /// [`ReceiptsConfig::required`].
    #[serde(default)]
    pub required: bool,
}

/// What a region's door says of a request, once it is over.
pub(crate) struct Received {
    pub(crate) request: String,
    pub(crate) attempt: u32,
    pub(crate) tenant: Option<String>,
    pub(crate) deployment: Option<DeploymentName>,
    /// As it was written; absent where there is no condition.
    pub(crate) residency: Option<String>,
    pub(crate) at_ms: u64,
    pub(crate) took: Duration,
    pub(crate) outcome: &'static str,
    /// The key of the attempt, if its gateway gave one.
    pub(crate) key: Option<AttemptKey>,
    /// The number of its [`Receiving`], if there is one.
    pub(crate) number: Option<u64>,
}

/// Something to be written.
pub(crate) enum Told {
    /// What an edge knows of a request that is over.
    Sent(Arc<Finished>),
    /// What a region's door says of one.
    Received(Box<Received>),
    /// Entry that is made durable before a request is forwarded, and the channel that reports it.
    Before(Box<Before>, oneshot::Sender<bool>),
    /// Nothing comes after this.
    Close,
}

impl Told {
    /// How many receipts it is. A request that waits to be forwarded has none yet: if this cannot be written it is not
    /// forwarded, and nothing is missing.
    fn receipts(&self) -> u64 {
        match self {
            // Nothing was sent before it was understood, and by whom it was asked.
            Told::Sent(request) => {
                let sent = |end| AttemptResult::from(end) != AttemptResult::ReceiptUnavailable;
                request.trail.attempts().filter(|attempt| sent(attempt.end)).count() as u64
            }
            Told::Received(_) => 1,
            Told::Before(..) | Told::Close => 0,
        }
    }
}

/// What the writer and those who tell it share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// Receipts that found the queue full and are in no gap yet, and since when.
    overflowed: AtomicU64,
    overflowed_since_ms: AtomicU64,
    /// The disk does not take what it is given.
    failing: AtomicBool,
    written: Count,
    bytes: Count,
    syncs: Count,
    /// Receipts that were lost, by why; they are in a gap, or will be.
    lost: [Count; 3],
    /// Requests that were rejected for want of a receipt, and since when some of them were not written yet.
    rejected: Count,
    rejected_since_ms: AtomicU64,
    /// Histogram of the time until a receipt is durable.
    commits: Histogram,
}

impl Shared {
    fn lost(&self, why: GapReason) -> &Count {
        &self.lost[why as usize]
    }

    fn failing(&self) -> bool {
        self.failing.load(Ordering::Relaxed)
    }

    /// A request was rejected, or an attempt not made, for want of a receipt.
    fn reject(&self) {
        let _ = self.rejected_since_ms.compare_exchange(0, now_ms(), Ordering::Relaxed, Ordering::Relaxed);
        self.rejected.add(1);
    }
}

/// Why there can be no receipts.
#[derive(Debug, thiserror::Error)]
pub enum ReceiptsError {
    /// The folder or a file in it cannot be used.
    #[error("receipts cannot be kept in {dir}: {source}; make the folder writable, or give another")]
    Dir {
        /// Which.
        dir: String,
        /// Why.
        source: io::Error,
    },
}

/// Where receipts are handed in.
#[derive(Clone)]
pub(crate) struct Recorder {
    queue: mpsc::Sender<Told>,
    shared: Arc<Shared>,
    chain: Arc<str>,
    required: bool,
    /// Prefix of the keys of this process's attempts.
    process: u64,
    numbers: Arc<AtomicU64>,
    writer: Thread,
}

/// The end of the chain, which its owner makes.
pub(crate) struct Writing {
    queue: mpsc::Sender<Told>,
    done: oneshot::Receiver<()>,
}

/// A place in the queue.
pub(crate) struct Promise(mpsc::OwnedPermit<Told>);

/// A receipt could not be made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoReceipt;

impl Recorder {
    /// Opens the chain of this process, or goes on with one that another has left, and starts its writer.
    ///
    /// # Errors
    ///
    /// When the folder cannot be used.
    pub(crate) fn start(
        config: &ReceiptsConfig,
        role: Role,
        place: &RegionId,
        regions: Vec<RegionId>,
    ) -> Result<(Recorder, Writing), ReceiptsError> {
        let (queue, told) = mpsc::channel(config.queue);
        let shared = Arc::new(Shared::default());
        let process = rand::rng().random();
        let dir_problem = |source| ReceiptsError::Dir { dir: config.dir.display().to_string(), source };
        let writer = writer::Writer::open(config, role, place, regions, process, shared.clone())
            .map_err(dir_problem)?;
        let chain: Arc<str> = writer.chain().into();
        let (ended, done) = oneshot::channel();
        let run = move || {
            writer.run(told);
            // Whoever waits may have given up.
            ended.send(()).ok();
        };
        let thread = supervision::task::thread("receipts", run).map_err(dir_problem)?;
        let writing = Writing { queue: queue.clone(), done };
        let (required, writer) = (config.required, thread.thread().clone());
        let numbers = Arc::new(AtomicU64::new(1));
        Ok((Recorder { queue, shared, chain, required, process, numbers, writer }, writing))
    }

    /// Whether a request of a locked deployment needs a [`Promise`], and a receipt before it is forwarded.
    pub(crate) fn required(&self) -> bool {
        self.required
    }

    /// The next number of an attempt or arrival of this process.
    pub(crate) fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// The key of the attempt with this number.
    pub(crate) fn key(&self, number: u64) -> AttemptKey {
        AttemptKey { gateway: self.process, number }
    }

    /// A place for one request's receipts, if there is one and the disk takes what it is given.
    pub(crate) fn promise(&self) -> Option<Promise> {
        let failing = self.shared.failing();
        let place = (!failing).then(|| self.queue.clone().try_reserve_owned().ok()).flatten();
        if place.is_none() {
            self.shared.reject();
        }
        place.map(Promise)
    }

    /// Makes the receipt of a request durable that is about to be forwarded.
    ///
    /// # Errors
    ///
    /// When it is not known to be durable; then nothing of the request may be forwarded.
    pub(crate) async fn commit(&self, before: Before) -> Result<(), NoReceipt> {
        let begun = Instant::now();
        let (answer, answered) = oneshot::channel();
        if self.queue.try_send(Told::Before(Box::new(before), answer)).is_err() {
            self.shared.reject();
            return Err(NoReceipt);
        }
        self.writer.unpark();
        let durable = tokio::time::timeout(COMMIT_MAX, answered).await;
        self.shared.commits.observe(begun.elapsed());
        if matches!(durable, Ok(Ok(true))) {
            return Ok(());
        }
        self.shared.reject();
        Err(NoReceipt)
    }

    /// Hands over what there is to say of a request. Never waits: without a place it is counted, and becomes part of a gap.
    pub(crate) fn record(&self, told: Told, promise: Option<Promise>) {
        if let Some(Promise(place)) = promise {
            drop(place.send(told));
            return;
        }
        if told.receipts() == 0 {
            return;
        }
        if let Err(mpsc::error::TrySendError::Full(told) | mpsc::error::TrySendError::Closed(told)) =
            self.queue.try_send(told)
        {
            let receipts = told.receipts();
            let _ = self.shared.overflowed_since_ms.compare_exchange(
                0,
                now_ms(),
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            self.shared.overflowed.fetch_add(receipts, Ordering::Release);
            self.shared.lost(GapReason::QueueFull).add(receipts);
        }
    }

    /// The identifier that the receipt of an attempt has or will have.
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

    /// For whoever shows how it is. It does not keep the writer from ending.
    pub(crate) fn gauge(&self) -> Gauge {
        Gauge { queue: self.queue.downgrade(), shared: self.shared.clone() }
    }
}

/// What can be seen of a [`Recorder`].
#[derive(Clone)]
pub(crate) struct Gauge {
    queue: mpsc::WeakSender<Told>,
    shared: Arc<Shared>,
}

impl Gauge {
    pub(crate) fn render(&self, text: &mut Text) {
        let Shared { written, bytes, syncs, rejected, .. } = &*self.shared;
        for (name, help, count) in [
            ("meridian_receipts_written_total", "Receipts that were written.", written),
            ("meridian_receipts_bytes_total", "Bytes of receipts files.", bytes),
            ("meridian_receipts_syncs_total", "Times that they were made durable.", syncs),
            (
                "meridian_receipts_rejected_total",
                "Requests that were rejected because their receipt could not be made durable.",
                rejected,
            ),
        ] {
            text.single(name, Kind::Counter, help, count.get());
        }
        let name = "meridian_receipts_missing_total";
        text.head(name, Kind::Counter, "Receipts that could not be written and are part of a gap, by why.");
        let whys = [
            (GapReason::QueueFull, "queue_full"),
            (GapReason::Disk, "disk"),
            (GapReason::Unsynced, "unsynced"),
        ];
        for (why, word) in whys {
            text.sample(name, &[("why", word)], self.shared.lost(why).get());
        }
        let name = "meridian_receipts_commit_seconds";
        text.head(name, Kind::Histogram, "Time that requests waited for their receipts to be durable.");
        text.histogram(name, &[], &self.shared.commits);
        let failing = u8::from(self.shared.failing());
        let name = "meridian_receipts_failing";
        text.single(name, Kind::Gauge, "1 while the disk does not take receipts.", failing);
        if let Some(queue) = self.queue.upgrade() {
            let (max, waiting) = (queue.max_capacity(), queue.max_capacity() - queue.capacity());
            let name = "meridian_receipts_waiting";
            text.single(name, Kind::Gauge, "Requests whose receipts wait to be written.", waiting);
            text.single("meridian_receipts_waiting_max", Kind::Gauge, "How many may.", max);
        }
    }
}

impl Writing {
    /// Ends the chain when everything is written that was handed in before, and waits for that, for so long at most.
    pub(crate) async fn finish(self, within: Duration) {
        let Writing { queue, done } = self;
        let written = async {
            if queue.send(Told::Close).await.is_ok() {
                done.await.ok();
            }
        };
        if tokio::time::timeout(within, written).await.is_err() {
            tracing::error!(?within, "the last receipts were not written in time");
        }
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
