//! Lengths of time as people write them: a whole number with its unit, as `500ms`, `180s`, `5m` or `2h`.
//!
//! No fractions and no sums of units: there is one way to write each length, and `1.5h` is `90m`.

use std::time::Duration;

/// The units, the largest first, with their lengths in milliseconds.
const UNITS: [(&str, u64); 4] = [("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

/// Reads a length; `None` for what is none.
pub fn parse(text: &str) -> Option<Duration> {
    let unit_at = text.find(|letter: char| !letter.is_ascii_digit())?;
    let (number, unit) = text.split_at(unit_at);
    let (_, millis) = UNITS.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*millis).map(Duration::from_millis)
}

/// Writes a length in the largest unit of which it is a whole number; what is less than a millisecond is left out.
pub fn write(length: Duration) -> String {
    let millis = length.as_millis();
    if millis == 0 {
        return "0s".to_owned();
    }
    let whole = UNITS.iter().find(|(_, unit)| millis.is_multiple_of(u128::from(*unit)));
    let (name, unit) = whole.expect("every number is a whole number of milliseconds");
    format!("{}{name}", millis / u128::from(*unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_read_in_its_unit_and_written_in_the_largest() {
        let check = |text: &str, millis: u64, written: &str| {
            assert_eq!(parse(text), Some(Duration::from_millis(millis)), "{text}");
            assert_eq!(write(Duration::from_millis(millis)), written);
        };
        check("1500ms", 1500, "1500ms");
        check("180s", 180_000, "3m");
        check("90m", 5_400_000, "90m");
        check("24h", 86_400_000, "24h");
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
