//! Log in a stream of NATS JetStream, which several processes append to and read.
//!
//! An entry is a message, and its sequence number that of the stream. A snapshot is an object of a bucket next to the stream,
//! named by its sequence number: a process with an older snapshot cannot replace a newer one. The entries before a
//! snapshot are purged after it is stored.
//!
//! An entry is durable when the server has acknowledged it. A single server writes it to its disk at its `sync_interval`
//! (two minutes by default), so it survives the end of the process but not the loss of power; a stream with three replicas
//! survives the loss of one server, and `sync_interval: always` (NATS 2.10) writes each entry at once.
//!
//! An append whose acknowledgement is lost is repeated with the same message id, which the server stores once within
//! [`DEDUPLICATION`].

use super::{EncodedEntry, JobLog, JobLogError, QueueSnapshot};
use crate::cpu::CpuWork;
use async_nats::ConnectOptions;
use async_nats::connection::State;
use async_nats::jetstream::consumer::{DeliverPolicy, pull};
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::object_store::{self, ObjectStore};
use async_nats::jetstream::{self, Context, message::PublishMessage, stream};
use async_trait::async_trait;
use futures_util::stream::{FuturesOrdered, StreamExt};
use jobs_core::batch::state::BatchRow;
use jobs_core::job::{DurableJob, DurableJobId};
use jobs_core::record::JobRecord;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;
use tokio::sync::{OnceCell, watch};

/// Time in which the server recognises a repeated append.
const DEDUPLICATION: Duration = Duration::from_secs(120);
/// Tries of an append whose acknowledgement is lost. Each takes the timeout of the client, five seconds.
const APPEND_TRIES: usize = 3;
/// Longest time for which an operation waits for a connection, and period of its checks.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const CONNECT_PERIOD: Duration = Duration::from_millis(20);
/// Messages that are requested at the same time.
const READS_IN_FLIGHT: usize = 64;
/// Pause after the notification of new entries has failed. The sequence number is requested again after it.
const NOTIFY_RETRY: Duration = Duration::from_millis(500);
/// Format of the entries and snapshots. It is raised with a change that an earlier version would misread or lose.
const FORMAT: u64 = 1;
/// Version of this process.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Prefix of the names of snapshots, which a zero-padded sequence number follows.
const SNAPSHOT_PREFIX: &str = "snapshot-";
/// JetStream's error codes for a full stream, a full account and a full disk.
const FULL_CODES: [u64; 3] = [10077, 10047, 10028];

/// Stream of a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NatsLogConfig {
    /// Addresses of the servers, as `nats://HOST:PORT`.
    pub servers: Vec<String>,
    /// Name of the queue: letters, digits, `-` and `_`. The stream and the bucket are named after it.
    pub queue: String,
    /// Copies of the stream, on as many servers.
    pub replicas: usize,
}

/// Log in a stream.
#[derive(Clone)]
pub struct NatsJobLog {
    stores: Arc<NatsStores>,
    subject: String,
    last: Arc<watch::Sender<u64>>,
}

/// Stream and bucket of a queue, which are created when they are used first: a process starts while no server responds, since
/// it does not only serve jobs.
struct NatsStores {
    context: Context,
    config: NatsLogConfig,
    subject: String,
    opened: OnceCell<(stream::Stream, ObjectStore)>,
    /// Encoding of snapshots.
    cpu: CpuWork,
}

fn unavailable(error: impl std::fmt::Display) -> JobLogError {
    JobLogError::Unavailable(error.to_string())
}

impl NatsJobLog {
    /// Connects, and creates the stream and the bucket if they do not exist. While no server responds, this is repeated in the
    /// background.
    ///
    /// # Errors
    ///
    /// When the address of a server is not valid.
    pub async fn connect(config: &NatsLogConfig, cpu: &CpuWork) -> Result<NatsJobLog, JobLogError> {
        let options = ConnectOptions::new().retry_on_initial_connect();
        let client = options.connect(config.servers.as_slice()).await.map_err(unavailable)?;
        let subject = format!("meridian.jobs.{}", config.queue);
        let stores = Arc::new(NatsStores {
            context: jetstream::new(client),
            config: config.clone(),
            subject: subject.clone(),
            opened: OnceCell::new(),
            cpu: cpu.clone(),
        });
        let log = NatsJobLog { stores, subject, last: Arc::new(watch::channel(0).0) };
        // Otherwise the reader of the log gets the error.
        log.latest().await.ok();
        let (followed, weak) = (log.stores.clone(), Arc::downgrade(&log.last));
        let start = move || notify(followed.clone(), weak.clone());
        tokio::spawn(supervision::task::supervise_until_done("job log notification", start));
        Ok(log)
    }

    /// Returns the sequence numbers of the stored snapshots, the newest last.
    async fn snapshots(&self) -> Result<Vec<u64>, JobLogError> {
        let (_, bucket) = self.stores.open().await?;
        let mut found = Vec::new();
        let mut objects = bucket.list().await.map_err(unavailable)?;
        while let Some(object) = objects.next().await {
            let object = object.map_err(unavailable)?;
            found.extend(
                object.name.strip_prefix(SNAPSHOT_PREFIX).and_then(|number| number.parse::<u64>().ok()),
            );
        }
        found.sort_unstable();
        Ok(found)
    }
}

impl NatsStores {
    /// Returns the stream and the bucket, while a server is connected.
    async fn open(&self) -> Result<&(stream::Stream, ObjectStore), JobLogError> {
        self.connected().await?;
        self.opened.get_or_try_init(|| self.create()).await
    }

    /// Creates the stream and the bucket if they do not exist.
    async fn create(&self) -> Result<(stream::Stream, ObjectStore), JobLogError> {
        let NatsLogConfig { servers: _, queue, replicas } = &self.config;
        let name = format!("meridian-jobs-{queue}");
        let description = StreamFormat { format: FORMAT, written_by: VERSION.to_owned() };
        let description = serde_json::to_string(&description).map_err(unavailable)?;
        let stream = self.context.get_or_create_stream(stream::Config {
            name: name.clone(),
            description: Some(description),
            subjects: vec![self.subject.clone()],
            storage: stream::StorageType::File,
            num_replicas: *replicas,
            discard: stream::DiscardPolicy::New,
            duplicate_window: DEDUPLICATION,
            ..stream::Config::default()
        });
        let stream = stream.await.map_err(unavailable)?;
        check_format(stream.cached_info().config.description.as_deref())?;
        let bucket = match self.context.get_object_store(&name).await {
            Ok(bucket) => bucket,
            Err(_) => {
                let (bucket, num_replicas) = (name, *replicas);
                let config = object_store::Config { bucket, num_replicas, ..object_store::Config::default() };
                self.context.create_object_store(config).await.map_err(unavailable)?
            }
        };
        Ok((stream, bucket))
    }

    /// Waits for a connection, which is replaced within milliseconds if one of several servers ends. Without this a request
    /// would wait for its timeout.
    async fn connected(&self) -> Result<(), JobLogError> {
        let begun = Instant::now();
        while self.context.client().connection_state() != State::Connected {
            if begun.elapsed() >= CONNECT_TIMEOUT {
                return Err(JobLogError::Unavailable("no NATS server can be reached".to_owned()));
            }
            tokio::time::sleep(CONNECT_PERIOD).await;
        }
        Ok(())
    }
}

/// Description of a stream, which all versions read. A stream with another description has format 1.
#[derive(Serialize, Deserialize)]
struct StreamFormat {
    format: u64,
    /// Version that has created the stream.
    written_by: String,
}

/// Rejects a stream of a later version, whose entries this one may not read.
fn check_format(description: Option<&str>) -> Result<(), JobLogError> {
    let known = description.and_then(|text| serde_json::from_str::<StreamFormat>(text).ok());
    match known.filter(|known| known.format > FORMAT) {
        None => Ok(()),
        Some(StreamFormat { format, written_by }) => Err(JobLogError::Unavailable(format!(
            "the stream has format {format}, written by version {written_by}, and this is version {VERSION}, which reads \
             format {FORMAT}; use version {written_by} or a later one"
        ))),
    }
}

/// Content of the object of a snapshot.
#[derive(Deserialize)]
struct StoredSnapshot {
    jobs: Vec<(DurableJobId, DurableJob)>,
    batches: Vec<BatchRow>,
}

/// The same, to be written.
#[derive(Serialize)]
struct SharedSnapshot<'a> {
    jobs: Vec<(DurableJobId, &'a DurableJob)>,
    batches: &'a [BatchRow],
}

/// Reads a snapshot. Those of versions without batches are a list of jobs.
fn read_snapshot(content: &[u8]) -> Result<StoredSnapshot, serde_json::Error> {
    match content.first() {
        Some(b'[') => {
            serde_json::from_slice(content).map(|jobs| StoredSnapshot { jobs, batches: Vec::new() })
        }
        _ => serde_json::from_slice(content),
    }
}

fn snapshot_name(applied: u64) -> String {
    format!("{SNAPSHOT_PREFIX}{applied:020}")
}

/// Sets the sequence number when messages arrive, until the log is dropped.
async fn notify(stores: Arc<NatsStores>, last: std::sync::Weak<watch::Sender<u64>>) {
    let advance = |sequence: u64| {
        let last = last.upgrade();
        last.map(|last| last.send_if_modified(|last| std::mem::replace(last, sequence.max(*last)) < sequence))
    };
    loop {
        let config = pull::OrderedConfig {
            deliver_policy: DeliverPolicy::New,
            headers_only: true,
            ..pull::OrderedConfig::default()
        };
        if let Ok((stream, _)) = stores.open().await
            && let Ok(consumer) = stream.create_consumer(config).await
            && let Ok(mut messages) = consumer.messages().await
        {
            // Entries that were appended before the consumer was created.
            if let Ok(info) = stream.get_info().await {
                advance(info.state.last_sequence);
            }
            loop {
                match tokio::time::timeout(NOTIFY_RETRY, messages.next()).await {
                    Ok(Some(Ok(message))) => {
                        if let Ok(info) = message.info() {
                            advance(info.stream_sequence);
                        }
                    }
                    Ok(_) => break,
                    Err(_) if last.strong_count() == 0 => return,
                    Err(_) => {}
                }
            }
        }
        if last.strong_count() == 0 {
            return;
        }
        tokio::time::sleep(NOTIFY_RETRY).await;
    }
}

fn append_error(error: &PublishError) -> JobLogError {
    let source = std::error::Error::source(error);
    let code = source.and_then(|source| source.downcast_ref::<jetstream::Error>());
    match code {
        Some(code) if FULL_CODES.contains(&code.error_code().0) => JobLogError::Full,
        _ => unavailable(error),
    }
}

#[async_trait]
impl JobLog for NatsJobLog {
    async fn append(&self, entry: EncodedEntry) -> Result<u64, JobLogError> {
        self.stores.open().await?;
        let payload = bytes::Bytes::from(entry.into_bytes());
        let id = format!("{:032x}", rand::random::<u128>());
        let mut tries = 1;
        let sequence = loop {
            let message = PublishMessage::build().payload(payload.clone()).message_id(&id);
            let published = match self.stores.context.send_publish(self.subject.clone(), message).await {
                Ok(acknowledgement) => acknowledgement.await,
                Err(error) => Err(error),
            };
            match published {
                Ok(acknowledgement) => break acknowledgement.sequence,
                Err(error) if error.kind() == PublishErrorKind::TimedOut && tries < APPEND_TRIES => {
                    tries += 1
                }
                Err(error) => return Err(append_error(&error)),
            }
        };
        self.last.send_if_modified(|last| std::mem::replace(last, sequence.max(*last)) < sequence);
        Ok(sequence)
    }

    async fn read(&self, after: u64, count: usize) -> Result<Vec<(u64, Vec<JobRecord>)>, JobLogError> {
        let (stream, _) = self.stores.open().await?;
        let state = stream.get_info().await.map_err(unavailable)?.state;
        let first = after.saturating_add(1).max(state.first_sequence);
        let end = state.last_sequence.saturating_add(1).min(first.saturating_add(count as u64));
        let mut wanted = first..end;
        let request = |sequence| async move { (sequence, stream.get_raw_message(sequence).await) };
        let mut requests: FuturesOrdered<_> = wanted.by_ref().take(READS_IN_FLIGHT).map(request).collect();
        let mut entries = Vec::new();
        while let Some((sequence, message)) = requests.next().await {
            let message = match message {
                Ok(message) => message,
                // A snapshot of another process has just replaced it.
                Err(error) if error.kind() == stream::RawMessageErrorKind::NoMessageFound => break,
                Err(error) => return Err(unavailable(format!("entry {sequence}: {error}"))),
            };
            entries.push((sequence, super::decode(sequence, &message.payload)?));
            if let Some(next) = wanted.next() {
                requests.push_back(request(next));
            }
        }
        Ok(entries)
    }

    fn last(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    fn is_shared(&self) -> bool {
        true
    }

    async fn latest(&self) -> Result<u64, JobLogError> {
        let (stream, _) = self.stores.open().await?;
        let latest = stream.get_info().await.map_err(unavailable)?.state.last_sequence;
        self.last.send_if_modified(|last| std::mem::replace(last, latest.max(*last)) < latest);
        Ok(latest)
    }

    async fn save(&self, snapshot: QueueSnapshot) -> Result<(), JobLogError> {
        let QueueSnapshot { applied, jobs, batches } = snapshot;
        let (stream, bucket) = self.stores.open().await?;
        let last = stream.get_info().await.map_err(unavailable)?.state.last_sequence;
        let older = self.snapshots().await?;
        if applied == 0 || applied > last || older.last().is_some_and(|newest| *newest >= applied) {
            return Ok(());
        }
        // 100,000 jobs are some 50 MB.
        let encode = move || {
            let jobs = jobs.iter().map(|(id, job)| (*id, job.as_ref())).collect();
            serde_json::to_vec(&SharedSnapshot { jobs, batches: &batches })
        };
        let encoded = self.stores.cpu.run(usize::MAX, encode).await;
        let content = encoded.map_err(unavailable)?;
        bucket.put(snapshot_name(applied).as_str(), &mut &content[..]).await.map_err(unavailable)?;
        stream.purge().sequence(applied + 1).await.map_err(unavailable)?;
        for before in older {
            bucket.delete(snapshot_name(before)).await.map_err(unavailable)?;
        }
        Ok(())
    }

    async fn saved(&self) -> Result<QueueSnapshot, JobLogError> {
        let Some(applied) = self.snapshots().await?.pop() else { return Ok(QueueSnapshot::default()) };
        let (_, bucket) = self.stores.open().await?;
        let mut object = bucket.get(snapshot_name(applied)).await.map_err(unavailable)?;
        let mut content = Vec::new();
        object.read_to_end(&mut content).await.map_err(unavailable)?;
        let read = self.stores.cpu.run(content.len(), move || read_snapshot(&content)).await;
        let StoredSnapshot { jobs, batches } = read.map_err(unavailable)?;
        let jobs = jobs.into_iter().map(|(id, job)| (id, Arc::new(job))).collect();
        Ok(QueueSnapshot { applied, jobs, batches })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_of_a_version_without_batches_is_read() {
        assert!(read_snapshot(b"[]").unwrap().jobs.is_empty());
        let content = serde_json::to_vec(&SharedSnapshot { jobs: Vec::new(), batches: &[] }).unwrap();
        assert!(read_snapshot(&content).unwrap().batches.is_empty());
    }
}
