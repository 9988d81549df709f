//! Comparison of engines with the reference, which is the CPU engine in f32.
//!
//! All engines compute the same texts, which are the same on every machine. An embedding model is compared by the
//! cosines of its vectors; a reranker by the share of document pairs in the same order; a classifier by the share of
//! equal first labels. If both engines output the rows of tokens, models with labels are compared by their cosines as
//! well, because the order can be right by chance with wrong numbers.
//!
//! 1. [`judge`]: requirements for each precision, and their evaluation; without any engine.
//! 2. This module: computation.

pub mod judge;

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::thread::available_parallelism;

use replica_api::input::Readable;
use replica_core::{EngineKind, EngineSpec, Precision, Task};

use self::judge::{DecisionAgreement, EngineVerdict, judge};
use crate::cache::{CachedModel, ModelCache};
use crate::engine::cpu::{CpuEngine, CpuOptions, PackedCache};
use crate::engine::{BatchBuffer, Engine, Output, tensorrt};
use crate::model::ModelDir;
use crate::tokenize::{TextInput, Tokenized};
use crate::tune::quality::cosine;
use crate::tune::texts;

/// Engine to which all others are compared.
pub const REFERENCE: EngineSpec = EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 };
/// Number of texts; for a reranker, documents and queries together.
pub const TEXTS: usize = 200;
/// Number of queries among the texts; each ranks its share of the documents.
const QUERIES: usize = 8;
/// Texts in a batch.
const BATCH: usize = 16;

/// Reason why engines cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// An engine cannot be loaded or failed.
    #[error("{engine}: {reason}")]
    Engine {
        /// Kind and precision of the engine.
        engine: String,
        /// Error message.
        reason: String,
    },
    /// `meridian model verify` cannot read the model; the text has the cause.
    #[error("the model cannot be read: {0}")]
    Model(String),
    /// `meridian model verify` has fixed texts, and the model accepts none of them.
    #[error("all texts are too long for this model, so engines cannot be compared")]
    NoTexts,
}

/// Outputs of an engine for all texts.
struct EngineOutputs {
    /// Row of each text or pair, as served.
    rows: Vec<Vec<f32>>,
    /// Rows of the tokens of each text, if the engine outputs them.
    tokens: Option<Vec<Vec<f32>>>,
}

/// Compares engines with the reference, in this order.
pub fn run(
    cache: &ModelCache,
    cached: &CachedModel,
    engines: &[EngineSpec],
) -> Result<Vec<EngineVerdict>, VerifyError> {
    let model = ModelDir::open(&cached.path).map_err(|error| VerifyError::Model(error.to_string()))?;
    let reference = open(cache.root(), cached, &model, REFERENCE)?;
    let mut opened = Vec::new();
    for spec in engines {
        opened.push((*spec, open(cache.root(), cached, &model, *spec)?));
    }
    // Input limit that all engines support.
    let most = opened.iter().map(|(_, engine)| engine.describe().max_tokens).min();
    let most = most.unwrap_or(usize::MAX).min(reference.describe().max_tokens);
    let ranks = model.head.as_ref().is_some_and(|head| head.labels.len() == 1);
    let texts = read(&model, &*reference, most, ranks)?;
    let expected = compute_all(&*reference, REFERENCE, &texts)?;
    let mut verdicts = Vec::new();
    for (spec, engine) in opened {
        let outputs = compute_all(&*engine, spec, &texts)?;
        let (cosines, agreement) = compare(&expected, &outputs, &texts, reference.describe().task, ranks);
        verdicts.push(judge(spec, &cosines, agreement));
    }
    Ok(verdicts)
}

fn compare(
    expected: &EngineOutputs,
    outputs: &EngineOutputs,
    texts: &VerificationTexts,
    task: Task,
    ranks: bool,
) -> (Vec<f64>, Option<DecisionAgreement>) {
    let cosines = |a: &[Vec<f32>], b: &[Vec<f32>]| a.iter().zip(b).map(|(a, b)| cosine(a, b)).collect();
    if task == Task::Embed {
        return (cosines(&expected.rows, &outputs.rows), None);
    }
    let of_tokens = match (&expected.tokens, &outputs.tokens) {
        (Some(expected), Some(outputs)) => cosines(expected, outputs),
        _ => Vec::new(),
    };
    let agreement = if ranks {
        let scores = |rows: &[Vec<f32>]| rows.iter().map(|row| row[0]).collect::<Vec<f32>>();
        judge::order_agreement(&texts.query_of, &scores(&expected.rows), &scores(&outputs.rows))
    } else {
        judge::label_agreement(&expected.rows, &outputs.rows)
    };
    (of_tokens, Some(agreement))
}

fn open(
    root: &Path,
    cached: &CachedModel,
    model: &ModelDir,
    spec: EngineSpec,
) -> Result<Arc<dyn Engine>, VerifyError> {
    let EngineSpec { kind, precision } = spec;
    let failed = |reason: String| VerifyError::Engine { engine: format!("{kind} {precision}"), reason };
    match kind {
        EngineKind::Cpu => {
            let threads = available_parallelism().unwrap_or(NonZeroUsize::MIN);
            let packed = Some(PackedCache::below(root, &cached.digest));
            let options = CpuOptions { threads, precision, packed, isa: None };
            let engine = CpuEngine::load(model, options).map_err(|error| failed(error.to_string()))?;
            Ok(Arc::new(engine))
        }
        EngineKind::TensorrtLlm => {
            tensorrt::open(root, &cached.digest, precision, model).map_err(|error| failed(error.to_string()))
        }
    }
}

/// Texts, or pairs of a query and a document.
struct VerificationTexts {
    tokens: Vec<Tokenized>,
    /// Index of the query of each pair; 0 for texts.
    query_of: Vec<usize>,
}

fn read(
    model: &ModelDir,
    reference: &dyn Engine,
    most: usize,
    ranks: bool,
) -> Result<VerificationTexts, VerifyError> {
    let described = reference.describe();
    let readable = Readable { max_input_tokens: most, vocabulary: described.vocabulary };
    let (query_of, inputs): (Vec<usize>, Vec<TextInput>) =
        inputs(texts::sentences(TEXTS), ranks).into_iter().unzip();
    let read = texts::tokenized(model, readable, described.token_types, 1, inputs);
    let read = read.map_err(VerifyError::Model)?.into_iter().zip(query_of);
    let (tokens, query_of) = read.filter_map(|(tokens, query)| Some((tokens?, query))).unzip();
    let texts = VerificationTexts { tokens, query_of };
    if texts.tokens.is_empty() { Err(VerifyError::NoTexts) } else { Ok(texts) }
}

/// Returns the inputs with the indices of their queries.
fn inputs(mut sentences: Vec<String>, ranks: bool) -> Vec<(usize, TextInput)> {
    if !ranks {
        return sentences.into_iter().map(|text| (0, TextInput::One(text))).collect();
    }
    let documents = sentences.split_off(QUERIES);
    let queries: Vec<Arc<str>> = sentences.into_iter().map(Arc::from).collect();
    let pair = |(index, document)| {
        let query = index % queries.len();
        (query, TextInput::Pair(Arc::clone(&queries[query]), document))
    };
    documents.into_iter().enumerate().map(pair).collect()
}

fn compute_all(
    engine: &dyn Engine,
    spec: EngineSpec,
    texts: &VerificationTexts,
) -> Result<EngineOutputs, VerifyError> {
    let described = engine.describe();
    let wants_tokens = described.task == Task::Classify && described.token_rows;
    let mut outputs = EngineOutputs { rows: Vec::new(), tokens: wants_tokens.then(Vec::new) };
    for texts in texts.tokens.chunks(BATCH) {
        let mut buffer = BatchBuffer::default();
        texts.iter().for_each(|text| buffer.push(&text.ids, text.types.as_deref()));
        let batch = buffer.batch();
        let compute = |output| {
            let mut out = vec![0.0; described.numbers(&batch, output)];
            let EngineSpec { kind, precision } = spec;
            let computed = engine.compute(&batch, output, &mut out);
            computed.map(|()| out).map_err(|error| VerifyError::Engine {
                engine: format!("{kind} {precision}"),
                reason: error.to_string(),
            })
        };
        let rows = compute(Output::Pooled)?;
        outputs.rows.extend(rows.chunks_exact(described.width).map(<[f32]>::to_vec));
        if let Some(tokens) = &mut outputs.tokens {
            let rows = compute(Output::Tokens)?;
            let hidden = described.hidden;
            tokens.extend(
                batch.sequences().map(|range| rows[range.start * hidden..range.end * hidden].to_vec()),
            );
        }
    }
    Ok(outputs)
}

/// Returns the engines of a model that are available on this machine, except for the reference: CPU engines, and those
/// that were built and are in the cache.
pub fn available_engines(root: &Path, digest: &str) -> Vec<EngineSpec> {
    let mut found = BTreeSet::new();
    for kind in EngineKind::ALL.iter().copied() {
        for precision in kind.precisions().iter().copied() {
            let is_available = match kind {
                EngineKind::Cpu => true,
                EngineKind::TensorrtLlm => {
                    tensorrt::record::folder(root, digest, precision).join(tensorrt::record::FILE).is_file()
                }
            };
            if is_available {
                found.insert(EngineSpec { kind, precision });
            }
        }
    }
    found.remove(&REFERENCE);
    found.into_iter().collect()
}
