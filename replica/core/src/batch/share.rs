//! Priority and maximum length of the next batch.
//!
//! Interactive goes before bulk. A batch has one priority only: bulk inputs in the batch of an interactive request
//! would slow that request down.
//!
//! **Share of bulk.** While both priorities have queued requests, each interactive batch earns bulk a credit, such that
//! spending all credit gives bulk its share of the tokens. When the credit covers the next bulk batch, that batch is
//! next. Tokens that bulk is served while no interactive request is queued are charged to the credit too. So a replica
//! with few interactive requests never delays one for bulk, and one that is overloaded with them still makes progress
//! on its backfills.
//!
//! The same holds where an engine admits interactive batches between the steps of a bulk batch: they earn the
//! interrupted batch its credit, and when the credit covers it, it runs to its end.
//!
//! **Length.** Without interactive requests batches are full. With any of them, or shortly after, a batch is short,
//! because an interactive request may arrive in the middle of it. It does not exceed the configured tokens, and within
//! that limit is as short as the learnt cost allows at [`SHORT_SPEED`] of the full speed, but not below
//! [`SHORT_TOKENS`]. Where that would take longer than [`SHORT_TIME`] (a large model), it is shortened further, as far
//! as [`LEAST_SPEED`] allows, so that bulk keeps its throughput.

use std::time::{Duration, Instant};

use super::BatchSettings;
use crate::cost::BatchCost;
use replica_api::priority::{PerPriority, Priority};

/// Time after the last interactive request for which batches stay short. A user who reads results sends the next query
/// within seconds; and short batches cost so little that too long a time is the smaller mistake.
const SHORT_BATCH_MEMORY: Duration = Duration::from_secs(5);
/// Fraction of the full speed of short batches. The lost 3 %, and the cost of twenty interactive requests a second,
/// leave a backfill 90 % of its throughput.
const SHORT_SPEED: f64 = 0.97;
/// Minimum fraction of the full speed, whatever the batch time.
const LEAST_SPEED: f64 = 0.9;
/// Batches are not shortened below this for speed alone. The learnt cost is linear and engines are not quite: threads
/// have less to share, and panels of rows are not full. MiniLM in f32 on two cores of a Cascade Lake Xeon (November
/// 2026) has 88 % of its speed at 128 tokens and 97 % at 256.
const SHORT_TOKENS: u64 = 256;
/// Target time of a short batch: users begin to notice a delay at a tenth of a second.
const SHORT_TIME: Duration = Duration::from_millis(100);
/// Batches are never shortened below this, because a fixed cost of zero is a measurement error.
const LEAST_TOKENS: u64 = 32;

/// Selects the priority of the next batch.
#[derive(Debug)]
pub(super) struct PriorityShare {
    settings: BatchSettings,
    /// Tokens that bulk may use before a queued interactive request, times [`PriorityShare::interactive_percent`].
    credit: u64,
    last_interactive: Option<Instant>,
}

impl PriorityShare {
    pub(super) fn new(settings: BatchSettings) -> PriorityShare {
        PriorityShare { settings, credit: 0, last_interactive: None }
    }

    /// At least one, and at most 99: a priority without any share would starve.
    fn bulk_percent(&self) -> u64 {
        u64::from(self.settings.bulk_share_percent).clamp(1, 99)
    }

    fn interactive_percent(&self) -> u64 {
        100 - self.bulk_percent()
    }

    /// Records the arrival of a request.
    pub(super) fn arrived(&mut self, priority: Priority, now: Instant) {
        if priority == Priority::Interactive {
            self.last_interactive = Some(now);
        }
    }

    /// Returns the priority of the next batch of at most `budget` tokens; `queued` are the queued tokens.
    pub(super) fn choose(
        &self,
        waits: PerPriority<bool>,
        queued: PerPriority<u64>,
        budget: u64,
    ) -> Option<Priority> {
        let due = || self.credit >= queued.bulk.min(budget) * self.interactive_percent();
        match (waits.interactive, waits.bulk) {
            (true, true) => Some(if due() { Priority::Bulk } else { Priority::Interactive }),
            (true, false) => Some(Priority::Interactive),
            (false, true) => Some(Priority::Bulk),
            (false, false) => None,
        }
    }

    /// Records a batch of `priority`; `bulk_waits` says whether other bulk is queued.
    pub(super) fn served(&mut self, priority: Priority, tokens: u64, bulk_waits: bool) {
        match priority {
            Priority::Interactive if bulk_waits => {
                // At most the credit for one full batch, so that the share holds now and not over all time.
                let most = self.settings.batch_tokens.max(tokens) * self.interactive_percent();
                self.credit = (self.credit + tokens * self.bulk_percent()).min(most);
            }
            Priority::Interactive => self.credit = 0,
            Priority::Bulk => self.credit = self.credit.saturating_sub(tokens * self.interactive_percent()),
        }
    }

    /// Returns the maximum number of tokens of the next batch.
    pub(super) fn budget(&self, cost: Option<BatchCost>, now: Instant) -> u64 {
        let BatchSettings { batch_tokens, interactive_batch_tokens, .. } = self.settings;
        if self.last_interactive.is_none_or(|last| now.saturating_duration_since(last) >= SHORT_BATCH_MEMORY)
        {
            return batch_tokens;
        }
        let most = interactive_batch_tokens.min(batch_tokens);
        let Some(cost) = cost else { return most };
        let short = cost.tokens_at(SHORT_SPEED).max(SHORT_TOKENS).min(cost.tokens_within(SHORT_TIME));
        short.max(cost.tokens_at(LEAST_SPEED)).max(LEAST_TOKENS).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "an instant cannot be made in any other way")]
    fn origin() -> Instant {
        Instant::now()
    }

    const SETTINGS: BatchSettings = BatchSettings {
        batch_tokens: 4096,
        interactive_batch_tokens: 1024,
        bulk_share_percent: 25,
        window_max: Duration::ZERO,
    };

    #[track_caller]
    fn check(fixed: f64, per_token: f64, tokens: u64) {
        let (mut share, now) = (PriorityShare::new(SETTINGS), origin());
        share.arrived(Priority::Interactive, now);
        let budget = share.budget(Some(BatchCost { fixed, per_token }), now);
        assert!(budget.abs_diff(tokens) <= 1, "{budget} instead of {tokens}, but for rounding");
    }

    #[test]
    fn a_short_batch_keeps_97_percent_of_the_full_speed() {
        check(2e-3, 1e-4, 647); // 97 % of the speed, 67 ms
        check(0.5e-3, 1e-4, 256); // 162 by the linear cost, raised to SHORT_TOKENS
        check(0.0, 1e-4, 256);
        check(20e-3, 1e-4, 1024); // 6 467, limited by the settings
        check(0.0, 1e-3, 100); // a tenth of a second
        check(30e-3, 1e-3, 270); // 100 ms would lose more than 10 % of the speed
        check(0.0, 1e-1, 32); // the minimum
    }

    #[test]
    fn batches_are_full_while_there_are_no_interactive_requests() {
        let (mut share, now) = (PriorityShare::new(SETTINGS), origin());
        let cost = Some(BatchCost { fixed: 2e-3, per_token: 1e-4 });
        assert_eq!(share.budget(cost, now), 4096);
        share.arrived(Priority::Bulk, now);
        assert_eq!(share.budget(cost, now), 4096);
        share.arrived(Priority::Interactive, now);
        assert_eq!(share.budget(None, now), 1024, "before anything is learnt");
        let almost = now + SHORT_BATCH_MEMORY - Duration::from_millis(1);
        assert_eq!((share.budget(cost, almost), share.budget(cost, now + SHORT_BATCH_MEMORY)), (647, 4096));
    }

    #[test]
    fn bulk_is_next_when_its_credit_covers_its_batch_and_earlier_bulk_is_charged() {
        let both = PerPriority { interactive: true, bulk: true };
        let queued = PerPriority { interactive: 1000, bulk: 1000 };
        let mut share = PriorityShare::new(SETTINGS);
        for _ in 0..3 {
            assert_eq!(share.choose(both, queued, 100), Some(Priority::Interactive));
            share.served(Priority::Interactive, 100, true);
        }
        assert_eq!(share.choose(both, queued, 100), Some(Priority::Bulk), "100 of 400 are a quarter");
        share.served(Priority::Bulk, 100, true);
        assert_eq!(share.choose(both, queued, 100), Some(Priority::Interactive));
        share.served(Priority::Interactive, 200, true);
        share.served(Priority::Bulk, 4000, true);
        share.served(Priority::Interactive, 200, true);
        assert_eq!(
            share.choose(both, queued, 100),
            Some(Priority::Interactive),
            "tokens served beyond the share are charged"
        );
    }
}
