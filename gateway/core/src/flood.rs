//! Detection of HTTP/2 floods.
//!
//! Frames that cost the client nine bytes and the server a response, or the start and the end of a request, are used to
//! flood HTTP/2 servers: PING and SETTINGS to be acknowledged (CVE-2019-9512, 9515), requests reset right after they
//! are sent (CVE-2023-44487), empty DATA (CVE-2019-9518), heads in endless CONTINUATION (CVE-2024-27316). The protocol
//! library limits the *memory* that each of them uses; the *work* for all of them together is limited here.
//!
//! [`FloodMeter`] observes the bytes of a connection as they arrive, tracks the start of frames, and charges each idle
//! one to a token bucket. Requests and bodies are not counted; they have limits of their own.

use crate::bucket::{RateQuota, TokenBucket};
use crate::frame::{END_STREAM, FRAME_HEADER_BYTES, FrameHeader, PREFACE_BYTES};
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// Idle frames that a connection may send at once, and then in each [`IDLE_FRAMES_PERIOD`]. A client that cancels a
/// hundred requests a second and probes the bandwidth with pings stays below half of it.
pub const IDLE_FRAMES_MAX: u64 = 2000;
/// Period of the limit.
pub const IDLE_FRAMES_PERIOD: Duration = Duration::from_secs(10);

/// The limit of idle frames is exceeded by a frame of this kind: the connection should be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flood(pub IdleFrame);

/// Kind of a frame that carries no request data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleFrame {
    /// Empty DATA.
    Data,
    /// PRIORITY.
    Priority,
    /// RST_STREAM.
    Reset,
    /// SETTINGS.
    Settings,
    /// PUSH_PROMISE, which clients must not send.
    Push,
    /// PING.
    Ping,
    /// GOAWAY.
    GoAway,
    /// CONTINUATION.
    Continuation,
    /// Unknown kind.
    Unknown,
}

impl IdleFrame {
    /// All kinds, in their order.
    pub const ALL: [IdleFrame; 9] = [
        IdleFrame::Data,
        IdleFrame::Priority,
        IdleFrame::Reset,
        IdleFrame::Settings,
        IdleFrame::Push,
        IdleFrame::Ping,
        IdleFrame::GoAway,
        IdleFrame::Continuation,
        IdleFrame::Unknown,
    ];

    /// Returns the metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            IdleFrame::Data => "data",
            IdleFrame::Priority => "priority",
            IdleFrame::Reset => "reset",
            IdleFrame::Settings => "settings",
            IdleFrame::Push => "push",
            IdleFrame::Ping => "ping",
            IdleFrame::GoAway => "goaway",
            IdleFrame::Continuation => "continuation",
            IdleFrame::Unknown => "unknown",
        }
    }
}

/// Meter of one connection.
#[derive(Clone, Debug)]
pub struct FloodMeter {
    /// Bytes up to the next frame's header.
    skip: usize,
    /// Received bytes of that header.
    header: [u8; FRAME_HEADER_BYTES],
    header_len: usize,
    bucket: TokenBucket,
}

impl FloodMeter {
    /// Makes a meter for a connection without received bytes.
    pub fn new(now: Instant) -> FloodMeter {
        let units = NonZeroU64::new(IDLE_FRAMES_MAX).expect("the limit is not zero");
        let bucket = TokenBucket::new(RateQuota { units, period: IDLE_FRAMES_PERIOD }, now);
        FloodMeter { skip: PREFACE_BYTES, header: [0; FRAME_HEADER_BYTES], header_len: 0, bucket }
    }

    /// Observes `bytes` that arrived at `now`.
    ///
    /// # Errors
    ///
    /// If the client has exceeded the limit of idle frames.
    pub fn read(&mut self, mut bytes: &[u8], now: Instant) -> Result<(), Flood> {
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let copied = (FRAME_HEADER_BYTES - self.header_len).min(bytes.len());
            self.header[self.header_len..self.header_len + copied].copy_from_slice(&bytes[..copied]);
            self.header_len += copied;
            bytes = &bytes[copied..];
            if self.header_len < FRAME_HEADER_BYTES {
                return Ok(());
            }
            self.header_len = 0;
            let FrameHeader { length, kind, flags, stream: _ } = FrameHeader::new(self.header);
            self.skip = length;
            if let Some(idle) = idle(kind, flags, self.skip) {
                self.bucket.check(1, now).map_err(|_| Flood(idle))?;
                self.bucket.take(1, now);
            }
        }
    }
}

/// Returns the kind of an idle frame, `None` for others; RFC 9113, 6.
fn idle(kind: u8, flags: u8, length: usize) -> Option<IdleFrame> {
    match kind {
        0 => (length == 0 && flags & END_STREAM == 0).then_some(IdleFrame::Data),
        // HEADERS and WINDOW_UPDATE: a request, and frames that large responses need in number.
        1 | 8 => None,
        2 => Some(IdleFrame::Priority),
        3 => Some(IdleFrame::Reset),
        4 => Some(IdleFrame::Settings),
        5 => Some(IdleFrame::Push),
        6 => Some(IdleFrame::Ping),
        7 => Some(IdleFrame::GoAway),
        9 => Some(IdleFrame::Continuation),
        _ => Some(IdleFrame::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// Returns how many of `frame` a new connection may send at once.
    fn allowed(frame: &[u8], read_size: usize) -> u64 {
        let now = crate::some_instant();
        let mut meter = FloodMeter::new(now);
        meter.read(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", now).unwrap();
        let mut sent = 0;
        while sent < 2 * IDLE_FRAMES_MAX
            && frame.chunks(read_size).all(|bytes| meter.read(bytes, now).is_ok())
        {
            sent += 1;
        }
        sent
    }

    #[test]
    fn only_idle_frames_are_counted() {
        let unlimited = 2 * IDLE_FRAMES_MAX;
        for read_size in [1, 7, 9, 10, 4096] {
            assert_eq!(allowed(&frame(6, 0, &[0; 8]), read_size), IDLE_FRAMES_MAX, "PING");
            assert_eq!(allowed(&frame(4, 0, &[]), read_size), IDLE_FRAMES_MAX, "SETTINGS");
            assert_eq!(allowed(&frame(3, 0, &[0; 4]), read_size), IDLE_FRAMES_MAX, "RST_STREAM");
            assert_eq!(allowed(&frame(0, 0, &[]), read_size), IDLE_FRAMES_MAX, "empty DATA");
            assert_eq!(allowed(&frame(9, 0, b"x"), read_size), IDLE_FRAMES_MAX, "CONTINUATION");
            assert_eq!(allowed(&frame(99, 0, b"x"), read_size), IDLE_FRAMES_MAX, "unknown");
            assert_eq!(allowed(&frame(0, 1, &[]), read_size), unlimited, "the end of a body");
            // A payload that looks like frames does not count.
            assert_eq!(allowed(&frame(0, 0, &frame(6, 0, &[0; 8]).repeat(20)), read_size), unlimited, "DATA");
            assert_eq!(allowed(&frame(1, 4, b"head"), read_size), unlimited, "HEADERS");
            assert_eq!(allowed(&frame(8, 0, &[0; 4]), read_size), unlimited, "WINDOW_UPDATE");
        }
    }

    #[test]
    fn the_limit_is_refilled_over_time() {
        let now = crate::some_instant();
        let mut meter = FloodMeter::new(now);
        let pings = frame(6, 0, &[0; 8]).repeat(IDLE_FRAMES_MAX as usize);
        meter.read(&[0; PREFACE_BYTES], now).unwrap();
        meter.read(&pings, now).unwrap();
        let later = now + IDLE_FRAMES_PERIOD;
        meter.read(&pings, later).unwrap();
        let mut other = meter.clone();
        assert_eq!(meter.read(&frame(6, 0, &[0; 8]), later), Err(Flood(IdleFrame::Ping)));
        assert_eq!(
            other.read(&frame(3, 0, &[0; 4]), later),
            Err(Flood(IdleFrame::Reset)),
            "the kind of the last frame"
        );
    }
}
