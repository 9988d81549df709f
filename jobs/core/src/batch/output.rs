//! Lines of the output file and of the error file of a batch.
//!
//! Each begins with the number of its line in the input, in a fixed number of digits, so files of lines are merged without
//! parsing them.

use super::id::BatchId;
use super::segment::{self, FileSegment};
use crate::job::JobOperation;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const PREFIX: &str = "{\"id\":\"batch_req_";
const DIGITS: usize = 8;
const _: () = assert!(segment::LINE_NUMBER_MAX < 10u32.pow(DIGITS as u32));

fn begin(lines: &mut String, number: u32, batch: BatchId, custom_id: Option<&str>) {
    let custom_id = json!(custom_id);
    write!(lines, "{PREFIX}{number:0DIGITS$}_{batch}\",\"custom_id\":{custom_id},").expect("a string grows");
}

/// Adds the line for a response. `body` is JSON.
pub fn push_response(
    lines: &mut String,
    (number, batch): (u32, BatchId),
    custom_id: &str,
    status: u16,
    body: &str,
) {
    begin(lines, number, batch, Some(custom_id));
    let written = write!(
        lines,
        "\"response\":{{\"status_code\":{status},\"request_id\":\"{batch}-{number}\",\"body\":{body}}},\"error\":null}}"
    );
    written.expect("a string grows");
    lines.push('\n');
}

/// Adds the line for a request that was not computed.
pub fn push_error(
    lines: &mut String,
    (number, batch): (u32, BatchId),
    custom_id: Option<&str>,
    code: &str,
    message: &str,
) {
    begin(lines, number, batch, custom_id);
    let error = json!({"code": code, "message": message, "line": number});
    write!(lines, "\"response\":null,\"error\":{error}}}").expect("a string grows");
    lines.push('\n');
}

/// Reason why the lines of a chunk have no result: a code and a sentence.
pub type LostReason = (&'static str, String);

/// Returns the error lines of a segment for the lines that no chunk has computed: those that cannot be, and those of `lost`
/// chunks, by deployment.
pub fn uncomputed(
    batch: BatchId,
    operation: JobOperation,
    (text, segment, models): (&[u8], &FileSegment, &BTreeSet<String>),
    lost: &BTreeMap<&str, LostReason>,
) -> String {
    let mut lines = String::new();
    for (number, request) in segment::requests(text, segment, models, operation) {
        match request {
            Err(error) => {
                push_error(
                    &mut lines,
                    (number, batch),
                    error.custom_id.as_deref(),
                    error.code,
                    &error.message,
                );
            }
            Ok(line) => {
                if let Some((code, message)) = lost.get(line.deployment.as_str()) {
                    push_error(&mut lines, (number, batch), Some(&line.custom_id), code, message);
                }
            }
        }
    }
    lines
}

/// Returns the number of a line.
fn number_of(line: &[u8]) -> &[u8] {
    line.get(PREFIX.len()..PREFIX.len() + DIGITS).unwrap_or_default()
}

/// Merges files of lines, each in the order of the numbers of its lines.
pub fn merge(parts: &[&[u8]]) -> Vec<u8> {
    let mut lines: Vec<&[u8]> =
        parts.iter().flat_map(|part| part.split_inclusive(|byte| *byte == b'\n')).collect();
    lines.sort_by_key(|line| number_of(line));
    lines.concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{DurableJobId, UnixMillis};

    #[test]
    fn lines_are_merged_in_the_order_of_the_input() {
        let batch = BatchId(DurableJobId::new(UnixMillis(1), 2));
        let (mut first, mut second) = (String::new(), String::new());
        push_response(&mut first, (2, batch), "b\"", 200, "{\"x\":1}");
        push_response(&mut first, (11, batch), "c", 200, "{}");
        push_error(&mut second, (1, batch), None, "invalid_json", "no \"JSON\"");
        push_error(&mut second, (3, batch), Some("d"), "batch_expired", "late");
        let merged = String::from_utf8(merge(&[first.as_bytes(), second.as_bytes()])).unwrap();
        let lines: Vec<serde_json::Value> =
            merged.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let ids: Vec<_> = lines.iter().map(|line| line["custom_id"].clone()).collect();
        assert_eq!(ids, [json!(null), json!("b\""), json!("d"), json!("c")]);
        assert_eq!(lines[1]["response"]["body"]["x"], 1);
        assert_eq!(lines[0]["error"]["line"], 1);
        assert!(lines[0]["id"].as_str().unwrap().ends_with(&batch.to_string()));
    }
}
