//! File of the join tokens that were used or revoked ([`scheduler_core::pki::closed`]), in the identity folder of the hub.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use scheduler_api::{MessageVersion, VERSION, keys};
use scheduler_client::identity_folder::{create_private, write_private};
use scheduler_core::pki::closed::{ClosedTokens, StoredToken};
use scheduler_store::{Event, KeyValue, Store, Watch};
use serde::{Deserialize, Serialize};
use supervision::Mutex;

use super::{STORE_PAUSE, records};
use crate::events::ClosedTokensFailed;

/// Name of the file.
const FILE: &str = "tokens.json";

/// Content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct ClosedTokensV1 {
    /// Version of the file.
    version: MessageVersion,
    /// Hashes of the secrets, with the last second in which each token could have been used.
    tokens: BTreeMap<String, u64>,
    /// Whether tokens may have been closed that the list lacks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    incomplete: bool,
}

/// Closed tokens of a folder.
pub(super) struct ReadTokens {
    pub(super) tokens: ClosedTokens,
    /// Whether the list may lack some: after a restoration, or if the file is damaged. Then no token of the store can be
    /// trusted.
    pub(super) is_incomplete: bool,
}

/// Reads the file in a folder; without one, no token was closed.
pub(super) fn read(folder: &Path) -> ReadTokens {
    let file = folder.join(FILE);
    let content = match std::fs::read(&file) {
        Ok(text) => serde_json::from_slice::<ClosedTokensV1>(&text).map_err(io::Error::other),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return ReadTokens { tokens: ClosedTokens::default(), is_incomplete: false };
        }
        Err(error) => Err(error),
    };
    match content {
        Ok(ClosedTokensV1 { version: _, tokens, incomplete }) => {
            let tokens = tokens.into_iter().map(|(hash, expires)| (hash, Duration::from_secs(expires)));
            ReadTokens { tokens: ClosedTokens::new(tokens.collect()), is_incomplete: incomplete }
        }
        Err(error) => {
            ClosedTokensFailed { file: &file, error: &error }.emit();
            ReadTokens { tokens: ClosedTokens::default(), is_incomplete: true }
        }
    }
}

/// Writes the file.
pub(super) fn write(folder: &Path, tokens: &ClosedTokens) -> io::Result<()> {
    let tokens = tokens.iter().map(|(hash, expires)| (hash.to_owned(), expires.as_secs())).collect();
    write_content(folder, &ClosedTokensV1 { version: VERSION, tokens, incomplete: false })
}

/// Records that the store of a hub is restored from a backup whose tokens may have been used since: the hub deletes all of
/// them when it starts.
///
/// # Errors
///
/// When the folder cannot be written.
pub fn distrust(folder: &Path) -> io::Result<()> {
    write_content(folder, &ClosedTokensV1 { version: VERSION, tokens: BTreeMap::new(), incomplete: true })
}

fn write_content(folder: &Path, content: &ClosedTokensV1) -> io::Result<()> {
    create_private(folder)?;
    write_private(&folder.join(FILE), &serde_json::to_vec(content)?)
}

/// Follows the tokens in the store, and writes those that were closed. `now` returns the time since 1970.
pub(super) async fn follow<S: Store>(
    store: S,
    closed: Arc<Mutex<ClosedTokens>>,
    folder: PathBuf,
    now: fn() -> Duration,
) {
    loop {
        if let Ok(range) = store.range(keys::JOIN_TOKENS).await {
            let listed = range.entries.iter().filter_map(stored).collect();
            let mut is_changed = closed.lock().list(listed, now());
            let mut watch = store.watch(keys::JOIN_TOKENS, range.revision + 1);
            loop {
                if is_changed {
                    save(&closed, &folder, now()).await;
                }
                let Ok(events) = watch.next().await else { break };
                let tokens = &mut *closed.lock();
                is_changed = false;
                for event in events {
                    is_changed |= match event {
                        Event::Put(entry) => stored(&entry).is_some_and(|token| tokens.put(token)),
                        Event::Delete { key, .. } => {
                            let hash = key.strip_prefix(keys::JOIN_TOKENS).unwrap_or_default();
                            tokens.delete(hash, now())
                        }
                    };
                }
            }
        }
        tokio::time::sleep(STORE_PAUSE).await;
    }
}

fn stored(entry: &KeyValue) -> Option<StoredToken> {
    let hash = entry.key.strip_prefix(keys::JOIN_TOKENS)?.to_owned();
    let record = records::join_token(entry).ok()?;
    Some(StoredToken { hash, expires: record.expires, is_used: record.used.is_some() })
}

/// Writes the closed tokens to disk. After a failure the next closed token writes all of them.
async fn save(closed: &Mutex<ClosedTokens>, folder: &Path, now: Duration) {
    let tokens = {
        let mut tokens = closed.lock();
        tokens.forget_expired(now);
        tokens.clone()
    };
    let to = folder.to_owned();
    let written = tokio::task::spawn_blocking(move || write(&to, &tokens)).await;
    if let Err(error) = written.unwrap_or_else(|error| Err(io::Error::other(error))) {
        ClosedTokensFailed { file: &folder.join(FILE), error: &error }.emit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_tokens_are_read_back_and_a_damaged_file_distrusts_all() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("identity");
        assert!(!read(&folder).is_incomplete, "a new hub");
        let tokens = ClosedTokens::new([("aa".to_owned(), Duration::from_secs(9))].into());
        write(&folder, &tokens).unwrap();
        let found = read(&folder);
        assert_eq!((found.tokens, found.is_incomplete), (tokens, false));
        std::fs::write(folder.join(FILE), "{").unwrap();
        assert!(read(&folder).is_incomplete);
        distrust(&folder).unwrap();
        assert!(read(&folder).is_incomplete);
    }
}
