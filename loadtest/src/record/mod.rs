//! Statistics of a run: histograms per region, priority and outcome, histograms per task and stage, and counts with a
//! compact distribution per second, region and task.
//!
//! Latencies of failures are separate from those of successes: a rejection within a millisecond must not improve the
//! percentiles, and a timeout of ten seconds is not a response time.
//!
//! A request belongs to the second and the stage of its *intended* start. The failure of a region therefore appears in
//! the second in which it happened, not in the seconds in which the timeouts expired, and the effect of a surge is
//! attributed to the requests of the surge, not to later ones.

mod group;
mod latencies;
mod mark;
pub(crate) mod served;
mod snapshot;
mod window;

pub use group::{Group, OutcomeStats};
pub use latencies::{CompactLatencies, Latencies};
pub use mark::Mark;
pub use served::{REGION_SETS_MAX, REGIONS_MAX, ServingRegions};
pub use snapshot::RunSnapshot;
pub use window::{SecondStats, TimeWindow};

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use crate::exchange::Sample;
use replica_api::priority::Priority;

/// Seconds of a run by index, each with the statistics of its serving regions.
pub type Seconds = BTreeMap<u64, BTreeMap<ServingRegions, SecondStats>>;

/// Statistics of one task.
#[derive(Clone, Debug, Default)]
pub struct TaskRecord {
    /// By end time of the stage.
    stages: Vec<(Duration, Group)>,
    regions: BTreeMap<ServingRegions, Group>,
    seconds: Seconds,
}

impl TaskRecord {
    /// Returns the statistics by stage, in order.
    pub fn stages(&self) -> impl Iterator<Item = &Group> {
        self.stages.iter().map(|(_, stage)| stage)
    }

    /// Returns the statistics by region, in order of names.
    pub fn regions(&self) -> &BTreeMap<ServingRegions, Group> {
        &self.regions
    }

    /// Returns the statistics of all requests.
    pub fn total(&self) -> Group {
        sum(self.regions.values())
    }

    /// Returns the statistics by second of the intended start, and region.
    pub fn seconds(&self) -> &Seconds {
        &self.seconds
    }
}

/// Statistics of a run.
#[derive(Clone, Debug, Default)]
pub struct Record {
    tasks: Vec<TaskRecord>,
    priorities: BTreeMap<(ServingRegions, Priority), Group>,
    lag: Latencies,
}

impl Record {
    /// Creates an empty record for these tasks, each given by the end times of its stages.
    pub fn of(tasks: impl IntoIterator<Item = Vec<Duration>>) -> Record {
        let stages = |ends: Vec<Duration>| ends.into_iter().map(|end| (end, Group::default())).collect();
        let task = |ends| TaskRecord { stages: stages(ends), ..TaskRecord::default() };
        Record { tasks: tasks.into_iter().map(task).collect(), ..Record::default() }
    }

    /// Merges records of concurrent runs: the tasks of the first, then those of the next.
    pub fn join(records: impl IntoIterator<Item = Record>) -> Record {
        let mut all = Record::default();
        for Record { tasks, priorities, lag } in records {
            all.tasks.extend(tasks);
            all.lag.add(&lag);
            priorities
                .iter()
                .for_each(|(priority, group)| all.priorities.entry(priority.clone()).or_default().add(group));
        }
        all
    }

    /// Adds a sample.
    pub fn add(&mut self, sample: Sample) {
        let Sample { task, priority, intended, lag, latency, served, retried, outcome } = sample;
        let is_below_limit = |max| self.contains(&served) || self.distinct_count(&served) < max;
        let served =
            if served.distinct_max().is_none_or(is_below_limit) { served } else { ServingRegions::Other };
        self.lag.record(lag);
        if self.tasks.len() <= task {
            self.tasks.resize_with(task + 1, TaskRecord::default);
        }
        let TaskRecord { stages, regions, seconds } = &mut self.tasks[task];

        let second = seconds.entry(intended.as_secs()).or_default().entry(served.clone()).or_default();
        match outcome {
            Ok(()) => {
                second.ok += 1;
                second.latencies.record(latency.unwrap_or_default());
            }
            Err(_) => second.failed += 1,
        }
        if let Some((_, stage)) = stages.iter_mut().find(|(ends, _)| intended < *ends) {
            stage.count(outcome, latency, retried);
        }
        regions.entry(served.clone()).or_default().count(outcome, latency, retried);
        self.priorities.entry((served, priority)).or_default().count(outcome, latency, retried);
    }

    /// Returns the statistics by task, in the order of the options.
    pub fn tasks(&self) -> &[TaskRecord] {
        &self.tasks
    }

    /// Returns the statistics by stage of the first task, in order; for a run with one task these cover the run.
    pub fn stages(&self) -> impl Iterator<Item = &Group> {
        self.tasks.first().into_iter().flat_map(TaskRecord::stages)
    }

    /// Returns the statistics by region, in order of names.
    pub fn regions(&self) -> BTreeMap<ServingRegions, Group> {
        let mut regions: BTreeMap<ServingRegions, Group> = BTreeMap::new();
        for ((served, _), group) in &self.priorities {
            regions.entry(served.clone()).or_default().add(group);
        }
        regions
    }

    /// Returns the statistics by region and priority.
    pub fn priorities(&self) -> &BTreeMap<(ServingRegions, Priority), Group> {
        &self.priorities
    }

    /// Returns the statistics by second of the intended start, and region, over all tasks.
    pub fn seconds(&self) -> Seconds {
        let mut all = Seconds::default();
        for (number, regions) in self.tasks.iter().flat_map(|task| &task.seconds) {
            let sums = all.entry(*number).or_default();
            regions.iter().for_each(|(served, second)| sums.entry(served.clone()).or_default().add(second));
        }
        all
    }

    /// Returns the statistics of requests whose intended start is in a second that overlaps `[from, to)`: partial
    /// seconds at both ends are included completely.
    pub fn between(&self, from: Duration, to: Duration) -> TimeWindow {
        self.window(&self.tasks, from, to)
    }

    /// Returns the same for the task with this index.
    pub fn between_of(&self, task: usize, from: Duration, to: Duration) -> TimeWindow {
        self.window(self.tasks.get(task..=task).unwrap_or_default(), from, to)
    }

    fn window(&self, tasks: &[TaskRecord], from: Duration, to: Duration) -> TimeWindow {
        let mut window = TimeWindow::default();
        for (_, regions) in tasks.iter().flat_map(|task| task.seconds.range(overlapping_seconds(from, to))) {
            regions.iter().for_each(|(served, second)| window.add(served, second));
        }
        window
    }

    /// Returns the distribution of the generator's lag.
    pub fn lag(&self) -> &Latencies {
        &self.lag
    }

    /// Returns the statistics of all requests.
    pub fn total(&self) -> Group {
        sum(self.priorities.values())
    }

    fn contains(&self, served: &ServingRegions) -> bool {
        let priorities = [Priority::Interactive, Priority::Bulk];
        priorities.into_iter().any(|priority| self.priorities.contains_key(&(served.clone(), priority)))
    }

    /// Returns the number of distinct entries of the same type (region, or set of regions).
    fn distinct_count(&self, served: &ServingRegions) -> usize {
        let mut distinct_count: Vec<&ServingRegions> =
            self.priorities.keys().map(|(served, _)| served).collect();
        distinct_count.dedup();
        distinct_count.into_iter().filter(|other| other.distinct_max() == served.distinct_max()).count()
    }
}

fn sum<'a>(groups: impl IntoIterator<Item = &'a Group>) -> Group {
    let mut sum = Group::default();
    groups.into_iter().for_each(|group| sum.add(group));
    sum
}

/// Returns the indices of the seconds that overlap `[from, to)`.
fn overlapping_seconds(from: Duration, to: Duration) -> Range<u64> {
    let end = to.as_secs().saturating_add(u64::from(to.subsec_nanos() > 0));
    from.as_secs()..end.max(from.as_secs())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::exchange::RequestFailure;
    use crate::profile::tests::profile;

    pub(crate) fn sample(region: Option<&str>, intended_ms: u64, latency_ms: u64) -> Sample {
        Sample {
            task: 0,
            priority: Priority::Interactive,
            intended: Duration::from_millis(intended_ms),
            lag: Duration::from_micros(80),
            latency: Some(Duration::from_millis(latency_ms)),
            served: region.map_or(ServingRegions::Unknown, ServingRegions::parse),
            retried: false,
            outcome: Ok(()),
        }
    }

    #[test]
    fn a_region_has_its_own_latencies_and_the_total_has_all() {
        let mut record = Record::default();
        for latency_ms in 1..=100 {
            record.add(sample(Some("aws/us-east-1"), 0, latency_ms));
            record.add(sample(Some("gcp/europe-west4"), 0, 1000));
        }
        let near = &record.regions()[&ServingRegions::One("aws/us-east-1".parse().unwrap())];
        let close = |got: Option<Duration>, expected_ms: f64| {
            let got = got.unwrap().as_secs_f64() * 1000.0;
            assert!((got / expected_ms - 1.0).abs() <= 0.001, "{got} ms instead of {expected_ms} ms");
        };
        close(near.latencies().quantile(0.5), 50.0);
        close(near.latencies().quantile(0.99), 99.0);
        close(near.latencies().max(), 100.0);
        close(record.total().latencies().quantile(0.51), 1000.0);
        assert_eq!((near.requests(), record.total().requests()), (100, 200));
    }

    #[test]
    fn failures_do_not_affect_the_latencies_of_ok_requests() {
        let mut record = Record::default();
        record.add(sample(None, 0, 10));
        record.add(Sample { outcome: Err(RequestFailure::Timeout), ..sample(None, 0, 10_000) });
        record.add(Sample { outcome: Err(RequestFailure::NotSent), latency: None, ..sample(None, 0, 0) });
        let total = record.total();
        assert_eq!((total.requests(), total.ok(), total.failures().count()), (3, 1, 2));
        assert!(total.latencies().max().unwrap() < Duration::from_millis(11));
        let snapshot = RunSnapshot::of(&record, 4, Duration::from_secs(1), Duration::from_secs(2));
        assert_eq!((snapshot.ok, snapshot.failed, snapshot.not_sent, snapshot.in_flight), (1, 2, 1, 4));
    }

    #[test]
    fn a_request_counts_in_the_second_in_which_it_should_have_started() {
        let mut record = Record::default();
        record.add(sample(Some("a/b"), 999, 5000));
        record.add(Sample { outcome: Err(RequestFailure::Timeout), ..sample(None, 1000, 10_000) });
        let second = |number| record.between(Duration::from_secs(number), Duration::from_secs(number + 1));
        let nearby = ServingRegions::One("a/b".parse().unwrap());
        assert_eq!((second(0).ok, second(0).failed, second(0).by_region[&nearby].ok), (1, 0, 1));
        assert!(second(0).quantile(0.5) >= Some(Duration::from_secs(5)), "{:?}", second(0));
        assert_eq!((second(1).ok, second(1).failed, second(1).quantile(0.5)), (0, 1, None));
        assert_eq!(second(1).by_region.keys().collect::<Vec<_>>(), [&ServingRegions::Unknown]);
    }

    #[test]
    fn a_window_has_every_second_that_it_touches_and_no_other() {
        let mut record = Record::default();
        for second in 0..5_u64 {
            let mut sample = sample(Some("a/b"), 1000 * second, 10 * (second + 1));
            sample.task = usize::from(second == 3);
            record.add(sample);
        }
        let check = |from_ms: u64, to_ms: u64, expected_ok: u64, slowest_ms: Option<u64>| {
            let window = record.between(Duration::from_millis(from_ms), Duration::from_millis(to_ms));
            let slowest = window.quantile(1.0).map(|slowest| slowest.as_millis() as u64);
            assert_eq!((window.ok, slowest), (expected_ok, slowest_ms), "[{from_ms}, {to_ms})");
        };
        check(0, 5000, 5, Some(50));
        check(1000, 3000, 2, Some(30));
        check(1999, 3001, 3, Some(40));
        check(2000, 2000, 0, None);
        check(3000, 2000, 0, None);
        check(9000, 10_000, 0, None);
        let of = |task| record.between_of(task, Duration::ZERO, Duration::MAX).ok;
        assert_eq!((of(0), of(1), of(2)), (4, 1, 0));
    }

    #[test]
    fn priorities_are_separate_within_a_region() {
        let mut record = Record::default();
        record.add(sample(Some("a/b"), 0, 10));
        record.add(Sample { priority: Priority::Bulk, task: 1, ..sample(Some("a/b"), 0, 900) });
        let here = ServingRegions::One("a/b".parse().unwrap());
        let p50 = |priority| record.priorities()[&(here.clone(), priority)].latencies().quantile(0.5);
        assert!(p50(Priority::Interactive) < Some(Duration::from_millis(11)));
        assert!(p50(Priority::Bulk) > Some(Duration::from_millis(899)));
        assert_eq!(record.regions()[&here].requests(), 2);
        let tasks: Vec<_> = record.tasks().iter().map(|task| task.total().requests()).collect();
        assert_eq!(tasks, [1, 1]);
    }

    #[test]
    fn a_request_counts_in_the_stage_in_which_it_should_have_started_and_in_no_other() {
        let mut record = Record::of([profile("1 for 1s, 9 for 1s, 1 for 1s").ends()]);
        record.add(sample(Some("a/b"), 999, 5000));
        record.add(sample(Some("a/b"), 1000, 50));
        record.add(Sample {
            outcome: Err(RequestFailure::Timeout),
            retried: true,
            ..sample(None, 1999, 10_000)
        });
        let counts = |stage: &Group| (stage.requests(), stage.ok(), stage.failed(), stage.retried);
        let stages: Vec<_> = record.stages().map(counts).collect();
        assert_eq!(stages, [(1, 1, 0, 0), (2, 1, 1, 1), (0, 0, 0, 0)]);
        let p99: Vec<_> = record.stages().map(|stage| stage.latencies().quantile(0.99)).collect();
        assert!(p99[0] > Some(Duration::from_secs(4)) && p99[1] < Some(Duration::from_millis(51)), "{p99:?}");
        assert_eq!(p99[2], None);
    }

    #[test]
    fn the_number_of_distinct_regions_is_limited_and_no_request_is_lost() {
        let mut record = Record::default();
        for number in 0..=REGIONS_MAX {
            record.add(sample(Some(&format!("cloud/{number}")), 0, 1));
        }
        record.add(sample(Some("cloud/0"), 0, 1));
        assert_eq!(record.regions().len(), REGIONS_MAX + 1);
        assert_eq!(record.regions()[&ServingRegions::One("cloud/0".parse().unwrap())].requests(), 2);
        assert_eq!(record.regions()[&ServingRegions::Other].requests(), 1);
        // Sets have their own limit and do not use that of regions.
        for number in 0..=REGION_SETS_MAX {
            record.add(sample(Some(&format!("cloud/0,set/{number}")), 0, 1));
        }
        assert_eq!(record.regions().len(), REGIONS_MAX + 1 + REGION_SETS_MAX);
        assert_eq!(record.regions()[&ServingRegions::Other].requests(), 2);
    }
}
