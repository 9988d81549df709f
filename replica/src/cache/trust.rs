//! Protection of cached models against modification by other users.
//!
//! Weights are memory-mapped, so modifying a file changes the vectors of a running replica, and truncating it crashes
//! the replica. The cache never writes to an installed file. Against other users it checks owner and mode: the folders
//! of a model, up to the root of the cache, and its files must belong to the user of this process or to root, and must
//! not be writable by others. The group may write, as with the umask 002 of many systems, where the group is the user's
//! own.
//!
//! A directory that an operator configures as a model is not checked: the operator controls its permissions.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::process::geteuid;

use super::manifest::{MANIFEST, ManifestFileV1, ManifestV1};

/// Permission bit: others may write.
const OTHERS_WRITE: u32 = 0o002;
/// Permission bit: users can rename and remove only their own files in the directory.
const STICKY: u32 = 0o1000;

/// Returns why the model at `model`, in the cache at `root`, could be modified by another user; `None` if it could not.
pub(super) fn first_problem(root: &Path, model: &Path, manifest: &ManifestV1) -> Option<String> {
    let user = geteuid().as_raw();
    let folders = model.ancestors().take_while(|folder| folder.starts_with(root));
    let files = manifest.files.iter().map(|ManifestFileV1 { path, .. }| model.join(path));
    let below = files.clone().filter_map(|file| file.parent().map(Path::to_owned));
    let mut paths = folders.map(Path::to_owned).chain(below).chain(files).chain([model.join(MANIFEST)]);
    paths.find_map(|path| problem_of(&path, user))
}

fn problem_of(path: &Path, user: u32) -> Option<String> {
    // Missing files were reported before.
    let metadata = fs::metadata(path).ok()?;
    let path = path.display();
    if metadata.uid() != user && metadata.uid() != 0 {
        return Some(format!(
            "{path} belongs to user {}, and this process runs as user {user}; give it to user {user} or to root, or \
            set MERIDIAN_CACHE to another directory",
            metadata.uid()
        ));
    }
    let shared = metadata.is_dir() && metadata.mode() & STICKY != 0;
    if metadata.mode() & OTHERS_WRITE != 0 && !shared {
        return Some(format!(
            "every user can write to {path}; run `chmod o-w {path}` and pull the model again"
        ));
    }
    None
}

/// Removes write permissions: for all users from a file, for group and others from a folder.
pub(super) fn seal(path: &Path, is_folder: bool) -> std::io::Result<()> {
    let mut permissions = fs::metadata(path)?.permissions();
    let kept = if is_folder { 0o755 } else { 0o444 };
    permissions.set_mode(permissions.mode() & kept);
    fs::set_permissions(path, permissions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_every_user_can_write_to_is_reported() {
        let root = tempfile::tempdir().unwrap();
        let model = root.path().join("models/hf/a/b/c");
        fs::create_dir_all(model.join("1_Pooling")).unwrap();
        let file = |path: &str| ManifestFileV1 { path: path.to_owned(), bytes: 0, sha256: String::new() };
        let files = vec![file("config.json"), file("1_Pooling/config.json")];
        let manifest = ManifestV1::new(String::new(), String::new(), files);
        for path in ["config.json", "1_Pooling/config.json", MANIFEST] {
            fs::write(model.join(path), "{}").unwrap();
        }
        let problem = || first_problem(root.path(), &model, &manifest);
        assert_eq!(problem(), None);
        let model = root.path().join("models/hf/a/b/c");
        let paths = [
            root.path().to_owned(),
            root.path().join("models"),
            model.join("config.json"),
            model.join("1_Pooling"),
        ];
        for path in paths {
            let before = fs::metadata(&path).unwrap().permissions();
            fs::set_permissions(&path, fs::Permissions::from_mode(before.mode() | OTHERS_WRITE)).unwrap();
            let metadata = problem().unwrap();
            assert!(metadata.contains(&format!("every user can write to {}", path.display())), "{metadata}");
            fs::set_permissions(&path, before).unwrap();
        }
        assert_eq!(problem(), None);
    }

    #[test]
    fn a_path_that_belongs_to_another_user_is_reported() {
        let root = tempfile::tempdir().unwrap();
        let owner = fs::metadata(root.path()).unwrap().uid();
        let metadata = problem_of(root.path(), owner + 1);
        // Files of root are always trusted.
        assert_eq!(metadata.is_none(), owner == 0);
        assert!(metadata.is_none_or(|metadata| metadata.contains(&format!("belongs to user {owner}"))));
    }
}
