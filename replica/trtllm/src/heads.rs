//! What stands behind the last layer, where the engine does not have it: pooling, a classifier, yes or no.
//!
//! Sums are of f32 over one row, so they cost nothing beside the model, and the engine needs no output as wide as its
//! vocabulary for the two numbers that a reranker wants of it.

use crate::numbers::Rows;

/// How the rows of a sequence's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The first token's.
    First,
    /// The last token's.
    Last,
    /// Their mean.
    Mean,
}

/// One row of the rows of a sequence; empty of none.
pub fn pool(rows: &Rows, pooling: Pooling) -> Vec<f32> {
    match pooling {
        Pooling::First => rows.iter().next().unwrap_or_default().to_vec(),
        Pooling::Last => rows.last().unwrap_or_default().to_vec(),
        Pooling::Mean => {
            let mut mean = vec![0.0; rows.width];
            for row in rows.iter() {
                mean.iter_mut().zip(row).for_each(|(sum, number)| *sum += number);
            }
            mean.iter_mut().for_each(|sum| *sum /= rows.len().max(1) as f32);
            mean
        }
    }
}

/// A linear layer on one row: a label for each of its rows.
#[derive(Clone, Debug, PartialEq)]
pub struct LabelHead {
    /// Row after row, one for each label, as wide as a state.
    weight: Vec<f32>,
    /// One number for each label, or none.
    bias: Vec<f32>,
    width: usize,
}

impl LabelHead {
    /// Of `weight`, whose rows are `width` wide, and of a `bias`, which may be empty; `None` if they do not fit together.
    pub fn new(weight: Vec<f32>, bias: Vec<f32>, width: usize) -> Option<LabelHead> {
        let labels = weight.len().checked_div(width)?;
        let fits = labels > 0 && labels * width == weight.len() && (bias.is_empty() || bias.len() == labels);
        fits.then_some(LabelHead { weight, bias, width })
    }

    /// Labels.
    pub fn labels(&self) -> usize {
        self.weight.len() / self.width
    }

    /// The raw number of each label; `None` of a state of another width.
    pub fn apply(&self, state: &[f32]) -> Option<Vec<f32>> {
        let rows = (state.len() == self.width).then(|| self.weight.chunks_exact(self.width))?;
        let bias = self.bias.iter().copied().chain(std::iter::repeat(0.0));
        Some(rows.zip(bias).map(|(row, bias)| dot(row, state) + bias).collect())
    }
}

/// A reranker that answers "yes" or "no": two rows of the language model's last layer.
#[derive(Clone, Debug, PartialEq)]
pub struct YesNo {
    /// The one minus the other, since only how much likelier "yes" is counts.
    difference: Vec<f32>,
}

impl YesNo {
    /// Of the rows of both words; `None` if they are not equally wide.
    pub fn new(yes: &[f32], no: &[f32]) -> Option<YesNo> {
        let difference = yes.iter().zip(no).map(|(yes, no)| yes - no).collect();
        (yes.len() == no.len() && !yes.is_empty()).then_some(YesNo { difference })
    }

    /// By how much "yes" is ahead, as a logit: its sigmoid is the probability that a softmax over the two words gives.
    pub fn apply(&self, state: &[f32]) -> Option<f32> {
        (state.len() == self.difference.len()).then(|| dot(&self.difference, state))
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_pooled_to_the_first_the_last_or_the_mean() {
        let rows = Rows { width: 2, numbers: vec![1.0, 2.0, 3.0, 6.0, 5.0, 1.0] };
        assert_eq!(pool(&rows, Pooling::First), [1.0, 2.0]);
        assert_eq!(pool(&rows, Pooling::Last), [5.0, 1.0]);
        assert_eq!(pool(&rows, Pooling::Mean), [3.0, 3.0]);
        assert!(pool(&Rows::default(), Pooling::First).is_empty());
    }

    #[test]
    fn a_label_is_its_row_times_the_state_and_its_bias() {
        let head = LabelHead::new(vec![1.0, 0.0, 2.0, -1.0], vec![0.5, 0.0], 2).unwrap();
        assert_eq!((head.labels(), head.apply(&[3.0, 4.0])), (2, Some(vec![3.5, 2.0])));
        assert_eq!(head.apply(&[3.0]), None);
        let bare = LabelHead::new(vec![1.0, 0.0], Vec::new(), 2).unwrap();
        assert_eq!(bare.apply(&[3.0, 4.0]), Some(vec![3.0]));
        assert_eq!(LabelHead::new(vec![1.0; 3], Vec::new(), 2), None);
        assert_eq!(LabelHead::new(vec![1.0; 4], vec![1.0; 3], 2), None);
        assert_eq!(LabelHead::new(Vec::new(), Vec::new(), 0), None);
    }

    #[test]
    fn yes_is_as_likely_as_a_softmax_over_both_words_says() {
        let (yes, no, state) = ([1.0, 2.0], [0.5, -1.0], [0.2, 0.3]);
        let logit = YesNo::new(&yes, &no).unwrap().apply(&state).unwrap();
        let (yes, no) = (dot(&yes, &state).exp(), dot(&no, &state).exp());
        let sigmoid = 1.0 / (1.0 + (-logit).exp());
        // Two roundings apart.
        assert!((sigmoid - yes / (yes + no)).abs() < 1e-6, "{sigmoid}");
        assert_eq!(YesNo::new(&[1.0], &[1.0, 2.0]), None);
    }
}
