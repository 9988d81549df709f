//! Reads of the explanations on disk, one at a time, on a blocking thread.

use super::{ExplanationArchive, list};
use gateway_core::explanation_archive::{ArchiveSearch, FileOnDisk, find};
use scheduler_api::requests::{FoundRequestsV1, RequestFilter};
use serde_json::Value;
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

/// Maximum bytes that a search reads, some second of work: what is older is found with an earlier `until_ms`.
const SEARCH_BYTES_MAX: u64 = 256 << 20;
/// Time between the arrival and the end of a request that is certainly longer than any timeout of a request.
const LONGEST_REQUEST_MS: u64 = 3_600_000;
/// Maximum time for which a read waits for others.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Failure of a read.
#[derive(Debug, thiserror::Error)]
pub(in crate::edge) enum ArchiveError {
    /// Other reads are in progress. Try again.
    #[error("other searches are in progress; try again in some seconds")]
    Busy,
    /// The directory or a file cannot be read. Check the disk and the permissions of the directory.
    #[error("the explanations on disk cannot be read: {0}")]
    Disk(#[from] io::Error),
}

impl ExplanationArchive {
    /// Returns the requests that match the filter, and whether the residency of each is restricted.
    pub(in crate::edge) async fn search(
        &self,
        filter: RequestFilter,
    ) -> Result<(FoundRequestsV1, Vec<bool>), ArchiveError> {
        self.read(move |dir| search(dir, &filter)).await
    }

    /// Returns the explanation of the newest request with this identifier.
    pub(in crate::edge) async fn find(&self, id: String) -> Result<Option<Value>, ArchiveError> {
        self.read(move |dir| newest(dir, &id)).await
    }

    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T, ArchiveError> {
        let permit = tokio::time::timeout(WAIT_MAX, self.reads.clone().acquire_owned()).await;
        let Ok(Ok(permit)) = permit else { return Err(ArchiveError::Busy) };
        let dir = self.config.dir.clone();
        // It continues, with the permit, if its client disconnects.
        let reading = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            read(&dir)
        });
        Ok(reading.await.map_err(io::Error::other)??)
    }
}

fn search(dir: &Path, filter: &RequestFilter) -> io::Result<(FoundRequestsV1, Vec<bool>)> {
    let (mut search, mut bytes) = (ArchiveSearch::default(), 0);
    for file in files(dir)?.iter().rev().filter(|it| it.file.may_have(filter, LONGEST_REQUEST_MS)) {
        if bytes >= SEARCH_BYTES_MAX {
            search.interrupt();
            break;
        }
        bytes += file.bytes;
        let Some(content) = content(dir, file)? else { continue };
        if !search.read(&content, filter) {
            break;
        }
    }
    Ok(search.end())
}

fn newest(dir: &Path, id: &str) -> io::Result<Option<Value>> {
    for file in files(dir)?.iter().rev() {
        let Some(content) = content(dir, file)? else { continue };
        if let Some(line) = find(&content, id) {
            return Ok(serde_json::from_slice(line).ok());
        }
    }
    Ok(None)
}

/// Returns the files; none before the first was written.
fn files(dir: &Path) -> io::Result<Vec<FileOnDisk>> {
    match list(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        listed => listed,
    }
}

/// Returns the content of a file; `None` if it was deleted meanwhile.
fn content(dir: &Path, file: &FileOnDisk) -> io::Result<Option<Vec<u8>>> {
    match fs::read(dir.join(file.file.name())) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
