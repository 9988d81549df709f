//! What the time of a batch goes to, stage by stage.
//!
//! An engine is asked for it by [`super::CpuEngine::profile`]; otherwise nothing is counted, and what is left in the kernels
//! is a branch for each tile that is never taken. Each thread counts for itself, in ticks of a counter that takes a few
//! nanoseconds to read. What is left of a thread's time when all stages are taken off is waiting for other threads, and what
//! lies between the stages.

use std::time::{Duration, Instant};

use super::kernel::ticks;

/// What a thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Rows of tables, added and normalised.
    Embedding,
    /// Normalisations between the products.
    Norm,
    /// Turning rows into bytes for a layer of bytes.
    Rounding,
    /// Multiplying rows with weights.
    Products,
    /// What becomes of the sums: scales, biases, activations, what was there before.
    Finish,
    /// Multiplying queries with keys, and weights with values.
    AttentionProducts,
    /// The rest of attention: packing, softmax, scales.
    Attention,
}

impl Stage {
    /// All of them.
    pub const ALL: [Stage; 7] = [
        Stage::Embedding,
        Stage::Norm,
        Stage::Rounding,
        Stage::Products,
        Stage::Finish,
        Stage::AttentionProducts,
        Stage::Attention,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Embedding => "embedding",
            Stage::Norm => "norm",
            Stage::Rounding => "rounding",
            Stage::Products => "products",
            Stage::Finish => "finish",
            Stage::AttentionProducts => "attention products",
            Stage::Attention => "attention",
        }
    }
}

/// What the threads' time went to while a batch was computed.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// From the beginning to the end.
    pub elapsed: Duration,
    /// Of all threads together, in the order of [`Stage::ALL`].
    pub stages: [Duration; Stage::ALL.len()],
}

/// One thread's count.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Laps {
    counting: bool,
    ticks: [u64; Stage::ALL.len()],
}

impl Laps {
    /// Forgets what was counted, and counts or not.
    pub(super) fn reset(&mut self, counting: bool) {
        *self = Laps { counting, ticks: Default::default() };
    }

    /// The beginning of a stage.
    #[inline(always)]
    pub(super) fn begin(&self) -> u64 {
        if self.counting { ticks() } else { 0 }
    }

    /// The end of a stage that began there, and the beginning of what follows.
    #[inline(always)]
    pub(super) fn end(&mut self, stage: Stage, begin: u64) -> u64 {
        if !self.counting {
            return 0;
        }
        let end = ticks();
        self.ticks[stage as usize] += end.wrapping_sub(begin);
        end
    }
}

/// A profile in the making.
pub(super) struct Watch {
    begin: Instant,
    ticks: u64,
}

impl Watch {
    pub(super) fn start() -> Watch {
        Watch { begin: Instant::now(), ticks: ticks() }
    }

    /// The profile of the batch that is computed, of what the threads have counted.
    pub(super) fn stop<'a>(self, laps: impl Iterator<Item = &'a Laps>) -> Profile {
        let elapsed = self.begin.elapsed();
        let tick = elapsed.as_secs_f64() / ticks().wrapping_sub(self.ticks).max(1) as f64;
        let mut all = [0; Stage::ALL.len()];
        for laps in laps {
            for (all, ticks) in all.iter_mut().zip(laps.ticks) {
                *all += ticks;
            }
        }
        Profile { elapsed, stages: all.map(|ticks| Duration::from_secs_f64(ticks as f64 * tick)) }
    }
}
