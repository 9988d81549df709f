//! `[timeouts]` section of `gateway.toml`: timeouts of client connections and of graceful shutdown.

use configuration::section;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Limits of every timeout: an hour or more is a mistake in the unit.
const TIMEOUT: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(3600);
/// Limits of the phases of a shutdown, which may be left out.
const PHASE: RangeInclusive<Duration> = Duration::ZERO..=Duration::from_secs(3600);

// `idle` is longer than the 30 s for which most pools keep a connection, so the client closes it and no request meets a
// closing connection. `lame_duck` spans two or three health checks of a load balancer. `drain` equals the default request
// timeout.
section! {
    /// Timeouts of client connections and of the graceful shutdown.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Timeouts {
        /// Idle time of a connection between requests.
        pub idle: Duration = Duration::from_secs(75), in TIMEOUT;
        /// Time for a complete request head, from its first byte; also for a handshake.
        pub head: Duration = Duration::from_secs(10), in TIMEOUT;
        /// Time for a complete request body.
        pub body: Duration = Duration::from_secs(60), in TIMEOUT;
        /// Time that a write may be blocked by a client that does not read: one chunk of a large response, or a small
        /// response as a whole.
        pub write: Duration = Duration::from_secs(60), in TIMEOUT;
        /// Time after the stop signal during which a gateway still accepts requests while it announces the shutdown.
        pub lame_duck: Duration = Duration::from_secs(5), in PHASE;
        /// Time after that for requests in flight.
        pub drain: Duration = Duration::from_secs(30), in PHASE;
    }
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        configuration::of_defaults().expect("every key has a default")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use configuration::{ConfigFile, Problem};

    fn read(text: &str) -> Result<Timeouts, Vec<Problem>> {
        ConfigFile::read(text, |document| document.section())
    }

    #[test]
    fn a_timeout_is_accepted_at_its_bounds_and_rejected_past_them() {
        let check = |key: &str, text: &str, expected: Option<u64>| {
            let read = read(&format!("{key} = \"{text}\""));
            let read = read.ok().map(|read| if key == "head" { read.head } else { read.lame_duck });
            assert_eq!(read, expected.map(Duration::from_millis), "{key} = {text}");
        };
        check("head", "1ms", Some(1));
        check("head", "10s", Some(10_000));
        check("head", "2m", Some(120_000));
        check("head", "1h", Some(3_600_000));
        check("head", "3601s", None);
        check("head", "0s", None);
        check("lame_duck", "0s", Some(0));
        check("head", "10", None);
        check("head", "s", None);
        check("head", "-1s", None);
        check("head", "1.5s", None);
        check("head", "99999999999999999999h", None);
    }

    #[test]
    fn absent_keys_have_their_defaults() {
        assert_eq!(read(""), Ok(Timeouts::default()));
        assert!(read("heads = \"1s\"").is_err(), "an unknown key is rejected");
    }
}
