//! Small real models on engines of the test double, whose numbers are recomputed here.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use replica_api::priority::Priority;
use replica_core::batch::BatchSettings;

use super::*;
use crate::batcher::{Batcher, ComputeRequest, Options};
use crate::engine::BatchBuffer;
use crate::tokenize::Tokenized;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/families");
const HIDDEN: u64 = 32;
const SEQUENCES: [&[u32]; 5] = [&[5, 6, 7, 8], &[9], &[10, 11], &[12, 13, 14], &[15]];
/// Timeout of conditions; longer than any operation takes.
const TIMEOUT: Duration = Duration::from_secs(30);

fn model(family: &str) -> ModelDir {
    ModelDir::open(&Path::new(GOLDEN).join(family)).expect(family)
}

/// Opens the engine of a family, and returns it with its directory.
fn open(
    family: &str,
    form: Form,
    lines: &str,
) -> Result<(TensorrtEngine, tempfile::TempDir), TensorrtOpenError> {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = format!("stand-in 1\nhidden {HIDDEN}\nvocabulary 110\n{lines}\n");
    std::fs::write(folder.path().join(ENGINE), plan).expect("a file");
    let record = EngineRecordV1 {
        version: 1,
        model: String::new(),
        precision: "bf16".to_owned(),
        tensor_parallel: 1,
        form,
        tensor: "pooled".to_owned(),
        max_batch_size: 2,
        max_batch_tokens: 6,
        max_tokens: 4,
        gpu: String::new(),
        tensorrt: String::new(),
        tensorrt_llm: String::new(),
        test_double: true,
        files: Default::default(),
    };
    TensorrtEngine::open(folder.path(), &record, Precision::Bf16, &model(family))
        .map(|engine| (engine, folder))
}

fn engine(family: &str, form: Form, lines: &str) -> (TensorrtEngine, tempfile::TempDir) {
    open(family, form, lines).expect("an engine")
}

fn batch() -> BatchBuffer {
    SEQUENCES.into_iter().collect()
}

fn pooled(engine: &TensorrtEngine) -> Vec<f32> {
    let mut rows = vec![0.0; SEQUENCES.len() * engine.describe().width];
    engine.compute(&batch().batch(), Output::Pooled, &mut rows).expect("rows");
    rows
}

fn mixed(state: u64, column: u64) -> f32 {
    ((state * 31 + column * 7) % 251) as f32
}

/// Returns the test double's output of a decoder for each token.
fn decoded(tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut state = 3;
    let rows = tokens.iter().map(|token| {
        state = (state * 33 + u64::from(*token) + 1) % 1_000_003;
        (0..HIDDEN).map(|column| mixed(state, column)).collect()
    });
    rows.collect()
}

/// Returns the output of an encoder for a sequence without types.
fn encoded(tokens: &[u32], first: u64, column: u64) -> f32 {
    let states = tokens.iter().zip(first..).map(|(token, position)| u64::from(*token) * 13 + position * 17);
    mixed(states.sum(), column)
}

/// Compares sums of some tens of f32, which are added in another order here.
#[track_caller]
fn assert_near(given: &[f32], expected: &[f32]) {
    assert_eq!(given.len(), expected.len());
    for (given, expected) in given.iter().zip(expected) {
        assert!((given - expected).abs() <= 1e-4 * expected.abs().max(1.0), "{given} and {expected}");
    }
}

#[test]
fn a_label_head_reads_the_tapped_row_of_the_last_token() {
    let (engine, _folder) = engine("llama_rerank", Form::DecoderPooled, "");
    let score = model("llama_rerank").checkpoint.tensor("score.weight", &[1, 32]).expect("a head").to_vec();
    let dot = |row: &Vec<f32>| row.iter().zip(&score).map(|(a, b)| a * b).sum::<f32>();
    let expected: Vec<f32> =
        SEQUENCES.iter().map(|tokens| dot(decoded(tokens).last().expect("a row"))).collect();
    assert_near(&pooled(&engine), &expected);
    assert!(!engine.describe().token_rows);
    let statistics = engine.statistics().expect("of the executor");
    assert_eq!(statistics.completed, SEQUENCES.len() as u64);
}

#[test]
fn an_llm_reranker_reads_the_logits_of_the_tapped_row_of_the_last_token() {
    for (family, table, vocabulary, yes, no) in [
        ("qwen3_yes_no", "model.embed_tokens.weight", 330, 321, Some(322)),
        ("llama_yes_no", "lm_head.weight", 320, 306, None),
    ] {
        let (engine, _folder) = engine(family, Form::DecoderPooled, &format!("vocabulary {vocabulary}"));
        let table = model(family).checkpoint.tensor(table, &[vocabulary, 32]).expect("a table");
        let row = |word: usize| table.rows_of(word..word + 1).to_vec();
        let no = no.map_or_else(|| vec![0.0; 32], row);
        let score = |tokens: &[u32]| -> f32 {
            let (last, yes) = (decoded(tokens).pop().expect("a row"), row(yes));
            (0..32).map(|column| last[column] * (yes[column] - no[column])).sum()
        };
        assert_near(&pooled(&engine), &SEQUENCES.map(score));
        assert_eq!((engine.describe().width, engine.describe().token_rows), (1, false), "{family}");
    }
}

#[test]
fn rows_of_tokens_are_pooled_by_the_model_or_returned_unchanged() {
    let (engine, _folder) = engine("llama", Form::DecoderStates, "");
    // The weight of each token is its position.
    let weighted = |tokens: &[u32]| -> Vec<f32> {
        let rows = decoded(tokens);
        let weights: f32 = (1..=rows.len()).map(|place| place as f32).sum();
        let column = |column: usize| -> f32 {
            rows.iter().zip(1..).map(|(row, place)| row[column] * place as f32).sum::<f32>() / weights
        };
        (0..HIDDEN as usize).map(column).collect()
    };
    assert_near(
        &pooled(&engine),
        &SEQUENCES.iter().flat_map(|tokens| weighted(tokens)).collect::<Vec<f32>>(),
    );
    let batch = batch();
    let mut rows = vec![0.0; engine.describe().numbers(&batch.batch(), Output::Tokens)];
    engine.compute(&batch.batch(), Output::Tokens, &mut rows).expect("rows");
    assert_eq!(rows, SEQUENCES.iter().flat_map(|tokens| decoded(tokens).concat()).collect::<Vec<f32>>());
}

#[test]
fn positions_of_roberta_begin_after_the_padding_token() {
    let (engine, _folder) =
        engine("xlm_roberta_rerank", Form::EncoderLabels, "types 0\noutput logits\nlabels 1");
    let expected: Vec<f32> = SEQUENCES.iter().map(|tokens| encoded(tokens, 2, 0)).collect();
    assert_eq!(pooled(&engine), expected);
}

#[test]
fn one_sequence_fails_and_the_others_have_their_rows() {
    let (engine, _folder) = engine("bert_rerank", Form::EncoderLabels, "output logits\nlabels 1\npoison 11");
    let mut rows = vec![0.0; SEQUENCES.len()];
    let failed = engine.compute_each(&batch().batch(), Output::Pooled, &|_| true, &mut rows).expect("rows");
    assert!(failed.len() == 1 && failed[0].sequence == 2, "{failed:?}");
    assert!(failed[0].reason.contains("illegal memory access"), "{failed:?}");
    for index in [0, 1, 3, 4] {
        assert_eq!(rows[index], encoded(SEQUENCES[index], 0, 0), "{index}");
    }
    let whole = engine.compute(&batch().batch(), Output::Pooled, &mut rows).expect_err("a failure");
    assert!(whole.to_string().contains("sequence 2"), "{whole}");
}

#[test]
fn a_cancelled_sequence_is_not_waited_for() {
    // Token 9 is held until it is released, which never happens.
    let (engine, _folder) = engine("llama_rerank", Form::DecoderPooled, "hold 9");
    let polls = AtomicU32::new(0);
    let needed = |sequence: usize| sequence != 1 || polls.fetch_add(1, Ordering::Relaxed) == 0;
    let mut rows = vec![0.0; SEQUENCES.len()];
    let failed = engine.compute_each(&batch().batch(), Output::Pooled, &needed, &mut rows).expect("rows");
    assert!(failed.len() == 1 && failed[0].sequence == 1, "{failed:?}");
    assert!(polls.into_inner() > 1, "the request was not cancelled at submission");
}

#[test]
fn a_batch_is_divided_by_the_limits_of_the_engine() {
    let check = |sequences: usize, tokens: usize, ends: &[usize]| {
        let parts = parts(&batch().batch(), PartLimits { sequences, tokens });
        let begins = [&[0], &ends[..ends.len() - 1]].concat();
        let expected: Vec<Range<usize>> =
            begins.into_iter().zip(ends).map(|(begin, end)| begin..*end).collect();
        assert_eq!(parts, expected, "{sequences} and {tokens}");
    };
    check(5, 11, &[5]);
    check(4, 11, &[4, 5]);
    check(5, 10, &[4, 5]);
    check(2, 6, &[2, 4, 5]);
    check(1, 6, &[1, 2, 3, 4, 5]);
}

#[test]
fn an_engine_that_does_not_match_the_model_is_rejected() {
    let refused = |family: &str, form: Form, lines: &str| match open(family, form, lines) {
        Err(error) => error.to_string(),
        Ok((engine, _folder)) => {
            let mut rows = vec![0.0; SEQUENCES.len() * engine.describe().width];
            engine.compute(&batch().batch(), Output::Pooled, &mut rows).expect_err(family).to_string()
        }
    };
    for (family, form, lines, sentence) in [
        ("bert", Form::EncoderLabels, "output logits", "the model has none"),
        ("llama", Form::DecoderPooled, "", "the model pools all of them"),
        ("bert", Form::EncoderStates, "hidden 16", "rows of 16 numbers, and the model requires 4 of 32"),
        ("bert_rerank", Form::EncoderLabels, "output logits\nlabels 2", "1 rows of 2 numbers"),
    ] {
        let error = refused(family, form, lines);
        assert!(error.contains(sentence), "{family}: {error}");
    }
}

#[test]
fn two_batches_are_in_the_engine_and_the_third_is_queued() {
    let gate = tempfile::tempdir().expect("a folder");
    let gate = gate.path().join("open");
    let lines = format!("output logits\nlabels 1\nwait_for {}", gate.display());
    let (engine, _folder) = engine("bert_rerank", Form::EncoderLabels, &lines);
    let batch = BatchSettings { batch_tokens: 4, interactive_batch_tokens: 4, ..BatchSettings::default() };
    let needed = Options { batch, max_queue_tokens: 100, cache: None, metrics: Arc::default() };
    let batcher = Batcher::start(Arc::new(engine), needed).expect("threads");
    let submit = |tokens: [u32; 4]| {
        let inputs = vec![Tokenized { ids: tokens.into(), types: None }];
        let (output, priority) = (Output::Pooled, Priority::Interactive);
        batcher
            .submit(ComputeRequest { inputs, output, priority, deadline: None, tenant: None })
            .expect("room")
    };
    let until = |description: &str, so: &dyn Fn() -> bool| {
        let end = Instant::now() + TIMEOUT;
        while !so() {
            assert!(Instant::now() < end, "{description}");
            thread::yield_now();
        }
    };
    let sequences = [[5, 6, 7, 8], [6, 7, 8, 9], [7, 8, 9, 10], [8, 9, 10, 11]];
    let mut tickets: Vec<_> = sequences.map(submit).into();
    until("two are in the engine, and two are queued", &|| batcher.interactive_tokens() == 8);
    // Of the submitted batches the second is cancelled: it is not waited for, and the third takes its slot.
    drop(tickets.remove(1));
    until("one is queued", &|| batcher.interactive_tokens() == 4);
    std::fs::write(&gate, "").expect("a file");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    for (ticket, tokens) in tickets.into_iter().zip([sequences[0], sequences[2], sequences[3]]) {
        let rows = runtime.block_on(ticket.rows()).expect("a row").rows;
        assert_eq!(rows, [encoded(&tokens, 0, 0)]);
    }
}
