//! gzip at the listener: decompresses requests, and compresses responses for clients that accept it.
//!
//! Decompression is bounded in size (the limit of an uncompressed body, and [`EXPANSION_MAX`] times the compressed
//! bytes), in memory (reserved as output is produced, not as the client declares it), and in time: anything larger than
//! one step runs on the body threads, one request of a tenant at a time ([`crate::cpu`]).
//!
//! Compression is off unless the configuration enables it, because it rarely pays. Vectors as text shrink to 41 %, at
//! 64 to 138 MB/s: 35 us for one of 384 numbers (4.8 KB), 1.5 ms for twenty (95 KB), where everything else a gateway
//! does for a request takes some 50 us. The twenty arrive sooner over links of less than 300 Mbit/s, and the CPU cost
//! is paid on every link. Level 1 is twice as fast and leaves 62 to 68 %, level 6 takes twice as long as 3 and leaves
//! 40 % (zlib-ng by flate2 1.1; 2 vCPU Xeon 2.5 GHz, 21 Nov 2026).
//!
//! Compression yields to the reactor between steps: a response of megabytes must not occupy a thread for the whole
//! time.

use crate::body_memory::{BodyError, BufferedBody, Reservation, capacity, too_large};
use crate::cpu::CpuPool;
use crate::metrics::BodyRejection;
use crate::respond::Rejection;
use crate::upstream::{ResponseBody, UpstreamResponse};
use bytes::buf::Reader;
use bytes::{Buf, Bytes, BytesMut};
use flate2::Compression;
use flate2::bufread::GzDecoder;
use flate2::write::GzEncoder;
use gateway_core::encoding;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, VARY};
use pingora::protocols::http::ServerSession;
use replica_api::error::ErrorCode;
use replica_api::limits::MAX_BODY_BYTES;
use std::io::{Read, Write};

/// Bytes that one step reads or writes: about 0.3 ms of decompression, 0.5 to 1 ms of compression.
const STEP_BYTES: usize = 64 << 10;
/// Bytes that are decompressed at once.
const CHUNK_BYTES: usize = 16 << 10;
/// Maximum ratio of decompressed to compressed bytes, beyond the first [`EXPANSION_FREE_BYTES`]. Text compresses to a
/// third or a tenth; a gzip bomb reaches the maximum of the format, 1,030.
pub(crate) const EXPANSION_MAX: usize = 200;
/// Decompressed bytes to which the ratio does not apply: a batch of one short text repeated many times compresses well.
const EXPANSION_FREE_BYTES: usize = 1 << 20;
/// Maximum number of gzip members, which are compressed separately and concatenated (RFC 1952, 2.2). Hardly any client
/// uses more than one, and an empty member costs us a thousand times what its twenty bytes cost a client.
const GZIP_MEMBERS_MAX: usize = 64;

/// Compression level; see the module comment.
const LEVEL: u32 = 3;

/// Decompresses `compressed`. `reservation` accounts for the memory of the result.
pub(crate) async fn decompress(
    cpu: &CpuPool,
    tenant: Option<usize>,
    compressed: BufferedBody,
    reservation: Reservation,
) -> Result<BufferedBody, BodyError> {
    let mut decompression = Decompression {
        decoder: GzDecoder::new(compressed.bytes.clone().reader()),
        declared: 0,
        body: BytesMut::new(),
        reservation,
        members: 1,
        compressed,
    };
    let processed =
        |decompression: &Decompression, error: BodyError| error.with_processed(decompression.body.len());
    match decompression.step(STEP_BYTES) {
        Ok(true) => Ok(decompression.end()),
        Ok(false) => {
            // The start is valid gzip, so the last bytes are a trailer and not text.
            decompression.read_declared_length().map_err(|error| processed(&decompression, error))?;
            let rest = move || match decompression.step(MAX_BODY_BYTES) {
                Ok(_) => Ok(decompression.end()),
                Err(error) => Err(processed(&decompression, error)),
            };
            cpu.run(tenant, rest).await
        }
        Err(error) => Err(processed(&decompression, error)),
    }
}

/// Decompression in progress.
struct Decompression {
    decoder: GzDecoder<Reader<Bytes>>,
    /// Length of the body by the trailer of its last member; 0 before the trailer is read.
    declared: usize,
    body: BytesMut,
    reservation: Reservation,
    /// Members begun so far.
    members: usize,
    /// Compressed body.
    compressed: BufferedBody,
}

impl Decompression {
    /// Decompresses `bytes` more, and at most one chunk beyond. Returns whether the body is complete.
    fn step(&mut self, bytes: usize) -> Result<bool, BodyError> {
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

    /// Reads the length of the body from its trailer (RFC 1952, 2.3.1: ISIZE), and rejects a body that is too large
    /// before it is decompressed. A client can write any number there, so the limits are checked again during
    /// decompression.
    fn read_declared_length(&mut self) -> Result<(), BodyError> {
        let trailer = self.compressed.bytes.last_chunk().copied();
        self.declared = trailer.map_or(0, |trailer| u32::from_le_bytes(trailer) as usize);
        check_length(self.declared, self.compressed.bytes.len())
    }

    fn next_member(&mut self) -> Result<(), BodyError> {
        if self.members == GZIP_MEMBERS_MAX {
            return Err(not_gzip());
        }
        self.members += 1;
        let rest = self.decoder.get_ref().get_ref().clone();
        self.decoder = GzDecoder::new(rest.reader());
        Ok(())
    }

    fn take(&mut self, chunk: &[u8]) -> Result<(), BodyError> {
        let length = self.body.len() + chunk.len();
        check_length(length, self.compressed.bytes.len())?;
        if length > self.body.capacity() {
            // The declared length is reserved at once: doubling step by step would copy the whole body once more.
            let capacity = match length <= self.declared {
                true => self.declared,
                false => capacity(self.body.capacity(), length, None, MAX_BODY_BYTES),
            };
            self.reservation.grow_to(capacity)?;
            self.body.reserve(capacity - self.body.len());
        }
        self.body.extend_from_slice(chunk);
        Ok(())
    }

    fn end(self) -> BufferedBody {
        BufferedBody::new(self.body.freeze(), self.reservation)
    }
}

/// Rejects a body that decompresses from `compressed_bytes` to `length` bytes if that exceeds a limit.
fn check_length(length: usize, compressed_bytes: usize) -> Result<(), BodyError> {
    if length > MAX_BODY_BYTES {
        return Err(too_large("decompresses to more"));
    }
    if length.saturating_sub(EXPANSION_FREE_BYTES) > compressed_bytes.saturating_mul(EXPANSION_MAX) {
        return Err(too_large(&format!(
            "decompresses to more than {EXPANSION_MAX} times the bytes that were sent"
        )));
    }
    Ok(())
}

fn not_gzip() -> BodyError {
    let message = format!(
        "The body is not valid gzip although content-encoding is gzip: it is malformed, truncated, or has \
         more than {GZIP_MEMBERS_MAX} members."
    );
    let rejection = Rejection::new(ErrorCode::InvalidHeader, message).of(CONTENT_ENCODING_NAME);
    BodyError::Rejected(BodyRejection::Malformed, rejection)
}

/// Returns the error for an unsupported content-encoding.
pub(crate) fn unsupported_encoding() -> BodyError {
    let message =
        "This content-encoding is not supported; send the body with content-encoding gzip or uncompressed.";
    let rejection = Rejection::new(ErrorCode::UnsupportedEncoding, message).of(CONTENT_ENCODING_NAME);
    BodyError::Rejected(BodyRejection::Malformed, rejection)
}

const CONTENT_ENCODING_NAME: &str = "content-encoding";

/// Compresses a JSON response of at least `from` bytes for a client that accepts gzip. Responses that are streamed are
/// forwarded uncompressed.
pub(crate) async fn compress_response(
    session: &ServerSession,
    mut response: UpstreamResponse,
    from: Option<usize>,
) -> UpstreamResponse {
    let (Some(from), ResponseBody::Buffered(body)) = (from, &response.body) else {
        return response;
    };
    let json = response
        .head
        .headers
        .get(CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
    if body.len() < from || !json || response.head.headers.contains_key(CONTENT_ENCODING) {
        return response;
    }
    let insert = |response: &mut UpstreamResponse, name: http::HeaderName, value: &str| {
        response.head.headers.insert(name, value.parse().expect("our own headers are valid"));
    };
    insert(&mut response, VARY, ACCEPT_ENCODING.as_str());
    if encoding::accepts_gzip(session.get_header(ACCEPT_ENCODING).map(http::HeaderValue::as_bytes))
        && let ResponseBody::Buffered(body) = &response.body
    {
        let compressed = compress(body).await;
        insert(&mut response, CONTENT_ENCODING, "gzip");
        insert(&mut response, CONTENT_LENGTH, &compressed.len().to_string());
        response.body = ResponseBody::Buffered(compressed);
    }
    response
}

async fn compress(body: &[u8]) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::with_capacity(body.len() / 2), Compression::new(LEVEL));
    for step in body.chunks(STEP_BYTES) {
        encoder.write_all(step).expect("writing to a Vec does not fail");
        tokio::task::yield_now().await;
    }
    encoder.finish().expect("writing to a Vec does not fail").into()
}
