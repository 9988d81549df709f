//! Framing of HTTP/2 (RFC 9113), as far as the scanners of received bytes need it: [`crate::flood`] and
//! [`crate::trailers`].

/// Length of the preface `PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n` (RFC 9113, 3.4), which is no frame.
pub(crate) const PREFACE_BYTES: usize = 24;
/// Length of a frame header: length (3), type, flags, stream (4); RFC 9113, 4.1.
pub(crate) const FRAME_HEADER_BYTES: usize = 9;
/// Flag of the last frame of a request, of DATA and HEADERS.
pub(crate) const END_STREAM: u8 = 0x1;

/// Header of a frame.
#[derive(Clone, Copy)]
pub(crate) struct FrameHeader {
    pub(crate) length: usize,
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
}

impl FrameHeader {
    pub(crate) fn new(bytes: [u8; FRAME_HEADER_BYTES]) -> FrameHeader {
        let [high, mid, low, kind, flags, stream @ ..] = bytes;
        let length = usize::from(high) << 16 | usize::from(mid) << 8 | usize::from(low);
        FrameHeader { length, kind, flags, stream: u32::from_be_bytes(stream) & (u32::MAX >> 1) }
    }
}
