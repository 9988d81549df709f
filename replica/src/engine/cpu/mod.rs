//! Native engine: transformers on the CPU, in Rust.
//!
//! In reading order:
//!
//! 1. `forward`: computation of a batch and its partitioning; `rotary_table`, `distance`: positional information.
//! 2. `weights`, `linear`, `panels`, `packed`, `packed_file`: weights and their memory layout.
//! 3. `matrix`, `threads`: disjoint parts of a matrix that threads may write concurrently, and the thread pool.
//! 4. `kernel`: the arithmetic, for each instruction set.

mod byte_panels;
mod distance;
mod forward;
mod kernel;
mod linear;
#[expect(unsafe_code, reason = "threads write disjoint parts of one matrix")]
mod matrix;
mod packed;
mod packed_file;
mod panels;
mod profile;
mod rotary_table;
#[expect(unsafe_code, reason = "threads borrow data from the caller's stack")]
mod threads;
mod weights;

use std::io;
use std::num::NonZeroUsize;
use std::time::Instant;
use supervision::Mutex;
use supervision::request::{Panicked, contain_work};

use replica_core::{EngineKind, EngineSpec, Precision, Task};

use super::check::check;
use super::{
    BatchCallbacks, Description, Engine, EngineError, EngineStep, FailedSequence, Output, RaggedBatch,
};
use crate::model::{ModelDir, ModelError};
use forward::{Arena, NoPreemption, PoolingHead, Preemption, Transformer};
use kernel::{MultiplyAdd, MultiplyBytes};
use threads::ThreadPool;
use weights::TransformerWeights;

#[cfg(feature = "tensorrt")]
pub(crate) use forward::OutputHead;
pub use kernel::Isa;
pub use packed_file::{PackedCache, WeightsLocation};
pub use profile::{ComputeStage, Profile};

/// Options of the CPU engine.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Compute threads, including the calling thread.
    pub threads: NonZeroUsize,
    /// Number format of layers and attention. Tables, normalizations and heads are always binary32, and so is attention
    /// with soft-capping, with distance biases, or over more tokens than the byte format supports.
    pub precision: Precision,
    /// Cache of packed weights that replicas of the model share; `None`: memory of this process.
    pub packed: Option<PackedCache>,
    /// Instruction set; `None`: the best available.
    pub isa: Option<Isa>,
}

/// Errors of [`CpuEngine::load`].
#[derive(Debug, thiserror::Error)]
pub enum CpuLoadError {
    /// The weights do not match the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The CPU engine does not support the configured precision.
    #[error("the engine `cpu` does not compute in {precision}; write \"f32\" or \"int8\"")]
    Precision {
        /// Requested precision.
        precision: Precision,
    },
    /// The system cannot start the configured number of engine threads.
    #[error("{threads} engine threads cannot be started ({reason}); reduce the number")]
    Threads {
        /// Requested number of threads.
        threads: NonZeroUsize,
        /// Error of the system.
        reason: io::Error,
    },
}

/// CPU engine: a model with its weights in memory, and threads.
pub struct CpuEngine {
    description: Description,
    weights_location: WeightsLocation,
    transformer: Transformer,
    work: Mutex<EngineState>,
}

struct EngineState {
    threads: ThreadPool,
    arena: Arena,
    /// For a batch that runs between the steps of another one.
    nested_arena: Arena,
}

impl CpuEngine {
    /// Maps and packs the weights, and starts the threads.
    pub fn load(model: &ModelDir, options: CpuOptions) -> Result<CpuEngine, CpuLoadError> {
        let CpuOptions { threads, precision, packed, isa } = options;
        if !EngineKind::Cpu.precisions().contains(&precision) {
            return Err(CpuLoadError::Precision { precision });
        }
        let isa = isa.unwrap_or_else(Isa::best);
        let architecture = &model.architecture;
        let (weights, weights_location) =
            TransformerWeights::load(&model.checkpoint, architecture, precision, packed.as_ref())?;
        let pool = PoolingHead::load(model)?;
        let description = Description {
            engine: EngineSpec { kind: EngineKind::Cpu, precision },
            architecture: architecture.family.clone(),
            task: if model.head.is_some() { Task::Classify } else { Task::Embed },
            width: pool.width(),
            hidden: architecture.hidden,
            token_rows: true,
            max_tokens: model.sentence.max_tokens,
            vocabulary: architecture.vocabulary,
            token_types: architecture.token_types,
            instruction_set: isa.name().to_owned(),
            threads: threads.get(),
            accelerator: None,
        };
        let work = EngineState {
            threads: ThreadPool::new(threads).map_err(|reason| CpuLoadError::Threads { threads, reason })?,
            arena: Arena::new(architecture),
            nested_arena: Arena::new(architecture),
        };
        let transformer = Transformer { isa, precision, architecture: architecture.clone(), weights, pool };
        Ok(CpuEngine { description, weights_location, transformer, work: Mutex::independent(work) })
    }

    /// Checks that the weights match the model and are finite: everything that [`CpuEngine::load`] checks, without the
    /// memory and the time for packing.
    pub fn check_weights(model: &ModelDir) -> Result<(), ModelError> {
        let results = [
            TransformerWeights::check(&model.checkpoint, &model.architecture),
            PoolingHead::load(model).map(drop),
        ];
        let problems = results.into_iter().filter_map(Result::err).flat_map(ModelError::into_all).collect();
        ModelError::of_all(problems).map_or(Ok(()), Err)
    }

    /// Returns the location of the packed weights.
    pub fn weights_location(&self) -> &WeightsLocation {
        &self.weights_location
    }

    fn check(&self, batch: &RaggedBatch<'_>, output: Output, out: &[f32]) -> Result<(), EngineError> {
        check(&self.description, self.transformer.architecture.embedding.types, batch, output, out)
    }
}

impl CpuEngine {
    /// Computes a batch as [`Engine::compute`] does, and returns a profile of the threads' time.
    pub fn profile(
        &self,
        batch: &RaggedBatch<'_>,
        output: Output,
        out: &mut [f32],
    ) -> Result<Profile, EngineError> {
        self.check(batch, output, out)?;
        if batch.is_empty() {
            return Ok(Profile::default());
        }
        let mut work = self.work.lock();
        let EngineState { threads, arena, .. } = &mut *work;
        let transformer = &self.transformer;
        let computed = contain_work(|| transformer.profile(threads, arena, batch, output, out));
        computed.map_err(|Panicked(reason)| EngineError::Broken { reason })
    }
}

impl Engine for CpuEngine {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn compute(&self, batch: &RaggedBatch<'_>, output: Output, out: &mut [f32]) -> Result<(), EngineError> {
        self.compute_each(batch, output, &|_| true, out).map(drop)
    }

    fn compute_each(
        &self,
        batch: &RaggedBatch<'_>,
        output: Output,
        callbacks: &dyn BatchCallbacks,
        out: &mut [f32],
    ) -> Result<Vec<FailedSequence>, EngineError> {
        let mut work = self.work.lock();
        let EngineState { threads, arena, nested_arena } = &mut *work;
        let mut preemption = NestedBatch { engine: self, callbacks, arena: nested_arena };
        self.run((threads, arena), batch, output, &mut preemption, out).map(|()| Vec::new())
    }
}

impl CpuEngine {
    fn run(
        &self,
        (threads, arena): (&mut ThreadPool, &mut Arena),
        batch: &RaggedBatch<'_>,
        output: Output,
        preemption: &mut dyn Preemption,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        self.check(batch, output, out)?;
        if batch.is_empty() {
            return Ok(());
        }
        // After a panic the buffers contain only numbers, which the next batch overwrites.
        let computed = contain_work(|| self.transformer.run(threads, arena, batch, output, preemption, out));
        computed.map_err(|Panicked(reason)| EngineError::Broken { reason })
    }
}

/// More urgent batch, with its own memory.
struct NestedBatch<'a> {
    engine: &'a CpuEngine,
    callbacks: &'a dyn BatchCallbacks,
    arena: &'a mut Arena,
}

impl Preemption for NestedBatch<'_> {
    fn is_pending(&self) -> bool {
        self.callbacks.has_urgent()
    }

    fn run(&mut self, threads: &mut ThreadPool) {
        let NestedBatch { engine, callbacks, arena } = self;
        callbacks.run_urgent(&mut |batch, output, out| {
            engine.run((threads, arena), batch, output, &mut NoPreemption, out)
        });
    }

    fn began(&mut self, step: EngineStep) {
        self.callbacks.began(step);
    }
}

/// Measures the peak rate, in floating-point operations per second, of this many threads that only multiply and add in
/// registers: the upper bound of an engine's speed. Takes some milliseconds; other processes lower it as they lower the
/// speed of an engine.
pub fn peak_flops(isa: Isa, threads: NonZeroUsize) -> f64 {
    peak(threads, || isa.run(MultiplyAdd { rounds: PEAK_ROUNDS }))
}

/// Measures the peak rate of operations on bytes.
pub fn peak_byte_ops(isa: Isa, threads: NonZeroUsize) -> f64 {
    peak(threads, || MultiplyBytes { isa, rounds: PEAK_ROUNDS }.run())
}

/// A run takes a quarter of a millisecond, and the best run counts: short enough that most runs are not interrupted.
const PEAK_ROUNDS: usize = 100_000;
const PEAK_RUNS: usize = 10;

/// Returns operations per second of `work`, which returns the number of operations and a value that depends on all of
/// them.
fn peak<T>(threads: NonZeroUsize, work: impl Fn() -> (f64, T) + Sync) -> f64 {
    let once = || {
        let begin = Instant::now();
        let (operations, outcome) = work();
        std::hint::black_box(outcome);
        operations / begin.elapsed().as_secs_f64()
    };
    let best = || (0..PEAK_RUNS).map(|_| once()).fold(0.0, f64::max);
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads.get()).map(|_| scope.spawn(best)).collect();
        let each = handles.into_iter().map(|handle| handle.join().expect("arithmetic does not panic"));
        each.sum()
    })
}
