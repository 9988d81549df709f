//! `[batch]`: batch settings that override those found by `meridian tune`.

use std::time::Duration;

use serde::Deserialize;

/// Maximum batching delay in milliseconds: it is added to the latency of a lone request.
pub const WINDOW_MAX_MS: f64 = 1000.0;

/// Configured [`BatchSettings`](replica_core::batch::BatchSettings); absent values are decided elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchOverrides {
    /// Tokens of a batch while no interactive request waits.
    pub batch_tokens: Option<u64>,
    /// Tokens of a batch while interactive requests wait.
    pub interactive_batch_tokens: Option<u64>,
    /// Share of the tokens that bulk requests get while both priorities wait, in percent.
    pub bulk_share_percent: Option<u8>,
    /// Maximum batching delay.
    pub window_max: Option<Duration>,
}

/// `[batch]`, as written.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawBatch {
    /// [`BatchOverrides::batch_tokens`]
    pub batch_tokens: Option<u64>,
    /// [`BatchOverrides::interactive_batch_tokens`]
    pub interactive_batch_tokens: Option<u64>,
    /// [`BatchOverrides::bulk_share_percent`]
    pub bulk_share_percent: Option<u64>,
    /// [`BatchOverrides::window_max`], in milliseconds
    pub window_max_ms: Option<f64>,
}

impl RawBatch {
    pub(super) fn check(self, max_queue_tokens: u64, problems: &mut Vec<String>) -> BatchOverrides {
        let RawBatch { batch_tokens, interactive_batch_tokens, bulk_share_percent, window_max_ms } = self;
        for (key, given) in
            [("batch_tokens", batch_tokens), ("interactive_batch_tokens", interactive_batch_tokens)]
        {
            match given {
                Some(tokens) if tokens == 0 || tokens > u64::from(u32::MAX) => problems
                    .push(format!("`batch.{key}` = {tokens}; give a whole number from 1 to {}", u32::MAX)),
                Some(tokens) if tokens > max_queue_tokens => problems.push(format!(
                    "`batch.{key}` = {tokens} is more than `limits.max_queue_tokens` = {max_queue_tokens}, so no batch \
                     can be full; lower it to the limit"
                )),
                Some(_) | None => {}
            }
        }
        if let (Some(all), Some(interactive)) = (batch_tokens, interactive_batch_tokens)
            && interactive > all
        {
            problems.push(format!(
                "`batch.interactive_batch_tokens` = {interactive} is more than `batch.batch_tokens` = {all}; lower it"
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
                "`batch.window_max_ms` = {given}; give a number from 0 (no batching delay) to {WINDOW_MAX_MS}"
            ));
        }
        BatchOverrides {
            batch_tokens,
            interactive_batch_tokens,
            bulk_share_percent: percent,
            window_max: window.map(|millis| Duration::from_secs_f64(millis / 1e3)),
        }
    }
}
