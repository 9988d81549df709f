//! Search for a text in the files of processes.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::path::Path;

/// Returns the files below a folder with this text, as it is or in base64 at any offset.
pub(crate) fn files_with(folder: &Path, text: &str) -> Vec<String> {
    let encoded = (0..3).map(|skipped| {
        let encoded = STANDARD.encode(&text.as_bytes()[skipped..]);
        // The last characters depend on the text that follows.
        encoded[..encoded.len() - 4].to_owned()
    });
    let patterns: Vec<String> = encoded.chain([text.to_owned()]).collect();
    let (mut folders, mut found) = (vec![folder.to_owned()], Vec::new());
    while let Some(folder) = folders.pop() {
        // Folders and files may be deleted meanwhile.
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let content = std::fs::read(&path).unwrap_or_default();
            // ASCII is not changed by this, and the search in a text is the fast one of the standard library.
            let content = String::from_utf8_lossy(&content);
            if patterns.iter().any(|pattern| content.contains(pattern)) {
                found.push(path.display().to_string());
            }
        }
    }
    found
}
