//! Content of a hub's store in a backup, and its return to an embedded store.
//!
//! Leases and the keys below them are left out: spokes and gateways register again by themselves. A restored store begins a
//! new epoch, so gateways accept its tables although they have seen newer ones of the lost store. Unused join tokens are
//! not restored, because one that was used after the backup would be valid again.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use scheduler_api::pki::TrustV1;
use scheduler_api::{MessageVersion, VERSION, keys};
use scheduler_core::hub::restored_epoch;
use scheduler_core::pki::trust::{TrustState, next_generation};
use scheduler_store::{EmbeddedStore, KeyValue, Op, PageContent, Store, StoreError, Txn};
use serde::{Deserialize, Serialize};

use super::controller::into_transactions;
use super::term_start::control_keys;
use super::usage_records::UsagePages;
use super::{records, store_format};
use crate::events::BackupWithoutOldUsage;

/// Deletions of one transaction.
const ENTRIES_AT_ONCE: usize = 16;

/// Maximum bytes of the usage of tenants in a backup: half of what a restoration reads, in base64. The records of 50 gateways and
/// 400 days have 20 MB.
const USAGE_BYTES_MAX: usize = 96 << 20;

/// Content of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreBackupV1 {
    /// Version of the file.
    pub version: MessageVersion,
    /// Keys and values, without those under a lease.
    pub entries: Vec<BackupEntryV1>,
}

/// Key with its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupEntryV1 {
    /// The key.
    pub key: String,
    /// Its value, in base64.
    pub value: String,
}

/// Failed restoration.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// `meridian restore` does not overwrite a store.
    #[error("{0} has a store already; restore into an empty folder, or move that store away")]
    NotEmpty(std::path::PathBuf),
    /// The store cannot be opened or written.
    #[error("{0}")]
    Store(String),
    /// The file is not a complete backup of a hub; the text has the cause.
    #[error("the backup is invalid: {0}")]
    Invalid(String),
}

impl From<StoreError> for RestoreError {
    fn from(error: StoreError) -> RestoreError {
        RestoreError::Store(error.to_string())
    }
}

/// Reads the content of a store, at one revision; and the usage of tenants, by pages.
///
/// # Errors
///
/// When the store fails.
pub(super) async fn content<S: Store>(store: &S) -> Result<StoreBackupV1, StoreError> {
    let entries = store.range(control_keys()).await?.entries;
    let backup = |KeyValue { key, value, .. }: &KeyValue| BackupEntryV1 {
        key: key.clone(),
        value: STANDARD.encode(value),
    };
    let mut entries: Vec<_> = entries.iter().filter(|entry| entry.lease.is_none()).map(backup).collect();
    entries.extend(newest_usage(store, USAGE_BYTES_MAX).await?.iter().map(backup));
    Ok(StoreBackupV1 { version: VERSION, entries })
}

/// Returns the newest records of usage that have at most `bytes_max`; older ones are logged and left out.
async fn newest_usage<S: Store>(store: &S, bytes_max: usize) -> Result<VecDeque<KeyValue>, StoreError> {
    let mut pages = UsagePages::all(PageContent::Values);
    let (mut newest, mut bytes, mut left_out) = (VecDeque::new(), 0, 0);
    while let Some(page) = pages.next(store).await? {
        for entry in page {
            bytes += entry.value.len();
            newest.push_back(entry);
        }
        while bytes > bytes_max
            && let Some(oldest) = newest.pop_front()
        {
            bytes -= oldest.value.len();
            left_out += 1;
        }
    }
    if left_out > 0 {
        BackupWithoutOldUsage { left_out }.emit();
    }
    Ok(newest)
}

/// Reads the content of the embedded store in a folder, whose hub does not run.
///
/// # Errors
///
/// When the store cannot be opened; a hub that runs has it open.
pub async fn read_stopped(data: &Path) -> Result<StoreBackupV1, RestoreError> {
    let store = open(data).await?;
    let read = content(&store).await;
    store.close().await;
    Ok(read?)
}

async fn open(data: &Path) -> Result<EmbeddedStore, RestoreError> {
    let opened = EmbeddedStore::open(&data.join(super::STORE_FILE), Instant::now()).await;
    opened.map_err(|error| RestoreError::Store(error.to_string()))
}

/// Writes a backup to a new embedded store in a folder, and begins a new epoch. Returns the epoch.
///
/// # Errors
///
/// When the folder has a store, the backup is invalid, or the store cannot be written.
pub async fn restore(data: &Path, backup: &StoreBackupV1, now: Duration) -> Result<u64, RestoreError> {
    let file = data.join(super::STORE_FILE);
    if file.exists() {
        return Err(RestoreError::NotEmpty(data.to_owned()));
    }
    let (entries, epoch) = restored(backup, now)?;
    std::fs::create_dir_all(data)
        .map_err(|error| RestoreError::Store(format!("{}: {error}", data.display())))?;
    let store = open(data).await?;
    let written = write(&store, entries).await;
    store.close().await;
    if let Err(error) = written {
        // A part of a store would look like a complete one.
        std::fs::remove_file(&file).ok();
        return Err(error.into());
    }
    Ok(epoch)
}

/// Deletes the state of the authority from the embedded store of a stopped hub, which then begins with the authority of its
/// folder. Certificates of the former one are not valid any more. Without a store there is nothing to delete.
///
/// # Errors
///
/// When the store cannot be opened or written.
pub async fn delete_authority(data: &Path) -> Result<(), RestoreError> {
    if !data.join(super::STORE_FILE).exists() {
        return Ok(());
    }
    let store = open(data).await?;
    let failed = |error: StoreError| RestoreError::Store(error.to_string());
    let mut delete = vec![keys::TRUST.to_owned()];
    for prefix in [keys::JOIN_TOKENS, keys::CERTIFICATES] {
        let found = store.range(prefix).await.map_err(failed)?;
        delete.extend(found.entries.into_iter().map(|entry| entry.key));
    }
    for part in delete.chunks(ENTRIES_AT_ONCE) {
        let then = part.iter().map(|key| Op::Delete { key: key.clone() }).collect();
        store.txn(Txn { when: Vec::new(), then }).await.map_err(failed)?;
    }
    store.close().await;
    Ok(())
}

async fn write(store: &EmbeddedStore, entries: RestoredEntries) -> Result<(), StoreError> {
    for then in into_transactions(entries) {
        store.txn(Txn { when: Vec::new(), then }).await?;
    }
    Ok(())
}

/// Keys and values of a store.
type RestoredEntries = Vec<(String, Vec<u8>)>;

/// Returns the entries of a restored store, with its new epoch.
fn restored(backup: &StoreBackupV1, now: Duration) -> Result<(RestoredEntries, u64), RestoreError> {
    let invalid =
        |key: &str, problem: &dyn std::fmt::Display| RestoreError::Invalid(format!("`{key}`: {problem}"));
    let mut entries = Vec::new();
    let mut epoch = 0;
    for BackupEntryV1 { key, value } in &backup.entries {
        let mut value = STANDARD.decode(value).map_err(|error| invalid(key, &error))?;
        if key.starts_with(keys::JOIN_TOKENS) || key == keys::LEADER {
            continue;
        }
        if key == keys::EPOCH {
            let text = std::str::from_utf8(&value).map_err(|error| invalid(key, &error))?;
            epoch = text.parse().map_err(|error| invalid(key, &error))?;
            continue;
        }
        if key == keys::FORMAT {
            let format = serde_json::from_slice(&value).map_err(|error| invalid(key, &error))?;
            store_format::problem(&format).map_or(Ok(()), |problem| Err(invalid(key, &problem)))?;
        }
        if key == keys::TRUST {
            let wire: TrustV1 = serde_json::from_slice(&value).map_err(|error| invalid(key, &error))?;
            let mut state = TrustState::try_from(wire).map_err(|error| invalid(key, &error))?;
            // Processes have seen later generations of the lost store.
            state.generation = next_generation(state.generation, now);
            value = records::bytes(&TrustV1::from(&state));
        }
        entries.push((key.clone(), value));
    }
    let epoch = restored_epoch(epoch, now.as_secs());
    entries.push((keys::EPOCH.to_owned(), epoch.to_string().into_bytes()));
    Ok((entries, epoch))
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_api::pki::TokenRecordV1;
    use scheduler_store::{Compare, SimStore};

    const NOW: Duration = Duration::from_secs(2_000_000_000);

    async fn store_of(entries: &[(&str, &[u8])]) -> SimStore {
        let store = SimStore::new();
        for (key, value) in entries {
            store.put(key, value.to_vec(), None).await.unwrap();
        }
        store
    }

    #[tokio::test]
    async fn a_restored_store_has_the_records_a_higher_epoch_and_no_tokens_or_leases() {
        let authority = super::super::pki::test_authority();
        let trust = records::bytes(&TrustV1::from(&TrustState::new("m".into(), authority, NOW * 2)));
        let token = TokenRecordV1 {
            version: VERSION,
            subject: "spiffe://m/operator/alice".to_owned(),
            expires_s: 1,
            validity_s: 1,
            used: None,
        };
        let token = records::bytes(&token);
        let token_key = keys::join_token("aa");
        let store = store_of(&[
            (keys::EPOCH, b"7"),
            (keys::DEPLOYMENTS, b"{}"),
            (keys::TRUST, &trust),
            (&token_key, &token),
        ])
        .await;
        let lease = store.lease_grant(Duration::from_secs(5), Instant::now()).await.unwrap();
        store.put("spokes/x", b"1".to_vec(), Some(lease)).await.unwrap();
        let backup = content(&store).await.unwrap();
        let text = serde_json::to_string(&backup).unwrap();
        assert_eq!(serde_json::from_str::<StoreBackupV1>(&text).unwrap(), backup);
        assert!(backup.entries.iter().all(|entry| entry.key != "spokes/x"));

        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        assert_eq!(restore(&data, &backup, NOW).await.unwrap(), NOW.as_secs());
        let again = restore(&data, &backup, NOW).await.unwrap_err();
        assert!(again.to_string().contains("has a store already"), "{again}");
        let store = open(&data).await.unwrap();
        let value = async |key: &str| store.get(key).await.unwrap().map(|entry| entry.value.to_vec());
        assert_eq!(value(keys::EPOCH).await, Some(NOW.as_secs().to_string().into_bytes()));
        assert_eq!(value(keys::DEPLOYMENTS).await, Some(b"{}".to_vec()));
        assert_eq!(value(&token_key).await, None, "a token could have been used after the backup");
        let state = records::trust(&store.get(keys::TRUST).await.unwrap().unwrap()).unwrap();
        assert_eq!(state.generation, u64::try_from((NOW * 2).as_millis()).unwrap() + 1);
        // The store is usable: a guarded write works.
        let when = vec![Compare::CreateRevision("new".to_owned(), 0)];
        let then = vec![Op::Put { key: "new".to_owned(), value: Vec::new(), lease: None }];
        assert!(store.txn(Txn { when, then }).await.unwrap().succeeded);
    }

    #[tokio::test]
    async fn a_backup_has_the_newest_usage_within_its_limit() {
        let store = store_of(&[
            (keys::EPOCH, b"7"),
            ("usage/2026-11-01/a", b"12345"),
            ("usage/2026-11-02/a", b"123"),
        ])
        .await;
        let kept = async |bytes_max: usize| {
            let kept = newest_usage(&store, bytes_max).await.unwrap();
            kept.into_iter().map(|entry| entry.key).collect::<Vec<_>>()
        };
        assert_eq!(kept(8).await, ["usage/2026-11-01/a", "usage/2026-11-02/a"], "at the limit");
        assert_eq!(kept(7).await, ["usage/2026-11-02/a"], "one past it");
        let backup = content(&store).await.unwrap();
        let keys: Vec<_> = backup.entries.iter().map(|entry| entry.key.as_str()).collect();
        assert_eq!(keys, [keys::EPOCH, "usage/2026-11-01/a", "usage/2026-11-02/a"]);
    }

    #[test]
    fn the_epoch_rises_and_a_damaged_or_later_backup_is_rejected() {
        let entry =
            |key: &str, value: &str| BackupEntryV1 { key: key.to_owned(), value: STANDARD.encode(value) };
        let epoch = |text: &str| {
            let backup = StoreBackupV1 { version: VERSION, entries: vec![entry(keys::EPOCH, text)] };
            restored(&backup, Duration::from_secs(100)).map(|(_, epoch)| epoch)
        };
        assert_eq!(epoch("7").unwrap(), 100);
        assert_eq!(epoch("500").unwrap(), 501);
        assert!(epoch("x").unwrap_err().to_string().contains("meta/epoch"));
        let later = r#"{"format":2,"written_by":"0.9.0"}"#;
        let backup = StoreBackupV1 { version: VERSION, entries: vec![entry(keys::FORMAT, later)] };
        let problem = restored(&backup, NOW).unwrap_err().to_string();
        assert!(
            problem.contains("version 0.9.0") && problem.contains(env!("CARGO_PKG_VERSION")),
            "{problem}"
        );
        let garbage = BackupEntryV1 { key: "a".to_owned(), value: "?".to_owned() };
        let backup = StoreBackupV1 { version: VERSION, entries: vec![garbage] };
        assert!(restored(&backup, NOW).unwrap_err().to_string().contains("`a`"));
    }
}
