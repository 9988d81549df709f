//! Usage of tenants: each day of each gateway's ledger is one record, without a lease, kept for
//! [`RETENTION_DAYS`](scheduler_api::usage::RETENTION_DAYS).
//!
//! A gateway, or a spoke with a queue of jobs, sends a day as a whole with a sequence number ([`scheduler_api::usage`]), and any hub stores it if it is newer than
//! the stored version. So it does not matter how often or to which hub a report is sent, and nothing is counted twice.

use std::time::SystemTime;

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use regions::TenantId;
use replica_api::error::ErrorCode;
use scheduler_api::error::HubErrorCode;
use scheduler_api::keys;
use scheduler_api::paths::{self, UsageQuery};
use scheduler_api::usage::{
    RECORD_BYTES_MAX, REPORT_DAYS_MAX, TooManyRows, UsageDay, UsageOfDay, UsageReportV1, UsageSums, UsageV1,
};
use scheduler_store::{Compare, KeyValue, Op, Store, Txn};
use supervision::task::blocking;

use super::access::Caller;
use super::api::{Body, HubApi, json};
use super::records;
use super::term_start::readable;
use super::usage_records::{QUERIES_MAX, UsagePages, check_number, prune};
use crate::events::UsagePruneFailed;
use crate::respond::ErrorResponse;

/// Attempts of a write if the same report arrives at another hub at the same time.
const ATTEMPTS_MAX: usize = 3;

/// Stores one day of a ledger, unless the stored version is as new.
pub(super) async fn report<S: Store>(
    State(api): State<HubApi<S>>,
    caller: Caller,
    body: Body,
) -> Result<StatusCode, ErrorResponse> {
    let reported = UsageOfDay::try_from(json::<UsageV1>(body)?)?;
    api.check_region(&reported.gateway)?;
    caller.check_region(&api, &reported.gateway, paths::USAGE)?;
    let (today, day) = (UsageDay::of(SystemTime::now()), reported.day);
    if !day.is_accepted(today) {
        let message = format!("`day`: {day} is not in the last {REPORT_DAYS_MAX} days; today is {today}.");
        return Err(ErrorResponse::new(ErrorCode::InvalidValue, message).with_field("day"));
    }
    let key = keys::usage(day, &reported.gateway, reported.ledger);
    let value = packed(&reported).inspect_err(|_| api.metrics.usage.rejected.add(1))?;
    // Before the records are counted, so that old ones do not reject new ones.
    if let Err(error) = prune(&api.store, &api.usage.pruned, &api.metrics.usage, today).await {
        api.metrics.usage.prune_failures.add(1);
        UsagePruneFailed { error: &error }.emit();
    }
    for _ in 0..ATTEMPTS_MAX {
        let stored = api.store.get(&key).await?;
        // An unreadable record is replaced.
        let known = stored.as_ref().and_then(|entry| readable(records::usage(entry)));
        if known.is_some_and(|known| known.sequence >= reported.sequence) {
            return Ok(StatusCode::NO_CONTENT);
        }
        if stored.is_none() {
            check_number(&api.store, &api.metrics.usage, day, &reported.gateway).await?;
        }
        let revision = stored.map_or(0, |entry| entry.mod_revision);
        let when = vec![Compare::ModRevision(key.clone(), revision)];
        let then = vec![Op::Put { key: key.clone(), value: value.clone(), lease: None }];
        if api.store.txn(Txn { when, then }).await?.succeeded {
            return Ok(StatusCode::NO_CONTENT);
        }
    }
    let message = "The usage is written by another request at the same time; send it again.";
    Err(ErrorResponse::new(HubErrorCode::Conflict, message))
}

/// Returns the record of a day of a ledger.
fn packed(usage: &UsageOfDay) -> Result<Vec<u8>, ErrorResponse> {
    let value = records::packed(&UsageV1::from(usage));
    if value.len() <= RECORD_BYTES_MAX {
        return Ok(value);
    }
    let message = format!(
        "`rows`: they have {} bytes in the store; at most {RECORD_BYTES_MAX} are stored.",
        value.len()
    );
    Err(ErrorResponse::new(ErrorCode::BodyTooLarge, message).with_field("rows"))
}

/// Responds with the usage of some days, for operators.
pub(super) async fn read<S: Store>(
    State(api): State<HubApi<S>>,
    RawQuery(query): RawQuery,
) -> Result<Json<UsageReportV1>, ErrorResponse> {
    let today = UsageDay::of(SystemTime::now());
    let UsageQuery { from, to, tenant } = UsageQuery::parse(query.as_deref().unwrap_or_default(), today)?;
    let Ok(_permit) = api.usage.queries.try_acquire() else {
        let message =
            format!("{QUERIES_MAX} queries of usage run at this hub, which is the limit; try again shortly.");
        return Err(ErrorResponse::new(ErrorCode::Overloaded, message));
    };
    let mut pages = UsagePages::of(from, to);
    let mut sums = UsageSums::default();
    while let Some(page) = pages.next(&api.store).await? {
        // A page takes some milliseconds to decompress and to parse.
        let only = tenant.clone();
        sums = blocking(move || add(sums, &page, only.as_ref())).await.map_err(|error| {
            ErrorResponse::new(ErrorCode::InvalidValue, format!("`from`: {error}.")).with_field("from")
        })?;
    }
    Ok(Json(sums.report()))
}

/// Adds the rows of a tenant, or all, of the readable records of a page; unreadable ones are logged and left out.
fn add(mut sums: UsageSums, page: &[KeyValue], only: Option<&TenantId>) -> Result<UsageSums, TooManyRows> {
    for mut usage in page.iter().filter_map(|entry| readable(records::usage(entry))) {
        usage.rows.retain(|(tenant, _, _), _| only.is_none_or(|only| only == tenant));
        sums.add(usage)?;
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::RegionId;
    use scheduler_api::usage::{ROWS_MAX, UsageCounts};

    fn gateway() -> RegionId {
        "aws/us-east-1".parse().unwrap()
    }

    /// Returns a day with rows of different names and counts, as a large fleet has them.
    fn large(rows: usize, name: impl Fn(u64) -> String) -> UsageOfDay {
        let rows = (0..rows as u64).map(|n| {
            let mixed = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let tenant = format!("tenant-{}", mixed >> 56).parse().unwrap();
            let counts = UsageCounts { requests: mixed >> 44, inputs: mixed >> 42, tokens: mixed >> 34 };
            ((tenant, Some(name(mixed).parse().unwrap()), gateway()), counts)
        });
        UsageOfDay { gateway: gateway(), ledger: 1, sequence: 1, day: UsageDay(20_000), rows: rows.collect() }
    }

    #[test]
    fn an_unreadable_record_is_left_out_of_the_sums() {
        let entry = |value: Vec<u8>| KeyValue {
            key: keys::usage(UsageDay(20_000), &gateway(), 1),
            value: value.into(),
            create_revision: 1,
            mod_revision: 1,
            lease: None,
        };
        let valid = packed(&large(3, |n| format!("embed-{n}"))).unwrap();
        let sums = add(UsageSums::default(), &[entry(b"{".to_vec()), entry(valid)], None).unwrap();
        assert_eq!(sums.report().rows.len(), 3);
    }

    #[test]
    fn the_maximum_of_rows_fits_into_a_record_and_longer_names_are_rejected() {
        let usual = packed(&large(ROWS_MAX, |n| format!("embed-{:04x}", n >> 48))).map(|value| value.len());
        let usual = usual.expect("the maximum of rows");
        println!("{ROWS_MAX} rows: {usual} bytes in the store");
        assert!(usual <= RECORD_BYTES_MAX);
        let hostile = large(ROWS_MAX, |n| {
            let parts = (1..=3).map(|m| format!("{:016x}", n.wrapping_mul(m * m + 0xd134_2543)));
            format!("d{}", parts.collect::<String>())
        });
        let error = packed(&hostile).unwrap_err();
        assert!(error.message().contains("at most 65536"), "{}", error.message());
    }
}
