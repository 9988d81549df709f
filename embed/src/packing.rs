//! Packing of texts into batches by their number of tokens.
//!
//! An engine is fastest with batches of a certain number of tokens, and texts of similar length in a batch need the least
//! memory. So the texts of a window are sorted by length and packed in this order, and the caller puts the results back
//! into the order of the texts.

use std::cmp::Reverse;

/// Returns the batches of a window: the indices of the texts of each. `tokens` are the lengths of the texts. A batch has at
/// most `budget` tokens, except that a longer text is a batch by itself. The longest texts come first, so that a batch
/// that needs too much memory fails at once.
pub fn pack(tokens: &[usize], budget: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by_key(|index| (Reverse(tokens[*index]), *index));
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut left = 0;
    for index in order {
        match batches.last_mut() {
            Some(batch) if tokens[index] <= left => {
                batch.push(index);
                left -= tokens[index];
            }
            _ => {
                batches.push(vec![index]);
                left = budget.saturating_sub(tokens[index]);
            }
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn texts_are_packed_by_length() {
        assert_eq!(pack(&[], 10), Vec::<Vec<usize>>::new());
        assert_eq!(pack(&[3, 9, 4, 3], 10), [vec![1], vec![2, 0, 3]]);
        assert_eq!(pack(&[11, 5, 5], 10), [vec![0], vec![1, 2]]);
        assert_eq!(pack(&[5, 5, 1], 10), [vec![0, 1], vec![2]]);
    }

    proptest! {
        #[test]
        fn every_text_is_in_one_batch_within_the_budget(
            tokens in prop::collection::vec(1usize..40, 0..80), budget in 1usize..60,
        ) {
            let batches = pack(&tokens, budget);
            for batch in &batches {
                let sum: usize = batch.iter().map(|index| tokens[*index]).sum();
                prop_assert!(sum <= budget || batch.len() == 1);
            }
            let mut all: Vec<usize> = batches.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..tokens.len()).collect::<Vec<_>>());
        }
    }
}
