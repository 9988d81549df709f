//! What stands behind the last layer, for engines that end there: pooling, dense layers, label heads.
//!
//! The same code that the transformer here ends with, so a model means the same whatever computed its layers. One thread is
//! enough: it is a matrix of a few rows.

use std::num::NonZeroUsize;
use supervision::Mutex;

use super::{Crew, Pool, Room};
use crate::engine::RaggedBatch;
use crate::engine::cpu::LoadError;
use crate::engine::cpu::kernel::Isa;
use crate::engine::cpu::matrix::Matrix;
use crate::engine::cpu::threads::Threads;
use crate::model::{ModelDir, Pooling};

/// From rows of states to the row of a sequence.
pub(crate) struct Behind {
    isa: Isa,
    pool: Pool,
    work: Mutex<Work>,
}

struct Work {
    threads: Threads,
    rooms: Vec<Room>,
    states: Matrix,
    pooled: [Matrix; 2],
}

impl Behind {
    /// What this model has there.
    pub(crate) fn load(model: &ModelDir) -> Result<Behind, LoadError> {
        let one = NonZeroUsize::MIN;
        let threads = Threads::new(one).map_err(|reason| LoadError::Threads { threads: one, reason })?;
        let rooms = vec![Room::default()];
        let work = Work { threads, rooms, states: Matrix::default(), pooled: Default::default() };
        Ok(Behind { isa: Isa::best(), pool: Pool::load(model)?, work: Mutex::independent(work) })
    }

    /// Numbers of a row at the end.
    pub(crate) fn width(&self) -> usize {
        self.pool.width()
    }

    /// Whether the last token's row is all that it wants of a sequence.
    pub(crate) fn wants_the_last_token(&self) -> bool {
        self.pool.pooling == Pooling::LastToken
    }

    /// From the rows of all tokens; `out` has [`Behind::width`] numbers for each sequence.
    pub(crate) fn of_states(&self, states: &[f32], batch: &RaggedBatch<'_>, out: &mut [f32]) {
        self.with(states, |pool, isa, crew, states, pooled| pool.run(isa, crew, states, batch, pooled, out));
    }

    /// From one row for each sequence.
    pub(crate) fn of_pooled(&self, rows: &[f32], out: &mut [f32]) {
        self.with(rows, |pool, isa, crew, rows, pooled| pool.finish(isa, crew, rows, pooled, out));
    }

    fn with(&self, rows: &[f32], run: impl FnOnce(&Pool, Isa, &mut Crew<'_>, &Matrix, &mut [Matrix; 2])) {
        // After a panic there are only numbers in there that the next batch writes over.
        let mut work = self.work.lock();
        let Work { threads, rooms, states, pooled } = &mut *work;
        states.resize(rows.len() / self.pool.hidden, self.pool.hidden);
        states.data_mut().copy_from_slice(rows);
        run(&self.pool, self.isa, &mut Crew { threads, rooms }, states, pooled);
    }
}
