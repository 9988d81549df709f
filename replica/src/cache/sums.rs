//! `SHA256SUMS`: list of the files of a model in a bucket or on a web server, as `sha256sum` writes it.
//!
//! Buckets and web servers have no common list of files with digests: the checksums of objects differ by service and by the
//! way of the upload, and a web server lists nothing. This file is both, it is made with a standard tool, and reading it
//! needs no permission to list the bucket. Each line has the SHA-256 in hexadecimal, two characters (spaces, or a space and
//! `*`), and the path relative to the list.

use std::collections::BTreeSet;

use super::directory;
use super::error::PullError;
use super::manifest::{self, ManifestFileV1};
use super::names::{self, is_below};
use super::origin::{MODEL_FILES_MAX, ModelOrigin, Retrier};
use super::pypi::is_sha256;
use crate::model::formats::Listing;

/// Name of the list.
pub(super) const SUMS: &str = "SHA256SUMS";
/// Maximum size of the list: some ten thousand files.
const LIST_BYTES_MAX: u64 = 4 << 20;
/// Maximum number of files of a list.
const FILES_MAX: usize = 20_000;

/// File of a list.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ListedFile {
    /// Path below the folder of the list.
    pub(super) path: String,
    /// SHA-256 in lower-case hexadecimal.
    pub(super) sha256: String,
}

/// Files of a model at its origin.
pub(super) struct FileList {
    /// Files that are part of the model, sorted by path.
    pub(super) files: Vec<ListedFile>,
    /// Digest of the model with these files.
    pub(super) digest: String,
}

impl FileList {
    /// Reads the list of an origin, and checks that it is one of a model.
    pub(super) fn read(origin: &dyn ModelOrigin, retrier: &Retrier<'_>) -> Result<FileList, PullError> {
        let what = origin.describe(SUMS);
        let read = retrier.run(&what, &mut || origin.read_small(SUMS, LIST_BYTES_MAX));
        let bytes = read.map_err(|error| match error {
            PullError::NotFound { host, what: missing } if missing == what => {
                PullError::NoList { host, what }
            }
            error => error,
        })?;
        let host = origin.host();
        let invalid =
            |problem| PullError::InvalidList { host: host.clone(), what: origin.describe(SUMS), problem };
        let listed = parse(&bytes).map_err(invalid)?;
        let listing = Listing {
            paths: listed.iter().map(|file| file.path.as_str()).collect(),
            name: None,
            is_hub: false,
            read: &|_| None,
        };
        directory::check(&origin.describe(SUMS), &listing)?;
        let mut files: Vec<ListedFile> =
            listed.into_iter().filter(|file| directory::is_model_file(&file.path)).collect();
        files.sort();
        if files.len() > MODEL_FILES_MAX {
            let count = files.len();
            return Err(invalid(format!("it has {count} files of a model; the limit is {MODEL_FILES_MAX}")));
        }
        names::check(files.iter().map(|file| file.path.as_str())).map_err(invalid)?;
        let described = |ListedFile { path, sha256 }: &ListedFile| ManifestFileV1 {
            path: path.clone(),
            bytes: 0, // not part of the digest
            sha256: sha256.clone(),
        };
        let digest = manifest::digest(&files.iter().map(described).collect::<Vec<_>>());
        Ok(FileList { files, digest })
    }
}

/// Parses a list; the error names the line.
fn parse(bytes: &[u8]) -> Result<Vec<ListedFile>, String> {
    let text = std::str::from_utf8(bytes).map_err(|_| "it is not text".to_owned())?;
    let (mut files, mut paths) = (Vec::new(), BTreeSet::new());
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let problem = |problem: &str| format!("line {}: {problem}", index + 1);
        let invalid = || problem("write the SHA-256, two spaces and the path");
        let (sha256, path) = line.split_at_checked(64).ok_or_else(invalid)?;
        let path = path.strip_prefix("  ").or_else(|| path.strip_prefix(" *")).ok_or_else(invalid)?;
        if !is_sha256(sha256) {
            return Err(invalid());
        }
        let path = path.strip_prefix("./").unwrap_or(path);
        if !is_below(path) {
            return Err(problem("the path leaves the folder of the model"));
        }
        if !paths.insert(path.to_ascii_lowercase()) {
            return Err(problem("the path is in the list twice"));
        }
        if files.len() == FILES_MAX {
            return Err(problem(&format!("the list has more than {FILES_MAX} files")));
        }
        files.push(ListedFile { path: path.to_owned(), sha256: sha256.to_ascii_lowercase() });
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(digit: char) -> String {
        digit.to_string().repeat(64)
    }

    #[test]
    fn the_output_of_sha256sum_is_read() {
        let text = format!(
            "{}  config.json\n{} *./1_Pooling/config.json\r\n\n{}  a b.txt\n",
            digest('a'),
            digest('B'),
            digest('0')
        );
        let file = |path: &str, digit| ListedFile { path: path.to_owned(), sha256: digest(digit) };
        let expected =
            vec![file("config.json", 'a'), file("1_Pooling/config.json", 'b'), file("a b.txt", '0')];
        assert_eq!(parse(text.as_bytes()), Ok(expected));
    }

    #[test]
    fn an_invalid_line_is_reported_with_its_number() {
        let a = digest('a');
        for (line, part) in [
            (format!("{a} config.json"), "line 2: write the SHA-256"),
            (format!("{}  config.json", digest('g')), "line 2: write the SHA-256"),
            ("é".repeat(40), "line 2: write the SHA-256"),
            (format!("{a}  ../config.json"), "line 2: the path leaves"),
            (format!("{a}  /etc/passwd"), "line 2: the path leaves"),
            (format!("{a}  X.json"), "line 2: the path is in the list twice"),
        ] {
            let problem = parse(format!("{a}  x.json\n{line}\n").as_bytes()).unwrap_err();
            assert!(problem.starts_with(part), "{line}: {problem}");
        }
        assert_eq!(parse(&[0xff]), Err("it is not text".to_owned()));
    }

    #[test]
    fn a_list_is_accepted_at_its_limit_and_rejected_one_past_it() {
        let list = |count: usize| -> String {
            (0..count).map(|index| format!("{}  {index}.json\n", digest('a'))).collect()
        };
        assert_eq!(parse(list(FILES_MAX).as_bytes()).map(|files| files.len()), Ok(FILES_MAX));
        assert!(parse(list(FILES_MAX + 1).as_bytes()).unwrap_err().contains("more than 20000 files"));
    }
}
