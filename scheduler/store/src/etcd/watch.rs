//! A watch on etcd that is taken up again wherever it broke off, and says so where it cannot be.
//!
//! etcd's own watch ends in silence in more ways than in words: its member hangs, or is cut off from the others; it was to
//! start where history has been compacted (then one answer says `canceled`, without a reason, and the stream stays open);
//! it was to start at a revision that has not come, because the store was set back to an older copy (then nothing is ever
//! said). So a task holds the stream and asks it for its progress every [`PROGRESS_EVERY`]; after [`SILENCE_MAX`] without a
//! word the stream is given up and begun anew on another member, after the last change that was passed on.
//!
//! Before it is begun anew, the member is asked to read at the revision before the next one, which is what a watch stands
//! on. That read fails where history begins later and where the revision has not come; and its header tells of another
//! cluster, or of a term that fell, which is a store that was restored and has overtaken us since. What the progress of a
//! stream says about revisions is not relied on: etcd before 3.4.25 and 3.5.8 may run ahead there of changes that it has
//! not told yet (etcd issue 15220).

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Client, Error, GetOptions, WatchOptions, WatchResponse, WatchStream};
use supervision::task::essential;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::members::{Members, pause};
use super::nouns::{self, Keys};
use super::{ANSWER_BYTES_MAX, CALL_LIMIT, kv};
use crate::model::{Event, WatchError};
use crate::store::Watch;

/// How often a stream is asked how far it is.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);
/// How long a stream may be silent: two answers may be late.
const SILENCE_MAX: Duration = Duration::from_secs(3);
/// Answers of etcd that wait for whoever watches. More wait in the stream, which etcd then stops filling.
const WAITING_MAX: usize = 16;

/// The changes under a prefix.
#[derive(Debug)]
pub struct EtcdWatch {
    told: mpsc::Receiver<Result<Vec<Event>, WatchError>>,
    ended: Option<WatchError>,
    /// The task ends with whoever owns it.
    _task: JoinSet<()>,
}

impl EtcdWatch {
    pub(super) fn start(members: Arc<Members>, keys: Keys, prefix: String, from: u64) -> EtcdWatch {
        let (tell, told) = mpsc::channel(WAITING_MAX);
        let mut task = JoinSet::new();
        let place = Place { from, cluster: None, term: 0 };
        let follower = Follower { members, keys, prefix, place, tell };
        task.spawn(async {
            essential("store watch", follower.follow()).await;
        });
        EtcdWatch { told, ended: None, _task: task }
    }
}

impl Watch for EtcdWatch {
    async fn next(&mut self) -> Result<Vec<Event>, WatchError> {
        if let Some(ended) = self.ended {
            return Err(ended);
        }
        // The task ends by itself only after it has said why.
        let told = self.told.recv().await.unwrap_or(Err(WatchError::Closed));
        self.ended = told.as_ref().err().copied();
        told
    }
}

/// How far a watch is, and in which store.
struct Place {
    /// The next revision that is not known yet.
    from: u64,
    cluster: Option<u64>,
    term: u64,
}

/// The task's side.
struct Follower {
    members: Arc<Members>,
    keys: Keys,
    prefix: String,
    place: Place,
    tell: mpsc::Sender<Result<Vec<Event>, WatchError>>,
}

/// Why a stream is not followed any longer.
enum Broken {
    /// It may be taken up again.
    Stream,
    /// There is a gap.
    Gap(WatchError),
    /// Nobody watches.
    Nobody,
}

impl From<Error> for Broken {
    fn from(_: Error) -> Broken {
        Broken::Stream
    }
}

impl Follower {
    async fn follow(mut self) {
        if self.place.from == 0 {
            // etcd's word for "from now on". Ours is a number like any other.
            self.tell.send(Err(WatchError::Compacted { oldest: 1 })).await.ok();
            return;
        }
        let mut tries = 0;
        loop {
            let member = self.members.current();
            let before = self.place.from;
            match self.follow_on(member).await {
                Broken::Stream => {
                    self.members.failed(member);
                    tries = if self.place.from > before { 1 } else { tries + 1 };
                    tokio::select! {
                        () = sleep(pause(tries)) => {}
                        () = self.tell.closed() => return,
                    }
                }
                Broken::Gap(error) => {
                    // Whoever has gone does not need to know.
                    self.tell.send(Err(error)).await.ok();
                    return;
                }
                Broken::Nobody => return,
            }
        }
    }

    async fn follow_on(&mut self, member: usize) -> Broken {
        let open = async {
            let client = self.members.client(member).await?;
            self.place.check(&client, &self.keys).await?;
            Ok::<_, Broken>(self.open(&client).await?)
        };
        let mut stream = match timeout(CALL_LIMIT, open).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(broken)) => return broken,
            Err(_) => return Broken::Stream,
        };
        let mut ask = interval(PROGRESS_EVERY);
        ask.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut heard = Instant::now();
        loop {
            tokio::select! {
                // What has arrived is heard before its absence is noticed: this process may have slept.
                biased;
                message = stream.message() => {
                    heard = Instant::now();
                    if let Err(broken) = self.pass_on(message).await {
                        return broken;
                    }
                }
                _ = ask.tick() => {
                    if heard.elapsed() > SILENCE_MAX {
                        return Broken::Stream;
                    }
                    // A stream whose requests nobody takes any more is as silent as any other.
                    timeout(PROGRESS_EVERY, stream.request_progress()).await.ok();
                }
                () = self.tell.closed() => return Broken::Nobody,
            }
        }
    }

    async fn open(&self, client: &Client) -> Result<WatchStream, Error> {
        let options = WatchOptions::new().with_prefix().with_start_revision(nouns::signed(self.place.from));
        let mut watches = client.watch_client().max_decoding_message_size(ANSWER_BYTES_MAX);
        watches.watch(self.keys.outer(&self.prefix), Some(options)).await
    }

    async fn pass_on(&mut self, message: Result<Option<WatchResponse>, Error>) -> Result<(), Broken> {
        let Some(message) = message? else { return Err(Broken::Stream) };
        if message.canceled() {
            let compacted = nouns::unsigned(message.compact_revision());
            if compacted == 0 {
                return Err(Broken::Stream);
            }
            return Err(Broken::Gap(WatchError::Compacted { oldest: compacted + 1 }));
        }
        let events: Vec<_> = message.events().iter().filter_map(|event| self.keys.event(event)).collect();
        let Some(last) = events.last() else { return Ok(()) };
        self.place.from = last.revision() + 1;
        self.tell.send(Ok(events)).await.map_err(|_| Broken::Nobody)
    }
}

impl Place {
    /// Asks whether everything from here on can still be told.
    async fn check(&mut self, client: &Client, keys: &Keys) -> Result<(), Broken> {
        let before = GetOptions::new().with_revision(nouns::signed(self.from - 1)).with_count_only();
        match kv(client).get(keys.outer(""), Some(before)).await {
            Ok(answer) => {
                let header = answer.header().ok_or(Broken::Stream)?;
                let (cluster, term) = (header.cluster_id(), header.raft_term());
                if self.cluster.is_some_and(|known| known != cluster) || term < self.term {
                    let revision = nouns::unsigned(header.revision());
                    return Err(Broken::Gap(WatchError::FromTheFuture { from: self.from, revision }));
                }
                (self.cluster, self.term) = (Some(cluster), term);
                Ok(())
            }
            Err(error) if nouns::is_compacted(&error) => {
                Err(Broken::Gap(WatchError::Compacted { oldest: self.from + 1 }))
            }
            Err(error) if nouns::is_from_the_future(&error) => {
                let now = kv(client).get(keys.outer(""), Some(GetOptions::new().with_count_only())).await?;
                let revision = nouns::revision(now.header());
                Err(Broken::Gap(WatchError::FromTheFuture { from: self.from, revision }))
            }
            Err(error) => Err(error.into()),
        }
    }
}
