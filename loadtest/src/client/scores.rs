//! Decoder of TEI's `POST /rerank` and `POST /predict` responses. They are small and parsed by serde, which rejects numbers
//! that are not finite.

use serde::Deserialize;

use crate::scan::Wrong;

/// Score of one text.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Ranked {
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
pub struct Class {
    /// The label.
    pub label: String,
    /// Score of the label.
    pub score: f64,
}

/// Decodes a ranking that contains each of `count` texts once; keeps the server's order.
pub(super) fn ranks(answer: &[u8], count: usize) -> Result<Vec<Ranked>, Wrong> {
    let ranks: Vec<Ranked> = list(answer, count, "list of index and score")?;
    let mut seen = vec![false; count];
    for rank in &ranks {
        match seen.get_mut(rank.index) {
            Some(seen) if !*seen => *seen = true,
            _ => return Err(Wrong::Index(rank.index)),
        }
    }
    Ok(ranks)
}

/// Decodes the labels of each of `count` texts.
pub(super) fn classes(answer: &[u8], count: usize) -> Result<Vec<Vec<Class>>, Wrong> {
    let rows: Vec<Vec<Class>> = list(answer, count, "list of labels and scores for each text")?;
    if rows.iter().any(Vec::is_empty) {
        return Err(Wrong::Shape("label"));
    }
    Ok(rows)
}

fn list<T: for<'de> Deserialize<'de>>(
    answer: &[u8],
    count: usize,
    what: &'static str,
) -> Result<Vec<T>, Wrong> {
    let list: Vec<T> = serde_json::from_slice(answer).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => Wrong::Shape(what),
        _ => Wrong::NotJson,
    })?;
    if list.len() == count { Ok(list) } else { Err(Wrong::Count { wanted: count, got: list.len() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_text_is_ranked_once() {
        let check = |answer: &str, expected: Result<usize, Wrong>| {
            assert_eq!(ranks(answer.as_bytes(), 2).map(|ranks| ranks[0].index), expected, "{answer}");
        };
        check(r#"[{"index":1,"score":0.9,"text":"b"},{"index":0,"score":0.1}]"#, Ok(1));
        check(r#"[{"index":1,"score":0.9}]"#, Err(Wrong::Count { wanted: 2, got: 1 }));
        check(r#"[{"index":1,"score":0.9},{"index":1,"score":0.1}]"#, Err(Wrong::Index(1)));
        check(r#"[{"index":1,"score":0.9},{"index":2,"score":0.1}]"#, Err(Wrong::Index(2)));
        check(r#"[{"index":1,"score":1e999},{"index":0,"score":0.1}]"#, Err(Wrong::NotJson));
        check(r#"[{"index":1,"score":NaN},{"index":0,"score":0.1}]"#, Err(Wrong::NotJson));
        check(
            r#"[{"index":1,"score":null},{"index":0,"score":0.1}]"#,
            Err(Wrong::Shape("list of index and score")),
        );
        check(r#"[{"index":1,"score":0.9},{"index":0,"score":0.1}"#, Err(Wrong::NotJson));
    }

    #[test]
    fn each_text_has_labels() {
        let check = |answer: &str, expected: Result<usize, Wrong>| {
            assert_eq!(classes(answer.as_bytes(), 1).map(|rows| rows[0].len()), expected, "{answer}");
        };
        check(r#"[[{"label":"good","score":0.9},{"label":"bad","score":0.1}]]"#, Ok(2));
        check(r#"[[]]"#, Err(Wrong::Shape("label")));
        check(r#"[]"#, Err(Wrong::Count { wanted: 1, got: 0 }));
        check(r#"[[{"label":"good","score":-1e999}]]"#, Err(Wrong::NotJson));
        check(r#"{"error":"x"}"#, Err(Wrong::Shape("list of labels and scores for each text")));
    }
}
