//! Recorded trace: start time and size of each request.
//!
//! The format is CSV with a header line (`at_s,tokens,inputs`) or JSON lines (`{"at_s": 0.25, "tokens": 12, "inputs":
//! 1}`), by the file name. Only the start is required; the defaults are 12 tokens and one input. Traces do not, and
//! should not, contain the texts themselves: texts of the recorded lengths are generated.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

use super::INPUTS_MAX;
use super::input_file::{InputFile, json};
use super::texts::TextSet;
use super::words::TextLengths;
use crate::limits::DURATION_MAX;

/// Maximum requests of a trace.
pub const REQUESTS_MAX: usize = 10_000_000;

/// Maximum tokens of a generated text.
pub const TOKENS_MAX: usize = 8192;

/// Number of generated texts per length: enough to make cached responses rare.
const TEXTS_PER_LENGTH: usize = 64;

/// Line of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct TraceLine {
    at_s: f64,
    #[serde(default = "default_tokens")]
    tokens: usize,
    #[serde(default = "default_inputs")]
    inputs: usize,
}

fn default_tokens() -> usize {
    12
}

fn default_inputs() -> usize {
    1
}

/// Request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TraceRequest {
    /// Start, since the start of the run.
    pub at: Duration,
    /// Tokens per text.
    pub tokens: usize,
    /// Number of texts.
    pub inputs: usize,
}

/// Requests in order of time, with generated texts of their lengths; at least one.
#[derive(Clone, Debug)]
pub struct Trace {
    requests: Arc<[TraceRequest]>,
    texts: Arc<BTreeMap<usize, TextSet>>,
}

impl Trace {
    /// Reads a file, or returns all problems.
    pub fn read(path: &Path, seed: u64) -> Result<Trace, Vec<String>> {
        let file = InputFile::read("--trace", path)?;
        let csv = path.extension().is_some_and(|extension| extension == "csv");
        let requests = if csv {
            csv_requests(&file)?
        } else {
            file.parse(file.lines(), |line| checked(json(line, "a request")?))?
        };
        if requests.is_empty() {
            return Err(file.problem("contains no request; write one per line as at_s,tokens,inputs"));
        }
        if requests.len() > REQUESTS_MAX {
            let problem = format_args!("has {} requests; the limit is {REQUESTS_MAX}", requests.len());
            return Err(file.problem(problem));
        }
        Ok(Trace::of(requests, seed))
    }

    fn of(mut requests: Vec<TraceRequest>, seed: u64) -> Trace {
        requests.sort();
        let mut texts = BTreeMap::new();
        for TraceRequest { tokens, .. } in &requests {
            texts.entry(*tokens).or_insert_with(|| {
                TextSet::some(TEXTS_PER_LENGTH, seed ^ *tokens as u64, TextLengths::Exactly(*tokens))
            });
        }
        Trace { requests: requests.into(), texts: Arc::new(texts) }
    }

    /// Returns the starts, in order.
    pub fn starts(&self) -> impl Iterator<Item = Duration> + use<> {
        let requests = Arc::clone(&self.requests);
        (0..requests.len()).map(move |index| requests[index].at)
    }

    /// Returns the number of requests.
    pub fn count(&self) -> usize {
        self.requests.len()
    }

    /// Returns the end of the trace: one millisecond after the last start.
    pub fn duration(&self) -> Duration {
        self.requests.last().map_or(Duration::ZERO, |last| last.at) + Duration::from_millis(1)
    }

    /// Returns the request with this index.
    pub fn request(&self, number: u64) -> TraceRequest {
        self.requests[number as usize % self.requests.len()]
    }

    /// Returns texts of the request's length.
    pub(super) fn texts(&self, number: u64) -> &TextSet {
        &self.texts[&self.request(number).tokens]
    }
}

fn csv_requests(file: &InputFile<'_>) -> Result<Vec<TraceRequest>, Vec<String>> {
    let mut lines = file.lines();
    let Some((first, head)) = lines.next() else { return Ok(Vec::new()) };
    let names: Vec<&str> = head.split(',').map(str::trim).collect();
    if !names.contains(&"at_s") || names.iter().any(|name| !["at_s", "tokens", "inputs"].contains(name)) {
        let problem = "the header line must contain at_s, and may contain tokens and inputs";
        return Err(file.problem(format_args!("line {first}: {problem}")));
    }
    file.parse(lines, |line| {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        if cells.len() != names.len() {
            return Err(format!("has {} fields, the header line {}", cells.len(), names.len()));
        }
        let cell = |name: &str| names.iter().position(|named| *named == name).map(|index| cells[index]);
        let count = |name: &str, default: usize| match cell(name).filter(|text| !text.is_empty()) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|_| format!("{name} {text:?} is not a whole number")),
        };
        let at_s = cell("at_s").unwrap_or_default();
        let at_s = at_s.parse().map_err(|_| format!("at_s {at_s:?} is not a number of seconds"))?;
        let (tokens, inputs) = (count("tokens", default_tokens())?, count("inputs", default_inputs())?);
        checked(TraceLine { at_s, tokens, inputs })
    })
}

fn checked(line: TraceLine) -> Result<TraceRequest, String> {
    let TraceLine { at_s, tokens, inputs } = line;
    let at = Duration::try_from_secs_f64(at_s).ok().filter(|at| *at <= DURATION_MAX);
    let at = at.ok_or_else(|| {
        format!("at_s {at_s}: write seconds since the start, from 0 to {}", DURATION_MAX.as_secs())
    })?;
    if !(1..=TOKENS_MAX).contains(&tokens) {
        return Err(format!("tokens {tokens}: write 1 to {TOKENS_MAX}"));
    }
    if !(1..=INPUTS_MAX).contains(&inputs) {
        return Err(format!("inputs {inputs}: write 1 to {INPUTS_MAX}"));
    }
    Ok(TraceRequest { at, tokens, inputs })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, content: &str) -> Result<Trace, Vec<String>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        Trace::read(&path, 1)
    }

    fn check(name: &str, content: &str, expected: &[(u64, usize, usize)]) {
        let trace = read(name, content).unwrap();
        let got: Vec<_> =
            trace.requests.iter().map(|r| (r.at.as_millis() as u64, r.tokens, r.inputs)).collect();
        assert_eq!(got, expected, "{content}");
    }

    #[test]
    fn a_trace_is_csv_or_json_lines_and_is_sorted_by_time() {
        check("a.csv", "at_s,tokens,inputs\n0.5,128,2\n0.25,9,1\n", &[(250, 9, 1), (500, 128, 2)]);
        check("a.csv", "inputs, at_s\n3, 1\n", &[(1000, 12, 3)]);
        check(
            "a.jsonl",
            "{\"at_s\":0}\n\n{\"at_s\":1.5,\"tokens\":40,\"inputs\":7}\n",
            &[(0, 12, 1), (1500, 40, 7)],
        );
    }

    #[test]
    fn invalid_lines_are_counted_and_the_first_are_reported() {
        let check = |name: &str, content: &str, expected: &[&str]| {
            let problems = read(name, content).map(|_| ()).unwrap_err();
            assert_eq!(problems.len(), expected.len(), "{problems:#?}");
            for (problem, part) in problems.iter().zip(expected) {
                assert!(problem.contains(part), "{part} in {problem}");
            }
        };
        check("a.csv", "", &["contains no request"]);
        check("a.csv", "when\n1\n", &["must contain at_s"]);
        check(
            "a.csv",
            "at_s\nsoon\n-1\n1,2\n",
            &["line 2: at_s \"soon\"", "line 3: at_s -1", "line 4: has 2 fields"],
        );
        check("a.csv", "at_s,tokens\n1,0\n1,8193\n", &["tokens 0: write 1 to 8192", "tokens 8193"]);
        check("a.csv", "at_s,inputs\n1,2049\n", &["inputs 2049: write 1 to 2048"]);
        check(
            "a.jsonl",
            &"{}\n".repeat(7),
            &["line 1", "line 2", "line 3", "line 4", "line 5", "and 2 more"],
        );
    }

    #[test]
    fn texts_have_the_recorded_lengths() {
        let trace = read("a.csv", "at_s,tokens\n0,10\n1,30\n").unwrap();
        let words = |number| trace.texts(number).of_request(number, 1).next().unwrap().split(' ').count();
        assert_eq!((words(0), words(1)), (8, 28));
    }
}
