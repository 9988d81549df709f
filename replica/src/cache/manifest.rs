//! Manifest of a cached model: its origin, and every file with its size and SHA-256.
//!
//! The manifest is the last file written into a folder before the folder is renamed to its final name; a folder without
//! a manifest is ignored. The *digest of a model* is the SHA-256 over the names and digests of its files, sorted by
//! name: it does not depend on time or origin, so that the same files have the same digest on every machine.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Name of the manifest file.
pub(super) const MANIFEST: &str = "manifest.json";

/// Content of `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ManifestV1 {
    /// Format version: 1.
    pub(super) version: u32,
    /// Source with its exact version or commit, in the form that reproduces it.
    pub(super) source: String,
    /// URL of the download.
    pub(super) origin: String,
    /// Unix time in seconds.
    pub(super) pulled_at: u64,
    /// All files except the manifest, sorted by path.
    pub(super) files: Vec<ManifestFileV1>,
}

/// File of a model.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct ManifestFileV1 {
    /// Path relative to the folder, with `/`.
    pub(super) path: String,
    /// Size.
    pub(super) bytes: u64,
    /// SHA-256 in hexadecimal.
    pub(super) sha256: String,
}

impl ManifestV1 {
    pub(super) fn new(source: String, origin: String, mut files: Vec<ManifestFileV1>) -> ManifestV1 {
        files.sort();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        ManifestV1 { version: 1, source, origin, pulled_at: now.as_secs(), files }
    }

    /// Reads the manifest of `folder`; `None` if it is missing or invalid.
    pub(super) fn read(folder: &Path) -> Option<ManifestV1> {
        let text = std::fs::read(folder.join(MANIFEST)).ok()?;
        serde_json::from_slice(&text).ok().filter(|manifest: &ManifestV1| manifest.version == 1)
    }

    /// Returns the digest of the model.
    pub(super) fn digest(&self) -> String {
        digest(&self.files)
    }

    /// Returns the total bytes of the files.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Returns the first file that is missing or has a wrong size, if any. Sizes, not digests: the check runs at every
    /// startup, and it does not protect against silent disk corruption.
    pub(super) fn first_damage(&self, folder: &Path) -> Option<String> {
        self.files.iter().find_map(|ManifestFileV1 { path, bytes, sha256: _ }| {
            match std::fs::metadata(folder.join(path)) {
                Ok(metadata) if metadata.len() == *bytes => None,
                Ok(metadata) => Some(format!("{path} has {} bytes, expected {bytes}", metadata.len())),
                Err(_) => Some(format!("{path} is missing")),
            }
        })
    }

    /// Returns the first file whose content differs from the pulled one, if any. It reads all files; used by pulls, not
    /// at startup.
    pub(super) fn first_change(&self, folder: &Path) -> Option<String> {
        self.files.iter().find_map(|ManifestFileV1 { path, bytes: _, sha256 }| {
            let mut hasher = Sha256::new();
            let read = File::open(folder.join(path))
                .and_then(|mut file| copy_hashing(&mut file, &mut hasher, |_| Ok(())));
            match read {
                Ok(_) if hex(hasher) == *sha256 => None,
                Ok(_) => Some(format!("the content of {path} has changed")),
                Err(error) => Some(format!("{path} cannot be read: {error}")),
            }
        })
    }
}

/// Returns the digest of a model with these files, which are sorted by path.
pub(super) fn digest(files: &[ManifestFileV1]) -> String {
    let mut hasher = Sha256::new();
    for ManifestFileV1 { path, bytes: _, sha256 } in files {
        hasher.update(format!("{sha256}  {path}\n"));
    }
    hex(hasher)
}

/// Returns digest and size of a folder without a manifest by reading its files.
pub(super) fn digest_of_folder(folder: &Path, files: &[PathBuf]) -> io::Result<(String, u64)> {
    let mut described = Vec::new();
    for path in files {
        let mut file = File::open(folder.join(path))?;
        let mut hasher = Sha256::new();
        let bytes = copy_hashing(&mut file, &mut hasher, |_| Ok(()))?;
        let path = path.to_string_lossy().replace('\\', "/");
        described.push(ManifestFileV1 { path, bytes, sha256: hex(hasher) });
    }
    described.sort();
    Ok((digest(&described), described.iter().map(|file| file.bytes).sum()))
}

/// Reads `from` to its end, and passes each block to `hasher` and `to`.
pub(super) fn copy_hashing(
    from: &mut impl Read,
    hasher: &mut Sha256,
    mut to: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<u64> {
    let mut buffer = vec![0; 1 << 18];
    let mut copied = 0;
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(copied),
            Ok(n) => {
                hasher.update(&buffer[..n]);
                to(&buffer[..n])?;
                copied += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns the digest in hexadecimal.
pub(super) fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, content: &str) -> ManifestFileV1 {
        let mut hasher = Sha256::new();
        hasher.update(content);
        ManifestFileV1 { path: path.to_owned(), bytes: content.len() as u64, sha256: hex(hasher) }
    }

    #[test]
    fn the_digest_depends_on_names_and_contents_only() {
        let digest = |source: &str, files: &[(&str, &str)]| {
            let files = files.iter().map(|(path, content)| file(path, content)).collect();
            ManifestV1::new(source.to_owned(), String::new(), files).digest()
        };
        let one = digest("a", &[("x", "1"), ("y", "2")]);
        assert_eq!(one, digest("b", &[("y", "2"), ("x", "1")]));
        assert_ne!(one, digest("a", &[("x", "2"), ("y", "1")]));
        assert_ne!(one, digest("a", &[("x", "1")]));
    }

    #[test]
    fn a_truncated_file_is_detected() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("x"), "12").expect("a file");
        let check = |content: &str| {
            ManifestV1::new(String::new(), String::new(), vec![file("x", content)])
                .first_damage(folder.path())
        };
        assert_eq!(check("12"), None);
        assert_eq!(check("123").as_deref(), Some("x has 2 bytes, expected 3"));
        std::fs::remove_file(folder.path().join("x")).expect("to remove");
        assert_eq!(check("12").as_deref(), Some("x is missing"));
    }
}
