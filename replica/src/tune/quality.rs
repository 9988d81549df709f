//! Whether a precision is good enough to be recommended.

/// The mean of the cosines with the reference must reach this.
const MEAN_LEAST: f64 = 0.995;
/// And each of them this.
const EACH_LEAST: f64 = 0.98;

/// How near a precision comes to f32, over some texts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quality {
    /// How many.
    pub texts: usize,
    /// On average.
    pub mean_cosine: f64,
    /// In the worst case.
    pub min_cosine: f64,
}

impl Quality {
    /// Of these cosines, if there are any. What is not a number is the worst.
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

    /// Whether it may be recommended.
    pub fn suffices(&self) -> bool {
        self.mean_cosine >= MEAN_LEAST && self.min_cosine >= EACH_LEAST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_the_mean_and_the_worst_count() {
        let suffices = |cosines: &[f64]| Quality::of(cosines).expect("cosines").suffices();
        assert!(suffices(&[0.995; 4]));
        assert!(!suffices(&[0.9949; 4]));
        assert!(suffices(&[0.98, 1.0, 1.0, 1.0]));
        assert!(!suffices(&[0.9799, 1.0, 1.0, 1.0]));
        assert!(!suffices(&[f64::NAN, 1.0, 1.0, 1.0]));
        assert_eq!(Quality::of(&[]), None);
    }
}
