//! Latency distributions: a precise one for a run, and a compact one for a second.
//!
//! A run has few distributions, and their tails matter: they are HDR histograms of three digits (an error of at most
//! 0.1 %), whose memory does not depend on the length of the run. Seconds are many, one per region and task, with few
//! requests each: they store only the values that occurred, with an error of 0.8 %, always rounded up. The histogram of the
//! roles' metrics (`metrics`) has buckets a factor of 2 apart, too wide for a comparison of percentiles.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;

use crate::limits::{DURATION_MAX, TIMEOUT_MAX};

/// Longest latency that is distinguished from longer ones; no request of a run can exceed it.
const SPAN_MAX: Duration = DURATION_MAX.saturating_add(TIMEOUT_MAX);

/// Number of leading bits of microseconds that a second keeps.
const SECOND_BITS: u32 = 8;

/// Latency distribution with a resolution of microseconds and three digits.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies(Histogram::new(3).expect("three digits are within the histogram's 0 to 5"))
    }
}

impl Latencies {
    pub(crate) fn record(&mut self, span: Duration) {
        let span = span.min(SPAN_MAX).as_micros() as u64;
        self.0.record(span).expect("a histogram that grows by itself takes every value up to its bound");
    }

    pub(crate) fn add(&mut self, other: &Latencies) {
        self.0.add(&other.0).expect("a histogram that grows by itself takes every other");
    }

    /// Returns the latency at `quantile` (0 to 1); `None` if empty.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        (!self.0.is_empty()).then(|| Duration::from_micros(self.0.value_at_quantile(quantile)))
    }

    /// Returns the largest latency.
    pub fn max(&self) -> Option<Duration> {
        self.quantile(1.0)
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Returns the number of values up to `limit`, within the resolution.
    pub fn within(&self, limit: Duration) -> u64 {
        self.0.count_between(0, limit.as_micros() as u64)
    }

    /// Returns the underlying histogram, in microseconds.
    pub(crate) fn histogram(&self) -> &Histogram<u64> {
        &self.0
    }
}

/// Latencies of one second: microseconds of eight significant bits, rounded up, each with its count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompactLatencies(BTreeMap<u32, u32>);

impl CompactLatencies {
    pub(crate) fn record(&mut self, span: Duration) {
        let micros = u32::try_from(span.as_micros()).unwrap_or(u32::MAX);
        *self.0.entry(rounded_up(micros)).or_default() += 1;
    }

    pub(crate) fn add(&mut self, other: &CompactLatencies) {
        for (value, count) in &other.0 {
            *self.0.entry(*value).or_default() += count;
        }
    }

    /// Returns the number of values.
    pub fn count(&self) -> u64 {
        self.0.values().map(|count| u64::from(*count)).sum()
    }

    /// Returns the latency at `quantile` (0 to 1); `None` if empty.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        // At least rank 1.
        let rank = ((self.count() as f64 * quantile).ceil() as u64).max(1);
        let mut cumulative = 0;
        let reached = self.0.iter().find(|(_, count)| {
            cumulative += u64::from(**count);
            cumulative >= rank
        });
        reached.or(self.0.iter().next_back()).map(|(micros, _)| Duration::from_micros(u64::from(*micros)))
    }

    /// Returns the largest latency.
    pub fn max(&self) -> Option<Duration> {
        self.quantile(1.0)
    }

    /// Iterates over values in microseconds with their counts, ascending.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (u32, u32)> {
        self.0.iter().map(|(value, count)| (*value, *count))
    }

    /// Parses the output of `Display`: values with their counts, `812*3 820`.
    pub(crate) fn parse(text: &str) -> Option<CompactLatencies> {
        let mut spans = CompactLatencies::default();
        for word in text.split_whitespace() {
            let (value, count) = word.split_once('*').unwrap_or((word, "1"));
            *spans.0.entry(value.parse().ok()?).or_default() += count.parse::<u32>().ok()?;
        }
        Some(spans)
    }
}

impl fmt::Display for CompactLatencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (value, count)) in self.counts().enumerate() {
            let space = if index == 0 { "" } else { " " };
            match count {
                1 => write!(f, "{space}{value}")?,
                _ => write!(f, "{space}{value}*{count}")?,
            }
        }
        Ok(())
    }
}

/// Returns the largest value with the same leading bits.
fn rounded_up(micros: u32) -> u32 {
    let dropped = (u32::BITS - micros.leading_zeros()).saturating_sub(SECOND_BITS);
    micros | ((1_u32 << dropped) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spans(micros: &[u64]) -> CompactLatencies {
        let mut spans = CompactLatencies::default();
        micros.iter().for_each(|micros| spans.record(Duration::from_micros(*micros)));
        spans
    }

    #[test]
    fn a_share_of_the_spans_stays_within_the_quantile() {
        let check = |micros: &[u64], quantile: f64, expected: Option<u64>| {
            assert_eq!(spans(micros).quantile(quantile), expected.map(Duration::from_micros), "{quantile}");
        };
        check(&[], 0.5, None);
        check(&[7], 0.0, Some(7));
        check(&[1, 2, 3, 4], 0.5, Some(2));
        check(&[1, 2, 3, 4], 0.51, Some(3));
        check(&[1, 2, 3, 4], 0.99, Some(4));
        check(&[255, 256, 257], 1.0, Some(257));
        check(&[1, 2, u64::MAX / 2], 1.0, Some(u64::from(u32::MAX)));
    }

    #[test]
    fn spans_are_written_and_read_back() {
        let spans = spans(&[812, 812, 820, 5]);
        assert_eq!(spans.to_string(), "5 815*2 823");
        assert_eq!(CompactLatencies::parse(&spans.to_string()), Some(spans));
        assert_eq!(CompactLatencies::parse(""), Some(CompactLatencies::default()));
        assert_eq!(CompactLatencies::parse("5 x"), None);
    }

    proptest! {
        #[test]
        fn a_span_of_a_second_is_never_shown_shorter_and_at_most_a_128th_longer(micros: u32) {
            let shown = rounded_up(micros);
            prop_assert!(shown >= micros && f64::from(shown) <= f64::from(micros) * (1.0 + 1.0 / 128.0));
        }
    }
}
