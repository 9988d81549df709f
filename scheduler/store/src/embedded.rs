//! The embedded store: a file on this machine, and the thread that owns it.
//!
//! redb blocks, and an fsync may take as long as the disk likes, so one thread owns the file and the state, and
//! everybody else sends it work. It takes all the work that is waiting (at most [`GROUP_MAX`]), does it in memory, writes
//! what has changed in one transaction with one fsync, lets the watches see it and answers; in this order, so that
//! nobody ever reads, watches or is told of something that a crash could take back. Reads go the same way and see what
//! was written before them.
//!
//! If the disk fails, nobody knows what is on it. The thread then answers with the error, throws its state away, and
//! reads the file anew before it does anything else; watches are told that they may have missed something.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use tokio::sync::{mpsc, oneshot, watch};

use crate::history::History;
use crate::local_watch::LocalWatch;
use crate::model::{KeyValue, Lease, Range, StoreError, Txn, TxnOutcome};
use crate::state::State;
use crate::store::Store;
use disk::{Disk, DiskError};

mod disk;

/// Pieces of work that wait for the thread; whoever comes later waits to get in.
const QUEUE_MAX: usize = 1024;
/// Pieces of work that are written together.
const GROUP_MAX: usize = 256;

/// What the thread does for somebody; it returns how that somebody is answered, once it is known whether the disk has
/// taken it.
type Work = Box<dyn FnOnce(Result<&mut State, StoreError>) -> Answer + Send>;
type Answer = Box<dyn FnOnce(Result<(), StoreError>) + Send>;

/// Opens the disk and reads it, at the start and after it has failed.
type Opener = Box<dyn FnMut(Instant) -> Result<(Disk, State), DiskError> + Send>;

enum Request {
    Work(Work),
    Close(oneshot::Sender<()>),
}

/// The embedded store. Clones are handles of the same one; the file is free again when it was closed, or soon after the last
/// handle is gone.
#[derive(Clone)]
pub struct Embedded {
    requests: mpsc::Sender<Request>,
    history: Arc<Mutex<History>>,
    bell: watch::Receiver<()>,
}

/// The store cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("the store {} cannot be opened: {problem}", path.display())]
pub struct OpenError {
    path: PathBuf,
    problem: String,
}

impl Embedded {
    /// Opens the file, or makes it. Leases that stood when it was last closed have their whole time to live from `now`.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or written, is no store, or another process has it open.
    pub async fn open(path: &Path, now: Instant) -> Result<Embedded, OpenError> {
        let file = path.to_owned();
        let opened = Embedded::start(Box::new(move |now| Disk::open(&file, now)), now).await;
        opened.map_err(|problem| OpenError { path: path.to_owned(), problem })
    }

    async fn start(mut opener: Opener, now: Instant) -> Result<Embedded, String> {
        let (requests, inbox) = mpsc::channel(QUEUE_MAX);
        let (opened, outcome) = oneshot::channel();
        let (ring, bell) = watch::channel(());
        let serve = move || match opener(now) {
            Ok((disk, state)) => {
                let history = Arc::new(Mutex::new(History::starting_at(state.revision)));
                // Whoever opens it may have gone; then there are no handles, and the thread ends.
                opened.send(Ok(history.clone())).ok();
                Writer { opener, open: Some((disk, state)), history, bell: ring }.serve(inbox);
            }
            Err(error) => drop(opened.send(Err(error.to_string()))),
        };
        supervision::task::thread("store", serve).map_err(|error| error.to_string())?;
        let history = outcome.await.map_err(|_| "its thread has ended".to_owned())??;
        Ok(Embedded { requests, history, bell })
    }

    /// Answers what was asked before, and returns when the file is free. Every other handle and watch finds it closed.
    pub async fn close(self) {
        let (closed, when) = oneshot::channel();
        if self.requests.send(Request::Close(closed)).await.is_ok() {
            // Whoever else closed it got there first, if nobody answers.
            when.await.ok();
        }
    }

    async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut State) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        let work: Work = Box::new(move |state| {
            let outcome = state.and_then(work);
            // Whoever asked may have gone; the work is done all the same.
            Box::new(move |written| drop(answer.send(written.and(outcome))))
        });
        self.requests.send(Request::Work(work)).await.map_err(|_| StoreError::Closed)?;
        answered.await.map_err(|_| StoreError::Closed)?
    }
}

impl Store for Embedded {
    type Watch = LocalWatch;

    async fn get(&self, key: &str) -> Result<Option<KeyValue>, StoreError> {
        let key = key.to_owned();
        self.ask(move |state| Ok(state.get(&key))).await
    }

    async fn range(&self, prefix: &str) -> Result<Range, StoreError> {
        let prefix = prefix.to_owned();
        self.ask(move |state| Ok(state.range(&prefix))).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnOutcome, StoreError> {
        self.ask(move |state| state.txn(txn)).await
    }

    async fn lease_grant(&self, ttl: Duration, now: Instant) -> Result<Lease, StoreError> {
        self.ask(move |state| state.grant(ttl, now)).await
    }

    async fn lease_keep_alive(&self, lease: Lease, now: Instant) -> Result<Vec<String>, StoreError> {
        self.ask(move |state| state.keep_alive(lease, now)).await
    }

    async fn lease_revoke(&self, lease: Lease) -> Result<(), StoreError> {
        self.ask(move |state| state.revoke(lease)).await
    }

    async fn expire(&self, now: Instant) -> Result<Vec<Lease>, StoreError> {
        self.ask(move |state| Ok(state.expire(now))).await
    }

    fn watch(&self, prefix: &str, from: u64) -> LocalWatch {
        LocalWatch::new(prefix.to_owned(), from, self.history.clone(), self.bell.clone())
    }
}

/// The thread's side.
struct Writer {
    opener: Opener,
    /// Nothing, after the disk has failed and until it could be read again.
    open: Option<(Disk, State)>,
    history: Arc<Mutex<History>>,
    bell: watch::Sender<()>,
}

impl Writer {
    fn serve(mut self, mut inbox: mpsc::Receiver<Request>) {
        let mut group = Vec::new();
        while let Some(first) = inbox.blocking_recv() {
            let more = std::iter::from_fn(|| inbox.try_recv().ok());
            let mut closing = None;
            for request in std::iter::once(first).chain(more).take(GROUP_MAX) {
                match request {
                    Request::Work(work) => group.push(work),
                    Request::Close(closed) => {
                        closing = Some(closed);
                        break;
                    }
                }
            }
            self.carry_out(group.drain(..));
            if let Some(closed) = closing {
                drop(self);
                // Nobody may wait for it any longer.
                closed.send(()).ok();
                return;
            }
        }
    }

    fn carry_out(&mut self, group: impl Iterator<Item = Work>) {
        let answers: Vec<Answer> = match self.state() {
            Ok(state) => group.map(|work| work(Ok(state))).collect(),
            Err(error) => group.map(|work| work(Err(error.clone()))).collect(),
        };
        let written = self.write();
        if written.is_err() {
            self.open = None;
        }
        for answer in answers {
            answer(written.clone());
        }
    }

    /// Writes what has changed and lets the watches see it.
    fn write(&mut self) -> Result<(), StoreError> {
        let Some((disk, state)) = &mut self.open else {
            return Ok(());
        };
        let changes = state.take_changes();
        if changes.is_empty() {
            return Ok(());
        }
        disk.write(&changes, state).map_err(unavailable)?;
        let mut history = self.history.lock();
        changes.events.into_iter().for_each(|events| history.push(events));
        drop(history);
        self.bell.send_replace(());
        Ok(())
    }

    /// The state. After the disk has failed it is read anew. What was being written then may or may not be in it, so
    /// watches that could have missed something are told.
    fn state(&mut self) -> Result<&mut State, StoreError> {
        let open = match self.open.take() {
            Some(open) => open,
            None => {
                let (disk, state) = (self.opener)(Instant::now()).map_err(unavailable)?;
                *self.history.lock() = History::starting_at(state.revision);
                self.bell.send_replace(());
                (disk, state)
            }
        };
        Ok(&mut self.open.insert(open).1)
    }
}

fn unavailable(error: DiskError) -> StoreError {
    StoreError::Unavailable(error.to_string())
}

#[cfg(test)]
mod tests;
