//! Reader of the repository: every text file that git does not ignore.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Root of the repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Text file of the repository.
pub(crate) struct File {
    /// Path relative to the root, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl File {
    /// Returns the text before the file's own test module.
    pub(crate) fn code(&self) -> &str {
        let mut modules = self.text.match_indices("#[cfg(test)]\nmod ");
        let inline =
            modules.find(|(at, _)| self.text[*at..].lines().nth(1).is_some_and(|line| line.ends_with('{')));
        inline.map_or(&self.text, |(at, _)| &self.text[..at])
    }
}

/// Returns whether a file is a source, not a test or bench.
pub(crate) fn is_source(path: &str) -> bool {
    let part = |name: &str| {
        path.starts_with(&format!("{name}/"))
            || path.contains(&format!("/{name}/"))
            || path.ends_with(&format!("/{name}.rs"))
    };
    path.ends_with(".rs") && !["test", "tests", "bench", "benches"].into_iter().any(part)
}

/// Returns every UTF-8 file whose path `selected` accepts, in the order of the paths.
pub(crate) fn files(selected: impl Fn(&str) -> bool) -> Vec<File> {
    let mut paths = Vec::new();
    walk(root(), &ignored(), &mut paths);
    paths.sort();
    let relative = paths.into_iter().filter_map(|path| {
        let path = path.strip_prefix(root()).ok()?.to_str()?.replace('\\', "/");
        selected(&path).then_some(path)
    });
    relative
        .filter_map(|path| Some(File { text: std::fs::read_to_string(root().join(&path)).ok()?, path }))
        .collect()
}

/// Reads a file that must exist.
pub(crate) fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the names in `.gitignore`; ours are complete names of files and directories.
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
