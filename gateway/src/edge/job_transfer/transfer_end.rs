//! End of a transferred request, as the message that returns it to the region of the queue, and the memory for large results.

use crate::upstream::{ResponseBody, Upstream, UpstreamResponse, WholeBodyError};
use bytes::Bytes;
use replica_api::error::ErrorCode;
use replica_api::headers;
use replica_api::limits::MAX_BODY_BYTES;
use scheduler_api::VERSION;
use scheduler_api::job_transfer::{self, LINE_BYTES_MAX, ReturnedV1};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Longest result that a gateway returns: what the region of the queue reads, without the first line.
const RETURNED_BYTES_MAX: usize = MAX_BODY_BYTES - LINE_BYTES_MAX - 1;
/// Memory of results at most, in bytes: eight of the largest. A result that is buffered with its head
/// ([`BUFFERED_RESPONSE_MAX`](crate::upstream::BUFFERED_RESPONSE_MAX)) is not counted.
pub(in crate::edge) const RESULTS_BYTES_MAX: usize = 8 * RETURNED_BYTES_MAX;
/// Time for which a result waits for memory. The region keeps it meanwhile, and cancels a response that is not read within its
/// write timeout, which counts as a failed attempt.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the rest of a response: the largest result over a slow link.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(60);

/// End of a computation in the other region.
pub(super) struct TransferEnd {
    /// Status and error code of the response; none if no region has responded.
    pub(super) response: Option<(u16, Option<ErrorCode>)>,
    /// Message that returns it to the region of the queue.
    pub(super) message: Bytes,
    /// Memory of a large result.
    _memory: Option<OwnedSemaphorePermit>,
}

impl TransferEnd {
    /// Receives the whole response of a region. A large one waits for memory first. Without memory the request is computed again,
    /// and no attempt counts.
    pub(super) async fn received(
        ticket: u64,
        UpstreamResponse { head, body }: UpstreamResponse,
        upstream: &Upstream,
        memory: &ResultMemory,
    ) -> TransferEnd {
        let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok());
        let (status, code) = (head.status.as_u16(), text(headers::ERROR).and_then(ErrorCode::parse));
        let line = ReturnedV1 {
            status: Some(status),
            error: code.map(|code| code.as_str().to_owned()),
            retry_after_ms: text(headers::RETRY_AFTER_MS).and_then(|wait| wait.parse().ok()),
            tokens: text(headers::TOKENS).and_then(|tokens| tokens.parse().ok()),
            ..without_result(ticket)
        };
        let response = Some((status, code));
        let streamed = match body {
            ResponseBody::Buffered(body) => {
                let message = job_transfer::framed(&line, &body).into();
                return TransferEnd { response, message, _memory: None };
            }
            ResponseBody::Streamed(streamed) => streamed,
        };
        let Some(memory) = memory.reserve(streamed.declared()).await else {
            let reason = "the gateway has no memory for the result";
            return TransferEnd { response, ..TransferEnd::without_response(ticket, reason, None) };
        };
        let mut first = job_transfer::framed(&line, b"");
        // Once: a vector that grows takes up to twice its length.
        first.reserve_exact(streamed.declared().unwrap_or(RETURNED_BYTES_MAX).min(RETURNED_BYTES_MAX));
        let read = streamed.read_after(first, RETURNED_BYTES_MAX, upstream);
        let reason = match timeout(RECEIVE_TIMEOUT, read).await {
            Ok(Ok(message)) => return TransferEnd { response, message, _memory: Some(memory) },
            Ok(Err(WholeBodyError::TooLong)) => "the result is too large to be returned by a gateway",
            // Not a lack of capacity: a request that ends replicas must not be repeated for ever.
            Ok(Err(WholeBodyError::Truncated)) => "the response of the region was truncated",
            Err(_) => "the response of the region was not received in time",
        };
        let body = serde_json::json!({"error": reason}).to_string();
        TransferEnd::with_response(ticket, (500, None), body.as_bytes())
    }

    /// Returns a result with this status and error code, and a short body.
    pub(super) fn with_response(
        ticket: u64,
        (status, code): (u16, Option<ErrorCode>),
        body: &[u8],
    ) -> TransferEnd {
        let error = code.map(|code| code.as_str().to_owned());
        let line = ReturnedV1 { status: Some(status), error, ..without_result(ticket) };
        let message = job_transfer::framed(&line, body).into();
        TransferEnd { response: Some((status, code)), message, _memory: None }
    }

    /// Returns the end of a request that no region has responded to.
    pub(super) fn without_response(
        ticket: u64,
        reason: impl Into<String>,
        retry_after: Option<Duration>,
    ) -> TransferEnd {
        let retry_after_ms = retry_after.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX));
        let line = ReturnedV1 { reason: Some(reason.into()), retry_after_ms, ..without_result(ticket) };
        TransferEnd { response: None, message: job_transfer::framed(&line, b"").into(), _memory: None }
    }
}

/// Returns the line of a ticket without a result.
fn without_result(ticket: u64) -> ReturnedV1 {
    ReturnedV1 {
        version: VERSION,
        ticket,
        status: None,
        error: None,
        retry_after_ms: None,
        reason: None,
        tokens: None,
    }
}

/// Memory of large results, with a permit for each byte.
#[derive(Clone)]
pub(in crate::edge) struct ResultMemory(Arc<Semaphore>);

impl ResultMemory {
    /// Creates unused memory.
    pub(in crate::edge) fn new() -> ResultMemory {
        ResultMemory(Arc::new(Semaphore::new(RESULTS_BYTES_MAX)))
    }

    /// Returns the bytes in use.
    pub(in crate::edge) fn used(&self) -> usize {
        RESULTS_BYTES_MAX - self.0.available_permits()
    }

    /// Waits for the memory of a result of this length, or of the largest one if its length is unknown or larger; none after
    /// [`MEMORY_TIMEOUT`].
    async fn reserve(&self, declared: Option<usize>) -> Option<OwnedSemaphorePermit> {
        let bytes = declared.unwrap_or(RETURNED_BYTES_MAX).min(RETURNED_BYTES_MAX);
        let permits = u32::try_from(bytes).expect("a result is shorter than 4 GiB");
        let reserved = timeout(MEMORY_TIMEOUT, self.0.clone().acquire_many_owned(permits)).await;
        reserved.ok().map(|permit| permit.expect("the semaphore is never closed"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[tokio::test(start_paused = true)]
    async fn a_result_that_finds_no_memory_in_time_is_given_up() {
        let memory = ResultMemory::new();
        let held = memory.0.clone().acquire_many_owned(RESULTS_BYTES_MAX as u32).await.expect("memory");
        let begun = tokio::time::Instant::now();
        assert!(memory.reserve(Some(1)).await.is_none());
        assert_eq!(begun.elapsed(), MEMORY_TIMEOUT);
        drop(held);
        assert!(memory.reserve(Some(1)).await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn the_largest_results_wait_for_memory() {
        let memory = ResultMemory::new();
        let mut held = Vec::new();
        for declared in [None, Some(usize::MAX), Some(RETURNED_BYTES_MAX)].iter().cycle().take(8) {
            held.push(memory.reserve(*declared).now_or_never().flatten().expect("memory"));
        }
        assert_eq!(memory.used(), RESULTS_BYTES_MAX);
        let mut next = Box::pin(memory.reserve(Some(1)));
        assert!((&mut next).now_or_never().is_none(), "one byte past the limit");
        held.pop();
        assert!(next.now_or_never().flatten().is_some());
    }
}
