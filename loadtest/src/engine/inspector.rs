//! Looks at answers: at small ones at once, at large ones on a thread of its own.
//!
//! An answer with a hundred rows takes a millisecond to check, and in a millisecond many lookups are due. So the thread
//! that starts requests hands large answers on. How long an answer took is known before anybody looks at it.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use super::Shared;
use super::connection::{Answered, InFlight};
use super::http1::{Head, Whole};
use super::requests::Requests;
use crate::record::Served;

/// Answers that are larger are looked at elsewhere. It takes 20 µs to check so many bytes, and as long to hand them over.
const AT_ONCE_BYTES_MAX: usize = 32 << 10;

/// Large answers that wait. Where as many do, the next one is looked at at once: that shows as the generator's own lag.
const WAITING_MAX: usize = 64;

struct Large {
    in_flight: InFlight,
    at: Instant,
    head: Head,
    body: Vec<u8>,
}

pub(super) struct Inspector {
    large: Option<SyncSender<Large>>,
    thread: Option<JoinHandle<()>>,
}

impl Inspector {
    pub(super) fn start(shared: Arc<Shared>) -> std::io::Result<Inspector> {
        let (large, waiting) = sync_channel::<Large>(WAITING_MAX);
        let inspect = move || {
            while let Ok(Large { in_flight, at, head, body }) = waiting.recv() {
                let requests = &shared.requests[in_flight.intended.task];
                let answered = look(requests, in_flight, Whole { head, body: &body }, at);
                if let Some(sample) = answered.sample(in_flight, requests.priority(), at) {
                    shared.record().add(sample);
                }
            }
        };
        let thread = std::thread::Builder::new().name("inspector".to_owned()).spawn(inspect)?;
        Ok(Inspector { large: Some(large), thread: Some(thread) })
    }

    /// What became of a request with this answer, or that it is being looked at.
    pub(super) fn look(&self, requests: &Requests, in_flight: InFlight, whole: Whole<'_>) -> Answered {
        let at = Instant::now();
        if whole.body.len() <= AT_ONCE_BYTES_MAX {
            return look(requests, in_flight, whole, at);
        }
        let Whole { head, body } = whole;
        let large = Large { in_flight, at, head, body: body.to_vec() };
        let refused = match &self.large {
            None => Some(large),
            Some(sender) => match sender.try_send(large) {
                Ok(()) => None,
                Err(TrySendError::Full(large) | TrySendError::Disconnected(large)) => Some(large),
            },
        };
        match refused {
            None => Answered { served: Served::Unnamed, retried: false, at: Some(at), outcome: None },
            Some(Large { head, body, .. }) => look(requests, in_flight, Whole { head, body: &body }, at),
        }
    }

    /// Waits until everything was looked at.
    pub(super) fn finish(&mut self) {
        self.large = None;
        if let Some(thread) = self.thread.take() {
            thread.join().expect("looking at an answer does not panic");
        }
    }
}

fn look(requests: &Requests, in_flight: InFlight, whole: Whole<'_>, at: Instant) -> Answered {
    let outcome = requests.check(in_flight.intended.number, &whole);
    let Head { served, retried, .. } = whole.head;
    Answered { served, retried, at: Some(at), outcome: Some(outcome) }
}
