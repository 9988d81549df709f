//! Many at once.

use std::sync::Mutex;
use std::thread;

use trtllm::ExecutorError;

use crate::engines::{Engine, LONGEST, VOCABULARY, answer, pooled_of};

/// Of every length, and no two of a thread alike.
fn sequence(thread: u32, request: u32) -> Vec<u32> {
    let length = 1 + (thread * 31 + request * 7) % LONGEST;
    (0..length).map(|at| (thread + request * 3 + at * at) % VOCABULARY).collect()
}

#[test]
fn a_thousand_requests_of_eight_threads_get_the_answers_to_their_own_questions() {
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
                                        assert_eq!(answer(pending), Ok(pooled_of(&tokens)));
                                    }
                                    None => thread::yield_now(),
                                }
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
                for (tokens, pending) in open {
                    assert_eq!(answer(pending), Ok(pooled_of(&tokens)), "{tokens:?}");
                }
            });
        }
    });
    let counters = decoder.counters().unwrap();
    // Statistics of the stand-in count what left a batch; overload was met, or the throng was none.
    assert_eq!((counters.completed, counters.pending), (1000, 0));
    assert!(*overloaded.lock().unwrap() > 0);
}

#[test]
fn an_answer_that_is_there_before_its_request_has_an_id_finds_who_waits() {
    let engine = Engine::new("answer_first 1\nhold 30");
    let decoder = engine.decoder();
    // While it is held somebody asks for answers all the time.
    let held = decoder.submit(&[30]).unwrap();
    for request in 0..20 {
        let tokens = [request, request + 1];
        assert_eq!(answer(decoder.submit(&tokens).unwrap()), Ok(pooled_of(&tokens)));
    }
    engine.release();
    assert_eq!(answer(held), Ok(pooled_of(&[30])));
}
