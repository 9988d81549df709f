//! Requirements for the accuracy of a precision, and their evaluation.

use replica_core::{EngineSpec, Precision};

/// Required accuracy of a precision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrecisionRequirement {
    /// Minimum of the mean cosine.
    pub mean: f64,
    /// Minimum of each cosine.
    pub each: f64,
    /// Minimum share of document pairs in the same order, or of texts with the same first label.
    pub agreement: f64,
}

impl PrecisionRequirement {
    /// Returns the requirement of a precision. In 16 bits vectors must be indistinguishable from the reference; in 8
    /// bits single texts may differ, but not the average. The last column is our choice: of a hundred decisions between
    /// two documents one may differ in 16 bits and five in 8 bits, namely those with close scores.
    pub fn of(precision: Precision) -> PrecisionRequirement {
        match precision {
            Precision::F32 => PrecisionRequirement { mean: 0.9999, each: 0.9999, agreement: 0.99 },
            Precision::F16 | Precision::Bf16 => {
                PrecisionRequirement { mean: 0.999, each: 0.999, agreement: 0.99 }
            }
            Precision::Int8 => PrecisionRequirement { mean: 0.995, each: 0.98, agreement: 0.95 },
            Precision::Fp8 => PrecisionRequirement { mean: 0.99, each: -1.0, agreement: 0.95 },
        }
    }
}

/// Distribution of cosines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CosineDistribution {
    /// Count.
    pub count: usize,
    /// Mean.
    pub mean: f64,
    /// Minimum.
    pub least: f64,
    /// 1st percentile.
    pub hundredth: f64,
    /// 10th percentile.
    pub tenth: f64,
    /// Median.
    pub median: f64,
}

impl CosineDistribution {
    /// Computes the distribution; `None` without cosines. NaN counts as the minimum.
    pub fn of(cosines: &[f64]) -> Option<CosineDistribution> {
        let mut sorted: Vec<f64> =
            cosines.iter().map(|cosine| if cosine.is_nan() { -1.0 } else { *cosine }).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |part: usize| sorted.get(sorted.len() / part).copied();
        Some(CosineDistribution {
            count: sorted.len(),
            mean: sorted.iter().sum::<f64>() / sorted.len() as f64,
            least: *sorted.first()?,
            hundredth: at(100)?,
            tenth: at(10)?,
            median: at(2)?,
        })
    }
}

/// Number of equal decisions of two engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecisionAgreement {
    /// Equal decisions.
    pub same: usize,
    /// All decisions.
    pub all: usize,
}

impl DecisionAgreement {
    /// Returns the share of equal decisions; 0 without any.
    pub fn share(self) -> f64 {
        if self.all == 0 { 0.0 } else { self.same as f64 / self.all as f64 }
    }
}

/// Counts the document pairs of a query that both engines put in the same order; pairs with equal scores in the
/// reference are ignored.
pub fn order_agreement(query_of: &[usize], expected: &[f32], given: &[f32]) -> DecisionAgreement {
    let mut agreement = DecisionAgreement { same: 0, all: 0 };
    for (one, query) in query_of.iter().enumerate() {
        for other in (one + 1..query_of.len()).filter(|other| query_of[*other] == *query) {
            if expected[one] == expected[other] {
                continue;
            }
            agreement.all += 1;
            agreement.same += usize::from(
                (expected[one] < expected[other]) == (given[one] < given[other])
                    && given[one] != given[other],
            );
        }
    }
    agreement
}

/// Counts the texts for which both engines put the same label first.
pub fn label_agreement(expected: &[Vec<f32>], given: &[Vec<f32>]) -> DecisionAgreement {
    let first =
        |row: &[f32]| row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(label, _)| label);
    let same = expected.iter().zip(given).filter(|(expected, given)| first(expected) == first(given)).count();
    DecisionAgreement { same, all: expected.len() }
}

/// Result of comparing an engine with the reference.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineVerdict {
    /// Engine.
    pub engine: EngineSpec,
    /// Cosines of vectors, or of the rows of tokens; absent if the engine outputs neither.
    pub cosines: Option<CosineDistribution>,
    /// Equal decisions, for a model with labels.
    pub agreement: Option<DecisionAgreement>,
    /// Requirements that are not met; empty if the engine passes.
    pub broken: Vec<String>,
}

impl EngineVerdict {
    /// Returns whether the engine may replace the reference.
    pub fn holds(&self) -> bool {
        self.broken.is_empty()
    }
}

/// Evaluates an engine against the requirements of its precision.
pub fn judge(engine: EngineSpec, cosines: &[f64], agreement: Option<DecisionAgreement>) -> EngineVerdict {
    let requirement = PrecisionRequirement::of(engine.precision);
    let cosines = CosineDistribution::of(cosines);
    let mut broken = Vec::new();
    if let Some(CosineDistribution { mean, least, .. }) = cosines {
        if mean < requirement.mean {
            broken.push(format!("the mean cosine is {mean:.5}; the minimum is {}", requirement.mean));
        }
        if least < requirement.each {
            broken.push(format!("the lowest cosine is {least:.5}; the minimum is {}", requirement.each));
        }
    }
    if let Some(agreement) = agreement.filter(|agreement| agreement.share() < requirement.agreement) {
        let DecisionAgreement { same, all } = agreement;
        broken.push(format!(
            "{same} of {all} decisions are equal; the minimum share is {}",
            requirement.agreement
        ));
    }
    if cosines.is_none() && agreement.is_none() {
        broken.push("the engine outputs neither vectors nor labels to compare".to_owned());
    }
    EngineVerdict { engine, cosines, agreement, broken }
}

#[cfg(test)]
mod tests {
    use replica_core::EngineKind;

    use super::*;

    fn spec(precision: Precision) -> EngineSpec {
        EngineSpec { kind: EngineKind::TensorrtLlm, precision }
    }

    #[test]
    fn a_precision_passes_at_its_limit_and_fails_below_it() {
        let holds = |precision, cosines: &[f64]| judge(spec(precision), cosines, None).holds();
        assert!(holds(Precision::Bf16, &[0.999, 1.0]));
        assert!(!holds(Precision::Bf16, &[0.9989, 1.0]), "each counts");
        assert!(holds(Precision::Fp8, &[0.985, 0.995]), "the mean counts");
        assert!(!holds(Precision::Fp8, &[0.984, 0.995]));
        assert!(
            holds(Precision::Int8, &[0.98, 1.0, 1.0, 1.0])
                && !holds(Precision::Int8, &[0.9799, 1.0, 1.0, 1.0])
        );
        assert!(!holds(Precision::Fp8, &[f64::NAN, 1.0]), "NaN counts as the minimum");
        assert!(!holds(Precision::Fp8, &[]), "no outputs");
    }

    #[test]
    fn equal_decisions_count_as_well() {
        let holds =
            |same, all| judge(spec(Precision::Fp8), &[], Some(DecisionAgreement { same, all })).holds();
        assert!(holds(95, 100) && !holds(94, 100) && !holds(0, 0));
    }

    #[test]
    fn orders_are_compared_within_a_query_and_without_ties() {
        let query_of = [0, 0, 0, 1, 1];
        let expected = [1.0, 2.0, 2.0, 5.0, 4.0];
        let same = |given: &[f32]| order_agreement(&query_of, &expected, given);
        assert_eq!(same(&expected), DecisionAgreement { same: 3, all: 3 });
        assert_eq!(same(&[1.0, 2.0, 0.5, 5.0, 4.0]), DecisionAgreement { same: 2, all: 3 });
        assert_eq!(
            same(&[1.0, 1.0, 1.0, 1.0, 1.0]),
            DecisionAgreement { same: 0, all: 3 },
            "ties are not the same order"
        );
    }

    #[test]
    fn classifiers_are_compared_by_the_first_label() {
        let rows = |rows: &[[f32; 2]]| rows.iter().map(|row| row.to_vec()).collect::<Vec<_>>();
        let expected = rows(&[[0.0, 1.0], [3.0, 1.0]]);
        assert_eq!(
            label_agreement(&expected, &rows(&[[5.0, 6.0], [1.0, 2.0]])),
            DecisionAgreement { same: 1, all: 2 }
        );
    }

    #[test]
    fn percentiles_are_counted_from_the_lowest() {
        let cosines: Vec<f64> = (0..200).rev().map(|n| f64::from(n) / 200.0).collect();
        let spread = CosineDistribution::of(&cosines).expect("cosines");
        assert_eq!((spread.count, spread.least, spread.hundredth, spread.tenth), (200, 0.0, 0.01, 0.1));
        assert_eq!((spread.median, CosineDistribution::of(&[])), (0.5, None));
    }
}
