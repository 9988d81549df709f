//! Tests of encoders: packed batches on plain TensorRT.

use trtllm::{Encoder, EncoderConfig, EngineRows, ExecutorError, PackedBatch, Positions};

use crate::engines::{Engine, encoded, outcome, packed, wait_until};

const WIDTH: u64 = 8;
const LABELS: u64 = 2;
const SEQUENCES: [&[u32]; 3] = [&[5, 6, 7, 8], &[9], &[10, 11]];

fn zeros(tokens: &[u32]) -> Vec<u32> {
    vec![0; tokens.len()]
}

#[test]
fn a_ragged_batch_has_the_rows_of_its_sequences_in_every_number_format() {
    for format in ["fp32", "fp16", "bf16"] {
        for (positions, first) in [(Positions::FromZero, 0), (Positions::AfterPadding(1), 2)] {
            let engine = Engine::new(&format!("format {format}"));
            let encoder = engine.encoder();
            let pending = encoder.submit(packed(&SEQUENCES, positions)).unwrap();
            for (tokens, pending) in SEQUENCES.iter().zip(pending) {
                let (rows, _) = encoded(tokens, &zeros(tokens), first, WIDTH);
                let expected = EngineRows { width: WIDTH as usize, numbers: rows };
                assert_eq!(outcome(pending), Ok(expected), "{format} {positions:?} {tokens:?}");
            }
        }
    }
}

#[test]
fn a_cross_encoder_gets_the_token_types_of_query_and_document() {
    let engine = Engine::new("output logits");
    let encoder = engine.encoder();
    let types: [&[u32]; 2] = [&[0, 0, 1, 1, 1], &[0, 1]];
    let tokens: [&[u32]; 2] = [&[5, 6, 7, 8, 9], &[5, 6]];
    let mut batch = PackedBatch::default();
    for (tokens, types) in tokens.iter().zip(types) {
        batch.push(tokens, Some(types), Positions::FromZero).unwrap();
    }
    let pending = encoder.submit(batch).unwrap();
    for ((tokens, types), pending) in tokens.iter().zip(types).zip(pending) {
        let (_, logits) = encoded(tokens, types, 0, LABELS);
        assert_eq!(outcome(pending), Ok(EngineRows { width: LABELS as usize, numbers: logits }));
        assert_ne!(encoded(tokens, types, 0, LABELS).1, encoded(tokens, &zeros(tokens), 0, LABELS).1);
    }
}

#[test]
fn an_engine_without_an_input_for_types_gets_none() {
    let engine = Engine::new("types 0\noutput logits");
    let encoder = engine.encoder();
    let pending = encoder.submit(packed(&[&[5, 6]], Positions::AfterPadding(1))).unwrap();
    let (_, logits) = encoded(&[5, 6], &[0, 0], 2, LABELS);
    assert_eq!(
        pending.into_iter().map(outcome).collect::<Vec<_>>(),
        [Ok(EngineRows { width: LABELS as usize, numbers: logits })]
    );
}

#[test]
fn of_a_failed_batch_only_the_failing_sequence_gets_the_error() {
    let engine = Engine::new("poison 9");
    let encoder = engine.encoder();
    let pending = encoder.submit(packed(&SEQUENCES, Positions::FromZero)).unwrap();
    for (tokens, pending) in SEQUENCES.iter().zip(pending) {
        let (rows, _) = encoded(tokens, &zeros(tokens), 0, WIDTH);
        match outcome(pending) {
            Ok(computed) => assert_eq!(computed.numbers, rows),
            Err(ExecutorError::BatchFailed(error)) => {
                assert!(
                    tokens.contains(&9) && error.contains("illegal memory access"),
                    "{tokens:?}: {error}"
                );
            }
            Err(error) => panic!("{error}"),
        }
    }
    let counters = encoder.counters();
    assert_eq!((counters.iterations, counters.completed, counters.retried_batches), (4, 2, 1));
}

#[test]
fn batches_hold_at_the_limits_of_the_engine_and_larger_ones_are_rejected() {
    let engine = Engine::new("input_ids 6\ninput_lengths 2\nmax_input_length 4");
    let encoder = engine.encoder();
    let submit = |sequences: &[&[u32]]| encoder.submit(packed(sequences, Positions::FromZero));
    for fits in [&[&[1, 2, 3, 4][..], &[5, 6]][..], &[&[1, 2, 3], &[4, 5, 6]]] {
        submit(fits).unwrap().into_iter().for_each(|pending| drop(outcome(pending).unwrap()));
    }
    for (too_large, description) in [
        (&[&[1, 2, 3, 4][..], &[5, 6, 7]][..], "7 tokens in a batch"),
        (&[&[1], &[2], &[3]], "3 sequences"),
        (&[&[1, 2, 3, 4, 5]], "5 tokens in a sequence"),
        (&[], "empty"),
    ] {
        let error = submit(too_large).unwrap_err().to_string();
        assert!(error.contains(description), "{error}");
    }
}

/// Returns an engine that computes once the gate file exists.
fn slow() -> (Engine, tempfile::TempDir) {
    let gate = tempfile::tempdir().expect("a folder");
    (Engine::new(&format!("wait_for {}", gate.path().join("open").display())), gate)
}

fn open(gate: &tempfile::TempDir) {
    std::fs::write(gate.path().join("open"), "").expect("a file");
}

#[test]
fn a_batch_beyond_the_queue_is_rejected_and_cancelled_sequences_are_not_computed() {
    let (engine, gate) = slow();
    let encoder = engine.encoder();
    let batch = || packed(&SEQUENCES, Positions::FromZero);
    let computed = encoder.submit(batch()).unwrap();
    let mut waiting = Vec::new();
    wait_until("two batches are queued and a third is rejected", || match encoder.submit(batch()) {
        Ok(pending) => {
            waiting.push(pending);
            false
        }
        Err(error) => {
            assert_eq!(error, ExecutorError::Overloaded);
            waiting.len() == trtllm::encoder::BATCHES_AHEAD
        }
    });
    let mut last = waiting.pop().unwrap();
    drop(waiting);
    drop(last.remove(0));
    open(&gate);
    assert!(computed.into_iter().all(|pending| outcome(pending).is_ok()));
    for (tokens, pending) in SEQUENCES[1..].iter().zip(last) {
        assert_eq!(outcome(pending).unwrap().numbers, encoded(tokens, &zeros(tokens), 0, WIDTH).0);
    }
    let counters = encoder.counters();
    assert_eq!((counters.iterations, counters.completed), (2, 5), "a cancelled batch is not computed");
}

#[test]
fn shutdown_finishes_the_current_batch_and_ends_the_queued_ones() {
    let (engine, gate) = slow();
    let encoder = engine.encoder();
    let batch = || packed(&[&[1, 2]], Positions::FromZero);
    let mut batches = vec![encoder.submit(batch()).unwrap()];
    // The first batch has left the queue once two more fit.
    while batches.len() < 1 + trtllm::encoder::BATCHES_AHEAD {
        batches.extend(encoder.submit(batch()));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| encoder.shutdown());
        wait_until("it rejects further batches", || {
            encoder.submit(batch()).is_err_and(|error| error == ExecutorError::Closed)
        });
        open(&gate);
    });
    let outcomes: Vec<bool> = batches.into_iter().flatten().map(|pending| outcome(pending).is_ok()).collect();
    assert_eq!(outcomes, [true, false, false]);
}

#[test]
fn an_engine_that_cannot_be_opened_returns_the_reason() {
    let engine = Engine::new("extra_input attention_mask");
    let encoder = engine.encoder();
    let pending = encoder.submit(packed(&[&[1]], Positions::FromZero)).unwrap();
    let error = pending.into_iter().map(outcome).next().unwrap().unwrap_err();
    assert!(error.to_string().contains("`attention_mask`"), "{error}");

    let missing = engine.path().join("missing.engine");
    let error = Encoder::open(&EncoderConfig { engine: missing }).err().unwrap();
    assert!(error.to_string().contains("missing.engine cannot be read"), "{error}");

    std::fs::write(engine.engine(), "something else").unwrap();
    let error = Encoder::open(&EncoderConfig { engine: engine.engine() }).err().unwrap();
    assert!(error.to_string().contains("not an engine of the stand-in"), "{error}");
}
