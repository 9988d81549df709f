//! Whether an engine can take a batch: what it would have to say to each of them, said once for all engines.

use super::{Description, EngineError, Output, RaggedBatch};

/// Refuses what the engine that is described cannot compute; a model that is not `typed` has no use for token types.
pub(super) fn check(
    described: &Description,
    typed: bool,
    batch: &RaggedBatch<'_>,
    output: Output,
    out: &[f32],
) -> Result<(), EngineError> {
    let Description { max_tokens, vocabulary, token_types, .. } = *described;
    let wanted = described.numbers(batch, output);
    if out.len() != wanted {
        let given = out.len();
        return Err(EngineError::OutputSize { wanted, given });
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
        // Tokenizers tell the texts of a pair apart also for models that have no use for it.
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
