//! Batches of the server, on engines of `trtllm`.
//!
//! A batch is cut into *parts* that the engine was built for, and a part is with it while its rows are waited for. The
//! batcher asks from as many threads as [`Engine::batches_ahead`] says, and each has one part there: so one is computed, one waits behind
//! it, and everything else is in the batcher's own queue, where priorities, deadlines and cancellation are.
//!
//! Rows are waited for on the batcher's threads, which have nothing else to do; no thread of a runtime comes here. Whoever
//! goes away meanwhile is noticed within [`LOOK`], and his sequence is given up by dropping its `Pending`.

mod part;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use replica_core::{EngineKind, EngineSpec, Precision, Task};
use trtllm::packed::Positions;
use trtllm::{
    Decoder, DecoderConfig, DecoderOutput, Encoder, EncoderConfig, EngineError as Failure, Pending, Rows,
};

use self::part::{Most, Part, parts};
use super::OpenError;
use super::record::{ENGINE, Form, RecordV1};
use crate::engine::check::check;
use crate::engine::cpu::{Behind, Isa};
use crate::engine::{
    Accelerator, Description, Engine, EngineError, Failed, Meanwhile, Output, RaggedBatch, Statistics,
};
use crate::model::ModelDir;

/// How often it is looked at who still waits: a cancelled sequence saves a part of a batch, which takes about as long.
const LOOK: Duration = Duration::from_millis(20);
/// The engine has places for everything that is brought to it, but for what was given up and has not left yet. That takes a
/// batch or two; an engine that has no place for longer has stopped.
const PLACE_WITHIN: Duration = Duration::from_secs(10);
/// The part of the GPU's free memory for keys and values. An embedder keeps none from one batch to the next; what two
/// batches need is bounded by their tokens, and this bounds it on a GPU that others share.
const CACHE_FRACTION: f32 = 0.5;

/// A model on a GPU.
pub(super) struct TensorrtEngine {
    description: Description,
    runner: Runner,
    form: Form,
    behind: Behind,
    most: Most,
    /// Whether the model tells token types apart.
    typed: bool,
}

enum Runner {
    Encoder(Encoder, Positions),
    Decoder(Decoder),
}

/// A sequence that is with the engine, until it has ended.
enum Sent {
    Waiting(Pending),
    Ended(Result<Rows, String>),
}

impl TensorrtEngine {
    pub(super) fn open(
        folder: &Path,
        record: &RecordV1,
        precision: Precision,
        model: &ModelDir,
    ) -> Result<TensorrtEngine, OpenError> {
        let behind = Behind::load(model).map_err(|error| OpenError::Model(error.to_string()))?;
        let labels = model.head.as_ref().map(|head| head.labels.len());
        let width = match (record.form, labels) {
            (Form::EncoderLabels, Some(labels)) => labels,
            (Form::EncoderLabels, None) => {
                let why = "it answers with labels, and the model has none; build it as one that embeds";
                return Err(OpenError::Model(why.to_owned()));
            }
            (Form::DecoderPooled, _) if !behind.wants_the_last_token() => {
                let why = "it answers with the last token's row, and the model pools all of them; build it again with `meridian model build`";
                return Err(OpenError::Model(why.to_owned()));
            }
            (Form::DecoderPooled | Form::EncoderStates | Form::DecoderStates, _) => behind.width(),
        };
        let architecture = &model.architecture;
        let most =
            Most { sequences: record.max_batch_size as usize, tokens: record.max_batch_tokens as usize };
        let library = |error: Failure| OpenError::Library(error.to_string());
        let runner = match record.form {
            Form::EncoderStates | Form::EncoderLabels => {
                let padding = architecture.embedding.positions.and_then(|positions| positions.padding);
                let positions = padding.map_or(Positions::FromZero, Positions::AfterPadding);
                Runner::Encoder(
                    Encoder::open(&EncoderConfig { engine: folder.join(ENGINE) }).map_err(library)?,
                    positions,
                )
            }
            Form::DecoderPooled | Form::DecoderStates => {
                let config = decoder_config(folder, record, architecture.vocabulary);
                Runner::Decoder(Decoder::open(&config).map_err(library)?)
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
                stand_in: record.stand_in,
                max_batch_tokens: most.tokens as u64,
            }),
        };
        let typed = architecture.embedding.types;
        Ok(TensorrtEngine { description, runner, form: record.form, behind, most, typed })
    }

    /// What the rows of a sequence of so many tokens must be: how many, and how wide.
    fn shape(&self, tokens: usize) -> (usize, usize) {
        match self.form {
            Form::EncoderStates | Form::DecoderStates => (tokens, self.description.hidden),
            Form::DecoderPooled => (1, self.description.hidden),
            Form::EncoderLabels => (1, self.description.width),
        }
    }

    /// Computes some sequences of a batch, as many as the engine takes, and writes what is wanted of them.
    fn part(
        &self,
        part: &Part<'_>,
        output: Output,
        meanwhile: &dyn Meanwhile,
        out: &mut [f32],
    ) -> Vec<Failed> {
        let mut sent = self.send(part, meanwhile);
        self.wait(part, &mut sent, meanwhile);
        let mut failed = Vec::new();
        let mut rows = Vec::new();
        for (sequence, sent) in part.sequences.clone().zip(sent) {
            let tokens = part.range(sequence).len();
            let (count, width) = self.shape(tokens);
            let got = match sent {
                Sent::Ended(got) => got,
                Sent::Waiting(_) => Err("nobody waits for it any more".to_owned()),
            };
            let fits = got.and_then(|got| match (got.len(), got.width) {
                (len, wide) if (len, wide) == (count, width) => Ok(got),
                (len, wide) => Err(format!(
                    "the engine made {len} rows of {wide} numbers, and the model has {count} of {width} there"
                )),
            });
            match fits {
                Ok(got) => rows.extend_from_slice(&got.numbers),
                Err(reason) => {
                    rows.resize(rows.len() + count * width, 0.0);
                    failed.push(Failed { sequence, reason });
                }
            }
        }
        match (self.form, output) {
            (_, Output::Tokens) | (Form::EncoderLabels, Output::Pooled) => out.copy_from_slice(&rows),
            (Form::DecoderPooled, Output::Pooled) => self.behind.of_pooled(&rows, out),
            (Form::EncoderStates | Form::DecoderStates, Output::Pooled) => {
                self.behind.of_states(&rows, &part.batch(), out);
            }
        }
        failed
    }

    fn send(&self, part: &Part<'_>, meanwhile: &dyn Meanwhile) -> Vec<Sent> {
        match &self.runner {
            Runner::Encoder(encoder, positions) => {
                let packed = match part.packed(*positions, self.typed) {
                    Ok(packed) => packed,
                    Err(error) => return none_of(part, &error),
                };
                match place(|| encoder.submit(packed.clone())) {
                    Ok(pending) => pending.into_iter().map(Sent::Waiting).collect(),
                    Err(error) => none_of(part, &error),
                }
            }
            Runner::Decoder(decoder) => {
                let mut sent: Vec<Sent> = Vec::new();
                for sequence in part.sequences.clone() {
                    if !meanwhile.is_wanted(sequence) {
                        sent.push(Sent::Ended(Err("nobody waits for it any more".to_owned())));
                        continue;
                    }
                    let tokens = &part.whole.token_ids()[part.range(sequence)];
                    sent.push(match place(|| decoder.submit(tokens)) {
                        Ok(pending) => Sent::Waiting(pending),
                        Err(error) => Sent::Ended(Err(error.to_string())),
                    });
                }
                sent
            }
        }
    }

    /// Until all have ended, or nobody waits for those that have not.
    fn wait(&self, part: &Part<'_>, sent: &mut [Sent], meanwhile: &dyn Meanwhile) {
        let mut look = Instant::now() + LOOK;
        for index in 0..sent.len() {
            loop {
                let gone = || Sent::Ended(Err("nobody waits for it any more".to_owned()));
                match std::mem::replace(&mut sent[index], gone()) {
                    Sent::Ended(ended) => {
                        sent[index] = Sent::Ended(ended);
                        break;
                    }
                    Sent::Waiting(pending) => match pending.wait_until(look) {
                        Ok(answer) => sent[index] = Sent::Ended(answer.map_err(|error| error.to_string())),
                        Err(pending) => {
                            sent[index] = Sent::Waiting(pending);
                            for (sent, sequence) in sent.iter_mut().zip(part.sequences.clone()).skip(index) {
                                if matches!(sent, Sent::Waiting(_)) && !meanwhile.is_wanted(sequence) {
                                    *sent = gone();
                                }
                            }
                            look = Instant::now() + LOOK;
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
            Some(Failed { sequence, reason }) => {
                Err(EngineError::Broken { reason: format!("sequence {sequence}: {reason}") })
            }
        }
    }

    fn compute_each(
        &self,
        batch: &RaggedBatch<'_>,
        output: Output,
        meanwhile: &dyn Meanwhile,
        out: &mut [f32],
    ) -> Result<Vec<Failed>, EngineError> {
        check(&self.description, self.typed, batch, output, out)?;
        if output == Output::Tokens && !self.description.token_rows {
            let reason = "the engine was built for rows of sequences and has none of tokens".to_owned();
            return Err(EngineError::Broken { reason });
        }
        let mut failed = Vec::new();
        let mut rest = out;
        for sequences in parts(batch, self.most) {
            let part = Part::new(batch, sequences);
            let numbers = self.description.numbers(&part.batch(), output);
            let (out, after) = rest.split_at_mut(numbers);
            rest = after;
            failed.extend(self.part(&part, output, meanwhile, out));
        }
        Ok(failed)
    }

    /// The one that is computed, and one so that the GPU never waits for a host.
    fn batches_ahead(&self) -> usize {
        trtllm::decoder::BATCHES_AHEAD as usize
    }

    fn statistics(&self) -> Option<Statistics> {
        match &self.runner {
            Runner::Encoder(encoder, _) => {
                let trtllm::encoder::Counters { iterations, completed, taken_apart } = encoder.counters();
                Some(Statistics { iterations, completed, taken_apart, ..Statistics::default() })
            }
            Runner::Decoder(decoder) => {
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
                Some(Statistics { iterations, busy_ms, completed, active, queued, gpu_bytes, taken_apart: 0 })
            }
        }
    }
}

/// None of them went to the engine.
fn none_of(part: &Part<'_>, error: &Failure) -> Vec<Sent> {
    part.sequences.clone().map(|_| Sent::Ended(Err(error.to_string()))).collect()
}

/// Brings something to the engine, waiting for those to leave who were given up.
fn place<T>(mut submit: impl FnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    let end = Instant::now() + PLACE_WITHIN;
    loop {
        match submit() {
            Err(Failure::Overloaded) if Instant::now() < end => thread::sleep(Duration::from_millis(1)),
            submitted => return submitted,
        }
    }
}

fn decoder_config(folder: &Path, record: &RecordV1, vocabulary: usize) -> DecoderConfig {
    let tensor = record.tensor.clone();
    DecoderConfig {
        directory: folder.to_owned(),
        output: match record.form {
            Form::DecoderStates => DecoderOutput::States(tensor),
            Form::DecoderPooled | Form::EncoderStates | Form::EncoderLabels => DecoderOutput::Pooled(tensor),
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
