//! Validation of rerank responses: one score per document, in descending order.

use serde::Deserialize;

use super::{ResponseDefect, kind};

#[derive(Deserialize)]
struct RerankScores {
    results: Vec<ScoredDocument>,
}

#[derive(Deserialize)]
struct ScoredDocument {
    index: usize,
    /// JavaScript serializes NaN as `null`.
    relevance_score: Option<f32>,
}

/// Validates a response to a query with `documents` documents.
pub(crate) fn check(body: &[u8], documents: usize) -> Result<(), ResponseDefect> {
    let RerankScores { results } = serde_json::from_slice(body).map_err(|error| kind(&error))?;
    if results.len() != documents {
        return Err(ResponseDefect::WrongCount);
    }
    let mut is_present = vec![false; documents];
    for ScoredDocument { index, .. } in &results {
        match is_present.get_mut(*index) {
            Some(is_present) if !*is_present => *is_present = true,
            Some(_) | None => return Err(ResponseDefect::WrongOrder),
        }
    }
    let scores: Option<Vec<f32>> = results.iter().map(|ranked| ranked.relevance_score).collect();
    let scores = scores
        .filter(|scores| scores.iter().all(|score| score.is_finite()))
        .ok_or(ResponseDefect::NotFinite)?;
    if scores.windows(2).any(|pair| pair[0] < pair[1]) {
        return Err(ResponseDefect::WrongOrder);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_document_has_one_finite_score_in_descending_order() {
        let response = |results: &[(usize, &str)]| {
            let results: Vec<String> = results
                .iter()
                .map(|(index, score)| format!(r#"{{"index":{index},"relevance_score":{score}}}"#))
                .collect();
            format!(r#"{{"id":"x","results":[{}],"meta":{{}}}}"#, results.join(","))
        };
        let good = response(&[(1, "0.9"), (0, "0.9"), (2, "1e-9")]);
        assert_eq!(check(good.as_bytes(), 3), Ok(()));
        for (wrong, expected) in [
            (response(&[(0, "0.9")]), ResponseDefect::WrongCount),
            (response(&[(0, "0.9"), (1, "0.8"), (1, "0.7")]), ResponseDefect::WrongOrder),
            (response(&[(0, "0.9"), (1, "0.8"), (3, "0.7")]), ResponseDefect::WrongOrder),
            (response(&[(0, "0.7"), (1, "0.8"), (2, "0.9")]), ResponseDefect::WrongOrder),
            (response(&[(0, "null"), (1, "0.8"), (2, "0.7")]), ResponseDefect::NotFinite),
            (response(&[(0, "1e39"), (1, "0.8"), (2, "0.7")]), ResponseDefect::NotFinite),
            (response(&[(0, "NaN"), (1, "0.8"), (2, "0.7")]), ResponseDefect::NotJson),
            (good[..good.len() - 2].to_owned(), ResponseDefect::NotJson),
            ("{\"data\":[]}".to_owned(), ResponseDefect::WrongShape),
        ] {
            assert_eq!(check(wrong.as_bytes(), 3), Err(expected), "{wrong}");
        }
    }
}
