//! Usage of tenants: requests, inputs and tokens by deployment, region and day.
//!
//! A gateway counts in a ledger, which has a random number and is on its disk, and so does a spoke with a queue of jobs. It reports a day of its ledger as a whole: the
//! counts since the beginning of the day, with a sequence number that rises with each version. So a report may be sent again, or
//! to another hub: the hub keeps the newest version of each day of each ledger, and the usage is the sum over the ledgers.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use regions::{DeploymentName, RegionId, TenantId};
use serde::{Deserialize, Serialize};

use super::{MessageVersion, VERSION, WireError, parsed};

/// Maximum number of rows of a day in a ledger; the rest is counted in the rows of [`OTHER`]. Two thousand rows are 0.3 MB as JSON,
/// and less than [`RECORD_BYTES_MAX`] in the hub's store.
pub const ROWS_MAX: usize = 2048;
/// Maximum bytes of a day of a ledger in the hub's store, compressed.
pub const RECORD_BYTES_MAX: usize = 64 << 10;
/// Maximum number of ledgers of one day with the same region. A process continues its ledger when it starts again, so this is the number of
/// gateways in a region and of its spokes with a queue of jobs, and of those whose disk was lost on this day; a gateway that hands over to
/// another process has two.
pub const LEDGERS_MAX: usize = 64;
/// Maximum number of records in the hub's store: two gateways in each of 64 regions for [`RETENTION_DAYS`], and a quarter more for
/// lost disks and for days with a handover.
pub const RECORDS_MAX: usize = 64 << 10;
/// Maximum number of rows of the response to a query, 10 MB as JSON.
pub const REPORT_ROWS_MAX: usize = 50_000;
/// Days for which the hub keeps usage: a year, and a month to look at it.
pub const RETENTION_DAYS: u32 = 400;
/// Days after which usage is no longer accepted: those that a gateway keeps while no hub responds, and one for its clock.
pub const REPORT_DAYS_MAX: u32 = 36;
/// Days that the clock of a gateway may be ahead of the hub's.
const AHEAD_DAYS_MAX: u32 = 1;
/// Maximum number of days of one query, for which the hub reads the ledgers of all gateways.
pub const QUERY_DAYS_MAX: u32 = 92;
/// Name of a deployment in a row that has the requests for which there was no row left. No deployment can have it.
pub const OTHER: &str = "(other)";

const SECONDS_OF_A_DAY: u64 = 86_400;

/// Day in UTC, as the number of days since 1970-01-01.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UsageDay(pub u32);

impl UsageDay {
    /// Returns the day of a time since 1970.
    pub fn at(since_1970: Duration) -> UsageDay {
        UsageDay(u32::try_from(since_1970.as_secs() / SECONDS_OF_A_DAY).unwrap_or(u32::MAX))
    }

    /// Returns the day of a time; the first one for a clock before 1970.
    pub fn of(time: SystemTime) -> UsageDay {
        UsageDay::at(time.duration_since(UNIX_EPOCH).unwrap_or_default())
    }

    /// Returns whether the hub accepts usage of this day: it is in the last [`REPORT_DAYS_MAX`].
    pub fn is_accepted(self, today: UsageDay) -> bool {
        self >= today.before(REPORT_DAYS_MAX) && self.before(AHEAD_DAYS_MAX) <= today
    }

    /// Returns the day this many days before.
    pub fn before(self, days: u32) -> UsageDay {
        UsageDay(self.0.saturating_sub(days))
    }

    /// Returns year, month and day (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`).
    fn date(self) -> (u64, u64, u64) {
        let days = u64::from(self.0) + 719_468;
        let (era, of_era) = (days / 146_097, days % 146_097);
        let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted = (5 * of_year + 2) / 153;
        let day = of_year - (153 * shifted + 2) / 5 + 1;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        (year_of_era + era * 400 + u64::from(month <= 2), month, day)
    }
}

/// `YYYY-MM-DD`.
impl fmt::Display for UsageDay {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (year, month, day) = self.date();
        write!(to, "{year:04}-{month:02}-{day:02}")
    }
}

/// Invalid date.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("is not a date from 1970 on; write YYYY-MM-DD, such as 2026-11-26")]
pub struct InvalidDay;

impl FromStr for UsageDay {
    type Err = InvalidDay;

    fn from_str(text: &str) -> Result<UsageDay, InvalidDay> {
        let shape = text.bytes().enumerate().all(|(at, byte)| match at {
            4 | 7 => byte == b'-',
            _ => byte.is_ascii_digit(),
        });
        if text.len() != 10 || !shape {
            return Err(InvalidDay);
        }
        let number = |part: &str| part.parse::<u64>().map_err(|_| InvalidDay);
        let (year, month, day) = (number(&text[..4])?, number(&text[5..7])?, number(&text[8..])?);
        if year < 1970 || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
            return Err(InvalidDay);
        }
        // `days_from_civil` of the same paper.
        let shifted_year = if month <= 2 { year - 1 } else { year };
        let (era, year_of_era) = (shifted_year / 400, shifted_year % 400);
        let shifted = if month > 2 { month - 3 } else { month + 9 };
        let of_year = (153 * shifted + 2) / 5 + day - 1;
        let of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + of_year;
        let read = UsageDay(u32::try_from(era * 146_097 + of_era - 719_468).map_err(|_| InvalidDay)?);
        // February 30 is another day.
        if read.date() == (year, month, day) { Ok(read) } else { Err(InvalidDay) }
    }
}

/// Counts of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageCounts {
    /// Successful requests.
    pub requests: u64,
    /// Their inputs.
    pub inputs: u64,
    /// Their tokens, as the regions counted them.
    pub tokens: u64,
}

impl UsageCounts {
    /// Adds other counts.
    pub fn add(&mut self, more: UsageCounts) {
        self.requests = self.requests.saturating_add(more.requests);
        self.inputs = self.inputs.saturating_add(more.inputs);
        self.tokens = self.tokens.saturating_add(more.tokens);
    }
}

/// Usage of one tenant with one deployment in one region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRowV1 {
    /// Tenant.
    pub tenant: String,
    /// Deployment, or [`OTHER`].
    pub deployment: String,
    /// Region that has computed them.
    pub region: String,
    /// Counts.
    #[serde(flatten)]
    pub counts: UsageCounts,
}

/// `POST /v1/usage`: one day of a ledger; also the stored record, and part of a gateway's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Region of the gateway, or of the spoke.
    pub gateway: String,
    /// Random number of the ledger.
    pub ledger: u64,
    /// Rises with each version of this day.
    pub sequence: u64,
    /// Day in UTC, `YYYY-MM-DD`.
    pub day: String,
    /// Rows, ordered by tenant, deployment and region.
    pub rows: Vec<UsageRowV1>,
}

/// `GET /v1/usage`: sums over all ledgers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageReportV1 {
    /// Version of the message.
    pub version: MessageVersion,
    /// Rows, ordered by day, tenant, deployment and region.
    pub rows: Vec<DailyUsageV1>,
}

/// Usage of one day.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DailyUsageV1 {
    /// Day in UTC, `YYYY-MM-DD`.
    pub day: String,
    /// Row.
    #[serde(flatten)]
    pub row: UsageRowV1,
}

/// Tenant, deployment (`None` for [`OTHER`]) and region of a row.
pub type UsageKey = (TenantId, Option<DeploymentName>, RegionId);

/// One day of a ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageOfDay {
    /// Region of the gateway.
    pub gateway: RegionId,
    /// Number of the ledger.
    pub ledger: u64,
    /// Sequence number of this version.
    pub sequence: u64,
    /// Day.
    pub day: UsageDay,
    /// Counts.
    pub rows: BTreeMap<UsageKey, UsageCounts>,
}

impl From<&UsageOfDay> for UsageV1 {
    fn from(usage: &UsageOfDay) -> UsageV1 {
        let UsageOfDay { gateway, ledger, sequence, day, rows } = usage;
        let row = |((tenant, deployment, region), counts): (&UsageKey, &UsageCounts)| UsageRowV1 {
            tenant: tenant.to_string(),
            deployment: deployment.as_ref().map_or_else(|| OTHER.to_owned(), ToString::to_string),
            region: region.to_string(),
            counts: *counts,
        };
        UsageV1 {
            version: VERSION,
            gateway: gateway.to_string(),
            ledger: *ledger,
            sequence: *sequence,
            day: day.to_string(),
            rows: rows.iter().map(row).collect(),
        }
    }
}

impl TryFrom<UsageV1> for UsageOfDay {
    type Error = WireError;

    fn try_from(wire: UsageV1) -> Result<UsageOfDay, WireError> {
        let UsageV1 { version: _, gateway, ledger, sequence, day, rows: given } = wire;
        if given.len() > ROWS_MAX {
            return Err(WireError::new(
                "rows",
                format!("{} rows; at most {ROWS_MAX} are allowed", given.len()),
            ));
        }
        let mut rows = BTreeMap::new();
        for (at, UsageRowV1 { tenant, deployment, region, counts }) in given.into_iter().enumerate() {
            let field = |name: &str| format!("rows[{at}].{name}");
            let named =
                (deployment != OTHER).then(|| parsed(field("deployment"), &deployment)).transpose()?;
            let key = (parsed(field("tenant"), &tenant)?, named, parsed(field("region"), &region)?);
            if rows.insert(key, counts).is_some() {
                return Err(WireError::new(format!("rows[{at}]"), "the same row as an earlier one"));
            }
        }
        Ok(UsageOfDay {
            gateway: parsed("gateway", &gateway)?,
            ledger,
            sequence,
            day: parsed("day", &day)?,
            rows,
        })
    }
}

/// Sums over days of ledgers, as operators read them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsageSums(BTreeMap<(UsageDay, UsageKey), UsageCounts>);

/// A query of usage has too many rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the usage of these days has more than {REPORT_ROWS_MAX} rows; ask for fewer days")]
pub struct TooManyRows;

impl UsageSums {
    /// Adds a day of a ledger.
    ///
    /// # Errors
    ///
    /// When there are too many rows.
    pub fn add(&mut self, usage: UsageOfDay) -> Result<(), TooManyRows> {
        let UsageOfDay { gateway: _, ledger: _, sequence: _, day, rows } = usage;
        for (key, counts) in rows {
            self.0.entry((day, key)).or_default().add(counts);
        }
        if self.0.len() > REPORT_ROWS_MAX { Err(TooManyRows) } else { Ok(()) }
    }

    /// Returns the sums.
    pub fn report(self) -> UsageReportV1 {
        report(self.0)
    }
}

fn report(sums: BTreeMap<(UsageDay, UsageKey), UsageCounts>) -> UsageReportV1 {
    let row =
        |((day, (tenant, deployment, region)), counts): ((UsageDay, UsageKey), UsageCounts)| DailyUsageV1 {
            day: day.to_string(),
            row: UsageRowV1 {
                tenant: tenant.to_string(),
                deployment: deployment.map_or_else(|| OTHER.to_owned(), |name| name.to_string()),
                region: region.to_string(),
                counts,
            },
        };
    UsageReportV1 { version: VERSION, rows: sums.into_iter().map(row).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_dates_in_utc() {
        let check = |seconds: u64, text: &str| {
            let day = UsageDay::at(Duration::from_secs(seconds));
            assert_eq!(day.to_string(), text);
            assert_eq!(text.parse(), Ok(day));
        };
        check(0, "1970-01-01");
        check(86_399, "1970-01-01");
        check(86_400, "1970-01-02");
        check(951_782_400, "2000-02-29");
        check(951_868_800, "2000-03-01");
        check(1_795_651_200, "2026-11-26");
        check(4_107_542_400, "2100-03-01");
        for text in [
            "",
            "2026-11-6",
            "2026-02-30",
            "2026-13-01",
            "1969-12-31",
            "2026/11/26",
            "2026-11-26 ",
            "2100-02-29",
        ] {
            assert_eq!(text.parse::<UsageDay>(), Err(InvalidDay), "{text}");
        }
        (0..60_000).map(UsageDay).for_each(|day| assert_eq!(day.to_string().parse(), Ok(day)));
    }

    fn usage(ledger: u64, rows: &[(&str, Option<&str>, u64)]) -> UsageOfDay {
        let row = |(tenant, deployment, n): &(&str, Option<&str>, u64)| {
            let key = (
                tenant.parse().unwrap(),
                deployment.map(|name| name.parse().unwrap()),
                "aws/us-east-1".parse().unwrap(),
            );
            (key, UsageCounts { requests: *n, inputs: 2 * n, tokens: 10 * n })
        };
        UsageOfDay {
            gateway: "aws/us-east-1".parse().unwrap(),
            ledger,
            sequence: 7,
            day: UsageDay(20_000),
            rows: rows.iter().map(row).collect(),
        }
    }

    #[test]
    fn a_day_is_read_back_as_it_was_written_and_has_a_limit_of_rows() {
        let day = usage(1, &[("acme", Some("minilm"), 3), ("acme", None, 1)]);
        let wire = UsageV1::from(&day);
        let text = serde_json::to_string(&wire).unwrap();
        assert!(
            text.contains(
                r#""deployment":"(other)","region":"aws/us-east-1","requests":1,"inputs":2,"tokens":10"#
            ),
            "{text}"
        );
        assert_eq!(UsageOfDay::try_from(serde_json::from_str::<UsageV1>(&text).unwrap()), Ok(day));
        let rows = |n: usize| {
            let rows = (0..n).map(|at| UsageRowV1 { tenant: format!("tenant-{at}"), ..wire.rows[0].clone() });
            UsageOfDay::try_from(UsageV1 { rows: rows.collect(), ..wire.clone() })
        };
        assert_eq!(rows(ROWS_MAX).map(|usage| usage.rows.len()), Ok(ROWS_MAX));
        assert_eq!(rows(ROWS_MAX + 1).unwrap_err().field, "rows");
        let twice = UsageV1 { rows: vec![wire.rows[0].clone(); 2], ..wire.clone() };
        assert_eq!(UsageOfDay::try_from(twice).unwrap_err().field, "rows[1]");
        let hostile = UsageRowV1 { deployment: "(any)".to_owned(), ..wire.rows[0].clone() };
        let hostile = UsageOfDay::try_from(UsageV1 { rows: vec![hostile], ..wire });
        assert_eq!(hostile.unwrap_err().field, "rows[0].deployment");
    }

    #[test]
    fn the_report_is_the_sum_over_ledgers() {
        let mut sums = UsageSums::default();
        sums.add(usage(1, &[("acme", Some("minilm"), 3)])).unwrap();
        sums.add(usage(2, &[("acme", Some("minilm"), 4), ("b", None, 1)])).unwrap();
        let report = sums.report();
        let rows: Vec<_> =
            report.rows.iter().map(|it| (it.row.tenant.as_str(), it.row.counts.requests)).collect();
        assert_eq!(rows, [("acme", 7), ("b", 1)]);
        assert_eq!(report.rows[0].day, "2024-10-04");
    }

    #[test]
    fn a_report_has_a_limit_of_rows() {
        let day = |day: u32, rows: usize| {
            let rows = (0..rows).map(|n| {
                let key = (format!("t-{n}").parse().unwrap(), None, "aws/us-east-1".parse().unwrap());
                (key, UsageCounts::default())
            });
            UsageOfDay { day: UsageDay(day), rows: rows.collect(), ..usage(1, &[]) }
        };
        let mut sums = UsageSums::default();
        assert_eq!(sums.add(day(1, REPORT_ROWS_MAX - 1)), Ok(()));
        assert_eq!(sums.add(day(2, 1)), Ok(()), "at the limit");
        assert_eq!(sums.add(day(1, 2)), Ok(()), "the same rows of another ledger");
        assert_eq!(sums.add(day(3, 1)), Err(TooManyRows), "one past it");
    }

    #[test]
    fn the_hub_accepts_the_days_that_gateways_keep_and_one_of_a_clock_that_is_ahead() {
        let today = UsageDay(20_000);
        for (day, expected) in
            [(19_964, true), (19_963, false), (20_000, true), (20_001, true), (20_002, false)]
        {
            assert_eq!(UsageDay(day).is_accepted(today), expected, "{day}");
        }
        let time = UNIX_EPOCH + Duration::from_secs(20_000 * 86_400);
        assert_eq!(UsageDay::of(time), today);
    }
}
