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

use crate::result::{RequestResult, ResultSlot};
use crate::{EngineRows, ExecutorError};

/// Requests by tag, which is the client id in the executor.
pub(super) struct RequestScheduler {
    entries: BTreeMap<u64, Entry>,
    /// Requests that arrived while suspects were retried; they are submitted afterwards, in order.
    held_back: VecDeque<u64>,
    suspects: VecDeque<u64>,
    /// Suspect that is being retried.
    retried: Option<u64>,
    next_tag: u64,
    /// Maximum number of concurrent requests.
    max_requests: usize,
    /// Reason why no further requests are accepted.
    end: Option<ExecutorError>,
}

struct Entry {
    slot: Arc<ResultSlot>,
    tokens: Vec<i32>,
    state: SubmissionState,
    /// Cancelled by the caller, and still in the executor.
    abandoned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SubmissionState {
    /// Queued here.
    Queued,
    /// Being submitted to the executor.
    Submitting,
    /// In the executor, with this id.
    Submitted(u64),
}

/// Response of the executor for one request.
pub(super) enum ExecutorResponse {
    Rows(EngineRows),
    /// With this error message.
    Failed(String),
    Cancelled,
    TimedOut,
}

/// Request to submit to the executor now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Submission {
    pub(super) tag: u64,
    pub(super) tokens: Vec<i32>,
}

/// The executor's message prefix for a request that it could not start: such an error is caused by the request and not
/// by the batch.
const REQUEST_ERROR_PREFIX: &str = "Encountered an error when fetching new request";

impl RequestScheduler {
    /// Creates a scheduler with this maximum of concurrent requests.
    pub(super) fn new(max_requests: usize) -> RequestScheduler {
        RequestScheduler {
            entries: BTreeMap::new(),
            held_back: VecDeque::new(),
            suspects: VecDeque::new(),
            retried: None,
            // A response without a tag has tag 0.
            next_tag: 1,
            max_requests,
            end: None,
        }
    }

    /// Adds a request; returns its tag, and whether it is to be submitted at once. Its result slot is registered from
    /// now on.
    pub(super) fn add(
        &mut self,
        slot: &Arc<ResultSlot>,
        tokens: &[i32],
    ) -> Result<(u64, bool), ExecutorError> {
        if let Some(end) = &self.end {
            return Err(end.clone());
        }
        if self.entries.len() >= self.max_requests {
            return Err(ExecutorError::Overloaded);
        }
        let tag = self.next_tag;
        self.next_tag += 1;
        let at_once = !self.is_retrying();
        let state = if at_once { SubmissionState::Submitting } else { SubmissionState::Queued };
        if !at_once {
            self.held_back.push_back(tag);
        }
        let entry = Entry { slot: Arc::clone(slot), tokens: tokens.to_vec(), state, abandoned: false };
        self.entries.insert(tag, entry);
        Ok((tag, at_once))
    }

    /// Records that the executor has accepted the request with this id; returns whether it must be cancelled there. It
    /// may have ended already.
    pub(super) fn submitted(&mut self, tag: u64, id: u64) -> bool {
        self.entries.get_mut(&tag).is_some_and(|entry| {
            entry.state = SubmissionState::Submitted(id);
            entry.abandoned
        })
    }

    /// Removes a request that the executor has rejected.
    pub(super) fn rejected(&mut self, tag: u64) -> Option<Arc<ResultSlot>> {
        self.retried.take_if(|retried| *retried == tag);
        self.entries.remove(&tag).map(|entry| entry.slot)
    }

    /// Processes a response of the executor; returns the result, or `None` if the request is retried or the tag is
    /// unknown.
    pub(super) fn responded(
        &mut self,
        tag: u64,
        response: ExecutorResponse,
    ) -> Option<(Arc<ResultSlot>, RequestResult)> {
        let retried = self.retried.take_if(|retried| *retried == tag).is_some();
        let entry = self.entries.get_mut(&tag)?;
        let result = match response {
            ExecutorResponse::Rows(rows) => Ok(rows),
            ExecutorResponse::Cancelled => Err(ExecutorError::Cancelled),
            ExecutorResponse::TimedOut => Err(ExecutorError::TimedOut),
            ExecutorResponse::Failed(message) if message.starts_with(REQUEST_ERROR_PREFIX) => {
                Err(ExecutorError::Rejected(message))
            }
            ExecutorResponse::Failed(message) if retried => Err(ExecutorError::BatchFailed(message)),
            ExecutorResponse::Failed(_) if entry.abandoned => Err(ExecutorError::Cancelled),
            ExecutorResponse::Failed(_) => {
                entry.state = SubmissionState::Queued;
                self.suspects.push_back(tag);
                return None;
            }
        };
        self.entries.remove(&tag).map(|entry| (entry.slot, result))
    }

    /// Returns the next request to submit.
    pub(super) fn next(&mut self) -> Option<Submission> {
        if self.end.is_some() {
            return None;
        }
        let tag = if self.suspects.is_empty() && self.retried.is_none() {
            self.held_back.pop_front()?
        } else if self.submitted_count() == 0 {
            let suspect = self.suspects.pop_front()?;
            self.retried = Some(suspect);
            suspect
        } else {
            return None;
        };
        let entry = self.entries.get_mut(&tag)?;
        entry.state = SubmissionState::Submitting;
        Some(Submission { tag, tokens: entry.tokens.clone() })
    }

    /// Returns the result slot of a request.
    pub(super) fn slot(&self, tag: u64) -> Option<Arc<ResultSlot>> {
        self.entries.get(&tag).map(|entry| Arc::clone(&entry.slot))
    }

    /// Cancels a request; returns the id to cancel in the executor, if it is there.
    pub(super) fn abandon(&mut self, tag: u64) -> Option<u64> {
        let entry = self.entries.get_mut(&tag)?;
        entry.abandoned = true;
        match entry.state {
            SubmissionState::Submitted(id) => Some(id),
            SubmissionState::Submitting => None,
            SubmissionState::Queued => {
                self.entries.remove(&tag);
                self.held_back.retain(|held_back| *held_back != tag);
                self.suspects.retain(|suspect| *suspect != tag);
                None
            }
        }
    }

    /// Rejects further requests. Returns the slots of the queued requests, and the ids to cancel in the executor.
    pub(super) fn shut_down(&mut self, error: &ExecutorError) -> (Vec<Arc<ResultSlot>>, Vec<u64>) {
        self.end.get_or_insert_with(|| error.clone());
        self.held_back.clear();
        self.suspects.clear();
        self.retried = None;
        let ended = std::mem::take(&mut self.entries);
        let ids = ended.values().filter_map(|entry| match entry.state {
            SubmissionState::Submitted(id) => Some(id),
            SubmissionState::Queued | SubmissionState::Submitting => None,
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

    pub(super) fn is_shut_down(&self) -> bool {
        self.end.is_some()
    }

    fn is_retrying(&self) -> bool {
        !self.suspects.is_empty() || self.retried.is_some() || !self.held_back.is_empty()
    }

    fn submitted_count(&self) -> usize {
        self.entries.values().filter(|entry| entry.state != SubmissionState::Queued).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scheduler(max_requests: usize, requests: i32) -> (RequestScheduler, Vec<Arc<ResultSlot>>) {
        let mut scheduler = RequestScheduler::new(max_requests);
        let slots = (1..=requests).map(|request| {
            let slot = Arc::new(ResultSlot::default());
            let (tag, at_once) = scheduler.add(&slot, &[request]).unwrap();
            assert!(at_once && !scheduler.submitted(tag, tag + 100));
            slot
        });
        let slots = slots.collect();
        (scheduler, slots)
    }

    fn failed() -> ExecutorResponse {
        ExecutorResponse::Failed("a kernel failed".to_owned())
    }

    fn rows() -> EngineRows {
        EngineRows { width: 1, numbers: vec![1.0] }
    }

    fn respond(
        scheduler: &mut RequestScheduler,
        tag: u64,
        response: ExecutorResponse,
    ) -> Option<RequestResult> {
        scheduler.responded(tag, response).map(|(_, result)| result)
    }

    #[test]
    fn of_a_failed_batch_only_requests_that_fail_alone_are_failed() {
        let (mut scheduler, _) = scheduler(8, 3);
        for tag in 1..=3 {
            assert_eq!(respond(&mut scheduler, tag, failed()), None, "a batch error is not reported");
            let all_out = tag == 3;
            let first = all_out.then(|| Submission { tag: 1, tokens: vec![1] });
            assert_eq!(scheduler.next(), first, "the first suspect is retried when the executor is empty");
        }
        assert_eq!(scheduler.next(), None, "one at a time");
        assert_eq!(respond(&mut scheduler, 1, ExecutorResponse::Rows(rows())), Some(Ok(rows())));
        assert_eq!(scheduler.next().map(|next| next.tag), Some(2));
        let culprit = Err(ExecutorError::BatchFailed("a kernel failed".to_owned()));
        assert_eq!(respond(&mut scheduler, 2, failed()), Some(culprit));
        assert_eq!(scheduler.next().map(|next| next.tag), Some(3));
        assert_eq!(respond(&mut scheduler, 3, ExecutorResponse::Rows(rows())), Some(Ok(rows())));
        assert!(!scheduler.is_busy());
    }

    #[test]
    fn requests_that_arrive_while_suspects_are_retried_wait_in_order() {
        let (mut scheduler, _) = scheduler(8, 1);
        assert_eq!(respond(&mut scheduler, 1, failed()), None);
        let late = Arc::new(ResultSlot::default());
        assert_eq!(scheduler.add(&late, &[7]), Ok((2, false)));
        assert_eq!(scheduler.add(&late, &[8]), Ok((3, false)));
        assert_eq!(scheduler.next().map(|next| next.tag), Some(1));
        assert_eq!(scheduler.next(), None);
        assert_eq!(respond(&mut scheduler, 1, ExecutorResponse::Rows(rows())), Some(Ok(rows())));
        let next: Vec<u64> = std::iter::from_fn(|| scheduler.next().map(|next| next.tag)).collect();
        assert_eq!(next, [2, 3]);
        assert_eq!(scheduler.add(&late, &[9]), Ok((4, true)));
    }

    #[test]
    fn a_request_that_the_executor_cannot_start_fails_at_once() {
        let (mut scheduler, _) = scheduler(8, 2);
        let message = format!("{REQUEST_ERROR_PREFIX}: too long");
        let rejected = Err(ExecutorError::Rejected(message.clone()));
        assert_eq!(respond(&mut scheduler, 1, ExecutorResponse::Failed(message)), Some(rejected));
        assert_eq!(respond(&mut scheduler, 2, ExecutorResponse::Rows(rows())), Some(Ok(rows())));
    }

    #[test]
    fn the_limit_of_requests_holds_at_the_limit_and_one_past_it() {
        let (mut scheduler, _) = scheduler(2, 2);
        let slot = Arc::new(ResultSlot::default());
        assert_eq!(scheduler.add(&slot, &[3]), Err(ExecutorError::Overloaded));
        assert_eq!(respond(&mut scheduler, 1, ExecutorResponse::Rows(rows())), Some(Ok(rows())));
        assert_eq!(scheduler.add(&slot, &[3]), Ok((3, true)));
        assert_eq!(scheduler.add(&slot, &[4]), Err(ExecutorError::Overloaded));
    }

    #[test]
    fn a_cancelled_request_is_removed_in_every_state() {
        let (mut scheduler, _) = scheduler(8, 2);
        assert_eq!(scheduler.abandon(1), Some(101), "in the executor: by its id");
        assert_eq!(scheduler.len(), 2, "it occupies a slot until the executor confirms");
        assert_eq!(
            respond(&mut scheduler, 1, failed()),
            Some(Err(ExecutorError::Cancelled)),
            "it is not retried"
        );
        let slot = Arc::new(ResultSlot::default());
        assert_eq!(scheduler.add(&slot, &[3]), Ok((3, true)));
        assert_eq!(scheduler.abandon(3), None, "being submitted: not yet");
        assert!(scheduler.submitted(3, 103), "as soon as it is in the executor");
        assert_eq!(respond(&mut scheduler, 2, failed()), None);
        assert_eq!(scheduler.abandon(2), None, "queued here: removed");
        assert_eq!(
            respond(&mut scheduler, 3, ExecutorResponse::Cancelled),
            Some(Err(ExecutorError::Cancelled))
        );
        assert_eq!((scheduler.next(), scheduler.is_busy()), (None, false));
    }

    #[test]
    fn a_suspect_that_the_executor_rejects_does_not_block_others() {
        let (mut scheduler, _) = scheduler(8, 2);
        assert_eq!(
            (respond(&mut scheduler, 1, failed()), respond(&mut scheduler, 2, failed())),
            (None, None)
        );
        assert_eq!(scheduler.next().map(|next| next.tag), Some(1));
        assert!(scheduler.rejected(1).is_some());
        assert_eq!(scheduler.next().map(|next| next.tag), Some(2));
    }

    #[test]
    fn shutdown_ends_queued_requests_and_cancels_those_in_the_executor() {
        let (mut scheduler, _) = scheduler(8, 2);
        let slot = Arc::new(ResultSlot::default());
        assert_eq!(scheduler.add(&slot, &[3]), Ok((3, true)));
        let (slots, ids) = scheduler.shut_down(&ExecutorError::Closed);
        assert_eq!((slots.len(), ids), (3, vec![101, 102]));
        assert_eq!(scheduler.add(&slot, &[4]), Err(ExecutorError::Closed));
        assert_eq!((scheduler.next(), scheduler.is_busy(), scheduler.is_shut_down()), (None, false, true));
        let (slots, _) = scheduler.shut_down(&ExecutorError::Broken("later".to_owned()));
        assert!(slots.is_empty());
        assert_eq!(scheduler.add(&slot, &[4]), Err(ExecutorError::Closed), "the first reason is kept");
    }
}
