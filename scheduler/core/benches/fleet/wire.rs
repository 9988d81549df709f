//! Bytes of messages on a network.

/// Head of an exchange request, with the headers of the gateway's client.
pub(crate) const REQUEST_HEAD: usize =
    "POST /spoke/v1/exchange HTTP/1.1\r\nhost: region\r\ncontent-type: application/json\r\ncontent-length: 150\r\n\r\n".len();
/// Head of a response with a body.
pub(crate) const RESPONSE_HEAD: usize =
    "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 230\r\nConnection: keep-alive\r\n\r\n".len();
/// Head of a request to the hub, without its path.
pub(crate) const HUB_REQUEST_HEAD: usize = "POST  HTTP/1.1\r\nhost: hub-1.fleet.example.com:7000\r\ncontent-type: application/json\r\ncontent-length: 150\r\n\r\n".len();
/// Head of a response of the hub.
pub(crate) const HUB_RESPONSE_HEAD: usize = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 150\r\ndate: Tue, 24 Nov 2026 12:00:00 GMT\r\n\r\n".len();

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
