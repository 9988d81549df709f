//! File of packed weights: writing, verification and mapping.
//!
//! **Atomic.** The file is written under a temporary name, flushed, and renamed. Replicas that start together wait for
//! the first of them.
//!
//! **Verified.** The header describes the source (layout, sizes and factors of the layers, digest of the model), and
//! after the weights follows a CRC-32 of each mebibyte. All of it is compared at every load; a file that differs is
//! written again. A CRC suffices because it protects against accidents only. A process that may write the file could
//! also write a matching cryptographic hash, so tampering is a matter of permissions:
//!
//! **Private.** The directory has mode 0700 and the file mode 0400, and both belong to the user of this process; the
//! open file is checked, not its name. Otherwise the weights are packed into private memory.
//!
//! **Stable.** A mapped file must keep its bytes and its length: reading beyond a new end raises SIGBUS. Meridian never
//! writes to a file with its final name. The remaining case is another process of the same user, or root, that
//! truncates or overwrites the file while it is mapped. A truncated file ends the replica (SIGBUS), and its successor
//! detects the damage and packs again.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use replica_core::Precision;
use rustix::process::geteuid;

use crate::model::{MappedFile, ModelError};

/// Version of the layout; raise it with every change of the content of a packed file.
const LAYOUT: &str = "panel32-v3";

/// The first page of the file is the header; weights begin on the second.
pub(super) const HEADER_BYTES: usize = 4096;

/// Bytes of one checksum.
const BLOCK_BYTES: usize = 1 << 20;

/// Mode of the directory: accessible by its user only.
const DIRECTORY_MODE: u32 = 0o700;
/// Mode while the file is written.
const NEW_MODE: u32 = 0o600;
/// Mode of the complete file. Even its user cannot write to it by accident.
const FILE_MODE: u32 = 0o400;
/// Permission bits of the group and others, which must not be set.
const FOREIGN_BITS: u32 = 0o077;

/// Cache of packed weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedCache {
    /// Directory; it is created if it does not exist.
    pub folder: PathBuf,
    /// Digest of the model: equal digests must mean equal weights.
    pub digest: String,
}

impl PackedCache {
    /// Returns the cache for a model with this digest, below the model cache at `root`.
    pub fn below(root: &Path, digest: impl Into<String>) -> PackedCache {
        PackedCache { folder: root.join("packed"), digest: digest.into() }
    }
}

/// Location of an engine's packed weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightsLocation {
    /// In a mapped file, which all replicas of the model share.
    SharedFile(PathBuf),
    /// In memory of this process.
    PrivateMemory {
        /// Reason, if a file was requested.
        problem: Option<String>,
    },
}

/// Packs the weights into memory of this process.
pub(super) type Pack<'a> = dyn Fn() -> Result<MappedFile, ModelError> + 'a;

/// File of packed weights, which may not exist yet.
pub(super) struct PackedFile {
    folder: PathBuf,
    path: PathBuf,
    header: [u8; HEADER_BYTES],
    /// Length of the header and the weights, without the checksums.
    length: usize,
}

impl PackedFile {
    pub(super) fn new(cache: &PackedCache, precision: Precision, layers: &str, length: usize) -> PackedFile {
        // A digest is a valid file name; other characters are replaced here, and the header has the whole value.
        let name: String =
            cache.digest.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let order = if cfg!(target_endian = "little") { "little" } else { "big" };
        let precision = precision.as_str();
        let text = format!(
            "meridian packed weights\nlayout {LAYOUT}\nprecision {precision}\nbytes {order} end first\n\
             length {length}\nlayers {layers}\nmodel {}\n",
            cache.digest
        );
        let mut header = [0; HEADER_BYTES];
        let end = text.len().min(HEADER_BYTES);
        header[..end].copy_from_slice(&text.as_bytes()[..end]);
        let folder = cache.folder.clone();
        let path = folder.join(format!("{name}.{precision}-{LAYOUT}"));
        PackedFile { folder, path, header, length }
    }

    /// Maps the file, and writes it first if necessary; if that is impossible, returns private memory.
    pub(super) fn obtain(self, pack: &Pack<'_>) -> Result<(MappedFile, WeightsLocation), ModelError> {
        let own = |memory, problem: io::Error| {
            let problem = Some(problem.to_string());
            Ok((memory, WeightsLocation::PrivateMemory { problem }))
        };
        if let Err(problem) = private_folder(&self.folder) {
            return own(pack()?, problem);
        }
        if let Ok(file) = self.map() {
            return Ok((file, WeightsLocation::SharedFile(self.path)));
        }
        let new = self.path.with_added_extension("new");
        let lock = match lock(&new) {
            Ok(lock) => lock,
            Err(problem) => return own(pack()?, problem),
        };
        // Another process may have written it while this one waited for the lock.
        if let Ok(file) = self.map() {
            return Ok((file, WeightsLocation::SharedFile(self.path)));
        }
        let memory = pack().inspect_err(|_| discard(&new))?;
        match self.write(lock, &new, &memory).and_then(|()| self.map()) {
            Ok(file) => Ok((file, WeightsLocation::SharedFile(self.path))),
            Err(problem) => {
                discard(&new);
                own(memory, problem)
            }
        }
    }

    /// Maps the file, if it exists, is private, and passes verification.
    fn map(&self) -> io::Result<MappedFile> {
        let file = open_private(&self.path)?;
        let file = MappedFile::map_and_read(&file)?;
        let (content, written) = file
            .bytes()
            .split_at_checked(self.length)
            .ok_or_else(|| io::Error::other("the file is shorter than the weights"))?;
        let (header, weights) = content.split_at(HEADER_BYTES);
        if header != self.header {
            return Err(io::Error::other("the file contains other weights"));
        }
        if written != checksums(header, weights) {
            return Err(io::Error::other("the checksums do not match the content"));
        }
        Ok(file)
    }

    fn write(&self, mut file: File, new: &Path, packed: &MappedFile) -> io::Result<()> {
        let weights = &packed.bytes()[HEADER_BYTES..];
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(&self.header)?;
        file.write_all(weights)?;
        file.write_all(&checksums(&self.header, weights))?;
        file.set_permissions(Permissions::from_mode(FILE_MODE))?;
        file.sync_all()?;
        fs::rename(new, &self.path)
    }
}

/// Creates the directory, and rejects one that another user could write to.
fn private_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(folder)?;
    let found = fs::metadata(folder)?;
    check_owner(folder, found.uid())?;
    if found.mode() & FOREIGN_BITS != 0 {
        // Earlier versions created it with the mode of the umask.
        fs::set_permissions(folder, Permissions::from_mode(DIRECTORY_MODE))?;
    }
    Ok(())
}

/// Opens the file for reading, if no other user can write to it.
fn open_private(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    check_owner(path, found.uid())?;
    if !found.is_file() || found.mode() & FOREIGN_BITS != 0 {
        let mode = found.mode() & 0o7777;
        return Err(io::Error::other(format!("{} has mode {mode:04o}", path.display())));
    }
    Ok(file)
}

fn check_owner(path: &Path, owner: u32) -> io::Result<()> {
    let user = geteuid().as_raw();
    if owner == user {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!(
            "{} belongs to user {owner} and this process runs as user {user}; use a separate cache for each user",
            path.display()
        ),
    ))
}

/// Opens the temporary file, and waits for other processes that write it. A lock ends with its process, even if the
/// process is killed.
fn lock(new: &Path) -> io::Result<File> {
    let file = File::options().create(true).truncate(false).write(true).mode(NEW_MODE).open(new)?;
    check_owner(new, file.metadata()?.uid())?;
    file.lock()?;
    Ok(file)
}

/// Removes an incomplete file. It may not exist, and if it remains, the next process overwrites it.
fn discard(new: &Path) {
    let _ = fs::remove_file(new);
}

/// Returns the CRC-32 of the header and of each block of the weights, concatenated.
fn checksums(header: &[u8], weights: &[u8]) -> Vec<u8> {
    let blocks = std::iter::once(header).chain(weights.chunks(BLOCK_BYTES));
    blocks.flat_map(|block| crc32fast::hash(block).to_le_bytes()).collect()
}
