//! Formats of outputs.
//!
//! While a job runs, its rows are appended to a partial file whose content up to a length does not depend on the rows
//! after it, so that the file can be truncated to a checkpoint. For JSON lines and npy the partial file becomes the output.
//! A Parquet file cannot be continued, because its index is at the end; its partial file has records of a simple binary
//! format, which are converted when all rows are there.

pub(crate) mod columnar;
pub(crate) mod npy;
mod record;

use std::path::Path;

use serde_json::json;

use self::record::write_record;
use crate::row::RowId;

/// Format of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    /// One JSON object per line: `row`, `id` if ids are read, `embedding`.
    JsonLines,
    /// NumPy array of float32, one row per row of the input.
    Npy,
    /// Parquet with the columns `row`, `id` if ids are read, `embedding`.
    Parquet,
}

impl OutputFormat {
    /// Returns the format of a file by its extension, or a statement of the supported ones.
    pub fn of(path: &Path) -> Result<OutputFormat, String> {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        match extension.to_ascii_lowercase().as_str() {
            "jsonl" | "ndjson" => Ok(OutputFormat::JsonLines),
            "npy" => Ok(OutputFormat::Npy),
            "parquet" => Ok(OutputFormat::Parquet),
            _ => Err(format!(
                "--output {}: the format does not follow from the extension; end the name with .jsonl, .ndjson, .npy or \
                 .parquet",
                path.display()
            )),
        }
    }

    /// Returns the name of the format.
    pub fn name(self) -> &'static str {
        match self {
            OutputFormat::JsonLines => "jsonl",
            OutputFormat::Npy => "npy",
            OutputFormat::Parquet => "parquet",
        }
    }

    /// Returns the bytes of the partial file before the first row.
    pub(crate) fn reserved_bytes(self) -> u64 {
        match self {
            OutputFormat::Npy => npy::HEADER_BYTES as u64,
            OutputFormat::JsonLines | OutputFormat::Parquet => 0,
        }
    }

    /// Appends a row to the bytes of the partial file. `row` is its index in the input, from 0.
    pub(crate) fn encode(self, row: u64, id: Option<&RowId>, vector: &[f32], into: &mut Vec<u8>) {
        match self {
            OutputFormat::JsonLines => encode_json(row, id, vector, into),
            OutputFormat::Npy => vector.iter().for_each(|value| into.extend_from_slice(&value.to_le_bytes())),
            OutputFormat::Parquet => write_record(row, id, vector, into),
        }
    }
}

fn encode_json(row: u64, id: Option<&RowId>, vector: &[f32], into: &mut Vec<u8>) {
    into.extend_from_slice(format!("{{\"row\":{row},").as_bytes());
    if let Some(id) = id {
        into.extend_from_slice(format!("\"id\":{},", id.to_json()).as_bytes());
    }
    into.extend_from_slice(b"\"embedding\":");
    // The shortest digits from which the same float32 is read. Writing to memory does not fail.
    serde_json::to_writer(&mut *into, vector).expect("a list of numbers is JSON");
    into.extend_from_slice(b"}\n");
}

/// Appends a skipped row to the bytes of the errors file.
pub(crate) fn encode_error(
    row: u64,
    line: Option<u64>,
    column: Option<usize>,
    reason: &str,
    into: &mut Vec<u8>,
) {
    let mut object = json!({"row": row, "reason": reason});
    if let Some(line) = line {
        object["line"] = line.into();
    }
    if let Some(column) = column {
        object["column"] = column.into();
    }
    into.extend_from_slice(object.to_string().as_bytes());
    into.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_follows_from_the_extension() {
        let of = |path: &str| OutputFormat::of(Path::new(path));
        assert_eq!(of("a/b.jsonl"), Ok(OutputFormat::JsonLines));
        assert_eq!(of("a.NPY"), Ok(OutputFormat::Npy));
        assert_eq!(of("a.parquet"), Ok(OutputFormat::Parquet));
        for unknown in ["a", "a.json", "a.npz", ".npy"] {
            let problem = of(unknown).expect_err(unknown);
            assert!(problem.contains(".jsonl, .ndjson, .npy or .parquet"), "{problem}");
        }
    }

    #[test]
    fn a_line_has_the_row_the_id_and_numbers_that_are_read_back() {
        let vector = [0.1, -1.0e-7, 3.402_823_5e38, f32::MIN_POSITIVE];
        let mut line = Vec::new();
        let id = RowId::Text("a\"b".to_owned());
        OutputFormat::JsonLines.encode(7, Some(&id), &vector, &mut line);
        let parsed: serde_json::Value = serde_json::from_slice(&line).expect("JSON");
        assert_eq!((&parsed["row"], &parsed["id"]), (&json!(7), &json!("a\"b")));
        let read: Vec<f32> = parsed["embedding"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|x| x.as_f64().expect("a number") as f32)
            .collect();
        assert_eq!(read, vector);
        line.clear();
        OutputFormat::JsonLines.encode(0, None, &[1.5], &mut line);
        assert_eq!(line, b"{\"row\":0,\"embedding\":[1.5]}\n");
    }
}
