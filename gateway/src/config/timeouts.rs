//! `[timeouts]` section of `gateway.toml`: timeouts of client connections and of graceful shutdown.

use serde::Deserialize;
use std::time::Duration;

/// Raw section. An absent key has its default.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawTimeouts {
    idle: Option<String>,
    head: Option<String>,
    body: Option<String>,
    write: Option<String>,
    lame_duck: Option<String>,
    drain: Option<String>,
}

/// Timeouts of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Idle time of a connection between requests.
    pub idle: Duration,
    /// Time for a complete request head, from its first byte; also for a handshake.
    pub head: Duration,
    /// Time for a complete request body.
    pub body: Duration,
    /// Time that a write may be blocked by a client that does not read: one chunk of a large response, or a small
    /// response as a whole.
    pub write: Duration,
    /// Time after the stop signal during which a gateway still accepts requests while it announces the shutdown.
    pub lame_duck: Duration,
    /// Time after that for requests in flight.
    pub drain: Duration,
}

impl Default for Timeouts {
    /// `idle` is longer than the 30 s for which most pools keep a connection, so the client closes it and no request
    /// meets a closing connection. `lame_duck` spans two or three health checks of a load balancer. `drain` equals the
    /// default request timeout.
    fn default() -> Timeouts {
        Timeouts {
            idle: Duration::from_secs(75),
            head: Duration::from_secs(10),
            body: Duration::from_secs(60),
            write: Duration::from_secs(60),
            lame_duck: Duration::from_secs(5),
            drain: Duration::from_secs(30),
        }
    }
}

/// Maximum of every timeout: an hour or more is a mistake in the unit.
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

impl RawTimeouts {
    /// Validates the section; reports all problems.
    pub(super) fn read(self, problems: &mut Vec<String>) -> Timeouts {
        let RawTimeouts { idle, head, body, write, lame_duck, drain } = self;
        let default = Timeouts::default();
        let mut read = |key: &str, written: Option<String>, min: Duration, absent: Duration| {
            let Some(text) = written else {
                return absent;
            };
            match duration(&text).filter(|time| (min..=TIMEOUT_MAX).contains(time)) {
                Some(time) => time,
                None => {
                    problems.push(format!(
                        "timeouts.{key} = \"{text}\" is not a duration from {min:?} to 1h; write it as \"500ms\", \
                         \"10s\" or \"2m\""
                    ));
                    absent
                }
            }
        };
        let some = Duration::from_millis(1);
        Timeouts {
            idle: read("idle", idle, some, default.idle),
            head: read("head", head, some, default.head),
            body: read("body", body, some, default.body),
            write: read("write", write, some, default.write),
            lame_duck: read("lame_duck", lame_duck, Duration::ZERO, default.lame_duck),
            drain: read("drain", drain, Duration::ZERO, default.drain),
        }
    }
}

/// Parses a whole number of `ms`, `s`, `m` or `h`.
pub(super) fn duration(text: &str) -> Option<Duration> {
    let unit_at = text.find(|letter: char| !letter.is_ascii_digit())?;
    let (number, unit) = text.split_at(unit_at);
    let number: u64 = number.parse().ok()?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60 * 1000,
        "h" => 3600 * 1000,
        _ => return None,
    };
    number.checked_mul(millis).map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(key: &str, text: &str) -> Result<Timeouts, Vec<String>> {
        let raw: RawTimeouts = toml::from_str(&format!("{key} = \"{text}\"")).expect("a table");
        let mut problems = Vec::new();
        let read = raw.read(&mut problems);
        if problems.is_empty() { Ok(read) } else { Err(problems) }
    }

    #[test]
    fn a_timeout_is_accepted_at_its_bounds_and_rejected_past_them() {
        let check = |key: &str, text: &str, expected: Option<u64>| {
            let read =
                read(key, text).ok().map(|read| if key == "head" { read.head } else { read.lame_duck });
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
        assert_eq!(
            toml::from_str::<RawTimeouts>("").expect("empty").read(&mut Vec::new()),
            Timeouts::default()
        );
        assert!(toml::from_str::<RawTimeouts>("heads = \"1s\"").is_err(), "an unknown key is rejected");
    }
}
