//! Log in one file of this machine, and the thread that owns it.
//!
//! ```text
//! entries    sequence → records as JSON
//! jobs       the last snapshot: identifier → job as JSON
//! batches    the last snapshot: number → file or batch as JSON
//! meta       "format" | "applied" (of the snapshot) | "last" → number
//! ```
//!
//! The thread takes all waiting appends and writes them in one transaction with one fsync (group commit), so the number of
//! appends per second is not limited by the time of an fsync. After a failure of the disk the content of the file is unknown:
//! the callers get the error, and the file is opened again before the next request.
//!
//! A snapshot is written into a new file, with the entries after it, which then replaces the old one. In the old file the pages
//! of deleted entries would keep the names of tenants until they are used again, perhaps for ever.

use super::{EncodedEntry, JobLog, JobLogError, QueueSnapshot, decode, is_full};
use async_trait::async_trait;
use jobs_core::job::{DurableJob, DurableJobId};
use jobs_core::record::JobRecord;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot, watch};

const ENTRIES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("entries");
const JOBS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("jobs");
const BATCHES: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("batches");
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");

/// Version of the tables above, which are not those of the hub's store.
const FORMAT: u64 = 1;
/// Cache of redb, bytes.
const CACHE_BYTES: usize = 4 << 20;
/// Capacity of the queue of requests; further callers wait. Each request appends one job; the queue and the batches of the
/// hub's store (`scheduler-store`) follow from its own load.
const QUEUE_MAX: usize = 1024;
/// Appends that are written together.
const BATCH_MAX: usize = 256;

/// Error that prevents the job log from being opened: its file is damaged or of another format, or another process has
/// it open.
#[derive(Debug, thiserror::Error)]
#[error("cannot open the job log {}: {problem}", path.display())]
pub struct JobLogOpenError {
    path: PathBuf,
    problem: String,
}

/// Log in one file. The file is free again soon after the last handle is dropped.
#[derive(Debug, Clone)]
pub struct EmbeddedJobLog {
    requests: mpsc::Sender<LogRequest>,
    last: watch::Receiver<u64>,
}

type Response<T> = oneshot::Sender<Result<T, JobLogError>>;

#[derive(Debug)]
enum LogRequest {
    Append(Vec<u8>, Response<u64>),
    Read(u64, usize, Response<Vec<(u64, Vec<u8>)>>),
    Save(QueueSnapshot, Response<()>),
    Saved(Response<QueueSnapshot>),
}

/// Opens a file: the log, at the start and after a failure of the disk, or the one that replaces it.
type Opener = Box<dyn FnMut(&Path) -> Result<Database, redb::Error> + Send>;

impl EmbeddedJobLog {
    /// Opens or creates the file.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or written, is no job log, or is open in another process.
    pub async fn open(path: &Path) -> Result<EmbeddedJobLog, JobLogOpenError> {
        let opener = |file: &Path| Ok(Database::builder().set_cache_size(CACHE_BYTES).create(file)?);
        let opened = EmbeddedJobLog::start(path.to_owned(), Box::new(opener)).await;
        opened.map_err(|problem| JobLogOpenError { path: path.to_owned(), problem })
    }

    async fn start(path: PathBuf, opener: Opener) -> Result<EmbeddedJobLog, String> {
        let (requests, inbox) = mpsc::channel(QUEUE_MAX);
        let (opened, outcome) = oneshot::channel();
        let serve = move || {
            let mut file = LogFile { path, opener, database: None, last: 0 };
            match file.open() {
                Ok(_) => {
                    let (notify, last) = watch::channel(file.last);
                    // The caller may have been cancelled; then there are no handles, and the thread ends.
                    opened.send(Ok(last)).ok();
                    serve(&mut file, inbox, &notify);
                }
                Err(error) => drop(opened.send(Err(error.to_string()))),
            }
        };
        supervision::task::thread("job log", serve).map_err(|error| error.to_string())?;
        let last = outcome.await.map_err(|_| "its thread has ended".to_owned())??;
        Ok(EmbeddedJobLog { requests, last })
    }

    async fn request<T>(&self, request: impl FnOnce(Response<T>) -> LogRequest) -> Result<T, JobLogError> {
        let ended = || JobLogError::Unavailable("its thread has ended".to_owned());
        let (respond, response) = oneshot::channel();
        self.requests.send(request(respond)).await.map_err(|_| ended())?;
        response.await.map_err(|_| ended())?
    }
}

#[async_trait]
impl JobLog for EmbeddedJobLog {
    async fn append(&self, entry: EncodedEntry) -> Result<u64, JobLogError> {
        self.request(|respond| LogRequest::Append(entry.into_bytes(), respond)).await
    }

    async fn read(&self, after: u64, count: usize) -> Result<Vec<(u64, Vec<JobRecord>)>, JobLogError> {
        let entries = self.request(|respond| LogRequest::Read(after, count, respond)).await?;
        entries.iter().map(|(sequence, entry)| Ok((*sequence, decode(*sequence, entry)?))).collect()
    }

    fn last(&self) -> watch::Receiver<u64> {
        self.last.clone()
    }

    async fn save(&self, snapshot: QueueSnapshot) -> Result<(), JobLogError> {
        self.request(|respond| LogRequest::Save(snapshot, respond)).await
    }

    async fn saved(&self) -> Result<QueueSnapshot, JobLogError> {
        self.request(LogRequest::Saved).await
    }
}

/// Executes requests until all handles are dropped.
fn serve(file: &mut LogFile, mut inbox: mpsc::Receiver<LogRequest>, notify: &watch::Sender<u64>) {
    while let Some(first) = inbox.blocking_recv() {
        let more = std::iter::from_fn(|| inbox.try_recv().ok());
        let mut appends = Vec::new();
        for request in std::iter::once(first).chain(more).take(BATCH_MAX) {
            // The caller of any request may have been cancelled.
            match request {
                LogRequest::Append(entry, respond) => appends.push((entry, respond)),
                LogRequest::Read(after, count, respond) => {
                    respond.send(file.run(|file| file.read(after, count))).ok();
                }
                LogRequest::Save(snapshot, respond) => {
                    respond.send(file.run(|file| file.save(&snapshot))).ok();
                }
                LogRequest::Saved(respond) => drop(respond.send(file.run(LogFile::saved))),
            }
        }
        if appends.is_empty() {
            continue;
        }
        let entries = appends.iter().map(|(entry, _)| entry.as_slice());
        let appended = file.run(|file| file.append(entries));
        if appended.is_ok() {
            notify.send_replace(file.last);
        }
        for (index, (_, respond)) in appends.into_iter().enumerate() {
            respond.send(appended.clone().map(|first| first + index as u64)).ok();
        }
    }
}

/// The file, on its thread.
struct LogFile {
    path: PathBuf,
    opener: Opener,
    /// `None` after a failure of the disk.
    database: Option<Database>,
    /// Sequence number of the last entry.
    last: u64,
}

impl LogFile {
    fn run<T>(
        &mut self,
        work: impl FnOnce(&mut LogFile) -> Result<T, redb::Error>,
    ) -> Result<T, JobLogError> {
        let result = match self.database {
            Some(_) => work(self),
            None => self.open().and_then(|()| work(self)),
        };
        result.map_err(|error| {
            self.database = None;
            match &error {
                redb::Error::Io(io) if is_full(io) => JobLogError::Full,
                _ => JobLogError::Unavailable(error.to_string()),
            }
        })
    }

    fn open(&mut self) -> Result<(), redb::Error> {
        let database = self.open_file(&self.path.clone())?;
        // Of a process that was killed while it stored a snapshot.
        remove(&self.replacement())?;
        let txn = database.begin_write()?;
        {
            txn.open_table(ENTRIES)?;
            txn.open_table(JOBS)?;
            txn.open_table(BATCHES)?;
            let mut meta = txn.open_table(META)?;
            let format = meta.get("format")?.map(|format| format.value());
            match format {
                None => drop(meta.insert("format", FORMAT)?),
                Some(FORMAT) => {}
                Some(other) => {
                    let message = format!("the file has format {other}; this version reads format {FORMAT}");
                    return Err(redb::Error::Io(io::Error::other(message)));
                }
            }
            self.last = meta.get("last")?.map_or(0, |last| last.value());
        }
        txn.commit()?;
        self.database = Some(database);
        Ok(())
    }

    /// Opens a file. A new one gets its name when it is complete: if the process is killed or the disk is full while redb creates
    /// it, the file is one that redb does not open.
    fn open_file(&mut self, file: &Path) -> Result<Database, redb::Error> {
        match std::fs::metadata(file) {
            Ok(found) if found.len() > 0 => return (self.opener)(file),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let partial = with_suffix(file, ".partial");
        remove(&partial)?;
        let database = (self.opener)(&partial)?;
        std::fs::rename(&partial, file)?;
        sync_folder(file)?;
        Ok(database)
    }

    fn database(&self) -> Result<&Database, redb::Error> {
        self.database.as_ref().ok_or_else(|| io::Error::other("the file is not open").into())
    }

    /// Appends entries, and returns the sequence number of the first.
    fn append<'a>(&mut self, entries: impl Iterator<Item = &'a [u8]>) -> Result<u64, redb::Error> {
        let txn = self.database()?.begin_write()?;
        let mut last = self.last;
        {
            let mut table = txn.open_table(ENTRIES)?;
            for entry in entries {
                last += 1;
                table.insert(last, entry)?;
            }
            txn.open_table(META)?.insert("last", last)?;
        }
        txn.commit()?;
        let first = self.last + 1;
        self.last = last;
        Ok(first)
    }

    fn read(&mut self, after: u64, count: usize) -> Result<Vec<(u64, Vec<u8>)>, redb::Error> {
        let txn = self.database()?.begin_read()?;
        let table = txn.open_table(ENTRIES)?;
        let mut entries = Vec::new();
        for entry in table.range(after.saturating_add(1)..)?.take(count) {
            let (sequence, records) = entry?;
            entries.push((sequence.value(), records.value().to_vec()));
        }
        Ok(entries)
    }

    fn save(&mut self, snapshot: &QueueSnapshot) -> Result<(), redb::Error> {
        let applied = self.database()?.begin_read()?.open_table(META)?.get("applied")?;
        if snapshot.applied <= applied.map_or(0, |applied| applied.value()) || snapshot.applied > self.last {
            return Ok(());
        }
        let replacement = self.replacement();
        let written = self.write_replacement(&replacement, snapshot);
        let replaced = written.and_then(|database| {
            std::fs::rename(&replacement, &self.path)?;
            sync_folder(&self.path)?;
            Ok(database)
        });
        match replaced {
            Ok(database) => self.database = Some(database),
            Err(error) => {
                // The log is not changed; a replacement that cannot be removed is removed when the log is opened.
                remove(&replacement).ok();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns the path of the file that replaces the log.
    fn replacement(&self) -> PathBuf {
        with_suffix(&self.path, ".new")
    }

    /// Writes a file with a snapshot and the entries after it.
    fn write_replacement(
        &mut self,
        replacement: &Path,
        snapshot: &QueueSnapshot,
    ) -> Result<Database, redb::Error> {
        remove(replacement)?;
        let database = self.open_file(replacement)?;
        let (read, write) = (self.database()?.begin_read()?, database.begin_write()?);
        {
            let mut meta = write.open_table(META)?;
            for (name, value) in [("format", FORMAT), ("applied", snapshot.applied), ("last", self.last)] {
                meta.insert(name, value)?;
            }
            let mut jobs = write.open_table(JOBS)?;
            for (id, job) in &snapshot.jobs {
                let job = serde_json::to_vec(job.as_ref()).map_err(io::Error::other)?;
                jobs.insert(id.to_string().as_str(), job.as_slice())?;
            }
            let mut entries = write.open_table(ENTRIES)?;
            for entry in read.open_table(ENTRIES)?.range(snapshot.applied + 1..)? {
                let (sequence, records) = entry?;
                entries.insert(sequence.value(), records.value())?;
            }
            let mut batches = write.open_table(BATCHES)?;
            for (number, row) in (0..).zip(&snapshot.batches) {
                let row = serde_json::to_vec(row).map_err(io::Error::other)?;
                batches.insert(number, row.as_slice())?;
            }
        }
        write.commit()?;
        Ok(database)
    }

    fn saved(&mut self) -> Result<QueueSnapshot, redb::Error> {
        let txn = self.database()?.begin_read()?;
        let applied = txn.open_table(META)?.get("applied")?.map_or(0, |applied| applied.value());
        let mut jobs = Vec::new();
        for entry in txn.open_table(JOBS)?.iter()? {
            let (id, job) = entry?;
            let id: DurableJobId = id.value().parse().map_err(io::Error::other)?;
            let job: DurableJob = serde_json::from_slice(job.value()).map_err(io::Error::other)?;
            jobs.push((id, Arc::new(job)));
        }
        let mut batches = Vec::new();
        for entry in txn.open_table(BATCHES)?.iter()? {
            batches.push(serde_json::from_slice(entry?.1.value()).map_err(io::Error::other)?);
        }
        Ok(QueueSnapshot { applied, jobs, batches })
    }
}

fn with_suffix(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Makes the entry of a file in its folder durable.
fn sync_folder(file: &Path) -> io::Result<()> {
    match file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) => std::fs::File::open(folder)?.sync_all(),
        None => std::fs::File::open(".")?.sync_all(),
    }
}

/// Removes a file if it exists.
fn remove(file: &Path) -> io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
