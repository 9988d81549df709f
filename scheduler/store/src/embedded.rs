//! Embedded store: a file on this machine, and the thread that owns it.
//!
//! redb blocks, and an fsync takes as long as the disk needs, so one thread owns the file and the state, and all
//! callers send it jobs. It takes all waiting jobs (at most [`BATCH_MAX`]), executes them in memory, writes the changes
//! in one transaction with one fsync, notifies the watches and sends the responses; in this order, so that no read,
//! watch or response ever has data that a crash could take back. Reads use the same queue and see all earlier writes.
//!
//! If the disk fails, its content is unknown. The thread then responds with the error, discards its state, and reads
//! the file again before it does anything else; watches get an error because they may have missed changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use tokio::sync::{mpsc, oneshot, watch};

use crate::history::History;
use crate::local_watch::LocalWatch;
use crate::model::{KeyRange, KeyValue, Lease, Page, PageContent, Range, StoreError, Txn, TxnOutcome};
use crate::state::State;
use crate::store::Store;
use disk::{DiskError, StoreFile};

mod disk;

/// Capacity of the job queue; further callers wait. Each job is a call of the hub; the queue and the batches of the log of
/// jobs (`jobs`) follow from its own load.
const QUEUE_MAX: usize = 1024;
/// Maximum number of jobs that are written together.
const BATCH_MAX: usize = 256;

/// Job of the thread. Returns the closure that sends the response once the outcome of the write is known.
type StoreJob = Box<dyn FnOnce(Result<&mut State, StoreError>) -> Reply + Send>;
type Reply = Box<dyn FnOnce(Result<(), StoreError>) + Send>;

/// Opens the file and reads it, at the start and after a failure of the disk.
type Opener = Box<dyn FnMut(Instant) -> Result<(StoreFile, State), DiskError> + Send>;

enum Request {
    StoreJob(StoreJob),
    Close(oneshot::Sender<()>),
}

/// Embedded store. Clones are handles of the same store; the file is free again after [`EmbeddedStore::close`], or soon
/// after the last handle is dropped.
#[derive(Clone)]
pub struct EmbeddedStore {
    requests: mpsc::Sender<Request>,
    history: Arc<Mutex<History>>,
    notified: watch::Receiver<()>,
}

/// Error that prevents the store from being opened: its file is damaged or of another format, or another hub has it
/// open.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the store {}: {problem}", path.display())]
pub struct StoreOpenError {
    path: PathBuf,
    problem: String,
}

impl EmbeddedStore {
    /// Opens or creates the file. Leases that existed when it was last closed have their whole time to live from `now`
    /// on.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or written, is not a store, or is open in another process.
    pub async fn open(path: &Path, now: Instant) -> Result<EmbeddedStore, StoreOpenError> {
        let file = path.to_owned();
        let opened = EmbeddedStore::start(Box::new(move |now| StoreFile::open(&file, now)), now).await;
        opened.map_err(|problem| StoreOpenError { path: path.to_owned(), problem })
    }

    async fn start(mut opener: Opener, now: Instant) -> Result<EmbeddedStore, String> {
        let (requests, inbox) = mpsc::channel(QUEUE_MAX);
        let (opened, outcome) = oneshot::channel();
        let (notify, notified) = watch::channel(());
        let serve = move || match opener(now) {
            Ok((disk, state)) => {
                let history = Arc::new(Mutex::new(History::starting_at(state.revision)));
                // The caller may have been cancelled; then there are no handles, and the thread ends.
                opened.send(Ok(history.clone())).ok();
                Writer { opener, open: Some((disk, state)), history, notify }.serve(inbox);
            }
            Err(error) => drop(opened.send(Err(error.to_string()))),
        };
        supervision::task::thread("store", serve).map_err(|error| error.to_string())?;
        let history = outcome.await.map_err(|_| "the store thread has ended".to_owned())??;
        Ok(EmbeddedStore { requests, history, notified })
    }

    /// Completes the earlier requests, and returns when the file is free. All other handles and watches get
    /// [`StoreError::Closed`].
    pub async fn close(self) {
        let (closed, when) = oneshot::channel();
        if self.requests.send(Request::Close(closed)).await.is_ok() {
            // An error means that another handle has closed the store first.
            when.await.ok();
        }
    }

    async fn execute<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut State) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (reply, response) = oneshot::channel();
        let job: StoreJob = Box::new(move |state| {
            let outcome = state.and_then(work);
            // The caller may have been cancelled; the job is done all the same.
            Box::new(move |written| drop(reply.send(written.and(outcome))))
        });
        self.requests.send(Request::StoreJob(job)).await.map_err(|_| StoreError::Closed)?;
        response.await.map_err(|_| StoreError::Closed)?
    }
}

impl Store for EmbeddedStore {
    type Watch = LocalWatch;

    async fn get(&self, key: &str) -> Result<Option<KeyValue>, StoreError> {
        let key = key.to_owned();
        self.execute(move |state| Ok(state.get(&key))).await
    }

    async fn range(&self, keys: impl Into<KeyRange> + Send) -> Result<Range, StoreError> {
        let keys = keys.into();
        self.execute(move |state| Ok(state.range(&keys))).await
    }

    async fn page(&self, keys: KeyRange, limit: usize, content: PageContent) -> Result<Page, StoreError> {
        self.execute(move |state| Ok(state.page(&keys, limit, content))).await
    }

    async fn txn(&self, txn: Txn) -> Result<TxnOutcome, StoreError> {
        self.execute(move |state| state.txn(txn)).await
    }

    async fn lease_grant(&self, ttl: Duration, now: Instant) -> Result<Lease, StoreError> {
        self.execute(move |state| state.grant(ttl, now)).await
    }

    async fn lease_keep_alive(&self, lease: Lease, now: Instant) -> Result<Vec<String>, StoreError> {
        self.execute(move |state| state.keep_alive(lease, now)).await
    }

    async fn lease_revoke(&self, lease: Lease) -> Result<(), StoreError> {
        self.execute(move |state| state.revoke(lease)).await
    }

    async fn expire(&self, now: Instant) -> Result<Vec<Lease>, StoreError> {
        self.execute(move |state| Ok(state.expire(now))).await
    }

    fn watch(&self, keys: impl Into<KeyRange>, from: u64) -> LocalWatch {
        LocalWatch::new(keys.into(), from, self.history.clone(), self.notified.clone())
    }
}

/// State of the thread.
struct Writer {
    opener: Opener,
    /// `None` after a failure of the disk, until it can be read again.
    open: Option<(StoreFile, State)>,
    history: Arc<Mutex<History>>,
    notify: watch::Sender<()>,
}

impl Writer {
    fn serve(mut self, mut inbox: mpsc::Receiver<Request>) {
        let mut batch = Vec::new();
        while let Some(first) = inbox.blocking_recv() {
            let more = std::iter::from_fn(|| inbox.try_recv().ok());
            let mut closing = None;
            for request in std::iter::once(first).chain(more).take(BATCH_MAX) {
                match request {
                    Request::StoreJob(job) => batch.push(job),
                    Request::Close(closed) => {
                        closing = Some(closed);
                        break;
                    }
                }
            }
            self.execute(batch.drain(..));
            if let Some(closed) = closing {
                drop(self);
                // The caller may have been cancelled.
                closed.send(()).ok();
                return;
            }
        }
    }

    fn execute(&mut self, batch: impl Iterator<Item = StoreJob>) {
        let replies: Vec<Reply> = match self.state() {
            Ok(state) => batch.map(|job| job(Ok(state))).collect(),
            Err(error) => batch.map(|job| job(Err(error.clone()))).collect(),
        };
        let written = self.write();
        if written.is_err() {
            self.open = None;
        }
        for reply in replies {
            reply(written.clone());
        }
    }

    /// Writes the changes to disk and notifies the watches.
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
        self.notify.send_replace(());
        Ok(())
    }

    /// Returns the state. After a failure of the disk it is read again. The failed write may or may not be in it, so
    /// watches that may have missed changes get an error.
    fn state(&mut self) -> Result<&mut State, StoreError> {
        let open = match self.open.take() {
            Some(open) => open,
            None => {
                let (disk, state) = (self.opener)(Instant::now()).map_err(unavailable)?;
                *self.history.lock() = History::starting_at(state.revision);
                self.notify.send_replace(());
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
