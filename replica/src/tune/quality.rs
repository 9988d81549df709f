//! Accuracy of a precision compared with the reference.

/// Minimum of the mean cosine.
const MIN_MEAN_COSINE: f64 = 0.995;
/// Minimum of each cosine.
const MIN_COSINE: f64 = 0.98;

/// Accuracy of a precision compared with f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quality {
    /// Number of texts.
    pub texts: usize,
    /// Mean cosine.
    pub mean_cosine: f64,
    /// Minimum cosine.
    pub min_cosine: f64,
}

impl Quality {
    /// Computes the accuracy from cosines; `None` without any. NaN counts as the minimum.
    pub fn of(cosines: &[f64]) -> Option<Quality> {
        let number = |cosine: &f64| if cosine.is_nan() { -1.0 } else { *cosine };
        let min_cosine = cosines.iter().map(number).min_by(f64::total_cmp)?;
        let texts = cosines.len();
        Some(Quality {
            texts,
            mean_cosine: cosines.iter().map(number).sum::<f64>() / texts as f64,
            min_cosine,
        })
    }

    /// Returns whether the precision may be recommended.
    pub fn is_sufficient(&self) -> bool {
        self.mean_cosine >= MIN_MEAN_COSINE && self.min_cosine >= MIN_COSINE
    }
}

/// Returns the cosine of two rows.
pub(crate) fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_the_mean_and_the_minimum_count() {
        let is_sufficient = |cosines: &[f64]| Quality::of(cosines).expect("cosines").is_sufficient();
        assert!(is_sufficient(&[0.995; 4]));
        assert!(!is_sufficient(&[0.9949; 4]));
        assert!(is_sufficient(&[0.98, 1.0, 1.0, 1.0]));
        assert!(!is_sufficient(&[0.9799, 1.0, 1.0, 1.0]));
        assert!(!is_sufficient(&[f64::NAN, 1.0, 1.0, 1.0]));
        assert_eq!(Quality::of(&[]), None);
    }
}
