//! Reads of the explanations on disk, on blocking threads: one at a time for the hubs, and one for the operations port.
//!
//! A caller gets a result, or the reason why there is none, within [`DISK_READ_MAX`]: it waits for other reads for [`WAIT_MAX`] at
//! most, a read ends itself between two files after [`READ_MAX`], and is not waited for if the disk hangs.

use super::{ExplanationArchive, list};
use gateway_core::explanation_archive::{
    ArchiveSearch, FILE_BYTES_MAX, FileOnDisk, find, newest_first, time_text,
};
use rustix::fs::{Mode, OFlags};
use scheduler_api::requests::{DISK_READ_MAX, FoundRequestsV1, RequestFilter};
use serde_json::Value;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Maximum bytes that a search reads, some second of work: requests of older files are found with an earlier `until_ms`.
const SEARCH_BYTES_MAX: u64 = 256 << 20;
/// Maximum bytes of a file that is read. A gateway begins the next file at [`FILE_BYTES_MAX`], and a batch of lines is smaller than that.
pub(super) const READ_BYTES_MAX: u64 = 2 * FILE_BYTES_MAX;
/// Time between the arrival and the end of a request that is certainly longer than any timeout of a request.
const LONGEST_REQUEST_MS: u64 = 3_600_000;
/// Maximum time for which a read waits for others.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(2);
/// Maximum time of a read, after which it reads no other file.
const READ_MAX: Duration = Duration::from_secs(4);
/// Maximum time for the file that is being read at the end of [`READ_MAX`]. Later, the disk hangs.
const LAST_FILE_MAX: Duration = Duration::from_millis(500);

const _: () = {
    let longest = WAIT_MAX.as_millis() + READ_MAX.as_millis() + LAST_FILE_MAX.as_millis();
    assert!(longest <= DISK_READ_MAX.as_millis(), "callers do not wait for longer");
};

/// Failure of a read.
#[derive(Debug, thiserror::Error)]
pub(in crate::edge) enum ArchiveError {
    /// Other reads are in progress. Try again.
    #[error("other searches are in progress; try again in some seconds")]
    Busy,
    /// The directory or a file cannot be read. Check the disk and the permissions of the directory.
    #[error("the explanations on disk cannot be read: {0}")]
    Disk(#[from] io::Error),
    /// The disk did not respond. Check the disk.
    #[error("the disk of the explanations does not respond")]
    Hanging,
    /// The time of a read was too short for all files. Search for the request by its time (`meridian get requests --until`).
    #[error(
        "the explanations of requests that ended before {until} were not read in time; the others do not have this request"
    )]
    Incomplete {
        /// End of the last request that was not read.
        until: String,
    },
}

/// Caller of a read. Reads for one do not wait for those of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::edge) enum ReadCaller {
    /// Console of a hub.
    Hub,
    /// Client of the operations port.
    Operations,
}

/// Permits of the reads: a read has a file in memory.
pub(super) struct ReadPermits {
    hubs: Arc<Semaphore>,
    operations: Arc<Semaphore>,
}

impl Default for ReadPermits {
    fn default() -> ReadPermits {
        let one = || Arc::new(Semaphore::new(1));
        ReadPermits { hubs: one(), operations: one() }
    }
}

impl ReadPermits {
    /// Returns the semaphore of a caller.
    pub(super) fn of(&self, caller: ReadCaller) -> Arc<Semaphore> {
        match caller {
            ReadCaller::Hub => self.hubs.clone(),
            ReadCaller::Operations => self.operations.clone(),
        }
    }
}

impl ExplanationArchive {
    /// Returns the requests that match the filter, and whether the residency of each is restricted.
    pub(in crate::edge) async fn search(
        &self,
        caller: ReadCaller,
        filter: RequestFilter,
    ) -> Result<(FoundRequestsV1, Vec<bool>), ArchiveError> {
        self.read(caller, move |dir, until| Ok(search(dir, &filter, (SEARCH_BYTES_MAX, until))?)).await
    }

    /// Returns the explanation of the newest request with this identifier.
    pub(in crate::edge) async fn find(
        &self,
        caller: ReadCaller,
        id: String,
    ) -> Result<Option<Value>, ArchiveError> {
        self.read(caller, move |dir, until| newest(dir, &id, until)).await
    }

    async fn read<T: Send + 'static>(
        &self,
        caller: ReadCaller,
        read: impl FnOnce(&Path, Instant) -> Result<T, ArchiveError> + Send + 'static,
    ) -> Result<T, ArchiveError> {
        let permit = tokio::time::timeout(WAIT_MAX, self.permits.of(caller).acquire_owned()).await;
        let Ok(Ok(permit)) = permit else { return Err(ArchiveError::Busy) };
        let dir = self.config.dir.clone();
        // It continues, with the permit, if its client disconnects or the disk hangs.
        let reading = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            read(&dir, Instant::now() + READ_MAX)
        });
        match tokio::time::timeout(READ_MAX + LAST_FILE_MAX, reading).await {
            Ok(read) => read.map_err(io::Error::other)?,
            Err(_) => Err(ArchiveError::Hanging),
        }
    }
}

/// Searches the files. A file that cannot be read, and those beyond the limits of bytes and time, are a problem of the result.
pub(super) fn search(
    dir: &Path,
    filter: &RequestFilter,
    (bytes_max, until): (u64, Instant),
) -> io::Result<(FoundRequestsV1, Vec<bool>)> {
    let mut files = newest_first(files(dir)?);
    files.retain(|(it, _)| it.file.may_have(filter, LONGEST_REQUEST_MS));
    let (mut search, mut bytes) = (ArchiveSearch::default(), 0);
    for (at, (file, ended_ms)) in files.iter().enumerate() {
        if !search.needs(*ended_ms, filter) {
            break;
        }
        if bytes >= bytes_max || Instant::now() >= until {
            search.set_problem(limits_reached(&files[at..]));
            break;
        }
        match content(dir, file) {
            Ok(Some(content)) => {
                bytes += content.len() as u64;
                search.read(&content, filter);
            }
            Ok(None) => {}
            Err(error) => search.set_problem(ArchiveError::Disk(error)),
        }
    }
    Ok(search.end())
}

/// Formats the problem of a search that did not read these files.
fn limits_reached(unread: &[(FileOnDisk, u64)]) -> String {
    let until = ended(unread);
    format!(
        "a search reads at most {} MiB and for {} s, and this one did not read the requests that ended before {until}; for these \
         search again until {until}",
        SEARCH_BYTES_MAX >> 20,
        READ_MAX.as_secs(),
    )
}

/// Returns the time at which the last request of these files had ended.
fn ended(files: &[(FileOnDisk, u64)]) -> String {
    time_text(files.iter().map(|(_, ended_ms)| *ended_ms).max().unwrap_or_default())
}

/// Returns the explanation of the newest request with this identifier, of the files that can be read until this time.
pub(super) fn newest(dir: &Path, id: &str, until: Instant) -> Result<Option<Value>, ArchiveError> {
    let mut unreadable = None;
    let files = newest_first(files(dir)?);
    for (at, (file, _)) in files.iter().enumerate() {
        if Instant::now() >= until {
            return Err(ArchiveError::Incomplete { until: ended(&files[at..]) });
        }
        match content(dir, file) {
            Ok(Some(content)) => {
                if let Some(line) = find(&content, id) {
                    return Ok(serde_json::from_slice(line).ok());
                }
            }
            Ok(None) => {}
            Err(error) => unreadable = Some(error),
        }
    }
    unreadable.map_or(Ok(None), |error| Err(ArchiveError::Disk(error)))
}

/// Returns the files; none before the first was written.
fn files(dir: &Path) -> io::Result<Vec<FileOnDisk>> {
    match list(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        listed => listed,
    }
}

/// Returns the content of a file; `None` if it was deleted meanwhile. A file of a later version is an error, and so is one that no
/// gateway writes.
pub(super) fn content(dir: &Path, file: &FileOnDisk) -> io::Result<Option<Vec<u8>>> {
    if let Some(problem) = file.file.problem() {
        return Err(io::Error::other(problem));
    }
    match read(&dir.join(file.file.name())) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads a file. Since it was listed, another one may have replaced it: a link is not followed, no process at the other end of a FIFO
/// is waited for, and what is appended during the read is left to the next one.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        let problem =
            format!("{} is not a regular file; move it out of the directory of explanations", path.display());
        return Err(io::Error::other(problem));
    }
    let bytes = metadata.len();
    if bytes > READ_BYTES_MAX {
        let problem = format!(
            "{} has {bytes} bytes, and a file of a gateway has at most {READ_BYTES_MAX}; move it out of the directory of explanations",
            path.display()
        );
        return Err(io::Error::other(problem));
    }
    let mut content = Vec::with_capacity(usize::try_from(bytes).unwrap_or_default());
    file.take(bytes).read_to_end(&mut content)?;
    Ok(content)
}
