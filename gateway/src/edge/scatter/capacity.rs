//! Capacity that all split requests share: permits for requests, and memory for the bodies of parts.
//!
//! The body of a part is a copy of some inputs with the start and the end of the whole body around them, so its memory
//! is counted, in a budget of its own. In the budget of client bodies, parts of admitted requests would wait for
//! requests that are not admitted yet, and each would hold memory that the other needs. Here a request waits for memory
//! only while it has no part in flight and so holds none, and releases the memory of a part when the part ends. So some
//! request always makes progress.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use gateway_core::scatter::split::{REST_BYTES_MAX, SUB_REQUEST_BYTES_MAX};
use replica_api::limits::MAX_BODY_BYTES;

/// Limit on split requests in flight. A further one is sent unsplit if a replica can serve it, and waits otherwise.
pub(in crate::edge) const SPLIT_REQUESTS_MAX: usize = 4;
/// Limit on the bytes of the bodies of all parts in flight: sixty of the largest regular parts, and two of the largest
/// single inputs, which are a part by themselves because an input is not split.
pub(in crate::edge) const PART_BODIES_BYTES_MAX: usize = 64 << 20;
/// Bytes of one semaphore permit.
const PORTION_BYTES: usize = 1 << 10;

// A part of any accepted body fits by itself; otherwise its request would wait for ever.
const _: () = assert!(
    MAX_BODY_BYTES <= PART_BODIES_BYTES_MAX
        && SUB_REQUEST_BYTES_MAX + REST_BYTES_MAX <= PART_BODIES_BYTES_MAX
);

/// Semaphores of split requests.
pub(in crate::edge) struct SplitCapacity {
    requests: Semaphore,
    bodies: Arc<Semaphore>,
}

impl SplitCapacity {
    pub(in crate::edge) fn new() -> SplitCapacity {
        let portions = PART_BODIES_BYTES_MAX / PORTION_BYTES;
        SplitCapacity {
            requests: Semaphore::new(SPLIT_REQUESTS_MAX),
            bodies: Arc::new(Semaphore::new(portions)),
        }
    }

    /// Takes the permit of a split request, if one is free.
    pub(super) fn try_acquire_request(&self) -> Option<SemaphorePermit<'_>> {
        self.requests.try_acquire().ok()
    }

    /// Waits for the permit of a split request.
    pub(super) async fn acquire_request(&self) -> SemaphorePermit<'_> {
        self.requests.acquire().await.expect("the semaphore is never closed")
    }

    /// Reserves memory for a body, if there is enough.
    pub(super) fn try_reserve_body(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        self.bodies.clone().try_acquire_many_owned(portions(bytes)).ok()
    }

    /// Waits for the memory of a body. Only for requests that hold no other.
    pub(super) async fn reserve_body(&self, bytes: usize) -> OwnedSemaphorePermit {
        self.bodies.clone().acquire_many_owned(portions(bytes)).await.expect("the semaphore is never closed")
    }

    /// Number of split requests in flight.
    pub(in crate::edge) fn requests(&self) -> usize {
        SPLIT_REQUESTS_MAX - self.requests.available_permits()
    }

    /// Bytes reserved for the bodies of parts.
    pub(in crate::edge) fn bytes(&self) -> usize {
        PART_BODIES_BYTES_MAX - self.bodies.available_permits() * PORTION_BYTES
    }
}

fn portions(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(PORTION_BYTES)).expect("a part is no larger than a body")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_for_bodies_is_reserved_up_to_the_limit_and_released() {
        let capacity = SplitCapacity::new();
        let all = capacity
            .try_reserve_body(PART_BODIES_BYTES_MAX - PORTION_BYTES)
            .zip(capacity.try_reserve_body(1));
        assert_eq!((all.is_some(), capacity.bytes()), (true, PART_BODIES_BYTES_MAX));
        assert!(capacity.try_reserve_body(1).is_none());
        drop(all);
        assert!(capacity.try_reserve_body(PART_BODIES_BYTES_MAX).is_some());
        assert_eq!(capacity.bytes(), 0);
    }

    #[test]
    fn request_permits_are_given_up_to_the_limit_and_released() {
        let capacity = SplitCapacity::new();
        let requests: Vec<_> =
            (0..SPLIT_REQUESTS_MAX).map_while(|_| capacity.try_acquire_request()).collect();
        assert_eq!((requests.len(), capacity.requests()), (SPLIT_REQUESTS_MAX, SPLIT_REQUESTS_MAX));
        assert!(capacity.try_acquire_request().is_none());
        drop(requests);
        assert!(capacity.try_acquire_request().is_some());
    }
}
