//! Which priority the next batch is from, and how long it may be.
//!
//! Interactive goes before bulk. A batch is of one priority only: bulk that rode along in the batch of a lookup would make the
//! lookup as slow as itself.
//!
//! **Bulk's share.** While both priorities wait, each interactive batch earns bulk a credit, such that spending all of it gives
//! bulk its share of the tokens; when the credit pays for bulk's next batch, that one is next. Whatever bulk is served
//! besides, while no lookup waits, is charged to the credit too. So a replica with few lookups never makes one wait
//! for bulk's sake, and one that is overrun by them still works off its backfills.
//!
//! The same holds where an engine lets lookups in between the steps of a batch of bulk: they earn the batch at hand its
//! credit, and when that pays for it, it goes on to its end.
//!
//! **The length.** Without lookups batches are full. Where there are any, or were of late, a batch is short, for a lookup
//! may come in the middle of it: not above the configured tokens, and within that as short as the learnt cost allows at
//! [`SHORT_SPEED`] of the full speed, but not below [`SHORT_TOKENS`]. Where that would take longer than [`SHORT_TIME`] (a
//! large model), it is cut further, as far as [`LEAST_SPEED`] allows: bulk has to keep its pace.

use std::time::{Duration, Instant};

use super::BatchSettings;
use crate::cost::BatchCost;
use crate::priority::{PerPriority, Priority};

/// After the last lookup batches stay short for this long. Somebody who reads results asks again within seconds; and short
/// batches cost so little that remembering too long is the smaller mistake.
const MEMORY: Duration = Duration::from_secs(5);
/// The part of the full speed that short batches have. Three hundredths, and what twenty lookups a second cost by
/// themselves, leave a backfill nine tenths of its pace.
const SHORT_SPEED: f64 = 0.97;
/// The part of the full speed that is kept whatever the time.
const LEAST_SPEED: f64 = 0.9;
/// Below this a batch is not cut for the sake of speed alone. The line that is learnt is straight and engines are not quite:
/// threads have less to share, and panels of rows are not full. MiniLM in f32 on two cores of a Cascade Lake Xeon
/// (November 2026) has 88 % of its speed at 128 tokens and 97 % at 256.
const SHORT_TOKENS: u64 = 256;
/// What a short batch should not exceed: a tenth of a second is when people begin to notice.
const SHORT_TIME: Duration = Duration::from_millis(100);
/// Below this it is not cut at all, for a fixed part of zero is an error of measurement.
const LEAST_TOKENS: u64 = 32;

/// Whose turn it is among the priorities.
#[derive(Debug)]
pub(super) struct Share {
    settings: BatchSettings,
    /// Tokens that bulk may have before a lookup that waits, times [`Share::interactive_percent`].
    credit: u64,
    last_lookup: Option<Instant>,
}

impl Share {
    pub(super) fn new(settings: BatchSettings) -> Share {
        Share { settings, credit: 0, last_lookup: None }
    }

    /// At least one, and at most 99: a priority without any share would starve.
    fn bulk_percent(&self) -> u64 {
        u64::from(self.settings.bulk_share_percent).clamp(1, 99)
    }

    fn interactive_percent(&self) -> u64 {
        100 - self.bulk_percent()
    }

    /// A request came in.
    pub(super) fn arrived(&mut self, priority: Priority, now: Instant) {
        if priority == Priority::Interactive {
            self.last_lookup = Some(now);
        }
    }

    /// The priority of the next batch, of at most `budget` tokens; `queued` are the tokens that wait.
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

    /// A batch was taken from `priority`; `bulk_waits` besides it.
    pub(super) fn served(&mut self, priority: Priority, tokens: u64, bulk_waits: bool) {
        match priority {
            Priority::Interactive if bulk_waits => {
                // No more than one full batch's worth: the share is one of now, not of all times.
                let most = self.settings.batch_tokens.max(tokens) * self.interactive_percent();
                self.credit = (self.credit + tokens * self.bulk_percent()).min(most);
            }
            Priority::Interactive => self.credit = 0,
            Priority::Bulk => self.credit = self.credit.saturating_sub(tokens * self.interactive_percent()),
        }
    }

    /// Tokens of the next batch.
    pub(super) fn budget(&self, cost: Option<BatchCost>, now: Instant) -> u64 {
        let BatchSettings { batch_tokens, interactive_batch_tokens, .. } = self.settings;
        if self.last_lookup.is_none_or(|last| now.saturating_duration_since(last) >= MEMORY) {
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
        let (mut share, now) = (Share::new(SETTINGS), origin());
        share.arrived(Priority::Interactive, now);
        let budget = share.budget(Some(BatchCost { fixed, per_token }), now);
        assert!(budget.abs_diff(tokens) <= 1, "{budget} instead of {tokens}, but for rounding");
    }

    #[test]
    fn a_short_batch_is_as_short_as_costs_little() {
        check(2e-3, 1e-4, 647); // 97 % of the speed, 67 ms
        check(0.5e-3, 1e-4, 256); // 162 would do, but for what is not linear
        check(0.0, 1e-4, 256);
        check(20e-3, 1e-4, 1024); // 6 467, but the settings say no more than this
        check(0.0, 1e-3, 100); // a tenth of a second
        check(30e-3, 1e-3, 270); // which cannot be had without losing more than a tenth
        check(0.0, 1e-1, 32); // nor can this
    }

    #[test]
    fn batches_are_full_while_there_are_no_lookups() {
        let (mut share, now) = (Share::new(SETTINGS), origin());
        let cost = Some(BatchCost { fixed: 2e-3, per_token: 1e-4 });
        assert_eq!(share.budget(cost, now), 4096);
        share.arrived(Priority::Bulk, now);
        assert_eq!(share.budget(cost, now), 4096);
        share.arrived(Priority::Interactive, now);
        assert_eq!(share.budget(None, now), 1024, "before anything is learnt");
        let almost = now + MEMORY - Duration::from_millis(1);
        assert_eq!((share.budget(cost, almost), share.budget(cost, now + MEMORY)), (647, 4096));
    }

    #[test]
    fn bulk_is_due_when_its_credit_pays_for_its_next_batch_and_not_after_it_has_had_its_own() {
        let both = PerPriority { interactive: true, bulk: true };
        let queued = PerPriority { interactive: 1000, bulk: 1000 };
        let mut share = Share::new(SETTINGS);
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
            "what it had without asking counts"
        );
    }
}
