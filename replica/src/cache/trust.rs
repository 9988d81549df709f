//! Who could change a model in the cache.
//!
//! Weights are mapped, so a file that changes under a replica changes its vectors, and one that is truncated ends it. The
//! cache never writes to a file that has its name. Against other users stand owner and mode: the folders down to a model
//! and its files belong to the user of this process or to root, and others cannot write to them. The group may, as it may
//! under the umask 002 of many systems, where it is the user's own.
//!
//! A directory that an operator names as a model is not looked at: who writes there is the operator's decision.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::process::geteuid;

use super::manifest::{FileV1, MANIFEST, ManifestV1};

/// Others may write.
const OTHERS_WRITE: u32 = 0o002;
/// In such a directory users rename and remove their own files only.
const STICKY: u32 = 0o1000;

/// Returns why the model at `place`, in the cache at `root`, could be changed by another user; `None` if it could not.
pub(super) fn first_problem(root: &Path, place: &Path, manifest: &ManifestV1) -> Option<String> {
    let user = geteuid().as_raw();
    let folders = place.ancestors().take_while(|folder| folder.starts_with(root));
    let files = manifest.files.iter().map(|FileV1 { path, .. }| place.join(path));
    let below = files.clone().filter_map(|file| file.parent().map(Path::to_owned));
    let mut paths = folders.map(Path::to_owned).chain(below).chain(files).chain([place.join(MANIFEST)]);
    paths.find_map(|path| problem_of(&path, user))
}

fn problem_of(path: &Path, user: u32) -> Option<String> {
    // What is not there was found missing before.
    let found = fs::metadata(path).ok()?;
    let path = path.display();
    if found.uid() != user && found.uid() != 0 {
        return Some(format!(
            "{path} belongs to user {}, and this process runs as user {user}; give it to user {user} or to root, or set \
             MERIDIAN_CACHE to another place",
            found.uid()
        ));
    }
    let shared = found.is_dir() && found.mode() & STICKY != 0;
    if found.mode() & OTHERS_WRITE != 0 && !shared {
        return Some(format!(
            "every user can write to {path}; run `chmod o-w {path}` and pull the model again"
        ));
    }
    None
}

/// Takes the right to write away: from everybody for a file, from group and others for a folder.
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
    fn what_every_user_can_write_to_is_named() {
        let root = tempfile::tempdir().unwrap();
        let place = root.path().join("models/hf/a/b/c");
        fs::create_dir_all(place.join("1_Pooling")).unwrap();
        let file = |path: &str| FileV1 { path: path.to_owned(), bytes: 0, sha256: String::new() };
        let files = vec![file("config.json"), file("1_Pooling/config.json")];
        let manifest = ManifestV1::new(String::new(), String::new(), files);
        for path in ["config.json", "1_Pooling/config.json", MANIFEST] {
            fs::write(place.join(path), "{}").unwrap();
        }
        let problem = || first_problem(root.path(), &place, &manifest);
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
            let found = problem().unwrap();
            assert!(found.contains(&format!("every user can write to {}", path.display())), "{found}");
            fs::set_permissions(&path, before).unwrap();
        }
        assert_eq!(problem(), None);
    }

    #[test]
    fn what_belongs_to_another_user_is_named() {
        let root = tempfile::tempdir().unwrap();
        let owner = fs::metadata(root.path()).unwrap().uid();
        let found = problem_of(root.path(), owner + 1);
        // What belongs to root is trusted by everybody.
        assert_eq!(found.is_none(), owner == 0);
        assert!(found.is_none_or(|found| found.contains(&format!("belongs to user {owner}"))));
    }
}
