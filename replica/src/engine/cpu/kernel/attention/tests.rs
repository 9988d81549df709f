//! Compares attention with its definition, in 64-bit floats and one score after another.

use super::super::Isa;
use super::*;
use crate::engine::cpu::matrix::Partition;

/// Some heads over one sequence.
pub(in super::super) struct Case {
    pub(in super::super) length: usize,
    pub(in super::super) width: usize,
    /// Heads that share keys and values.
    pub(in super::super) sharing: usize,
    pub(in super::super) reach: Reach,
    pub(in super::super) softcap: Option<f32>,
    pub(in super::super) biases: Option<DistanceBiases>,
}

/// Returns a matrix of numbers that have no pattern, between −1 and 1.
pub(in super::super) fn noise(rows: usize, width: usize) -> Matrix {
    let mut matrix = Matrix::default();
    matrix.resize(rows, width);
    let mut state = 7_u32;
    for value in matrix.data_mut() {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *value = (state >> 8) as f32 / (1 << 23) as f32 - 1.0;
    }
    matrix
}

pub(in super::super) fn defined(case: &Case, projections: &Matrix) -> Vec<f64> {
    let Case { length, width, sharing, .. } = *case;
    let number =
        |row: usize, column: usize| f64::from(projections.data()[row * projections.width() + column]);
    let (keys, values) = (sharing * width, (sharing + 1) * width);
    let mut out = Vec::new();
    for query in 0..length {
        for head in 0..sharing {
            let seen = case.reach.of(query..query + 1, length);
            let score = |key: usize| {
                let products = (0..width).map(|at| number(query, head * width + at) * number(key, keys + at));
                let mut score: f64 = products.sum();
                if let Some(biases) = &case.biases {
                    score += f64::from(biases.of(head, query, key)[0]);
                }
                if let Some(cap) = case.softcap.map(f64::from) {
                    score = cap * (score / cap).tanh();
                }
                score.exp2()
            };
            let weights: Vec<f64> = seen.clone().map(score).collect();
            let total: f64 = weights.iter().sum();
            for at in 0..width {
                let parts = seen.clone().zip(&weights);
                let sum: f64 = parts.map(|(key, weight)| weight * number(key, values + at)).sum();
                out.push(sum / total);
            }
        }
    }
    out
}

fn computed(case: &Case, projections: &Matrix, isa: Isa, scratch: &mut AttentionScratch) -> Vec<f32> {
    let Case { length, width, sharing, reach, softcap, .. } = *case;
    let queries = sharing * width;
    let mut out = Matrix::default();
    out.resize(length, queries);
    out.data_mut().fill(f32::NAN);
    let rows = projections.view(0..length);
    isa.run(Attention {
        queries: rows.columns(0..queries),
        keys: rows.columns(queries..queries + width),
        values: rows.columns(queries + width..queries + 2 * width),
        reach,
        softcap,
        biases: case.biases.as_ref().map(|biases| (biases, 0)),
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
        let mut scratch = AttentionScratch::default();
        for matrix in [&mut scratch.keys, &mut scratch.values, &mut scratch.scores] {
            matrix.resize(1, 1 << 17);
            matrix.data_mut().fill(f32::NAN);
        }
        let found = computed(case, &projections, isa, &mut scratch);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = (f64::from(*found) - expected).abs();
            let Case { length, width, reach, .. } = case;
            // A NaN fails this comparison.
            let within = error <= 2e-6;
            assert!(within, "{isa:?}, {length} of {width}, {reach:?}, at {index}: {found}, not {expected}");
        }
    }
}

pub(in super::super) const PLAIN: Case =
    Case { length: 1, width: 32, sharing: 1, reach: Reach::ALL, softcap: None, biases: None };

#[test]
fn every_length_around_tiles_vectors_and_panels_is_right() {
    for length in (1..=34).chain([40, 47, 48, 49, 63, 64, 65, 80, 95, 97, 128, 136]) {
        check(&Case { length, ..PLAIN });
        check(&Case { length, width: 12, ..PLAIN });
    }
}

#[test]
fn every_width_of_a_head_is_right() {
    for width in [1, 8, 15, 16, 17, 31, 33, 40, 48, 64, 72, 80, 96, 128, 256] {
        check(&Case { length: 37, width, ..PLAIN });
    }
}

#[test]
fn tokens_out_of_reach_are_masked() {
    let reaches = [Reach::CAUSAL, Reach::around(0), Reach::around(1), Reach::around(20), Reach::around(64)];
    let windows = [0, 3, 31, 32, 40].map(|before| Reach { before, behind: 0 });
    for reach in reaches.into_iter().chain(windows) {
        for length in [1, 5, 13, 33, 70, 131] {
            check(&Case { length, reach, ..PLAIN });
        }
    }
}

#[test]
fn heads_share_keys_and_scores_are_capped_and_biased() {
    for reach in [Reach::ALL, Reach::CAUSAL, Reach { before: 9, behind: 2 }] {
        for length in [3, 20, 70] {
            let shared = Case { length, sharing: 3, reach, ..PLAIN };
            check(&shared);
            check(&Case { softcap: Some(0.7), ..shared });
            let biases = || Some(DistanceBiases::alibi(3, 70));
            check(&Case { length, sharing: 3, reach, biases: biases(), ..PLAIN });
            check(&Case { length, sharing: 3, reach, biases: biases(), softcap: Some(2.0), ..PLAIN });
        }
    }
}

#[test]
fn a_subset_of_the_heads_has_the_same_bits() {
    let case = Case { length: 50, sharing: 2, ..PLAIN };
    let projections = noise(50, 4 * 32);
    for isa in Isa::available() {
        let mut scratch = AttentionScratch::default();
        let together = computed(&case, &projections, isa, &mut scratch);
        let mut out = Matrix::default();
        out.resize(50, 64);
        let tiles = out.tiles(Partition::whole(50), Partition::even(64, 2, 32));
        let mut threads = crate::engine::cpu::threads::ThreadPool::new(std::num::NonZeroUsize::MIN).unwrap();
        threads.for_each(&mut [scratch], tiles, |scratch, mut window| {
            let rows = projections.view(0..50);
            isa.run(Attention {
                queries: rows.columns(window.columns()),
                keys: rows.columns(64..96),
                values: rows.columns(96..128),
                reach: case.reach,
                softcap: None,
                biases: None,
                out: &mut window,
                scratch,
            });
        });
        assert_eq!(out.data(), together, "{isa:?}");
    }
}
