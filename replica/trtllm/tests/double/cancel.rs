//! Cancellation: the slot is released, and other requests are not affected.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use trtllm::Decoder;

use crate::engines::{Engine, outcome, pooled, pooled_of, wait_until};

fn pending(decoder: &Decoder) -> u64 {
    decoder.counters().expect("it runs").pending
}

#[test]
fn an_active_request_that_is_dropped_releases_its_slot() {
    let engine = Engine::new("hold 30");
    let decoder = engine.decoder();
    let held = decoder.submit(&[30]).unwrap();
    wait_until("it is active", || decoder.counters().unwrap().active == 1);
    drop(held);
    wait_until("the executor cancels it, although it is held", || pending(&decoder) == 0);
    assert_eq!(outcome(decoder.submit(&[1]).unwrap()), Ok(pooled_of(&[1])));
}

#[test]
fn a_queued_request_that_is_dropped_leaves_when_it_becomes_active() {
    let engine = Engine::new("hold 30");
    let mut config = engine.config(pooled());
    config.max_batch_size = 1;
    let decoder = Decoder::open(&config).unwrap();
    let first = decoder.submit(&[30]).unwrap();
    wait_until("the first is active", || decoder.counters().unwrap().active == 1);
    let second = decoder.submit(&[30, 1]).unwrap();
    drop(second);
    // The executor looks for a cancelled request among the active ones only, so it still occupies a slot.
    assert_eq!(pending(&decoder), 2);
    drop(first);
    wait_until("both have ended", || pending(&decoder) == 0);
    assert_eq!(outcome(decoder.submit(&[2]).unwrap()), Ok(pooled_of(&[2])));
}

#[test]
fn dropping_a_future_cancels_its_request() {
    let engine = Engine::new("hold 30");
    let decoder = engine.decoder();
    {
        let mut held = pin!(decoder.submit(&[30]).unwrap());
        let mut context = Context::from_waker(Waker::noop());
        assert_eq!(held.as_mut().poll(&mut context), Poll::Pending);
    }
    wait_until("it is cancelled", || pending(&decoder) == 0);
}

#[test]
fn a_cancelled_suspect_is_not_retried() {
    let engine = Engine::new("poison 13\nhold 30\ndelay_ms 2");
    let decoder = engine.decoder();
    // The batch fails; the first suspect is held when it is retried alone, so the others are queued outside the
    // executor.
    let batch = [&[30][..], &[13], &[1]].map(|tokens| decoder.submit(tokens).unwrap());
    let [first, culprit, innocent] = batch;
    drop(culprit);
    drop(first);
    assert_eq!(outcome(innocent), Ok(pooled_of(&[1])));
    wait_until("all requests have ended", || pending(&decoder) == 0);
}
