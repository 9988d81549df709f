//! Relative position biases: added to attention scores by the distance between two tokens.
//!
//! The bias depends on the head and on the distance only. So each head has one row of numbers by distance, from the
//! farthest token before to the farthest behind, and the biases of a query are a slice of it.

/// Distance from which all tokens share one bucket, as in MPNet's code.
const FARTHEST_BUCKET: f32 = 128.0;

/// Rows of numbers by distance, in units of the binary logarithm, as scores are.
#[derive(Debug)]
pub(super) struct DistanceBiases {
    /// Index of distance 0 in a row.
    middle: usize,
    rows: Vec<Vec<f32>>,
}

impl DistanceBiases {
    /// Creates biases by bucket of the distance; `table` has a row of heads per bucket.
    pub(super) fn buckets(heads: usize, positions: usize, buckets: usize, table: &[f32]) -> DistanceBiases {
        DistanceBiases::new(heads, positions, |head, distance| {
            table[bucket(distance, buckets) * heads + head]
        })
    }

    /// Creates biases that are the distance times the slope of the head: `2^(−8k/n)` for head `k` of `n`, where `n` is
    /// a power of two; otherwise the slopes of the next smaller power, interleaved with every second one of the next
    /// larger (ALiBi).
    pub(super) fn alibi(heads: usize, positions: usize) -> DistanceBiases {
        let slope = |index: usize, heads: usize| (-8.0 * (index + 1) as f32 / heads as f32).exp2();
        let power = 1 << heads.ilog2();
        let slopes: Vec<f32> = (0..heads)
            .map(|head| match head.checked_sub(power) {
                None => slope(head, power),
                Some(beyond) => slope(2 * beyond, 2 * power),
            })
            .collect();
        DistanceBiases::new(heads, positions, |head, distance| -slopes[head] * distance.unsigned_abs() as f32)
    }

    fn new(heads: usize, positions: usize, bias: impl Fn(usize, isize) -> f32) -> DistanceBiases {
        let middle = positions - 1;
        let row = |head: usize| {
            let by_place = |place: usize| bias(head, place as isize - middle as isize);
            (0..2 * positions - 1).map(|place| by_place(place) * std::f32::consts::LOG2_E).collect()
        };
        DistanceBiases { middle, rows: (0..heads).map(row).collect() }
    }

    /// Returns the biases of the token at `query` for the keys from `first_key` on.
    pub(super) fn of(&self, head: usize, query: usize, first_key: usize) -> &[f32] {
        &self.rows[head][self.middle + first_key - query..]
    }
}

/// Returns the bucket of a key that is `distance` tokens after (or, negative, before) its query. The first half of the
/// buckets is for keys before the query; in each half near distances have one bucket each, and the others share the
/// rest logarithmically.
fn bucket(distance: isize, buckets: usize) -> usize {
    let half = buckets / 2;
    let exact = half / 2;
    let side = if distance > 0 { half } else { 0 };
    let far = distance.unsigned_abs();
    if far < exact {
        return side + far;
    }
    // In 32-bit floats, in the order of the original: rounding decides at the border of two buckets.
    let ratio = (far as f32 / exact as f32).ln() / (FARTHEST_BUCKET / exact as f32).ln();
    side + (exact + (ratio * (half - exact) as f32) as usize).min(half - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_distances_have_a_bucket_each_and_far_ones_share() {
        let of = |distances: &[isize]| -> Vec<usize> {
            distances.iter().map(|distance| bucket(*distance, 32)).collect()
        };
        assert_eq!(of(&[0, -1, -7, 1, 7]), [0, 1, 7, 17, 23]);
        assert_eq!(of(&[-8, -11, -12, -127, -128, -5000]), [8, 8, 9, 15, 15, 15]);
        assert_eq!(of(&[8, 5000]), [24, 31]);
    }

    #[test]
    fn biases_of_a_query_are_the_slice_from_its_first_key() {
        let biases = DistanceBiases::alibi(2, 4);
        let unit = std::f32::consts::LOG2_E;
        // The slope of the first of two heads is 1/16 per token.
        let expected: Vec<f32> = [2.0_f32, 1.0, 0.0, 1.0].iter().map(|far| -far / 16.0 * unit).collect();
        assert_eq!(&biases.of(0, 2, 0)[..4], expected);
        assert_eq!(biases.of(1, 3, 3)[0], 0.0);
    }

    #[test]
    fn slopes_equal_the_original_for_a_number_of_heads_that_is_no_power_of_two() {
        let biases = DistanceBiases::alibi(12, 2);
        let slopes: Vec<f32> =
            (0..12).map(|head| -biases.of(head, 0, 1)[0] / std::f32::consts::LOG2_E).collect();
        for (slope, exponent) in
            slopes.iter().zip([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 0.5, 1.5, 2.5, 3.5_f32])
        {
            assert!((slope - (-exponent).exp2()).abs() < 1e-6, "{slopes:?}");
        }
    }
}
