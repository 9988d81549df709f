//! Identity of the loaded model.
//!
//! The identity is computed from the loaded model and from what `/info` reports about it, never from the configuration:
//! if the cache holds a different model than the configured one, the replica reports the one that it loaded.

use replica_api::info::ModelInfoV1;
use replica_core::{DeploymentTask, EngineSpec, ModelIdentity};
use sha2::{Digest, Sha256};

use crate::model::Prompts;

/// Returns the identity of a model on an engine. `task` is that of `model`.
pub(crate) fn of(
    model: &ModelInfoV1,
    task: DeploymentTask,
    engine: EngineSpec,
    prompts: &Prompts,
) -> ModelIdentity {
    ModelIdentity {
        model_digest: model.digest.clone(),
        engine,
        task,
        pooling: model.pooling.clone().unwrap_or_default(),
        normalized: model.normalized,
        prompts_digest: prompts_digest(prompts),
        dimensions: model.dimensions,
        max_input_tokens: model.max_input_tokens,
    }
}

fn prompts_digest(Prompts { by_name, default }: &Prompts) -> String {
    let mut digest = Sha256::new();
    // The Debug format quotes names and texts, so that adjacent values cannot be confused.
    for (name, text) in by_name {
        digest.update(format!("{name:?}={text:?}\n"));
    }
    digest.update(format!("default={default:?}\n"));
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prompt_and_the_choice_of_the_default_change_the_digest() {
        let prompts = |each: &[(&str, &str)], default: Option<&str>| Prompts {
            by_name: each.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect(),
            default: default.map(str::to_owned),
        };
        let all = [
            prompts(&[], None),
            prompts(&[("query", "")], None),
            prompts(&[("query", "q: ")], None),
            prompts(&[("query", "q: ")], Some("query")),
            prompts(&[("query", "q: "), ("passage", "p: ")], Some("query")),
            prompts(&[("query", "q: \"\n\"passage\"=\"p: ")], Some("query")),
        ];
        let digests: std::collections::BTreeSet<_> = all.iter().map(prompts_digest).collect();
        assert_eq!(digests.len(), all.len());
    }
}
