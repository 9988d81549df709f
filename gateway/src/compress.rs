//! gzip at the door: requests that come in it are unpacked before anybody reads them, answers are packed for those who
//! take it.
//!
//! Unpacking is bounded in size (that of a body, whatever it was packed into, and [`EXPANSION_MAX`] times what was sent), in
//! memory (reserved as the bytes come out and not as the client declares them), and in time: what is more than a step is done
//! on the threads for such work, one request of a tenant at a time ([`crate::cpu`]).
//!
//! Packing is off unless the configuration asks for it, because it is seldom a gain. Vectors as text shrink to 41 %, at
//! 64 to 138 MB/s: 35 us for one of 384 numbers (4.8 KB), 1.5 ms for twenty (95 KB), where all else that a gateway does
//! for a request takes some 50 us. The twenty arrive sooner over lines of less than 300 Mbit/s, and the processor pays for
//! it on any. Level 1 is twice as fast and leaves 62 to 68 %, level 6 takes twice as long as 3 and leaves 40 % (zlib-ng by
//! flate2 1.1; 2 vCPU Xeon 2.5 GHz, 21 Nov 2026).
//!
//! Packing runs in steps, between which others have their turn: a response of megabytes must not hold a thread for the time
//! that it takes.

use crate::cpu::CpuPool;
use crate::intake::{BODY_BYTES_MAX, Body, NoBody, Reservation, capacity, too_large};
use crate::metrics::NotTaken;
use crate::respond::Refusal;
use crate::upstream::{Answer, AnswerBody};
use bytes::buf::Reader;
use bytes::{Buf, Bytes, BytesMut};
use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use gateway_core::encoding;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, VARY};
use pingora::protocols::http::ServerSession;
use replica_core::wire::error::ErrorCode;
use std::io::{Read, Write};

/// Bytes that one step reads or writes: about 0.3 ms of unpacking, 0.5 to 1 ms of packing.
const STEP_BYTES: usize = 64 << 10;
/// Bytes that are unpacked at once.
const CHUNK_BYTES: usize = 16 << 10;
/// How much larger a body may be than what was sent, beyond the first [`EXPANSION_FREE_BYTES`]. Text packs to a third or a
/// tenth; a bomb is the best that gzip can do, 1,030.
pub(crate) const EXPANSION_MAX: usize = 200;
/// So much may be unpacked from however little: a batch of the same short text again and again.
const EXPANSION_FREE_BYTES: usize = 1 << 20;
/// Parts that are packed each for itself and sent one behind the other (RFC 1952, 2.2), which hardly anybody does: an empty
/// one costs us a thousand times what its twenty bytes cost a client.
const MEMBERS_MAX: usize = 64;

/// Of packing; see the head of this file.
const LEVEL: u32 = 3;

/// The body that was packed into `packed`. Its memory is counted by `reservation`.
pub(crate) async fn unpack(
    cpu: &CpuPool,
    tenant: Option<usize>,
    packed: Body,
    reservation: Reservation,
) -> Result<Body, NoBody> {
    let mut unpacking = Unpacking {
        decoder: GzDecoder::new(packed.bytes.clone().reader()),
        declared: 0,
        body: BytesMut::new(),
        reservation,
        members: 1,
        packed,
    };
    let processed = |unpacking: &Unpacking, none: NoBody| none.having_processed(unpacking.body.len());
    match unpacking.step(STEP_BYTES) {
        Ok(true) => Ok(unpacking.end()),
        Ok(false) => {
            // The start is valid gzip, so the last bytes are a trailer and not text.
            unpacking.read_declared_length().map_err(|none| processed(&unpacking, none))?;
            let rest = move || match unpacking.step(BODY_BYTES_MAX) {
                Ok(_) => Ok(unpacking.end()),
                Err(none) => Err(processed(&unpacking, none)),
            };
            cpu.run(tenant, rest).await
        }
        Err(none) => Err(processed(&unpacking, none)),
    }
}

/// A body that is being unpacked.
struct Unpacking {
    decoder: GzDecoder<Reader<Bytes>>,
    /// Length of the body by the trailer of its last member; 0 before the trailer was read.
    declared: usize,
    body: BytesMut,
    reservation: Reservation,
    /// Of which this is the last that was begun.
    members: usize,
    /// The body as it was sent.
    packed: Body,
}

impl Unpacking {
    /// Unpacks `bytes` more, and at most a chunk beyond them. Whether that was all.
    fn step(&mut self, bytes: usize) -> Result<bool, NoBody> {
        let until = self.body.len().saturating_add(bytes);
        let mut chunk = [0; CHUNK_BYTES];
        while self.body.len() <= until {
            let read = self.decoder.read(&mut chunk).map_err(|_| not_gzip())?;
            if read == 0 {
                if !self.decoder.get_ref().get_ref().has_remaining() {
                    return Ok(true);
                }
                self.next_member()?;
                continue;
            }
            self.take(&chunk[..read])?;
        }
        Ok(false)
    }

    /// Reads the length of the body from its trailer (RFC 1952, 2.3.1: ISIZE), and refuses a body that is too large before it is
    /// unpacked. A client can write any number there: bounds are checked again while unpacking.
    fn read_declared_length(&mut self) -> Result<(), NoBody> {
        let trailer = self.packed.bytes.last_chunk().copied();
        self.declared = trailer.map_or(0, |trailer| u32::from_le_bytes(trailer) as usize);
        check_length(self.declared, self.packed.bytes.len())
    }

    fn next_member(&mut self) -> Result<(), NoBody> {
        if self.members == MEMBERS_MAX {
            return Err(not_gzip());
        }
        self.members += 1;
        let rest = self.decoder.get_ref().get_ref().clone();
        self.decoder = GzDecoder::new(rest.reader());
        Ok(())
    }

    fn take(&mut self, chunk: &[u8]) -> Result<(), NoBody> {
        let length = self.body.len() + chunk.len();
        check_length(length, self.packed.bytes.len())?;
        if length > self.body.capacity() {
            // What the trailer declares is taken at once: to double step by step would copy all of it once more.
            let capacity = match length <= self.declared {
                true => self.declared,
                false => capacity(self.body.capacity(), length, None).min(BODY_BYTES_MAX),
            };
            self.reservation.grow_to(capacity)?;
            self.body.reserve(capacity - self.body.len());
        }
        self.body.extend_from_slice(chunk);
        Ok(())
    }

    fn end(self) -> Body {
        Body::new(self.body.freeze(), self.reservation)
    }
}

/// Refuses a body that unpacks to `length` bytes from so many, if that is too much.
fn check_length(length: usize, packed_bytes: usize) -> Result<(), NoBody> {
    if length > BODY_BYTES_MAX {
        return Err(too_large("unpacks to more"));
    }
    if length.saturating_sub(EXPANSION_FREE_BYTES) > packed_bytes.saturating_mul(EXPANSION_MAX) {
        return Err(too_large(&format!("unpacks to more than {EXPANSION_MAX} times what was sent")));
    }
    Ok(())
}

fn not_gzip() -> NoBody {
    let message = format!(
        "The body is not gzip, as content-encoding says, is cut short, or has more than {MEMBERS_MAX} members."
    );
    let refusal = Refusal::new(ErrorCode::InvalidHeader, message).of(CONTENT_ENCODING_NAME);
    NoBody::Refused(NotTaken::Malformed, refusal)
}

/// What cannot be unpacked at all.
pub(crate) fn unknown() -> NoBody {
    let message = "The content-encoding is not spoken here; send the body as 'gzip' or without.";
    let refusal = Refusal::new(ErrorCode::UnsupportedEncoding, message).of(CONTENT_ENCODING_NAME);
    NoBody::Refused(NotTaken::Malformed, refusal)
}

const CONTENT_ENCODING_NAME: &str = "content-encoding";

/// Packs an answer of at least `from` bytes of JSON for a client that takes it. What is so large that it is passed on as
/// it comes is passed on as it is.
pub(crate) async fn pack(session: &ServerSession, mut answer: Answer, from: Option<usize>) -> Answer {
    let (Some(from), AnswerBody::Whole(body)) = (from, &answer.body) else {
        return answer;
    };
    let json = answer
        .head
        .headers
        .get(CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
    if body.len() < from || !json || answer.head.headers.contains_key(CONTENT_ENCODING) {
        return answer;
    }
    let insert = |answer: &mut Answer, name: http::HeaderName, value: &str| {
        answer.head.headers.insert(name, value.parse().expect("our own headers are valid"));
    };
    insert(&mut answer, VARY, ACCEPT_ENCODING.as_str());
    if encoding::accepts_gzip(session.get_header(ACCEPT_ENCODING).map(http::HeaderValue::as_bytes))
        && let AnswerBody::Whole(body) = &answer.body
    {
        let packed = packed(body).await;
        insert(&mut answer, CONTENT_ENCODING, "gzip");
        insert(&mut answer, CONTENT_LENGTH, &packed.len().to_string());
        answer.body = AnswerBody::Whole(packed);
    }
    answer
}

async fn packed(body: &[u8]) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::with_capacity(body.len() / 2), Compression::new(LEVEL));
    for step in body.chunks(STEP_BYTES) {
        encoder.write_all(step).expect("a Vec takes every write");
        tokio::task::yield_now().await;
    }
    encoder.finish().expect("a Vec takes every write").into()
}
