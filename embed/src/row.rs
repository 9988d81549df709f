//! Rows of an input: texts with optional ids, and rows that cannot be used.

use serde_json::{Number, Value};
use sha2::{Digest, Sha256};

/// Id of a row, as the input has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowId {
    /// Text.
    Text(String),
    /// Integer.
    Integer(Number),
}

impl RowId {
    /// Returns the id as text, for columns that hold text only.
    pub fn to_text(&self) -> String {
        match self {
            RowId::Text(text) => text.clone(),
            RowId::Integer(number) => number.to_string(),
        }
    }

    /// Returns the id as JSON.
    pub(crate) fn to_json(&self) -> Value {
        match self {
            RowId::Text(text) => Value::from(text.as_str()),
            RowId::Integer(number) => Value::from(number.clone()),
        }
    }
}

/// Text to embed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextRow {
    /// The text; not empty.
    pub text: String,
    /// The id, if ids are read.
    pub id: Option<RowId>,
}

/// Problem of one row; the rows after it can still be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowProblem {
    /// Column in the line, from 1, if it is known.
    pub column: Option<usize>,
    /// Statement of what is wrong and what is expected.
    pub reason: String,
}

impl RowProblem {
    /// Creates a problem without a column.
    pub(crate) fn new(reason: impl Into<String>) -> RowProblem {
        RowProblem { column: None, reason: reason.into() }
    }
}

/// Row of an input, valid or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsedRow {
    /// Line on which the row begins, from 1; absent for formats without lines.
    pub line: Option<u64>,
    /// The text, or the problem.
    pub content: Result<TextRow, RowProblem>,
}

impl ParsedRow {
    /// Creates a row; an empty text is a problem, because the API rejects empty inputs.
    pub(crate) fn new(line: Option<u64>, content: Result<TextRow, RowProblem>) -> ParsedRow {
        let content = content.and_then(|row| {
            if row.text.is_empty() {
                Err(RowProblem::new("the text is empty; give at least one character"))
            } else {
                Ok(row)
            }
        });
        ParsedRow { line, content }
    }

    /// Returns the bytes that the row occupies in a window.
    pub(crate) fn bytes(&self) -> usize {
        self.content.as_ref().map_or(0, |row| row.text.len())
    }
}

/// Digest of the rows read so far. Two inputs with the same rows have the same digest, whatever their formats.
#[derive(Clone, Default)]
pub(crate) struct RowDigest(Sha256);

impl RowDigest {
    /// Adds a row.
    pub(crate) fn add(&mut self, row: &ParsedRow) {
        let mut part = |tag: u8, bytes: &[u8]| {
            self.0.update([tag]);
            self.0.update((bytes.len() as u64).to_le_bytes());
            self.0.update(bytes);
        };
        match &row.content {
            Ok(TextRow { text, id }) => {
                part(b't', text.as_bytes());
                match id {
                    Some(RowId::Text(id)) => part(b's', id.as_bytes()),
                    Some(RowId::Integer(id)) => part(b'n', id.to_string().as_bytes()),
                    None => part(b'0', b""),
                }
            }
            Err(RowProblem { column: _, reason }) => part(b'p', reason.as_bytes()),
        }
    }

    /// Returns the digest of the rows so far in hexadecimal digits.
    pub(crate) fn hex(&self) -> String {
        self.0.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(rows: &[(&str, Option<RowId>)]) -> String {
        let mut digest = RowDigest::default();
        for (text, id) in rows {
            digest.add(&ParsedRow::new(None, Ok(TextRow { text: (*text).to_owned(), id: id.clone() })));
        }
        digest.hex()
    }

    #[test]
    fn texts_ids_and_their_limits_change_the_digest() {
        let (one, text) = (Some(RowId::Integer(1.into())), Some(RowId::Text("1".to_owned())));
        let all = [
            digest(&[]),
            digest(&[("a", None)]),
            digest(&[("a", one)]),
            digest(&[("a", text)]),
            digest(&[("a", None), ("b", None)]),
            digest(&[("ab", None)]),
            digest(&[("", None)]),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }

    #[test]
    fn an_empty_text_is_a_problem() {
        let row = ParsedRow::new(Some(3), Ok(TextRow { text: String::new(), id: None }));
        assert!(row.content.is_err_and(|problem| problem.reason.contains("empty")));
    }
}
