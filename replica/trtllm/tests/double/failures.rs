//! Exceptions and failures, and the requests that they affect.

use trtllm::{Decoder, ExecutorError, OutputTensor};

use crate::engines::{Engine, LONGEST, VOCABULARY, outcome, pooled, pooled_of};

#[test]
fn exceptions_of_the_library_become_errors() {
    let expected = [
        ("number", "not of the standard library's kind"),
        ("bytes", "kernel \u{fffd}\u{fffd} failed"),
        ("text", "a kernel failed"),
    ];
    for (how, message) in expected {
        let engine = Engine::new(&format!("open {how}"));
        let error = Decoder::open(&engine.config(pooled())).err().unwrap();
        assert!(matches!(&error, ExecutorError::Broken(text) if text.contains(message)), "open: {error:?}");

        let engine = Engine::new(&format!("enqueue {how}\nculprit 7"));
        let decoder = engine.decoder();
        let error = decoder.submit(&[6, 7]).unwrap_err();
        assert!(
            matches!(&error, ExecutorError::Rejected(text) if text.contains(message)),
            "enqueue: {error:?}"
        );
        assert_eq!(outcome(decoder.submit(&[6]).unwrap()), Ok(pooled_of(&[6])), "the decoder continues");

        let engine = Engine::new(&format!("await {how}"));
        let decoder = engine.decoder();
        let error = outcome(decoder.submit(&[6]).unwrap()).unwrap_err();
        assert!(matches!(&error, ExecutorError::Broken(text) if text.contains(message)), "await: {error:?}");
        assert_eq!(decoder.submit(&[6]).unwrap_err(), error, "later requests get the same error");
        assert_eq!(decoder.shutdown(), Ok(()));
    }
}

#[test]
fn a_missing_engine_is_named() {
    let engine = Engine::new("");
    let mut config = engine.config(pooled());
    config.directory = engine.path().join("elsewhere");
    let error = Decoder::open(&config).err().unwrap();
    assert!(error.to_string().contains("elsewhere"), "{error}");
}

#[test]
fn of_a_failed_batch_only_the_failing_request_gets_the_error() {
    for message in ["text", "bytes"] {
        // Slow enough that all of them are in one batch.
        let engine = Engine::new(&format!("poison 13\ndelay_ms 5\nmessage {message}"));
        let decoder = engine.decoder();
        let sequences: Vec<Vec<u32>> = (0..12).map(|n| vec![n, n + 1, n + 2]).collect();
        let pending: Vec<_> = sequences.iter().map(|tokens| decoder.submit(tokens).unwrap()).collect();
        for (tokens, pending) in sequences.iter().zip(pending) {
            let outcome = outcome(pending);
            if tokens.contains(&13) {
                let description =
                    if message == "bytes" { "kernel \u{fffd}\u{fffd} failed" } else { "a kernel failed" };
                assert_eq!(outcome, Err(ExecutorError::BatchFailed(description.to_owned())));
            } else {
                assert_eq!(outcome, Ok(pooled_of(tokens)), "{tokens:?}");
            }
        }
        assert_eq!(
            outcome(decoder.submit(&[1, 2]).unwrap()),
            Ok(pooled_of(&[1, 2])),
            "the decoder continues"
        );
    }
}

#[test]
fn the_limits_of_a_request_hold_at_the_limit_and_one_past_it() {
    let engine = Engine::new("");
    let decoder = engine.decoder();
    let longest = vec![1; LONGEST as usize];
    assert_eq!(outcome(decoder.submit(&longest).unwrap()), Ok(pooled_of(&longest)));
    assert_eq!(outcome(decoder.submit(&[VOCABULARY - 1]).unwrap()), Ok(pooled_of(&[VOCABULARY - 1])));
    for tokens in [&[][..], &vec![1; LONGEST as usize + 1], &[VOCABULARY], &[u32::MAX]] {
        assert!(matches!(decoder.submit(tokens), Err(ExecutorError::Rejected(_))), "{} tokens", tokens.len());
    }
}

#[test]
fn a_request_that_the_executor_cannot_start_fails_immediately_and_no_other_does() {
    // The engine has a lower limit than the configuration.
    let engine = Engine::new("longest 4\ndelay_ms 5");
    let decoder = engine.decoder();
    let (good, bad) = (decoder.submit(&[1, 2]).unwrap(), decoder.submit(&[1, 2, 3, 4, 5]).unwrap());
    assert!(
        matches!(outcome(bad), Err(ExecutorError::Rejected(text)) if text.contains("fetching new request"))
    );
    assert_eq!(outcome(good), Ok(pooled_of(&[1, 2])));
}

#[test]
fn a_full_decoder_rejects_and_accepts_again_later() {
    let engine = Engine::new("hold 30");
    let decoder = engine.decoder();
    let most = decoder.limits().max_requests;
    let held: Vec<_> = (0..most).map(|_| decoder.submit(&[30]).unwrap()).collect();
    assert_eq!(decoder.submit(&[1]).unwrap_err(), ExecutorError::Overloaded, "one past the limit of {most}");
    engine.release();
    for pending in held {
        assert_eq!(outcome(pending), Ok(pooled_of(&[30])));
    }
    assert_eq!(outcome(decoder.submit(&[1]).unwrap()), Ok(pooled_of(&[1])));
}

#[test]
fn a_full_queue_of_the_executor_returns_the_same_error() {
    let engine = Engine::new("queue 0");
    assert_eq!(engine.decoder().submit(&[1]).unwrap_err(), ExecutorError::Overloaded);
}

#[test]
fn an_unsupported_output_format_is_reported() {
    let engine = Engine::new("");
    let decoder = Decoder::open(&engine.config(OutputTensor::States("pooled".to_owned()))).unwrap();
    assert_eq!(outcome(decoder.submit(&[1, 2, 3]).unwrap()).unwrap().len(), 3);
}
