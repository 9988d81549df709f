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
    #[error("{}: tensor `{tensor}` {problem}{}", path.display(), by(deciding.as_deref()))]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        problem: TensorProblem,
        /// What decides that it should be there and what its shape is, where that matters.
        deciding: Option<Box<Deciding>>,
    },
    /// More than one of these.
    #[error("{}", joined(.0))]
    Several(Vec<ModelError>),
}

/// Keys of a file that decide whether there is a tensor and what its shape is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deciding {
    /// The file.
    pub file: String,
    /// The keys.
    pub keys: Vec<String>,
}

/// The end of a sentence about a tensor.
fn by(deciding: Option<&Deciding>) -> String {
    let Some(Deciding { file, keys }) = deciding else { return String::new() };
    let keys: Vec<String> = keys.iter().map(|key| format!("`{key}`")).collect();
    format!(" (by {} of {file})", keys.join(", "))
}

/// Problems that are shown of several.
const SHOWN: usize = 20;

impl ModelError {
    /// All of these, of which there is at least one, as one error.
    pub fn of_all(mut problems: Vec<ModelError>) -> Option<ModelError> {
        match problems.len() {
            0 | 1 => problems.pop(),
            _ => Some(ModelError::Several(problems)),
        }
    }

    /// The same, with the keys of a file by which a tensor should be there and have its shape.
    pub(crate) fn decided_by(self, file: &str, keys: &[&str]) -> ModelError {
        use TensorProblem::{Missing, Shape, Unused};
        match self {
            ModelError::Tensor {
                path, tensor, problem: problem @ (Missing | Shape { .. } | Unused), ..
            } => {
                let keys = keys.iter().map(|key| (*key).to_owned()).collect();
                let deciding = Some(Box::new(Deciding { file: file.to_owned(), keys }));
                ModelError::Tensor { path, tensor, problem, deciding }
            }
            ModelError::Several(problems) => ModelError::Several(
                problems.into_iter().map(|problem| problem.decided_by(file, keys)).collect(),
            ),
            other => other,
        }
    }

    /// Each problem by itself.
    pub fn into_all(self) -> Vec<ModelError> {
        match self {
            ModelError::Several(problems) => problems,
            one => vec![one],
        }
    }
}

fn joined(problems: &[ModelError]) -> String {
    let shown: Vec<String> = problems.iter().take(SHOWN).map(ToString::to_string).collect();
    let rest = problems.len().saturating_sub(SHOWN);
    let more = if rest > 0 { format!("; and {rest} more") } else { String::new() };
    shown.join("; ") + &more
}

/// What is wrong with one tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorProblem {
    /// It is not there.
    #[error("is missing")]
    Missing,
    /// Nothing takes it.
    #[error(
        "is taken by nothing: it is of another model than the one that the configuration describes, or of one with more \
         parts, which would be left out"
    )]
    Unused,
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
    /// It holds NaN or an infinity.
    #[error(
        "holds {value} at row {}, column {}: the weights are damaged or their training diverged; pull the model again, \
         or take another revision of it",
        at[0], at[1]
    )]
    NotFinite {
        /// The number.
        value: String,
        /// Its row and column.
        at: [usize; 2],
    },
    /// It holds a number that is too large for the engine.
    #[error(
        "holds {value} at row {}, column {}, and the engine multiplies it by {factor}, which overflows a 32-bit float; \
         take another revision of the model",
        at[0], at[1]
    )]
    Overflow {
        /// The number.
        value: String,
        /// Its row and column.
        at: [usize; 2],
        /// What the engine multiplies it by.
        factor: String,
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
