//! Reader of hand-edited TOML files that reports all problems at once, each with its line.
//!
//! Deserialising into structs would be shorter, but it stops at the first mistake and loses the lines. Instead the
//! readers walk the parser's tree, which has a span for each value: a reader records a problem in [`Problems`] and
//! continues. The catalogue, the deployments, the tenants and the drills are read this way.

pub(crate) mod residency;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::duration;
use crate::suggest::did_you_mean;

/// Problem in a file, with its fix.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Line, counted from one.
    pub line: usize,
    /// Description of the problem and of the fix.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

/// Problems found so far in one text.
pub struct Problems<'t> {
    text: &'t str,
    list: Vec<Problem>,
}

impl Problems<'_> {
    /// Records a problem at this span of the text.
    pub fn note(&mut self, at: Range<usize>, message: impl Into<String>) {
        let before = self.text.as_bytes().iter().take(at.start);
        let line = 1 + before.filter(|byte| **byte == b'\n').count();
        self.list.push(Problem { line, message: message.into() });
    }

    /// Returns `value` if there are no problems, otherwise all problems in the order of their lines.
    pub fn or<T>(mut self, value: impl FnOnce() -> T) -> Result<T, Vec<Problem>> {
        if self.list.is_empty() {
            Ok(value())
        } else {
            self.list.sort();
            self.list.dedup();
            Err(self.list)
        }
    }
}

/// Parses `text` as TOML. A duplicate key is recorded as a problem and its first value kept; after any other syntax
/// error only the parser's own errors are returned, because the tree would be unreliable.
pub fn parse(text: &str) -> Result<(Spanned<DeTable<'_>>, Problems<'_>), Vec<Problem>> {
    let mut problems = Problems { text, list: Vec::new() };
    let (tree, errors) = DeTable::parse_recoverable(text);
    let mut readable = true;
    for error in errors {
        let at = error.span().unwrap_or(0..0);
        if error.message() == "duplicate key" {
            let key = text.get(at.clone()).unwrap_or_default();
            problems.note(at, format!("duplicate key `{key}`: keep one of the two"));
        } else {
            readable = false;
            problems.note(at, format!("invalid TOML: {}", error.message()));
        }
    }
    if readable { Ok((tree, problems)) } else { Err(problems.list) }
}

/// Table being read, with its name for error messages.
pub struct Table<'d> {
    /// Name in error messages, such as "region aws/us-east-1".
    pub what: String,
    /// Keys and values.
    pub entries: &'d DeTable<'d>,
    /// Position in the text.
    pub span: Range<usize>,
}

impl<'d> Table<'d> {
    /// Returns `value` as a table, or records a problem.
    pub fn of(
        what: String,
        value: &'d Spanned<DeValue<'d>>,
        problems: &mut Problems<'_>,
    ) -> Option<Table<'d>> {
        match value.get_ref().as_table() {
            Some(entries) => Some(Table { what, entries, span: value.span() }),
            None => {
                problems.note(value.span(), format!("{what} is {}: write a table", kind(value)));
                None
            }
        }
    }

    /// Records a problem for every key that is not in `known`.
    pub fn refuse_other_keys(&self, known: &[&str], problems: &mut Problems<'_>) {
        for key in self.entries.keys().filter(|key| !known.contains(&key.get_ref().as_ref())) {
            let given = key.get_ref();
            let hint = did_you_mean(given, known.iter().copied());
            let keys = known.join(", ");
            problems
                .note(key.span(), format!("{}: unknown key `{given}`{hint}; the keys are {keys}", self.what));
        }
    }

    /// Returns the value of `key`; a missing key is a problem, reported with `example`.
    pub fn need(
        &self,
        key: &str,
        example: &str,
        problems: &mut Problems<'_>,
    ) -> Option<&'d Spanned<DeValue<'d>>> {
        let value = self.entries.get(key);
        if value.is_none() {
            problems.note(
                self.span.clone(),
                format!("{}: `{key}` is missing: write {key} = {example}", self.what),
            );
        }
        value
    }

    /// Returns the string of the required key `key`.
    pub fn need_text(
        &self,
        key: &str,
        example: &str,
        problems: &mut Problems<'_>,
    ) -> Option<(&'d str, Range<usize>)> {
        let value = self.need(key, example, problems)?;
        self.text(key, value, problems)
    }

    /// Returns the value of the required key `key`, parsed as a `T`.
    pub(crate) fn parsed<T: FromStr<Err: fmt::Display>>(
        &self,
        key: &str,
        example: &str,
        problems: &mut Problems<'_>,
    ) -> Option<T> {
        let (text, at) = self.need_text(key, example, problems)?;
        text.parse().map_err(|error| problems.note(at, format!("{}: `{key}`: {error}", self.what))).ok()
    }

    /// Returns `Some(None)` if `key` is absent, otherwise the result of `read`; `None` if `read` recorded a problem.
    pub(crate) fn optional<T>(
        &self,
        key: &str,
        read: impl Fn(&Table<'d>, &str, &'d Spanned<DeValue<'d>>, &mut Problems<'_>) -> Option<T>,
        problems: &mut Problems<'_>,
    ) -> Option<Option<T>> {
        match self.entries.get(key) {
            None => Some(None),
            Some(value) => read(self, key, value, problems).map(Some),
        }
    }

    /// Returns `value`, the value of `key`, as a string.
    pub fn text(
        &self,
        key: &str,
        value: &'d Spanned<DeValue<'d>>,
        problems: &mut Problems<'_>,
    ) -> Option<(&'d str, Range<usize>)> {
        match value.get_ref().as_str() {
            Some(text) => Some((text, value.span())),
            None => {
                problems.note(
                    value.span(),
                    format!("{}: `{key}` is {}: write a string in quotes", self.what, kind(value)),
                );
                None
            }
        }
    }

    /// Returns `value`, the value of `key`, as a list of strings; other items are recorded as problems and skipped.
    pub fn texts(
        &self,
        key: &str,
        value: &'d Spanned<DeValue<'d>>,
        problems: &mut Problems<'_>,
    ) -> Option<Vec<(&'d str, Range<usize>)>> {
        let Some(list) = value.get_ref().as_array() else {
            let message =
                format!("{}: `{key}` is {}: write a list of strings in brackets", self.what, kind(value));
            problems.note(value.span(), message);
            return None;
        };
        Some(list.iter().filter_map(|item| self.text(key, item, problems)).collect())
    }

    /// Returns `value`, the value of `key`, as a whole number.
    pub fn number(
        &self,
        key: &str,
        value: &'d Spanned<DeValue<'d>>,
        problems: &mut Problems<'_>,
    ) -> Option<u32> {
        let written = match value.get_ref() {
            DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str(),
            DeValue::Float(float) => float.as_str(),
            _ => {
                let message = format!("{}: `{key}` is {}: write a whole number", self.what, kind(value));
                problems.note(value.span(), message);
                return None;
            }
        };
        let number = written.parse().ok();
        if number.is_none() {
            let fix = format!("write a whole number from 0 to {}", u32::MAX);
            problems.note(value.span(), format!("{}: `{key}` is {written}: {fix}", self.what));
        }
        number
    }

    /// Returns `value`, the value of `key`, as a duration.
    pub fn time(
        &self,
        key: &str,
        value: &'d Spanned<DeValue<'d>>,
        problems: &mut Problems<'_>,
    ) -> Option<Duration> {
        self.time_or(key, value, "", problems)
    }

    /// Returns `value`, the value of `key`, as a duration, or `None` for `"never"`.
    pub fn time_or_never(
        &self,
        key: &str,
        value: &'d Spanned<DeValue<'d>>,
        problems: &mut Problems<'_>,
    ) -> Option<Option<Duration>> {
        if value.get_ref().as_str() == Some("never") {
            return Some(None);
        }
        self.time_or(key, value, ", or \"never\"", problems).map(Some)
    }

    fn time_or(
        &self,
        key: &str,
        value: &'d Spanned<DeValue<'d>>,
        or: &str,
        problems: &mut Problems<'_>,
    ) -> Option<Duration> {
        let (text, at) = self.text(key, value, problems)?;
        let time = duration::parse(text);
        if time.is_none() {
            let fix = format!("write a duration, as \"500ms\", \"180s\", \"5m\" or \"2h\"{or}");
            problems.note(at, format!("{}: `{key}` is `{text}`: {fix}", self.what));
        }
        time
    }
}

/// Returns the kind of a value, with its article.
fn kind(value: &Spanned<DeValue<'_>>) -> &'static str {
    match value.get_ref() {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}
