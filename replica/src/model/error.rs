//! Errors of loading a model; they contain the file, and for weights the tensor.

use std::io;
use std::path::PathBuf;

use super::shortened::{shortened_name, shortened_shape, shortened_text};

/// Reason why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file of the model or its engine is missing or cannot be read.
    #[error("{} cannot be read: {reason}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        reason: io::Error,
    },
    /// A file has invalid or unsupported content.
    #[error("{}: {problem}", path.display())]
    Content {
        /// Path of the file.
        path: PathBuf,
        /// Problem, with the key and its value.
        problem: String,
    },
    /// The family of the model (`model_type` of `config.json`) is not supported.
    #[error("{}: {problem}", path.display())]
    UnknownFamily {
        /// Path of the file.
        path: PathBuf,
        /// Family of the model, and the supported ones.
        problem: String,
    },
    /// The model is for another task than the one of the configuration. The files are valid.
    #[error("{}: {problem}", path.display())]
    OtherTask {
        /// Path of the file.
        path: PathBuf,
        /// Both tasks.
        problem: String,
    },
    /// A tensor of the weights cannot be used; the text has the cause.
    #[error(
        "{}: tensor `{tensor}` {problem}{}",
        path.display(), deciding_suffix(deciding.as_deref()), tensor = shortened_name(tensor)
    )]
    Tensor {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Problem of the tensor.
        problem: TensorProblem,
        /// Keys that require the tensor and decide its shape, if relevant.
        deciding: Option<Box<DecidingKeys>>,
    },
    /// Several errors.
    #[error("{}", joined(.0))]
    Several(Vec<ModelError>),
}

/// Keys of a configuration file that decide whether a tensor exists and its shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecidingKeys {
    /// Name of the file.
    pub file: String,
    /// Keys.
    pub keys: Vec<String>,
}

/// Returns the end of an error message about a tensor.
fn deciding_suffix(deciding: Option<&DecidingKeys>) -> String {
    let Some(DecidingKeys { file, keys }) = deciding else { return String::new() };
    let keys: Vec<String> = keys.iter().map(|key| format!("`{key}`")).collect();
    format!(" (as configured by {} in {file})", keys.join(", "))
}

/// Maximum number of problems in a message.
const SHOWN: usize = 20;

impl ModelError {
    /// Combines these errors into one; `None` if there are none.
    pub fn of_all(mut problems: Vec<ModelError>) -> Option<ModelError> {
        match problems.len() {
            0 | 1 => problems.pop(),
            _ => Some(ModelError::Several(problems)),
        }
    }

    /// Adds the keys that require a tensor and decide its shape.
    pub(crate) fn decided_by(self, file: &str, keys: &[&str]) -> ModelError {
        use TensorProblem::{Missing, Shape, Unused};
        match self {
            ModelError::Tensor {
                path, tensor, problem: problem @ (Missing | Shape { .. } | Unused), ..
            } => {
                let keys = keys.iter().map(|key| (*key).to_owned()).collect();
                let deciding = Some(Box::new(DecidingKeys { file: file.to_owned(), keys }));
                ModelError::Tensor { path, tensor, problem, deciding }
            }
            ModelError::Several(problems) => ModelError::Several(
                problems.into_iter().map(|problem| problem.decided_by(file, keys)).collect(),
            ),
            other => other,
        }
    }

    /// Returns whether the cause is on this machine: a file exists and cannot be read, there is no memory for it, or the
    /// configuration has the wrong task.
    pub(crate) fn is_of_this_machine(&self) -> bool {
        match self {
            ModelError::Read { reason, .. } => is_of_this_machine(reason),
            ModelError::OtherTask { .. } => true,
            ModelError::Several(problems) => problems.iter().any(ModelError::is_of_this_machine),
            ModelError::Content { .. } | ModelError::UnknownFamily { .. } | ModelError::Tensor { .. } => {
                false
            }
        }
    }

    /// Returns the errors one by one.
    pub fn into_all(self) -> Vec<ModelError> {
        match self {
            ModelError::Several(problems) => problems,
            one => vec![one],
        }
    }
}

/// Returns whether a file of a model exists, and cannot be read on this machine.
pub(crate) fn is_of_this_machine(reason: &io::Error) -> bool {
    !matches!(reason.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData)
}

fn joined(problems: &[ModelError]) -> String {
    let shown: Vec<String> = problems.iter().take(SHOWN).map(ToString::to_string).collect();
    let rest = problems.len().saturating_sub(SHOWN);
    let more = if rest > 0 { format!("; and {rest} more") } else { String::new() };
    shown.join("; ") + &more
}

/// Problem of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorProblem {
    /// A tensor that the configuration of the model describes is not in the weights.
    #[error("is missing")]
    Missing,
    /// A tensor of the weights does not occur in the model that the configuration describes.
    #[error(
        "is not used by the model that the configuration describes: the weights belong to another model, or to one \
         with additional parts; use the configuration that belongs to the weights"
    )]
    Unused,
    /// A tensor has another shape than the configuration of the model. The weights and the configuration belong to
    /// different models.
    #[error(
        "has the shape {actual}, expected {expected}",
        actual = shortened_shape(actual), expected = shortened_shape(expected)
    )]
    Shape {
        /// Shape by the configuration.
        expected: Vec<usize>,
        /// Shape in the file.
        actual: Vec<usize>,
    },
    /// A tensor has a number format that the engine does not support.
    #[error("has the type {actual}; F32, F16 and BF16 are supported")]
    Kind {
        /// Type in the file.
        actual: String,
    },
    /// A weight of the model is not a number, or is infinite.
    #[error(
        "contains {value} at row {}, column {}: the weights are damaged or their training diverged; use another \
         revision of the model",
        at[0], at[1]
    )]
    NotFinite {
        /// Value.
        value: String,
        /// Row and column.
        at: [usize; 2],
    },
    /// A weight of the model is so large that the result of the engine would overflow.
    #[error(
        "contains {value} at row {}, column {}, and the engine multiplies it by {factor}, which overflows a 32-bit \
         float; use another revision of the model",
        at[0], at[1]
    )]
    Overflow {
        /// Value.
        value: String,
        /// Row and column.
        at: [usize; 2],
        /// Factor by which the engine multiplies it.
        factor: String,
    },
    /// The file of the weights is shorter than its header says.
    #[error(
        "ends at byte {end}, but the file at byte {length}: the file is truncated; replace it with a complete one"
    )]
    Truncated {
        /// End of the tensor according to the header.
        end: u64,
        /// Length of the file.
        length: u64,
    },
    /// The header of the file of the weights is inconsistent.
    #[error(
        "has an invalid entry in the header ({reason}): the file is invalid; save the model again",
        reason = shortened_text(reason)
    )]
    Corrupt {
        /// Problem.
        reason: String,
    },
}
