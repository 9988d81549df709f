//! Reading the TOML files that people edit, so that every mistake is told at once and with its line.
//!
//! Deserialising into structs would be shorter, but it stops at the first mistake and loses the lines. Here the parser's
//! tree, which knows where each value stands, is walked by hand: whoever reads a value notes what is wrong with it in
//! [`Problems`] and goes on. The catalogue, the deployments and the drills are read this way.

pub(crate) mod residency;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::duration;
use crate::suggest::did_you_mean;

/// One thing that is wrong with a file, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The line, counted from one.
    pub line: usize,
    /// What is wrong there and what to write instead.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

/// What is wrong with the text read so far.
pub struct Problems<'t> {
    text: &'t str,
    list: Vec<Problem>,
}

impl Problems<'_> {
    /// Notes a problem at this place of the text.
    pub fn note(&mut self, at: Range<usize>, message: impl Into<String>) {
        let before = self.text.as_bytes().iter().take(at.start);
        let line = 1 + before.filter(|byte| **byte == b'\n').count();
        self.list.push(Problem { line, message: message.into() });
    }

    /// `value` if nothing was wrong, otherwise everything that was, from the top of the file to its end.
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

/// Parses `text` as far as it goes. A key that stands twice is noted and the first one kept; anything worse leaves no
/// tree that could be trusted, and the parser's own complaints are all there is.
pub fn parse(text: &str) -> Result<(Spanned<DeTable<'_>>, Problems<'_>), Vec<Problem>> {
    let mut problems = Problems { text, list: Vec::new() };
    let (tree, errors) = DeTable::parse_recoverable(text);
    let mut readable = true;
    for error in errors {
        let at = error.span().unwrap_or(0..0);
        if error.message() == "duplicate key" {
            let key = text.get(at.clone()).unwrap_or_default();
            problems.note(at, format!("`{key}` stands here a second time: keep one of the two"));
        } else {
            readable = false;
            problems.note(at, format!("this is not TOML: {}", error.message()));
        }
    }
    if readable { Ok((tree, problems)) } else { Err(problems.list) }
}

/// A table being read, and what to call it in a complaint.
pub struct Table<'d> {
    /// Such as "region aws/us-east-1".
    pub what: String,
    /// Its keys and what stands under them.
    pub entries: &'d DeTable<'d>,
    /// Where it stands.
    pub span: Range<usize>,
}

impl<'d> Table<'d> {
    /// `value` as a table.
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

    /// Notes every key that is not one of these.
    pub fn refuse_other_keys(&self, known: &[&str], problems: &mut Problems<'_>) {
        for key in self.entries.keys().filter(|key| !known.contains(&key.get_ref().as_ref())) {
            let given = key.get_ref();
            let hint = did_you_mean(given, known.iter().copied());
            let keys = known.join(", ");
            problems
                .note(key.span(), format!("{}: unknown key `{given}`{hint}; the keys are {keys}", self.what));
        }
    }

    /// The value of `key`; a missing one is noted with an example of what to write.
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

    /// The text under `key`, which must be there.
    pub fn need_text(
        &self,
        key: &str,
        example: &str,
        problems: &mut Problems<'_>,
    ) -> Option<(&'d str, Range<usize>)> {
        let value = self.need(key, example, problems)?;
        self.text(key, value, problems)
    }

    /// The text under `key` as a `T`, which must be there.
    pub(crate) fn parsed<T: FromStr<Err: fmt::Display>>(
        &self,
        key: &str,
        example: &str,
        problems: &mut Problems<'_>,
    ) -> Option<T> {
        let (text, at) = self.need_text(key, example, problems)?;
        text.parse().map_err(|error| problems.note(at, format!("{}: `{key}`: {error}", self.what))).ok()
    }

    /// What `read` makes of the value of `key`, if there is one; `None` when it is there and wrong, which was noted.
    pub(crate) fn if_there<T>(
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

    /// `value`, which stands under `key`, as text.
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
                    format!("{}: `{key}` is {}: write a text in quotes", self.what, kind(value)),
                );
                None
            }
        }
    }

    /// `value`, which stands under `key`, as a list of texts; what is no text is noted and left out.
    pub fn texts(
        &self,
        key: &str,
        value: &'d Spanned<DeValue<'d>>,
        problems: &mut Problems<'_>,
    ) -> Option<Vec<(&'d str, Range<usize>)>> {
        let Some(list) = value.get_ref().as_array() else {
            let message =
                format!("{}: `{key}` is {}: write a list of texts in brackets", self.what, kind(value));
            problems.note(value.span(), message);
            return None;
        };
        Some(list.iter().filter_map(|item| self.text(key, item, problems)).collect())
    }

    /// `value`, which stands under `key`, as a whole number.
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
            let wanted = format!("write a whole number from 0 to {}", u32::MAX);
            problems.note(value.span(), format!("{}: `{key}` is {written}: {wanted}", self.what));
        }
        number
    }

    /// `value`, which stands under `key`, as a length of time.
    pub fn time(
        &self,
        key: &str,
        value: &'d Spanned<DeValue<'d>>,
        problems: &mut Problems<'_>,
    ) -> Option<Duration> {
        self.time_or(key, value, "", problems)
    }

    /// `value`, which stands under `key`, as a length of time, or as none at all.
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
            let wanted = format!("write a time, as \"500ms\", \"180s\", \"5m\" or \"2h\"{or}");
            problems.note(at, format!("{}: `{key}` is `{text}`: {wanted}", self.what));
        }
        time
    }
}

/// What a value is, with its article.
fn kind(value: &Spanned<DeValue<'_>>) -> &'static str {
    match value.get_ref() {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}
