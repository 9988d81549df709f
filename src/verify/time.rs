//! Times on the command line: RFC 3339 in UTC, or milliseconds since 1970.

const DAY_MS: u64 = 24 * 3600 * 1000;

/// Parses a time, in milliseconds since 1970; `None` for other texts. `2026-03-01`, `2026-03-01T12:30:00Z` and
/// `1772366400000` are valid; time zones other than UTC are not, because receipts use UTC.
pub(super) fn read(text: &str) -> Option<u64> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().ok();
    }
    let (date, time) = match text.split_once('T') {
        Some((date, time)) => (date, time.strip_suffix('Z')?),
        None => (text, "00:00:00"),
    };
    let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
    let [hour, minute, second] = numbers(time, ':', [2, 2, 2])?;
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let length = *lengths.get(usize::try_from(month).ok()?.checked_sub(1)?)?;
    if year < 1970 || !(1..=length).contains(&day) || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let leap_days = |years: u64| years / 4 - years / 100 + years / 400;
    let years = (year - 1970) * 365 + leap_days(year - 1) - leap_days(1969);
    let months: u64 = lengths[..month as usize - 1].iter().sum();
    let days = years + months + day - 1;
    Some(days * DAY_MS + ((hour * 60 + minute) * 60 + second) * 1000)
}

/// Parses three numbers with exactly these counts of digits and this separator.
fn numbers(text: &str, separator: char, digits: [usize; 3]) -> Option<[u64; 3]> {
    let mut parts = text.split(separator);
    let mut read = [0; 3];
    for (number, digits) in read.iter_mut().zip(digits) {
        let part = parts.next().filter(|part| part.len() == digits)?;
        *number = part.bytes().all(|byte| byte.is_ascii_digit()).then(|| part.parse().ok()).flatten()?;
    }
    parts.next().is_none().then_some(read)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_parsed_like_by_date() {
        // `date -u -d TIME +%s`.
        for (text, seconds) in [
            ("1970-01-01T00:00:00Z", 0),
            ("2000-02-29", 951_782_400),
            ("2024-12-31T23:59:59Z", 1_735_689_599),
            ("2026-03-01T12:30:00Z", 1_772_368_200),
            ("2100-03-01", 4_107_542_400),
        ] {
            assert_eq!(read(text), Some(seconds * 1000), "{text}");
        }
        assert_eq!(read("1772368200123"), Some(1_772_368_200_123));
        for text in [
            "",
            "now",
            "2026-3-1",
            "2026-13-01",
            "2026-00-01",
            "2026-02-29",
            "2026-03-01T24:00:00Z",
            "2026-03-01T12:30:00",
            "2026-03-01T12:30:00+01:00",
            "1969-12-31",
            "-1",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
