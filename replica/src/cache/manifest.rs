//! What a folder of the cache holds: where it came from, and every file with its size and SHA-256.
//!
//! The manifest is the last file written into a folder before it gets its name, so a folder without one does not exist
//! for the cache. The *digest of a model* is the SHA-256 over the names and digests of its files, in order of name: it
//! says nothing of when or whence, so the same files have the same digest on every machine.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The manifest's own file.
pub(super) const MANIFEST: &str = "manifest.json";

/// The content of `manifest.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ManifestV1 {
    /// 1.
    pub(super) version: u32,
    /// The source with its version or commit, as one would write it to get the same again.
    pub(super) source: String,
    /// The URL that it was downloaded from.
    pub(super) origin: String,
    /// Seconds since 1970.
    pub(super) pulled_at: u64,
    /// Every file but this one, in order of path.
    pub(super) files: Vec<FileV1>,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct FileV1 {
    /// Below the folder, with `/`.
    pub(super) path: String,
    /// Its size.
    pub(super) bytes: u64,
    /// Its SHA-256, in hexadecimal.
    pub(super) sha256: String,
}

impl ManifestV1 {
    pub(super) fn new(source: String, origin: String, mut files: Vec<FileV1>) -> ManifestV1 {
        files.sort();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        ManifestV1 { version: 1, source, origin, pulled_at: now.as_secs(), files }
    }

    /// The manifest of `folder`; `None` where there is none that can be read.
    pub(super) fn read(folder: &Path) -> Option<ManifestV1> {
        let text = std::fs::read(folder.join(MANIFEST)).ok()?;
        serde_json::from_slice(&text).ok().filter(|manifest: &ManifestV1| manifest.version == 1)
    }

    /// The digest of the model.
    pub(super) fn digest(&self) -> String {
        digest(&self.files)
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// The first file that is not there with its size, if any. Sizes, not digests: this is asked at every start, and
    /// a disk that silently changes bytes is not what it guards against.
    pub(super) fn first_damage(&self, folder: &Path) -> Option<String> {
        self.files.iter().find_map(|FileV1 { path, bytes, sha256: _ }| {
            match std::fs::metadata(folder.join(path)) {
                Ok(found) if found.len() == *bytes => None,
                Ok(found) => Some(format!("{path} has {} bytes and should have {bytes}", found.len())),
                Err(_) => Some(format!("{path} is missing")),
            }
        })
    }

    /// The first file whose content is not the one that was pulled, if any. It reads all of them: for a pull, not for a
    /// start.
    pub(super) fn first_change(&self, folder: &Path) -> Option<String> {
        self.files.iter().find_map(|FileV1 { path, bytes: _, sha256 }| {
            let mut hasher = Sha256::new();
            let read = File::open(folder.join(path))
                .and_then(|mut file| copy_hashing(&mut file, &mut hasher, |_| Ok(())));
            match read {
                Ok(_) if hex(hasher) == *sha256 => None,
                Ok(_) => Some(format!("{path} has another content")),
                Err(error) => Some(format!("{path} cannot be read: {error}")),
            }
        })
    }
}

/// The digest of a model that consists of these files, in order of path.
fn digest(files: &[FileV1]) -> String {
    let mut hasher = Sha256::new();
    for FileV1 { path, bytes: _, sha256 } in files {
        hasher.update(format!("{sha256}  {path}\n"));
    }
    hex(hasher)
}

/// The digest and size of a folder that has no manifest: its files are read.
pub(super) fn digest_of_folder(folder: &Path, files: &[PathBuf]) -> io::Result<(String, u64)> {
    let mut described = Vec::new();
    for path in files {
        let mut file = File::open(folder.join(path))?;
        let mut hasher = Sha256::new();
        let bytes = copy_hashing(&mut file, &mut hasher, |_| Ok(()))?;
        let path = path.to_string_lossy().replace('\\', "/");
        described.push(FileV1 { path, bytes, sha256: hex(hasher) });
    }
    described.sort();
    Ok((digest(&described), described.iter().map(|file| file.bytes).sum()))
}

/// Reads `from` to its end through `hasher`, and hands each piece on.
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

/// The digest in hexadecimal.
pub(super) fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, content: &str) -> FileV1 {
        let mut hasher = Sha256::new();
        hasher.update(content);
        FileV1 { path: path.to_owned(), bytes: content.len() as u64, sha256: hex(hasher) }
    }

    #[test]
    fn the_digest_depends_on_names_and_contents_and_on_nothing_else() {
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
    fn a_file_that_lost_bytes_is_noticed() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("x"), "12").expect("a file");
        let check = |content: &str| {
            ManifestV1::new(String::new(), String::new(), vec![file("x", content)])
                .first_damage(folder.path())
        };
        assert_eq!(check("12"), None);
        assert_eq!(check("123").as_deref(), Some("x has 2 bytes and should have 3"));
        std::fs::remove_file(folder.path().join("x")).expect("to remove");
        assert_eq!(check("12").as_deref(), Some("x is missing"));
    }
}
