//! Small file system in memory, for tests of full disks.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Small file system in memory, unmounted when it is dropped.
pub(crate) struct SmallDisk {
    pub(crate) path: PathBuf,
}

impl SmallDisk {
    /// Mounts one of this size, such as `16m`.
    ///
    /// # Errors
    ///
    /// Reason why this process cannot.
    pub(crate) fn mount(folder: &Path, size: &str) -> Result<SmallDisk, String> {
        std::fs::create_dir_all(folder).unwrap();
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"]).arg(folder);
        let output = command.output().map_err(|error| error.to_string())?;
        match output.status.success() {
            true => Ok(SmallDisk { path: folder.to_owned() }),
            false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a process that is being killed may have a file open.
        Command::new("umount").arg("-l").arg(&self.path).status().ok();
    }
}
