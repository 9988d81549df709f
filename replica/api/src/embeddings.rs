//! Embeddings independent of the dialect: what a dialect's request asks for, and what its response is made of.
//!
//! A replica computes every dialect in the same way: it parses a body, takes the [`EmbeddingsCall`] from it, computes, and
//! has the rest of the request write the response.

use crate::input::{Input, InputField, Truncation};
use crate::prompt::PromptChoice;
use crate::refusal::Refusal;
use crate::vectors::RowsView;

/// Request for embeddings in a dialect.
pub trait EmbeddingsDialect: Sized + Send + 'static {
    /// Rejects token ids that may be of another tokenizer; `accepts_token_ids` is the replica's setting, and `digest`
    /// that of its model.
    ///
    /// # Errors
    ///
    /// Names the alternatives of the caller. A dialect without token ids has none.
    fn check_token_ids(&self, accepts_token_ids: bool, digest: &str) -> Result<(), Refusal> {
        let _ = (accepts_token_ids, digest);
        Ok(())
    }

    /// Returns what to compute, and the function that writes the response.
    fn into_call(self) -> (EmbeddingsCall, impl FnOnce(EmbeddingsResult<'_>) -> Vec<u8> + Send + 'static);
}

/// Embeddings to compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingsCall {
    /// The deployment, if the body names one.
    pub model: Option<String>,
    /// Inputs.
    pub input: Input,
    /// Field of the inputs, for error messages.
    pub field: InputField,
    /// Prompt for each text.
    pub prompt: PromptChoice,
    /// Truncation of inputs that are too long.
    pub truncation: Truncation,
    /// Requested dimensions of a vector, if specified.
    pub dimensions: Option<u64>,
    /// Whether vectors are normalized to length one; absent: as configured for the replica.
    pub normalize: Option<bool>,
}

/// Computed embeddings.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingsResult<'a> {
    /// Identifier of the request.
    pub id: &'a str,
    /// Name of the deployment.
    pub model: &'a str,
    /// One vector for each input.
    pub rows: RowsView<'a>,
    /// Number of computed tokens.
    pub tokens: u64,
}
