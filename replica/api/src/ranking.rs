//! Order of scores in a response.

/// Returns the indices of the `most` highest scores, the highest first, ties by index.
pub fn ranking(scores: &[f32], most: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    order.truncate(most);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_score_comes_first_and_ties_by_index() {
        assert_eq!(ranking(&[0.5, 0.9, 0.5, 0.1], 9), [1, 0, 2, 3]);
        assert_eq!(ranking(&[0.5, 0.9, 0.5, 0.1], 2), [1, 0]);
        assert_eq!(ranking(&[], 2), [0; 0]);
    }
}
