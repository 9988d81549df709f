//! Answers of `POST /rerank` and `POST /predict`, as TEI has them: small, and so read by serde, which takes no number that is
//! not finite.

use serde::Deserialize;

use crate::scan::Wrong;

/// A text's score.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Ranked {
    /// The text's place among those that were asked about.
    pub index: usize,
    /// How well it matches.
    pub score: f64,
    /// The text, where it was asked for.
    #[serde(default)]
    pub text: Option<String>,
}

/// A label and how well it fits.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Class {
    /// The label.
    pub label: String,
    /// How well it fits.
    pub score: f64,
}

/// Every text of `count` once, in the order in which the server ranked them.
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

/// The labels of each of `count` texts.
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
