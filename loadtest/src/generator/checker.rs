//! Validation of responses: small ones inline, large ones on a separate thread.
//!
//! Validating a response with a hundred rows takes a millisecond, and many requests may be due within that time. So the
//! thread that starts requests hands large responses over. The latency is measured before the hand-over.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use super::SharedState;
use super::connection::{Completion, LoadRequest};
use super::http1::{CompleteResponse, ReceivedHead};
use super::requests::Requests;
use crate::record::ServingRegions;

/// Larger responses are handed over. Validating this many bytes takes 20 µs, as long as the hand-over.
const INLINE_BYTES_MAX: usize = 32 << 10;

/// Length of the queue. If it is full, the response is validated inline, which shows as the generator's lag.
const QUEUE_LENGTH_MAX: usize = 64;

struct LargeResponse {
    in_flight: LoadRequest,
    at: Instant,
    head: ReceivedHead,
    body: Vec<u8>,
}

pub(super) struct ResponseChecker {
    large: Option<SyncSender<LargeResponse>>,
    thread: Option<JoinHandle<()>>,
}

impl ResponseChecker {
    pub(super) fn start(shared: Arc<SharedState>) -> std::io::Result<ResponseChecker> {
        let (large, waiting) = sync_channel::<LargeResponse>(QUEUE_LENGTH_MAX);
        let inspect = move || {
            while let Ok(LargeResponse { in_flight, at, head, body }) = waiting.recv() {
                let requests = &shared.requests[in_flight.intended.task];
                let completion = check(requests, in_flight, CompleteResponse { head, body: &body }, at);
                if let Some(sample) = completion.sample(in_flight, requests.priority(), at) {
                    shared.record().add(sample);
                }
            }
        };
        let thread = std::thread::Builder::new().name("inspector".to_owned()).spawn(inspect)?;
        Ok(ResponseChecker { large: Some(large), thread: Some(thread) })
    }

    /// Validates a response, or hands it over to the thread.
    pub(super) fn check(
        &self,
        requests: &Requests,
        in_flight: LoadRequest,
        response: CompleteResponse<'_>,
    ) -> Completion {
        let at = Instant::now();
        if response.body.len() <= INLINE_BYTES_MAX {
            return check(requests, in_flight, response, at);
        }
        let CompleteResponse { head, body } = response;
        let large = LargeResponse { in_flight, at, head, body: body.to_vec() };
        let refused = match &self.large {
            None => Some(large),
            Some(sender) => match sender.try_send(large) {
                Ok(()) => None,
                Err(TrySendError::Full(large) | TrySendError::Disconnected(large)) => Some(large),
            },
        };
        match refused {
            None => {
                Completion { served: ServingRegions::Unknown, retried: false, at: Some(at), outcome: None }
            }
            Some(LargeResponse { head, body, .. }) => {
                check(requests, in_flight, CompleteResponse { head, body: &body }, at)
            }
        }
    }

    /// Waits until all responses are validated.
    pub(super) fn finish(&mut self) {
        self.large = None;
        if let Some(thread) = self.thread.take() {
            thread.join().expect("validation does not panic");
        }
    }
}

fn check(
    requests: &Requests,
    in_flight: LoadRequest,
    response: CompleteResponse<'_>,
    at: Instant,
) -> Completion {
    let outcome = requests.check(in_flight.intended.number, &response);
    let ReceivedHead { served, retried, .. } = response.head;
    Completion { served, retried, at: Some(at), outcome: Some(outcome) }
}
