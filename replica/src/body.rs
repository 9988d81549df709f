//! Request bodies, read within limits.
//!
//! Three limits apply: the bytes of one body, the bytes of all bodies at once, and the time in which a body must
//! arrive. The second is a semaphore whose permits are acquired frame by frame as bytes arrive and released when the
//! request ends; so it bounds the memory in use, not the lengths that clients announce.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use replica_api::error::ErrorCode;
use replica_api::limits::Limits;
use replica_api::refusal::Refusal;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Body of a request, with the permits for its bytes.
pub(crate) struct RequestBytes {
    /// Bytes of the body.
    pub(crate) bytes: Vec<u8>,
    /// Permits for the bytes; released on drop.
    pub(crate) permit: Option<OwnedSemaphorePermit>,
}

/// Memory budget of all request bodies.
pub(crate) struct BodyBudget {
    permits: Arc<Semaphore>,
    limits: Limits,
}

impl BodyBudget {
    pub(crate) fn new(limits: Limits) -> BodyBudget {
        let permits = limits.max_buffered_bytes.min(Semaphore::MAX_PERMITS);
        BodyBudget { permits: Arc::new(Semaphore::new(permits)), limits }
    }

    /// Reads a body to its end, or rejects it.
    pub(crate) async fn read(&self, headers: &HeaderMap, mut body: Body) -> Result<RequestBytes, Refusal> {
        let limit = Duration::from_millis(self.limits.body_timeout_ms);
        let read = timeout(limit, self.read_all(declared(headers), &mut body)).await;
        let refusal = match read.unwrap_or_else(|_| Err(Refusal::body_timeout(limit))) {
            Ok(buffered) => return Ok(buffered),
            Err(refusal) => refusal,
        };
        let more_comes = matches!(refusal.code, ErrorCode::BodyTooLarge | ErrorCode::Overloaded);
        if more_comes && !headers.contains_key(header::EXPECT) {
            // Without this, a client that is still writing gets a connection reset and never reads the error response.
            let _ = timeout(limit, discard(&mut body, 2 * self.limits.max_body_bytes as u64)).await;
        }
        Err(refusal)
    }

    async fn read_all(&self, declared: Option<u64>, body: &mut Body) -> Result<RequestBytes, Refusal> {
        let max = self.limits.max_body_bytes;
        if declared.is_some_and(|bytes| bytes > max as u64) {
            return Err(Refusal::body_too_large(max, declared));
        }
        // A declared length is reserved only as the bytes arrive.
        let mut bytes = Vec::with_capacity(declared.unwrap_or(0).min(64 << 10) as usize);
        let mut acquired: Option<OwnedSemaphorePermit> = None;
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| Refusal::body_broken_off())?.into_data() else { continue };
            if bytes.len() + data.len() > max {
                return Err(Refusal::body_too_large(max, None));
            }
            let permit = Arc::clone(&self.permits).try_acquire_many_owned(data.len() as u32);
            let permit = permit.map_err(|_| {
                Refusal::overloaded(
                    "too many bytes are being read",
                    self.limits.max_buffered_bytes as u64,
                    None,
                )
            })?;
            match acquired.as_mut() {
                Some(acquired) => acquired.merge(permit),
                None => acquired = Some(permit),
            }
            bytes.extend_from_slice(&data);
        }
        Ok(RequestBytes { bytes, permit: acquired })
    }
}

fn declared(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Reads and discards up to `max_bytes` bytes.
async fn discard(body: &mut Body, max_bytes: u64) {
    let mut discarded = 0;
    while discarded < max_bytes
        && let Some(Ok(frame)) = body.frame().await
    {
        discarded += frame.data_ref().map_or(0, |data| data.len() as u64);
    }
}
