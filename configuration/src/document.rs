//! Parsed file and the problems found in it.

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

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
pub struct ConfigFile<'t> {
    text: &'t str,
    pub(crate) tree: Spanned<DeTable<'t>>,
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

impl<'t> ConfigFile<'t> {
    /// Parses `text` as TOML. A duplicate key is recorded as a problem and its first value kept.
    ///
    /// # Errors
    ///
    /// The parser's own errors after any other syntax error, because the tree would be unreliable.
    pub fn parse(text: &'t str) -> Result<ConfigFile<'t>, Vec<Problem>> {
        let (tree, errors) = DeTable::parse_recoverable(text);
        let document = ConfigFile { text, tree, found: RefCell::default(), elsewhere: RefCell::default() };
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
    pub fn read<T>(text: &str, read: impl FnOnce(&ConfigFile<'_>) -> Option<T>) -> Result<T, Vec<Problem>> {
        let document = ConfigFile::parse(text)?;
        let value = read(&document);
        let problems = document.problems();
        value.filter(|_| problems.is_empty()).ok_or(problems)
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

    /// Records messages that begin with the path of their key: `tls.key = "a" cannot be read`, `[tls] needs a key`.
    pub fn problems_by_key(&self, messages: impl IntoIterator<Item = String>) {
        for message in messages {
            let end = message.find([' ', ':']).unwrap_or(message.len());
            let (path, rest) = message.split_at(end);
            let table = path.strip_prefix('[').and_then(|path| path.strip_suffix(']'));
            self.problem(table.unwrap_or(path), rest.trim_start_matches([' ', ':', '=']));
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    crate::section! {
        /// File of the tests.
        partial struct File {
            /// Count.
            count: u32 = 7, in 1..=9;
            /// Time.
            time: Duration, in Duration::from_secs(1).., like "\"5s\"";
            /// Rows.
            row: Vec<Row> = Vec::new(), in 0..=3;
            /// Words.
            words: Option<Vec<String>>, in 1.., check is_lower;
        }
    }

    crate::section! {
        /// Row.
        #[derive(Debug, PartialEq, Eq)]
        struct Row {
            /// Name.
            name: String, like "\"a\"";
            /// Size, with a name that is a keyword.
            size ("type"): u8 = 1;
        }
    }

    crate::section! {
        /// File with a path.
        #[derive(Debug)]
        struct Folder {
            /// Folder.
            data: std::path::PathBuf, like "\"data\"";
        }
    }

    fn is_lower(word: &str) -> Result<(), String> {
        if *word == word.to_lowercase() {
            Ok(())
        } else {
            Err("has capital letters; write small ones".to_owned())
        }
    }

    fn problems(text: &str) -> Vec<String> {
        let read = ConfigFile::read(text, |document| document.section::<File>());
        read.err().unwrap_or_default().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_valid_file_has_its_values_and_defaults() {
        let text = "time = \"1d\"\nwords = [\"a\"]\n[[row]]\nname = \"x\"\ntype = 2\n";
        let file: File = ConfigFile::read(text, |document| document.section()).expect("a valid file");
        assert_eq!((file.count, file.time), (Some(7), Some(Duration::from_secs(86_400))));
        assert_eq!(file.row, Some(vec![Row { name: "x".to_owned(), size: 2 }]));
        assert_eq!(file.words, Some(Some(vec!["a".to_owned()])));
    }

    #[test]
    fn all_problems_are_reported_with_line_key_and_fix() {
        let text = "count = 10\ncuont = 1\nwords = [\"a\",\n  \"B\"]\n[[row]]\ntype = 1\n[[row]]\nname = \"x\"\ntype = \"y\"\n";
        assert_eq!(
            problems(text),
            [
                "line 1: count: 10 is out of range; write a whole number from 1 to 9",
                "line 1: time: is missing; write time = \"5s\"",
                "line 2: cuont: unknown key `cuont`; did you mean count?; the keys are count, time, row, words",
                "line 4: words: \"B\" has capital letters; write small ones",
                "line 5: row 1: name: is missing; write name = \"a\"",
                "line 9: row \"x\": type: is a string; write a whole number from 0 to 255",
            ]
        );
    }

    #[test]
    fn an_empty_path_and_one_with_a_null_character_are_reported() {
        let read = |text| ConfigFile::read(text, |document| document.section::<Folder>());
        assert_eq!(read("data = \"data\"").expect("a valid file").data, Path::new("data"));
        for (text, shown) in [("data = \"\"", r#""""#), ("data = \"a\\u0000b\"", r#""a\0b""#)] {
            let found = read(text).expect_err("no path");
            let expected = format!("data: {shown} is not a path; write the path of a file or a folder");
            assert_eq!(found[0].message, expected);
        }
    }

    #[test]
    fn a_duplicate_key_is_reported_and_invalid_toml_alone() {
        let found = problems("time = \"5s\"\ntime = \"6s\"\ncount = 0\n");
        assert_eq!(found.len(), 2, "{found:#?}");
        assert!(found[0].contains("line 2: time: duplicate key `time`; keep one"), "{found:#?}");
        let found = problems("time = \n[[row\n");
        assert!(found.iter().all(|problem| problem.contains("invalid TOML")), "{found:#?}");
        let rows = "[[row]]\nname = \"a\"\n".repeat(4);
        assert!(
            problems(&format!("time = \"5s\"\n{rows}"))[0].contains("row: has 4 entries; write at most 3")
        );
    }

    #[test]
    fn problems_of_a_path_are_at_its_key_or_at_the_table_that_misses_it() {
        let document = ConfigFile::parse("a = 1\n[b]\nc = [1,\n2]\n\"d.e\" = 3\n").expect("TOML");
        for path in ["b.c[1]", "b.missing", "a", &format!("b.{}", segment("d.e"))] {
            document.problem(path, "problem");
        }
        document.problems_by_key(["[b] needs a key".to_owned(), "b.c[0] = 1 is odd".to_owned()]);
        document.problems_elsewhere(
            Path::new("other.toml"),
            vec![Problem { file: None, line: 3, message: "x".to_owned() }],
        );
        let found: Vec<_> = document.problems().iter().map(ToString::to_string).collect();
        let expected = [
            "line 1: a: problem",
            "line 2: b.missing: problem",
            "line 2: b: needs a key",
            "line 3: b.c: 1 is odd",
            "line 4: b.c: problem",
            "line 5: b.d.e: problem",
            "other.toml:3: x",
        ];
        assert_eq!(found, expected);
        assert!(document.has("b.c[1]") && !document.has("b.c[2]") && !document.has("c"));
    }
}
