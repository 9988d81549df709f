//! The answers of pieces, in whatever order they arrive, on their way to one answer in order.
//!
//! It holds what is there before its turn, has `gateway_core::scatter` join what is next, and says when the client can be
//! told: of an answer that is held whole when all of it is there, of a larger one when the room is full. No IO here.

use crate::respond::Rejection;
use gateway_core::receipt::ReceiptId;
use gateway_core::scatter::ResponseShape;
use gateway_core::scatter::join::{PartialResponse, ResponseJoiner};
use gateway_core::scatter::split::SplittableBody;
use gateway_core::timing::RegionTiming;
use http::HeaderValue;
use regions::ModelRevision;
use regions::set::RegionIndex;
use replica_core::wire::error::ErrorCode;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Bytes of answers that are held for one request: what is there and not yet told, and what is being read. What the pieces
/// under way will bring is counted as far as is known, so that none is begun for whose answer there will be no room.
///
/// Beyond it are only the answer whose turn it is, of at most [`PIECE_ANSWER_MAX`], and those of the pieces under way that
/// are small enough to be read whole at once (`BUFFERED_RESPONSE_MAX`, for `UNDER_WAY_MAX` of them 32 MiB). While it is read an
/// answer is there twice.
pub(super) const HELD_MAX: usize = 64 << 20;
/// Bytes of one piece's answer: 512 vectors of 4,096 numbers as text are 27 MB.
pub(super) const PIECE_ANSWER_MAX: usize = 32 << 20;
/// Pieces under way while nobody knows how large an answer to one is.
pub(super) const FIRST_PIECES_MAX: usize = 8;

/// A piece that was answered.
pub(super) struct Arrived {
    pub(super) part: PartialResponse,
    pub(super) source: Source,
}

/// Where the answer to a piece comes from.
pub(super) struct Source {
    pub(super) region: RegionIndex,
    pub(super) content_type: Option<HeaderValue>,
    /// The revision of the model that computed it.
    pub(super) revision: Option<ModelRevision>,
    pub(super) attempts: usize,
    pub(super) waited: Duration,
    pub(super) timing: RegionTiming,
    /// That were computed.
    pub(super) tokens: Option<u64>,
    /// Of the attempt that was answered.
    pub(super) receipt: Option<ReceiptId>,
}

/// What the producer of an answer tells the one who writes it.
pub(super) enum Told {
    Head(JoinedHead),
    Chunk(Vec<u8>),
    /// All of it was told; so many tokens were computed.
    End(Option<u64>),
}

/// What is known of an answer when it begins.
#[derive(Clone, Default)]
pub(in crate::edge) struct JoinedHead {
    /// How long it is, if all of it is there.
    pub(in crate::edge) length: Option<usize>,
    pub(in crate::edge) content_type: Option<HeaderValue>,
    /// The revision of the model that computes all of it; known from the first part that arrives.
    pub(in crate::edge) revision: Option<ModelRevision>,
    /// In the order of the first piece that each has answered, with the receipt of that.
    pub(in crate::edge) regions: Vec<(RegionIndex, Option<ReceiptId>)>,
    pub(in crate::edge) attempts: usize,
    /// Pieces whose answers were joined so far.
    pub(in crate::edge) parts: usize,
    pub(in crate::edge) tokens: Option<u64>,
    /// Of the piece that was waited for longest.
    pub(in crate::edge) slowest: (Duration, RegionTiming),
}

pub(super) fn too_much() -> Rejection {
    let message = format!(
        "The answer is larger than can be held until it is whole, {HELD_MAX} bytes; ask for fewer inputs, or for less of \
         each."
    );
    Rejection::new(ErrorCode::BodyTooLarge, message)
}

/// The parts of an answer on their way into it.
pub(super) struct Joining {
    shape: ResponseShape,
    /// Parts that are there before their turn, by number.
    early: BTreeMap<usize, Arrived>,
    /// The number of the next part.
    next: usize,
    /// `None` when all parts are in.
    join: Option<ResponseJoiner>,
    /// What is known of the answer and not yet told.
    untold: VecDeque<Vec<u8>>,
    /// Bytes of all of that.
    held: usize,
    /// Bytes of the answers that are being read, by the number of their piece.
    reading: BTreeMap<usize, usize>,
    /// Bytes of the largest part so far.
    largest: Option<usize>,
    head: JoinedHead,
    /// The client is being told.
    pub(super) begun: bool,
    head_told: bool,
    end_told: bool,
}

impl Joining {
    pub(super) fn new(cutting: &SplittableBody) -> Joining {
        Joining {
            shape: cutting.shape,
            early: BTreeMap::new(),
            next: 0,
            join: Some(ResponseJoiner::new(cutting.inputs(), cutting.top_n)),
            untold: VecDeque::new(),
            held: 0,
            reading: BTreeMap::new(),
            largest: None,
            head: JoinedHead { tokens: Some(0), ..JoinedHead::default() },
            begun: false,
            head_told: false,
            end_told: false,
        }
    }

    /// Whether there is room for the answer of this piece as well, when so many are under way.
    pub(super) fn has_room_for(&self, number: usize, under_way: usize) -> bool {
        // Whatever else is there waits for it.
        if number == self.next && self.goes_out_in_order() {
            return true;
        }
        let coming = under_way.saturating_sub(self.reading.len());
        match self.largest {
            None => under_way < FIRST_PIECES_MAX,
            // One that does not fit at all has to come alone.
            Some(_) if under_way == 0 && self.held == 0 => true,
            Some(largest) => self.held + self.being_read() + (coming + 1) * largest <= HELD_MAX,
        }
    }

    /// Whether an answer of so many bytes may be read now, which then counts as held; if not, it can wait. One that can
    /// never be is too much.
    pub(super) fn lets_in(&mut self, number: usize, bytes: usize) -> Result<bool, Rejection> {
        let fits = self.held + self.being_read() + bytes <= HELD_MAX;
        let its_turn = number == self.next;
        // What is ranked is held to the end, so room will never come.
        if bytes > PIECE_ANSWER_MAX || !fits && its_turn && !self.goes_out_in_order() {
            return Err(too_much());
        }
        if fits || its_turn {
            self.reading.insert(number, bytes);
        }
        Ok(fits || its_turn)
    }

    fn being_read(&self) -> usize {
        self.reading.values().sum()
    }

    /// This piece is no longer under way and was not answered.
    pub(super) fn left(&mut self, number: usize) {
        self.reading.remove(&number);
    }

    /// The revision that every part is of, once one has arrived.
    pub(super) fn revision(&self) -> Option<ModelRevision> {
        self.head.revision
    }

    /// Whether a part can stand beside those that are there: all of an answer is computed by one model. The first decides.
    pub(super) fn is_of_one_model(&mut self, revision: Option<ModelRevision>) -> bool {
        if self.largest.is_none() {
            self.head.revision = revision;
        }
        self.head.revision == revision
    }

    pub(super) fn arrived(&mut self, number: usize, arrived: Arrived) -> Result<(), Rejection> {
        let bytes = arrived.part.bytes();
        self.reading.remove(&number);
        self.held += bytes;
        self.largest = self.largest.max(Some(bytes));
        self.early.insert(number, arrived);
        while let Some(Arrived { part, source }) = self.early.remove(&self.next) {
            let Source { content_type, revision: _, region, attempts, waited, timing, tokens, receipt } =
                source;
            let head = &mut self.head;
            head.attempts += attempts;
            head.parts += 1;
            if head.regions.iter().all(|(known, _)| *known != region) {
                head.regions.push((region, receipt));
            }
            head.content_type = head.content_type.take().or(content_type);
            head.tokens = head.tokens.zip(tokens).map(|(sum, tokens)| sum + tokens);
            head.slowest = if waited > head.slowest.0 { (waited, timing) } else { head.slowest };
            let (bytes, mut out) = (part.bytes(), Vec::new());
            self.join.as_mut().expect("parts come before the end").push(part, &mut out);
            if self.goes_out_in_order() {
                self.held = self.held - bytes + out.iter().map(Vec::len).sum::<usize>();
            }
            self.untold.extend(out);
            self.next += 1;
        }
        if self.held > HELD_MAX && !self.goes_out_in_order() { Err(too_much()) } else { Ok(()) }
    }

    /// Whether the beginning of the answer is known before its end.
    fn goes_out_in_order(&self) -> bool {
        match self.shape {
            ResponseShape::Rows | ResponseShape::Data => true,
            ResponseShape::Ranks | ResponseShape::Results => false,
        }
    }

    /// There is no room for another piece: what is there has to be told before all is. What cannot be is too much.
    pub(super) fn make_room(&mut self, under_way: usize) -> Result<(), Rejection> {
        if self.goes_out_in_order() {
            self.begun |= !self.untold.is_empty();
        } else if under_way == 0 {
            return Err(too_much());
        }
        Ok(())
    }

    /// All parts are there.
    pub(super) fn finish(&mut self) {
        if let Some(join) = self.join.take() {
            let mut out = Vec::new();
            join.finish(&mut out);
            self.untold.extend(out);
            if !self.begun {
                self.begun = true;
                self.head.length = Some(self.untold.iter().map(Vec::len).sum());
            }
        }
    }

    pub(super) fn has_something_to_tell(&self) -> bool {
        self.begun && (!self.head_told || !self.untold.is_empty() || self.join.is_none() && !self.end_told)
    }

    pub(super) fn is_told(&self) -> bool {
        self.end_told
    }

    pub(super) fn next(&mut self) -> Told {
        if !std::mem::replace(&mut self.head_told, true) {
            return Told::Head(self.head.clone());
        }
        match self.untold.pop_front() {
            Some(chunk) => {
                self.held = self.held.saturating_sub(chunk.len());
                Told::Chunk(chunk)
            }
            None => {
                self.end_told = true;
                Told::End(self.head.tokens)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joining(held: usize, largest: Option<usize>) -> Joining {
        let cutting = SplittableBody::read("/embed", br#"{"inputs":["a","b"]}"#);
        let cutting = cutting.ok().flatten().expect("two texts can be cut");
        Joining { held, largest, ..Joining::new(&cutting) }
    }

    #[test]
    fn the_room_for_answers_holds_at_its_limit_and_one_past_it() {
        let check = |held, largest, under_way, expected| {
            let has_room = joining(held, largest).has_room_for(1, under_way);
            assert_eq!(has_room, expected, "{held} {largest:?} {under_way}");
        };
        check(0, None, FIRST_PIECES_MAX - 1, true);
        check(0, None, FIRST_PIECES_MAX, false);
        check(0, Some(HELD_MAX / 4), 3, true);
        check(0, Some(HELD_MAX / 4 + 1), 3, false);
        check(HELD_MAX / 2, Some(HELD_MAX / 4), 1, true);
        check(HELD_MAX / 2 + 1, Some(HELD_MAX / 4), 1, false);
        // One that does not fit comes alone, when all else was told.
        check(0, Some(HELD_MAX + 1), 0, true);
        check(1, Some(HELD_MAX + 1), 0, false);
        // And the one that all others wait for comes in any case.
        assert!(joining(HELD_MAX, Some(HELD_MAX)).has_room_for(0, 9));
    }

    #[test]
    fn a_large_answer_is_let_in_up_to_the_limit_and_the_next_one_always() {
        let check = |held, number, bytes, expected: Result<bool, ErrorCode>| {
            let let_in = joining(held, None).lets_in(number, bytes).map_err(|refusal| refusal.code);
            assert_eq!(let_in, expected, "{held} {number} {bytes}");
        };
        check(HELD_MAX - 7, 1, 7, Ok(true));
        check(HELD_MAX - 7, 1, 8, Ok(false));
        check(HELD_MAX - 7, 0, 8, Ok(true));
        check(0, 0, PIECE_ANSWER_MAX, Ok(true));
        check(0, 0, PIECE_ANSWER_MAX + 1, Err(ErrorCode::BodyTooLarge));
        // What is read counts, until it is over.
        let mut rows = joining(0, None);
        assert_eq!(rows.lets_in(1, PIECE_ANSWER_MAX).ok(), Some(true));
        assert_eq!(rows.lets_in(2, PIECE_ANSWER_MAX).ok(), Some(true));
        assert_eq!(rows.lets_in(3, 1).ok(), Some(false));
        rows.left(1);
        assert_eq!(rows.lets_in(3, 1).ok(), Some(true));
        // What is ranked is held to the end.
        let mut ranked = Joining { shape: ResponseShape::Ranks, ..joining(HELD_MAX, None) };
        assert_eq!(ranked.lets_in(1, 1).ok(), Some(false));
        assert_eq!(ranked.lets_in(0, 1).err().map(|refusal| refusal.code), Some(ErrorCode::BodyTooLarge));
    }

    #[test]
    fn all_parts_are_of_the_model_of_the_first() {
        let revision = |text: &str| text.parse::<ModelRevision>().ok();
        let (one, other) = (revision("00000000000000aa"), revision("00000000000000bb"));
        let mut parts = joining(0, None);
        assert!(parts.is_of_one_model(other) && parts.is_of_one_model(one), "none is there yet");
        parts.largest = Some(1);
        assert_eq!(parts.revision(), one);
        assert!(parts.is_of_one_model(one));
        assert!(!parts.is_of_one_model(other) && !parts.is_of_one_model(None));
    }

    #[test]
    fn what_cannot_be_told_before_its_end_is_too_much() {
        let mut ranked = joining(HELD_MAX, Some(1));
        ranked.shape = ResponseShape::Results;
        assert!(ranked.make_room(1).is_ok(), "what is under way may still end it");
        assert_eq!(ranked.make_room(0).err().map(|refusal| refusal.code), Some(ErrorCode::BodyTooLarge));
        let mut rows = joining(HELD_MAX, Some(1));
        assert!(rows.make_room(0).is_ok() && !rows.begun, "there is nothing to begin with yet");
        rows.untold.push_back(vec![b'[']);
        assert!(rows.make_room(0).is_ok() && rows.begun);
    }
}
