//! Readers of inputs: JSON lines, CSV, Parquet and plain lines.
//!
//! A reader returns rows one by one. A row that cannot be used is a row with a problem, and the next one can be read; an
//! error ends the reading.

mod bounded_lines;
mod columnar;
mod delimited;
mod json_lines;
mod source;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

pub use source::{FieldNames, InputError, ROW_BYTES_MAX, TextReader};

use self::columnar::ParquetReader;
use self::delimited::CsvReader;
use self::json_lines::{JsonLinesReader, PlainLinesReader};

/// Format of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputFormat {
    /// One JSON object or string per line.
    JsonLines,
    /// CSV with a header row.
    Csv,
    /// A string column of a Parquet file.
    Parquet,
    /// Plain text, one text per line.
    Lines,
}

impl InputFormat {
    /// Returns the format of a file by its extension, or a statement of the supported ones.
    pub fn of(path: &Path) -> Result<InputFormat, String> {
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        match extension.to_ascii_lowercase().as_str() {
            "jsonl" | "ndjson" => Ok(InputFormat::JsonLines),
            "csv" => Ok(InputFormat::Csv),
            "parquet" => Ok(InputFormat::Parquet),
            "txt" => Ok(InputFormat::Lines),
            _ => Err(format!(
                "{}: the format does not follow from the extension; rename it to .jsonl, .ndjson, .csv, .parquet or .txt, \
                 or give --format",
                path.display()
            )),
        }
    }

    /// Returns the name as written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            InputFormat::JsonLines => "jsonl",
            InputFormat::Csv => "csv",
            InputFormat::Parquet => "parquet",
            InputFormat::Lines => "lines",
        }
    }
}

/// Opens a file.
pub fn open(path: &Path, format: InputFormat, fields: FieldNames) -> Result<Box<dyn TextReader>, InputError> {
    let name = path.display().to_string();
    let failed = |reason: io::Error| InputError::Read { name: name.clone(), reason };
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_dir() {
        return Err(failed(io::ErrorKind::IsADirectory.into()));
    }
    if format == InputFormat::Parquet {
        return Ok(Box::new(ParquetReader::open(name, file, &fields)?));
    }
    // The size of a pipe is not known.
    let total = metadata.is_file().then_some(metadata.len());
    stream(name, file, total, format, fields)
}

/// Reads a stream of `total` bytes, if their number is known.
pub fn stream(
    name: String,
    input: impl Read + 'static,
    total: Option<u64>,
    format: InputFormat,
    fields: FieldNames,
) -> Result<Box<dyn TextReader>, InputError> {
    Ok(match format {
        InputFormat::JsonLines => Box::new(JsonLinesReader::new(name, input, total, fields)),
        InputFormat::Csv => Box::new(CsvReader::open(name, input, total, &fields)?),
        InputFormat::Lines => Box::new(PlainLinesReader::new(name, input, total)),
        InputFormat::Parquet => {
            let reason = "Parquet cannot be read from a stream, because its index is at the end; give a file";
            return Err(InputError::Invalid { name, reason: reason.to_owned() });
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_follows_from_the_extension() {
        let of = |path: &str| InputFormat::of(Path::new(path));
        assert_eq!(of("a.jsonl"), Ok(InputFormat::JsonLines));
        assert_eq!(of("a.b.CSV"), Ok(InputFormat::Csv));
        assert_eq!(of("a.parquet"), Ok(InputFormat::Parquet));
        assert_eq!(of("a.txt"), Ok(InputFormat::Lines));
        for unknown in ["a", "a.json", "jsonl", "a.csv.gz"] {
            assert!(of(unknown).is_err_and(|problem| problem.contains(".jsonl")), "{unknown}");
        }
    }

    #[test]
    fn parquet_from_a_stream_and_a_missing_file_are_errors() {
        let fields = || FieldNames { text: "text".to_owned(), id: None };
        let error = stream("-".to_owned(), io::empty(), None, InputFormat::Parquet, fields()).err();
        assert!(error.is_some_and(|error| error.to_string().contains("give a file")));
        let error = open(Path::new("missing.csv"), InputFormat::Csv, fields()).err();
        assert!(error.is_some_and(|error| error.to_string().starts_with("missing.csv: cannot be read")));
    }
}
