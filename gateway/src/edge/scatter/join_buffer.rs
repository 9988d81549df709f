//! Buffer that joins the responses to parts, which arrive in any order, into one response in order.
//!
//! It holds the parts that arrive early, joins the next ones with `gateway_core::scatter`, and decides when the
//! response to the client can start: when it is complete if all of it fits into the buffer, otherwise when the buffer
//! is full. No IO here.

use crate::respond::Rejection;
use gateway_core::receipt::ReceiptId;
use gateway_core::scatter::join::{PartialResponse, ResponseJoiner};
use gateway_core::scatter::split::SplittableBody;
use gateway_core::timing::RegionTiming;
use http::HeaderValue;
use regions::ModelRevision;
use regions::set::RegionIndex;
use replica_api::api::ResponseShape;
use replica_api::error::ErrorCode;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Limit on the response bytes buffered for one request: received and not yet sent, and being read. Responses of parts
/// in flight are counted with their expected size, so that no part is started whose response would not fit.
///
/// Not included are the response of the next part, of at most [`PART_RESPONSE_BYTES_MAX`], and the responses of parts
/// in flight that are small enough to be read at once (`BUFFERED_RESPONSE_MAX` each, 32 MiB for `IN_FLIGHT_MAX` parts).
/// While a response is parsed it takes its size twice.
pub(super) const BUFFERED_BYTES_MAX: usize = 64 << 20;
/// Limit on the bytes of the response to one part: 512 vectors of 4,096 numbers as text take 27 MB.
pub(super) const PART_RESPONSE_BYTES_MAX: usize = 32 << 20;
/// Limit on parts in flight while the size of a response is still unknown.
pub(super) const INITIAL_PARTS_MAX: usize = 8;

/// Part whose response was received.
pub(super) struct ReceivedPart {
    pub(super) part: PartialResponse,
    pub(super) source: Source,
}

/// Origin of the response to a part.
pub(super) struct Source {
    pub(super) region: RegionIndex,
    pub(super) content_type: Option<HeaderValue>,
    /// The revision of the model that computed it.
    pub(super) revision: Option<ModelRevision>,
    pub(super) attempts: usize,
    pub(super) waited: Duration,
    pub(super) timing: RegionTiming,
    /// Number of tokens that were computed.
    pub(super) tokens: Option<u64>,
    /// Receipt of the attempt that was responded to.
    pub(super) receipt: Option<ReceiptId>,
}

/// Event from the producer of the joined response to its writer.
pub(super) enum JoinedEvent {
    Head(JoinedHead),
    Chunk(Vec<u8>),
    /// End of the response, with the number of tokens that were computed.
    End(Option<u64>),
}

/// Head of a joined response: its properties at the time when it starts.
#[derive(Clone, Default)]
pub(in crate::edge) struct JoinedHead {
    /// Length in bytes, if the response is complete.
    pub(in crate::edge) length: Option<usize>,
    pub(in crate::edge) content_type: Option<HeaderValue>,
    /// Revision of the model that computes all parts; known from the first response.
    pub(in crate::edge) revision: Option<ModelRevision>,
    /// Regions in the order of the first part that each has computed, with the receipt of that part.
    pub(in crate::edge) regions: Vec<(RegionIndex, Option<ReceiptId>)>,
    pub(in crate::edge) attempts: usize,
    /// Number of parts joined so far.
    pub(in crate::edge) parts: usize,
    pub(in crate::edge) tokens: Option<u64>,
    /// Wait and timing of the slowest part.
    pub(in crate::edge) slowest: (Duration, RegionTiming),
}

pub(super) fn response_too_large() -> Rejection {
    let message = format!(
        "The response is larger than the limit of {BUFFERED_BYTES_MAX} bytes that are buffered for it; send \
         fewer inputs, or request less output for each."
    );
    Rejection::new(ErrorCode::BodyTooLarge, message)
}

/// Joins the parts of one response.
pub(super) struct JoinBuffer {
    shape: ResponseShape,
    /// Parts received before the parts that precede them, by number.
    early: BTreeMap<usize, ReceivedPart>,
    /// Number of the next part to join.
    next: usize,
    /// `None` after all parts were joined.
    join: Option<ResponseJoiner>,
    /// Joined chunks that were not sent yet.
    unsent: VecDeque<Vec<u8>>,
    /// Bytes of `early` and `unsent`.
    buffered_bytes: usize,
    /// Bytes of the responses that are being read, by the number of their part.
    reading: BTreeMap<usize, usize>,
    /// Bytes of the largest part so far.
    largest: Option<usize>,
    head: JoinedHead,
    /// Whether the response to the client has started.
    pub(super) is_started: bool,
    is_head_sent: bool,
    is_end_sent: bool,
}

impl JoinBuffer {
    pub(super) fn new(splittable: &SplittableBody) -> JoinBuffer {
        JoinBuffer {
            shape: splittable.shape,
            early: BTreeMap::new(),
            next: 0,
            join: Some(ResponseJoiner::new(splittable.inputs(), splittable.top_n)),
            unsent: VecDeque::new(),
            buffered_bytes: 0,
            reading: BTreeMap::new(),
            largest: None,
            head: JoinedHead { tokens: Some(0), ..JoinedHead::default() },
            is_started: false,
            is_head_sent: false,
            is_end_sent: false,
        }
    }

    /// Whether the response of this part will fit too, with `in_flight` others.
    pub(super) fn has_capacity_for(&self, number: usize, in_flight: usize) -> bool {
        // Every later part waits for this one.
        if number == self.next && self.is_streamable() {
            return true;
        }
        let unread = in_flight.saturating_sub(self.reading.len());
        match self.largest {
            None => in_flight < INITIAL_PARTS_MAX,
            // A part that exceeds the limit by itself is sent alone.
            Some(_) if in_flight == 0 && self.buffered_bytes == 0 => true,
            Some(largest) => {
                self.buffered_bytes + self.reading_bytes() + (unread + 1) * largest <= BUFFERED_BYTES_MAX
            }
        }
    }

    /// Whether a response of `bytes` may be read now, and reserves the memory if so; otherwise it has to wait. A
    /// response that can never be read is rejected.
    pub(super) fn try_start_reading(&mut self, number: usize, bytes: usize) -> Result<bool, Rejection> {
        let fits = self.buffered_bytes + self.reading_bytes() + bytes <= BUFFERED_BYTES_MAX;
        let is_next = number == self.next;
        // A ranked response is buffered to its end, so waiting frees no memory.
        if bytes > PART_RESPONSE_BYTES_MAX || !fits && is_next && !self.is_streamable() {
            return Err(response_too_large());
        }
        if fits || is_next {
            self.reading.insert(number, bytes);
        }
        Ok(fits || is_next)
    }

    fn reading_bytes(&self) -> usize {
        self.reading.values().sum()
    }

    /// Releases the memory of a part that failed.
    pub(super) fn abandon(&mut self, number: usize) {
        self.reading.remove(&number);
    }

    /// Model revision of all parts, once a response was received.
    pub(super) fn revision(&self) -> Option<ModelRevision> {
        self.head.revision
    }

    /// Whether a response is of the same model revision as those received before; the first one decides.
    pub(super) fn accept_revision(&mut self, revision: Option<ModelRevision>) -> bool {
        if self.largest.is_none() {
            self.head.revision = revision;
        }
        self.head.revision == revision
    }

    pub(super) fn receive(&mut self, number: usize, received: ReceivedPart) -> Result<(), Rejection> {
        let bytes = received.part.bytes();
        self.reading.remove(&number);
        self.buffered_bytes += bytes;
        self.largest = self.largest.max(Some(bytes));
        self.early.insert(number, received);
        while let Some(ReceivedPart { part, source }) = self.early.remove(&self.next) {
            let Source { content_type, revision: _, region, attempts, waited, timing, tokens, receipt } =
                source;
            let head = &mut self.head;
            head.attempts += attempts;
            head.parts += 1;
            if head.regions.iter().all(|(listed, _)| *listed != region) {
                head.regions.push((region, receipt));
            }
            head.content_type = head.content_type.take().or(content_type);
            head.tokens = head.tokens.zip(tokens).map(|(sum, tokens)| sum + tokens);
            head.slowest = if waited > head.slowest.0 { (waited, timing) } else { head.slowest };
            let (bytes, mut out) = (part.bytes(), Vec::new());
            self.join.as_mut().expect("parts come before the end").push(part, &mut out);
            if self.is_streamable() {
                self.buffered_bytes = self.buffered_bytes - bytes + out.iter().map(Vec::len).sum::<usize>();
            }
            self.unsent.extend(out);
            self.next += 1;
        }
        if self.buffered_bytes > BUFFERED_BYTES_MAX && !self.is_streamable() {
            Err(response_too_large())
        } else {
            Ok(())
        }
    }

    /// Whether the start of the response is known before its end.
    fn is_streamable(&self) -> bool {
        match self.shape {
            ResponseShape::Rows | ResponseShape::Data => true,
            ResponseShape::Ranks | ResponseShape::Results => false,
        }
    }

    /// Starts the response early because the buffer is full. A response that cannot start before its end is rejected.
    pub(super) fn relieve(&mut self, in_flight: usize) -> Result<(), Rejection> {
        if self.is_streamable() {
            self.is_started |= !self.unsent.is_empty();
        } else if in_flight == 0 {
            return Err(response_too_large());
        }
        Ok(())
    }

    /// Completes the response after all parts were received.
    pub(super) fn finish(&mut self) {
        if let Some(join) = self.join.take() {
            let mut out = Vec::new();
            join.finish(&mut out);
            self.unsent.extend(out);
            if !self.is_started {
                self.is_started = true;
                self.head.length = Some(self.unsent.iter().map(Vec::len).sum());
            }
        }
    }

    pub(super) fn has_event(&self) -> bool {
        self.is_started
            && (!self.is_head_sent || !self.unsent.is_empty() || self.join.is_none() && !self.is_end_sent)
    }

    pub(super) fn is_finished(&self) -> bool {
        self.is_end_sent
    }

    pub(super) fn next(&mut self) -> JoinedEvent {
        if !std::mem::replace(&mut self.is_head_sent, true) {
            return JoinedEvent::Head(self.head.clone());
        }
        match self.unsent.pop_front() {
            Some(chunk) => {
                self.buffered_bytes = self.buffered_bytes.saturating_sub(chunk.len());
                JoinedEvent::Chunk(chunk)
            }
            None => {
                self.is_end_sent = true;
                JoinedEvent::End(self.head.tokens)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(buffered_bytes: usize, largest: Option<usize>) -> JoinBuffer {
        let splittable = SplittableBody::read("/embed", br#"{"inputs":["a","b"]}"#);
        let splittable = splittable.ok().flatten().expect("two texts can be split");
        JoinBuffer { buffered_bytes, largest, ..JoinBuffer::new(&splittable) }
    }

    #[test]
    fn the_buffer_accepts_responses_up_to_its_limit() {
        let check = |buffered_bytes, largest, in_flight, expected| {
            let has_capacity = buffer(buffered_bytes, largest).has_capacity_for(1, in_flight);
            assert_eq!(has_capacity, expected, "{buffered_bytes} {largest:?} {in_flight}");
        };
        check(0, None, INITIAL_PARTS_MAX - 1, true);
        check(0, None, INITIAL_PARTS_MAX, false);
        check(0, Some(BUFFERED_BYTES_MAX / 4), 3, true);
        check(0, Some(BUFFERED_BYTES_MAX / 4 + 1), 3, false);
        check(BUFFERED_BYTES_MAX / 2, Some(BUFFERED_BYTES_MAX / 4), 1, true);
        check(BUFFERED_BYTES_MAX / 2 + 1, Some(BUFFERED_BYTES_MAX / 4), 1, false);
        // A response that exceeds the limit is read alone, after everything else was sent.
        check(0, Some(BUFFERED_BYTES_MAX + 1), 0, true);
        check(1, Some(BUFFERED_BYTES_MAX + 1), 0, false);
        // The next part is sent in any case.
        assert!(buffer(BUFFERED_BYTES_MAX, Some(BUFFERED_BYTES_MAX)).has_capacity_for(0, 9));
    }

    #[test]
    fn a_large_response_is_read_up_to_the_limit_and_the_next_one_always() {
        let check = |buffered_bytes, number, bytes, expected: Result<bool, ErrorCode>| {
            let started =
                buffer(buffered_bytes, None).try_start_reading(number, bytes).map_err(|refusal| refusal.code);
            assert_eq!(started, expected, "{buffered_bytes} {number} {bytes}");
        };
        check(BUFFERED_BYTES_MAX - 7, 1, 7, Ok(true));
        check(BUFFERED_BYTES_MAX - 7, 1, 8, Ok(false));
        check(BUFFERED_BYTES_MAX - 7, 0, 8, Ok(true));
        check(0, 0, PART_RESPONSE_BYTES_MAX, Ok(true));
        check(0, 0, PART_RESPONSE_BYTES_MAX + 1, Err(ErrorCode::BodyTooLarge));
        // A response that is being read counts until it ends.
        let mut rows = buffer(0, None);
        assert_eq!(rows.try_start_reading(1, PART_RESPONSE_BYTES_MAX).ok(), Some(true));
        assert_eq!(rows.try_start_reading(2, PART_RESPONSE_BYTES_MAX).ok(), Some(true));
        assert_eq!(rows.try_start_reading(3, 1).ok(), Some(false));
        rows.abandon(1);
        assert_eq!(rows.try_start_reading(3, 1).ok(), Some(true));
        // A ranked response is buffered to its end.
        let mut ranked = JoinBuffer { shape: ResponseShape::Ranks, ..buffer(BUFFERED_BYTES_MAX, None) };
        assert_eq!(ranked.try_start_reading(1, 1).ok(), Some(false));
        assert_eq!(
            ranked.try_start_reading(0, 1).err().map(|refusal| refusal.code),
            Some(ErrorCode::BodyTooLarge)
        );
    }

    #[test]
    fn all_parts_have_the_model_revision_of_the_first() {
        let revision = |text: &str| text.parse::<ModelRevision>().ok();
        let (one, other) = (revision("00000000000000aa"), revision("00000000000000bb"));
        let mut parts = buffer(0, None);
        assert!(parts.accept_revision(other) && parts.accept_revision(one), "no part was received yet");
        parts.largest = Some(1);
        assert_eq!(parts.revision(), one);
        assert!(parts.accept_revision(one));
        assert!(!parts.accept_revision(other) && !parts.accept_revision(None));
    }

    #[test]
    fn a_full_buffer_rejects_a_response_that_cannot_start_early() {
        let mut ranked = buffer(BUFFERED_BYTES_MAX, Some(1));
        ranked.shape = ResponseShape::Results;
        assert!(ranked.relieve(1).is_ok(), "parts in flight may still complete it");
        assert_eq!(ranked.relieve(0).err().map(|refusal| refusal.code), Some(ErrorCode::BodyTooLarge));
        let mut rows = buffer(BUFFERED_BYTES_MAX, Some(1));
        assert!(rows.relieve(0).is_ok() && !rows.is_started, "there is no chunk to start with yet");
        rows.unsent.push_back(vec![b'[']);
        assert!(rows.relieve(0).is_ok() && rows.is_started);
    }
}
