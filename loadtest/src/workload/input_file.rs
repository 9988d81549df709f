//! Input files of a run: bounded in size, read line by line, with all problems reported.

use std::fmt::Display;
use std::path::Path;

use serde::Deserialize;

/// Maximum size of an input file. Its content is held in memory twice: as read, and encoded.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// Maximum number of reported problems per file; further ones are only counted.
const PROBLEMS_NAMED_MAX: usize = 5;

/// Line of a file, with its number from 1.
pub(super) type Line<'a> = (usize, &'a str);

/// Content of an input file.
pub(super) struct InputFile<'a> {
    option: &'static str,
    path: &'a Path,
    content: String,
}

impl InputFile<'_> {
    /// Reads the file that was given with `option`.
    pub(super) fn read<'a>(option: &'static str, path: &'a Path) -> Result<InputFile<'a>, Vec<String>> {
        let mut file = InputFile { option, path, content: String::new() };
        let unreadable = |error: std::io::Error| file.problem(format_args!("cannot be read: {error}"));
        let bytes = std::fs::metadata(path).map_err(unreadable)?.len();
        if bytes > FILE_BYTES_MAX {
            let problem = format_args!("has {bytes} bytes; the limit is {FILE_BYTES_MAX}, split the file");
            return Err(file.problem(problem));
        }
        let content = String::from_utf8(std::fs::read(path).map_err(unreadable)?);
        file.content = content.map_err(|error| {
            let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
            file.problem(format_args!("line {line} is not UTF-8; convert the file to UTF-8"))
        })?;
        Ok(file)
    }

    /// Returns a problem of this file, as a list.
    pub(super) fn problem(&self, problem: impl Display) -> Vec<String> {
        vec![format!("{} {}: {problem}", self.option, self.path.display())]
    }

    /// Returns the lines that are not empty.
    pub(super) fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        let lines = self.content.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        lines.map(|(index, line)| (index + 1, line))
    }

    /// Parses `lines`, or returns the first problems and the number of the others.
    pub(super) fn parse<'a, T>(
        &self,
        lines: impl Iterator<Item = Line<'a>>,
        read: impl Fn(&'a str) -> Result<T, String>,
    ) -> Result<Vec<T>, Vec<String>> {
        let (mut parsed, mut problems, mut invalid) = (Vec::new(), Vec::new(), 0);
        for (number, line) in lines {
            match read(line) {
                Ok(line) => parsed.push(line),
                Err(problem) => {
                    invalid += 1;
                    if invalid <= PROBLEMS_NAMED_MAX {
                        problems.extend(self.problem(format_args!("line {number}: {problem}")));
                    }
                }
            }
        }
        if invalid > PROBLEMS_NAMED_MAX {
            let more = invalid - PROBLEMS_NAMED_MAX;
            problems.extend(self.problem(format_args!("and {more} more lines like these")));
        }
        if problems.is_empty() { Ok(parsed) } else { Err(problems) }
    }
}

/// Parses a line of JSON.
pub(super) fn json<'a, T: Deserialize<'a>>(line: &'a str, expected: &str) -> Result<T, String> {
    serde_json::from_str(line).map_err(|error| format!("is not {expected}: {error}"))
}
