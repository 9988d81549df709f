//! gzip at the door: requests that come in it are unpacked before anybody reads them, answers are packed for those who
//! take it.
//!
//! Unpacking is bounded twice: by the size that a body may have, whatever it was packed into, and by the room that all
//! bodies have together, which is taken as the bytes come out and not as the client declares them. A bomb of 32 KiB is
//! refused when its first 32 MiB are unpacked.
//!
//! Packing is off unless the configuration asks for it, because it is seldom a gain. Vectors as text shrink to 41 %, at
//! 64 to 138 MB/s: 35 us for one of 384 numbers (4.8 KB), 1.5 ms for twenty (95 KB), where all else that a gateway does
//! for a request takes some 50 us. The twenty arrive sooner over lines of less than 300 Mbit/s, and the processor pays for
//! it on any. Level 1 is twice as fast and leaves 62 to 68 %, level 6 takes twice as long as 3 and leaves 40 % (zlib-ng by
//! flate2 1.1; 2 vCPU Xeon 2.5 GHz, 21 Nov 2026).
//!
//! Both run in steps, between which others have their turn: a request of megabytes must not hold a thread for the time
//! that it takes.

use crate::intake::{BODY_BYTES_MAX, Body, Intake, NoBody, too_large};
use crate::respond::Refusal;
use crate::upstream::{Answer, AnswerBody};
use bytes::{Bytes, BytesMut};
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use gateway_core::encoding;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, VARY};
use pingora::protocols::http::ServerSession;
use replica_core::wire::error::ErrorCode;
use std::io::{Read, Write};

/// Bytes that one step reads or writes: about 0.3 ms of unpacking, 0.5 to 1 ms of packing.
const STEP_BYTES: usize = 64 << 10;

/// Of packing; see the head of this file.
const LEVEL: u32 = 3;

/// The body that was packed into `packed`.
pub(crate) async fn unpack(intake: &Intake, packed: Body) -> Result<Body, NoBody> {
    let mut decoder = MultiGzDecoder::new(&packed.bytes[..]);
    let mut place = intake.place(0)?;
    let (mut body, mut step) = (BytesMut::new(), vec![0; STEP_BYTES]);
    loop {
        let read = decoder.read(&mut step).map_err(|_| not_gzip())?;
        if read == 0 {
            return Ok(Body::new(body.freeze(), place));
        }
        if body.len() + read > BODY_BYTES_MAX {
            return Err(too_large("unpacks to more"));
        }
        intake.widen(&mut place, body.len() + read)?;
        body.extend_from_slice(&step[..read]);
        tokio::task::yield_now().await;
    }
}

fn not_gzip() -> NoBody {
    let message = "The body is not gzip, as content-encoding says, or is cut short.";
    NoBody::Refused(Refusal::new(ErrorCode::InvalidHeader, message).of(CONTENT_ENCODING_NAME))
}

/// What cannot be unpacked at all.
pub(crate) fn unknown() -> NoBody {
    let message = "The content-encoding is not spoken here; send the body as 'gzip' or without.";
    NoBody::Refused(Refusal::new(ErrorCode::UnsupportedEncoding, message).of(CONTENT_ENCODING_NAME))
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
    if encoding::takes_gzip(session.get_header(ACCEPT_ENCODING).map(http::HeaderValue::as_bytes))
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
