//! Timetable: minimum replica counts at times of the week, for load that is known in advance.
//!
//! Times are in UTC: the replicas of a region serve callers of several time zones, and the hour that local time repeats
//! in autumn would be ambiguous. An entry whose end is not after its beginning continues into the next day.

use std::fmt;
use std::str::FromStr;

use configuration::text_values;

/// Maximum entries of one deployment: one for each hour of a day.
pub const TIMETABLE_ENTRIES_MAX: usize = 24;

const DAYS: [&str; 7] = ["mon", "tue", "wed", "thu", "fri", "sat", "sun"];
const MINUTES_OF_A_DAY: u16 = 24 * 60;
const SECONDS_OF_A_DAY: u64 = 24 * 60 * 60;
/// Weekday of 1 January 1970, a Thursday.
const FIRST_DAY: u64 = 3;

/// Set of days of the week.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Days(u8);

impl Days {
    fn has(self, day: u64) -> bool {
        self.0 & (1 << (day % 7)) != 0
    }
}

impl FromStr for Days {
    type Err = String;

    /// Parses `mon-fri`, `sat`, `mon,wed,fri-sun`; a span may cross the end of the week.
    fn from_str(text: &str) -> Result<Days, String> {
        let fix = "write days as \"mon-fri\", \"sat\" or \"mon,wed,fri-sun\"";
        let day = |name: &str| DAYS.iter().position(|known| *known == name);
        let mut days = 0;
        for span in text.split(',') {
            let (from, to) = span.split_once('-').unwrap_or((span, span));
            let (Some(from), Some(to)) = (day(from), day(to)) else {
                let shown: String = text.chars().take(64).collect();
                return Err(format!("`{shown}` are not days: {fix}"));
            };
            let length = (to + 7 - from) % 7;
            days |= (0..=length).fold(0u8, |days, step| days | (1 << ((from + step) % 7)));
        }
        Ok(Days(days))
    }
}

impl fmt::Display for Days {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named: Vec<_> = (0..).zip(DAYS).filter(|(day, _)| self.has(*day)).map(|(_, name)| name).collect();
        f.write_str(&named.join(","))
    }
}

/// Minute of the day, 00:00 to 24:00.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Minute(u16);

impl FromStr for Minute {
    type Err = String;

    fn from_str(text: &str) -> Result<Minute, String> {
        let digits = |part: &str| part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_digit());
        let two = |part: &str| part.parse::<u16>().ok().filter(|_| digits(part));
        let parts = text.split_once(':').and_then(|(hour, minute)| Some((two(hour)?, two(minute)?)));
        let minute = parts
            .filter(|(hour, minute)| *minute < 60 && *hour <= 24)
            .map(|(hour, minute)| hour * 60 + minute);
        minute.filter(|minute| *minute <= MINUTES_OF_A_DAY).map(Minute).ok_or_else(|| {
            let shown: String = text.chars().take(64).collect();
            format!("`{shown}` is not a time of the day: write \"00:00\" to \"24:00\", in UTC")
        })
    }
}

impl fmt::Display for Minute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02}:{:02}", self.0 / 60, self.0 % 60)
    }
}

text_values! {
    Days = "days of the week",
    Minute = "time of the day in UTC",
}

configuration::section! {
    /// Time of the week with its minimum replica count.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct TimetableEntry {
        /// Days on which it begins.
        pub days: Days, like "\"mon-fri\"";
        /// Begin.
        pub from: Minute, like "\"07:30\"";
        /// End, on the next day if not later than the begin.
        pub to: Minute, like "\"19:00\"";
        /// Minimum replica count.
        pub min: u32, like "4";
    }
}

impl TimetableEntry {
    /// Returns whether the entry applies at this Unix time.
    fn is_active(&self, unix_seconds: u64) -> bool {
        let day = unix_seconds / SECONDS_OF_A_DAY + FIRST_DAY;
        let minute = Minute((unix_seconds % SECONDS_OF_A_DAY / 60) as u16);
        let (today, yesterday) = (self.days.has(day), self.days.has(day + 6));
        if self.from < self.to {
            today && (self.from..self.to).contains(&minute)
        } else {
            (today && minute >= self.from) || (yesterday && minute < self.to)
        }
    }
}

/// Returns the minimum replica count at this Unix time: the largest of the active entries, or 0.
pub fn scheduled_min(timetable: &[TimetableEntry], unix_seconds: u64) -> u32 {
    let active = timetable.iter().filter(|entry| entry.is_active(unix_seconds));
    active.map(|entry| entry.min).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(days: &str, from: &str, to: &str, min: u32) -> TimetableEntry {
        TimetableEntry {
            days: days.parse().unwrap(),
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
            min,
        }
    }

    /// Returns the Unix time this many days, hours and minutes after Monday, 5 January 1970.
    fn at(day: u64, hour: u64, minute: u64) -> u64 {
        4 * SECONDS_OF_A_DAY + day * SECONDS_OF_A_DAY + hour * 3600 + minute * 60
    }

    #[test]
    fn an_entry_applies_from_its_first_minute_until_its_end() {
        let office = [entry("mon-fri", "07:30", "19:00", 4)];
        let check = |time: u64, expected: u32| assert_eq!(scheduled_min(&office, time), expected, "{time}");
        check(at(0, 7, 29), 0);
        check(at(0, 7, 30), 4);
        check(at(4, 18, 59) + 59, 4);
        check(at(4, 19, 0), 0);
        check(at(5, 12, 0), 0);
        // A Friday of this century: 2 January 2026.
        check(1_767_355_200, 4);
    }

    #[test]
    fn an_entry_that_ends_before_it_begins_continues_into_the_next_day() {
        let night = [entry("sun", "22:00", "06:00", 2), entry("mon", "00:00", "24:00", 1)];
        let check = |time: u64, expected: u32| assert_eq!(scheduled_min(&night, time), expected, "{time}");
        check(at(6, 21, 59), 0);
        check(at(6, 22, 0), 2);
        check(at(7, 5, 59), 2);
        check(at(7, 6, 0), 1);
        check(at(7, 23, 59), 1);
        check(at(8, 0, 0), 0);
    }

    #[test]
    fn days_and_times_round_trip_and_invalid_ones_are_rejected() {
        for (text, written) in [
            ("mon-fri", "mon,tue,wed,thu,fri"),
            ("sat", "sat"),
            ("fri-mon", "mon,fri,sat,sun"),
            ("mon,wed", "mon,wed"),
        ] {
            let days: Days = text.parse().unwrap();
            assert_eq!(days.to_string(), written);
            assert_eq!(written.parse(), Ok(days));
        }
        for text in ["", "monday", "mon-", "-mon", "mon fri", "mon,"] {
            assert!(text.parse::<Days>().unwrap_err().contains("mon-fri"), "{text}");
        }
        for text in ["00:00", "07:30", "24:00"] {
            assert_eq!(text.parse::<Minute>().map(|minute| minute.to_string()), Ok(text.to_owned()));
        }
        for text in ["", "7:30", "24:01", "25:00", "12:60", "12", "12:3", "-1:00", "+1:00"] {
            assert!(text.parse::<Minute>().unwrap_err().contains("in UTC"), "{text}");
        }
    }
}
