//! Validation of a batch, common to all engines.

use super::{Description, EngineError, Output, RaggedBatch};

/// Rejects a batch that the described engine cannot compute. Token types are checked only if the model is `typed`.
pub(super) fn check(
    described: &Description,
    typed: bool,
    batch: &RaggedBatch<'_>,
    output: Output,
    out: &[f32],
) -> Result<(), EngineError> {
    let Description { max_tokens, vocabulary, token_types, .. } = *described;
    let expected = described.numbers(batch, output);
    if out.len() != expected {
        let given = out.len();
        return Err(EngineError::OutputSize { expected, given });
    }
    for (sequence, range) in batch.sequences().enumerate() {
        let tokens = range.len();
        if tokens == 0 {
            return Err(EngineError::Empty { sequence });
        }
        if tokens > max_tokens {
            return Err(EngineError::TooLong { sequence, tokens, max_tokens });
        }
        let beyond =
            |ids: &[u32], limit: usize| ids[range.clone()].iter().position(|id| *id as usize >= limit);
        if let Some(position) = beyond(batch.token_ids(), vocabulary) {
            return Err(EngineError::UnknownToken {
                sequence,
                position,
                token: batch.token_ids()[range.start + position],
                vocabulary,
            });
        }
        // Tokenizers assign token types to pairs even for models that ignore them.
        let Some(types) = batch.type_ids().filter(|_| typed) else { continue };
        if let Some(position) = beyond(types, token_types) {
            return Err(EngineError::UnknownType {
                sequence,
                position,
                given: types[range.start + position],
                token_types,
            });
        }
    }
    Ok(())
}
