//! Errors of a job.

use std::io;

use crate::backend::BackendError;
use crate::input::InputError;

/// Reason why a job stopped before its end. The rows before the last checkpoint remain.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The output file exists, and there is no interrupted run to continue.
    #[error("{output} exists; give --restart to replace it, or choose another --output")]
    OutputExists {
        /// Output.
        output: String,
    },
    /// The checkpoint of an interrupted run cannot be read.
    #[error("{checkpoint} is not a checkpoint: {reason}; give --restart to compute all rows again")]
    Checkpoint {
        /// Checkpoint file.
        checkpoint: String,
        /// Statement of what is wrong.
        reason: String,
    },
    /// The interrupted run had other options.
    #[error(
        "{output} was begun with other options: {}; give the same options to continue it, or --restart to compute all rows \
         again",
        differences.join("; ")
    )]
    SettingsChanged {
        /// Output.
        output: String,
        /// Options with their old and new values.
        differences: Vec<String>,
    },
    /// The rows before the checkpoint are not those of the interrupted run.
    #[error(
        "the first {rows} rows of {input} differ from those of the interrupted run{detail}; restore the input to continue, or \
         give --restart to compute all rows again"
    )]
    InputChanged {
        /// Input.
        input: String,
        /// Rows that were done.
        rows: u64,
        /// Further detail, with a leading separator.
        detail: String,
    },
    /// A file of the interrupted run is shorter than its checkpoint says.
    #[error(
        "{file} has {found} bytes and its checkpoint {expected}: it was changed since; give --restart to compute all rows \
         again"
    )]
    PartialChanged {
        /// File.
        file: String,
        /// Bytes found.
        found: u64,
        /// Bytes according to the checkpoint.
        expected: u64,
    },
    /// The input cannot be read.
    #[error(transparent)]
    Input(#[from] InputError),
    /// A row of the input cannot be used.
    #[error("{position}: {reason}; fix the row, or give --skip-invalid to skip such rows")]
    InvalidRow {
        /// Input, line and column.
        position: String,
        /// Statement of what is wrong.
        reason: String,
    },
    /// The vectors of these rows could not be computed.
    #[error("rows {first} to {last}: {error}")]
    Backend {
        /// First row of the window, from 0.
        first: u64,
        /// Last row of the window.
        last: u64,
        /// Error of the backend.
        error: BackendError,
    },
    /// The vector of a row has another length than expected, or contains numbers that are not finite.
    #[error("row {row}: {reason}; check the model with `meridian model verify`")]
    InvalidVector {
        /// Row, from 0.
        row: u64,
        /// Statement of what is wrong.
        reason: String,
    },
    /// A file cannot be written or read.
    #[error("{file}: {reason}{}", hint(reason))]
    Storage {
        /// File.
        file: String,
        /// Error of the operating system.
        reason: io::Error,
    },
}

/// Returns the fix for an error of the operating system.
fn hint(reason: &io::Error) -> &'static str {
    match reason.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free space and run the same command again: it continues after the last checkpoint"
        }
        io::ErrorKind::PermissionDenied => "; allow this user to write there, or choose another --output",
        _ => "",
    }
}
