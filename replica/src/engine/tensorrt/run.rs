//! Engine on the runtimes of `trtllm`.
//!
//! A batch is divided into *parts* within the limits of the engine, and the calling thread submits a part and waits for
//! its rows. The batcher calls from [`Engine::batches_ahead`] threads, each with one part: so one part is computed, one
//! is queued in the runtime, and the rest is in the batcher's own queue, which handles priorities, deadlines and
//! cancellation.
//!
//! The batcher's threads wait for rows and have no other work; no thread of an async runtime is blocked. A request that
//! is cancelled meanwhile is detected within [`CANCELLATION_POLL`], and its sequence is cancelled by dropping its
//! `Pending`.

mod part;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use replica_core::{EngineKind, EngineSpec, Precision, Task};
use trtllm::packed::Positions;
use trtllm::{
    Decoder, DecoderConfig, Encoder, EncoderConfig, EngineRows, ExecutorError as Failure, OutputTensor,
    Pending,
};

use self::part::{Part, PartLimits, parts};
use super::TensorrtOpenError;
use super::record::{ENGINE, EngineRecordV1, Form};
use crate::engine::check::check;
use crate::engine::cpu::{Isa, OutputHead};
use crate::engine::{
    Accelerator, BatchCallbacks, Description, Engine, EngineError, FailedSequence, Output, RaggedBatch,
    Statistics,
};
use crate::model::ModelDir;

/// Interval of checks for cancelled requests: a cancelled sequence saves a part of a batch, which takes about this
/// long.
const CANCELLATION_POLL: Duration = Duration::from_millis(20);
/// Longest wait for a free slot of the engine. The engine has slots for everything that is submitted, except while
/// cancelled sequences are still in it. They leave within a batch or two; an engine without a free slot for longer has
/// stopped.
const SLOT_TIMEOUT: Duration = Duration::from_secs(10);
/// Fraction of the GPU's free memory for the key-value cache. An embedding model keeps no keys from one batch to the
/// next; the need of two batches is limited by their tokens, and this limits it on a GPU that is shared.
const CACHE_FRACTION: f32 = 0.5;

/// Model on a GPU.
pub(super) struct TensorrtEngine {
    description: Description,
    runner: EngineRuntime,
    form: Form,
    head: OutputHead,
    most: PartLimits,
    /// Whether the model has token types.
    typed: bool,
}

enum EngineRuntime {
    Encoder(Encoder, Positions),
    Decoder(Decoder),
}

/// Sequence that was submitted to the engine, until it has ended.
enum SubmittedSequence {
    Waiting(Pending),
    Ended(Result<EngineRows, String>),
}

impl TensorrtEngine {
    pub(super) fn open(
        folder: &Path,
        record: &EngineRecordV1,
        precision: Precision,
        model: &ModelDir,
    ) -> Result<TensorrtEngine, TensorrtOpenError> {
        let head = OutputHead::load(model).map_err(|error| TensorrtOpenError::Model(error.to_string()))?;
        let labels = model.head.as_ref().map(|head| head.labels.len());
        let width = match (record.form, labels) {
            (Form::EncoderLabels, Some(labels)) => labels,
            (Form::EncoderLabels, None) => {
                let reason = "it returns labels, and the model has none; build it as an embedding model";
                return Err(TensorrtOpenError::Model(reason.to_owned()));
            }
            (Form::DecoderPooled, _) if !head.pools_last_token() => {
                let reason = "it returns the last token's row, and the model pools all of them; build it again with `meridian model build`";
                return Err(TensorrtOpenError::Model(reason.to_owned()));
            }
            (Form::DecoderPooled | Form::EncoderStates | Form::DecoderStates, _) => head.width(),
        };
        let architecture = &model.architecture;
        let most = PartLimits {
            sequences: record.max_batch_size as usize,
            tokens: record.max_batch_tokens as usize,
        };
        let library = |error: Failure| TensorrtOpenError::Library(error.to_string());
        let runner = match record.form {
            Form::EncoderStates | Form::EncoderLabels => {
                let padding = architecture.embedding.positions.and_then(|positions| positions.padding);
                let positions = padding.map_or(Positions::FromZero, Positions::AfterPadding);
                EngineRuntime::Encoder(
                    Encoder::open(&EncoderConfig { engine: folder.join(ENGINE) }).map_err(library)?,
                    positions,
                )
            }
            Form::DecoderPooled | Form::DecoderStates => {
                let config = decoder_config(folder, record, architecture.vocabulary);
                EngineRuntime::Decoder(Decoder::open(&config).map_err(library)?)
            }
        };
        let description = Description {
            engine: EngineSpec { kind: EngineKind::TensorrtLlm, precision },
            architecture: architecture.family.clone(),
            task: if model.head.is_some() { Task::Classify } else { Task::Embed },
            width,
            hidden: architecture.hidden,
            token_rows: matches!(record.form, Form::EncoderStates | Form::DecoderStates),
            max_tokens: model.sentence.max_tokens.min(record.max_tokens as usize),
            vocabulary: architecture.vocabulary,
            token_types: architecture.token_types,
            instruction_set: Isa::best().name().to_owned(),
            threads: 1,
            accelerator: Some(Accelerator {
                gpu: record.gpu.clone(),
                tensorrt: record.tensorrt.clone(),
                tensorrt_llm: record.tensorrt_llm.clone(),
                test_double: record.test_double,
                max_batch_tokens: most.tokens as u64,
            }),
        };
        let typed = architecture.embedding.types;
        Ok(TensorrtEngine { description, runner, form: record.form, head, most, typed })
    }

    /// Returns the expected number and width of the rows of a sequence with this number of tokens.
    fn shape(&self, tokens: usize) -> (usize, usize) {
        match self.form {
            Form::EncoderStates | Form::DecoderStates => (tokens, self.description.hidden),
            Form::DecoderPooled => (1, self.description.hidden),
            Form::EncoderLabels => (1, self.description.width),
        }
    }

    /// Computes some sequences of a batch within the limits of the engine, and writes the requested output.
    fn part(
        &self,
        part: &Part<'_>,
        output: Output,
        callbacks: &dyn BatchCallbacks,
        out: &mut [f32],
    ) -> Vec<FailedSequence> {
        let mut submitted = self.send(part, callbacks);
        self.wait(part, &mut submitted, callbacks);
        let mut failed = Vec::new();
        let mut rows = Vec::new();
        for (sequence, submitted) in part.sequences.clone().zip(submitted) {
            let tokens = part.range(sequence).len();
            let (count, width) = self.shape(tokens);
            let computed = match submitted {
                SubmittedSequence::Ended(computed) => computed,
                SubmittedSequence::Waiting(_) => Err("the request was cancelled".to_owned()),
            };
            let fits = computed.and_then(|computed| match (computed.len(), computed.width) {
                (len, actual_width) if (len, actual_width) == (count, width) => Ok(computed),
                (len, actual_width) => Err(format!(
                    "the engine returned {len} rows of {actual_width} numbers, and the model requires {count} of {width}"
                )),
            });
            match fits {
                Ok(computed) => rows.extend_from_slice(&computed.numbers),
                Err(reason) => {
                    rows.resize(rows.len() + count * width, 0.0);
                    failed.push(FailedSequence { sequence, reason });
                }
            }
        }
        match (self.form, output) {
            (_, Output::Tokens) | (Form::EncoderLabels, Output::Pooled) => out.copy_from_slice(&rows),
            (Form::DecoderPooled, Output::Pooled) => self.head.of_pooled(&rows, out),
            (Form::EncoderStates | Form::DecoderStates, Output::Pooled) => {
                self.head.of_states(&rows, &part.batch(), out);
            }
        }
        failed
    }

    fn send(&self, part: &Part<'_>, callbacks: &dyn BatchCallbacks) -> Vec<SubmittedSequence> {
        match &self.runner {
            EngineRuntime::Encoder(encoder, positions) => {
                let packed = match part.packed(*positions, self.typed) {
                    Ok(packed) => packed,
                    Err(error) => return none_of(part, &error),
                };
                match wait_for_slot(|| encoder.submit(packed.clone())) {
                    Ok(pending) => pending.into_iter().map(SubmittedSequence::Waiting).collect(),
                    Err(error) => none_of(part, &error),
                }
            }
            EngineRuntime::Decoder(decoder) => {
                let mut submitted: Vec<SubmittedSequence> = Vec::new();
                for sequence in part.sequences.clone() {
                    if !callbacks.is_needed(sequence) {
                        submitted.push(SubmittedSequence::Ended(Err("the request was cancelled".to_owned())));
                        continue;
                    }
                    let tokens = &part.whole.token_ids()[part.range(sequence)];
                    submitted.push(match wait_for_slot(|| decoder.submit(tokens)) {
                        Ok(pending) => SubmittedSequence::Waiting(pending),
                        Err(error) => SubmittedSequence::Ended(Err(error.to_string())),
                    });
                }
                submitted
            }
        }
    }

    /// Waits until all sequences have ended, or the remaining ones are cancelled.
    fn wait(&self, part: &Part<'_>, submitted: &mut [SubmittedSequence], callbacks: &dyn BatchCallbacks) {
        let mut next_check = Instant::now() + CANCELLATION_POLL;
        for index in 0..submitted.len() {
            loop {
                let cancelled = || SubmittedSequence::Ended(Err("the request was cancelled".to_owned()));
                match std::mem::replace(&mut submitted[index], cancelled()) {
                    SubmittedSequence::Ended(ended) => {
                        submitted[index] = SubmittedSequence::Ended(ended);
                        break;
                    }
                    SubmittedSequence::Waiting(pending) => match pending.wait_until(next_check) {
                        Ok(result) => {
                            submitted[index] =
                                SubmittedSequence::Ended(result.map_err(|error| error.to_string()))
                        }
                        Err(pending) => {
                            submitted[index] = SubmittedSequence::Waiting(pending);
                            for (submitted, sequence) in
                                submitted.iter_mut().zip(part.sequences.clone()).skip(index)
                            {
                                if matches!(submitted, SubmittedSequence::Waiting(_))
                                    && !callbacks.is_needed(sequence)
                                {
                                    *submitted = cancelled();
                                }
                            }
                            next_check = Instant::now() + CANCELLATION_POLL;
                        }
                    },
                }
            }
        }
    }
}

impl Engine for TensorrtEngine {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn compute(&self, batch: &RaggedBatch<'_>, output: Output, out: &mut [f32]) -> Result<(), EngineError> {
        let failed = self.compute_each(batch, output, &|_| true, out)?;
        match failed.into_iter().next() {
            None => Ok(()),
            Some(FailedSequence { sequence, reason }) => {
                Err(EngineError::Broken { reason: format!("sequence {sequence}: {reason}") })
            }
        }
    }

    fn compute_each(
        &self,
        batch: &RaggedBatch<'_>,
        output: Output,
        callbacks: &dyn BatchCallbacks,
        out: &mut [f32],
    ) -> Result<Vec<FailedSequence>, EngineError> {
        check(&self.description, self.typed, batch, output, out)?;
        if output == Output::Tokens && !self.description.token_rows {
            let reason =
                "the engine was built for rows of sequences and does not return rows of tokens".to_owned();
            return Err(EngineError::Broken { reason });
        }
        let mut failed = Vec::new();
        let mut rest = out;
        for sequences in parts(batch, self.most) {
            let part = Part::new(batch, sequences);
            let numbers = self.description.numbers(&part.batch(), output);
            let (out, after) = rest.split_at_mut(numbers);
            rest = after;
            failed.extend(self.part(&part, output, callbacks, out));
        }
        Ok(failed)
    }

    /// One that is computed, and one that is queued so that the GPU never waits for the host.
    fn batches_ahead(&self) -> usize {
        trtllm::decoder::BATCHES_AHEAD as usize
    }

    fn statistics(&self) -> Option<Statistics> {
        match &self.runner {
            EngineRuntime::Encoder(encoder, _) => {
                let trtllm::encoder::Counters { iterations, completed, retried_batches } = encoder.counters();
                Some(Statistics { iterations, completed, retried_batches, ..Statistics::default() })
            }
            EngineRuntime::Decoder(decoder) => {
                let trtllm::decoder::Counters {
                    iterations,
                    busy_ms,
                    completed,
                    active,
                    queued,
                    gpu_bytes,
                    pending: _,
                } = decoder.counters().ok()?;
                let busy_ms = busy_ms as u64;
                Some(Statistics {
                    iterations,
                    busy_ms,
                    completed,
                    active,
                    queued,
                    gpu_bytes,
                    retried_batches: 0,
                })
            }
        }
    }
}

/// Returns the same error for all sequences of the part.
fn none_of(part: &Part<'_>, error: &Failure) -> Vec<SubmittedSequence> {
    part.sequences.clone().map(|_| SubmittedSequence::Ended(Err(error.to_string()))).collect()
}

/// Submits to the engine; waits for cancelled sequences to leave if it has no free slot.
fn wait_for_slot<T>(mut submit: impl FnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    let end = Instant::now() + SLOT_TIMEOUT;
    loop {
        match submit() {
            Err(Failure::Overloaded) if Instant::now() < end => thread::sleep(Duration::from_millis(1)),
            submitted => return submitted,
        }
    }
}

fn decoder_config(folder: &Path, record: &EngineRecordV1, vocabulary: usize) -> DecoderConfig {
    let tensor = record.tensor.clone();
    DecoderConfig {
        directory: folder.to_owned(),
        output: match record.form {
            Form::DecoderStates => OutputTensor::States(tensor),
            Form::DecoderPooled | Form::EncoderStates | Form::EncoderLabels => OutputTensor::Pooled(tensor),
        },
        max_batch_size: record.max_batch_size,
        max_batch_tokens: record.max_batch_tokens,
        max_tokens: record.max_tokens,
        vocabulary: u32::try_from(vocabulary).unwrap_or(u32::MAX),
        cache_fraction: CACHE_FRACTION,
    }
}

#[cfg(all(test, feature = "tensorrt-llm-double"))]
mod tests;
