//! The native engine: transformers on the CPU, in Rust.
//!
//! In reading order:
//!
//! 1. `forward` — what happens to a batch, and how it is cut; `rotation`, `distance` — what it knows of positions.
//! 2. `weights`, `linear`, `panels`, `packed`, `packed_file` — what it is multiplied with, and where that lies.
//! 3. `matrix`, `threads` — parts of a matrix that threads may write at the same time, and the threads.
//! 4. `kernel` — the arithmetic, for each instruction set.

mod byte_panels;
mod distance;
mod forward;
mod kernel;
mod laps;
mod linear;
#[expect(unsafe_code, reason = "lets threads write different parts of one matrix")]
mod matrix;
mod packed;
mod packed_file;
mod panels;
mod rotation;
#[expect(unsafe_code, reason = "lends threads what lies on the caller's stack")]
mod threads;
mod weights;

use std::io;
use std::num::NonZeroUsize;
use std::time::Instant;
use supervision::Mutex;
use supervision::request::{Panicked, contain_work};

use replica_core::{EngineKind, EngineSpec, Precision, Task};

use super::check::check;
use super::{Description, Engine, EngineError, Failed, Meanwhile, Output, RaggedBatch};
use crate::model::{ModelDir, ModelError};
use forward::{Arena, Between, Nothing, Pool, Transformer};
use kernel::{MultiplyAdd, MultiplyBytes};
use threads::Threads;
use weights::Weights;

#[cfg(feature = "tensorrt")]
pub(crate) use forward::Behind;
pub use kernel::Isa;
pub use laps::{Profile, Stage};
pub use packed::{PackedCache, WeightsPlace};

/// What a person may choose.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Threads that compute, the caller's own included.
    pub threads: NonZeroUsize,
    /// What layers and attention compute in. Tables, normalisations and heads are binary32 in any case, and so is attention
    /// that is capped, biased by distance, or over more tokens than bytes are good for.
    pub precision: Precision,
    /// Where packed weights are kept for all replicas of the model; absent = in memory of this process.
    pub packed: Option<PackedCache>,
    /// The instructions to compute with; absent = the best that there are.
    pub isa: Option<Isa>,
}

/// Why there is no engine.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The weights are not those of the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// It does not compute in this format.
    #[error("the engine `cpu` does not compute in {precision}; write \"f32\" or \"int8\"")]
    Precision {
        /// What was wanted.
        precision: Precision,
    },
    /// The system gives no more threads.
    #[error("{threads} engine threads cannot be started ({reason}); write a smaller number")]
    Threads {
        /// How many were wanted.
        threads: NonZeroUsize,
        /// What the system said.
        reason: io::Error,
    },
}

/// A model, its weights in memory and threads to compute with.
pub struct CpuEngine {
    description: Description,
    weights_place: WeightsPlace,
    transformer: Transformer,
    work: Mutex<Work>,
}

struct Work {
    threads: Threads,
    arena: Arena,
    /// For what goes between the steps of a batch.
    beside: Arena,
}

impl CpuEngine {
    /// Maps and packs the weights, and starts the threads.
    pub fn load(model: &ModelDir, options: CpuOptions) -> Result<CpuEngine, LoadError> {
        let CpuOptions { threads, precision, packed, isa } = options;
        if !EngineKind::Cpu.precisions().contains(&precision) {
            return Err(LoadError::Precision { precision });
        }
        let isa = isa.unwrap_or_else(Isa::best);
        let architecture = &model.architecture;
        let (weights, weights_place) =
            Weights::load(&model.checkpoint, architecture, precision, packed.as_ref())?;
        let pool = Pool::load(model)?;
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
        let work = Work {
            threads: Threads::new(threads).map_err(|reason| LoadError::Threads { threads, reason })?,
            arena: Arena::new(architecture),
            beside: Arena::new(architecture),
        };
        let transformer = Transformer { isa, precision, architecture: architecture.clone(), weights, pool };
        Ok(CpuEngine { description, weights_place, transformer, work: Mutex::independent(work) })
    }

    /// Whether the weights are those of the model and are numbers: all that [`CpuEngine::load`] would refuse, without the
    /// memory and the time for packing.
    pub fn check_weights(model: &ModelDir) -> Result<(), ModelError> {
        let results = [Weights::check(&model.checkpoint, &model.architecture), Pool::load(model).map(drop)];
        let problems = results.into_iter().filter_map(Result::err).flat_map(ModelError::into_all).collect();
        ModelError::of_all(problems).map_or(Ok(()), Err)
    }

    /// Where the packed weights are.
    pub fn weights_place(&self) -> &WeightsPlace {
        &self.weights_place
    }

    fn check(&self, batch: &RaggedBatch<'_>, output: Output, out: &[f32]) -> Result<(), EngineError> {
        check(&self.description, self.transformer.architecture.embedding.types, batch, output, out)
    }
}

impl CpuEngine {
    /// Computes a batch as [`Engine::compute`] does, and tells what the threads' time went to.
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
        let Work { threads, arena, .. } = &mut *work;
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
        meanwhile: &dyn Meanwhile,
        out: &mut [f32],
    ) -> Result<Vec<Failed>, EngineError> {
        let mut work = self.work.lock();
        let Work { threads, arena, beside } = &mut *work;
        let mut between = Beside { engine: self, meanwhile, arena: beside };
        self.run((threads, arena), batch, output, &mut between, out).map(|()| Vec::new())
    }
}

impl CpuEngine {
    fn run(
        &self,
        (threads, arena): (&mut Threads, &mut Arena),
        batch: &RaggedBatch<'_>,
        output: Output,
        between: &mut dyn Between,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        self.check(batch, output, out)?;
        if batch.is_empty() {
            return Ok(());
        }
        // After a panic there are only numbers in there that the next batch writes over.
        let computed = contain_work(|| self.transformer.run(threads, arena, batch, output, between, out));
        computed.map_err(|Panicked(reason)| EngineError::Broken { reason })
    }
}

/// What is more urgent than the batch at hand, in memory of its own.
struct Beside<'a> {
    engine: &'a CpuEngine,
    meanwhile: &'a dyn Meanwhile,
    arena: &'a mut Arena,
}

impl Between for Beside<'_> {
    fn is_due(&self) -> bool {
        self.meanwhile.is_urgent()
    }

    fn run(&mut self, threads: &mut Threads) {
        let Beside { engine, meanwhile, arena } = self;
        meanwhile
            .let_in(&mut |batch, output, out| engine.run((threads, arena), batch, output, &mut Nothing, out));
    }
}

/// Floating-point operations per second of this many threads that only multiply and add in registers: the ceiling of
/// every figure of an engine. Takes some milliseconds; other processes lower it as they lower those figures.
pub fn peak_flops(isa: Isa, threads: NonZeroUsize) -> f64 {
    peak(threads, || isa.run(MultiplyAdd { rounds: PEAK_ROUNDS }))
}

/// The same of operations on bytes.
pub fn peak_byte_ops(isa: Isa, threads: NonZeroUsize) -> f64 {
    peak(threads, || MultiplyBytes { isa, rounds: PEAK_ROUNDS }.run())
}

/// A quarter of a millisecond, and the best of some: short enough that most of them are not interrupted.
const PEAK_ROUNDS: usize = 100_000;
const PEAK_RUNS: usize = 10;

/// Operations per second, given what does some and comes to how many, and to something that depends on all of them.
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
