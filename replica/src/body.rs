//! Request bodies, read within limits.
//!
//! Three limits: the bytes of one body, the bytes of all bodies at once, and the time that one may take to arrive. The
//! second is a pool of permits, taken frame by frame as bytes arrive and given back when the request ends; so what is
//! bounded is the memory that is used, and not the lengths that strangers announce.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use replica_core::limits::Limits;
use replica_core::refusal::Refusal;
use replica_core::wire::error::ErrorCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// The bytes of a body, and the room that they take.
pub(crate) struct Buffered {
    /// The bytes.
    pub(crate) bytes: Vec<u8>,
    /// Given back when it is dropped.
    pub(crate) room: Option<OwnedSemaphorePermit>,
}

/// The room for all bodies.
pub(crate) struct BodyRoom {
    permits: Arc<Semaphore>,
    limits: Limits,
}

impl BodyRoom {
    pub(crate) fn new(limits: Limits) -> BodyRoom {
        let permits = limits.max_buffered_bytes.min(Semaphore::MAX_PERMITS);
        BodyRoom { permits: Arc::new(Semaphore::new(permits)), limits }
    }

    /// Reads a body to its end, or refuses it.
    pub(crate) async fn read(&self, headers: &HeaderMap, mut body: Body) -> Result<Buffered, Refusal> {
        let limit = Duration::from_millis(self.limits.body_timeout_ms);
        let read = timeout(limit, self.read_all(announced(headers), &mut body)).await;
        let refusal = match read.unwrap_or_else(|_| Err(Refusal::body_timeout(limit))) {
            Ok(buffered) => return Ok(buffered),
            Err(refusal) => refusal,
        };
        let more_comes = matches!(refusal.code, ErrorCode::BodyTooLarge | ErrorCode::Overloaded);
        if more_comes && !headers.contains_key(header::EXPECT) {
            // A client that is still writing would find its connection reset and never read the refusal.
            let _ = timeout(limit, discard(&mut body, 2 * self.limits.max_body_bytes as u64)).await;
        }
        Err(refusal)
    }

    async fn read_all(&self, announced: Option<u64>, body: &mut Body) -> Result<Buffered, Refusal> {
        let max = self.limits.max_body_bytes;
        if announced.is_some_and(|bytes| bytes > max as u64) {
            return Err(Refusal::body_too_large(max, announced));
        }
        // What a stranger announces is reserved only as it arrives.
        let mut bytes = Vec::with_capacity(announced.unwrap_or(0).min(64 << 10) as usize);
        let mut room: Option<OwnedSemaphorePermit> = None;
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
            match room.as_mut() {
                Some(room) => room.merge(permit),
                None => room = Some(permit),
            }
            bytes.extend_from_slice(&data);
        }
        Ok(Buffered { bytes, room })
    }
}

fn announced(headers: &HeaderMap) -> Option<u64> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Reads on for nobody, up to `most` bytes.
async fn discard(body: &mut Body, most: u64) {
    let mut discarded = 0;
    while discarded < most
        && let Some(Ok(frame)) = body.frame().await
    {
        discarded += frame.data_ref().map_or(0, |data| data.len() as u64);
    }
}
