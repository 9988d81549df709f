//! Table of sines and cosines for rotary position embeddings (RoPE), which grows with the longest sequence.

use crate::model::RotaryEmbedding;

/// Table of angles.
#[derive(Debug)]
pub(super) struct RotaryTable {
    rope: RotaryEmbedding,
    positions: usize,
    /// A row for each position, with a number per pair.
    cosines: Vec<f32>,
    sines: Vec<f32>,
}

impl RotaryTable {
    pub(super) fn new(rope: RotaryEmbedding) -> RotaryTable {
        RotaryTable { rope, positions: 0, cosines: Vec::new(), sines: Vec::new() }
    }

    /// Extends the table to this number of positions.
    pub(super) fn reach(&mut self, positions: usize) {
        for position in self.positions..positions {
            for rate in &self.rope.rates {
                // The angle is rounded to a 32-bit float, as in the reference; the rest is not.
                let angle = f64::from(position as f32 * rate);
                self.cosines.push(angle.cos() as f32 * self.rope.magnitude);
                self.sines.push(angle.sin() as f32 * self.rope.magnitude);
            }
        }
        self.positions = self.positions.max(positions);
    }

    /// Returns cosines and sines of a position in the table.
    pub(super) fn of(&self, position: usize) -> (&[f32], &[f32]) {
        let pairs = self.rope.rates.len();
        let row = position * pairs..(position + 1) * pairs;
        (&self.cosines[row.clone()], &self.sines[row])
    }
}
