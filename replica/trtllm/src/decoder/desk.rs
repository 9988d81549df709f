//! Order of submission to the executor, and isolation of requests that fail a batch.
//!
//! The executor fails a batch as a whole: if one request contains a token on which its kernels fail, all requests of
//! the batch get the same error. So the error of a batch does not identify its cause. Each request with such an error
//! becomes a *suspect*; no new request is submitted until all requests have left the executor; then the suspects are
//! retried one at a time, and a request that fails alone is reported as failed. Each request is submitted at most
//! twice.
//!
//! Pure decisions: no lock, no clock, no executor.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::answer::{Answer, Slot};
use crate::{EngineError, Rows};

/// Requests by tag, which is the client id in the executor.
pub(super) struct Desk {
    entries: BTreeMap<u64, Entry>,
    /// Requests that arrived while suspects were retried; they are submitted afterwards, in order.
    held: VecDeque<u64>,
    suspects: VecDeque<u64>,
    /// Suspect that is being retried.
    alone: Option<u64>,
    next_tag: u64,
    /// Maximum number of concurrent requests.
    most: usize,
    /// Reason why no further requests are accepted.
    end: Option<EngineError>,
}

struct Entry {
    slot: Arc<Slot>,
    tokens: Vec<i32>,
    place: Place,
    /// Cancelled by the caller, and still in the executor.
    abandoned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Queued here.
    Outside,
    /// Being submitted to the executor.
    Entering,
    /// In the executor, with this id.
    Inside(u64),
}

/// Response of the executor for one request.
pub(super) enum Said {
    Rows(Rows),
    /// With this error message.
    Failed(String),
    Cancelled,
    TimedOut,
}

/// Request to submit to the executor now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entrant {
    pub(super) tag: u64,
    pub(super) tokens: Vec<i32>,
}

/// The executor's message prefix for a request that it could not start: such an error is caused by the request and not
/// by the batch.
const OF_THE_REQUEST: &str = "Encountered an error when fetching new request";

impl Desk {
    /// Creates a scheduler with this maximum of concurrent requests.
    pub(super) fn new(most: usize) -> Desk {
        Desk {
            entries: BTreeMap::new(),
            held: VecDeque::new(),
            suspects: VecDeque::new(),
            alone: None,
            // A response without a tag has tag 0.
            next_tag: 1,
            most,
            end: None,
        }
    }

    /// Adds a request; returns its tag, and whether it is to be submitted at once. Its result slot is registered from
    /// now on.
    pub(super) fn take(&mut self, slot: &Arc<Slot>, tokens: &[i32]) -> Result<(u64, bool), EngineError> {
        if let Some(end) = &self.end {
            return Err(end.clone());
        }
        if self.entries.len() >= self.most {
            return Err(EngineError::Overloaded);
        }
        let tag = self.next_tag;
        self.next_tag += 1;
        let at_once = !self.on_trial();
        let place = if at_once { Place::Entering } else { Place::Outside };
        if !at_once {
            self.held.push_back(tag);
        }
        let entry = Entry { slot: Arc::clone(slot), tokens: tokens.to_vec(), place, abandoned: false };
        self.entries.insert(tag, entry);
        Ok((tag, at_once))
    }

    /// Records that the executor has accepted the request with this id; returns whether it must be cancelled there. It
    /// may have ended already.
    pub(super) fn entered(&mut self, tag: u64, id: u64) -> bool {
        self.entries.get_mut(&tag).is_some_and(|entry| {
            entry.place = Place::Inside(id);
            entry.abandoned
        })
    }

    /// Removes a request that the executor has rejected.
    pub(super) fn refused(&mut self, tag: u64) -> Option<Arc<Slot>> {
        self.alone.take_if(|alone| *alone == tag);
        self.entries.remove(&tag).map(|entry| entry.slot)
    }

    /// Processes a response of the executor; returns the result, or `None` if the request is retried or the tag is
    /// unknown.
    pub(super) fn said(&mut self, tag: u64, said: Said) -> Option<(Arc<Slot>, Answer)> {
        let alone = self.alone.take_if(|alone| *alone == tag).is_some();
        let entry = self.entries.get_mut(&tag)?;
        let answer = match said {
            Said::Rows(rows) => Ok(rows),
            Said::Cancelled => Err(EngineError::Cancelled),
            Said::TimedOut => Err(EngineError::TimedOut),
            Said::Failed(message) if message.starts_with(OF_THE_REQUEST) => {
                Err(EngineError::Rejected(message))
            }
            Said::Failed(message) if alone => Err(EngineError::BatchFailed(message)),
            Said::Failed(_) if entry.abandoned => Err(EngineError::Cancelled),
            Said::Failed(_) => {
                entry.place = Place::Outside;
                self.suspects.push_back(tag);
                return None;
            }
        };
        self.entries.remove(&tag).map(|entry| (entry.slot, answer))
    }

    /// Returns the next request to submit.
    pub(super) fn next(&mut self) -> Option<Entrant> {
        if self.end.is_some() {
            return None;
        }
        let tag = if self.suspects.is_empty() && self.alone.is_none() {
            self.held.pop_front()?
        } else if self.inside() == 0 {
            let suspect = self.suspects.pop_front()?;
            self.alone = Some(suspect);
            suspect
        } else {
            return None;
        };
        let entry = self.entries.get_mut(&tag)?;
        entry.place = Place::Entering;
        Some(Entrant { tag, tokens: entry.tokens.clone() })
    }

    /// Returns the result slot of a request.
    pub(super) fn slot(&self, tag: u64) -> Option<Arc<Slot>> {
        self.entries.get(&tag).map(|entry| Arc::clone(&entry.slot))
    }

    /// Cancels a request; returns the id to cancel in the executor, if it is there.
    pub(super) fn abandon(&mut self, tag: u64) -> Option<u64> {
        let entry = self.entries.get_mut(&tag)?;
        entry.abandoned = true;
        match entry.place {
            Place::Inside(id) => Some(id),
            Place::Entering => None,
            Place::Outside => {
                self.entries.remove(&tag);
                self.held.retain(|held| *held != tag);
                self.suspects.retain(|suspect| *suspect != tag);
                None
            }
        }
    }

    /// Rejects further requests. Returns the slots of the queued requests, and the ids to cancel in the executor.
    pub(super) fn end(&mut self, why: &EngineError) -> (Vec<Arc<Slot>>, Vec<u64>) {
        self.end.get_or_insert_with(|| why.clone());
        self.held.clear();
        self.suspects.clear();
        self.alone = None;
        let ended = std::mem::take(&mut self.entries);
        let ids = ended.values().filter_map(|entry| match entry.place {
            Place::Inside(id) => Some(id),
            Place::Outside | Place::Entering => None,
        });
        let ids = ids.collect();
        (ended.into_values().map(|entry| entry.slot).collect(), ids)
    }

    /// Returns whether requests are in the executor, or will be.
    pub(super) fn is_busy(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Returns the number of requests that have not ended.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.end.is_some()
    }

    fn on_trial(&self) -> bool {
        !self.suspects.is_empty() || self.alone.is_some() || !self.held.is_empty()
    }

    fn inside(&self) -> usize {
        self.entries.values().filter(|entry| entry.place != Place::Outside).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desk(most: usize, requests: i32) -> (Desk, Vec<Arc<Slot>>) {
        let mut desk = Desk::new(most);
        let slots = (1..=requests).map(|request| {
            let slot = Arc::new(Slot::default());
            let (tag, at_once) = desk.take(&slot, &[request]).unwrap();
            assert!(at_once && !desk.entered(tag, tag + 100));
            slot
        });
        let slots = slots.collect();
        (desk, slots)
    }

    fn failed() -> Said {
        Said::Failed("a kernel failed".to_owned())
    }

    fn rows() -> Rows {
        Rows { width: 1, numbers: vec![1.0] }
    }

    fn answer(desk: &mut Desk, tag: u64, said: Said) -> Option<Answer> {
        desk.said(tag, said).map(|(_, answer)| answer)
    }

    #[test]
    fn of_a_failed_batch_only_requests_that_fail_alone_are_failed() {
        let (mut desk, _) = desk(8, 3);
        for tag in 1..=3 {
            assert_eq!(answer(&mut desk, tag, failed()), None, "a batch error is not reported");
            let all_out = tag == 3;
            let first = all_out.then(|| Entrant { tag: 1, tokens: vec![1] });
            assert_eq!(desk.next(), first, "the first suspect is retried when the executor is empty");
        }
        assert_eq!(desk.next(), None, "one at a time");
        assert_eq!(answer(&mut desk, 1, Said::Rows(rows())), Some(Ok(rows())));
        assert_eq!(desk.next().map(|next| next.tag), Some(2));
        let culprit = Err(EngineError::BatchFailed("a kernel failed".to_owned()));
        assert_eq!(answer(&mut desk, 2, failed()), Some(culprit));
        assert_eq!(desk.next().map(|next| next.tag), Some(3));
        assert_eq!(answer(&mut desk, 3, Said::Rows(rows())), Some(Ok(rows())));
        assert!(!desk.is_busy());
    }

    #[test]
    fn requests_that_arrive_while_suspects_are_retried_wait_in_order() {
        let (mut desk, _) = desk(8, 1);
        assert_eq!(answer(&mut desk, 1, failed()), None);
        let late = Arc::new(Slot::default());
        assert_eq!(desk.take(&late, &[7]), Ok((2, false)));
        assert_eq!(desk.take(&late, &[8]), Ok((3, false)));
        assert_eq!(desk.next().map(|next| next.tag), Some(1));
        assert_eq!(desk.next(), None);
        assert_eq!(answer(&mut desk, 1, Said::Rows(rows())), Some(Ok(rows())));
        let next: Vec<u64> = std::iter::from_fn(|| desk.next().map(|next| next.tag)).collect();
        assert_eq!(next, [2, 3]);
        assert_eq!(desk.take(&late, &[9]), Ok((4, true)));
    }

    #[test]
    fn a_request_that_the_executor_cannot_start_fails_at_once() {
        let (mut desk, _) = desk(8, 2);
        let message = format!("{OF_THE_REQUEST}: too long");
        let rejected = Err(EngineError::Rejected(message.clone()));
        assert_eq!(answer(&mut desk, 1, Said::Failed(message)), Some(rejected));
        assert_eq!(answer(&mut desk, 2, Said::Rows(rows())), Some(Ok(rows())));
    }

    #[test]
    fn the_limit_of_requests_holds_at_the_limit_and_one_past_it() {
        let (mut desk, _) = desk(2, 2);
        let slot = Arc::new(Slot::default());
        assert_eq!(desk.take(&slot, &[3]), Err(EngineError::Overloaded));
        assert_eq!(answer(&mut desk, 1, Said::Rows(rows())), Some(Ok(rows())));
        assert_eq!(desk.take(&slot, &[3]), Ok((3, true)));
        assert_eq!(desk.take(&slot, &[4]), Err(EngineError::Overloaded));
    }

    #[test]
    fn a_cancelled_request_is_removed_in_every_state() {
        let (mut desk, _) = desk(8, 2);
        assert_eq!(desk.abandon(1), Some(101), "in the executor: by its id");
        assert_eq!(desk.len(), 2, "it occupies a slot until the executor confirms");
        assert_eq!(
            answer(&mut desk, 1, failed()),
            Some(Err(EngineError::Cancelled)),
            "it is not retried"
        );
        let slot = Arc::new(Slot::default());
        assert_eq!(desk.take(&slot, &[3]), Ok((3, true)));
        assert_eq!(desk.abandon(3), None, "being submitted: not yet");
        assert!(desk.entered(3, 103), "as soon as it is in the executor");
        assert_eq!(answer(&mut desk, 2, failed()), None);
        assert_eq!(desk.abandon(2), None, "queued here: removed");
        assert_eq!(answer(&mut desk, 3, Said::Cancelled), Some(Err(EngineError::Cancelled)));
        assert_eq!((desk.next(), desk.is_busy()), (None, false));
    }

    #[test]
    fn a_suspect_that_the_executor_rejects_does_not_block_others() {
        let (mut desk, _) = desk(8, 2);
        assert_eq!((answer(&mut desk, 1, failed()), answer(&mut desk, 2, failed())), (None, None));
        assert_eq!(desk.next().map(|next| next.tag), Some(1));
        assert!(desk.refused(1).is_some());
        assert_eq!(desk.next().map(|next| next.tag), Some(2));
    }

    #[test]
    fn shutdown_ends_queued_requests_and_cancels_those_in_the_executor() {
        let (mut desk, _) = desk(8, 2);
        let slot = Arc::new(Slot::default());
        assert_eq!(desk.take(&slot, &[3]), Ok((3, true)));
        let (slots, ids) = desk.end(&EngineError::Closed);
        assert_eq!((slots.len(), ids), (3, vec![101, 102]));
        assert_eq!(desk.take(&slot, &[4]), Err(EngineError::Closed));
        assert_eq!((desk.next(), desk.is_busy(), desk.has_ended()), (None, false, true));
        let (slots, _) = desk.end(&EngineError::Broken("later".to_owned()));
        assert!(slots.is_empty());
        assert_eq!(desk.take(&slot, &[4]), Err(EngineError::Closed), "the first reason is kept");
    }
}
