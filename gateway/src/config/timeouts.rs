//! `[timeouts]` of `gateway.toml`: how long a client may take over each part of what it does, and how long leaving takes.

use serde::Deserialize;
use std::time::Duration;

/// As written: each absent key has its default.
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

/// How long things may take at a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// A connection may be without a request.
    pub idle: Duration,
    /// The head of a request may take to arrive, from its first byte; and a handshake.
    pub head: Duration,
    /// The body of a request may take to arrive.
    pub body: Duration,
    /// One write may wait for a client that does not read: a piece of a large answer, or a small one whole.
    pub write: Duration,
    /// A gateway that is told to stop goes on accepting, while it says that it is going.
    pub lame_duck: Duration,
    /// Requests in flight may go on after that.
    pub drain: Duration,
}

impl Default for Timeouts {
    /// `idle` is longer than the 30 s for which most pools keep a connection, so that it is the client who closes it and
    /// no request meets a closing connection. `lame_duck` is two or three looks of a load balancer. `drain` is as long
    /// as a request may take that does not say.
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

/// The longest that any of them may be: an hour of anything is a mistake in the unit.
const TIMEOUT_MAX: Duration = Duration::from_secs(3600);

impl RawTimeouts {
    /// Checks what was written, with all problems together.
    pub(super) fn read(self, problems: &mut Vec<String>) -> Timeouts {
        let RawTimeouts { idle, head, body, write, lame_duck, drain } = self;
        let default = Timeouts::default();
        let mut read = |key: &str, written: Option<String>, least: Duration, absent: Duration| {
            let Some(text) = written else {
                return absent;
            };
            match duration(&text).filter(|time| (least..=TIMEOUT_MAX).contains(time)) {
                Some(time) => time,
                None => {
                    problems.push(format!(
                        "timeouts.{key} = \"{text}\" is no time from {least:?} to 1h; write one as \"500ms\", \"10s\" or \
                         \"2m\""
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

/// A whole number of `ms`, `s`, `m` or `h`.
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
    fn a_time_is_taken_at_its_limits_and_refused_past_them() {
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
    fn what_is_not_written_has_its_default() {
        assert_eq!(
            toml::from_str::<RawTimeouts>("").expect("empty").read(&mut Vec::new()),
            Timeouts::default()
        );
        assert!(toml::from_str::<RawTimeouts>("heads = \"1s\"").is_err(), "an unknown key is refused");
    }
}
