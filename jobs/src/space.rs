//! Free space of a disk, of which a part is kept for the jobs that a queue has accepted.
//!
//! With a full disk no result can be stored, and no record that removes a finished job: the queue would stay full for ever. So new
//! work is rejected while a part of the disk is free, and results wait while half of that part is: the log has the rest.

use std::path::PathBuf;

/// Bytes of the disk that new work leaves free: a twentieth, in these bounds. The file of the log grows by megabytes.
const KEPT_PART: u64 = 20;
const KEPT_MIN: u64 = 4 << 20;
const KEPT_MAX: u64 = 256 << 20;

/// Content that is to be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredContent {
    /// Jobs, files and batches that are not accepted yet.
    NewWork,
    /// Results of accepted jobs.
    Result,
}

/// Disk of a queue.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    folder: PathBuf,
}

impl Disk {
    /// Returns the disk of a folder.
    pub(crate) fn of(folder: PathBuf) -> Disk {
        Disk { folder }
    }

    /// Returns whether the disk has the free space that this content has to leave.
    pub(crate) async fn has_space(&self, content: StoredContent) -> bool {
        let folder = self.folder.clone();
        let read = tokio::task::spawn_blocking(move || rustix::fs::statvfs(folder)).await;
        match read {
            Ok(Ok(space)) => {
                let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
                has_space(content, bytes(space.f_bavail), bytes(space.f_blocks))
            }
            // The write itself has the reason.
            Ok(Err(_)) | Err(_) => true,
        }
    }
}

/// Returns whether content may be stored on a disk with `free` of `total` bytes.
fn has_space(content: StoredContent, free: u64, total: u64) -> bool {
    let kept = (total / KEPT_PART).clamp(KEPT_MIN, KEPT_MAX);
    free >= match content {
        StoredContent::NewWork => kept,
        StoredContent::Result => kept / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_work_leaves_space_for_results_and_both_leave_space_for_the_log() {
        const MIB: u64 = 1 << 20;
        for (total, kept) in [(16 * MIB, 4 * MIB), (1000 * MIB, 50 * MIB), (1 << 40, 256 * MIB)] {
            for (content, least) in [(StoredContent::NewWork, kept), (StoredContent::Result, kept / 2)] {
                assert!(has_space(content, least, total), "{content:?} {total}");
                assert!(!has_space(content, least - 1, total), "{content:?} {total}");
            }
        }
    }
}
