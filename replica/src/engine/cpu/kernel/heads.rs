//! Preparation of queries and keys between projection and attention: each head is normalized, and rotated by its
//! position.

use super::rows::Norm;
use super::{Kernel, Simd, load_up_to, store_up_to};
use crate::engine::cpu::matrix::Window;
use crate::engine::cpu::rotary_table::RotaryTable;

/// Queries and keys of all heads of some rows, in place.
pub(in super::super) struct PrepareHeads<'a, 'w> {
    /// Numbers of one head.
    pub(in super::super) head_width: usize,
    /// Number of query heads, which are first in a row, and of key heads, which follow.
    pub(in super::super) heads: [usize; 2],
    /// Normalizations of queries and of keys.
    pub(in super::super) norms: [Option<&'a Norm>; 2],
    /// Rotary position embedding, if the model has it.
    pub(in super::super) rotation: Option<&'a RotaryTable>,
    /// Position of each row's token in its sequence.
    pub(in super::super) positions: &'a [u32],
    pub(in super::super) rows: &'a mut Window<'w>,
}

impl Kernel for PrepareHeads<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let PrepareHeads { head_width, heads, norms, rotation, positions, rows } = self;
        for (index, position) in positions.iter().enumerate() {
            let mut rest = rows.row_mut(index);
            let turn = rotation.map(|rotation| rotation.of(*position as usize));
            for (heads, norm) in heads.into_iter().zip(norms) {
                let (these, others) = rest.split_at_mut(heads * head_width);
                for head in these.chunks_exact_mut(head_width) {
                    if let Some(norm) = norm {
                        norm.apply(simd, head);
                    }
                    if let Some((cosines, sines)) = turn {
                        rotate(simd, head, cosines, sines);
                    }
                }
                rest = others;
            }
        }
    }
}

/// Rotates each pair of a number of the first half and one of the second.
#[inline(always)]
fn rotate<S: Simd>(simd: S, head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let (left, right) = head.split_at_mut(cosines.len());
    let pairs = left.chunks_mut(S::LANES).zip(right.chunks_mut(S::LANES));
    let angles = cosines.chunks(S::LANES).zip(sines.chunks(S::LANES));
    for ((left, right), (cosines, sines)) in pairs.zip(angles) {
        let (x, y) = (load_up_to(simd, left, 0.0), load_up_to(simd, right, 0.0));
        let (cosine, sine) = (load_up_to(simd, cosines, 0.0), load_up_to(simd, sines, 0.0));
        store_up_to(simd, simd.sub(simd.mul(x, cosine), simd.mul(y, sine)), left);
        store_up_to(simd, simd.mul_add(y, cosine, simd.mul(x, sine)), right);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::*;
    use crate::engine::cpu::matrix::Matrix;
    use crate::model::RotaryEmbedding;

    /// Two rows of two query heads, a key head and a value head, all ones except the value.
    fn prepared(isa: Isa, norms: [Option<&Norm>; 2], rotation: Option<&RotaryTable>) -> Vec<f32> {
        let mut rows = Matrix::default();
        rows.resize(2, 16);
        rows.data_mut().fill(1.0);
        let prepare = PrepareHeads {
            head_width: 4,
            heads: [2, 1],
            norms,
            rotation,
            positions: &[0, 3],
            rows: &mut rows.window(),
        };
        isa.run(prepare);
        rows.data().to_vec()
    }

    #[test]
    fn queries_and_keys_are_rotated_by_their_position_and_values_are_not() {
        let mut rotation = RotaryTable::new(RotaryEmbedding { rates: vec![0.5, 0.0], magnitude: 2.0 });
        rotation.reach(4);
        let (sine, cosine) = 1.5_f32.sin_cos();
        let turned = [2.0 * (cosine - sine), 2.0, 2.0 * (cosine + sine), 2.0];
        for isa in Isa::available() {
            let rows = prepared(isa, [None, None], Some(&rotation));
            assert_eq!(rows[..12], [2.0; 12], "position 0 is scaled only");
            assert_eq!(rows[12..16], [1.0; 4], "values are unchanged");
            for head in rows[16..28].chunks_exact(4) {
                for (found, expected) in head.iter().zip(turned) {
                    assert!((found - expected).abs() < 1e-6, "{isa:?}: {head:?}");
                }
            }
            assert_eq!(rows[28..], [1.0; 4]);
        }
    }

    #[test]
    fn each_head_is_normalized_separately() {
        let norm =
            |scale: f32| Norm { centred: false, scale: vec![scale; 4], shift: vec![0.0; 4], epsilon: 0.0 };
        let (queries, keys) = (norm(3.0), norm(0.5));
        for isa in Isa::available() {
            let rows = prepared(isa, [Some(&queries), Some(&keys)], None);
            for row in rows.chunks_exact(16) {
                assert_eq!(
                    (&row[..8], &row[8..12], &row[12..]),
                    (&[3.0; 8][..], &[0.5; 4][..], &[1.0; 4][..])
                );
            }
        }
    }
}
