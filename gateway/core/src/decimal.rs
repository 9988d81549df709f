//! Fast formatting of numbers for texts that are written with every request: headers, the log line, receipts.
//!
//! `format!` of eight durations took a twentieth of the cost of a request (docs/benchmarks.md), by conversions to float
//! and back. Here durations stay integers.

use std::time::Duration;

/// Digits of the largest `u64`.
const DIGITS_MAX: usize = 20;

/// Appends `number`.
pub fn push(text: &mut String, mut number: u64) {
    let (mut digits, mut begin) = ([b'0'; DIGITS_MAX], DIGITS_MAX);
    loop {
        begin -= 1;
        digits[begin] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    text.push_str(std::str::from_utf8(&digits[begin..]).expect("digits are ASCII"));
}

/// Appends `number`, which has at most this number of digits, with leading zeros.
pub fn push_padded(text: &mut String, number: u64, digits: u32) {
    for exponent in (0..digits).rev() {
        text.push(char::from(b'0' + (number / 10u64.pow(exponent) % 10) as u8));
    }
}

/// Appends `duration` in milliseconds with three decimals.
pub fn push_millis(text: &mut String, duration: Duration) {
    let micros = u64::try_from((duration.as_nanos() + 500) / 1_000).unwrap_or(u64::MAX);
    push(text, micros / 1_000);
    text.push('.');
    push_padded(text, micros % 1_000, 3);
}

/// Parses milliseconds as written by [`push_millis`]; `None` for any other text, which may be a number all the same.
pub fn millis(text: &str) -> Option<Duration> {
    let (whole, fraction) = text.split_once('.')?;
    let digits = |text: &str| (1..=9).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || fraction.len() != 3 || !digits(fraction) {
        return None;
    }
    Some(Duration::from_micros(whole.parse::<u64>().ok()? * 1_000 + fraction.parse::<u64>().ok()?))
}

/// Returns the text that `push` appends.
pub fn text(push: impl FnOnce(&mut String)) -> String {
    let mut text = String::with_capacity(DIGITS_MAX);
    push(&mut text);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn numbers_are_formatted_as_by_the_standard_library(number in any::<u64>(), shift in 0u32..64, micros in 0u64..1 << 50) {
            let number = number >> shift;
            prop_assert_eq!(text(|text| push(text, number)), number.to_string());
            prop_assert_eq!(text(|text| push_padded(text, number % 1_000_000, 6)), format!("{:06}", number % 1_000_000));
            let written = text(|text| push_millis(text, Duration::from_micros(micros)));
            prop_assert_eq!(&written, &format!("{}.{:03}", micros / 1_000, micros % 1_000));
            let read = millis(&written);
            prop_assert_eq!(read, (micros < 1_000_000_000_000).then(|| Duration::from_micros(micros)));
        }
    }

    #[test]
    fn other_formats_of_durations_are_not_parsed() {
        for text in
            ["", ".", "1", "1.", ".123", "1.23", "1.2345", "-1.000", "+1.000", "1e3.000", "1.0 0", "inf"]
        {
            assert_eq!(millis(text), None, "{text:?}");
        }
        assert_eq!(millis("007.008"), Some(Duration::from_micros(7_008)));
    }

    #[test]
    fn half_a_microsecond_is_rounded_up() {
        let check = |nanos, expected| {
            assert_eq!(text(|text| push_millis(text, Duration::from_nanos(nanos))), expected, "{nanos} ns");
        };
        check(0, "0.000");
        check(499, "0.000");
        check(500, "0.001");
        check(999_500, "1.000");
    }
}
