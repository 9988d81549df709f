//! Forward pass of many sequences: each thread takes groups of sequences through all layers.
//!
//! Groups of rows that end between sequences are independent of each other, attention included. So a thread can take a
//! group through all layers while its activations stay in the thread's own cache, whereas a batch that all threads take
//! through one layer after the other writes and reads each layer's queries, keys and values in distant memory. Weights
//! are read equally often either way: once for each group.
//!
//! Threads synchronize only at the end. So this strategy is for batches that can be partitioned into groups that are
//! small compared with a thread's share, and the groups of a delayed thread are taken by others. When an urgent batch
//! is to run first, each thread finishes its current group; the groups that have not started are computed afterwards.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::executor::{Activations, RowBlock};
use super::layer::LayerContext;
use super::{Preemption, ThreadScratch, Transformer, WorkerSet};
use crate::engine::cpu::matrix::{Matrix, Partition, Window};

/// Approximate rows of a group: five full tiles. The activations of a group of MiniLM, 1.1 MB, fit a second-level
/// cache.
const GROUP_ROWS: usize = 70;

/// Minimum groups of each thread, if all were as long as the longest sequence.
const GROUPS_PER_THREAD: usize = 4;

/// Activations of one group of sequences.
#[derive(Default)]
pub(super) struct GroupScratch {
    projections: Matrix,
    attended: Matrix,
    /// Start of each sequence, and the end of the last one.
    offsets: Vec<u32>,
}

/// Partitions sequences into groups of about [`GROUP_ROWS`], if there are enough of them and none is too long; `groups`
/// are a subset of the offsets.
pub(super) fn cut(offsets: &[u32], threads: usize, groups: &mut Vec<u32>) -> bool {
    let rows = offsets.last().map_or(0, |last| *last as usize);
    let longest = offsets.windows(2).map(|ends| (ends[1] - ends[0]) as usize).max().unwrap_or(0);
    if longest.max(GROUP_ROWS) * GROUPS_PER_THREAD * threads > rows {
        return false;
    }
    // The same number for each thread, and each ends at the sequence end nearest to an even partition.
    let count = rows.div_ceil(GROUP_ROWS).next_multiple_of(threads);
    let nearest = |index: usize| {
        let target = (index * rows / count) as u32;
        let after = offsets.partition_point(|offset| *offset < target);
        let before = after.saturating_sub(1);
        if target - offsets[before] < offsets[after] - target { offsets[before] } else { offsets[after] }
    };
    groups.clear();
    groups.extend((0..=count).map(nearest));
    groups.dedup();
    true
}

impl Transformer {
    /// Computes the states after the last layer, in `groups` of sequences. If some rows are picked, the computation
    /// ends with the last attention, whose output is stored for these `selected_rows`.
    pub(super) fn run_groups(
        &self,
        context: &LayerContext<'_>,
        workers: &mut WorkerSet<'_>,
        activations: &mut Activations,
        offsets: &[u32],
        (groups, done, selected_rows): (&[u32], &mut Vec<AtomicBool>, &[usize]),
        preemption: &mut dyn Preemption,
    ) {
        let [states, attended] = activations.around_last(context.tokens.len(), &self.architecture);
        let (hidden, queries) = (states.width(), attended.width());
        done.clear();
        done.resize_with(groups.len(), AtomicBool::default);
        loop {
            let interrupted = AtomicBool::new(false);
            let due = &*preemption;
            let states = states.tiles(Partition::At(groups), Partition::whole(hidden));
            let attended = attended.tiles(Partition::At(groups), Partition::whole(queries));
            workers.each((states, attended), |scratch, (states, mut attended)| {
                let rows = states.rows();
                let done = &done[groups.partition_point(|begin| (*begin as usize) < rows.start)];
                if interrupted.load(Relaxed) || done.load(Relaxed) {
                    return;
                }
                self.run_group(context, scratch, states, offsets, !selected_rows.is_empty());
                let first = selected_rows.partition_point(|index| *index < rows.start);
                for index in selected_rows[first..].iter().take_while(|index| **index < rows.end) {
                    let row = index - rows.start;
                    attended.row_mut(row).copy_from_slice(scratch.group.attended.view(row..row + 1).row(0));
                }
                done.store(true, Relaxed);
                if due.is_pending() {
                    interrupted.store(true, Relaxed);
                }
            });
            if !interrupted.into_inner() {
                return;
            }
            preemption.run(workers.threads);
        }
    }

    fn run_group(
        &self,
        context: &LayerContext<'_>,
        scratch: &mut ThreadScratch,
        mut states: Window<'_>,
        offsets: &[u32],
        to_attention: bool,
    ) {
        let ThreadScratch { attention: scratch, linear, block, group } = scratch;
        let GroupScratch { projections, attended, offsets: own } = group;
        let rows = states.rows();
        let within = offsets.iter().map(|offset| *offset as usize).filter(|offset| rows.start <= *offset);
        own.clear();
        own.extend(
            within.take_while(|offset| *offset <= rows.end).map(|offset| (offset - rows.start) as u32),
        );
        let (queries, keys) = (self.architecture.query_width(), self.architecture.key_value_width());
        projections.resize(rows.len(), queries + 2 * keys);
        attended.resize(rows.len(), queries);
        let heads = Partition::even(queries, self.architecture.attention.key_value_heads, 1);
        let layers = self.architecture.layers.len();
        let steps = if to_attention { layers } else { layers + 1 };
        for layer in 0..steps {
            let parts =
                ((states.reborrow(), projections.window_from(rows.start)), attended.window_from(rows.start));
            let mut executor = RowBlock::new(self, linear, block, parts);
            match layer {
                0 => context.begin(&mut executor),
                _ => context.follow(&mut executor, layer - 1),
            }
            if layer < layers {
                attended.tiles(Partition::At(own), heads).one_by_one(|mut out| {
                    self.attend_part(layer, projections, &mut out, scratch);
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the offsets of sequences of these lengths.
    fn offsets(lengths: impl IntoIterator<Item = u32>) -> Vec<u32> {
        let mut offsets = vec![0];
        for length in lengths {
            offsets.push(offsets[offsets.len() - 1] + length);
        }
        offsets
    }

    #[test]
    fn groups_end_between_sequences_and_are_nearly_equal() {
        let offsets = offsets((0..256).map(|index| 8 + index * 7 % 9));
        let mut groups = Vec::new();
        assert!(cut(&offsets, 2, &mut groups));
        assert!(groups.is_sorted_by(|a, b| a < b) && groups.iter().all(|end| offsets.contains(end)));
        assert_eq!((groups[0], groups.last()), (0, offsets.last()));
        let sizes: Vec<u32> = groups.windows(2).map(|ends| ends[1] - ends[0]).collect();
        assert!(
            sizes.len().is_multiple_of(2) && sizes.iter().all(|size| (56..=88).contains(size)),
            "{sizes:?}"
        );
    }

    #[test]
    fn long_sequences_are_separate_groups() {
        let mut groups = Vec::new();
        assert!(cut(&offsets([128; 9]), 2, &mut groups));
        assert_eq!(groups, offsets([128; 9]));
    }

    #[test]
    fn too_few_rows_or_one_long_sequence_are_not_grouped() {
        let mut groups = Vec::new();
        let enough = (GROUP_ROWS * GROUPS_PER_THREAD * 2) as u32;
        assert!(cut(&offsets(vec![8; enough as usize / 8]), 2, &mut groups));
        assert!(!cut(&offsets(vec![8; enough as usize / 8 - 1]), 2, &mut groups));
        assert!(!cut(&offsets([vec![8; enough as usize / 8], vec![enough]].concat()), 2, &mut groups));
        assert!(!cut(&[0], 1, &mut groups));
    }
}
