//! `[batch]`: how batches are made, where a person wants it otherwise than `meridian tune` found it.

use std::time::Duration;

use serde::Deserialize;

/// Nobody waits longer than this for company: it is added to the latency of whoever comes alone.
pub const WINDOW_MAX_MS: f64 = 1000.0;

/// [`BatchSettings`](replica_core::batch::BatchSettings), as far as somebody has decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchChoice {
    /// Tokens of a batch while there are no lookups.
    pub batch_tokens: Option<u64>,
    /// Tokens of a batch while there are.
    pub interactive_batch_tokens: Option<u64>,
    /// The part of the tokens that bulk has while both priorities wait.
    pub bulk_share_percent: Option<u8>,
    /// The longest that anybody waits for company.
    pub window_max: Option<Duration>,
}

/// `[batch]`, as it is written.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawBatch {
    /// [`BatchChoice::batch_tokens`]
    pub batch_tokens: Option<u64>,
    /// [`BatchChoice::interactive_batch_tokens`]
    pub interactive_batch_tokens: Option<u64>,
    /// [`BatchChoice::bulk_share_percent`]
    pub bulk_share_percent: Option<u64>,
    /// [`BatchChoice::window_max`], in milliseconds
    pub window_max_ms: Option<f64>,
}

impl RawBatch {
    pub(super) fn check(self, max_queue_tokens: u64, problems: &mut Vec<String>) -> BatchChoice {
        let RawBatch { batch_tokens, interactive_batch_tokens, bulk_share_percent, window_max_ms } = self;
        for (key, given) in
            [("batch_tokens", batch_tokens), ("interactive_batch_tokens", interactive_batch_tokens)]
        {
            match given {
                Some(tokens) if tokens == 0 || tokens > u64::from(u32::MAX) => problems
                    .push(format!("`batch.{key}` = {tokens}; give a whole number from 1 to {}", u32::MAX)),
                Some(tokens) if tokens > max_queue_tokens => problems.push(format!(
                    "`batch.{key}` = {tokens} is more than `limits.max_queue_tokens` = {max_queue_tokens}, so that no \
                     batch is ever full; give at most as much"
                )),
                Some(_) | None => {}
            }
        }
        if let (Some(all), Some(lookups)) = (batch_tokens, interactive_batch_tokens)
            && lookups > all
        {
            problems.push(format!(
                "`batch.interactive_batch_tokens` = {lookups} is more than `batch.batch_tokens` = {all}; give at most as much"
            ));
        }
        let percent = bulk_share_percent.and_then(|percent| u8::try_from(percent).ok());
        if let Some(given) = bulk_share_percent
            && !percent.is_some_and(|percent| (1..=99).contains(&percent))
        {
            problems.push(format!("`batch.bulk_share_percent` = {given}; give a whole number from 1 to 99"));
        }
        let window = window_max_ms.filter(|millis| (0.0..=WINDOW_MAX_MS).contains(millis));
        if let (Some(given), None) = (window_max_ms, window) {
            problems.push(format!(
                "`batch.window_max_ms` = {given}; give a number from 0, for no waiting, to {WINDOW_MAX_MS}"
            ));
        }
        BatchChoice {
            batch_tokens,
            interactive_batch_tokens,
            bulk_share_percent: percent,
            window_max: window.map(|millis| Duration::from_secs_f64(millis / 1e3)),
        }
    }
}
