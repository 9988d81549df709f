//! Validation of responses: small ones inline, large ones on a separate thread.
//!
//! Validating a response with a hundred rows takes a millisecond, and many requests may be due within that time. So the
//! thread that starts requests hands large responses over. The latency is measured before the hand-over.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use super::Shared;
use super::connection::{Answered, InFlight};
use super::http1::{Head, Whole};
use super::requests::Requests;
use crate::record::Served;

/// Larger responses are handed over. Validating this many bytes takes 20 µs, as long as the hand-over.
const AT_ONCE_BYTES_MAX: usize = 32 << 10;

/// Length of the queue. If it is full, the response is validated inline, which shows as the generator's lag.
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

    /// Validates a response, or hands it over to the thread.
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

    /// Waits until all responses are validated.
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
