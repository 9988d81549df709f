//! Records of the usage of tenants in the hub's store: reads by pages, limits, and deletion.
//!
//! The records of a year do not fit into a response of the store, so they are read by pages, and the leader does not read them. Their
//! number is checked before a record is created. Requests that create records at the same time may exceed it by their number.

use metrics::{Counter, Gauge, metric_set};
use regions::RegionId;
use replica_api::error::ErrorCode;
use scheduler_api::keys;
use scheduler_api::usage::{LEDGERS_MAX, RECORDS_MAX, RETENTION_DAYS, UsageDay};
use scheduler_store::{KeyRange, KeyValue, Op, PageContent, Store, StoreError, Txn};
use supervision::Mutex;
use tokio::sync::Semaphore;

use crate::respond::ErrorResponse;

/// Records of a page: at most 8 MB, which etcd sends within the time limit of a call.
const PAGE_RECORDS: usize = 128;
/// Maximum number of old records that are deleted in one transaction; etcd permits 128 operations.
const DELETED_MAX: usize = 100;
/// Maximum number of transactions of old records after one report; the next report continues.
const PRUNES_MAX: usize = 10;
/// Maximum number of queries at the same time. Each has at most a page and the sums in memory.
pub(super) const QUERIES_MAX: usize = 2;

metric_set! {
    /// Metrics of the usage of tenants.
    #[derive(Debug, Default)]
    pub(super) struct UsageMetrics {
        /// Records of usage in the store, as this hub last counted them.
        pub(super) records: Gauge = "meridian_hub_usage_records",
        /// Reports of usage that were rejected because of the limits of ledgers, of records or of their size.
        pub(super) rejected: Counter = "meridian_hub_usage_reports_rejected_total",
        /// Failed deletions of old usage. They are tried again.
        pub(super) prune_failures: Counter = "meridian_hub_usage_prune_failures_total",
    }
}

/// Limits of the usage of tenants.
pub(super) struct UsageState {
    /// Day on which this hub last deleted old usage.
    pub(super) pruned: Mutex<Option<UsageDay>>,
    pub(super) queries: Semaphore,
}

impl Default for UsageState {
    fn default() -> UsageState {
        UsageState { pruned: Mutex::default(), queries: Semaphore::new(QUERIES_MAX) }
    }
}

/// Read of the records of usage, page by page, in the order of their keys.
pub(super) struct UsagePages {
    /// Begin of the next page; `None` after the last one.
    from: Option<String>,
    before: String,
    content: PageContent,
}

impl UsagePages {
    /// Reads all records.
    pub(super) fn all(content: PageContent) -> UsagePages {
        UsagePages { from: Some(keys::USAGE.to_owned()), before: keys::USAGE_END.to_owned(), content }
    }

    /// Reads the records of these days, from the first to the last.
    pub(super) fn of(from: UsageDay, to: UsageDay) -> UsagePages {
        let before = keys::usage_of(UsageDay(to.0.saturating_add(1)));
        UsagePages { from: Some(keys::usage_of(from)), before, content: PageContent::Values }
    }

    /// Returns the next page; `None` after the last one.
    pub(super) async fn next(&mut self, store: &impl Store) -> Result<Option<Vec<KeyValue>>, StoreError> {
        let Some(from) = self.from.take() else { return Ok(None) };
        let range = KeyRange::Between { from, before: self.before.clone() };
        let page = store.page(range, PAGE_RECORDS, self.content).await?;
        if page.total > page.entries.len() {
            self.from = page.entries.last().map(|last| format!("{}\0", last.key));
        }
        Ok(Some(page.entries))
    }
}

/// Checks that one more record may be created.
pub(super) async fn check_number<S: Store>(
    store: &S,
    metrics: &UsageMetrics,
    day: UsageDay,
    gateway: &RegionId,
) -> Result<(), ErrorResponse> {
    let count =
        async |prefix: &str| store.page(prefix.into(), 1, PageContent::Keys).await.map(|page| page.total);
    let rejected = |message: String| {
        metrics.rejected.add(1);
        Err(ErrorResponse::new(ErrorCode::Overloaded, message))
    };
    if count(&keys::usage_of_gateway(day, gateway)).await? >= LEDGERS_MAX {
        return rejected(format!(
            "The usage of {day} has {LEDGERS_MAX} ledgers of gateways in {gateway}, which is the limit. Keep the disks of \
             gateways when they start again."
        ));
    }
    let records = count(keys::USAGE).await?;
    metrics.records.set(records);
    if records >= RECORDS_MAX {
        return rejected(format!("The store has {RECORDS_MAX} records of usage, which is the limit."));
    }
    Ok(())
}

/// Deletes records that are too old, unless this hub has done so on the same day.
pub(super) async fn prune<S: Store>(
    store: &S,
    pruned: &Mutex<Option<UsageDay>>,
    metrics: &UsageMetrics,
    today: UsageDay,
) -> Result<(), StoreError> {
    if *pruned.lock() == Some(today) {
        return Ok(());
    }
    let before = keys::usage_of(today.before(RETENTION_DAYS));
    let old = KeyRange::Between { from: keys::USAGE.to_owned(), before };
    for _ in 0..PRUNES_MAX {
        let page = store.page(old.clone(), DELETED_MAX, PageContent::Keys).await?;
        let is_last = page.total == page.entries.len();
        if !page.entries.is_empty() {
            let then = page.entries.into_iter().map(|entry| Op::Delete { key: entry.key }).collect();
            store.txn(Txn { when: Vec::new(), then }).await?;
        }
        if is_last {
            metrics.records.set(store.page(keys::USAGE.into(), 1, PageContent::Keys).await?.total);
            *pruned.lock() = Some(today);
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_store::SimStore;

    fn gateway() -> RegionId {
        "aws/us-east-1".parse().unwrap()
    }

    async fn put(store: &SimStore, day: UsageDay, ledger: u64) {
        store.put(&keys::usage(day, &gateway(), ledger), b"{}".to_vec(), None).await.unwrap();
    }

    #[tokio::test]
    async fn records_past_the_retention_are_deleted_once_a_day() {
        let (store, pruned, today) = (SimStore::new(), Mutex::default(), UsageDay(20_500));
        let metrics = UsageMetrics::default();
        let left = async || store.range(keys::USAGE).await.unwrap().entries.len();
        // More than one transaction can delete.
        for ledger in 0..2 * DELETED_MAX as u64 + 1 {
            put(&store, today.before(RETENTION_DAYS + 1), ledger).await;
        }
        put(&store, today.before(RETENTION_DAYS), 1).await;
        put(&store, today, 1).await;
        prune(&store, &pruned, &metrics, today).await.unwrap();
        assert_eq!(left().await, 2);
        put(&store, today.before(RETENTION_DAYS + 1), 1).await;
        prune(&store, &pruned, &metrics, today).await.unwrap();
        assert_eq!(left().await, 3, "not again on the same day");
        prune(&store, &pruned, &metrics, UsageDay(today.0 + 1)).await.unwrap();
        assert_eq!(left().await, 1);
    }

    #[tokio::test]
    async fn a_deletion_that_failed_or_was_not_completed_continues_with_the_next_report() {
        let (store, pruned, today) = (SimStore::new(), Mutex::default(), UsageDay(20_500));
        let metrics = UsageMetrics::default();
        for ledger in 0..(DELETED_MAX * PRUNES_MAX) as u64 + 1 {
            put(&store, today.before(RETENTION_DAYS + 1), ledger).await;
        }
        store.set_unavailable(true);
        assert!(prune(&store, &pruned, &metrics, today).await.is_err());
        store.set_unavailable(false);
        for left in [1, 0] {
            prune(&store, &pruned, &metrics, today).await.unwrap();
            assert_eq!(store.range(keys::USAGE).await.unwrap().entries.len(), left);
        }
        assert_eq!(*pruned.lock(), Some(today));
    }

    #[tokio::test]
    async fn the_ledgers_of_a_region_and_a_day_and_all_records_have_limits() {
        let (store, metrics, day) = (SimStore::new(), UsageMetrics::default(), UsageDay(20_000));
        let code = async |day: UsageDay, region: &str| {
            let checked = check_number(&store, &metrics, day, &region.parse().unwrap()).await;
            checked.map_err(|error| error.message().to_owned())
        };
        for ledger in 1..LEDGERS_MAX as u64 {
            put(&store, day, ledger).await;
        }
        assert_eq!(code(day, "aws/us-east-1").await, Ok(()), "the last one within the limit");
        put(&store, day, 0).await;
        let error = code(day, "aws/us-east-1").await.unwrap_err();
        assert!(error.contains("64 ledgers"), "{error}");
        // A region whose name begins with that of the other one, and another day.
        assert_eq!(code(day, "aws/us-east-10").await, Ok(()));
        assert_eq!(code(UsageDay(day.0 + 1), "aws/us-east-1").await, Ok(()));
        for ledger in LEDGERS_MAX..RECORDS_MAX - 1 {
            put(&store, UsageDay(day.0 + 2), ledger as u64).await;
        }
        assert_eq!(code(day, "aws/us-east-2").await, Ok(()), "the last one within the limit");
        put(&store, UsageDay(day.0 + 3), 1).await;
        let error = code(day, "aws/us-east-2").await.unwrap_err();
        assert!(error.contains("65536 records"), "{error}");
        assert_eq!(metrics.rejected.get(), 2);
    }

    #[tokio::test]
    async fn pages_have_all_records_of_their_days() {
        let (store, day) = (SimStore::new(), UsageDay(20_000));
        for ledger in 0..2 * PAGE_RECORDS as u64 {
            put(&store, day, ledger).await;
        }
        put(&store, day.before(1), 1).await;
        put(&store, UsageDay(day.0 + 1), 1).await;
        let count = async |mut pages: UsagePages| {
            let mut read = Vec::new();
            while let Some(page) = pages.next(&store).await.unwrap() {
                read.push(page.len());
            }
            read
        };
        assert_eq!(count(UsagePages::of(day, day)).await, [PAGE_RECORDS; 2]);
        assert_eq!(count(UsagePages::all(PageContent::Keys)).await, [PAGE_RECORDS, PAGE_RECORDS, 2]);
        assert_eq!(count(UsagePages::of(day.before(9), day.before(8))).await, [0]);
    }
}
