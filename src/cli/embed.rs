//! Command-line options of `meridian embed`.

use clap::{Args, ValueEnum};
use std::num::NonZeroUsize;
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(after_help = "\
An interrupted run continues after its last checkpoint when the same command runs again. The input must be the same; standard
input is read again from its beginning, and the rows that are done are skipped.

Exit code: 0 complete; 1 failed; 2 invalid options; 130 after SIGINT and 143 after SIGTERM, with a checkpoint to continue from.")]
pub(crate) struct EmbedCommandOptions {
    /// Texts: .jsonl, .ndjson, .csv, .parquet or .txt; - for standard input
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Vectors: .jsonl, .ndjson, .npy (float32) or .parquet. The file appears when it is complete; until then there are
    /// PATH.partial and PATH.checkpoint
    #[arg(long, value_name = "PATH")]
    pub output: PathBuf,
    /// Format of the input, if it does not follow from the extension; jsonl by default for standard input
    #[arg(long, value_enum)]
    pub format: Option<InputFormatOption>,
    /// Field or column of the text; `text` by default. A line of JSON lines may also be a string
    #[arg(long, value_name = "NAME")]
    pub field: Option<String>,
    /// Field or column of an id, a string or an integer, to write next to each vector
    #[arg(long, value_name = "NAME")]
    pub id_field: Option<String>,
    /// Model as in a replica's configuration (pypi://PACKAGE, hf://OWNER/NAME, s3://BUCKET/PREFIX, ..., or a directory), fetched if it is not in the
    /// cache; with --url the name of a deployment
    #[arg(long, value_name = "SOURCE|NAME")]
    pub model: String,
    /// Values to keep of each vector, for models that support it; all by default
    #[arg(long, value_name = "N")]
    pub dimensions: Option<u64>,
    /// Truncate texts that are longer than the model's limit; by default they are errors
    #[arg(long)]
    pub truncate: bool,
    /// Write rows that cannot be used to PATH.errors.jsonl and continue; by default the first one is an error. Not for
    /// .npy, whose rows would no longer be those of the input
    #[arg(long)]
    pub skip_invalid: bool,
    /// Discard an interrupted run, or replace an existing output
    #[arg(long)]
    pub restart: bool,
    /// Local engine: number format, f32 (default) or int8
    #[arg(long, value_name = "FORMAT", help_heading = "Local engine")]
    pub precision: Option<String>,
    /// Local engine: threads; by default the tuned number, or one for each core
    #[arg(long, value_name = "N", help_heading = "Local engine")]
    pub threads: Option<NonZeroUsize>,
    /// Local engine: name of the model's prompt before each text; by default the model's default
    #[arg(long, value_name = "NAME", help_heading = "Local engine")]
    pub prompt_name: Option<String>,
    /// Compute at this endpoint (http://HOST:PORT or https://HOST, with or without /v1) instead of in this process
    #[arg(long, help_heading = "Remote endpoint")]
    pub url: Option<String>,
    /// API key; by default that in the environment variable MERIDIAN_KEY, or `local`
    #[arg(long, help_heading = "Remote endpoint")]
    pub key: Option<String>,
    /// CA certificates for https, as PEM, in addition to those of this machine
    #[arg(long, value_name = "FILE", help_heading = "Remote endpoint")]
    pub cacert: Option<PathBuf>,
    /// Inputs per request; 64 by default
    #[arg(long, value_name = "N", help_heading = "Remote endpoint")]
    pub inputs: Option<usize>,
    /// Requests in flight; 16 by default
    #[arg(long, value_name = "N", help_heading = "Remote endpoint")]
    pub concurrency: Option<usize>,
}

/// Format of an input, as written on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum InputFormatOption {
    /// One JSON object or string per line
    Jsonl,
    /// CSV with a header row
    Csv,
    /// A string column of a Parquet file
    Parquet,
    /// Plain text, one text per line
    Lines,
}
