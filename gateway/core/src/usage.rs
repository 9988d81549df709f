//! Ledger of the usage of tenants at one gateway, or at one spoke with a queue of jobs: counts by day, tenant, deployment and region,
//! since the beginning of each day.
//!
//! ```text
//!  count ──▶ RecentUsage ──merge──▶ Ledger ──flush──▶ files ──report──▶ hub: newest version of each day of each ledger
//!                                     ▲                 │
//!                                     └───── adopt ─────┘  a process that starts continues the ledger of one that has ended
//! ```
//!
//! Requests count in [`RecentUsage`], which is small and under a lock of its own; its owner takes it as a whole, and merges it into
//! the ledger while requests continue to count.
//!
//! Counts only rise, and every version of a day has a higher sequence number. What is reported is on disk before, so after
//! a crash the ledger continues from a version that is at least as new as the hub's: the counts since the last flush are lost,
//! and none is counted twice. A day that was reported is deleted when the next one has ended too: if the clock is set back over
//! midnight, the day continues with its sequence numbers.
//!
//! The time and the number of the ledger are arguments.

use regions::id::{DeploymentName, RegionId, TenantId};
use scheduler_api::WireError;
use scheduler_api::usage::{REPORT_DAYS_MAX, ROWS_MAX, UsageCounts, UsageDay, UsageKey, UsageOfDay, UsageV1};
use std::collections::BTreeMap;

/// Maximum number of days that wait for a hub. When the hubs are away for longer, the oldest day is deleted.
pub const DAYS_MAX: usize = 35;
const _: () = assert!(DAYS_MAX < REPORT_DAYS_MAX as usize, "the hub accepts all days that wait");

/// Maximum number of days in [`RecentUsage`]: today, and one on each side of a clock that is set.
const RECENT_DAYS_MAX: usize = 3;

/// Maximum number of rows with a deployment of a day; the rest is for the sums over a tenant's other deployments.
const NAMED_ROWS_MAX: usize = ROWS_MAX / 4 * 3;

/// Counts by tenant, deployment and region, with a limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct UsageRows {
    counts: BTreeMap<TenantId, BTreeMap<Option<DeploymentName>, BTreeMap<RegionId, UsageCounts>>>,
    len: usize,
}

/// Counts since the ledger was last written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecentUsage {
    days: BTreeMap<UsageDay, UsageRows>,
    uncounted: u64,
}

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
    rows: UsageRows,
    /// Sequence number of the last version.
    sequence: u64,
    /// Whether there are counts since that version.
    is_changed: bool,
    /// Sequence number of the version on disk; 0 before the first.
    written: u64,
    /// Sequence number of the version that a hub has stored; 0 before the first.
    reported: u64,
}

impl RecentUsage {
    /// Counts requests.
    pub fn count(
        &mut self,
        day: UsageDay,
        tenant: &TenantId,
        deployment: &DeploymentName,
        region: &RegionId,
        counts: UsageCounts,
    ) {
        if !self.days.contains_key(&day) && self.days.len() == RECENT_DAYS_MAX {
            self.uncounted += counts.requests;
            return;
        }
        if !self.days.entry(day).or_default().add(tenant, Some(deployment), region, counts) {
            self.uncounted += counts.requests;
        }
    }
}

impl Ledger {
    /// Creates an empty ledger with a number that no other has.
    pub fn new(gateway: RegionId, id: u64) -> Ledger {
        Ledger { gateway, id, days: BTreeMap::new(), lost_days: 0, uncounted: 0 }
    }

    /// Adds a day that an earlier process has written.
    ///
    /// # Errors
    ///
    /// The first invalid value, or the region or the number of another ledger.
    pub fn adopt(&mut self, wire: UsageV1) -> Result<(), WireError> {
        let UsageOfDay { gateway, ledger, sequence, day, rows } = wire.try_into()?;
        if (&gateway, ledger) != (&self.gateway, self.id) {
            return Err(WireError::new("ledger", format!("{ledger:016x} of {gateway} is another ledger")));
        }
        let mut of_day = DayOfLedger { sequence, written: sequence, ..DayOfLedger::default() };
        for ((tenant, deployment, region), counts) in rows {
            of_day.rows.insert(&tenant, deployment, &region, counts);
        }
        self.days.insert(day, of_day);
        Ok(())
    }

    /// Returns the number of the ledger.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the number of rows of the newest day.
    pub fn rows(&self) -> usize {
        self.days.values().next_back().map_or(0, |day| day.rows.len)
    }

    /// Returns the number of days that were deleted before they were reported.
    pub fn lost_days(&self) -> u64 {
        self.lost_days
    }

    /// Returns the number of requests that were not counted because there was no row for them.
    pub fn uncounted(&self) -> u64 {
        self.uncounted
    }

    /// Adds recent counts.
    pub fn merge(&mut self, recent: RecentUsage) {
        let RecentUsage { days, uncounted } = recent;
        self.uncounted += uncounted;
        for (day, rows) in days {
            let of_day = self.days.entry(day).or_default();
            of_day.is_changed = true;
            for ((tenant, deployment, region), counts) in rows.into_rows() {
                if !of_day.rows.add(&tenant, deployment.as_ref(), &region, counts) {
                    self.uncounted += counts.requests;
                }
            }
        }
    }

    /// Begins a new version of each day with new counts; returns these versions, which are to be written.
    pub fn flush(&mut self) -> Vec<UsageOfDay> {
        let (gateway, ledger) = (&self.gateway, self.id);
        let changed = self.days.iter_mut().filter(|(_, of_day)| of_day.is_changed);
        let version = |(day, of_day): (&UsageDay, &mut DayOfLedger)| {
            of_day.is_changed = false;
            of_day.sequence += 1;
            let rows = of_day.rows.clone().into_rows().collect();
            UsageOfDay { gateway: gateway.clone(), ledger, sequence: of_day.sequence, day: *day, rows }
        };
        changed.map(version).collect()
    }

    /// Notes that this version of a day is on disk.
    pub fn written(&mut self, day: UsageDay, sequence: u64) {
        if let Some(of_day) = self.days.get_mut(&day) {
            of_day.written = of_day.written.max(sequence);
        }
    }

    /// Notes that the last version of a day was not written, so that the next flush has its counts even without new ones.
    pub fn unwritten(&mut self, day: UsageDay) {
        if let Some(of_day) = self.days.get_mut(&day) {
            of_day.is_changed = true;
        }
    }

    /// Returns the days whose version on disk no hub has stored yet.
    pub fn unreported(&self) -> Vec<UsageDay> {
        let is_new = |(_, of_day): &(&UsageDay, &DayOfLedger)| of_day.written > of_day.reported;
        self.days.iter().filter(is_new).map(|(day, _)| *day).collect()
    }

    /// Notes that a hub has stored this version of a day.
    pub fn reported(&mut self, day: UsageDay, sequence: u64) {
        if let Some(of_day) = self.days.get_mut(&day) {
            of_day.reported = of_day.reported.max(sequence);
        }
    }

    /// Deletes the days that have ended, and whose next one has ended too, and that were reported; and the oldest ones beyond
    /// [`DAYS_MAX`]. Returns the days whose files are to be deleted.
    pub fn expire(&mut self, today: UsageDay) -> Vec<UsageDay> {
        let is_old = |day: UsageDay, of_day: &DayOfLedger| day < today.before(1) && of_day.is_done();
        let mut expired: Vec<_> =
            self.days.extract_if(.., |day, of_day| is_old(*day, of_day)).map(|(day, _)| day).collect();
        while self.days.len() > DAYS_MAX
            && let Some((day, _)) = self.days.pop_first()
        {
            self.lost_days += 1;
            expired.push(day);
        }
        expired
    }

    /// Deletes all days if all of them were reported, for a ledger in which no process counts. Returns the days whose files
    /// are to be deleted.
    pub fn retire(&mut self) -> Vec<UsageDay> {
        let is_done = self.days.values().all(DayOfLedger::is_done);
        if is_done { std::mem::take(&mut self.days).into_keys().collect() } else { Vec::new() }
    }

    /// Returns whether the ledger has no day.
    pub fn is_empty(&self) -> bool {
        self.days.is_empty()
    }
}

impl DayOfLedger {
    /// Returns whether a hub has stored all counts.
    fn is_done(&self) -> bool {
        !self.is_changed && self.reported >= self.sequence
    }
}

impl UsageRows {
    /// Adds counts to the row of a deployment, or if there is no row left to that of the tenant's other deployments; returns
    /// whether there was a row.
    fn add(
        &mut self,
        tenant: &TenantId,
        deployment: Option<&DeploymentName>,
        region: &RegionId,
        counts: UsageCounts,
    ) -> bool {
        let named = deployment.map(|name| (Some(name.clone()), NAMED_ROWS_MAX));
        for (deployment, rows_max) in named.into_iter().chain([(None, ROWS_MAX)]) {
            if let Some(row) = self.find(tenant, &deployment, region) {
                row.add(counts);
                return true;
            }
            if self.len < rows_max {
                self.insert(tenant, deployment, region, counts);
                return true;
            }
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
        let rows = self.counts.entry(tenant.clone()).or_default().entry(deployment).or_default();
        rows.insert(region.clone(), counts);
        self.len += 1;
    }

    /// Returns a row, if there is one.
    fn find(
        &mut self,
        tenant: &TenantId,
        deployment: &Option<DeploymentName>,
        region: &RegionId,
    ) -> Option<&mut UsageCounts> {
        self.counts.get_mut(tenant)?.get_mut(deployment)?.get_mut(region)
    }

    /// Returns the rows in their order.
    fn into_rows(self) -> impl Iterator<Item = (UsageKey, UsageCounts)> {
        self.counts.into_iter().flat_map(|(tenant, of_tenant)| {
            of_tenant.into_iter().flat_map(move |(deployment, of_deployment)| {
                let (tenant, deployment) = (tenant.clone(), deployment);
                let key = move |region| (tenant.clone(), deployment.clone(), region);
                of_deployment.into_iter().map(move |(region, counts)| (key(region), counts))
            })
        })
    }
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

    fn recent(recent: &mut RecentUsage, day: UsageDay, tenant: &str, deployment: usize) {
        let deployment = format!("deployment-{deployment}").parse().unwrap();
        recent.count(day, &tenant.parse().unwrap(), &deployment, &region(), ONE);
    }

    fn count(ledger: &mut Ledger, day: UsageDay, tenant: &str, deployment: usize) {
        let mut one = RecentUsage::default();
        recent(&mut one, day, tenant, deployment);
        ledger.merge(one);
    }

    fn requests(day: &UsageOfDay) -> u64 {
        day.rows.values().map(|counts| counts.requests).sum()
    }

    /// Begins new versions and writes them.
    fn write(ledger: &mut Ledger) -> Vec<UsageOfDay> {
        let versions = ledger.flush();
        versions.iter().for_each(|version| ledger.written(version.day, version.sequence));
        versions
    }

    #[test]
    fn requests_past_the_limit_of_rows_are_summed_by_tenant_and_then_not_counted() {
        let mut ledger = ledger();
        // Some at once and some later: the limits are those of the day.
        let mut first = RecentUsage::default();
        (0..NAMED_ROWS_MAX - 5).for_each(|n| recent(&mut first, DAY, "acme", n));
        ledger.merge(first);
        (NAMED_ROWS_MAX - 5..NAMED_ROWS_MAX + 1).for_each(|n| count(&mut ledger, DAY, "acme", n));
        count(&mut ledger, DAY, "acme", NAMED_ROWS_MAX + 1);
        count(&mut ledger, DAY, "acme", 0);
        assert_eq!(ledger.rows(), NAMED_ROWS_MAX + 1);
        let others = ROWS_MAX - ledger.rows();
        (0..others).for_each(|n| count(&mut ledger, DAY, &format!("tenant-{n}"), 0));
        assert_eq!((ledger.rows(), ledger.uncounted()), (ROWS_MAX, 0));
        count(&mut ledger, DAY, "one-more", 0);
        assert_eq!((ledger.rows(), ledger.uncounted()), (ROWS_MAX, 1));
        let [version] = &write(&mut ledger)[..] else { panic!("one day") };
        assert_eq!(requests(version), (NAMED_ROWS_MAX + 3 + others) as u64);
        let named = |name: Option<&str>| {
            let key = ("acme".parse().unwrap(), name.map(|name| name.parse().unwrap()), region());
            version.rows.get(&key).map(|counts| counts.requests)
        };
        assert_eq!((named(Some("deployment-0")), named(None)), (Some(2), Some(2)));
        let mut adopted = super::tests::ledger();
        adopted.adopt(UsageV1::from(version)).unwrap();
        adopted.unwritten(DAY);
        let [again] = &adopted.flush()[..] else { panic!("one day") };
        assert_eq!(
            (again.sequence, &again.rows),
            (version.sequence + 1, &version.rows),
            "all rows are read back"
        );
        let other = Ledger::new(region(), 8).adopt(UsageV1::from(version));
        assert_eq!(other.unwrap_err().field, "ledger");
    }

    #[test]
    fn recent_usage_has_the_same_limits_and_few_days() {
        let mut usage = RecentUsage::default();
        (0..ROWS_MAX + 1).for_each(|n| recent(&mut usage, DAY, &format!("tenant-{n}"), 0));
        assert_eq!((usage.days[&DAY].len, usage.uncounted), (ROWS_MAX, 1));
        (1..RECENT_DAYS_MAX as u32).for_each(|n| recent(&mut usage, UsageDay(DAY.0 + n), "acme", 0));
        assert_eq!((usage.days.len(), usage.uncounted), (RECENT_DAYS_MAX, 1));
        recent(&mut usage, UsageDay(DAY.0 + 9), "acme", 0);
        assert_eq!((usage.days.len(), usage.uncounted), (RECENT_DAYS_MAX, 2));
        let mut ledger = ledger();
        ledger.merge(usage);
        assert_eq!(ledger.uncounted(), 2);
    }

    #[test]
    fn a_day_is_deleted_when_the_next_one_has_ended_and_its_last_version_is_reported() {
        let mut ledger = ledger();
        let (midnight, later) = (UsageDay(DAY.0 + 1), UsageDay(DAY.0 + 2));
        count(&mut ledger, DAY, "acme", 0);
        assert_eq!(ledger.unreported(), [], "it is not on disk");
        let first = write(&mut ledger);
        assert_eq!(ledger.flush(), [], "nothing has changed");
        assert_eq!(ledger.unreported(), [DAY]);
        ledger.reported(DAY, first[0].sequence);
        assert_eq!(ledger.unreported(), []);
        // After the report, and before midnight.
        count(&mut ledger, DAY, "acme", 0);
        assert_eq!(ledger.expire(later), [], "a version is not reported");
        let second = write(&mut ledger);
        assert!(second[0].sequence > first[0].sequence);
        assert_eq!((ledger.unreported(), requests(&second[0])), (vec![DAY], 2));
        ledger.reported(DAY, second[0].sequence);
        // The clock was set back over midnight: the sequence continues.
        assert_eq!(ledger.expire(midnight), []);
        count(&mut ledger, DAY, "acme", 0);
        let third = write(&mut ledger);
        assert_eq!((third[0].sequence, requests(&third[0])), (second[0].sequence + 1, 3));
        ledger.reported(DAY, third[0].sequence);
        assert_eq!(ledger.expire(later), [DAY]);
        assert!(ledger.is_empty() && ledger.lost_days() == 0);
    }

    #[test]
    fn a_ledger_without_a_process_is_deleted_when_all_is_reported() {
        let mut ledger = ledger();
        count(&mut ledger, DAY, "acme", 0);
        count(&mut ledger, UsageDay(DAY.0 + 1), "acme", 0);
        let versions = write(&mut ledger);
        ledger.reported(DAY, versions[0].sequence);
        assert_eq!(ledger.retire(), []);
        ledger.reported(UsageDay(DAY.0 + 1), versions[1].sequence);
        assert_eq!(ledger.retire(), [DAY, UsageDay(DAY.0 + 1)]);
        assert!(ledger.is_empty());
    }

    #[test]
    fn the_oldest_day_is_lost_when_no_hub_responds_for_too_long() {
        let mut ledger = ledger();
        let last = |n: usize| UsageDay(DAY.0 + n as u32);
        (0..DAYS_MAX).for_each(|n| count(&mut ledger, last(n), "acme", 0));
        write(&mut ledger);
        assert_eq!((ledger.expire(last(DAYS_MAX)), ledger.lost_days()), (vec![], 0));
        count(&mut ledger, last(DAYS_MAX), "acme", 0);
        assert_eq!((ledger.expire(last(DAYS_MAX)), ledger.lost_days()), (vec![DAY], 1));
        assert_eq!(ledger.unreported().len(), DAYS_MAX - 1);
    }

    /// A gateway that counts, writes its file, reports and crashes in any order, and a hub that keeps the newest version.
    #[test]
    fn a_crash_loses_at_most_the_counts_since_the_last_flush_and_none_is_counted_twice() {
        for seed in 0..200 {
            let mut rng = StdRng::seed_from_u64(seed);
            let (mut running, mut disk, mut stored) = (ledger(), None::<UsageOfDay>, (0, 0));
            let (mut flushed, mut since_flush) = (0, 0);
            for _ in 0..300 {
                match rng.random_range(0..10) {
                    0..5 => {
                        count(&mut running, DAY, "acme", rng.random_range(0..3));
                        since_flush += 1;
                    }
                    5..7 => {
                        for version in running.flush() {
                            // The write fails now and then: then the file on the disk is the one before.
                            if rng.random_bool(0.8) {
                                running.written(version.day, version.sequence);
                                disk = Some(version);
                                flushed += since_flush;
                                since_flush = 0;
                            } else {
                                running.unwritten(version.day);
                            }
                        }
                    }
                    7..9 => {
                        if running.unreported().is_empty() {
                            continue;
                        }
                        let report = disk.as_ref().expect("what is reported is on disk");
                        if report.sequence > stored.0 {
                            stored = (report.sequence, requests(report));
                        }
                        // The response may be lost.
                        if rng.random_bool(0.5) {
                            running.reported(DAY, report.sequence);
                        }
                    }
                    _ => {
                        running = ledger();
                        if let Some(version) = &disk {
                            running.adopt(UsageV1::from(version)).unwrap();
                        }
                        since_flush = 0;
                    }
                }
                assert!(
                    stored.1 <= flushed,
                    "seed {seed}: {} are stored, and {flushed} were counted",
                    stored.1
                );
            }
            let end = running.flush().pop().inspect(|_| flushed += since_flush).or(disk);
            let end = end.map_or(0, |version| requests(&version));
            assert_eq!(end, flushed, "seed {seed}: all flushed counts survive, and none is there twice");
        }
    }
}
