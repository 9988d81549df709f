//! Errors of tuning.

use std::io;
use std::path::PathBuf;

use replica_core::Precision;

use super::quality::Quality;

/// Reason why tuning failed.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// `meridian tune` cannot load or compute the model; the text has the cause.
    #[error("the model cannot be computed: {0}")]
    Engine(String),
    /// `meridian tune` cannot tokenize its fixed texts with the tokenizer of the model.
    #[error("the texts for comparing precisions cannot be tokenized: {0}")]
    Tokenizer(String),
    /// `meridian tune` has fixed texts, and the model accepts none of them.
    #[error(
        "all texts are too long for this model, so the accuracy of a precision cannot be measured; tune f32 only"
    )]
    NoTexts,
    /// The precisions that `meridian tune` may use are all less accurate than required.
    #[error(
        "{precision} has a mean cosine of {:.4} and a minimum of {:.4} compared with f32, which is not accurate \
         enough; add f32 to the precisions",
        quality.mean_cosine, quality.min_cosine
    )]
    NotGoodEnough {
        /// Most accurate of the requested precisions.
        precision: Precision,
        /// Its accuracy.
        quality: Quality,
    },
    /// The time of `meridian tune` was too short for a single measurement.
    #[error("no setting could be measured in the given time; raise --seconds")]
    NoTime,
    /// The output file of `meridian tune` cannot be written.
    #[error("cannot write {path}: {reason}; set another path with --out", path = path.display())]
    Write {
        /// Path.
        path: PathBuf,
        /// Error of the operating system.
        reason: io::Error,
    },
}

impl TuneError {
    pub(super) fn engine(problem: impl std::fmt::Display) -> TuneError {
        TuneError::Engine(problem.to_string())
    }
}
