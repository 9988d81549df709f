//! What is kept of a run: per region and outcome a histogram, per stage and outcome another, per second and region a
//! count.
//!
//! Histograms keep three significant digits (an error of at most 0.1 %), so a run of a day costs no more memory than
//! one of a minute, and the tail is as exact as the middle. Latencies of failures are kept apart from those of
//! successes: a refusal within a millisecond must not flatter the percentiles, nor a time-out of ten seconds pose as an
//! answer.
//!
//! A request belongs to the second and the stage of its *intended* start. So each shows what its own callers got: a
//! region's death is in the second in which it happened and not in those in which its time-outs ran out, and what a surge
//! did to those who came in it is not told of those who came after.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use regions::RegionId;

use crate::client::{Failure, Sample};
use crate::options::{DURATION_MAX, TIMEOUT_MAX};
use crate::profile::Profile;

/// How many regions are told apart. A catalogue has at most as many; a server that invents names costs no more memory.
pub const REGIONS_MAX: usize = 512;

/// The longest span that is told from longer ones: no request of a run can take it.
const SPAN_MAX: Duration = DURATION_MAX.saturating_add(TIMEOUT_MAX);

/// Who served a request, as far as its answer says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Served {
    /// This region.
    By(RegionId),
    /// A region beyond the first [`REGIONS_MAX`].
    ByAnother,
    /// The answer named none, or there was no answer.
    Unnamed,
}

impl fmt::Display for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Served::By(region) => write!(f, "{region}"),
            Served::ByAnother => f.write_str("(further regions)"),
            Served::Unnamed => f.write_str("(no region)"),
        }
    }
}

/// A distribution of spans of time, to the microsecond and three digits.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies(Histogram::new(3).expect("three digits are within the histogram's 0 to 5"))
    }
}

impl Latencies {
    fn record(&mut self, span: Duration) {
        let span = span.min(SPAN_MAX).as_micros() as u64;
        self.0.record(span).expect("a histogram that grows by itself takes every value up to its bound");
    }

    fn add(&mut self, other: &Latencies) {
        self.0.add(&other.0).expect("a histogram that grows by itself takes every other");
    }

    /// The span that a share `quantile` (0 to 1) stays within; none of an empty distribution.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        (!self.0.is_empty()).then(|| Duration::from_micros(self.0.value_at_quantile(quantile)))
    }

    /// The longest span.
    pub fn max(&self) -> Option<Duration> {
        self.quantile(1.0)
    }
}

/// Requests that ended in one way.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// How many.
    pub count: u64,
    /// How long they took, those that were sent.
    pub latencies: Latencies,
}

/// Requests that are looked at together: of one region, of one stage, or all.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// By how they ended.
    pub outcomes: BTreeMap<Result<(), Failure>, Tally>,
    /// How many took more than one attempt.
    pub retried: u64,
}

impl Group {
    /// All of them.
    pub fn requests(&self) -> u64 {
        self.outcomes.values().map(|tally| tally.count).sum()
    }

    /// Those that were answered, and rightly.
    pub fn ok(&self) -> u64 {
        self.outcomes.get(&Ok(())).map_or(0, |tally| tally.count)
    }

    /// Those that were not.
    pub fn failed(&self) -> u64 {
        self.requests() - self.ok()
    }

    /// How long the answered ones took.
    pub fn latencies(&self) -> Latencies {
        self.outcomes.get(&Ok(())).map(|tally| tally.latencies.clone()).unwrap_or_default()
    }

    /// Those that were not answered, by cause.
    pub fn failures(&self) -> impl Iterator<Item = (Failure, &Tally)> {
        self.outcomes.iter().filter_map(|(outcome, tally)| Some((outcome.err()?, tally)))
    }

    fn count(&mut self, outcome: Result<(), Failure>, latency: Option<Duration>, retried: bool) {
        self.retried += u64::from(retried);
        let tally = self.outcomes.entry(outcome).or_default();
        tally.count += 1;
        if let Some(latency) = latency {
            tally.latencies.record(latency);
        }
    }

    /// Takes in those of another group: of another region, or of another generator.
    pub fn add(&mut self, other: &Group) {
        self.retried += other.retried;
        for (outcome, tally) in &other.outcomes {
            let sum = self.outcomes.entry(*outcome).or_default();
            sum.count += tally.count;
            sum.latencies.add(&tally.latencies);
        }
    }
}

/// The requests that should have started within one second, in one region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SecondRecord {
    /// Answered.
    pub ok: u64,
    /// Not answered.
    pub failed: u64,
    /// The longest that an answered one took.
    pub latency_max: Duration,
}

/// All that is kept of a run.
#[derive(Clone, Debug, Default)]
pub struct Record {
    regions: BTreeMap<Served, Group>,
    /// By the moment at which each ends.
    stages: Vec<(Duration, Group)>,
    seconds: BTreeMap<u64, BTreeMap<Served, SecondRecord>>,
    lag: Latencies,
}

impl Record {
    /// Nothing yet, of a run through `profile`.
    pub fn of(profile: &Profile) -> Record {
        let stages = profile.stages().map(|(begins, stage)| (begins + stage.lasts, Group::default()));
        Record { stages: stages.collect(), ..Record::default() }
    }

    /// Takes in how one request went.
    pub fn add(&mut self, sample: Sample) {
        let Sample { intended, lag, latency, region, retried, outcome } = sample;
        let served = match region.map(Served::By) {
            None => Served::Unnamed,
            Some(known) if self.regions.contains_key(&known) => known,
            Some(new) if self.named() < REGIONS_MAX => new,
            Some(_) => Served::ByAnother,
        };
        self.lag.record(lag);

        let second = self.seconds.entry(intended.as_secs()).or_default().entry(served.clone()).or_default();
        match outcome {
            Ok(()) => {
                second.ok += 1;
                second.latency_max = second.latency_max.max(latency.unwrap_or_default());
            }
            Err(_) => second.failed += 1,
        }

        if let Some((_, stage)) = self.stages.iter_mut().find(|(ends, _)| intended < *ends) {
            stage.count(outcome, latency, retried);
        }
        self.regions.entry(served).or_default().count(outcome, latency, retried);
    }

    /// By stage of the run, in their order.
    pub fn stages(&self) -> impl Iterator<Item = &Group> {
        self.stages.iter().map(|(_, stage)| stage)
    }

    /// By region, in the order of their names.
    pub fn regions(&self) -> &BTreeMap<Served, Group> {
        &self.regions
    }

    /// By second of the intended start and by region.
    pub fn seconds(&self) -> &BTreeMap<u64, BTreeMap<Served, SecondRecord>> {
        &self.seconds
    }

    /// How late the generator itself started requests.
    pub fn lag(&self) -> &Latencies {
        &self.lag
    }

    /// All regions together.
    pub fn total(&self) -> Group {
        let mut total = Group::default();
        for region in self.regions.values() {
            total.add(region);
        }
        total
    }

    fn named(&self) -> usize {
        self.regions.keys().filter(|served| matches!(served, Served::By(_))).count()
    }
}

/// A run while it runs.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Since the start of the run.
    pub elapsed: Duration,
    /// How long requests are started.
    pub duration: Duration,
    /// How many are on their way.
    pub in_flight: u64,
    /// How many have been answered, and rightly.
    pub ok: u64,
    /// How many have failed, also those that were not sent.
    pub failed: u64,
    /// How many could not be sent.
    pub not_sent: u64,
    /// Half of the answered ones took no longer.
    pub p50: Option<Duration>,
    /// Of a hundred answered ones 99 took no longer.
    pub p99: Option<Duration>,
    /// How late the generator was at worst.
    pub lag_max: Option<Duration>,
    /// Answered ones by region.
    pub regions: Vec<(Served, u64)>,
}

impl Snapshot {
    /// What `record` says after `elapsed` of `duration`.
    pub fn of(record: &Record, in_flight: u64, elapsed: Duration, duration: Duration) -> Snapshot {
        let total = record.total();
        let latencies = total.latencies();
        Snapshot {
            elapsed,
            duration,
            in_flight,
            ok: total.ok(),
            failed: total.failed(),
            not_sent: total.outcomes.get(&Err(Failure::NotSent)).map_or(0, |tally| tally.count),
            p50: latencies.quantile(0.5),
            p99: latencies.quantile(0.99),
            lag_max: record.lag.max(),
            regions: record.regions.iter().map(|(served, region)| (served.clone(), region.ok())).collect(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::profile::tests::profile;

    pub(crate) fn sample(region: Option<&str>, intended_ms: u64, latency_ms: u64) -> Sample {
        Sample {
            intended: Duration::from_millis(intended_ms),
            lag: Duration::from_micros(80),
            latency: Some(Duration::from_millis(latency_ms)),
            region: region.map(|id| id.parse().unwrap()),
            retried: false,
            outcome: Ok(()),
        }
    }

    #[test]
    fn a_region_is_measured_by_its_own_answers_and_the_total_by_all() {
        let mut record = Record::default();
        for latency_ms in 1..=100 {
            record.add(sample(Some("aws/us-east-1"), 0, latency_ms));
            record.add(sample(Some("gcp/europe-west4"), 0, 1000));
        }
        let near = &record.regions()[&Served::By("aws/us-east-1".parse().unwrap())];
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
    fn a_failure_leaves_the_latencies_of_answers_alone() {
        let mut record = Record::default();
        record.add(sample(None, 0, 10));
        record.add(Sample { outcome: Err(Failure::Timeout), ..sample(None, 0, 10_000) });
        record.add(Sample { outcome: Err(Failure::NotSent), latency: None, ..sample(None, 0, 0) });
        let total = record.total();
        assert_eq!((total.requests(), total.ok(), total.failures().count()), (3, 1, 2));
        assert!(total.latencies().max().unwrap() < Duration::from_millis(11));
        let snapshot = Snapshot::of(&record, 4, Duration::from_secs(1), Duration::from_secs(2));
        assert_eq!((snapshot.ok, snapshot.failed, snapshot.not_sent, snapshot.in_flight), (1, 2, 1, 4));
    }

    #[test]
    fn a_request_counts_in_the_second_in_which_it_should_have_started() {
        let mut record = Record::default();
        record.add(sample(Some("a/b"), 999, 5000));
        record.add(Sample { outcome: Err(Failure::Timeout), ..sample(None, 1000, 10_000) });
        let seconds = record.seconds();
        let answered = SecondRecord { ok: 1, failed: 0, latency_max: Duration::from_secs(5) };
        assert_eq!(seconds[&0], BTreeMap::from([(Served::By("a/b".parse().unwrap()), answered)]));
        assert_eq!(
            seconds[&1],
            BTreeMap::from([(Served::Unnamed, SecondRecord { failed: 1, ..Default::default() })])
        );
    }

    #[test]
    fn a_request_counts_in_the_stage_in_which_it_should_have_started_and_in_no_other() {
        let mut record = Record::of(&profile("1 for 1s, 9 for 1s, 1 for 1s"));
        record.add(sample(Some("a/b"), 999, 5000));
        record.add(sample(Some("a/b"), 1000, 50));
        record.add(Sample { outcome: Err(Failure::Timeout), retried: true, ..sample(None, 1999, 10_000) });
        let told = |stage: &Group| (stage.requests(), stage.ok(), stage.failed(), stage.retried);
        let stages: Vec<_> = record.stages().map(told).collect();
        assert_eq!(stages, [(1, 1, 0, 0), (2, 1, 1, 1), (0, 0, 0, 0)]);
        let p99: Vec<_> = record.stages().map(|stage| stage.latencies().quantile(0.99)).collect();
        assert!(p99[0] > Some(Duration::from_secs(4)) && p99[1] < Some(Duration::from_millis(51)), "{p99:?}");
        assert_eq!(p99[2], None);
    }

    #[test]
    fn at_most_so_many_regions_are_told_apart_and_none_is_lost() {
        let mut record = Record::default();
        for number in 0..=REGIONS_MAX {
            record.add(sample(Some(&format!("cloud/{number}")), 0, 1));
        }
        record.add(sample(Some("cloud/0"), 0, 1));
        assert_eq!(record.regions().len(), REGIONS_MAX + 1);
        assert_eq!(record.regions()[&Served::By("cloud/0".parse().unwrap())].requests(), 2);
        assert_eq!(record.regions()[&Served::ByAnother].requests(), 1);
    }
}
