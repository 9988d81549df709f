//! Format of the store. A hub does not run on the store of a later version: it would leave out the records that it cannot read, and publish
//! a route table without them.

use scheduler_api::keys;
use scheduler_api::store_format::{STORE_FORMAT, StoreFormat};
use scheduler_store::{Compare, KeyValue, Op, Store, StoreError, Term, Txn};
use std::time::Duration;
use tokio::time::sleep;

use super::{HubError, records};
use crate::events::StoreFailed;

/// Version of this hub.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Pause between two attempts to read the format.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// Checks the format before the hub writes anything. Waits for the store.
///
/// # Errors
///
/// When the store has a later format.
pub(super) async fn check<S: Store>(store: &S) -> Result<(), HubError> {
    loop {
        match store.get(keys::FORMAT).await {
            Ok(entry) => return known(entry.as_ref()).map(drop),
            Err(StoreError::Closed) => return Err(StoreError::Closed.into()),
            Err(error) => StoreFailed { error: &error }.emit(),
        }
        sleep(RETRY_DELAY).await;
    }
}

/// Checks the format at the start of a term, and writes it to a store that has none or an earlier one.
///
/// # Errors
///
/// When the store fails, or has a later format: another hub may have written it since this one has started.
pub(super) async fn begin<S: Store>(store: &S, term: &Term) -> Result<(), HubError> {
    let entry = store.get(keys::FORMAT).await?;
    if known(entry.as_ref())?.is_some_and(|known| known.format == STORE_FORMAT) {
        return Ok(());
    }
    let at = entry.map_or(0, |entry| entry.mod_revision);
    let format = StoreFormat { format: STORE_FORMAT, written_by: VERSION.to_owned() };
    let when = vec![term.guard(), Compare::ModRevision(keys::FORMAT.to_owned(), at)];
    let value = records::bytes(&format);
    let then = vec![Op::Put { key: keys::FORMAT.to_owned(), value, lease: None }];
    // If it fails, the term is over.
    store.txn(Txn { when, then }).await?;
    Ok(())
}

/// Returns the format of a store, unless it is later than that of this hub.
fn known(entry: Option<&KeyValue>) -> Result<Option<StoreFormat>, HubError> {
    let format = entry.map(records::format).transpose().map_err(HubError::Record)?;
    match format.as_ref().and_then(problem) {
        Some(problem) => Err(HubError::LaterFormat(problem)),
        None => Ok(format),
    }
}

/// Returns the problem of a store or a backup with a later format.
pub(super) fn problem(StoreFormat { format, written_by }: &StoreFormat) -> Option<String> {
    (*format > STORE_FORMAT).then(|| {
        format!(
            "it has format {format}, written by version {written_by}, and this is version {VERSION}, which reads format \
             {STORE_FORMAT}; use version {written_by} or a later one, or restore a backup of version {VERSION}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_store::SimStore;
    use std::time::Instant;

    async fn store() -> (SimStore, Term) {
        let store = SimStore::new();
        let lease = store.lease_grant(Duration::from_secs(5), Instant::now()).await.unwrap();
        let term = store.campaign(keys::LEADER, b"one".to_vec(), lease).await.unwrap();
        (store, term)
    }

    #[tokio::test]
    async fn a_store_gets_the_format_once_and_keeps_the_version_that_wrote_it() {
        let (store, term) = store().await;
        check(&store).await.unwrap();
        begin(&store, &term).await.unwrap();
        let entry = store.get(keys::FORMAT).await.unwrap().unwrap();
        let written = StoreFormat { format: STORE_FORMAT, written_by: VERSION.to_owned() };
        assert_eq!(records::format(&entry).unwrap(), written);
        let earlier = r#"{"format":0,"written_by":"0.0.9"}"#;
        let ours = r#"{"format":1,"written_by":"0.0.10"}"#;
        for (stored, expected) in [(earlier, VERSION), (ours, "0.0.10")] {
            store.put(keys::FORMAT, stored.into(), None).await.unwrap();
            begin(&store, &term).await.unwrap();
            let entry = store.get(keys::FORMAT).await.unwrap().unwrap();
            assert_eq!(records::format(&entry).unwrap().written_by, expected);
        }
    }

    #[tokio::test]
    async fn a_store_of_a_later_version_is_rejected_with_both_versions_and_is_not_changed() {
        let (store, term) = store().await;
        store.put(keys::FORMAT, r#"{"format":2,"written_by":"0.9.0"}"#.into(), None).await.unwrap();
        let before = store.range("").await.unwrap();
        for error in [check(&store).await.unwrap_err(), begin(&store, &term).await.unwrap_err()] {
            let text = error.to_string();
            for part in ["format 2", "version 0.9.0", "format 1", &format!("version {VERSION}")] {
                assert!(text.contains(part), "{part} in {text}");
            }
        }
        assert_eq!(store.range("").await.unwrap(), before);
    }

    #[tokio::test]
    async fn an_expired_term_writes_no_format() {
        let (store, term) = store().await;
        store.lease_revoke(term.lease).await.unwrap();
        begin(&store, &term).await.unwrap();
        assert_eq!(store.get(keys::FORMAT).await.unwrap(), None);
    }
}
