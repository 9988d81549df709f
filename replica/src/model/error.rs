//! Why a model cannot be loaded: always the file, and for weights always the tensor.

use std::io;
use std::path::PathBuf;

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file is absent or cannot be read.
    #[error("{} cannot be read: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the disk said.
        reason: io::Error,
    },
    /// A file is there and does not say what it should.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong, or not supported.
        problem: String,
    },
    /// The weights are not those of the model.
    #[error("{}: tensor `{tensor}` {problem}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        problem: TensorProblem,
    },
}

/// What is wrong with one tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorProblem {
    /// It is not there.
    #[error("is missing")]
    Missing,
    /// It has another shape than the configuration makes it have.
    #[error("has the shape {found:?} and should have {wanted:?}")]
    Shape {
        /// By the configuration.
        wanted: Vec<usize>,
        /// In the file.
        found: Vec<usize>,
    },
    /// Its numbers are of a kind that is not read.
    #[error("holds {found}; F32, F16 and BF16 are supported")]
    Kind {
        /// What the file says.
        found: String,
    },
    /// The file ends before it does.
    #[error("ends at byte {end} and the file at byte {length}: the file is truncated, pull the model again")]
    Truncated {
        /// Where the tensor should end.
        end: u64,
        /// Where the file ends.
        length: u64,
    },
    /// Its entry in the header contradicts itself.
    #[error("is described wrongly ({reason}): the file is corrupt, pull the model again")]
    Corrupt {
        /// How.
        reason: String,
    },
}
