//! Readers of lines: JSON lines, and plain text with one text per line.

use std::io::{BufRead, BufReader, Read};

use serde_json::Value;

use super::bounded_lines::{BoundedLine, BoundedLines};
use super::source::{ByteCount, CountedInput, FieldNames, InputError, ROW_BYTES_MAX, TextReader};
use crate::row::{ParsedRow, RowId, RowProblem, TextRow};

/// Reader of JSON lines: an object with the field, or a string. Lines of white space are no rows.
pub(super) struct JsonLinesReader<R> {
    name: String,
    lines: BoundedLines<BufReader<CountedInput<R>>>,
    count: ByteCount,
    fields: FieldNames,
}

impl<R: Read> JsonLinesReader<R> {
    /// Reads an input of `total` bytes.
    pub(super) fn new(name: String, input: R, total: Option<u64>, fields: FieldNames) -> JsonLinesReader<R> {
        let (input, count) = CountedInput::new(input, total);
        JsonLinesReader {
            name,
            lines: BoundedLines::new(BufReader::new(input), ROW_BYTES_MAX),
            count,
            fields,
        }
    }
}

impl<R: Read> TextReader for JsonLinesReader<R> {
    fn next_row(&mut self) -> Result<Option<ParsedRow>, InputError> {
        loop {
            let Some((line, number)) = next_line(&mut self.lines, &self.name)? else { return Ok(None) };
            let content = match line {
                Ok(bytes) if bytes.iter().all(u8::is_ascii_whitespace) => continue,
                Ok(bytes) => parse(bytes, &self.fields),
                Err(problem) => Err(problem),
            };
            return Ok(Some(ParsedRow::new(Some(number), content)));
        }
    }

    fn fraction(&self) -> Option<f64> {
        self.count.fraction()
    }
}

/// Reader of plain text. Every line is a row, so that row numbers are line numbers.
pub(super) struct PlainLinesReader<R> {
    name: String,
    lines: BoundedLines<BufReader<CountedInput<R>>>,
    count: ByteCount,
}

impl<R: Read> PlainLinesReader<R> {
    /// Reads an input of `total` bytes.
    pub(super) fn new(name: String, input: R, total: Option<u64>) -> PlainLinesReader<R> {
        let (input, count) = CountedInput::new(input, total);
        PlainLinesReader { name, lines: BoundedLines::new(BufReader::new(input), ROW_BYTES_MAX), count }
    }
}

impl<R: Read> TextReader for PlainLinesReader<R> {
    fn next_row(&mut self) -> Result<Option<ParsedRow>, InputError> {
        let Some((line, number)) = next_line(&mut self.lines, &self.name)? else { return Ok(None) };
        let content = line.and_then(|bytes| Ok(TextRow { text: decoded(bytes, 0)?.to_owned(), id: None }));
        Ok(Some(ParsedRow::new(Some(number), content)))
    }

    fn fraction(&self) -> Option<f64> {
        self.count.fraction()
    }
}

/// Line, or the problem of a line that is too long.
type LineContent<'a> = Result<&'a [u8], RowProblem>;

/// Returns the next line and its number.
fn next_line<'a, R: BufRead>(
    lines: &'a mut BoundedLines<R>,
    name: &str,
) -> Result<Option<(LineContent<'a>, u64)>, InputError> {
    let number = lines.number + 1;
    let line = lines.next_line().map_err(|reason| InputError::Read { name: name.to_owned(), reason })?;
    Ok(line.map(|line| match line {
        BoundedLine::Complete(bytes) => (Ok(bytes), number),
        BoundedLine::TooLong => (Err(RowProblem::new(too_long())), number),
    }))
}

fn too_long() -> String {
    format!("the line is longer than {} MiB, the limit of a row; split the text", ROW_BYTES_MAX >> 20)
}

/// Decodes UTF-8; `before` bytes of the line precede these.
fn decoded(bytes: &[u8], before: usize) -> Result<&str, RowProblem> {
    std::str::from_utf8(bytes).map_err(|error| RowProblem {
        column: Some(before + error.valid_up_to() + 1),
        reason: "the line is not UTF-8; convert the file to UTF-8".to_owned(),
    })
}

fn parse(line: &[u8], fields: &FieldNames) -> Result<TextRow, RowProblem> {
    let FieldNames { text: field, id: id_field } = fields;
    let text = decoded(line, 0)?;
    let value: Value = serde_json::from_str(text).map_err(|error| {
        // The text of the error ends with its position, which the problem states by itself.
        let message = error.to_string();
        let message = message.rsplit_once(" at line ").map_or(message.as_str(), |(message, _)| message);
        RowProblem {
            column: Some(error.column().max(1)),
            reason: format!(
                "not valid JSON: {message}; expected an object with the field {field:?}, or a string"
            ),
        }
    })?;
    let mut object = match value {
        Value::String(text) if id_field.is_none() => return Ok(TextRow { text, id: None }),
        Value::Object(object) => object,
        other => {
            let expected = match id_field {
                Some(id) => format!("an object with the fields {field:?} and {id:?}"),
                None => format!("an object with the field {field:?}, or a string"),
            };
            return Err(RowProblem::new(format!("found {}; expected {expected}", kind(Some(&other)))));
        }
    };
    let id = match id_field.as_ref().map(|name| (name, object.get(name))) {
        None => None,
        Some((_, Some(Value::String(id)))) => Some(RowId::Text(id.clone())),
        Some((_, Some(Value::Number(id)))) if !id.is_f64() => Some(RowId::Integer(id.clone())),
        Some((name, other)) => {
            let found = kind(other);
            return Err(RowProblem::new(format!(
                "the field {name:?} is {found}; expected a string or an integer"
            )));
        }
    };
    match object.remove(field) {
        Some(Value::String(text)) => Ok(TextRow { text, id }),
        other => {
            let found = kind(other.as_ref());
            Err(RowProblem::new(format!("the field {field:?} is {found}; expected a string")))
        }
    }
}

fn kind(value: Option<&Value>) -> &'static str {
    match value {
        None => "missing",
        Some(Value::Null) => "null",
        Some(Value::Bool(_)) => "a boolean",
        Some(Value::Number(number)) if number.is_f64() => "a fraction",
        Some(Value::Number(_)) => "an integer",
        Some(Value::String(_)) => "a string",
        Some(Value::Array(_)) => "a list",
        Some(Value::Object(_)) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], id: Option<&str>) -> Vec<ParsedRow> {
        let fields = FieldNames { text: "text".to_owned(), id: id.map(str::to_owned) };
        all(&mut JsonLinesReader::new("f".to_owned(), bytes, None, fields))
    }

    fn all(reader: &mut dyn TextReader) -> Vec<ParsedRow> {
        std::iter::from_fn(|| reader.next_row().expect("a slice")).collect()
    }

    fn texts(rows: &[ParsedRow]) -> Vec<(u64, Option<&str>)> {
        let text = |row: &ParsedRow| row.line.expect("a line");
        rows.iter().map(|row| (text(row), row.content.as_ref().ok().map(|row| row.text.as_str()))).collect()
    }

    #[test]
    fn objects_and_strings_are_rows_and_blank_lines_are_not() {
        let rows =
            read(b"\xef\xbb\xbf{\"text\": \"a\\nb\", \"x\": [1]}\r\n\n  \t\r\n\"c\"\n{\"text\":\"d\"}", None);
        assert_eq!(texts(&rows), [(1, Some("a\nb")), (4, Some("c")), (5, Some("d"))]);
    }

    #[test]
    fn a_broken_row_names_its_line_its_column_and_what_is_expected() {
        let check = |line: &[u8], column: Option<usize>, parts: &[&str]| {
            let bytes = [b"\"good\"\n", line, b"\n\"good\"\n"].concat();
            let rows = read(&bytes, None);
            assert_eq!(texts(&rows), [(1, Some("good")), (2, None), (3, Some("good"))]);
            let problem = rows[1].content.clone().expect_err("a problem");
            assert_eq!(problem.column, column, "{problem:?}");
            assert!(parts.iter().all(|part| problem.reason.contains(part)), "{problem:?}");
        };
        check(b"{\"text\": \"a\"", Some(12), &["not valid JSON", "\"text\""]);
        check(b"{\"text\": \"a\"} x", Some(15), &["trailing characters"]);
        check(b"{\"text\": \"\xff\"}", Some(11), &["UTF-8"]);
        check(b"\"\\ud800\"", Some(8), &["not valid JSON"]);
        check(b"{\"txt\": \"a\"}", None, &["\"text\" is missing", "expected a string"]);
        check(b"{\"text\": 1}", None, &["\"text\" is an integer"]);
        check(b"{\"text\": null}", None, &["\"text\" is null"]);
        check(b"[\"a\"]", None, &["found a list"]);
        check(b"{\"text\": \"\"}", None, &["empty"]);
        check(b"a\0b", Some(1), &["not valid JSON"]);
    }

    #[test]
    fn ids_are_strings_or_integers() {
        let rows = read(b"{\"text\":\"a\",\"id\":\"x\"}\n{\"text\":\"a\",\"id\":-7}\n", Some("id"));
        let ids: Vec<_> = rows.iter().map(|row| row.content.as_ref().expect("a row").id.clone()).collect();
        assert_eq!(ids, [Some(RowId::Text("x".to_owned())), Some(RowId::Integer((-7).into()))]);
        for line in
            ["\"a\"", "{\"text\":\"a\"}", "{\"text\":\"a\",\"id\":1.5}", "{\"text\":\"a\",\"id\":null}"]
        {
            let rows = read(line.as_bytes(), Some("id"));
            let problem = rows[0].content.clone().expect_err(line);
            assert!(problem.reason.contains("\"id\""), "{problem:?}");
        }
    }

    #[test]
    fn a_line_past_the_limit_is_a_problem_and_the_next_one_is_read() {
        let at = |bytes: usize| format!("\"{}\"", "a".repeat(bytes - 2));
        let (fits, exceeds) = (at(ROW_BYTES_MAX), at(ROW_BYTES_MAX + 1));
        let rows = read(format!("{fits}\n{exceeds}\n\"b\"\n").as_bytes(), None);
        assert!(rows[0].content.is_ok());
        assert!(rows[1].content.as_ref().is_err_and(|problem| problem.reason.contains("16 MiB")));
        assert_eq!(texts(&rows[2..]), [(3, Some("b"))]);
    }

    #[test]
    fn every_line_of_plain_text_is_a_row() {
        let mut reader = PlainLinesReader::new("f".to_owned(), &b"a\r\n\n{\"text\": 1}\n\xff\n b "[..], None);
        let rows = all(&mut reader);
        assert_eq!(
            texts(&rows),
            [(1, Some("a")), (2, None), (3, Some("{\"text\": 1}")), (4, None), (5, Some(" b "))]
        );
    }

    #[test]
    fn the_fraction_grows_to_one() {
        let bytes = b"a\nb\n";
        let mut reader = PlainLinesReader::new("f".to_owned(), &bytes[..], Some(4));
        assert_eq!(reader.fraction(), Some(0.0));
        assert_eq!(all(&mut reader).len(), 2);
        assert_eq!(reader.fraction(), Some(1.0));
    }
}
