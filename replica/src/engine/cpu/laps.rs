//! Profile of a batch, by stage.
//!
//! [`super::CpuEngine::profile`] enables it; otherwise nothing is counted, and the cost in the kernels is one branch
//! per tile that is never taken. Each thread counts its own time, in ticks of a counter that takes a few nanoseconds to
//! read. The rest of a thread's time, without all stages, is synchronization with other threads and work between the
//! stages.

use std::time::{Duration, Instant};

use super::kernel::ticks;

/// Stage of the computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Rows of tables, added and normalized.
    Embedding,
    /// Normalizations between the products.
    Norm,
    /// Quantization of rows for an int8 layer.
    Rounding,
    /// Matrix products of rows and weights.
    Products,
    /// Epilogue of the products: scales, biases, activations, residual additions.
    Finish,
    /// Products of queries with keys, and of attention weights with values.
    AttentionProducts,
    /// The rest of attention: packing, softmax, scales.
    Attention,
}

impl Stage {
    /// All stages.
    pub const ALL: [Stage; 7] = [
        Stage::Embedding,
        Stage::Norm,
        Stage::Rounding,
        Stage::Products,
        Stage::Finish,
        Stage::AttentionProducts,
        Stage::Attention,
    ];

    /// Returns the name.
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

/// Time of the threads while a batch was computed.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Wall-clock time of the batch.
    pub elapsed: Duration,
    /// Sum over all threads, in the order of [`ComputeStage::ALL`].
    pub stages: [Duration; Stage::ALL.len()],
}

/// Counters of one thread.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Laps {
    counting: bool,
    ticks: [u64; Stage::ALL.len()],
}

impl Laps {
    /// Resets the counters, and enables or disables counting.
    pub(super) fn reset(&mut self, counting: bool) {
        *self = Laps { counting, ticks: Default::default() };
    }

    /// Starts a stage; returns the current tick.
    #[inline(always)]
    pub(super) fn begin(&self) -> u64 {
        if self.counting { ticks() } else { 0 }
    }

    /// Ends a stage that started at `begin`; returns the current tick, at which the next stage starts.
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

/// Timer of a profile.
pub(super) struct Watch {
    begin: Instant,
    ticks: u64,
}

impl Watch {
    pub(super) fn start() -> Watch {
        Watch { begin: Instant::now(), ticks: ticks() }
    }

    /// Returns the profile of the batch, from the counters of the threads.
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
