//! Model outputs to the values that an API specifies: unit vectors, probabilities.
//!
//! Sums are computed in f64: they are short compared with the model's work, and the length of a vector then does not
//! depend on the order of its elements.

/// Scales each row of `width` numbers to length one. A row of zeros is unchanged.
pub fn normalize(rows: &mut [f32], width: usize) {
    for row in rows.chunks_exact_mut(width) {
        let length = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
        if length > 0.0 {
            row.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
        }
    }
}

/// Keeps the first `keep` numbers of each row of `width`, where a Matryoshka model concentrates its information.
pub fn shorten(mut rows: Vec<f32>, width: usize, keep: usize) -> Vec<f32> {
    assert!(0 < keep && keep <= width, "keep is between 1 and the width of a row");
    if keep < width {
        let count = rows.len() / width;
        for row in 1..count {
            rows.copy_within(row * width..row * width + keep, row * keep);
        }
        rows.truncate(count * keep);
    }
    rows
}

/// Returns the cosine of the angle between two vectors, -1 to 1; 0 if one of them is zero.
pub fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    if lengths > 0.0 { (dot(a, b) / lengths).clamp(-1.0, 1.0) as f32 } else { 0.0 }
}

/// Maps a cosine to a score from 0 to 1; order and relative differences are preserved.
pub fn cosine_score(cosine: f32) -> f32 {
    (1.0 + cosine) / 2.0
}

/// Returns the probability of a single logit.
pub fn sigmoid(logit: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(logit)).exp())) as f32
}

/// Replaces logits of exclusive labels by their probabilities.
pub fn softmax(logits: &mut [f32]) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let power = |x: f32| f64::from(x - most).exp();
    let sum: f64 = logits.iter().map(|x| power(*x)).sum();
    logits.iter_mut().for_each(|x| *x = (power(*x) / sum) as f32);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortened_row_is_its_beginning_at_length_one() {
        let mut rows = shorten(vec![3.0, 4.0, 9.0, 0.0, 0.0, 1.0, 6.0, 8.0, 7.0], 3, 2);
        assert_eq!(rows, [3.0, 4.0, 0.0, 0.0, 6.0, 8.0]);
        normalize(&mut rows, 2);
        assert_eq!(rows, [0.6, 0.8, 0.0, 0.0, 0.6, 0.8]);
        assert_eq!(shorten(vec![1.0, 2.0], 2, 2), [1.0, 2.0]);
    }

    #[test]
    fn a_cosine_depends_on_the_angle_and_not_on_the_length() {
        assert_eq!(cosine(&[3.0, 4.0], &[6.0, 8.0]), 1.0);
        assert_eq!(cosine(&[1.0, 0.0], &[0.0, 2.0]), 0.0);
        assert_eq!(cosine(&[1.0, 0.0], &[-2.0, 0.0]), -1.0);
        assert_eq!(cosine(&[0.0, 0.0], &[1.0, 0.0]), 0.0);
        assert_eq!([-1.0, 0.0, 1.0].map(cosine_score), [0.0, 0.5, 1.0]);
    }

    #[test]
    fn probabilities_add_up_and_do_not_overflow() {
        assert_eq!([f32::MIN, 0.0, f32::MAX].map(sigmoid), [0.0, 0.5, 1.0]);
        let mut logits = [1000.0, 1000.0, -1000.0];
        softmax(&mut logits);
        assert_eq!(logits, [0.5, 0.5, 0.0]);
    }
}
