//! Tests of shutdown with requests in flight.

use std::thread;

use trtllm::{Decoder, ExecutorError};

use crate::engines::{Engine, outcome, pooled, wait_until};

fn decoder(engine: &Engine) -> Decoder {
    let mut config = engine.config(pooled());
    config.max_batch_size = 4;
    Decoder::open(&config).expect("an engine of the test double")
}

#[test]
fn shutdown_ends_all_requests() {
    let engine = Engine::new("hold 30");
    let decoder = decoder(&engine);
    // Some are active, some are in the executor's queue.
    let held: Vec<_> = (0..8).map(|_| decoder.submit(&[30]).unwrap()).collect();
    wait_until("some are active", || decoder.counters().unwrap().active == 4);
    assert_eq!(decoder.shutdown(), Ok(()));
    for pending in held {
        assert_eq!(outcome(pending), Err(ExecutorError::Closed));
    }
    assert_eq!(decoder.submit(&[1]).unwrap_err(), ExecutorError::Closed);
    assert_eq!(decoder.shutdown(), Ok(()), "a second call has no effect");
}

#[test]
fn no_thread_polls_the_executor_when_it_is_shut_down() {
    let engine = Engine::new("hold 30\nlinger_ms 100");
    let decoder = decoder(&engine);
    let held = decoder.submit(&[30]).unwrap();
    wait_until("it is active", || decoder.counters().unwrap().active == 1);
    assert_eq!(decoder.shutdown(), Ok(()), "the test double detects a thread inside");
    assert_eq!(outcome(held), Err(ExecutorError::Closed));
}

#[test]
fn requests_that_are_submitted_during_shutdown_end() {
    for _ in 0..20 {
        let engine = Engine::new("");
        let decoder = decoder(&engine);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    loop {
                        match decoder.submit(&[1, 2, 3]) {
                            Ok(pending) => match outcome(pending) {
                                Ok(_) => {}
                                Err(error) => break assert_eq!(error, ExecutorError::Closed),
                            },
                            Err(ExecutorError::Overloaded) => thread::yield_now(),
                            Err(error) => break assert_eq!(error, ExecutorError::Closed),
                        }
                    }
                });
            }
            scope.spawn(|| {
                wait_until("at least one request was computed", || {
                    decoder.counters().is_ok_and(|now| now.completed > 0)
                });
                assert_eq!(decoder.shutdown(), Ok(()));
            });
        });
    }
}

#[test]
fn a_request_outlives_its_engine_and_still_ends() {
    let engine = Engine::new("hold 30");
    let decoder = decoder(&engine);
    let (kept, dropped) = (decoder.submit(&[30]).unwrap(), decoder.submit(&[30]).unwrap());
    drop(decoder);
    drop(dropped);
    assert_eq!(outcome(kept), Err(ExecutorError::Closed));
}
