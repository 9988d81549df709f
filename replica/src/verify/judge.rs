//! What is demanded of a precision, and whether it holds.

use replica_core::{EngineSpec, Precision};

/// What a precision must come to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Demand {
    /// The mean of the cosines.
    pub mean: f64,
    /// Each of them.
    pub each: f64,
    /// The share of pairs of documents in the same order, or of texts with the same first label.
    pub agreement: f64,
}

impl Demand {
    /// Of a precision. Sixteen bits must not be told from the reference; eight bits may be, text by text, and not on the whole. The
    /// last column is ours: of a hundred decisions between two documents, one may turn out the other way in sixteen bits and five in
    /// eight, which are those that were close.
    pub fn of(precision: Precision) -> Demand {
        match precision {
            Precision::F32 => Demand { mean: 0.9999, each: 0.9999, agreement: 0.99 },
            Precision::F16 | Precision::Bf16 => Demand { mean: 0.999, each: 0.999, agreement: 0.99 },
            Precision::Int8 => Demand { mean: 0.995, each: 0.98, agreement: 0.95 },
            Precision::Fp8 => Demand { mean: 0.99, each: -1.0, agreement: 0.95 },
        }
    }
}

/// How cosines are spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// How many.
    pub count: usize,
    /// On average.
    pub mean: f64,
    /// The least.
    pub least: f64,
    /// One in a hundred is below this.
    pub hundredth: f64,
    /// One in ten is.
    pub tenth: f64,
    /// One in two is.
    pub median: f64,
}

impl Spread {
    /// Of these cosines, if there are any. What is not a number is the worst.
    pub fn of(cosines: &[f64]) -> Option<Spread> {
        let mut sorted: Vec<f64> =
            cosines.iter().map(|cosine| if cosine.is_nan() { -1.0 } else { *cosine }).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |part: usize| sorted.get(sorted.len() / part).copied();
        Some(Spread {
            count: sorted.len(),
            mean: sorted.iter().sum::<f64>() / sorted.len() as f64,
            least: *sorted.first()?,
            hundredth: at(100)?,
            tenth: at(10)?,
            median: at(2)?,
        })
    }
}

/// How often two engines decide alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// Decisions that are the same.
    pub same: usize,
    /// All of them.
    pub all: usize,
}

impl Agreement {
    /// As a share; 0 of nothing.
    pub fn share(self) -> f64 {
        if self.all == 0 { 0.0 } else { self.same as f64 / self.all as f64 }
    }
}

/// How often both put two documents of one query in the same order; what the reference holds for equal has none.
pub fn order_agreement(query_of: &[usize], expected: &[f32], given: &[f32]) -> Agreement {
    let mut agreement = Agreement { same: 0, all: 0 };
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

/// How often both put the same label first.
pub fn label_agreement(expected: &[Vec<f32>], given: &[Vec<f32>]) -> Agreement {
    let first =
        |row: &[f32]| row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(label, _)| label);
    let same = expected.iter().zip(given).filter(|(expected, given)| first(expected) == first(given)).count();
    Agreement { same, all: expected.len() }
}

/// What an engine came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Which.
    pub engine: EngineSpec,
    /// Of vectors, or of the rows of tokens; absent where the engine has neither.
    pub cosines: Option<Spread>,
    /// Of a model with labels.
    pub agreement: Option<Agreement>,
    /// What does not hold; empty if all does.
    pub broken: Vec<String>,
}

impl Verdict {
    /// Whether it may be served in the place of the reference.
    pub fn holds(&self) -> bool {
        self.broken.is_empty()
    }
}

/// Judges an engine by what its precision must come to.
pub fn judge(engine: EngineSpec, cosines: &[f64], agreement: Option<Agreement>) -> Verdict {
    let demand = Demand::of(engine.precision);
    let cosines = Spread::of(cosines);
    let mut broken = Vec::new();
    if let Some(Spread { mean, least, .. }) = cosines {
        if mean < demand.mean {
            broken.push(format!("the mean cosine is {mean:.5} and should be at least {}", demand.mean));
        }
        if least < demand.each {
            broken
                .push(format!("the least cosine is {least:.5} and each should be at least {}", demand.each));
        }
    }
    if let Some(agreement) = agreement.filter(|agreement| agreement.share() < demand.agreement) {
        let Agreement { same, all } = agreement;
        broken.push(format!(
            "{same} of {all} decisions are the same and {} of them should be",
            demand.agreement
        ));
    }
    if cosines.is_none() && agreement.is_none() {
        broken.push("there is nothing to judge it by".to_owned());
    }
    Verdict { engine, cosines, agreement, broken }
}

#[cfg(test)]
mod tests {
    use replica_core::EngineKind;

    use super::*;

    fn spec(precision: Precision) -> EngineSpec {
        EngineSpec { kind: EngineKind::TensorrtLlm, precision }
    }

    #[test]
    fn a_precision_holds_at_its_limit_and_not_below_it() {
        let holds = |precision, cosines: &[f64]| judge(spec(precision), cosines, None).holds();
        assert!(holds(Precision::Bf16, &[0.999, 1.0]));
        assert!(!holds(Precision::Bf16, &[0.9989, 1.0]), "each counts");
        assert!(holds(Precision::Fp8, &[0.985, 0.995]), "the mean counts");
        assert!(!holds(Precision::Fp8, &[0.984, 0.995]));
        assert!(
            holds(Precision::Int8, &[0.98, 1.0, 1.0, 1.0])
                && !holds(Precision::Int8, &[0.9799, 1.0, 1.0, 1.0])
        );
        assert!(!holds(Precision::Fp8, &[f64::NAN, 1.0]), "no number is the worst");
        assert!(!holds(Precision::Fp8, &[]), "nothing is not enough");
    }

    #[test]
    fn decisions_count_as_well() {
        let holds = |same, all| judge(spec(Precision::Fp8), &[], Some(Agreement { same, all })).holds();
        assert!(holds(95, 100) && !holds(94, 100) && !holds(0, 0));
    }

    #[test]
    fn an_order_is_compared_within_a_query_and_where_there_is_one() {
        let query_of = [0, 0, 0, 1, 1];
        let expected = [1.0, 2.0, 2.0, 5.0, 4.0];
        let same = |given: &[f32]| order_agreement(&query_of, &expected, given);
        assert_eq!(same(&expected), Agreement { same: 3, all: 3 });
        assert_eq!(same(&[1.0, 2.0, 0.5, 5.0, 4.0]), Agreement { same: 2, all: 3 });
        assert_eq!(
            same(&[1.0, 1.0, 1.0, 1.0, 1.0]),
            Agreement { same: 0, all: 3 },
            "no order is another order"
        );
    }

    #[test]
    fn the_first_label_is_what_a_classifier_decides() {
        let rows = |rows: &[[f32; 2]]| rows.iter().map(|row| row.to_vec()).collect::<Vec<_>>();
        let expected = rows(&[[0.0, 1.0], [3.0, 1.0]]);
        assert_eq!(
            label_agreement(&expected, &rows(&[[5.0, 6.0], [1.0, 2.0]])),
            Agreement { same: 1, all: 2 }
        );
    }

    #[test]
    fn a_spread_is_read_from_the_low_end() {
        let cosines: Vec<f64> = (0..200).rev().map(|n| f64::from(n) / 200.0).collect();
        let spread = Spread::of(&cosines).expect("cosines");
        assert_eq!((spread.count, spread.least, spread.hundredth, spread.tenth), (200, 0.0, 0.01, 0.1));
        assert_eq!((spread.median, Spread::of(&[])), (0.5, None));
    }
}
