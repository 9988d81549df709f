//! Values of metrics: counters, gauges and histograms that components share, and numbers read at the time of a scrape.

use crate::declaration::MetricKind;
use crate::exemplar::{Exemplar, Exemplars};
use crate::snapshot::Metric;
use crate::snapshot::{HistogramValue, Samples};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Counters are independent of each other; no order among them is guaranteed.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Overwrites the value, for a total that is maintained elsewhere.
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// Returns the value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Metric for Counter {
    const KIND: MetricKind = MetricKind::Counter;

    fn sample(&self, to: &mut Samples<'_>) {
        to.value(self.get());
    }
}

/// Counter of a time, in seconds.
#[derive(Debug, Default)]
pub struct TimeCounter(AtomicU64);

impl TimeCounter {
    /// Adds a duration, in whole microseconds.
    pub fn add(&self, took: Duration) {
        self.0.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
    }
}

impl Metric for TimeCounter {
    const KIND: MetricKind = MetricKind::Counter;

    fn sample(&self, to: &mut Samples<'_>) {
        to.value(self.0.load(Ordering::Relaxed) as f64 / 1e6);
    }
}

/// Gauge.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Subtracts one.
    pub fn decrement(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// Sets the value.
    pub fn set(&self, n: usize) {
        self.0.store(n as u64, Ordering::Relaxed);
    }
}

impl Metric for Gauge {
    const KIND: MetricKind = MetricKind::Gauge;

    fn sample(&self, to: &mut Samples<'_>) {
        to.value(self.0.load(Ordering::Relaxed));
    }
}

/// Bucket bounds of a histogram: at most one less than [`BUCKETS_MAX`], ascending.
pub trait Buckets {
    /// Upper bounds; a value belongs to the first bucket whose bound it does not exceed.
    const BOUNDS: &'static [f64];
}

/// Maximum number of buckets, with that of the values above the last bound.
const BUCKETS_MAX: usize = 19;

/// Bounds for durations in seconds, from 0.1 ms (a gateway's own share, a lone query on a fast machine) to a minute (a
/// large request of a backfill), by factors of about 2.
#[derive(Debug)]
pub struct Seconds;

impl Buckets for Seconds {
    const BOUNDS: &'static [f64] = &[
        0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
        20.0, 60.0,
    ];
}

/// Bounds for numbers of tokens and inputs: powers of 2.
#[derive(Debug)]
pub struct Sizes;

impl Buckets for Sizes {
    const BOUNDS: &'static [f64] =
        &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
}

/// Lock-free histogram: a count for each bucket, and the sum of all values. Its buckets are the few that a scrape transmits, a
/// factor of 2 apart; the statistics that a gateway decides with (`gateway_core::latency`) and the reports of the load
/// generator (HDR histograms) need finer ones.
#[derive(Debug)]
pub struct Histogram<B = Seconds> {
    counts: [AtomicU64; BUCKETS_MAX],
    /// In millionths, so that it is a single atomic addition.
    sum_millionths: AtomicU64,
    exemplars: Exemplars<BUCKETS_MAX>,
    bounds: PhantomData<B>,
}

impl<B> Default for Histogram<B> {
    fn default() -> Histogram<B> {
        Histogram {
            counts: Default::default(),
            sum_millionths: AtomicU64::default(),
            exemplars: Exemplars::default(),
            bounds: PhantomData,
        }
    }
}

impl Histogram<Seconds> {
    /// Counts a duration, in whole microseconds.
    pub fn observe(&self, took: Duration) {
        self.observe_traced(took, None);
    }

    /// Counts a duration, in whole microseconds, and keeps its trace, if it has one, as the exemplar of its bucket.
    pub fn observe_traced(&self, took: Duration, exemplar: Option<Exemplar>) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let seconds = micros as f64 / 1e6;
        let bucket = self.add(seconds, micros);
        if let Some(exemplar) = exemplar {
            self.exemplars.put(bucket, seconds, exemplar);
        }
    }
}

impl Histogram<Sizes> {
    /// Counts a size.
    pub fn observe(&self, size: u64) {
        self.add(size as f64, size.saturating_mul(1_000_000));
    }
}

impl<B: Buckets> Histogram<B> {
    /// Counts a value and returns its bucket.
    fn add(&self, value: f64, millionths: u64) -> usize {
        let bucket = B::BOUNDS.partition_point(|bound| *bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_millionths.fetch_add(millionths, Ordering::Relaxed);
        bucket
    }

    /// Returns whether no value was counted.
    pub fn is_empty(&self) -> bool {
        self.counts.iter().all(|count| count.load(Ordering::Relaxed) == 0)
    }

    /// Adds the values of another histogram, for a sum that is rendered. Exemplars are not added.
    pub fn merge(&self, other: &Histogram<B>) {
        for (count, more) in self.counts.iter().zip(&other.counts) {
            count.fetch_add(more.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.sum_millionths.fetch_add(other.sum_millionths.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Returns the sum of these histograms.
    pub fn sum<'a>(all: impl Iterator<Item = &'a Histogram<B>>) -> Histogram<B>
    where
        B: 'a,
    {
        let sum = Histogram::default();
        all.for_each(|histogram| sum.merge(histogram));
        sum
    }
}

impl<B: Buckets> Metric for Histogram<B> {
    const KIND: MetricKind = MetricKind::Histogram;

    fn sample(&self, to: &mut Samples<'_>) {
        const { assert!(B::BOUNDS.len() < BUCKETS_MAX) };
        let buckets = 0..=B::BOUNDS.len();
        to.histogram(HistogramValue {
            bounds: B::BOUNDS,
            counts: buckets.clone().map(|at| self.counts[at].load(Ordering::Relaxed)).collect(),
            sum: self.sum_millionths.load(Ordering::Relaxed) as f64 / 1e6,
            exemplars: buckets.map(|at| self.exemplars.get(at)).collect(),
        });
    }
}

macro_rules! gauges {
    ($($type:ty)+) => {
        $(impl Metric for $type {
            const KIND: MetricKind = MetricKind::Gauge;

            fn sample(&self, to: &mut Samples<'_>) {
                to.value(*self);
            }
        })+
    };
}

gauges!(u32 u64 usize f64);

impl Metric for bool {
    const KIND: MetricKind = MetricKind::Gauge;

    fn sample(&self, to: &mut Samples<'_>) {
        to.value(u8::from(*self));
    }
}

/// In seconds.
impl Metric for Duration {
    const KIND: MetricKind = MetricKind::Gauge;

    fn sample(&self, to: &mut Samples<'_>) {
        to.value(self.as_secs_f64());
    }
}

/// Counter that is read at the time of a scrape.
#[derive(Clone, Copy, Debug)]
pub struct Total<M = u64>(pub M);

impl<M: Metric> Metric for Total<M> {
    const KIND: MetricKind = MetricKind::Counter;

    fn sample(&self, to: &mut Samples<'_>) {
        self.0.sample(to);
    }
}

/// Gauge that is always 1, with facts as labels; the last of the `N` labels may be missing.
#[derive(Clone, Debug)]
pub struct Info<const N: usize>(pub Vec<String>);

impl<const N: usize> Metric for Info<N> {
    const KIND: MetricKind = MetricKind::Gauge;
    const LABELS: usize = N;

    fn label_values(values: &mut Vec<Option<Vec<&'static str>>>) {
        values.extend([const { None }; N]);
    }

    fn sample(&self, to: &mut Samples<'_>) {
        let Info(facts) = self;
        match facts.split_first() {
            None => to.value(1_u8),
            Some((first, rest)) => to.labelled(first, |to| Info::<N>(rest.to_vec()).sample(to)),
        }
    }
}
