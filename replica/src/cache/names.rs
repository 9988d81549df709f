//! Names of the files of a model, which an origin states and the cache uses as paths.

use std::collections::BTreeSet;

/// Maximum bytes of a name in a path; file systems permit no more.
const NAME_BYTES_MAX: usize = 255;

/// Returns whether the name is a relative path of plain segments. Wheels and lists of files use `/` on every system.
pub(super) fn is_below(name: &str) -> bool {
    let mut segments = name.strip_suffix('/').unwrap_or(name).split('/');
    let is_plain = |segment: &str| !matches!(segment, "" | "." | "..");
    !name.contains(['\\', '\0']) && segments.all(is_plain) && !name.contains(':')
}

/// Returns the begin of a name, for messages.
pub(super) fn shortened(name: &str) -> &str {
    name.char_indices().nth(80).map_or(name, |(end, _)| &name[..end])
}

/// Checks before a download that files with these paths can be stored in one folder: each name is short enough, no path
/// leaves the folder or occurs twice, and no file is the folder of another one. The error names the file.
pub(super) fn check<'a>(paths: impl IntoIterator<Item = &'a str>) -> Result<(), String> {
    let mut known = BTreeSet::new();
    for path in paths {
        if !is_below(path) {
            return Err(format!("the path {:?} leaves the folder of the model", shortened(path)));
        }
        if let Some(name) = path.split('/').find(|name| name.len() > NAME_BYTES_MAX) {
            let (bytes, begin) = (name.len(), shortened(name));
            return Err(format!(
                "the file name that begins with {begin:?} has {bytes} bytes; the limit is {NAME_BYTES_MAX}"
            ));
        }
        // Some file systems do not distinguish the cases.
        if !known.insert(path.to_ascii_lowercase()) {
            return Err(format!("the path {:?} occurs twice", shortened(path)));
        }
    }
    let folder_that_is_a_file = |path: &String| {
        let folders = path.match_indices('/').map(|(end, _)| &path[..end]);
        folders.map(str::to_owned).find(|folder| known.contains(folder))
    };
    match known.iter().find_map(|path| Some((path, folder_that_is_a_file(path)?))) {
        Some((path, file)) => {
            let (file, below) = (shortened(&file), shortened(path));
            Err(format!("{file:?} is a file, and also the folder of {below:?}"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_cannot_be_stored_are_rejected_with_the_file() {
        assert_eq!(check(["config.json", "1_Pooling/config.json", "2/config.json"]), Ok(()));
        let name = |bytes: usize| format!("{}.json", "a".repeat(bytes - 5));
        assert_eq!(check([name(NAME_BYTES_MAX).as_str()]), Ok(()));
        let long = name(NAME_BYTES_MAX + 1);
        for (paths, part) in [
            (vec![long.as_str()], "has 256 bytes; the limit is 255"),
            (
                vec!["1.json/a.json", "1.json"],
                "\"1.json\" is a file, and also the folder of \"1.json/a.json\"",
            ),
            (vec!["1.json", "1.json/a.json"], "\"1.json\" is a file"),
            (vec!["a.json", "A.json"], "\"A.json\" occurs twice"),
            (vec!["1/../a.json"], "leaves the folder"),
        ] {
            let problem = check(paths.iter().copied()).unwrap_err();
            assert!(problem.contains(part), "{part:?} in {problem}");
        }
    }
}
