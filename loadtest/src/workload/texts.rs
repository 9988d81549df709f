//! Texts of requests, from a file or generated.
//!
//! A file contains one text per line; if its name ends in `.jsonl` or `.ndjson`, each line is an object with a string
//! `text`. The name decides, not the content, so that a plain text that begins with a brace stays a text. Empty lines
//! are skipped.
//!
//! Texts are stored as the JSON strings of request bodies, so that a body is assembled by copying.

use std::path::Path;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde::Deserialize;

use super::input_file::{InputFile, json};
use super::words::{TextLengths, WordList};

/// Number of generated texts: enough to make cached responses rare.
const GENERATED: usize = 10_000;

/// Texts of a run; at least one.
#[derive(Clone, Debug)]
pub struct TextSet {
    encoded: Vec<Box<str>>,
    source: String,
}

#[derive(Deserialize)]
struct TextLine {
    text: String,
}

impl TextSet {
    /// Reads a file, or returns all problems.
    pub fn read(path: &Path) -> Result<TextSet, Vec<String>> {
        let file = InputFile::read("--texts", path)?;
        let jsonl = path.extension().is_some_and(|extension| extension == "jsonl" || extension == "ndjson");
        let encoded = file.parse(file.lines(), |line| {
            if !jsonl {
                return Ok(encode(line));
            }
            let TextLine { text } = json(line, "{\"text\": \"…\"}")?;
            Ok(encode(&text))
        })?;
        if encoded.is_empty() {
            return Err(file.problem("contains no text; write one per line"));
        }
        Ok(TextSet { encoded, source: path.display().to_string() })
    }

    /// Generates texts of common words. Equal seeds give equal texts.
    pub fn generated(seed: u64, lengths: TextLengths) -> TextSet {
        TextSet::some(GENERATED, seed, lengths)
    }

    /// Generates `count` texts.
    pub(super) fn some(count: usize, seed: u64, lengths: TextLengths) -> TextSet {
        let (words, mut rng) = (WordList::new(), SmallRng::seed_from_u64(seed));
        let text = |_| {
            let tokens = lengths.draw(&mut rng);
            encode(&words.text(tokens, &mut rng))
        };
        let encoded = (0..count).map(text).collect();
        TextSet { encoded, source: format!("generated from seed {seed}") }
    }

    /// Creates a set of given texts.
    pub(crate) fn of<'a>(texts: impl Iterator<Item = &'a str>, source: String) -> TextSet {
        TextSet { encoded: texts.map(encode).collect(), source }
    }

    /// Returns the source of the texts, for the report.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the number of texts.
    pub fn count(&self) -> usize {
        self.encoded.len()
    }

    /// Returns the index of the first text of request `number`, with `inputs` texts per request.
    pub fn first(&self, number: u64, inputs: usize) -> usize {
        (u128::from(number) * inputs as u128 % self.encoded.len() as u128) as usize
    }

    /// Returns the `inputs` texts of request `number` as JSON strings. Requests cycle through the texts.
    pub fn of_request(&self, number: u64, inputs: usize) -> impl Iterator<Item = &str> {
        let (before, from) = self.encoded.split_at(self.first(number, inputs));
        from.iter().chain(before).cycle().take(inputs).map(|text| &**text)
    }
}

pub(super) fn encode(text: &str) -> Box<str> {
    serde_json::Value::from(text).to_string().into_boxed_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, content: &[u8], expected: Result<&[&str], &[&str]>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        match (TextSet::read(&path), expected) {
            (Ok(texts), Ok(expected)) => {
                assert_eq!(texts.of_request(0, expected.len()).collect::<Vec<_>>(), expected);
                assert_eq!(texts.count(), expected.len());
            }
            (Err(problems), Err(expected)) => {
                assert_eq!(problems.len(), expected.len(), "{problems:?}");
                for (problem, expected) in problems.iter().zip(expected) {
                    assert!(problem.contains(name) && problem.contains(expected), "{problem}");
                }
            }
            (got, _) => panic!("{name}: {got:?}"),
        }
    }

    #[test]
    fn a_line_of_a_text_file_is_a_text_even_if_it_looks_like_json() {
        check("a.txt", b"one \"quoted\"\r\n\n{two}\n", Ok(&[r#""one \"quoted\"""#, r#""{two}""#]));
    }

    #[test]
    fn a_line_of_jsonl_is_an_object_with_a_text() {
        check(
            "a.jsonl",
            b"{\"text\": \"one\"}\n\n{\"id\": 2, \"text\": \"two\"}\n",
            Ok(&[r#""one""#, r#""two""#]),
        );
    }

    #[test]
    fn invalid_lines_are_counted_and_the_first_are_reported() {
        check("a.jsonl", b"{\"text\": \"one\"}\nplain\n{\"text\": 3}\n", Err(&["line 2", "line 3"]));
        let eight = b"plain\n".repeat(8);
        check("a.jsonl", &eight, Err(&["line 1", "line 2", "line 3", "line 4", "line 5", "and 3 more"]));
    }

    #[test]
    fn a_file_without_texts_is_refused() {
        check("a.txt", b"\n  \n", Err(&["contains no text"]));
        check("a.txt", b"one\n\xff\n", Err(&["line 2 is not UTF-8"]));
        let problems = TextSet::read(Path::new("/no/such/file")).unwrap_err();
        assert!(problems.len() == 1 && problems[0].contains("cannot be read"), "{problems:?}");
    }

    #[test]
    fn requests_cycle_through_the_texts() {
        let texts = TextSet { encoded: ["a", "b", "c"].map(Box::from).into(), source: String::new() };
        let of = |number, inputs| texts.of_request(number, inputs).collect::<String>();
        assert_eq!([of(0, 2), of(1, 2), of(2, 2), of(3, 1), of(0, 7)], ["ab", "ca", "bc", "a", "abcabca"]);
    }

    #[test]
    fn generated_texts_depend_on_the_seed() {
        let texts = TextSet::generated(5, TextLengths::Query);
        assert_eq!(texts.source(), "generated from seed 5");
        let all = |texts: &TextSet| texts.of_request(0, texts.count()).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(all(&texts), all(&TextSet::generated(5, TextLengths::Query)));
        assert_ne!(all(&texts), all(&TextSet::generated(6, TextLengths::Query)));
    }
}
