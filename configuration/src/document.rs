//! Parsed file and the problems found in it.

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::section::{Section, Table};

/// Problem in a file: key, problem and fix.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Name of the file, where it is known.
    pub file: Option<String>,
    /// Line, counted from one.
    pub line: usize,
    /// Key, problem and fix.
    pub message: String,
}

impl Problem {
    /// Adds the name of the file, unless the problem is in another file.
    #[must_use]
    pub fn in_file(self, file: &Path) -> Problem {
        Problem { file: self.file.or_else(|| Some(file.display().to_string())), ..self }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Problem { file, line, message } = self;
        match file {
            Some(file) => write!(f, "{file}:{line}: {message}"),
            None => write!(f, "line {line}: {message}"),
        }
    }
}

/// Returns the problems as lines, each with its file.
pub fn named(file: &Path, problems: Vec<Problem>) -> Vec<String> {
    problems.into_iter().map(|problem| problem.in_file(file).to_string()).collect()
}

/// Parsed file and the problems found in it so far.
pub struct Document<'t> {
    text: &'t str,
    tree: Spanned<DeTable<'t>>,
    /// Problems of this file, by position, and of files that it names.
    found: RefCell<Vec<(usize, String)>>,
    elsewhere: RefCell<Vec<Problem>>,
}

/// Node of the tree: the file itself, or a value.
enum Node<'d> {
    Table(&'d DeTable<'d>),
    Other(&'d DeValue<'d>),
}

impl<'d> From<&'d DeValue<'d>> for Node<'d> {
    fn from(value: &'d DeValue<'d>) -> Node<'d> {
        value.as_table().map_or(Node::Other(value), Node::Table)
    }
}

impl<'t> Document<'t> {
    /// Parses `text` as TOML. A duplicate key is recorded as a problem and its first value kept.
    ///
    /// # Errors
    ///
    /// The parser's own errors after any other syntax error, because the tree would be unreliable.
    pub fn parse(text: &'t str) -> Result<Document<'t>, Vec<Problem>> {
        let (tree, errors) = DeTable::parse_recoverable(text);
        let document = Document { text, tree, found: RefCell::default(), elsewhere: RefCell::default() };
        let mut readable = true;
        for error in errors {
            let at = error.span().unwrap_or(0..0);
            if error.message() == "duplicate key" {
                let key = text.get(at.clone()).unwrap_or_default();
                document.note(at, format!("{key}: duplicate key `{key}`; keep one of the two"));
            } else {
                readable = false;
                document.note(at, format!("invalid TOML: {}", error.message()));
            }
        }
        if readable { Ok(document) } else { Err(document.problems()) }
    }

    /// Parses `text` and reads a value from it.
    ///
    /// # Errors
    ///
    /// All problems, in the order of their lines.
    pub fn read<T>(text: &str, read: impl FnOnce(&Document<'_>) -> Option<T>) -> Result<T, Vec<Problem>> {
        let document = Document::parse(text)?;
        let value = read(&document);
        let problems = document.problems();
        value.filter(|_| problems.is_empty()).ok_or(problems)
    }

    /// Reads the whole file as one section.
    pub fn section<T: Section>(&self) -> Option<T> {
        Table { document: self, path: String::new(), entries: self.tree.get_ref(), span: 0..0 }.read()
    }

    /// Returns whether the key of this path is in the file.
    pub fn has(&self, path: &str) -> bool {
        self.resolve(path).complete
    }

    /// Returns whether no problem was found so far.
    pub fn is_valid(&self) -> bool {
        self.found.borrow().is_empty() && self.elsewhere.borrow().is_empty()
    }

    /// Records a problem of the key of this path. If the key is absent, the line is that of the table that it belongs to.
    pub fn problem(&self, path: &str, message: impl fmt::Display) {
        let Resolved { at, name, .. } = self.resolve(path);
        self.note(at, if name.is_empty() { message.to_string() } else { format!("{name}: {message}") });
    }

    /// Records messages that begin with the path of their key: `tls.key = "a" cannot be read`.
    pub fn problems_by_key(&self, messages: impl IntoIterator<Item = String>) {
        for message in messages {
            let end = message.find([' ', ':']).unwrap_or(message.len());
            let (path, rest) = message.split_at(end);
            self.problem(path, rest.trim_start_matches([' ', ':', '=']));
        }
    }

    /// Records that these keys of a table have no effect, with the reason.
    pub fn without_effect(&self, table: &str, keys: &[&str], reason: &str) {
        for path in keys.iter().map(|key| format!("{table}.{key}")).filter(|path| self.has(path)) {
            self.problem(&path, format!("has no effect {reason}; remove it"));
        }
    }

    /// Records problems of another file.
    pub fn problems_elsewhere(&self, file: &Path, problems: Vec<Problem>) {
        self.elsewhere.borrow_mut().extend(problems.into_iter().map(|problem| problem.in_file(file)));
    }

    /// Returns all problems, in the order of their lines; those of other files last.
    pub fn problems(&self) -> Vec<Problem> {
        let mut found = self.found.borrow().clone();
        found.sort();
        let (mut line, mut counted) = (1, 0);
        let mut problems = Vec::new();
        for (at, message) in found {
            let at = at.min(self.text.len());
            line += self.text.as_bytes()[counted..at].iter().filter(|byte| **byte == b'\n').count();
            counted = at;
            problems.push(Problem { file: None, line, message });
        }
        problems.extend(self.elsewhere.borrow().iter().cloned());
        problems.sort();
        problems.dedup();
        problems
    }

    /// Records a problem of this path at another position.
    pub(crate) fn problem_at(&self, at: Range<usize>, path: &str, message: String) {
        self.note(at, format!("{}: {message}", self.resolve(path).name));
    }

    fn note(&self, at: Range<usize>, message: String) {
        self.found.borrow_mut().push((at.start, message));
    }

    /// Returns the position of a path and its name in messages.
    fn resolve(&self, path: &str) -> Resolved {
        let (mut node, mut at, mut complete) = (Some(Node::Table(self.tree.get_ref())), 0..0, true);
        let (mut name, mut is_item) = (String::new(), false);
        for segment in path.split(['.', '[']).filter(|segment| !segment.is_empty()) {
            let index = segment.strip_suffix(']').and_then(|index| index.parse::<usize>().ok());
            let segment = &*segment.replace(DOT, ".");
            let next = match (&node, index) {
                (Some(Node::Table(table)), None) => table.get(segment),
                (Some(Node::Other(value)), Some(index)) => value.get(index),
                _ => None,
            };
            node = next.map(|next| Node::from(next.get_ref()));
            complete &= next.is_some();
            at = next.map_or(at, Spanned::span);
            let was_item =
                std::mem::replace(&mut is_item, matches!((index, &node), (Some(_), Some(Node::Table(_)))));
            match (index, &node) {
                (None, _) if name.is_empty() => name.push_str(segment),
                (None, _) => {
                    let separator = if was_item { ": " } else { "." };
                    name = format!("{name}{separator}{segment}");
                }
                (Some(index), Some(Node::Table(table))) => {
                    let label = table.get("name").and_then(|label| label.get_ref().as_str());
                    name = match label {
                        Some(label) => format!("{name} \"{label}\""),
                        None => format!("{name} {}", index + 1),
                    };
                }
                // An item of a list of plain values is named like the list.
                (Some(_), _) => {}
            }
        }
        Resolved { at, name, complete }
    }
}

/// Stands for a dot in a key of a path.
const DOT: char = '\u{1}';

/// Returns a key as a segment of a path.
pub fn segment(key: &str) -> String {
    key.replace('.', &DOT.to_string())
}

struct Resolved {
    at: Range<usize>,
    name: String,
    complete: bool,
}
