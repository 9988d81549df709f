//! Decoder of TEI's `POST /rerank` and `POST /predict` responses. They are small and parsed by serde, which rejects
//! numbers that are not finite.

use serde::Deserialize;

use crate::scan::DecodeError;

/// Score of one text.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct RankedText {
    /// Index of the text in the request.
    pub index: usize,
    /// Relevance.
    pub score: f64,
    /// The text, if requested.
    #[serde(default)]
    pub text: Option<String>,
}

/// Label with its score.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct LabelScore {
    /// The label.
    pub label: String,
    /// Score of the label.
    pub score: f64,
}

/// Decodes a ranking that contains each of `count` texts once; keeps the server's order.
pub(super) fn ranks(response: &[u8], count: usize) -> Result<Vec<RankedText>, DecodeError> {
    let ranks: Vec<RankedText> = parse_list(response, count, "list of index and score")?;
    let mut is_present = vec![false; count];
    for rank in &ranks {
        match is_present.get_mut(rank.index) {
            Some(is_present) if !*is_present => *is_present = true,
            _ => return Err(DecodeError::Index(rank.index)),
        }
    }
    Ok(ranks)
}

/// Decodes the labels of each of `count` texts.
pub(super) fn classes(response: &[u8], count: usize) -> Result<Vec<Vec<LabelScore>>, DecodeError> {
    let rows: Vec<Vec<LabelScore>> = parse_list(response, count, "list of labels and scores for each text")?;
    if rows.iter().any(Vec::is_empty) {
        return Err(DecodeError::Shape("label"));
    }
    Ok(rows)
}

fn parse_list<T: for<'de> Deserialize<'de>>(
    response: &[u8],
    count: usize,
    expected: &'static str,
) -> Result<Vec<T>, DecodeError> {
    let entries: Vec<T> = serde_json::from_slice(response).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => DecodeError::Shape(expected),
        _ => DecodeError::NotJson,
    })?;
    if entries.len() == count {
        Ok(entries)
    } else {
        Err(DecodeError::Count { expected: count, got: entries.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_text_is_ranked_once() {
        let check = |response: &str, expected: Result<usize, DecodeError>| {
            assert_eq!(ranks(response.as_bytes(), 2).map(|ranks| ranks[0].index), expected, "{response}");
        };
        check(r#"[{"index":1,"score":0.9,"text":"b"},{"index":0,"score":0.1}]"#, Ok(1));
        check(r#"[{"index":1,"score":0.9}]"#, Err(DecodeError::Count { expected: 2, got: 1 }));
        check(r#"[{"index":1,"score":0.9},{"index":1,"score":0.1}]"#, Err(DecodeError::Index(1)));
        check(r#"[{"index":1,"score":0.9},{"index":2,"score":0.1}]"#, Err(DecodeError::Index(2)));
        check(r#"[{"index":1,"score":1e999},{"index":0,"score":0.1}]"#, Err(DecodeError::NotJson));
        check(r#"[{"index":1,"score":NaN},{"index":0,"score":0.1}]"#, Err(DecodeError::NotJson));
        check(
            r#"[{"index":1,"score":null},{"index":0,"score":0.1}]"#,
            Err(DecodeError::Shape("list of index and score")),
        );
        check(r#"[{"index":1,"score":0.9},{"index":0,"score":0.1}"#, Err(DecodeError::NotJson));
    }

    #[test]
    fn each_text_has_labels() {
        let check = |response: &str, expected: Result<usize, DecodeError>| {
            assert_eq!(classes(response.as_bytes(), 1).map(|rows| rows[0].len()), expected, "{response}");
        };
        check(r#"[[{"label":"good","score":0.9},{"label":"bad","score":0.1}]]"#, Ok(2));
        check(r#"[[]]"#, Err(DecodeError::Shape("label")));
        check(r#"[]"#, Err(DecodeError::Count { expected: 1, got: 0 }));
        check(r#"[[{"label":"good","score":-1e999}]]"#, Err(DecodeError::NotJson));
        check(r#"{"error":"x"}"#, Err(DecodeError::Shape("list of labels and scores for each text")));
    }
}
