//! Bytes of messages on a network.

/// Framing of a message of an exchange stream, a chunk of HTTP/1.1: its size in two to four digits, and two line ends.
pub(crate) const CHUNK: usize = "3e8\r\n\r\n".len();
/// HEADERS frame of a request to a hub without its path, and the head of its DATA frame. Its fields are in the table of
/// HPACK and have one byte, except the length, which `h2` does not index.
pub(crate) const HUB_REQUEST_HEAD: usize = 9 + 5 + 4 + 9;
/// Returns the bytes of a path in a HEADERS frame: `h2` does not index it, and the Huffman code has 5 to 7 bits for each
/// character.
pub(crate) fn hub_path(path: &str) -> usize {
    2 + path.len() * 3 / 4
}

/// Frames of a response of the hub: its date is another one each second.
pub(crate) const HUB_RESPONSE_HEAD: usize = 9 + 3 + 4 + 24 + 9;
/// A PING frame and its acknowledgement, every five seconds on each connection to a hub.
pub(crate) const PING: usize = 17;
pub(crate) const PING_SECONDS: usize = 5;
/// Bytes of a connection that a gateway opens beside the stream for the next request, of the pool's idle timeout of 30 s: an
/// estimate of a resumed TLS session with its tickets (4,000), and eleven segments to open and to close it.
pub(crate) const IDLE_CONNECTION: usize = 4_000 + 11 * TCP_HEADERS;
pub(crate) const IDLE_CONNECTION_SECONDS: usize = 30;

/// Header, nonce and tag of a record of TLS 1.3, which has up to 16 KiB.
const TLS_RECORD: usize = 22;
const TLS_RECORD_MAX: usize = 16 << 10;
/// IPv4 header, TCP header and its timestamps.
const TCP_HEADERS: usize = 52;
/// Payload of a segment.
const SEGMENT_MAX: usize = 1448;

/// Bytes that a role has sent and received.
#[derive(Clone, Copy, Default)]
pub(crate) struct Traffic {
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

impl Traffic {
    /// Counts a sent message of this many bytes with its head, and its acknowledgements.
    pub(crate) fn send(&mut self, bytes: usize) {
        self.sent += message(bytes);
        self.received += acknowledgements(bytes);
    }

    /// Counts bytes in both directions, of which the headers are counted already.
    pub(crate) fn both(&mut self, bytes: usize) {
        self.sent += bytes.div_ceil(2) as u64;
        self.received += (bytes / 2) as u64;
    }

    /// Counts a received message.
    pub(crate) fn receive(&mut self, bytes: usize) {
        self.received += message(bytes);
        self.sent += acknowledgements(bytes);
    }
}

fn message(bytes: usize) -> u64 {
    let encrypted = bytes + bytes.div_ceil(TLS_RECORD_MAX) * TLS_RECORD;
    (encrypted + encrypted.div_ceil(SEGMENT_MAX) * TCP_HEADERS) as u64
}

/// One for every other segment.
fn acknowledgements(bytes: usize) -> u64 {
    (bytes.div_ceil(2 * SEGMENT_MAX) * TCP_HEADERS) as u64
}
