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
pub enum ComputeStage {
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

impl ComputeStage {
    /// All stages.
    pub const ALL: [ComputeStage; 7] = [
        ComputeStage::Embedding,
        ComputeStage::Norm,
        ComputeStage::Rounding,
        ComputeStage::Products,
        ComputeStage::Finish,
        ComputeStage::AttentionProducts,
        ComputeStage::Attention,
    ];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            ComputeStage::Embedding => "embedding",
            ComputeStage::Norm => "norm",
            ComputeStage::Rounding => "rounding",
            ComputeStage::Products => "products",
            ComputeStage::Finish => "finish",
            ComputeStage::AttentionProducts => "attention products",
            ComputeStage::Attention => "attention",
        }
    }
}

/// Time of the threads while a batch was computed.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    /// Wall-clock time of the batch.
    pub elapsed: Duration,
    /// Sum over all threads, in the order of [`ComputeStage::ALL`].
    pub stages: [Duration; ComputeStage::ALL.len()],
}

/// Counters of one thread.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StageTicks {
    counting: bool,
    ticks: [u64; ComputeStage::ALL.len()],
}

impl StageTicks {
    /// Resets the counters, and enables or disables counting.
    pub(super) fn reset(&mut self, counting: bool) {
        *self = StageTicks { counting, ticks: Default::default() };
    }

    /// Starts a stage; returns the current tick.
    #[inline(always)]
    pub(super) fn begin(&self) -> u64 {
        if self.counting { ticks() } else { 0 }
    }

    /// Ends a stage that started at `begin`; returns the current tick, at which the next stage starts.
    #[inline(always)]
    pub(super) fn end(&mut self, stage: ComputeStage, begin: u64) -> u64 {
        if !self.counting {
            return 0;
        }
        let end = ticks();
        self.ticks[stage as usize] += end.wrapping_sub(begin);
        end
    }
}

/// Timer of a profile.
pub(super) struct ProfileTimer {
    begin: Instant,
    ticks: u64,
}

impl ProfileTimer {
    pub(super) fn start() -> ProfileTimer {
        ProfileTimer { begin: Instant::now(), ticks: ticks() }
    }

    /// Returns the profile of the batch, from the counters of the threads.
    pub(super) fn stop<'a>(self, stage_ticks: impl Iterator<Item = &'a StageTicks>) -> Profile {
        let elapsed = self.begin.elapsed();
        let tick = elapsed.as_secs_f64() / ticks().wrapping_sub(self.ticks).max(1) as f64;
        let mut all = [0; ComputeStage::ALL.len()];
        for stage_ticks in stage_ticks {
            for (all, ticks) in all.iter_mut().zip(stage_ticks.ticks) {
                *all += ticks;
            }
        }
        Profile { elapsed, stages: all.map(|ticks| Duration::from_secs_f64(ticks as f64 * tick)) }
    }
}
