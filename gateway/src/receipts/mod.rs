//! Receipts on disk: one chain for each process, written off the request path by one thread.
//!
//! A request hands over what there is to say of it when it is over ([`Recorder::record`]): one move into a bounded queue,
//! which never waits. A [`writer`] thread turns it into entries, appends them to the current file and makes them durable
//! at least once a second. What cannot be written is counted, and written as a gap as soon as something can be: nothing is
//! dropped silently, and no request waits for a disk.
//!
//! Whoever would rather refuse a request than lose its receipt says `required = true`: then a request of a locked
//! deployment is let in only with a [`Promise`] of a place in the queue, while the disk takes what it is given.

mod audit;
mod batch;
mod file;
mod writer;

pub use audit::{audit, files_in};

use crate::events::Finished;
use crate::metrics::{Count, Kind, Text};
use gateway_core::receipt::entry::{Role, Why};
use gateway_core::receipt::{Essence, PseudonymKey, ReceiptId};
use regions::id::{DeploymentName, RegionId};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{mpsc, oneshot};

/// Requests whose receipts wait to be written: a second of a busy edge, at about 300 bytes each.
pub const QUEUE_MAX: usize = 16_384;
/// A file that has grown to this is followed by another: ten minutes of 250 requests/s, and read by an audit at once.
pub const FILE_BYTES_MAX: u64 = 64 << 20;

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
}

/// Something to be written.
pub(crate) enum Told {
    /// What an edge knows of a request that is over.
    Sent(Arc<Finished>),
    /// What a region's door says of one.
    Received(Box<Received>),
}

impl Told {
    /// How many receipts it is.
    fn receipts(&self) -> u64 {
        match self {
            // Nothing was sent before it was understood, and by whom it was asked.
            Told::Sent(request) => request.trail.count() as u64,
            Told::Received(_) => 1,
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
}

impl Shared {
    fn lost(&self, why: Why) -> &Count {
        &self.lost[why as usize]
    }

    fn failing(&self) -> bool {
        self.failing.load(Ordering::Relaxed)
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
}

/// The writer's end.
pub(crate) struct Writing {
    done: oneshot::Receiver<()>,
}

/// A place in the queue.
pub(crate) struct Promise(mpsc::OwnedPermit<Told>);

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
        let dir_problem = |source| ReceiptsError::Dir { dir: config.dir.display().to_string(), source };
        let writer =
            writer::Writer::open(config, role, place, regions, shared.clone()).map_err(dir_problem)?;
        let chain: Arc<str> = writer.chain().into();
        let (ended, done) = oneshot::channel();
        let run = move || {
            writer.run(told);
            // Whoever waits may have given up.
            ended.send(()).ok();
        };
        std::thread::Builder::new().name("receipts".to_owned()).spawn(run).map_err(dir_problem)?;
        let required = config.required;
        Ok((Recorder { queue, shared, chain, required }, Writing { done }))
    }

    /// Whether a request of a locked deployment needs a [`Promise`].
    pub(crate) fn required(&self) -> bool {
        self.required
    }

    /// A place for one request's receipts, if there is one and the disk takes what it is given.
    pub(crate) fn promise(&self) -> Option<Promise> {
        if self.shared.failing() {
            return None;
        }
        self.queue.clone().try_reserve_owned().ok().map(Promise)
    }

    /// Hands over what there is to say of a request. Never waits: without a place it is counted, and becomes part of a gap.
    pub(crate) fn record(&self, told: Told, promise: Option<Promise>) {
        if told.receipts() == 0 {
            return;
        }
        if let Some(Promise(place)) = promise {
            drop(place.send(told));
        } else if let Err(mpsc::error::TrySendError::Full(told) | mpsc::error::TrySendError::Closed(told)) =
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
            self.shared.lost(Why::QueueFull).add(receipts);
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
    ) -> ReceiptId {
        Essence { chain: &self.chain, request, attempt, region, residency, at_ms }.id()
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
        let Shared { overflowed: _, overflowed_since_ms: _, failing: _, written, bytes, syncs, lost: _ } =
            &*self.shared;
        for (name, help, count) in [
            ("meridian_receipts_written_total", "Receipts that were written.", written),
            ("meridian_receipts_bytes_total", "Bytes of receipts files.", bytes),
            ("meridian_receipts_syncs_total", "Times that they were made durable.", syncs),
        ] {
            text.single(name, Kind::Counter, help, count.get());
        }
        let name = "meridian_receipts_missing_total";
        text.head(name, Kind::Counter, "Receipts that could not be written and are part of a gap, by why.");
        let whys = [(Why::QueueFull, "queue_full"), (Why::Disk, "disk"), (Why::Unsynced, "unsynced")];
        for (why, word) in whys {
            text.sample(name, &[("why", word)], self.shared.lost(why).get());
        }
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
    /// Waits until everything that was handed in is written, for so long at most. Every [`Recorder`] has to be gone.
    pub(crate) async fn finish(self, within: Duration) {
        if tokio::time::timeout(within, self.done).await.is_err() {
            tracing::error!(?within, "the disk did not take the last receipts in time");
        }
    }
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
