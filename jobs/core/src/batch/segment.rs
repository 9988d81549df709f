//! Segments of a file: consecutive lines that are stored, encrypted and read together.

use super::line::{self, BatchLine, LineError};
use crate::job::{JobOperation, StoredRange};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Lines of a file, as in the API of OpenAI.
pub const LINES_MAX: usize = 50_000;
/// Inputs and lines of a segment: four times the short texts that are in flight for each replica (`pace`), so that a replica
/// seldom waits for the next chunk, and a worker that ends loses the work of a second or two.
pub const SEGMENT_INPUTS: u64 = 256;
/// Bytes of a segment. A longer line is a segment of its own.
pub const SEGMENT_BYTES: usize = 1 << 20;
/// Models of a file.
pub const MODELS_MAX: usize = 16;
/// Highest number of a line, with the blank ones: twenty for each of [`LINES_MAX`]. Numbers are in the record of the file, and have a
/// fixed number of digits in the lines of results.
pub const LINE_NUMBER_MAX: u32 = 1_000_000;
/// Lines of a file whose `custom_id` an earlier line has. Their numbers are in the record of the file.
pub const DUPLICATES_MAX: usize = 1_000;
/// Segments of a file. With [`GROUPS_MAX`] and [`DUPLICATES_MAX`] the records of a file and of a batch are less than a message of NATS (1 MiB).
pub const SEGMENTS_MAX: usize = 2_000;
/// Groups of lines of a file. A batch has as many jobs.
pub const GROUPS_MAX: usize = 2_500;

/// Lines of a segment that are computed by one job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineGroup {
    /// Deployment.
    pub deployment: String,
    /// Operation.
    pub operation: JobOperation,
    /// Number of lines.
    pub lines: u32,
    /// Number of their inputs, at least one for each line.
    pub inputs: u64,
    /// Estimated tokens of their inputs; 0 in a file of an earlier version.
    #[serde(default)]
    pub tokens: u64,
}

/// Work of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineWork {
    /// Inputs of its body, 1 for an invalid one.
    pub inputs: u64,
    /// Estimated tokens of its inputs.
    pub tokens: u64,
}

/// Consecutive lines of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSegment {
    /// Number of its first line in the file, from 1.
    pub first_line: u32,
    /// Number of lines that are not blank.
    pub requests: u32,
    /// Stored lines.
    pub range: StoredRange,
    /// Bytes of the lines.
    pub bytes: u64,
    /// Lines with a valid envelope, by deployment and operation.
    pub groups: Vec<LineGroup>,
    /// Numbers of the lines whose `custom_id` an earlier line of the file has.
    pub duplicates: BTreeSet<u32>,
}

/// Reason why a file is rejected as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// It has no request.
    #[error("the file has no line; write one request on each line")]
    Empty,
    /// It has too many requests.
    #[error("the file has more than {LINES_MAX} lines; split it into several files")]
    TooManyLines,
    /// A line has a number that is too high, because of blank lines.
    #[error("the file has more than {LINE_NUMBER_MAX} lines with the blank ones; remove blank lines")]
    TooManyBlankLines,
    /// Too many lines repeat a `custom_id`.
    #[error(
        "more than {DUPLICATES_MAX} lines of the file have the `custom_id` of an earlier line; give each line its own"
    )]
    TooManyDuplicates,
    /// It names too many models.
    #[error("the file names more than {MODELS_MAX} models; split it by model")]
    TooManyModels,
    /// It has too many inputs or bytes, or its lines alternate between models.
    #[error(
        "the file has more than {SEGMENTS_MAX} parts of {SEGMENT_INPUTS} inputs or {SEGMENT_BYTES} bytes, or too many that name several models; split it into several files"
    )]
    TooManySegments,
}

/// Returns the lines of a text with their numbers and byte ranges; blank lines are counted and left out. A byte order mark at
/// the start of a file is skipped.
fn lines(text: &[u8], first: u32) -> impl Iterator<Item = (u32, Range<usize>)> + '_ {
    let mut at = if first == 1 && text.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    let mut number = first;
    std::iter::from_fn(move || {
        while at < text.len() {
            let end = text[at..].iter().position(|byte| *byte == b'\n').map_or(text.len(), |end| at + end);
            let (line, here) = (at..end, number);
            (at, number) = (end + 1, number + 1);
            if !text[line.clone()].iter().all(u8::is_ascii_whitespace) {
                return Some((here, line));
            }
        }
        None
    })
}

/// Checks the limits of lines for the line `number`, the `count`th that is not blank.
fn check_count(number: u32, count: usize) -> Result<(), FileError> {
    if count > LINES_MAX {
        return Err(FileError::TooManyLines);
    }
    if number > LINE_NUMBER_MAX {
        return Err(FileError::TooManyBlankLines);
    }
    Ok(())
}

/// Returns the models that the lines of a file name.
///
/// # Errors
///
/// When the file has no line, or too many lines or models.
pub fn models(text: &[u8]) -> Result<BTreeSet<String>, FileError> {
    let (mut models, mut count) = (BTreeSet::new(), 0);
    for (number, line) in lines(text, 1) {
        count += 1;
        check_count(number, count)?;
        if let Some(model) = line::model_of(&text[line])
            && !models.contains(&model)
        {
            models.insert(model);
            if models.len() > MODELS_MAX {
                return Err(FileError::TooManyModels);
            }
        }
    }
    if count == 0 { Err(FileError::Empty) } else { Ok(models) }
}

/// Divides a file into segments. `models` are the deployments that the tenant may use; `work` estimates the work of a body. The
/// ranges of the segments are set when they are stored.
///
/// # Errors
///
/// When the file has no line, or too many lines, duplicates or segments.
pub fn scan(
    text: &[u8],
    models: &BTreeSet<String>,
    work: impl Fn(JobOperation, &[u8]) -> LineWork,
) -> Result<Vec<(Range<usize>, FileSegment)>, FileError> {
    let (mut segments, mut seen, mut count) = (Vec::<(Range<usize>, FileSegment)>::new(), BTreeSet::new(), 0);
    let (mut in_segment, mut duplicates) = (0, 0);
    for (number, range) in lines(text, 1) {
        count += 1;
        check_count(number, count)?;
        let read = line::read(&text[range.clone()]);
        let known = read.as_ref().ok().filter(|line| models.contains(&line.deployment));
        let LineWork { inputs, tokens } = match known {
            Some(line) => work(line.operation, line.body.get().as_bytes()),
            None => LineWork { inputs: 1, tokens: 0 },
        };
        let inputs = inputs.max(1);
        let is_full = segments.last().is_none_or(|(bytes, _)| {
            in_segment + inputs > SEGMENT_INPUTS || range.end - bytes.start > SEGMENT_BYTES
        });
        if is_full {
            in_segment = 0;
            let segment = FileSegment {
                first_line: number,
                requests: 0,
                range: StoredRange { object: 0, offset: 0, length: 0 },
                bytes: 0,
                groups: Vec::new(),
                duplicates: BTreeSet::new(),
            };
            segments.push((range.clone(), segment));
        }
        let Some((bytes, segment)) = segments.last_mut() else { continue };
        bytes.end = range.end;
        segment.requests += 1;
        in_segment += inputs;
        let custom_id = match &read {
            Ok(line) => Some(line.custom_id.clone()),
            Err(error) => error.custom_id.clone(),
        };
        let is_new = custom_id.is_none_or(|id| seen.insert(id));
        if !is_new {
            duplicates += 1;
            if duplicates > DUPLICATES_MAX {
                return Err(FileError::TooManyDuplicates);
            }
            segment.duplicates.insert(number);
            continue;
        }
        if let Some(line) = known {
            let same = |group: &&mut LineGroup| {
                group.deployment == line.deployment && group.operation == line.operation
            };
            match segment.groups.iter_mut().find(same) {
                Some(group) => {
                    group.lines += 1;
                    group.inputs += inputs;
                    group.tokens += tokens;
                }
                None => segment.groups.push(LineGroup {
                    deployment: line.deployment.clone(),
                    operation: line.operation,
                    lines: 1,
                    inputs,
                    tokens,
                }),
            }
        }
    }
    let groups: usize = segments.iter().map(|(_, segment)| segment.groups.len()).sum();
    if count == 0 {
        return Err(FileError::Empty);
    }
    if segments.len() > SEGMENTS_MAX || groups > GROUPS_MAX {
        return Err(FileError::TooManySegments);
    }
    Ok(covering(segments, text.len()))
}

/// Extends segments over the blank lines around them, so that together they are the file byte by byte.
fn covering(mut segments: Vec<(Range<usize>, FileSegment)>, end: usize) -> Vec<(Range<usize>, FileSegment)> {
    let starts: Vec<usize> = segments.iter().skip(1).map(|(bytes, _)| bytes.start).chain([end]).collect();
    if let Some((bytes, segment)) = segments.first_mut() {
        (bytes.start, segment.first_line) = (0, 1);
    }
    for ((bytes, segment), next) in segments.iter_mut().zip(starts) {
        bytes.end = next;
        segment.bytes = (bytes.end - bytes.start) as u64;
    }
    segments
}

/// Reads the lines of a segment for a batch: the number of each, and its request or the reason why it is not computed.
pub fn requests<'a>(
    text: &'a [u8],
    segment: &'a FileSegment,
    models: &'a BTreeSet<String>,
    endpoint: JobOperation,
) -> impl Iterator<Item = (u32, Result<BatchLine<'a>, LineError>)> + 'a {
    lines(text, segment.first_line).map(move |(number, range)| {
        let request = line::read(&text[range]).and_then(|line| {
            let invalid =
                |code, message| LineError { code, message, custom_id: Some(line.custom_id.clone()) };
            if segment.duplicates.contains(&number) {
                let message = "An earlier line of the file has the same `custom_id`.".to_owned();
                return Err(invalid("duplicate_custom_id", message));
            }
            if line.operation != endpoint {
                let message = format!(
                    "`url` is \"{}\", and the endpoint of the batch is \"{}\".",
                    line.operation.url(),
                    endpoint.url()
                );
                return Err(invalid("invalid_url", message));
            }
            if !models.contains(&line.deployment) {
                let message = format!(
                    "No model `{}` existed for this key when the file was uploaded.",
                    line.deployment
                );
                return Err(invalid("model_not_found", message));
            }
            Ok(line)
        });
        (number, request)
    })
}

/// Returns the number of lines by operation that a batch can compute.
pub fn computable(segments: &[FileSegment]) -> BTreeMap<&'static str, u32> {
    let mut lines = BTreeMap::new();
    for group in segments.iter().flat_map(|segment| &segment.groups) {
        *lines.entry(group.operation.url()).or_default() += group.lines;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text_of(number: usize, model: &str) -> String {
        format!(
            r#"{{"custom_id": "r{number}", "method": "POST", "url": "/v1/embeddings", "body": {{"model": "{model}", "input": "t"}}}}"#
        )
    }

    /// Work of each line, with four tokens for each input.
    fn of(inputs: u64) -> impl Fn(JobOperation, &[u8]) -> LineWork {
        move |_, _| LineWork { inputs, tokens: 4 * inputs }
    }

    fn known() -> BTreeSet<String> {
        ["m", "n"].map(str::to_owned).into()
    }

    #[test]
    fn a_file_is_divided_by_inputs_and_its_lines_keep_their_numbers() {
        let many: Vec<_> = (0..600).map(|number| text_of(number, "m")).collect();
        let text = format!("\u{feff}\n\n{}\r\n", many.join("\n"));
        let segments = scan(text.as_bytes(), &known(), of(1)).unwrap();
        assert_eq!(segments.len(), 3);
        let mut numbers = Vec::new();
        for (bytes, segment) in &segments {
            assert!(segment.groups.iter().all(|group| group.inputs <= SEGMENT_INPUTS));
            assert!(segment.groups.iter().all(|group| group.tokens == 4 * group.inputs));
            let part = &text.as_bytes()[bytes.clone()];
            let models = known();
            for (number, request) in requests(part, segment, &models, JobOperation::Embeddings) {
                assert_eq!(request.unwrap().custom_id, format!("r{}", number - 3));
                numbers.push(number);
            }
        }
        assert!(numbers.into_iter().eq(3..603));
        let whole: Vec<u8> =
            segments.iter().flat_map(|(bytes, _)| &text.as_bytes()[bytes.clone()]).copied().collect();
        assert_eq!(whole, text.as_bytes());
        let large = scan(text.as_bytes(), &known(), of(10 * SEGMENT_INPUTS)).unwrap();
        assert_eq!(large.len(), 600, "a line with many inputs is a segment");
    }

    #[test]
    fn lines_that_are_not_computed_are_in_no_group() {
        let text = [
            text_of(1, "m"),
            text_of(1, "m"),
            "{".to_owned(),
            text_of(2, "unknown"),
            text_of(3, "n"),
            text_of(4, "n").replace("/v1/embeddings", "/v1/rerank"),
        ]
        .join("\n");
        assert_eq!(models(text.as_bytes()).unwrap().len(), 3);
        let segments = scan(text.as_bytes(), &known(), of(1)).unwrap();
        let (_, segment) = &segments[0];
        assert_eq!((segment.requests, segment.groups.len()), (6, 3));
        assert_eq!(segment.duplicates, [2].into());
        assert_eq!(
            computable(std::slice::from_ref(segment)),
            [("/v1/embeddings", 2), ("/v1/rerank", 1)].into()
        );
        let models = known();
        let codes: Vec<_> = requests(text.as_bytes(), segment, &models, JobOperation::Embeddings)
            .map(|(_, request)| request.map_or_else(|error| error.code, |_| "ok"))
            .collect();
        assert_eq!(
            codes,
            ["ok", "duplicate_custom_id", "invalid_json", "model_not_found", "ok", "invalid_url"]
        );
    }

    #[test]
    fn limits_are_those_of_a_whole_file() {
        assert_eq!(models(b"\n \n"), Err(FileError::Empty));
        assert_eq!(scan(b"", &known(), of(1)).map(drop), Err(FileError::Empty));
        let lines = "{}\n".repeat(LINES_MAX);
        assert!(models(lines.as_bytes()).is_ok());
        assert_eq!(models(format!("{lines}{{}}").as_bytes()), Err(FileError::TooManyLines));
        assert_eq!(
            scan(format!("{lines}{{}}").as_bytes(), &known(), of(1)).map(drop),
            Err(FileError::TooManyLines)
        );
        let last = "\n".repeat(LINE_NUMBER_MAX as usize - 1) + &text_of(1, "m");
        for (text, expected) in
            [(last.clone(), None), (format!("\n{last}"), Some(FileError::TooManyBlankLines))]
        {
            assert_eq!(models(text.as_bytes()).err(), expected);
            assert_eq!(scan(text.as_bytes(), &known(), of(1)).err(), expected);
        }
        let repeated = format!("{}\n", text_of(1, "m")).repeat(DUPLICATES_MAX + 1);
        let segments = scan(repeated.as_bytes(), &known(), of(1)).unwrap();
        assert_eq!(
            segments.iter().map(|(_, segment)| segment.duplicates.len()).sum::<usize>(),
            DUPLICATES_MAX
        );
        let repeated = repeated + &text_of(1, "m");
        assert_eq!(scan(repeated.as_bytes(), &known(), of(1)).map(drop), Err(FileError::TooManyDuplicates));
        let named: Vec<_> = (0..=MODELS_MAX).map(|number| text_of(number, &number.to_string())).collect();
        assert!(models(named[1..].join("\n").as_bytes()).is_ok());
        assert_eq!(models(named.join("\n").as_bytes()), Err(FileError::TooManyModels));
    }

    proptest! {
        #[test]
        fn every_line_is_in_one_segment(lines in prop::collection::vec((any::<bool>(), 0usize..200, 1u64..300), 1..400)) {
            let text: Vec<_> = lines.iter().map(|(valid, number, _)| match valid {
                true => text_of(*number, "m"),
                false => "{ \"broken\"".to_owned(),
            }).collect();
            let text = text.join("\n");
            let segments = scan(text.as_bytes(), &known(), of(7)).unwrap();
            let mut next = 1;
            let mut valid = BTreeSet::new();
            for (bytes, segment) in &segments {
                let models = known();
                let mut computed = 0;
                for (number, request) in requests(&text.as_bytes()[bytes.clone()], segment, &models, JobOperation::Embeddings) {
                    prop_assert_eq!(number, next);
                    next += 1;
                    if let Ok(line) = request {
                        computed += 1;
                        prop_assert!(valid.insert(line.custom_id));
                    }
                }
                prop_assert_eq!(computed, segment.groups.iter().map(|group| group.lines).sum::<u32>());
            }
            prop_assert_eq!(next as usize, lines.len() + 1);
            let distinct: BTreeSet<_> = lines.iter().filter(|line| line.0).map(|line| line.1).collect();
            prop_assert_eq!(valid.len(), distinct.len());
        }
    }
}
