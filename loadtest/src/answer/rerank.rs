//! Validation of rerank responses: one score per document, in descending order.

use serde::Deserialize;

use super::{Rubbish, kind};

#[derive(Deserialize)]
struct Answer {
    results: Vec<Ranked>,
}

#[derive(Deserialize)]
struct Ranked {
    index: usize,
    /// JavaScript serializes NaN as `null`.
    relevance_score: Option<f32>,
}

/// Validates a response to a query with `documents` documents.
pub(crate) fn check(body: &[u8], documents: usize) -> Result<(), Rubbish> {
    let Answer { results } = serde_json::from_slice(body).map_err(|error| kind(&error))?;
    if results.len() != documents {
        return Err(Rubbish::WrongCount);
    }
    let mut seen = vec![false; documents];
    for Ranked { index, .. } in &results {
        match seen.get_mut(*index) {
            Some(seen) if !*seen => *seen = true,
            Some(_) | None => return Err(Rubbish::WrongOrder),
        }
    }
    let scores: Option<Vec<f32>> = results.iter().map(|ranked| ranked.relevance_score).collect();
    let scores =
        scores.filter(|scores| scores.iter().all(|score| score.is_finite())).ok_or(Rubbish::NotFinite)?;
    if scores.windows(2).any(|pair| pair[0] < pair[1]) {
        return Err(Rubbish::WrongOrder);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_document_has_one_finite_score_and_the_best_comes_first() {
        let answer = |results: &[(usize, &str)]| {
            let results: Vec<String> = results
                .iter()
                .map(|(index, score)| format!(r#"{{"index":{index},"relevance_score":{score}}}"#))
                .collect();
            format!(r#"{{"id":"x","results":[{}],"meta":{{}}}}"#, results.join(","))
        };
        let good = answer(&[(1, "0.9"), (0, "0.9"), (2, "1e-9")]);
        assert_eq!(check(good.as_bytes(), 3), Ok(()));
        for (wrong, expected) in [
            (answer(&[(0, "0.9")]), Rubbish::WrongCount),
            (answer(&[(0, "0.9"), (1, "0.8"), (1, "0.7")]), Rubbish::WrongOrder),
            (answer(&[(0, "0.9"), (1, "0.8"), (3, "0.7")]), Rubbish::WrongOrder),
            (answer(&[(0, "0.7"), (1, "0.8"), (2, "0.9")]), Rubbish::WrongOrder),
            (answer(&[(0, "null"), (1, "0.8"), (2, "0.7")]), Rubbish::NotFinite),
            (answer(&[(0, "1e39"), (1, "0.8"), (2, "0.7")]), Rubbish::NotFinite),
            (answer(&[(0, "NaN"), (1, "0.8"), (2, "0.7")]), Rubbish::NotJson),
            (good[..good.len() - 2].to_owned(), Rubbish::NotJson),
            ("{\"data\":[]}".to_owned(), Rubbish::WrongShape),
        ] {
            assert_eq!(check(wrong.as_bytes(), 3), Err(expected), "{wrong}");
        }
    }
}
