//! Limits of a run, and durations as text.

use std::time::Duration;

/// Longest run; the report keeps a row for each of its seconds and regions.
pub const DURATION_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Longest timeout of a request.
pub const TIMEOUT_MAX: Duration = Duration::from_secs(60 * 60);

/// Maximum requests in flight; one above is not sent and counts as failed. Each holds a connection; the value leaves
/// room below the usual limit of 1024 open files per process.
pub const IN_FLIGHT_MAX: usize = 900;

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
