//! Output head for engines that end with the last layer: pooling, dense layers, label heads.
//!
//! The CPU engine uses the same code, so a model has the same outputs whatever engine computed its layers. One thread
//! is enough: the input is a matrix of few rows.

use std::num::NonZeroUsize;
use supervision::Mutex;

use super::{PoolingHead, ThreadScratch, WorkerSet};
use crate::engine::RaggedBatch;
use crate::engine::cpu::CpuLoadError;
use crate::engine::cpu::kernel::Isa;
use crate::engine::cpu::matrix::Matrix;
use crate::engine::cpu::threads::ThreadPool;
use crate::model::{ModelDir, Pooling};

/// Computes the row of a sequence from the states of its tokens.
pub(crate) struct OutputHead {
    isa: Isa,
    pool: PoolingHead,
    work: Mutex<HeadState>,
}

struct HeadState {
    threads: ThreadPool,
    scratch: Vec<ThreadScratch>,
    states: Matrix,
    pooled: [Matrix; 2],
}

impl OutputHead {
    /// Loads the head of this model.
    pub(crate) fn load(model: &ModelDir) -> Result<OutputHead, CpuLoadError> {
        let one = NonZeroUsize::MIN;
        let threads =
            ThreadPool::new(one).map_err(|reason| CpuLoadError::Threads { threads: one, reason })?;
        let scratch = vec![ThreadScratch::default()];
        let work = HeadState { threads, scratch, states: Matrix::default(), pooled: Default::default() };
        Ok(OutputHead { isa: Isa::best(), pool: PoolingHead::load(model)?, work: Mutex::independent(work) })
    }

    /// Returns the numbers of an output row.
    pub(crate) fn width(&self) -> usize {
        self.pool.width()
    }

    /// Returns whether the pooling reads the last token's row only.
    pub(crate) fn pools_last_token(&self) -> bool {
        self.pool.pooling == Pooling::LastToken
    }

    /// Computes from the rows of all tokens; `out` has [`OutputHead::width`] numbers for each sequence.
    pub(crate) fn of_states(&self, states: &[f32], batch: &RaggedBatch<'_>, out: &mut [f32]) {
        self.with(states, |pool, isa, workers, states, pooled| {
            pool.run(isa, workers, states, batch, pooled, out)
        });
    }

    /// Computes from one row for each sequence.
    pub(crate) fn of_pooled(&self, rows: &[f32], out: &mut [f32]) {
        self.with(rows, |pool, isa, workers, rows, pooled| pool.finish(isa, workers, rows, pooled, out));
    }

    fn with(
        &self,
        rows: &[f32],
        run: impl FnOnce(&PoolingHead, Isa, &mut WorkerSet<'_>, &Matrix, &mut [Matrix; 2]),
    ) {
        // After a panic the buffers contain only numbers, which the next batch overwrites.
        let mut work = self.work.lock();
        let HeadState { threads, scratch, states, pooled } = &mut *work;
        states.resize(rows.len() / self.pool.hidden, self.pool.hidden);
        states.data_mut().copy_from_slice(rows);
        run(&self.pool, self.isa, &mut WorkerSet { threads, scratch }, states, pooled);
    }
}
