//! Rates and latencies of the last minutes, for the charts of a page that was just opened.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;

use crate::snapshot::ChartValues;

/// Number of samples, one a second.
pub const SAMPLES_MAX: usize = 300;
/// Maximum number of series of each kind: those of a chart that a person can read. A response has some 200 KiB then.
pub const SERIES_MAX: usize = 32;

/// Samples of the last five minutes.
#[derive(Debug, Default)]
pub struct ChartHistory {
    at_ms: VecDeque<u64>,
    total: VecDeque<[f64; 4]>,
    regions: BTreeMap<String, VecDeque<f64>>,
    deployments: BTreeMap<String, VecDeque<[f64; 4]>>,
}

/// Samples by series, each as long as `at_ms`.
#[derive(Debug, Serialize)]
pub struct HistoryView<'a> {
    at_ms: &'a VecDeque<u64>,
    /// Rate, failures, p50 and p99 of all requests.
    total: &'a VecDeque<[f64; 4]>,
    /// Requests per second by responding region.
    regions: &'a BTreeMap<String, VecDeque<f64>>,
    /// Rate, failures, p50 and p99 by deployment.
    deployments: &'a BTreeMap<String, VecDeque<[f64; 4]>>,
}

impl ChartHistory {
    /// Adds a sample. A series beyond the limit replaces one without traffic, or is left out.
    pub fn record(&mut self, values: ChartValues, at_ms: u64) {
        let ChartValues { total, regions, deployments } = values;
        let before = self.at_ms.len().min(SAMPLES_MAX - 1);
        push(&mut self.at_ms, at_ms);
        push(&mut self.total, total);
        extend(&mut self.regions, regions, 0.0, before);
        extend(&mut self.deployments, deployments, [0.0; 4], before);
    }

    /// Returns the samples.
    pub fn view(&self) -> HistoryView<'_> {
        let ChartHistory { at_ms, total, regions, deployments } = self;
        HistoryView { at_ms, total, regions, deployments }
    }
}

fn push<T>(samples: &mut VecDeque<T>, value: T) {
    if samples.len() >= SAMPLES_MAX {
        samples.pop_front();
    }
    samples.push_back(value);
}

/// Adds a value to each series; one that is missing in `values` gets `zero`, and a new one `before` zeros first.
fn extend<T: Copy + PartialEq>(
    series: &mut BTreeMap<String, VecDeque<T>>,
    mut values: BTreeMap<String, T>,
    zero: T,
    before: usize,
) {
    for (name, samples) in series.iter_mut() {
        push(samples, values.remove(name).unwrap_or(zero));
    }
    series.retain(|_, samples| samples.iter().any(|value| *value != zero));
    for (name, value) in values {
        if series.len() < SERIES_MAX && value != zero {
            let mut samples: VecDeque<T> = std::iter::repeat_n(zero, before).collect();
            samples.push_back(value);
            series.insert(name, samples);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(regions: &[(&str, f64)]) -> ChartValues {
        let regions = regions.iter().map(|(name, rate)| ((*name).to_owned(), *rate)).collect();
        ChartValues { regions, ..ChartValues::default() }
    }

    #[test]
    fn every_series_is_as_long_as_the_times() {
        let mut history = ChartHistory::default();
        history.record(values(&[("a", 1.0)]), 1);
        history.record(values(&[("a", 2.0), ("b", 3.0)]), 2);
        history.record(values(&[("b", 4.0)]), 3);
        let of = |name: &str| history.regions[name].iter().copied().collect::<Vec<_>>();
        assert_eq!((of("a"), of("b")), (vec![1.0, 2.0, 0.0], vec![0.0, 3.0, 4.0]));
    }

    #[test]
    fn limit_of_samples_is_enforced_and_idle_series_are_removed() {
        let mut history = ChartHistory::default();
        history.record(values(&[("a", 1.0)]), 0);
        for at in 1..SAMPLES_MAX as u64 {
            history.record(values(&[("b", 1.0)]), at);
        }
        assert_eq!((history.at_ms.len(), history.regions["a"].len()), (SAMPLES_MAX, SAMPLES_MAX));
        history.record(values(&[("b", 1.0)]), SAMPLES_MAX as u64);
        assert_eq!((history.at_ms.len(), history.at_ms[0]), (SAMPLES_MAX, 1));
        assert!(!history.regions.contains_key("a") && history.regions["b"].len() == SAMPLES_MAX);
    }

    #[test]
    fn limit_of_series_is_enforced() {
        let mut history = ChartHistory::default();
        let names: Vec<_> = (0..=SERIES_MAX).map(|number| format!("r{number:03}")).collect();
        let all: Vec<_> = names.iter().map(|name| (name.as_str(), 1.0)).collect();
        history.record(values(&all), 1);
        assert_eq!(history.regions.len(), SERIES_MAX);
    }
}
