//! Who goes to the executor when, and who goes alone.
//!
//! The executor fails a batch as a whole: one request with a token that its kernels choke on, and everybody who was being
//! computed is answered with the same error. So an error in company convicts nobody. Whoever got one is a *suspect*; nobody
//! new goes in until everybody has come out; then the suspects go in one by one, each alone, and the one that fails alone is
//! the culprit. Everybody is tried twice at most.
//!
//! Only decisions: no lock, no clock, no executor.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::answer::{Answer, Slot};
use crate::{EngineError, Rows};

/// Requests by the tag that travels with them as the client's id.
pub(super) struct Desk {
    entries: BTreeMap<u64, Entry>,
    /// Taken while suspects were being tried; they go in afterwards, in their order.
    held: VecDeque<u64>,
    suspects: VecDeque<u64>,
    /// The suspect that is being tried.
    alone: Option<u64>,
    next_tag: u64,
    /// Requests that are taken at once.
    most: usize,
    /// Nothing is taken any more, for this reason.
    end: Option<EngineError>,
}

struct Entry {
    slot: Arc<Slot>,
    tokens: Vec<i32>,
    place: Place,
    /// Nobody waits for it, but the executor still has it.
    abandoned: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Waits here.
    Outside,
    /// Somebody is giving it to the executor.
    Entering,
    /// The executor has it under this id.
    Inside(u64),
}

/// What the executor said of one request.
pub(super) enum Said {
    Rows(Rows),
    /// With this message.
    Failed(String),
    Cancelled,
    TimedOut,
}

/// A request that is to be given to the executor now.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entrant {
    pub(super) tag: u64,
    pub(super) tokens: Vec<i32>,
}

/// The executor's prefix for a request that it could not even begin with: that is about the request and not the batch.
const OF_THE_REQUEST: &str = "Encountered an error when fetching new request";

impl Desk {
    /// Takes so many requests at once.
    pub(super) fn new(most: usize) -> Desk {
        Desk {
            entries: BTreeMap::new(),
            held: VecDeque::new(),
            suspects: VecDeque::new(),
            alone: None,
            // 0 is what an answer without a tag counts as.
            next_tag: 1,
            most,
            end: None,
        }
    }

    /// Takes a request, and says whether it goes in at once. Whoever takes it has registered for the answer by that.
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

    /// The executor has it, under this id; says whether it is to be cancelled. It may have been answered already.
    pub(super) fn entered(&mut self, tag: u64, id: u64) -> bool {
        self.entries.get_mut(&tag).is_some_and(|entry| {
            entry.place = Place::Inside(id);
            entry.abandoned
        })
    }

    /// The executor did not take it.
    pub(super) fn refused(&mut self, tag: u64) -> Option<Arc<Slot>> {
        self.alone.take_if(|alone| *alone == tag);
        self.entries.remove(&tag).map(|entry| entry.slot)
    }

    /// What becomes of what the executor said; nothing if it is to be tried again, or if nobody knows the tag.
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

    /// Who goes in now.
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

    /// Where its answer goes.
    pub(super) fn slot(&self, tag: u64) -> Option<Arc<Slot>> {
        self.entries.get(&tag).map(|entry| Arc::clone(&entry.slot))
    }

    /// Nobody waits for it any more; the id under which the executor is to give it up.
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

    /// Takes nothing more. Everybody who waits is told why; the ids are those that the executor is to give up.
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

    /// Whether the executor has something to answer, or will.
    pub(super) fn is_busy(&self) -> bool {
        !self.entries.is_empty()
    }

    /// Requests that were taken and have not ended.
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
    fn of_a_failed_batch_only_who_fails_alone_fails() {
        let (mut desk, _) = desk(8, 3);
        for tag in 1..=3 {
            assert_eq!(answer(&mut desk, tag, failed()), None, "an error in company convicts nobody");
            let all_out = tag == 3;
            let first = all_out.then(|| Entrant { tag: 1, tokens: vec![1] });
            assert_eq!(desk.next(), first, "the first suspect goes in when everybody is out");
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
    fn who_comes_while_suspects_are_tried_waits_and_keeps_his_turn() {
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
    fn a_request_that_the_executor_cannot_begin_with_is_convicted_at_once() {
        let (mut desk, _) = desk(8, 2);
        let message = format!("{OF_THE_REQUEST}: too long");
        let rejected = Err(EngineError::Rejected(message.clone()));
        assert_eq!(answer(&mut desk, 1, Said::Failed(message)), Some(rejected));
        assert_eq!(answer(&mut desk, 2, Said::Rows(rows())), Some(Ok(rows())));
    }

    #[test]
    fn it_takes_as_many_as_it_says_and_not_one_more() {
        let (mut desk, _) = desk(2, 2);
        let slot = Arc::new(Slot::default());
        assert_eq!(desk.take(&slot, &[3]), Err(EngineError::Overloaded));
        assert_eq!(answer(&mut desk, 1, Said::Rows(rows())), Some(Ok(rows())));
        assert_eq!(desk.take(&slot, &[3]), Ok((3, true)));
        assert_eq!(desk.take(&slot, &[4]), Err(EngineError::Overloaded));
    }

    #[test]
    fn who_is_given_up_is_cancelled_where_he_is() {
        let (mut desk, _) = desk(8, 2);
        assert_eq!(desk.abandon(1), Some(101), "inside: by his id");
        assert_eq!(desk.len(), 2, "until the executor says so it holds a place of his");
        assert_eq!(
            answer(&mut desk, 1, failed()),
            Some(Err(EngineError::Cancelled)),
            "and is not tried again"
        );
        let slot = Arc::new(Slot::default());
        assert_eq!(desk.take(&slot, &[3]), Ok((3, true)));
        assert_eq!(desk.abandon(3), None, "on his way in: nothing yet");
        assert!(desk.entered(3, 103), "but as soon as he is");
        assert_eq!(answer(&mut desk, 2, failed()), None);
        assert_eq!(desk.abandon(2), None, "outside: he is simply gone");
        assert_eq!(answer(&mut desk, 3, Said::Cancelled), Some(Err(EngineError::Cancelled)));
        assert_eq!((desk.next(), desk.is_busy()), (None, false));
    }

    #[test]
    fn a_suspect_that_is_not_taken_back_frees_the_way() {
        let (mut desk, _) = desk(8, 2);
        assert_eq!((answer(&mut desk, 1, failed()), answer(&mut desk, 2, failed())), (None, None));
        assert_eq!(desk.next().map(|next| next.tag), Some(1));
        assert!(desk.refused(1).is_some());
        assert_eq!(desk.next().map(|next| next.tag), Some(2));
    }

    #[test]
    fn at_the_end_everybody_is_told_and_the_executor_gives_up_what_it_has() {
        let (mut desk, _) = desk(8, 2);
        let slot = Arc::new(Slot::default());
        assert_eq!(desk.take(&slot, &[3]), Ok((3, true)));
        let (slots, ids) = desk.end(&EngineError::Closed);
        assert_eq!((slots.len(), ids), (3, vec![101, 102]));
        assert_eq!(desk.take(&slot, &[4]), Err(EngineError::Closed));
        assert_eq!((desk.next(), desk.is_busy(), desk.has_ended()), (None, false, true));
        let (slots, _) = desk.end(&EngineError::Broken("later".to_owned()));
        assert!(slots.is_empty());
        assert_eq!(desk.take(&slot, &[4]), Err(EngineError::Closed), "the first reason stays");
    }
}
