//! Watch on etcd that is resumed after every interruption, and ends with an error if it cannot be.
//!
//! etcd's own watch often ends without an error: its member hangs, or is partitioned from the others; its start
//! revision is compacted (then one response has `canceled`, without a reason, and the stream stays open); its start
//! revision is in the future, because the store was restored from an older copy (then nothing is ever sent). So a task
//! holds the stream and requests its progress every [`PROGRESS_PERIOD`]; after [`SILENCE_MAX`] without a message the
//! stream is closed and reopened on another member, after the last change that was delivered.
//!
//! Before it is reopened, a read is sent to the member, at the revision before the next one, on which the watch
//! depends. That read fails if that revision is compacted or in the future; and its header reveals another cluster, or
//! a raft term that is lower, which is a store that was restored and has overtaken the watch since. The revisions in
//! progress messages are not used: etcd before 3.4.25 and 3.5.8 may send revisions there whose changes it has not sent
//! yet (etcd issue 15220).

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, Error, GetOptions, WatchOptions, WatchResponse, WatchStream};
use supervision::task::essential;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::convert::{self, PrefixedKeys};
use super::members::{Members, pause};
use super::{CALL_LIMIT, RESPONSE_BYTES_MAX, kv};
use crate::model::{Event, KeyRange, WatchError};
use crate::store::Watch;

/// Interval of progress requests on a stream.
const PROGRESS_PERIOD: Duration = Duration::from_secs(1);
/// Maximum time without a message: two responses may be late.
const SILENCE_MAX: Duration = Duration::from_secs(3);
/// Capacity of the queue to the watcher. Further messages wait in the stream, which etcd then stops filling.
const QUEUE_MAX: usize = 16;

/// Watch of the changes to a range of keys.
#[derive(Debug)]
pub struct EtcdWatch {
    events: mpsc::Receiver<Result<Vec<Event>, WatchError>>,
    ended: Option<WatchError>,
    /// The task ends with its owner.
    _task: JoinSet<()>,
}

impl EtcdWatch {
    pub(super) fn start(members: Arc<Members>, keys: PrefixedKeys, range: KeyRange, from: u64) -> EtcdWatch {
        let (sender, events) = mpsc::channel(QUEUE_MAX);
        let mut task = JoinSet::new();
        let position = WatchPosition { from, cluster: None, term: 0 };
        let watcher = StreamWatcher { members, keys, range, position, sender };
        task.spawn(async {
            essential("store watch", watcher.run()).await;
        });
        EtcdWatch { events, ended: None, _task: task }
    }
}

impl Watch for EtcdWatch {
    async fn next(&mut self) -> Result<Vec<Event>, WatchError> {
        if let Some(ended) = self.ended {
            return Err(ended);
        }
        // The task ends by itself only after it has sent the reason.
        let received = self.events.recv().await.unwrap_or(Err(WatchError::Closed));
        self.ended = received.as_ref().err().copied();
        received
    }
}

/// Position of a watch, and the store that it refers to.
struct WatchPosition {
    /// Next revision to receive.
    from: u64,
    cluster: Option<u64>,
    term: u64,
}

/// State of the task.
struct StreamWatcher {
    members: Arc<Members>,
    keys: PrefixedKeys,
    range: KeyRange,
    position: WatchPosition,
    sender: mpsc::Sender<Result<Vec<Event>, WatchError>>,
}

/// Reason why a stream ended.
enum StreamEnd {
    /// The stream broke; it can be resumed.
    Broken,
    /// There is a gap.
    Gap(WatchError),
    /// The watch was dropped.
    Dropped,
}

impl From<Error> for StreamEnd {
    fn from(_: Error) -> StreamEnd {
        StreamEnd::Broken
    }
}

impl StreamWatcher {
    async fn run(mut self) {
        if self.position.from == 0 {
            // In etcd, 0 means "from now on"; here it is a revision like any other.
            self.sender.send(Err(WatchError::Compacted { oldest: 1 })).await.ok();
            return;
        }
        let mut tries = 0;
        loop {
            let member = self.members.current();
            let before = self.position.from;
            match self.follow(member).await {
                StreamEnd::Broken => {
                    self.members.failed(member);
                    tries = if self.position.from > before { 1 } else { tries + 1 };
                    tokio::select! {
                        () = sleep(pause(tries)) => {}
                        () = self.sender.closed() => return,
                    }
                }
                StreamEnd::Gap(error) => {
                    // On failure, the watch was dropped.
                    self.sender.send(Err(error)).await.ok();
                    return;
                }
                StreamEnd::Dropped => return,
            }
        }
    }

    async fn follow(&mut self, member: usize) -> StreamEnd {
        let open = async {
            let client = self.members.client(member).await?;
            self.position.check(&client, &self.keys).await?;
            Ok::<_, StreamEnd>(self.open(&client).await?)
        };
        let mut stream = match timeout(CALL_LIMIT, open).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(end)) => return end,
            Err(_) => return StreamEnd::Broken,
        };
        let mut progress = interval(PROGRESS_PERIOD);
        progress.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_message = Instant::now();
        loop {
            tokio::select! {
                // Received messages are handled before the silence is measured: this process may have been suspended.
                biased;
                message = stream.message() => {
                    last_message = Instant::now();
                    if let Err(end) = self.deliver(message).await {
                        return end;
                    }
                }
                _ = progress.tick() => {
                    if last_message.elapsed() > SILENCE_MAX {
                        return StreamEnd::Broken;
                    }
                    // A stream that takes no requests is covered by the same silence limit.
                    timeout(PROGRESS_PERIOD, stream.request_progress()).await.ok();
                }
                () = self.sender.closed() => return StreamEnd::Dropped,
            }
        }
    }

    async fn open(&self, client: &Client) -> Result<WatchStream, Error> {
        let options = WatchOptions::new().with_start_revision(convert::signed(self.position.from));
        let options = match &self.range {
            KeyRange::Prefix(_) => options.with_prefix(),
            KeyRange::Between { before, .. } => options.with_range(self.keys.outer(before)),
        };
        let mut watches = client.watch_client().max_decoding_message_size(RESPONSE_BYTES_MAX);
        watches.watch(self.keys.outer(self.range.from()), Some(options)).await
    }

    async fn deliver(&mut self, message: Result<Option<WatchResponse>, Error>) -> Result<(), StreamEnd> {
        let Some(message) = message? else { return Err(StreamEnd::Broken) };
        if message.canceled() {
            let compacted = convert::unsigned(message.compact_revision());
            if compacted == 0 {
                return Err(StreamEnd::Broken);
            }
            return Err(StreamEnd::Gap(WatchError::Compacted { oldest: compacted + 1 }));
        }
        let events: Vec<_> = message.events().iter().filter_map(|event| self.keys.event(event)).collect();
        let Some(last) = events.last() else { return Ok(()) };
        self.position.from = last.revision() + 1;
        self.sender.send(Ok(events)).await.map_err(|_| StreamEnd::Dropped)
    }
}

impl WatchPosition {
    /// Checks that all changes from this position on are still available.
    async fn check(&mut self, client: &Client, keys: &PrefixedKeys) -> Result<(), StreamEnd> {
        let before = GetOptions::new().with_revision(convert::signed(self.from - 1)).with_count_only();
        match kv(client).get(keys.outer(""), Some(before)).await {
            Ok(response) => {
                let header = response.header().ok_or(StreamEnd::Broken)?;
                let (cluster, term) = (header.cluster_id(), header.raft_term());
                if self.cluster.is_some_and(|known| known != cluster) || term < self.term {
                    let revision = convert::unsigned(header.revision());
                    return Err(StreamEnd::Gap(WatchError::FutureRevision { from: self.from, revision }));
                }
                (self.cluster, self.term) = (Some(cluster), term);
                Ok(())
            }
            Err(error) if convert::is_compacted(&error) => {
                Err(StreamEnd::Gap(WatchError::Compacted { oldest: self.from + 1 }))
            }
            Err(error) if convert::is_future_revision(&error) => {
                let now = kv(client).get(keys.outer(""), Some(GetOptions::new().with_count_only())).await?;
                let revision = convert::revision(now.header());
                Err(StreamEnd::Gap(WatchError::FutureRevision { from: self.from, revision }))
            }
            Err(error) => Err(error.into()),
        }
    }
}
