//! Payloads and results of jobs, in objects of a store.
//!
//! An object holds what was written at one time for many jobs, so the cost of an object (an fsync in a folder, a request at
//! an S3-compatible store) is divided among them. One is deleted when no job refers to it. Until then the part of a job that
//! was removed is overwritten with zeros, since the other jobs of the object may wait for a week ([`JobObjects::erase`]).
//!
//! A process that is killed while it writes an object leaves a file beside it, which the store does not list. Such files have
//! content like the objects, so they are deleted as well ([`JobObjects::delete_interrupted`]).
//!
//! With keys each payload and each result is encrypted by itself with AES-256-GCM, as `key id (4 bytes), nonce (12 bytes),
//! ciphertext, tag (16 bytes)`. Object number and offset are authenticated, so a store cannot exchange two of them.

use crate::bucket::{BucketConfig, BucketError};
use crate::cpu::CpuWork;
use crate::space::{Disk, StoredContent};
use bytes::{Bytes, BytesMut};
use jobs_core::job::StoredRange;
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt, PutMode, PutOptions, UpdateVersion};
use rand::Rng;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use sha2::{Digest, Sha256};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncSeekExt, AsyncWriteExt};

const KEY_ID_LEN: usize = 4;
/// Bytes of a key.
pub const KEY_LEN: usize = 32;
/// Bits of an object number that are random. The others are the time in milliseconds.
const RANDOM_BITS: u32 = 20;
/// Time for which the removed parts of an object of a bucket are collected. The jobs of an object were submitted together, so
/// many of them are removed within seconds, and the last of them leaves an object that is deleted and not replaced.
const OVERWRITE_DELAY: Duration = Duration::from_secs(10);
/// Tries to replace an object that other processes replace as well.
const ERASE_TRIES: usize = 8;
/// Tries to find a number that no object has.
const NUMBER_TRIES: usize = 8;

/// Error of an object store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// The disk or the bucket of the object store has no space. No job is accepted meanwhile.
    #[error("the object store is full; free space")]
    Full,
    /// A payload or result does not exist: it was deleted, or never stored.
    #[error("the object store has no object {0:016x}")]
    Missing(u64),
    /// A stored payload or result was encrypted with a key that is not configured, or was changed.
    #[error(
        "a part of the object {0:016x} cannot be decrypted with the configured keys; add the key that encrypted it"
    )]
    Undecryptable(u64),
    /// The object store rejects the credentials; the text has the cause. An operator must change them or the policy.
    #[error("the object store denies access; check the credentials and the policy of the bucket: {0}")]
    Denied(String),
    /// The object store cannot be read or written now; the text has the cause.
    #[error("the object store is unavailable: {0}")]
    Unavailable(String),
}

/// Key of a jurisdiction.
struct ObjectKey {
    id: [u8; KEY_ID_LEN],
    key: LessSafeKey,
}

/// Objects of a queue.
pub struct JobObjects {
    store: Arc<dyn ObjectStore>,
    /// Folder of the objects; none if they are in a bucket.
    folder: Option<PathBuf>,
    keys: Arc<[ObjectKey]>,
    /// Encryption and decryption.
    cpu: CpuWork,
    /// Disk of the objects, or of the log beside them; none if both are elsewhere.
    disk: Option<Disk>,
}

impl JobObjects {
    /// Stores objects in a folder, which is created if necessary. A write returns after an fsync of the file and of the
    /// folder.
    ///
    /// # Errors
    ///
    /// When the folder cannot be created.
    pub fn in_folder(folder: &Path, cpu: &CpuWork) -> io::Result<JobObjects> {
        std::fs::create_dir_all(folder)?;
        let store = LocalFileSystem::new_with_prefix(folder).map_err(io::Error::other)?;
        Ok(JobObjects {
            store: Arc::new(store.with_fsync(true)),
            folder: Some(folder.to_owned()),
            keys: Arc::new([]),
            cpu: cpu.clone(),
            disk: Some(Disk::of(folder.to_owned())),
        })
    }

    /// Stores objects in a bucket, which several processes may share. Sends no request.
    ///
    /// # Errors
    ///
    /// When the settings or the certificates of the authorities are invalid.
    pub fn in_bucket(config: &BucketConfig, cpu: &CpuWork) -> Result<JobObjects, BucketError> {
        let (store, cpu) = (config.open()?, cpu.clone());
        Ok(JobObjects { store, folder: None, keys: Arc::new([]), cpu, disk: None })
    }

    /// Keeps space for the log, which is a file in this folder.
    pub fn with_log_in(self, folder: &Path) -> JobObjects {
        JobObjects { disk: Some(Disk::of(folder.to_owned())), ..self }
    }

    /// Fails while the disk has no space for this content, beside that which it keeps for what was accepted before.
    pub(crate) async fn check_space(&self, content: StoredContent) -> Result<(), ObjectError> {
        match &self.disk {
            Some(disk) if !disk.has_space(content).await => Err(ObjectError::Full),
            Some(_) | None => Ok(()),
        }
    }

    /// Returns the limit on encryption and decryption.
    pub(crate) fn cpu(&self) -> &CpuWork {
        &self.cpu
    }

    /// Encrypts new objects with the first of these keys. The others decrypt older objects.
    pub fn encrypted(self, keys: &[[u8; KEY_LEN]]) -> JobObjects {
        let keys = keys.iter().filter_map(|secret| {
            let id = Sha256::digest(secret);
            let key = LessSafeKey::new(UnboundKey::new(&AES_256_GCM, secret).ok()?);
            Some(ObjectKey { id: [id[0], id[1], id[2], id[3]], key })
        });
        JobObjects { keys: keys.collect(), ..self }
    }

    /// Writes one object with several parts, and returns their ranges when they are durable. `now` is the time since the
    /// Unix epoch.
    pub async fn put(&self, parts: &[Bytes], now: Duration) -> Result<Vec<StoredRange>, ObjectError> {
        for _ in 0..NUMBER_TRIES {
            let random = rand::rng().random_range(0..1u64 << RANDOM_BITS);
            let number = (now.as_millis() as u64) << RANDOM_BITS | random;
            let (keys, own) = (self.keys.clone(), parts.to_vec());
            let bytes = parts.iter().map(Bytes::len).sum();
            let (content, ranges) = self.cpu.run(bytes, move || content(&keys, number, &own)).await?;
            let options = PutOptions::from(PutMode::Create);
            match self.store.put_opts(&path(number), content.freeze().into(), options).await {
                Ok(_) => return Ok(ranges),
                Err(object_store::Error::AlreadyExists { .. }) => {}
                Err(error) => return Err(unavailable(&error)),
            }
        }
        Err(ObjectError::Unavailable(format!("no free object number after {NUMBER_TRIES} tries")))
    }

    /// Reads a part.
    pub async fn get(&self, range: StoredRange) -> Result<Bytes, ObjectError> {
        // A store rejects an empty range.
        if range.length == 0 {
            return Ok(Bytes::new());
        }
        let bytes = range.offset..range.offset + range.length;
        let content = match self.store.get_range(&path(range.object), bytes).await {
            Ok(content) => content,
            Err(object_store::Error::NotFound { .. }) => return Err(ObjectError::Missing(range.object)),
            Err(error) => return Err(unavailable(&error)),
        };
        if self.keys.is_empty() {
            return Ok(content);
        }
        let keys = self.keys.clone();
        let text = self.cpu.run(content.len(), move || decrypted(&keys, range, content)).await;
        text.ok_or(ObjectError::Undecryptable(range.object))
    }

    /// Deletes an object; one that does not exist is ignored.
    pub async fn delete(&self, object: u64) -> Result<(), ObjectError> {
        match self.store.delete(&path(object)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(unavailable(&error)),
        }
    }

    /// Returns the time for which parts of an object are collected before they are overwritten: each time replaces an object of a
    /// bucket.
    pub(crate) fn overwrite_delay(&self) -> Duration {
        if self.folder.is_some() { Duration::ZERO } else { OVERWRITE_DELAY }
    }

    /// Overwrites parts of one object with zeros. An object that does not exist is ignored.
    pub async fn erase(&self, object: u64, parts: &[StoredRange]) -> Result<(), ObjectError> {
        match &self.folder {
            Some(folder) => {
                let erased = erase_in_file(&folder.join(path(object).as_ref()), parts).await;
                erased.map_err(|error| ObjectError::Unavailable(error.to_string()))
            }
            None => self.erase_in_bucket(object, parts).await,
        }
    }

    /// Replaces an object of a bucket, where a part of an object cannot be written.
    async fn erase_in_bucket(&self, object: u64, parts: &[StoredRange]) -> Result<(), ObjectError> {
        for _ in 0..ERASE_TRIES {
            let read = match self.store.get(&path(object)).await {
                Err(object_store::Error::NotFound { .. }) => return Ok(()),
                read => read.map_err(|error| unavailable(&error))?,
            };
            let version =
                UpdateVersion { e_tag: read.meta.e_tag.clone(), version: read.meta.version.clone() };
            let mut content = BytesMut::from(read.bytes().await.map_err(|error| unavailable(&error))?);
            for part in parts {
                let end = part.offset.saturating_add(part.length).min(content.len() as u64);
                if part.offset < end {
                    content[part.offset as usize..end as usize].fill(0);
                }
            }
            let options = PutOptions::from(PutMode::Update(version));
            match self.store.put_opts(&path(object), content.freeze().into(), options).await {
                // Deleted meanwhile.
                Ok(_) | Err(object_store::Error::NotFound { .. }) => return Ok(()),
                // Another process has erased another part.
                Err(object_store::Error::Precondition { .. }) => {}
                Err(error) => return Err(unavailable(&error)),
            }
        }
        Err(ObjectError::Unavailable(format!(
            "another process has replaced the object {object:016x} {ERASE_TRIES} times"
        )))
    }

    /// Returns the numbers of all objects.
    pub async fn list(&self) -> Result<Vec<u64>, ObjectError> {
        let listed = self.store.list_with_delimiter(None).await.map_err(|error| unavailable(&error))?;
        let numbers = listed.objects.iter().filter_map(|object| number(object.location.as_ref()));
        Ok(numbers.collect())
    }

    /// Deletes the files that interrupted writes have left, of objects that were written before this time since the Unix epoch.
    pub async fn delete_interrupted(&self, before: Duration) -> io::Result<()> {
        let Some(folder) = &self.folder else {
            // The store deletes the parts of interrupted uploads, by a rule of the bucket.
            return Ok(());
        };
        let mut entries = tokio::fs::read_dir(folder).await?;
        while let Some(entry) = entries.next_entry().await? {
            let name = entry.file_name();
            // `object_store` writes to the name of the object with `#` and a number.
            let object = name.to_str().and_then(|name| number(name.split_once('#')?.0));
            if object.is_some_and(|object| JobObjects::written(object) < before) {
                tokio::fs::remove_file(entry.path()).await?;
            }
        }
        Ok(())
    }

    /// Returns the time at which an object was written, since the Unix epoch.
    pub fn written(object: u64) -> Duration {
        Duration::from_millis(object >> RANDOM_BITS)
    }
}

/// Returns the content of an object with these parts, encrypted with the first key, and their ranges.
fn content(
    keys: &[ObjectKey],
    number: u64,
    parts: &[Bytes],
) -> Result<(BytesMut, Vec<StoredRange>), ObjectError> {
    let overhead = keys.first().map_or(0, |_| KEY_ID_LEN + NONCE_LEN + AES_256_GCM.tag_len());
    let length = parts.iter().map(|part| part.len() + overhead).sum();
    let (mut content, mut ranges) = (BytesMut::with_capacity(length), Vec::with_capacity(parts.len()));
    for part in parts {
        let offset = content.len();
        match keys.first() {
            None => content.extend_from_slice(part),
            Some(ObjectKey { id, key }) => {
                let nonce: [u8; NONCE_LEN] = rand::rng().random();
                content.extend_from_slice(id);
                content.extend_from_slice(&nonce);
                let text = content.len();
                content.extend_from_slice(part);
                let aad = associated(number, offset as u64);
                let nonce = Nonce::assume_unique_for_key(nonce);
                let tag = key.seal_in_place_separate_tag(nonce, aad, &mut content[text..]);
                let failed = |_| ObjectError::Unavailable("encryption failed".to_owned());
                content.extend_from_slice(tag.map_err(failed)?.as_ref());
            }
        }
        let (offset, length) = (offset as u64, (content.len() - offset) as u64);
        ranges.push(StoredRange { object: number, offset, length });
    }
    Ok((content, ranges))
}

/// Decrypts a part; none if it was changed, or encrypted with another key.
fn decrypted(keys: &[ObjectKey], range: StoredRange, content: Bytes) -> Option<Bytes> {
    let mut content = BytesMut::from(content);
    if content.len() < KEY_ID_LEN + NONCE_LEN {
        return None;
    }
    let id = content.split_to(KEY_ID_LEN);
    let nonce = content.split_to(NONCE_LEN);
    let key = keys.iter().find(|key| key.id == *id)?;
    let nonce = Nonce::try_assume_unique_for_key(&nonce).ok()?;
    let text = key.key.open_in_place(nonce, associated(range.object, range.offset), &mut content);
    let length = text.ok()?.len();
    content.truncate(length);
    Some(content.freeze())
}

fn associated(object: u64, offset: u64) -> Aad<[u8; 16]> {
    let mut data = [0; 16];
    data[..8].copy_from_slice(&object.to_be_bytes());
    data[8..].copy_from_slice(&offset.to_be_bytes());
    Aad::from(data)
}

fn path(object: u64) -> ObjectPath {
    ObjectPath::from(format!("{object:016x}"))
}

fn number(path: &str) -> Option<u64> {
    (path.len() == 16).then(|| u64::from_str_radix(path, 16).ok()).flatten()
}

fn unavailable(error: &object_store::Error) -> ObjectError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref::<io::Error>().is_some_and(crate::log::is_full) {
            return ObjectError::Full;
        }
        cause = error.source();
    }
    let text = error.to_string();
    // The error of a response has no other form; its text has the status and the code.
    if FULL.iter().any(|full| text.contains(full)) {
        return ObjectError::Full;
    }
    match error {
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            ObjectError::Denied(text)
        }
        _ => ObjectError::Unavailable(text),
    }
}

/// Status and codes of a bucket whose disk or quota is full: HTTP, MinIO, Ceph.
const FULL: [&str; 3] = ["507 Insufficient Storage", "StorageFull", "QuotaExceeded"];

async fn erase_in_file(file: &Path, parts: &[StoredRange]) -> io::Result<()> {
    let mut file = match tokio::fs::File::options().write(true).open(file).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    for part in parts {
        file.seek(io::SeekFrom::Start(part.offset)).await?;
        let mut left = part.length;
        while left > 0 {
            let zeros = &[0; 4096][..left.min(4096) as usize];
            file.write_all(zeros).await?;
            left -= zeros.len() as u64;
        }
    }
    file.sync_data().await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> Vec<Bytes> {
        ["first", "", "the third one"].map(Bytes::from).to_vec()
    }

    #[tokio::test]
    async fn parts_are_read_back_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let key = [7; KEY_LEN];
        for keys in [&[][..], &[key]] {
            let open = || JobObjects::in_folder(dir.path(), &CpuWork::new()).unwrap().encrypted(keys);
            let ranges = open().put(&parts(), Duration::from_secs(1000)).await.unwrap();
            for (part, range) in parts().iter().zip(&ranges) {
                assert_eq!(open().get(*range).await.unwrap(), *part);
            }
            let object = ranges[0].object;
            assert_eq!(JobObjects::written(object), Duration::from_secs(1000));
            assert_eq!(open().list().await.unwrap(), [object]);
            let stored = std::fs::read(dir.path().join(format!("{object:016x}"))).unwrap();
            let is_readable = stored.windows(5).any(|window| window == b"first");
            assert_eq!(is_readable, keys.is_empty());
            open().erase(object, &ranges[..1]).await.unwrap();
            let erased = std::fs::read(dir.path().join(format!("{object:016x}"))).unwrap();
            assert_eq!(erased.len(), stored.len());
            assert!(erased[..ranges[0].length as usize].iter().all(|byte| *byte == 0));
            assert_eq!(open().get(ranges[2]).await.unwrap(), parts()[2], "the others are kept");
            open().delete(object).await.unwrap();
            open().erase(object, &ranges[..1]).await.unwrap();
            open().delete(object).await.unwrap();
            assert_eq!(open().get(ranges[0]).await, Err(ObjectError::Missing(object)));
        }
    }

    #[tokio::test]
    async fn files_of_interrupted_writes_are_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let objects = JobObjects::in_folder(dir.path(), &CpuWork::new()).unwrap();
        let range = objects.put(&parts(), Duration::from_secs(1000)).await.unwrap()[0];
        let left = dir.path().join(format!("{:016x}#1", range.object));
        // As the store writes it: a second link to an object, whose first one was to be removed.
        std::fs::hard_link(dir.path().join(format!("{:016x}", range.object)), &left).unwrap();
        assert_eq!(objects.list().await.unwrap(), [range.object], "the store does not list it");
        objects.delete_interrupted(Duration::from_secs(1000)).await.unwrap();
        assert!(left.exists(), "it is not older");
        objects.delete_interrupted(Duration::from_secs(1001)).await.unwrap();
        assert!(!left.exists());
        assert_eq!(objects.get(range).await.unwrap(), parts()[0]);
    }

    #[tokio::test]
    async fn changed_and_exchanged_parts_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = ([1; KEY_LEN], [2; KEY_LEN]);
        let open = |keys: &[[u8; KEY_LEN]]| {
            JobObjects::in_folder(dir.path(), &CpuWork::new()).unwrap().encrypted(keys)
        };
        let parts = ["abc", "def"].map(Bytes::from);
        let ranges = open(&[old]).put(&parts, Duration::ZERO).await.unwrap();
        let undecryptable = Err(ObjectError::Undecryptable(ranges[0].object));
        assert_eq!(open(&[new, old]).get(ranges[1]).await.unwrap(), parts[1]);
        assert_eq!(open(&[new]).get(ranges[1]).await, undecryptable);
        let file = dir.path().join(format!("{:016x}", ranges[0].object));
        let stored = std::fs::read(&file).unwrap();
        let half = stored.len() / 2;
        std::fs::write(&file, [&stored[half..], &stored[..half]].concat()).unwrap();
        assert_eq!(open(&[old]).get(ranges[0]).await, undecryptable);
        std::fs::write(&file, &stored).unwrap();
        for byte in 0..half {
            let mut changed = stored.clone();
            changed[byte] ^= 1;
            std::fs::write(&file, changed).unwrap();
            assert_eq!(open(&[old]).get(ranges[0]).await, undecryptable, "byte {byte}");
        }
    }
}
