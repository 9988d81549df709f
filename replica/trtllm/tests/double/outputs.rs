//! Tests of every output tensor of a decoder, in every number format.

use trtllm::{Decoder, EngineRows, OutputTensor, versions};

use crate::engines::{Engine, HIDDEN, VOCABULARY, decoded, outcome, pooled, pooled_of};

const SEQUENCES: [&[u32]; 4] = [&[1], &[2, 3, 4, 5, 6], &[7, 8], &[9, 10, 11, 12, 13, 14, 15, 16, 17]];

/// Returns the results of all sequences, submitted at once.
fn outcomes(decoder: &Decoder) -> Vec<EngineRows> {
    let pending: Vec<_> = SEQUENCES.map(|tokens| decoder.submit(tokens).expect("room")).into();
    pending.into_iter().map(|pending| outcome(pending).expect("rows")).collect()
}

fn check(format: &str, output: OutputTensor, width: u64, salt: u64, every_token: bool) {
    for prefix in [0, 1] {
        let engine = Engine::new(&format!("format {format}\nprefix {prefix}"));
        let decoder = Decoder::open(&engine.config(output.clone())).expect("an engine");
        for (tokens, rows) in SEQUENCES.iter().zip(outcomes(&decoder)) {
            let mut expected = decoded(tokens, width, salt);
            if !every_token {
                expected.drain(..tokens.len() - 1);
            }
            let expected = EngineRows { width: width as usize, numbers: expected.concat() };
            assert_eq!(rows, expected, "{format} {output:?} {tokens:?}");
        }
    }
}

#[test]
fn every_output_is_right_in_every_number_format() {
    for format in ["fp32", "fp16", "bf16"] {
        let vocabulary = u64::from(VOCABULARY);
        check(format, pooled(), HIDDEN, 3, false);
        check(format, OutputTensor::States("pooled".to_owned()), HIDDEN, 3, true);
        check(format, OutputTensor::ContextLogits, vocabulary, 5, true);
        check(format, OutputTensor::GenerationLogits, vocabulary, 5, false);
    }
}

#[test]
fn an_engine_without_the_additional_output_is_rejected() {
    let engine = Engine::new("tap another");
    let error = outcome(engine.decoder().submit(&[1]).unwrap()).unwrap_err();
    assert!(error.to_string().contains("lacks the requested output"), "{error}");
}

#[test]
fn a_sequence_has_the_same_rows_by_itself_and_in_a_batch() {
    let engine = Engine::new("");
    let decoder = engine.decoder();
    let alone = SEQUENCES.map(|tokens| outcome(decoder.submit(tokens).unwrap()).unwrap());
    assert_eq!(outcomes(&decoder), alone);
    assert_eq!(alone[1], pooled_of(SEQUENCES[1]));
}

#[test]
fn the_test_double_reports_its_versions() {
    let versions = versions();
    assert!(versions.double);
    assert_eq!((versions.tensorrt_llm.as_str(), versions.tensorrt.as_str()), ("1.2.1-double", "10.14.1"));
}

#[test]
fn computed_requests_are_counted() {
    let engine = Engine::new("");
    let decoder = engine.decoder();
    outcomes(&decoder);
    let counters = decoder.counters().unwrap();
    assert_eq!((counters.completed, counters.pending), (4, 0));
    assert!(counters.iterations >= 1 && counters.busy_ms > 0.0 && counters.gpu_bytes > 0, "{counters:?}");
    assert_eq!(decoder.counters().unwrap().completed, 4, "the executor reports differences; the sum is kept");
}
