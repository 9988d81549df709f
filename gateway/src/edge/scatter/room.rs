//! What all requests that are computed in pieces have together: turns, and memory for the bodies of pieces.
//!
//! A piece's body is a copy, with the beginning and the end of the whole around some of its inputs, so it is counted, in a
//! room of its own: in that of the bodies which clients send, pieces of requests that are let in already would wait for
//! those that are not, each holding what the other needs. Here whoever waits for room has no piece under way and so holds
//! none of it, and whoever has some gives it back when the piece is over: so somebody always goes on.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

use crate::request_body::BODY_BYTES_MAX;
use gateway_core::scatter::split::{REST_BYTES_MAX, SUB_REQUEST_BYTES_MAX};

/// Requests that are computed in pieces at once. One more goes whole if a replica can take it, and waits if none can.
pub(in crate::edge) const AT_ONCE_MAX: usize = 4;
/// Bytes of the bodies of all pieces under way: sixty of the largest, and twice what one input may have that is a piece by
/// itself because no cut goes through it.
pub(in crate::edge) const PIECES_BYTES_MAX: usize = 64 << 20;
/// Room is given out in portions of this size.
const PORTION_BYTES: usize = 1 << 10;

// A piece of any body that is taken fits by itself, or its request would wait for ever.
const _: () =
    assert!(BODY_BYTES_MAX <= PIECES_BYTES_MAX && SUB_REQUEST_BYTES_MAX + REST_BYTES_MAX <= PIECES_BYTES_MAX);

/// The room.
pub(in crate::edge) struct Room {
    turns: Semaphore,
    bodies: Arc<Semaphore>,
}

impl Room {
    pub(in crate::edge) fn new() -> Room {
        let portions = PIECES_BYTES_MAX / PORTION_BYTES;
        Room { turns: Semaphore::new(AT_ONCE_MAX), bodies: Arc::new(Semaphore::new(portions)) }
    }

    /// A turn, if there is one now.
    pub(super) fn turn_now(&self) -> Option<SemaphorePermit<'_>> {
        self.turns.try_acquire().ok()
    }

    /// A turn, when there is one.
    pub(super) async fn turn(&self) -> SemaphorePermit<'_> {
        self.turns.acquire().await.expect("it is never closed")
    }

    /// Room for a body of so many bytes, if there is some now.
    pub(super) fn body_now(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        self.bodies.clone().try_acquire_many_owned(portions(bytes)).ok()
    }

    /// Room for a body of so many bytes, when there is some. For whoever has no other.
    pub(super) async fn body(&self, bytes: usize) -> OwnedSemaphorePermit {
        self.bodies.clone().acquire_many_owned(portions(bytes)).await.expect("it is never closed")
    }

    /// Requests that are computed in pieces now.
    pub(in crate::edge) fn requests(&self) -> usize {
        AT_ONCE_MAX - self.turns.available_permits()
    }

    /// Bytes that the bodies of pieces have taken.
    pub(in crate::edge) fn bytes(&self) -> usize {
        PIECES_BYTES_MAX - self.bodies.available_permits() * PORTION_BYTES
    }
}

fn portions(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(PORTION_BYTES)).expect("a piece is no larger than a body")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_for_bodies_is_given_up_to_its_bound_and_comes_back() {
        let room = Room::new();
        let all = room.body_now(PIECES_BYTES_MAX - PORTION_BYTES).zip(room.body_now(1));
        assert_eq!((all.is_some(), room.bytes()), (true, PIECES_BYTES_MAX));
        assert!(room.body_now(1).is_none());
        drop(all);
        assert!(room.body_now(PIECES_BYTES_MAX).is_some());
        assert_eq!(room.bytes(), 0);
    }

    #[test]
    fn turns_are_given_up_to_their_bound_and_come_back() {
        let room = Room::new();
        let turns: Vec<_> = (0..AT_ONCE_MAX).map_while(|_| room.turn_now()).collect();
        assert_eq!((turns.len(), room.requests()), (AT_ONCE_MAX, AT_ONCE_MAX));
        assert!(room.turn_now().is_none());
        drop(turns);
        assert!(room.turn_now().is_some());
    }
}
