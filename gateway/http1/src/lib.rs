//! Parser of HTTP/1.1 responses (RFC 9112), and of the chunked coding of requests and responses.
//!
//! Bytes in, positions out: the caller does the I/O and owns the buffer, so that a gateway shares the memory of a response
//! with its client, and a bulk client decodes it where it was read. The same bytes give the same result for every split into
//! reads.
//!
//! [`head`] parses the head of the final response, [`BodyFraming`] separates a body from its framing, and
//! [`ResponseAssembler`] applies both to a buffer that holds a complete response.
//!
//! A response that two parsers could split differently is rejected (response smuggling): two different lengths, a length and
//! chunks, a transfer coding other than `chunked`, a folded header line, a chunk line that ends in a bare LF. The peer is not
//! a compliant HTTP server then, and the caller closes the connection. It also closes a connection with bytes after the end
//! of a response: they would be read as the response to the next request. Every part has a limit, named below; the size of a
//! body is limited by the caller.

mod assembler;
mod body;
mod chunks;
mod head;

pub use assembler::{ResponseAssembler, ResponseError};
pub use body::BodyFraming;
pub use chunks::{BodyPart, ChunkDecoder};
pub use head::{ResponseHead, head};

/// Maximum bytes of a response head, with the interim responses before it; over HTTP/2 of the decoded head. The limit of
/// request heads (`gateway_core::head`) is independent: it follows from what clients send.
pub const HEAD_BYTES_MAX: usize = 64 << 10;
/// Maximum headers of a response; Pingora and nginx accept about as many.
pub const HEADERS_MAX: usize = 128;
/// Maximum interim (1xx) responses before the final one; servers send one or two.
pub const INTERIM_RESPONSES_MAX: usize = 16;
/// Maximum digits of a chunk's size: more do not fit into 64 bits.
pub const CHUNK_SIZE_DIGITS_MAX: usize = 16;
/// Maximum bytes of a chunk-size line: the digits, and extensions, which are not used in practice.
pub const CHUNK_LINE_BYTES_MAX: usize = 256;
/// Maximum bytes of all trailers, without line ends.
pub const TRAILER_BYTES_MAX: usize = 8 << 10;

/// Reason why a message is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FramingError(pub &'static str);
