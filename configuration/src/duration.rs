//! Durations in files: a whole number with a unit, as `500ms`, `180s`, `5m`, `2h` or `7d`.
//!
//! Fractions and sums of units are not supported, so each duration has few spellings: `1.5h` is written `90m`.

use std::time::Duration;

/// Milliseconds of a day.
const DAY: u64 = 86_400_000;
/// Units, largest first, with their lengths in milliseconds.
const UNITS: [(&str, u64); 5] = [("d", DAY), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

/// Parses a duration; `None` if the text is not one.
pub fn parse(text: &str) -> Option<Duration> {
    let unit_at = text.find(|letter: char| !letter.is_ascii_digit())?;
    let (number, unit) = text.split_at(unit_at);
    let (_, millis) = UNITS.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*millis).map(Duration::from_millis)
}

/// Formats a duration in the largest unit of which it is a multiple; parts of a millisecond are dropped. One day is `24h`.
pub fn write(length: Duration) -> String {
    let millis = length.as_millis();
    if millis == 0 {
        return "0s".to_owned();
    }
    let units = UNITS.iter().skip(usize::from(millis == u128::from(DAY)));
    let whole = units.into_iter().find(|(_, unit)| millis.is_multiple_of(u128::from(*unit)));
    let (name, unit) = whole.expect("every duration is a multiple of a millisecond");
    format!("{}{name}", millis / u128::from(*unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_formatted_in_its_largest_unit() {
        let check = |text: &str, millis: u64, written: &str| {
            assert_eq!(parse(text), Some(Duration::from_millis(millis)), "{text}");
            assert_eq!(write(Duration::from_millis(millis)), written);
        };
        check("1500ms", 1500, "1500ms");
        check("180s", 180_000, "3m");
        check("90m", 5_400_000, "90m");
        check("24h", 86_400_000, "24h");
        check("168h", 604_800_000, "7d");
        check("7d", 604_800_000, "7d");
        check("36h", 129_600_000, "36h");
        check("0s", 0, "0s");
        for text in [
            "",
            "s",
            "10",
            "-1s",
            "1.5h",
            "1h30m",
            "5 m",
            "5M",
            "99999999999999999999h",
            "18446744073709551615h",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
