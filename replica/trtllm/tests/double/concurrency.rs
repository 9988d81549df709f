//! Tests with many concurrent requests.

use std::sync::Mutex;
use std::thread;

use trtllm::ExecutorError;

use crate::engines::{Engine, LONGEST, VOCABULARY, outcome, pooled_of};

/// Returns sequences of every length, different within a thread.
fn sequence(thread: u32, request: u32) -> Vec<u32> {
    let length = 1 + (thread * 31 + request * 7) % LONGEST;
    (0..length).map(|at| (thread + request * 3 + at * at) % VOCABULARY).collect()
}

#[test]
fn a_thousand_requests_of_eight_threads_get_their_own_results() {
    let engine = Engine::new("format fp16\ndelay_ms 1");
    let decoder = engine.decoder();
    let overloaded = Mutex::new(0);
    thread::scope(|scope| {
        for number in 0..8 {
            let (decoder, overloaded) = (&decoder, &overloaded);
            scope.spawn(move || {
                let mut open = Vec::new();
                for request in 0..125 {
                    let tokens = sequence(number, request);
                    loop {
                        match decoder.submit(&tokens) {
                            Ok(pending) => break open.push((tokens, pending)),
                            Err(ExecutorError::Overloaded) => {
                                *overloaded.lock().unwrap() += 1;
                                match open.pop() {
                                    Some((tokens, pending)) => {
                                        assert_eq!(outcome(pending), Ok(pooled_of(&tokens)));
                                    }
                                    None => thread::yield_now(),
                                }
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
                for (tokens, pending) in open {
                    assert_eq!(outcome(pending), Ok(pooled_of(&tokens)), "{tokens:?}");
                }
            });
        }
    });
    let counters = decoder.counters().unwrap();
    // Statistics of the test double count what left a batch; overload must have occurred, or the load was too low.
    assert_eq!((counters.completed, counters.pending), (1000, 0));
    assert!(*overloaded.lock().unwrap() > 0);
}

#[test]
fn a_result_that_arrives_before_the_request_id_is_delivered() {
    let engine = Engine::new("respond_first 1\nhold 30");
    let decoder = engine.decoder();
    // While it is held, the polling thread asks for responses continuously.
    let held = decoder.submit(&[30]).unwrap();
    for request in 0..20 {
        let tokens = [request, request + 1];
        assert_eq!(outcome(decoder.submit(&tokens).unwrap()), Ok(pooled_of(&tokens)));
    }
    engine.release();
    assert_eq!(outcome(held), Ok(pooled_of(&[30])));
}
