//! Free space of the disk of the model cache.

use std::path::Path;

use super::error::PullError;

/// Bytes of the disk that a pull leaves free, for the packed weights and the logs of the machine.
const KEPT_BYTES: u64 = 64 << 20;

/// Fails if the disk of `folder` has no space for `bytes` more. A disk that does not tell is tried.
pub(super) fn check(folder: &Path, bytes: u64) -> Result<(), PullError> {
    match rustix::fs::statvfs(folder) {
        Ok(disk) => check_free(folder, bytes, disk.f_bavail.saturating_mul(disk.f_frsize)),
        Err(_) => Ok(()),
    }
}

fn check_free(folder: &Path, bytes: u64, free: u64) -> Result<(), PullError> {
    // A complete download is only moved.
    let needed = if bytes == 0 { 0 } else { bytes.saturating_add(KEPT_BYTES) };
    if needed <= free {
        return Ok(());
    }
    Err(PullError::NoSpace { at: folder.to_owned(), needed, free })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_download_starts_only_if_the_disk_has_space_for_all_of_it() {
        let check = |bytes, free| check_free(Path::new("/cache"), bytes, free);
        assert!(check(1_000, KEPT_BYTES + 1_000).is_ok());
        let error = check(1_000, KEPT_BYTES + 999).unwrap_err().to_string();
        for part in ["67109864 bytes are needed at /cache", "67109863 are free", "MERIDIAN_CACHE"] {
            assert!(error.contains(part), "{part:?} in {error}");
        }
        assert!(check(0, 0).is_ok(), "nothing is left to download");
        assert!(check(u64::MAX, u64::MAX - 1).is_err());
    }
}
