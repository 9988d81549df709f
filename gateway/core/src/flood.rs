//! Whether an HTTP/2 client asks for something or only keeps us busy.
//!
//! Frames that cost the client nine bytes and us an answer, or the start and the end of a request, are how HTTP/2 servers
//! are flooded: PING and SETTINGS to be acknowledged (CVE-2019-9512, 9515), requests reset as soon as they are sent
//! (CVE-2023-44487), empty DATA (CVE-2019-9518), heads in endless CONTINUATION (CVE-2024-27316). The protocol library
//! bounds what each of them makes us *hold*; what all of them together make us *do* is bounded here.
//!
//! [`Meter`] reads along: it is shown the bytes of a connection as they come, knows where frames begin, and takes each
//! idle one from an allowance. Requests and bodies are not its business; they have limits of their own.

use crate::bucket::{Bucket, Rate};
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// Idle frames that a connection may send at once, and then in each [`ALLOWANCE_PERIOD`]. A client that cancels a hundred
/// requests a second and probes the bandwidth with pings stays below half of it.
pub const IDLE_FRAMES_MAX: u64 = 2000;
/// In what time that many are earned again.
pub const ALLOWANCE_PERIOD: Duration = Duration::from_secs(10);

/// `PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n` (RFC 9113, 3.4), which is no frame.
const PREFACE_BYTES: usize = 24;
/// Length (3), type, flags, stream (4); RFC 9113, 4.1.
const HEADER_BYTES: usize = 9;

/// More idle frames than are allowed, of which this was the last: the connection should be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flood(pub Idle);

/// A frame that brings nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// DATA without any.
    Data,
    /// PRIORITY.
    Priority,
    /// RST_STREAM.
    Reset,
    /// SETTINGS.
    Settings,
    /// PUSH_PROMISE, which no client may send.
    Push,
    /// PING.
    Ping,
    /// GOAWAY.
    GoAway,
    /// CONTINUATION.
    Continuation,
    /// Of a kind that nobody knows.
    Unknown,
}

impl Idle {
    /// All of them, in their order.
    pub const ALL: [Idle; 9] = [
        Idle::Data,
        Idle::Priority,
        Idle::Reset,
        Idle::Settings,
        Idle::Push,
        Idle::Ping,
        Idle::GoAway,
        Idle::Continuation,
        Idle::Unknown,
    ];

    /// Its name in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Idle::Data => "data",
            Idle::Priority => "priority",
            Idle::Reset => "reset",
            Idle::Settings => "settings",
            Idle::Push => "push",
            Idle::Ping => "ping",
            Idle::GoAway => "goaway",
            Idle::Continuation => "continuation",
            Idle::Unknown => "unknown",
        }
    }
}

/// What is known of one connection.
#[derive(Clone, Debug)]
pub struct Meter {
    /// Bytes up to the next frame's header.
    skip: usize,
    /// What came of that header.
    header: [u8; HEADER_BYTES],
    have: usize,
    allowance: Bucket,
}

impl Meter {
    /// For a connection whose first byte is still to come.
    pub fn new(now: Instant) -> Meter {
        let units = NonZeroU64::new(IDLE_FRAMES_MAX).expect("the limit is not zero");
        let allowance = Bucket::new(Rate { units, period: ALLOWANCE_PERIOD }, now);
        Meter { skip: PREFACE_BYTES, header: [0; HEADER_BYTES], have: 0, allowance }
    }

    /// Reads along: `bytes` came at `now`.
    ///
    /// # Errors
    ///
    /// When the client has sent more idle frames than it may.
    pub fn read(&mut self, mut bytes: &[u8], now: Instant) -> Result<(), Flood> {
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            let wanted = (HEADER_BYTES - self.have).min(bytes.len());
            self.header[self.have..self.have + wanted].copy_from_slice(&bytes[..wanted]);
            self.have += wanted;
            bytes = &bytes[wanted..];
            if self.have < HEADER_BYTES {
                return Ok(());
            }
            self.have = 0;
            let [high, mid, low, kind, flags, ..] = self.header;
            self.skip = usize::from(high) << 16 | usize::from(mid) << 8 | usize::from(low);
            if let Some(idle) = idle(kind, flags, self.skip) {
                self.allowance.check(1, now).map_err(|_| Flood(idle))?;
                self.allowance.take(1, now);
            }
        }
    }
}

/// What a frame is that brings nothing; RFC 9113, 6.
fn idle(kind: u8, flags: u8, length: usize) -> Option<Idle> {
    const END_STREAM: u8 = 1;
    match kind {
        0 => (length == 0 && flags & END_STREAM == 0).then_some(Idle::Data),
        // HEADERS and WINDOW_UPDATE: a request, and what large answers need many of.
        1 | 8 => None,
        2 => Some(Idle::Priority),
        3 => Some(Idle::Reset),
        4 => Some(Idle::Settings),
        5 => Some(Idle::Push),
        6 => Some(Idle::Ping),
        7 => Some(Idle::GoAway),
        9 => Some(Idle::Continuation),
        _ => Some(Idle::Unknown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], payload].concat()
    }

    /// How many of `frame` a fresh connection may send at once.
    fn allowed(frame: &[u8], piece: usize) -> u64 {
        let now = crate::some_instant();
        let mut meter = Meter::new(now);
        meter.read(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", now).unwrap();
        let mut sent = 0;
        while sent < 2 * IDLE_FRAMES_MAX && frame.chunks(piece).all(|piece| meter.read(piece, now).is_ok()) {
            sent += 1;
        }
        sent
    }

    #[test]
    fn idle_frames_are_counted_and_the_others_are_not() {
        let unlimited = 2 * IDLE_FRAMES_MAX;
        for piece in [1, 7, 9, 10, 4096] {
            assert_eq!(allowed(&frame(6, 0, &[0; 8]), piece), IDLE_FRAMES_MAX, "PING");
            assert_eq!(allowed(&frame(4, 0, &[]), piece), IDLE_FRAMES_MAX, "SETTINGS");
            assert_eq!(allowed(&frame(3, 0, &[0; 4]), piece), IDLE_FRAMES_MAX, "RST_STREAM");
            assert_eq!(allowed(&frame(0, 0, &[]), piece), IDLE_FRAMES_MAX, "empty DATA");
            assert_eq!(allowed(&frame(9, 0, b"x"), piece), IDLE_FRAMES_MAX, "CONTINUATION");
            assert_eq!(allowed(&frame(99, 0, b"x"), piece), IDLE_FRAMES_MAX, "unknown");
            assert_eq!(allowed(&frame(0, 1, &[]), piece), unlimited, "the end of a body");
            // A payload that looks like frames is none.
            assert_eq!(allowed(&frame(0, 0, &frame(6, 0, &[0; 8]).repeat(20)), piece), unlimited, "DATA");
            assert_eq!(allowed(&frame(1, 4, b"head"), piece), unlimited, "HEADERS");
            assert_eq!(allowed(&frame(8, 0, &[0; 4]), piece), unlimited, "WINDOW_UPDATE");
        }
    }

    #[test]
    fn time_earns_the_allowance_again() {
        let now = crate::some_instant();
        let mut meter = Meter::new(now);
        let pings = frame(6, 0, &[0; 8]).repeat(IDLE_FRAMES_MAX as usize);
        meter.read(&[0; PREFACE_BYTES], now).unwrap();
        meter.read(&pings, now).unwrap();
        let later = now + ALLOWANCE_PERIOD;
        meter.read(&pings, later).unwrap();
        let mut other = meter.clone();
        assert_eq!(meter.read(&frame(6, 0, &[0; 8]), later), Err(Flood(Idle::Ping)));
        assert_eq!(other.read(&frame(3, 0, &[0; 4]), later), Err(Flood(Idle::Reset)), "the last one's kind");
    }
}
