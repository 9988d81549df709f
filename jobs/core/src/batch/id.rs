//! Identifiers of files and batches. They have the time and the random bits of a job's identifier, with another prefix.

use crate::job::{DurableJobId, UnixMillis};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

const JOB_PREFIX: &str = "job_";
const BATCH_PREFIX: &str = "batch_";
const FILE_PREFIX: &str = "file-";
const OUTPUT_SUFFIX: &str = "-output";
const ERRORS_SUFFIX: &str = "-errors";

/// Identifier of a batch: `batch_` and 26 characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BatchId(pub DurableJobId);

/// Identifier of an uploaded file: `file-` and 26 characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UploadId(pub DurableJobId);

/// Identifier of a file: an uploaded one, or one of the two files that a batch writes, which have its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchFileId {
    /// Uploaded.
    Upload(UploadId),
    /// Responses of a batch.
    Output(BatchId),
    /// Errors of a batch.
    Errors(BatchId),
}

/// Error for a text that is not the identifier of a file or of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an identifier of a file or a batch, as in the response to its creation")]
pub struct InvalidBatchId;

impl BatchId {
    /// Returns the time of its creation.
    pub fn created(self) -> UnixMillis {
        self.0.submitted()
    }
}

impl BatchFileId {
    /// Returns the time and random bits by which a list of files is sorted.
    pub fn number(self) -> DurableJobId {
        match self {
            BatchFileId::Upload(UploadId(number))
            | BatchFileId::Output(BatchId(number))
            | BatchFileId::Errors(BatchId(number)) => number,
        }
    }
}

/// Returns the digits of an identifier.
fn digits(number: DurableJobId) -> String {
    number.to_string().split_off(JOB_PREFIX.len())
}

fn number(digits: &str) -> Result<DurableJobId, InvalidBatchId> {
    format!("{JOB_PREFIX}{digits}").parse().map_err(|_| InvalidBatchId)
}

impl fmt::Display for BatchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{BATCH_PREFIX}{}", digits(self.0))
    }
}

impl FromStr for BatchId {
    type Err = InvalidBatchId;

    fn from_str(text: &str) -> Result<BatchId, InvalidBatchId> {
        number(text.strip_prefix(BATCH_PREFIX).ok_or(InvalidBatchId)?).map(BatchId)
    }
}

impl fmt::Display for BatchFileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match self {
            BatchFileId::Upload(_) => "",
            BatchFileId::Output(_) => OUTPUT_SUFFIX,
            BatchFileId::Errors(_) => ERRORS_SUFFIX,
        };
        write!(f, "{FILE_PREFIX}{}{suffix}", digits(self.number()))
    }
}

impl FromStr for BatchFileId {
    type Err = InvalidBatchId;

    fn from_str(text: &str) -> Result<BatchFileId, InvalidBatchId> {
        let rest = text.strip_prefix(FILE_PREFIX).ok_or(InvalidBatchId)?;
        if let Some(rest) = rest.strip_suffix(OUTPUT_SUFFIX) {
            return number(rest).map(|number| BatchFileId::Output(BatchId(number)));
        }
        if let Some(rest) = rest.strip_suffix(ERRORS_SUFFIX) {
            return number(rest).map(|number| BatchFileId::Errors(BatchId(number)));
        }
        number(rest).map(|number| BatchFileId::Upload(UploadId(number)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_keep_their_text() {
        let number = DurableJobId::new(UnixMillis(7), 9);
        let batch = BatchId(number);
        assert_eq!(batch.to_string().parse(), Ok(batch));
        let files =
            [BatchFileId::Upload(UploadId(number)), BatchFileId::Output(batch), BatchFileId::Errors(batch)];
        for file in files {
            assert_eq!(file.to_string().parse(), Ok(file));
        }
        for wrong in ["", "file-", "batch_", &number.to_string(), "file-x-output", &format!("{batch}0")] {
            assert_eq!(wrong.parse::<BatchFileId>(), Err(InvalidBatchId), "{wrong}");
            assert_eq!(wrong.parse::<BatchId>(), Err(InvalidBatchId), "{wrong}");
        }
    }
}
