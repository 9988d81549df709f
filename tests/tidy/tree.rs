//! Reads the tree as it is committed: every text file but what git ignores.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The top of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file that stands in the tree.
pub(crate) struct File {
    /// Relative to the top, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

/// Every file in UTF-8 whose path `wanted` takes, in the order of their paths.
pub(crate) fn files(wanted: impl Fn(&str) -> bool) -> Vec<File> {
    let mut paths = Vec::new();
    walk(root(), &ignored(), &mut paths);
    paths.sort();
    let relative = paths.into_iter().filter_map(|path| {
        let path = path.strip_prefix(root()).ok()?.to_str()?.replace('\\', "/");
        wanted(&path).then_some(path)
    });
    relative
        .filter_map(|path| Some(File { text: std::fs::read_to_string(root().join(&path)).ok()?, path }))
        .collect()
}

/// A file that must be there.
pub(crate) fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The names in `.gitignore`; ours are whole names of files and folders.
fn ignored() -> BTreeSet<String> {
    let text = read(".gitignore");
    let names = text.lines().map(|line| line.trim_matches('/').to_owned());
    names.filter(|name| !name.is_empty()).chain([".git".to_owned()]).collect()
}

fn walk(folder: &Path, ignored: &BTreeSet<String>, paths: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of the tree").flatten() {
        let name = entry.file_name();
        match entry.file_type() {
            _ if ignored.contains(&*name.to_string_lossy()) => {}
            Ok(kind) if kind.is_dir() => walk(&entry.path(), ignored, paths),
            Ok(kind) if kind.is_file() => paths.push(entry.path()),
            Ok(_) | Err(_) => {}
        }
    }
}
