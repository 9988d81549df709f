//! Measurement of settings on the real engine; the only module of tuning that uses a clock.
//!
//! Batches have the lengths of typical traffic (log-normal, as in the benchmarks) and random token ids: the compute
//! time does not depend on them. Engines stay loaded, because runs alternate between them; their weights are
//! memory-mapped, and idle threads sleep.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use replica_core::Precision;

use super::TuneError;
use super::curve::{MeasurementRun, Setting};
use super::quality::{Quality, cosine};
use crate::engine::cpu::{CpuEngine, CpuOptions, PackedCache};
use crate::engine::{BatchBuffer, Engine, Output};
use crate::model::ModelDir;
use crate::tokenize::Tokenized;

/// Duration of a run, and at least one batch. It is longer than a time slice of the scheduler.
const RUN_TIME: Duration = Duration::from_millis(250);
/// Median of the lengths, in tokens, and the standard deviation of their logarithm.
const MEDIAN_TOKENS: f64 = 40.0;
const LOG_STANDARD_DEVIATION: f64 = 0.8;
/// Minimum length.
const MIN_TOKENS: usize = 8;
const SEED: u64 = 7;

/// A model with all engines loaded so far.
pub(super) struct Bench {
    pub(super) model: ModelDir,
    packed: PackedCache,
    engines: BTreeMap<(Precision, NonZeroUsize), CpuEngine>,
}

impl Bench {
    pub(super) fn new(model: ModelDir, packed: PackedCache) -> Bench {
        Bench { model, packed, engines: BTreeMap::new() }
    }

    /// Runs batches of this setting for [`RUN_TIME`].
    pub(super) fn run(&mut self, setting: Setting) -> Result<MeasurementRun, TuneError> {
        let Setting { precision, threads, batch_tokens } = setting;
        let engine = self.engine(precision, threads)?;
        let batch = batch(engine, batch_tokens);
        let mut out = vec![0.0; batch.batch().len() * engine.describe().width];
        let mut compute = || -> Result<Duration, TuneError> {
            let begin = Instant::now();
            engine.compute(&batch.batch(), Output::Pooled, &mut out).map_err(TuneError::engine)?;
            Ok(begin.elapsed())
        };
        // The first batch after another setting warms up caches and threads; it counts only if it takes the whole time.
        let first = compute()?;
        if first >= RUN_TIME {
            return Ok(MeasurementRun { tokens: batch_tokens, batches: vec![first] });
        }
        let (begin, mut batches) = (Instant::now(), Vec::new());
        while begin.elapsed() < RUN_TIME {
            batches.push(compute()?);
        }
        Ok(MeasurementRun { tokens: batch_tokens, batches })
    }

    /// Compares this precision with the reference by the cosines of the texts' rows. Ends after `time`.
    pub(super) fn quality(
        &mut self,
        precision: Precision,
        reference: Precision,
        threads: NonZeroUsize,
        texts: &[Tokenized],
        time: Duration,
    ) -> Result<Quality, TuneError> {
        let begin = Instant::now();
        let mut cosines = Vec::new();
        for text in texts {
            if begin.elapsed() >= time && !cosines.is_empty() {
                break;
            }
            let expected = rows(self.engine(reference, threads)?, text)?;
            cosines.push(cosine(&expected, &rows(self.engine(precision, threads)?, text)?));
        }
        Quality::of(&cosines).ok_or(TuneError::NoTexts)
    }

    pub(super) fn engine(
        &mut self,
        precision: Precision,
        threads: NonZeroUsize,
    ) -> Result<&CpuEngine, TuneError> {
        let key = (precision, threads);
        if !self.engines.contains_key(&key) {
            let options = CpuOptions { threads, precision, packed: Some(self.packed.clone()), isa: None };
            let engine = CpuEngine::load(&self.model, options).map_err(TuneError::engine)?;
            self.engines.insert(key, engine);
        }
        Ok(&self.engines[&key])
    }
}

/// Returns the engine's rows for a text: the vector of an embedding model, else the hidden states of the tokens,
/// because logits depend too little on the precision, and those of a single label always have the same direction.
fn rows(engine: &CpuEngine, text: &Tokenized) -> Result<Vec<f32>, TuneError> {
    let described = engine.describe();
    let (output, numbers) = match described.task {
        replica_core::Task::Embed => (Output::Pooled, described.width),
        replica_core::Task::Classify => (Output::Tokens, described.hidden * text.ids.len()),
    };
    let mut batch = BatchBuffer::default();
    batch.push(&text.ids, text.types.as_deref());
    let mut rows = vec![0.0; numbers];
    engine.compute(&batch.batch(), output, &mut rows).map_err(TuneError::engine)?;
    Ok(rows)
}

/// Returns a batch of exactly this many tokens, the same in every call.
fn batch(engine: &CpuEngine, tokens: u64) -> BatchBuffer {
    let described = engine.describe();
    let mut random = SmallRng::seed_from_u64(SEED);
    let mut batch = BatchBuffer::default();
    let mut left = usize::try_from(tokens).expect("budgets are small");
    while left > 0 {
        let length = length(&mut random).min(described.max_tokens).min(left);
        let ids: Vec<u32> =
            (0..length).map(|_| random.random_range(0..described.vocabulary as u32)).collect();
        batch.push(&ids, None);
        left -= length;
    }
    batch
}

fn length(random: &mut SmallRng) -> usize {
    // The sum of twelve uniform numbers approximates a normal distribution sufficiently.
    let normal = (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0;
    ((MEDIAN_TOKENS * (LOG_STANDARD_DEVIATION * normal).exp()) as usize).max(MIN_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cosine_is_one_for_equal_and_minus_one_for_opposite_vectors() {
        let vector = [0.5, -2.0, 3.0];
        assert!((cosine(&vector, &vector) - 1.0).abs() < 1e-12);
        assert!((cosine(&vector, &vector.map(|x| -2.0 * x)) + 1.0).abs() < 1e-12);
        assert_eq!(cosine(&[1.0, 0.0], &[0.0, 1.0]), 0.0);
    }

    #[test]
    fn lengths_follow_the_distribution_of_typical_texts() {
        let mut random = SmallRng::seed_from_u64(SEED);
        let mut lengths: Vec<usize> = (0..1000).map(|_| length(&mut random)).collect();
        lengths.sort_unstable();
        assert!((35..=45).contains(&lengths[500]), "the median is {}", lengths[500]);
        assert!(lengths[0] >= MIN_TOKENS && lengths[990] > 150, "{lengths:?}");
    }
}
