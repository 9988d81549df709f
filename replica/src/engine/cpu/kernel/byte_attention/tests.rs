//! Compares int8 attention with its definition, within the quantization error.

use super::super::attention::tests::{Case, PLAIN, defined, noise};
use super::*;

fn computed(case: &Case, projections: &Matrix, isa: Isa, scratch: &mut ByteAttentionScratch) -> Vec<f32> {
    let Case { length, width, sharing, reach, .. } = *case;
    let queries = sharing * width;
    let mut out = Matrix::default();
    out.resize(length, queries);
    out.data_mut().fill(f32::NAN);
    let rows = projections.view(0..length);
    isa.run(ByteAttention {
        isa,
        queries: rows.columns(0..queries),
        keys: rows.columns(queries..queries + width),
        values: rows.columns(queries + width..queries + 2 * width),
        reach,
        out: &mut out.window(),
        scratch,
    });
    out.data().to_vec()
}

fn check(case: &Case) {
    let projections = noise(case.length, (case.sharing + 2) * case.width);
    let expected = defined(case, &projections);
    for isa in Isa::available() {
        // The remains of an earlier sequence must not be visible.
        let mut scratch = ByteAttentionScratch::default();
        let AlignedBytes { data, .. } = &mut scratch.keys;
        data.resize(1 << 16, 0x7f);
        scratch.values.data.resize(1 << 16, 0x7f);
        let found = computed(case, &projections, isa, &mut scratch);
        // For values between −1 and 1: half a step of each of the three roundings, and their interaction.
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = (f64::from(*found) - expected).abs();
            let Case { length, width, reach, .. } = case;
            let within = error <= 0.03;
            assert!(within, "{isa:?}, {length} of {width}, {reach:?}, at {index}: {found}, not {expected}");
        }
    }
}

#[test]
fn every_length_around_tiles_groups_and_panels_is_near() {
    for length in (1..=34).chain([40, 47, 48, 49, 63, 64, 65, 95, 97, 128, 136, 512]) {
        check(&Case { length, ..PLAIN });
        check(&Case { length, width: 10, ..PLAIN });
    }
}

#[test]
fn every_width_of_a_head_is_near() {
    for width in [1, 8, 15, 16, 17, 31, 33, 40, 64, 72, 96, 128] {
        check(&Case { length: 37, width, ..PLAIN });
    }
}

#[test]
fn tokens_attend_to_the_keys_in_their_reach() {
    for reach in [Reach::CAUSAL, Reach::around(3), Reach { before: 40, behind: 0 }, Reach::around(0)] {
        for length in [1, 5, 33, 70] {
            check(&Case { length, reach, ..PLAIN });
        }
    }
}

/// Compares bits, not approximately: heads may be computed together or separately.
#[test]
fn heads_that_share_keys_have_the_same_bits_as_separate_heads() {
    let case = Case { length: 29, sharing: 3, ..PLAIN };
    let projections = noise(29, 5 * 32);
    for isa in Isa::available() {
        let together = computed(&case, &projections, isa, &mut ByteAttentionScratch::default());
        for head in 0..3 {
            let mut own = Matrix::default();
            own.resize(29, 3 * 32);
            for (row, out) in own.data_mut().chunks_exact_mut(96).enumerate() {
                let all = projections.view(row..row + 1);
                out[..32].copy_from_slice(&all.row(0)[head * 32..][..32]);
                out[32..].copy_from_slice(&all.row(0)[96..]);
            }
            let alone = Case { length: 29, ..PLAIN };
            let alone = computed(&alone, &own, isa, &mut ByteAttentionScratch::default());
            for (row, alone) in alone.chunks_exact(32).enumerate() {
                assert_eq!(together[row * 96 + head * 32..][..32], *alone, "{isa:?}, head {head}");
            }
        }
    }
}
