//! HTTP/2 frames: a writer that permits invalid ones, and a minimal reader.

use std::io::Read;
use std::net::TcpStream;
use std::time::Instant;

pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const PRIORITY: u8 = 2;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PUSH_PROMISE: u8 = 5;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;

pub(crate) const END_STREAM: u8 = 1;
pub(crate) const ACK: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
pub(crate) const PADDED: u8 = 8;
pub(crate) const WITH_PRIORITY: u8 = 32;

/// Returns a well-formed frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: impl AsRef<[u8]>) -> Vec<u8> {
    let payload = payload.as_ref();
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

pub(crate) fn settings(settings: &[(u16, u32)]) -> Vec<u8> {
    let payload: Vec<u8> = settings
        .iter()
        .flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()].concat())
        .collect();
    frame(SETTINGS, 0, 0, payload)
}

pub(crate) fn window(stream: u32, increment: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, stream, increment.to_be_bytes())
}

/// Returns a header as a literal without indexing and without Huffman coding.
pub(crate) fn field(name: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Vec<u8> {
    let (name, value) = (name.as_ref(), value.as_ref());
    [&[0][..], &length(name.len()), name, &length(value.len()), value].concat()
}

/// Encodes an integer with a seven-bit prefix (RFC 7541, 5.1).
pub(crate) fn length(mut value: usize) -> Vec<u8> {
    if value < 127 {
        return vec![value as u8];
    }
    let mut bytes = vec![127];
    value -= 127;
    while value >= 128 {
        bytes.push((value % 128 + 128) as u8);
        value /= 128;
    }
    bytes.push(value as u8);
    bytes
}

pub(crate) fn fields(all: &[(&str, &str)]) -> Vec<u8> {
    all.iter().flat_map(|(name, value)| field(name, value)).collect()
}

/// Returns the headers of a valid request, and more.
pub(crate) fn request(more: &[(&str, &str)]) -> Vec<u8> {
    let usual = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v1/embeddings"),
        (":authority", "x"),
        ("authorization", "Bearer attack-key"),
    ];
    fields(&[&usual, more].concat())
}

/// Returns a complete request on this stream.
pub(crate) fn complete_request(stream: u32) -> Vec<u8> {
    [frame(HEADERS, END_HEADERS, stream, request(&[])), frame(DATA, END_STREAM, stream, super::case::BODY)]
        .concat()
}

/// Received frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

/// Reads one frame; `None` at the end of the connection, and an error on timeout.
pub(crate) fn read(stream: &mut TcpStream, deadline: Instant) -> Result<Option<Frame>, &'static str> {
    let mut header = [0; 9];
    if !fill(stream, &mut header, deadline)? {
        return Ok(None);
    }
    let [high, mid, low, kind, flags, id @ ..] = header;
    let length = usize::from(high) << 16 | usize::from(mid) << 8 | usize::from(low);
    let mut payload = vec![0; length];
    if !fill(stream, &mut payload, deadline)? {
        return Ok(None);
    }
    Ok(Some(Frame { kind, flags, stream: u32::from_be_bytes(id), payload }))
}

/// Fills the buffer; returns false if the connection ended before.
fn fill(stream: &mut TcpStream, mut into: &mut [u8], deadline: Instant) -> Result<bool, &'static str> {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    while !into.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("no frame in time");
        }
        stream.set_read_timeout(Some(left)).unwrap();
        match stream.read(into) {
            Ok(0) => return Ok(false),
            Ok(n) => into = &mut into[n..],
            Err(error) if error.kind() == Interrupted => {}
            Err(error) if matches!(error.kind(), WouldBlock | TimedOut) => {
                return Err("no frame in time");
            }
            Err(_) => return Ok(false),
        }
    }
    Ok(true)
}

impl Frame {
    /// Returns the status in the first header block of a connection, in which `:status` comes first (RFC 7541, appendix A).
    pub(crate) fn status(&self) -> Option<u16> {
        let mut block = &self.payload[..];
        // Table size updates come first.
        while let [0x20..=0x3f, rest @ ..] = block {
            block = rest;
        }
        match block {
            [first @ 0x88..=0x8e, ..] => Some([200, 204, 206, 304, 400, 404, 500][usize::from(first - 0x88)]),
            [0x48 | 0x08 | 0x18, length, value @ ..] if length & 0x80 == 0 => {
                std::str::from_utf8(value.get(..usize::from(*length))?).ok()?.parse().ok()
            }
            [0x48 | 0x08 | 0x18, length, value @ ..] => digits(value.get(..usize::from(length & 0x7f))?),
            _ => None,
        }
    }

    /// Returns the error code of RST_STREAM or GOAWAY.
    pub(crate) fn error(&self) -> Option<u32> {
        let start = if self.kind == GOAWAY { 4 } else { 0 };
        Some(u32::from_be_bytes(self.payload.get(start..start + 4)?.try_into().ok()?))
    }
}

/// Decodes three digits in the code of RFC 7541, appendix B: 0 to 2 have five bits, the others six.
fn digits(huffman: &[u8]) -> Option<u16> {
    let bits: Vec<u8> =
        huffman.iter().flat_map(|byte| (0..8).rev().map(move |bit| byte >> bit & 1)).collect();
    let number = |bits: &[u8]| bits.iter().fold(0_u16, |sum, bit| sum * 2 + u16::from(*bit));
    let (mut at, mut status) = (0, 0);
    for _ in 0..3 {
        let five = number(bits.get(at..at + 5)?);
        let (digit, taken) =
            if five < 3 { (five, 5) } else { (number(bits.get(at..at + 6)?).checked_sub(0b01_1001)? + 3, 6) };
        status = status * 10 + digit;
        at += taken;
    }
    Some(status)
}

#[test]
fn a_status_is_decoded_in_each_of_its_encodings() {
    let status =
        |payload: &[u8]| Frame { kind: HEADERS, flags: 0, stream: 1, payload: payload.to_vec() }.status();
    assert_eq!(status(&[0x88]), Some(200));
    assert_eq!(status(&[0x3f, 0x8c]), Some(400));
    assert_eq!(status(&[0x48, 3, b'4', b'0', b'1']), Some(401));
    // 302 of RFC 7541, C.6.1, and 307 of C.6.2.
    assert_eq!(status(&[0x48, 0x82, 0x64, 0x02]), Some(302));
    assert_eq!(status(&[0x48, 0x83, 0x64, 0x0e, 0xff]), Some(307));
}
