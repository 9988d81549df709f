//! What is thrown and what fails, and whom it concerns.

use trtllm::{Decoder, ExecutorError, OutputTensor};

use crate::engines::{Engine, LONGEST, VOCABULARY, answer, pooled, pooled_of};

#[test]
fn whatever_the_library_throws_becomes_an_answer() {
    let expected = [
        ("number", "not of the standard library's kind"),
        ("bytes", "kernel \u{fffd}\u{fffd} failed"),
        ("text", "a kernel failed"),
    ];
    for (how, message) in expected {
        let engine = Engine::new(&format!("open {how}"));
        let error = Decoder::open(&engine.config(pooled())).err().unwrap();
        assert!(matches!(&error, ExecutorError::Broken(why) if why.contains(message)), "open: {error:?}");

        let engine = Engine::new(&format!("enqueue {how}\nculprit 7"));
        let decoder = engine.decoder();
        let error = decoder.submit(&[6, 7]).unwrap_err();
        assert!(
            matches!(&error, ExecutorError::Rejected(why) if why.contains(message)),
            "enqueue: {error:?}"
        );
        assert_eq!(answer(decoder.submit(&[6]).unwrap()), Ok(pooled_of(&[6])), "it goes on");

        let engine = Engine::new(&format!("await {how}"));
        let decoder = engine.decoder();
        let error = answer(decoder.submit(&[6]).unwrap()).unwrap_err();
        assert!(matches!(&error, ExecutorError::Broken(why) if why.contains(message)), "await: {error:?}");
        assert_eq!(decoder.submit(&[6]).unwrap_err(), error, "what broke it is what everybody hears");
        assert_eq!(decoder.shutdown(), Ok(()));
    }
}

#[test]
fn an_engine_that_is_not_there_is_named() {
    let engine = Engine::new("");
    let mut config = engine.config(pooled());
    config.directory = engine.path().join("elsewhere");
    let error = Decoder::open(&config).err().unwrap();
    assert!(error.to_string().contains("elsewhere"), "{error}");
}

#[test]
fn of_a_poisoned_batch_the_culprit_alone_fails() {
    for message in ["text", "bytes"] {
        // Slow enough that all of them are in one batch.
        let engine = Engine::new(&format!("poison 13\ndelay_ms 5\nmessage {message}"));
        let decoder = engine.decoder();
        let sequences: Vec<Vec<u32>> = (0..12).map(|n| vec![n, n + 1, n + 2]).collect();
        let pending: Vec<_> = sequences.iter().map(|tokens| decoder.submit(tokens).unwrap()).collect();
        for (tokens, pending) in sequences.iter().zip(pending) {
            let answer = answer(pending);
            if tokens.contains(&13) {
                let what =
                    if message == "bytes" { "kernel \u{fffd}\u{fffd} failed" } else { "a kernel failed" };
                assert_eq!(answer, Err(ExecutorError::BatchFailed(what.to_owned())));
            } else {
                assert_eq!(answer, Ok(pooled_of(tokens)), "{tokens:?}");
            }
        }
        assert_eq!(answer(decoder.submit(&[1, 2]).unwrap()), Ok(pooled_of(&[1, 2])), "it goes on");
    }
}

#[test]
fn what_the_model_cannot_read_is_refused_at_the_limit_and_not_before() {
    let engine = Engine::new("");
    let decoder = engine.decoder();
    let longest = vec![1; LONGEST as usize];
    assert_eq!(answer(decoder.submit(&longest).unwrap()), Ok(pooled_of(&longest)));
    assert_eq!(answer(decoder.submit(&[VOCABULARY - 1]).unwrap()), Ok(pooled_of(&[VOCABULARY - 1])));
    for tokens in [&[][..], &vec![1; LONGEST as usize + 1], &[VOCABULARY], &[u32::MAX]] {
        assert!(matches!(decoder.submit(tokens), Err(ExecutorError::Rejected(_))), "{} tokens", tokens.len());
    }
}

#[test]
fn what_the_executor_cannot_begin_with_fails_alone_and_at_once() {
    // The engine is smaller than the configuration says.
    let engine = Engine::new("longest 4\ndelay_ms 5");
    let decoder = engine.decoder();
    let (good, bad) = (decoder.submit(&[1, 2]).unwrap(), decoder.submit(&[1, 2, 3, 4, 5]).unwrap());
    assert!(matches!(answer(bad), Err(ExecutorError::Rejected(why)) if why.contains("fetching new request")));
    assert_eq!(answer(good), Ok(pooled_of(&[1, 2])));
}

#[test]
fn a_full_house_is_an_answer_and_makes_room_again() {
    let engine = Engine::new("hold 30");
    let decoder = engine.decoder();
    let most = decoder.limits().max_requests;
    let held: Vec<_> = (0..most).map(|_| decoder.submit(&[30]).unwrap()).collect();
    assert_eq!(decoder.submit(&[1]).unwrap_err(), ExecutorError::Overloaded, "one past the limit of {most}");
    engine.release();
    for pending in held {
        assert_eq!(answer(pending), Ok(pooled_of(&[30])));
    }
    assert_eq!(answer(decoder.submit(&[1]).unwrap()), Ok(pooled_of(&[1])));
}

#[test]
fn a_full_queue_of_the_executors_own_is_the_same_answer() {
    let engine = Engine::new("queue 0");
    assert_eq!(engine.decoder().submit(&[1]).unwrap_err(), ExecutorError::Overloaded);
}

#[test]
fn a_format_that_no_row_is_written_in_is_said() {
    let engine = Engine::new("");
    let decoder = Decoder::open(&engine.config(OutputTensor::States("pooled".to_owned()))).unwrap();
    assert_eq!(answer(decoder.submit(&[1, 2, 3]).unwrap()).unwrap().len(), 3);
}
