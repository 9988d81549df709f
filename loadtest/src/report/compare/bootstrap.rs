//! Latency quantiles of two runs, with a bootstrap confidence interval of their difference over seconds.

use std::collections::BTreeMap;

use rand::Rng;
use rand::rngs::SmallRng;
use serde::Serialize;

use crate::record::CompactLatencies;

/// Number of bootstrap samples.
pub const DRAWS: usize = 1000;

/// Confidence level of the intervals, in percent.
pub const CONFIDENCE: f64 = 95.0;

/// Maximum number of blocks. Seconds of a long run are grouped into blocks, so that a day costs as much as five
/// minutes.
const BLOCKS_MAX: usize = 300;

const QUANTILES: [(f64, &str); 4] = [(0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99.9")];

/// Comparison of one quantile.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct QuantileChange {
    /// Value in run A, in milliseconds.
    pub a_ms: f64,
    /// Value in run B, in milliseconds.
    pub b_ms: f64,
    /// Difference of B from A, in percent of A.
    pub change_percent: f64,
    /// Confidence interval of the difference.
    pub interval_percent: [f64; 2],
}

impl QuantileChange {
    /// Returns whether the interval excludes zero.
    pub fn is_significant(&self) -> bool {
        let [least, most] = self.interval_percent;
        least > 0.0 || most < 0.0
    }
}

/// Groups seconds into at most [`BLOCKS_MAX`] blocks of consecutive seconds.
pub(super) fn blocks(seconds: &[CompactLatencies]) -> Vec<CompactLatencies> {
    let block_length = seconds.len().div_ceil(BLOCKS_MAX).max(1);
    let sum = |row: &[CompactLatencies]| {
        let mut sum = CompactLatencies::default();
        row.iter().for_each(|second| sum.add(second));
        sum
    };
    seconds.chunks(block_length).map(sum).filter(|block| block.count() > 0).collect()
}

/// Compares each quantile of `b` with that of `a`.
pub(super) fn changes(
    a: &[CompactLatencies],
    b: &[CompactLatencies],
    rng: &mut SmallRng,
) -> BTreeMap<&'static str, QuantileChange> {
    let (a, b) = (BlockSampler::of(a), BlockSampler::of(b));
    if a.blocks.is_empty() || b.blocks.is_empty() {
        return BTreeMap::new();
    }
    let percent = |a: f64, b: f64| (b / a.max(1e-6) - 1.0) * 100.0;
    let mut draws = [const { Vec::new() }; QUANTILES.len()];
    for _ in 0..DRAWS {
        let (a, b) = (a.draw(rng), b.draw(rng));
        for (index, draws) in draws.iter_mut().enumerate() {
            draws.push(percent(a[index], b[index]));
        }
    }
    let (whole_a, whole_b) = (a.whole(), b.whole());
    let mut changes = BTreeMap::new();
    for (index, mut drawn) in draws.into_iter().enumerate() {
        drawn.sort_by(f64::total_cmp);
        let outside = (100.0 - CONFIDENCE) / 200.0;
        let at = |share: f64| drawn[(share * (DRAWS - 1) as f64).round() as usize];
        let (a_ms, b_ms) = (whole_a[index], whole_b[index]);
        let interval_percent = [at(outside), at(1.0 - outside)];
        let change_percent = percent(a_ms, b_ms);
        changes.insert(QUANTILES[index].1, QuantileChange { a_ms, b_ms, change_percent, interval_percent });
    }
    changes
}

/// Blocks to sample from: each a list of indices into `values_ms` with counts.
struct BlockSampler {
    values_ms: Vec<f64>,
    blocks: Vec<Vec<(usize, u32)>>,
}

impl BlockSampler {
    fn of(blocks: &[CompactLatencies]) -> BlockSampler {
        let mut all = CompactLatencies::default();
        blocks.iter().for_each(|block| all.add(block));
        let values: Vec<u32> = all.counts().map(|(value, _)| value).collect();
        let index = |value| values.partition_point(|known| *known < value);
        let blocks =
            blocks.iter().map(|block| block.counts().map(|(value, count)| (index(value), count)).collect());
        let blocks = blocks.collect();
        BlockSampler { values_ms: values.iter().map(|micros| f64::from(*micros) / 1000.0).collect(), blocks }
    }

    /// Returns the quantiles of a bootstrap sample: as many blocks as there are, drawn with replacement.
    fn draw(&self, rng: &mut SmallRng) -> [f64; QUANTILES.len()] {
        let drawn = (0..self.blocks.len()).map(|_| rng.random_range(0..self.blocks.len()));
        self.quantiles(drawn)
    }

    fn whole(&self) -> [f64; QUANTILES.len()] {
        self.quantiles(0..self.blocks.len())
    }

    fn quantiles(&self, blocks: impl Iterator<Item = usize>) -> [f64; QUANTILES.len()] {
        let mut counts = vec![0_u64; self.values_ms.len()];
        for block in blocks {
            for (index, count) in &self.blocks[block] {
                counts[*index] += u64::from(*count);
            }
        }
        let all: u64 = counts.iter().sum();
        QUANTILES.map(|(quantile, _)| {
            let rank = ((all as f64 * quantile).ceil() as u64).max(1);
            let mut cumulative = 0;
            let reached = counts.iter().position(|count| {
                cumulative += count;
                cumulative >= rank
            });
            reached.map_or(f64::NAN, |index| self.values_ms[index])
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_is_grouped_into_blocks() {
        let second = CompactLatencies::parse("5").unwrap();
        for (seconds, expected) in
            [(1, 1), (BLOCKS_MAX, BLOCKS_MAX), (BLOCKS_MAX + 1, 151), (86_400, BLOCKS_MAX)]
        {
            let blocks = blocks(&vec![second.clone(); seconds]);
            assert_eq!(blocks.len(), expected, "{seconds}");
            assert_eq!(blocks.iter().map(CompactLatencies::count).sum::<u64>(), seconds as u64);
        }
    }
}
