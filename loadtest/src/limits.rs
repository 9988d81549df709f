//! Limits of a run, and durations as text.

use std::num::NonZeroUsize;
use std::time::Duration;

use crate::client::{HttpProtocol, STREAMS_MAX};

/// Longest run; the report keeps a row for each of its seconds and regions.
pub const DURATION_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Longest timeout of a request.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(60 * 60);

/// Maximum requests in flight; one above is not sent and counts as failed. Over HTTP/1.1 each has a connection of its own,
/// and so a local port: Linux has 28,232 for connections to one address (32768 to 60999), of which closed connections
/// occupy some for a minute. A process that may open fewer files has a lower limit ([`in_flight_limit`]), and concurrent runs of
/// a process divide it ([`ProcessShare`]).
pub const IN_FLIGHT_MAX: usize = 20_000;

/// Open files of a process besides the connections of a run: standard streams, event queues, reports, progress.
const OPEN_FILES_RESERVED: usize = 64;

/// Open files of a process with the links of a local fleet: up to 48 listeners of links, 17 connections of the observer, the
/// pipes of processes, and idle connections over the links.
const FLEET_OPEN_FILES_RESERVED: usize = 256;

/// Open files of a request that crosses a link in the process of its client: both ends of a relayed connection.
const RELAY_OPEN_FILES: usize = 2;

/// Part of a process that a run may use: files and ports are limited for all runs of the process together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessShare {
    /// Number of concurrent runs, which divide the files and ports equally.
    pub concurrent_runs: NonZeroUsize,
    /// Whether the process also relays the requests over the emulated links of a local fleet.
    pub has_links: bool,
}

impl ProcessShare {
    /// A process with one run.
    pub const WHOLE: ProcessShare = ProcessShare { concurrent_runs: NonZeroUsize::MIN, has_links: false };
}

/// Returns the maximum of requests in flight of a run with this share of a process that may open this number of files.
pub(crate) fn in_flight_limit(open_files: u64, protocol: HttpProtocol, share: ProcessShare) -> usize {
    let ProcessShare { concurrent_runs, has_links } = share;
    let (reserved, relay) = if has_links { (FLEET_OPEN_FILES_RESERVED, RELAY_OPEN_FILES) } else { (0, 0) };
    let files = usize::try_from(open_files).unwrap_or(usize::MAX);
    let files = files.saturating_sub(OPEN_FILES_RESERVED + reserved) / concurrent_runs;
    let streams = match protocol {
        HttpProtocol::Http1 => 1,
        HttpProtocol::Http2 => STREAMS_MAX,
    };
    // A connection with all its streams needs one file, and those of a relay for each stream.
    let requests = files.saturating_mul(streams) / (1 + relay * streams);
    requests.min(IN_FLIGHT_MAX / concurrent_runs)
}

/// Returns the number of open files that a process needs for this number of requests in flight over HTTP/1.1.
pub(crate) fn open_files_needed(in_flight: usize) -> usize {
    in_flight + OPEN_FILES_RESERVED
}

/// Parses a duration above zero and at most `max`.
pub(crate) fn span_at_most(option: &str, text: &str, max: Duration) -> Result<Duration, String> {
    span(text).filter(|span| *span <= max).ok_or_else(|| {
        let max_h = max.as_secs() / 3600;
        format!("{option} {text:?}: write a duration above 0 and at most {max_h}h, such as 500ms, 30s or 2m")
    })
}

/// Parses a duration above zero: a number with the unit `ms`, `s`, `m` or `h`.
pub(crate) fn span(text: &str) -> Option<Duration> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let seconds = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return None,
    };
    let number: f64 = number.trim().parse().ok()?;
    Duration::try_from_secs_f64(number * seconds).ok().filter(|span| !span.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_bound_the_requests_in_flight() {
        let http1 = |open_files| in_flight_limit(open_files, HttpProtocol::Http1, ProcessShare::WHOLE);
        assert_eq!((http1(0), http1(64), http1(65), http1(1024)), (0, 0, 1, 960));
        assert_eq!((http1(20_063), http1(20_064), http1(u64::MAX)), (19_999, 20_000, 20_000));
        assert_eq!(http1(open_files_needed(1234) as u64), 1234);
        let http2 = |open_files| in_flight_limit(open_files, HttpProtocol::Http2, ProcessShare::WHOLE);
        assert_eq!((http2(64), http2(65), http2(1024)), (0, STREAMS_MAX, 20_000));
    }

    #[test]
    fn concurrent_runs_and_links_divide_the_files_of_a_process() {
        let limit = |open_files, runs, has_links, protocol| {
            let concurrent_runs = NonZeroUsize::new(runs).unwrap();
            in_flight_limit(open_files, protocol, ProcessShare { concurrent_runs, has_links })
        };
        let http1 = |open_files, runs, has_links| limit(open_files, runs, has_links, HttpProtocol::Http1);
        assert_eq!((http1(1024, 2, false), http1(1024, 3, false)), (480, 320));
        assert_eq!((http1(u64::MAX, 1, false), http1(u64::MAX, 3, false)), (20_000, 6_666));
        // A client's connection and both ends of a relayed one.
        let (before, at) = (64 + 256 + 3 * 3 * 100 - 1, 64 + 256 + 3 * 3 * 100);
        assert_eq!((http1(before, 3, true), http1(at, 3, true)), (99, 100));
        assert_eq!(http1(u64::MAX, 3, true), 6_666);
        for (open_files, runs) in [(4_096, 1), (4_096, 5), (50_000, 3), (1_000_000, 20)] {
            let used =
                3 * runs * http1(open_files, runs, true) + OPEN_FILES_RESERVED + FLEET_OPEN_FILES_RESERVED;
            assert!(used as u64 <= open_files, "{runs} runs use {used} of {open_files} files");
        }
        // 96 requests need one connection of the client and 96 relayed ones.
        assert_eq!(limit(64 + 256 + 193, 1, true, HttpProtocol::Http2), 96);
        assert_eq!(limit(64 + 256 + 192, 1, true, HttpProtocol::Http2), 95);
    }

    #[test]
    fn a_duration_has_a_unit_and_a_limit() {
        let check = |text: &str, expected_ms: Option<u64>| {
            let got = span_at_most("--duration", text, DURATION_MAX);
            assert_eq!(got.as_ref().ok(), expected_ms.map(Duration::from_millis).as_ref(), "{text}: {got:?}");
        };
        check("500ms", Some(500));
        check("1.5s", Some(1500));
        check("24h", Some(86_400_000));
        for wrong in ["", "30", "s", "0s", "-1s", "1d", "25h", "NaNs", "1e999s", "1 s s"] {
            check(wrong, None);
        }
    }
}
