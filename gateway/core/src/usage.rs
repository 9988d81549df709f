//! Ledger of the usage of tenants at one gateway: counts by day, tenant, deployment and region, since the beginning of each day.
//!
//! ```text
//!  count ──▶ Ledger ──flush──▶ file ──report──▶ hub: newest version of each day of each ledger
//!              ▲                │
//!              └──── adopt ─────┘  a process that starts continues the ledger of one that has ended
//! ```
//!
//! Counts only rise, and every version of a day has a higher sequence number. What is reported is on disk before, so after
//! a crash the ledger continues from a version that is at least as new as the hub's: the counts since the last flush are lost,
//! and none is counted twice. A day that has ended and was reported is deleted.
//!
//! The time and the number of the ledger are arguments.

use regions::id::{DeploymentName, RegionId, TenantId};
use scheduler_api::usage::{ROWS_MAX, UsageCounts, UsageDay, UsageOfDay, UsageV1};
use scheduler_api::{MessageVersion, VERSION, WireError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum number of days that wait for a hub. When the hubs are away for longer, the oldest day is deleted.
pub const DAYS_MAX: usize = 35;

/// Maximum number of rows with a deployment of a day; the rest is for the sums over a tenant's other deployments.
const NAMED_ROWS_MAX: usize = ROWS_MAX / 4 * 3;

/// Counts by tenant, deployment and region.
type Rows = BTreeMap<TenantId, BTreeMap<Option<DeploymentName>, BTreeMap<RegionId, UsageCounts>>>;

/// Usage at one gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    gateway: RegionId,
    id: u64,
    days: BTreeMap<UsageDay, DayOfLedger>,
    lost_days: u64,
    uncounted: u64,
}

/// One day.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct DayOfLedger {
    rows: Rows,
    len: usize,
    /// Sequence number of the last version.
    sequence: u64,
    /// Whether there are counts since that version.
    is_changed: bool,
    /// Sequence number of the version that a hub has stored; 0 before the first.
    reported: u64,
}

/// File of a ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerFileV1 {
    /// Version of the file.
    pub version: MessageVersion,
    /// Region of the gateway.
    pub gateway: String,
    /// Number of the ledger.
    pub ledger: u64,
    /// Days.
    pub days: Vec<UsageV1>,
}

impl Ledger {
    /// Creates an empty ledger with a number that no other has.
    pub fn new(gateway: RegionId, id: u64) -> Ledger {
        Ledger { gateway, id, days: BTreeMap::new(), lost_days: 0, uncounted: 0 }
    }

    /// Returns the ledger of a file.
    ///
    /// # Errors
    ///
    /// The first invalid value.
    pub fn adopt(file: LedgerFileV1) -> Result<Ledger, WireError> {
        let LedgerFileV1 { version: _, gateway, ledger, days } = file;
        let mut adopted = Ledger::new(scheduler_api::parsed("gateway", &gateway)?, ledger);
        for wire in days {
            let UsageOfDay { gateway: _, ledger: _, sequence, day, rows } = wire.try_into()?;
            let of_day = adopted.days.entry(day).or_default();
            of_day.sequence = sequence;
            for ((tenant, deployment, region), counts) in rows {
                of_day.insert(&tenant, deployment, &region, counts);
            }
        }
        Ok(adopted)
    }

    /// Returns the region of the gateway.
    pub fn gateway(&self) -> &RegionId {
        &self.gateway
    }

    /// Returns the number of rows of the newest day.
    pub fn rows(&self) -> usize {
        self.days.values().next_back().map_or(0, |day| day.len)
    }

    /// Returns the number of days that were deleted before they were reported.
    pub fn lost_days(&self) -> u64 {
        self.lost_days
    }

    /// Returns the number of requests that were not counted because there was no row for them.
    pub fn uncounted(&self) -> u64 {
        self.uncounted
    }

    /// Counts requests.
    pub fn count(
        &mut self,
        day: UsageDay,
        tenant: &TenantId,
        deployment: &DeploymentName,
        region: &RegionId,
        counts: UsageCounts,
    ) {
        if !self.days.entry(day).or_default().add(tenant, deployment, region, counts) {
            self.uncounted += counts.requests;
        }
        if self.days.len() > DAYS_MAX {
            self.days.pop_first();
            self.lost_days += 1;
        }
    }

    /// Begins a new version of each day with new counts; returns the file to be written, if there is any.
    pub fn flush(&mut self) -> Option<LedgerFileV1> {
        let changed = self.days.values_mut().filter(|day| day.is_changed);
        let changed = changed.map(|day| (day.sequence, day.is_changed) = (day.sequence + 1, false)).count();
        (changed > 0).then(|| self.file())
    }

    /// Notes that the last version was not written, so that the next flush has its counts even without new ones.
    pub fn unflushed(&mut self) {
        self.days.values_mut().for_each(|day| day.is_changed = true);
    }

    /// Returns the file of the current versions.
    pub fn file(&self) -> LedgerFileV1 {
        let days = self.days.iter().map(|(day, of_day)| UsageV1::from(&of_day.usage(self, *day)));
        LedgerFileV1 {
            version: VERSION,
            gateway: self.gateway.to_string(),
            ledger: self.id,
            days: days.collect(),
        }
    }

    /// Returns the days of a written file whose version no hub has stored yet.
    pub fn unreported<'a>(&self, written: &'a LedgerFileV1) -> Vec<&'a UsageV1> {
        let is_new = |usage: &&UsageV1| {
            let day = usage.day.parse::<UsageDay>().ok().and_then(|day| self.days.get(&day));
            day.is_some_and(|day| usage.sequence > day.reported)
        };
        written.days.iter().filter(is_new).collect()
    }

    /// Notes that a hub has stored this version of a day. A day before `today` without newer counts is deleted.
    pub fn reported(&mut self, day: UsageDay, sequence: u64, today: UsageDay) {
        let Some(of_day) = self.days.get_mut(&day) else { return };
        of_day.reported = of_day.reported.max(sequence);
        if day < today && !of_day.is_changed && of_day.reported >= of_day.sequence {
            self.days.remove(&day);
        }
    }

    /// Returns whether nothing is left to report.
    pub fn is_empty(&self) -> bool {
        self.days.is_empty()
    }
}

impl DayOfLedger {
    /// Adds counts to the row of a deployment, or if there is no row left to that of the tenant's other deployments; returns
    /// whether there was a row.
    fn add(
        &mut self,
        tenant: &TenantId,
        deployment: &DeploymentName,
        region: &RegionId,
        counts: UsageCounts,
    ) -> bool {
        let mut named = Some(deployment.clone());
        for rows_max in [NAMED_ROWS_MAX, ROWS_MAX] {
            if let Some(row) = find(&mut self.rows, tenant, &named, region) {
                row.add(counts);
                self.is_changed = true;
                return true;
            }
            if self.len < rows_max {
                self.insert(tenant, named, region, counts);
                self.is_changed = true;
                return true;
            }
            named = None;
        }
        false
    }

    fn insert(
        &mut self,
        tenant: &TenantId,
        deployment: Option<DeploymentName>,
        region: &RegionId,
        counts: UsageCounts,
    ) {
        let rows = self.rows.entry(tenant.clone()).or_default().entry(deployment).or_default();
        rows.insert(region.clone(), counts);
        self.len += 1;
    }

    fn usage(&self, ledger: &Ledger, day: UsageDay) -> UsageOfDay {
        let rows = self.rows.iter().flat_map(|(tenant, of_tenant)| {
            of_tenant.iter().flat_map(move |(deployment, of_deployment)| {
                let key = move |region: &RegionId| (tenant.clone(), deployment.clone(), region.clone());
                of_deployment.iter().map(move |(region, counts)| (key(region), *counts))
            })
        });
        UsageOfDay {
            gateway: ledger.gateway.clone(),
            ledger: ledger.id,
            sequence: self.sequence,
            day,
            rows: rows.collect(),
        }
    }
}

/// Returns a row, if there is one.
fn find<'a>(
    rows: &'a mut Rows,
    tenant: &TenantId,
    deployment: &Option<DeploymentName>,
    region: &RegionId,
) -> Option<&'a mut UsageCounts> {
    rows.get_mut(tenant)?.get_mut(deployment)?.get_mut(region)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    const DAY: UsageDay = UsageDay(20_000);
    const ONE: UsageCounts = UsageCounts { requests: 1, inputs: 2, tokens: 10 };

    fn region() -> RegionId {
        "aws/us-east-1".parse().unwrap()
    }

    fn ledger() -> Ledger {
        Ledger::new(region(), 7)
    }

    fn count(ledger: &mut Ledger, day: UsageDay, tenant: &str, deployment: usize) {
        let deployment = format!("deployment-{deployment}").parse().unwrap();
        ledger.count(day, &tenant.parse().unwrap(), &deployment, &region(), ONE);
    }

    fn requests(file: &LedgerFileV1) -> u64 {
        file.days.iter().flat_map(|day| &day.rows).map(|row| row.counts.requests).sum()
    }

    #[test]
    fn requests_past_the_limit_of_rows_are_summed_by_tenant_and_then_not_counted() {
        let mut ledger = ledger();
        (0..NAMED_ROWS_MAX + 1).for_each(|n| count(&mut ledger, DAY, "acme", n));
        count(&mut ledger, DAY, "acme", NAMED_ROWS_MAX + 1);
        count(&mut ledger, DAY, "acme", 0);
        assert_eq!(ledger.rows(), NAMED_ROWS_MAX + 1);
        let others = ROWS_MAX - ledger.rows();
        (0..others).for_each(|n| count(&mut ledger, DAY, &format!("tenant-{n}"), 0));
        assert_eq!((ledger.rows(), ledger.uncounted()), (ROWS_MAX, 0));
        count(&mut ledger, DAY, "one-more", 0);
        assert_eq!((ledger.rows(), ledger.uncounted()), (ROWS_MAX, 1));
        let file = ledger.flush().unwrap();
        assert_eq!(requests(&file), (NAMED_ROWS_MAX + 3 + others) as u64);
        let named = |name: &str| {
            let row = file.days[0].rows.iter().find(|row| row.tenant == "acme" && row.deployment == name);
            row.map(|row| row.counts.requests)
        };
        assert_eq!((named("deployment-0"), named("(other)")), (Some(2), Some(2)));
        assert_eq!(Ledger::adopt(file.clone()).unwrap().file(), file, "all rows are read back");
    }

    #[test]
    fn a_day_is_deleted_when_it_has_ended_and_its_last_version_is_reported() {
        let mut ledger = ledger();
        count(&mut ledger, DAY, "acme", 0);
        let first = ledger.flush().unwrap();
        assert_eq!(ledger.flush(), None, "nothing has changed");
        assert_eq!(ledger.unreported(&first).len(), 1);
        ledger.reported(DAY, first.days[0].sequence, DAY);
        assert_eq!(ledger.unreported(&first), [] as [&UsageV1; 0]);
        // After the report, and before midnight.
        count(&mut ledger, DAY, "acme", 0);
        ledger.reported(DAY, first.days[0].sequence, UsageDay(DAY.0 + 1));
        let second = ledger.flush().unwrap();
        assert!(second.days[0].sequence > first.days[0].sequence);
        assert_eq!((ledger.unreported(&second).len(), requests(&second)), (1, 2));
        ledger.reported(DAY, second.days[0].sequence, UsageDay(DAY.0 + 1));
        assert!(ledger.is_empty());
    }

    #[test]
    fn the_oldest_day_is_lost_when_no_hub_responds_for_too_long() {
        let mut ledger = ledger();
        (0..DAYS_MAX as u32).for_each(|n| count(&mut ledger, UsageDay(DAY.0 + n), "acme", 0));
        assert_eq!((ledger.lost_days(), ledger.file().days.len()), (0, DAYS_MAX));
        count(&mut ledger, UsageDay(DAY.0 + DAYS_MAX as u32), "acme", 0);
        assert_eq!((ledger.lost_days(), ledger.file().days.len()), (1, DAYS_MAX));
        assert_eq!(ledger.file().days[0].day, UsageDay(DAY.0 + 1).to_string());
    }

    /// A gateway that counts, writes its file, reports and crashes in any order, and a hub that keeps the newest version.
    #[test]
    fn a_crash_loses_at_most_the_counts_since_the_last_flush_and_none_is_counted_twice() {
        for seed in 0..200 {
            let mut rng = StdRng::seed_from_u64(seed);
            let (mut running, mut disk, mut stored) = (ledger(), None::<LedgerFileV1>, (0, 0));
            let (mut flushed, mut since_flush) = (0, 0);
            for _ in 0..300 {
                match rng.random_range(0..10) {
                    0..5 => {
                        count(&mut running, DAY, "acme", rng.random_range(0..3));
                        since_flush += 1;
                    }
                    5..7 => {
                        if let Some(file) = running.flush() {
                            // The write fails now and then: then the file on the disk is the one before.
                            if rng.random_bool(0.8) {
                                disk = Some(file);
                                flushed += since_flush;
                                since_flush = 0;
                            }
                        }
                    }
                    7..9 => {
                        let Some(written) = &disk else { continue };
                        let reports = running.unreported(written).into_iter().cloned().collect::<Vec<_>>();
                        for report in reports {
                            if report.sequence > stored.0 {
                                stored = (
                                    report.sequence,
                                    report.rows.iter().map(|row| row.counts.requests).sum(),
                                );
                            }
                            // The response may be lost.
                            if rng.random_bool(0.5) {
                                running.reported(DAY, report.sequence, DAY);
                            }
                        }
                    }
                    _ => {
                        running = disk.clone().map_or_else(ledger, |file| Ledger::adopt(file).unwrap());
                        since_flush = 0;
                    }
                }
                assert!(
                    stored.1 <= flushed,
                    "seed {seed}: {} are stored, and {flushed} were counted",
                    stored.1
                );
            }
            let end = running.flush().inspect(|_| flushed += since_flush).or(disk);
            let end = end.map_or(0, |file| requests(&file));
            assert_eq!(end, flushed, "seed {seed}: all flushed counts survive, and none is there twice");
        }
    }
}
