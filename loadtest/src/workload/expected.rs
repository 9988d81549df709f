//! Expected vectors: a file with one JSON object per line, `{"text": "…", "embedding": [0.1, …]}`.
//!
//! They detect a deployment that responds quickly with another model's vectors, or with rows of another request, which
//! no other check finds.

use std::path::Path;

use serde::Deserialize;

use super::input_file::{InputFile, json};
use super::texts::TextSet;

/// Default tolerance per number: int8 and f32 variants of one model differ by less in each of the 384 numbers of a unit
/// vector.
pub const TOLERANCE: f32 = 0.02;

/// Expected vector of each text, by index.
#[derive(Debug, PartialEq)]
pub struct ExpectedVectors {
    rows: Vec<Vec<f32>>,
    tolerance: f32,
}

#[derive(Deserialize)]
struct ExpectedLine {
    text: String,
    embedding: Vec<f32>,
}

impl ExpectedVectors {
    /// Reads a file of texts with their vectors.
    pub fn read(path: &Path, tolerance: f32) -> Result<(TextSet, ExpectedVectors), Vec<String>> {
        if !(tolerance.is_finite() && tolerance >= 0.0) {
            return Err(vec![format!("--tolerance {tolerance}: write a number from 0, such as {TOLERANCE}")]);
        }
        let file = InputFile::read("--expect", path)?;
        let read = |line| json::<ExpectedLine>(line, "{\"text\": \"…\", \"embedding\": […]}");
        let lines = file.parse(file.lines(), read)?;
        let dimensions = lines.first().map(|line| line.embedding.len());
        if let Some(odd) = lines.iter().position(|line| Some(line.embedding.len()) != dimensions) {
            let problem = format_args!("the vector of text {} differs in length from the first", odd + 1);
            return Err(file.problem(problem));
        }
        if lines.is_empty() {
            return Err(file.problem("contains no text; write one per line with its vector"));
        }
        let texts = TextSet::of(lines.iter().map(|line| &*line.text), path.display().to_string());
        let rows = lines.into_iter().map(|line| line.embedding).collect();
        Ok((texts, ExpectedVectors { rows, tolerance }))
    }

    /// Returns whether `row` matches the expected vector of the text with this index.
    pub(crate) fn matches(&self, index: usize, row: &[f32]) -> bool {
        let expected = &self.rows[index % self.rows.len()];
        expected.len() == row.len()
            && expected.iter().zip(row).all(|(expected, got)| (expected - got).abs() <= self.tolerance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &str, tolerance: f32) -> Result<(TextSet, ExpectedVectors), Vec<String>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("expected.jsonl");
        std::fs::write(&path, content).unwrap();
        ExpectedVectors::read(&path, tolerance)
    }

    #[test]
    fn a_row_matches_within_the_tolerance() {
        let lines = "{\"text\":\"a\",\"embedding\":[0.5,1.0]}\n\n{\"text\":\"b\",\"embedding\":[0.0,0.25]}\n";
        let (texts, vectors) = read(lines, 0.125).unwrap();
        assert_eq!(texts.of_request(0, 2).collect::<Vec<_>>(), ["\"a\"", "\"b\""]);
        assert!(vectors.matches(0, &[0.625, 0.875]) && vectors.matches(3, &[0.0, 0.25]));
        assert!(!vectors.matches(0, &[0.63, 1.0]), "one past the tolerance");
        assert!(!vectors.matches(0, &[0.5]) && !vectors.matches(0, &[f32::NAN, 1.0]));
    }

    #[test]
    fn invalid_files_are_rejected() {
        let check = |content: &str, tolerance: f32, expected: &str| {
            let problems = read(content, tolerance).map(|_| ()).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains(expected), "{expected} in {problems:?}");
        };
        check("", 0.1, "contains no text");
        check("{\"text\":\"a\"}", 0.1, "line 1");
        check("{\"text\":\"a\",\"embedding\":[1]}\n{\"text\":\"b\",\"embedding\":[1,2]}", 0.1, "text 2");
        check("", -0.1, "--tolerance");
    }
}
