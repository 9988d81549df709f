//! Usage of tenants: each day of each gateway's ledger is one record, without a lease, kept for
//! [`RETENTION_DAYS`](scheduler_api::usage::RETENTION_DAYS).
//!
//! A gateway sends a day as a whole with a sequence number ([`scheduler_api::usage`]), and any hub stores it if it is newer than
//! the stored version. So it does not matter how often or to which hub a report is sent, and nothing is counted twice.

use std::time::SystemTime;

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use replica_api::error::ErrorCode;
use scheduler_api::error::HubErrorCode;
use scheduler_api::keys;
use scheduler_api::paths::{self, UsageQuery};
use scheduler_api::usage::{self, RETENTION_DAYS, UsageDay, UsageOfDay, UsageReportV1, UsageV1};
use scheduler_store::{Compare, Op, Store, StoreError, Txn};
use supervision::Mutex;

use super::access::Caller;
use super::api::{Body, HubApi, json};
use super::records;
use crate::respond::ErrorResponse;

/// Attempts of a write if the same report arrives at another hub at the same time.
const ATTEMPTS_MAX: usize = 3;
/// Days of a report that may be in the future, for a gateway whose clock is ahead.
const AHEAD_DAYS_MAX: u32 = 1;
/// Maximum number of old records that are deleted in one transaction; etcd permits 128 operations.
const DELETED_MAX: usize = 100;

fn today() -> UsageDay {
    UsageDay::at(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
}

/// Stores one day of a ledger, unless the stored version is as new.
pub(super) async fn report<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
    body: Body,
) -> Result<StatusCode, ErrorResponse> {
    let reported = UsageOfDay::try_from(json::<UsageV1>(body)?)?;
    api.check_region(&reported.gateway)?;
    caller.check_region(&api, &reported.gateway, paths::USAGE)?;
    let (today, day) = (today(), reported.day);
    if day < today.before(RETENTION_DAYS) || day.before(AHEAD_DAYS_MAX) > today {
        let message = format!("`day`: {day} is not in the last {RETENTION_DAYS} days; today is {today}.");
        return Err(ErrorResponse::new(ErrorCode::InvalidValue, message).with_field("day"));
    }
    let key = keys::usage(day, &reported.gateway, reported.ledger);
    for _ in 0..ATTEMPTS_MAX {
        let stored = api.store.get(&key).await?;
        let known = stored.as_ref().map(records::usage).transpose()?;
        if known.is_some_and(|known| known.sequence >= reported.sequence) {
            return Ok(StatusCode::NO_CONTENT);
        }
        let revision = stored.map_or(0, |entry| entry.mod_revision);
        let value = records::packed(&UsageV1::from(&reported));
        let when = vec![Compare::ModRevision(key.clone(), revision)];
        let then = vec![Op::Put { key: key.clone(), value, lease: None }];
        if api.store.txn(Txn { when, then }).await?.succeeded {
            prune(&api.store, &api.usage_pruned, today).await?;
            return Ok(StatusCode::NO_CONTENT);
        }
    }
    let message = "The usage is written by another request at the same time; send it again.";
    Err(ErrorResponse::new(HubErrorCode::Conflict, message))
}

/// Deletes records that are too old, unless this hub has done so on the same day.
async fn prune<S: Store>(
    store: &S,
    pruned: &Mutex<Option<UsageDay>>,
    today: UsageDay,
) -> Result<(), StoreError> {
    if pruned.lock().replace(today) == Some(today) {
        return Ok(());
    }
    let oldest = keys::usage_of(today.before(RETENTION_DAYS));
    let stored = store.range(keys::USAGE).await?;
    let old: Vec<_> = stored.entries.into_iter().filter(|entry| entry.key < oldest).collect();
    for some in old.chunks(DELETED_MAX) {
        let then = some.iter().map(|entry| Op::Delete { key: entry.key.clone() }).collect();
        store.txn(Txn { when: Vec::new(), then }).await?;
    }
    Ok(())
}

/// Responds with the usage of some days, for operators.
pub(super) async fn read<S: Store>(
    State(api): State<HubApi<S>>,
    RawQuery(query): RawQuery,
) -> Result<Json<UsageReportV1>, ErrorResponse> {
    let UsageQuery { from, to } = UsageQuery::parse(query.as_deref().unwrap_or_default(), today())?;
    let mut days = Vec::new();
    for day in (from.0..=to.0).map(UsageDay) {
        for entry in api.store.range(&keys::usage_of(day)).await?.entries {
            days.push(records::usage(&entry)?);
        }
    }
    Ok(Json(usage::report(days)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use scheduler_store::SimStore;

    #[tokio::test]
    async fn records_past_the_retention_are_deleted_once_a_day() {
        let (store, pruned, today) = (SimStore::new(), Mutex::default(), UsageDay(20_500));
        let gateway = "aws/us-east-1".parse().unwrap();
        let put = async |days: u32, ledger: u64| {
            let key = keys::usage(today.before(days), &gateway, ledger);
            store.put(&key, b"{}".to_vec(), None).await.unwrap();
        };
        let left = async || store.range(keys::USAGE).await.unwrap().entries.len();
        // More than one transaction can delete.
        for ledger in 0..2 * DELETED_MAX as u64 + 1 {
            put(RETENTION_DAYS + 1, ledger).await;
        }
        put(RETENTION_DAYS, 1).await;
        put(0, 1).await;
        prune(&store, &pruned, today).await.unwrap();
        assert_eq!(left().await, 2);
        put(RETENTION_DAYS + 1, 1).await;
        prune(&store, &pruned, today).await.unwrap();
        assert_eq!(left().await, 3, "not again on the same day");
        prune(&store, &pruned, UsageDay(today.0 + 1)).await.unwrap();
        assert_eq!(left().await, 1);
    }
}
