//! Wire format of the model identity of a replica.

use regions::{EngineSpec, ModelIdentity, ModelRevision, ReportedModel};
use serde::{Deserialize, Serialize};

/// The model identity in `GET /status` and `GET /info`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityV1 {
    /// [`ModelIdentity::revision`].
    pub revision: String,
    /// [`ModelIdentity::model_digest`].
    pub model_digest: String,
    /// The engine of [`ModelIdentity::engine`].
    pub engine: String,
    /// The number format of [`ModelIdentity::engine`].
    pub precision: String,
    /// [`ModelIdentity::task`].
    pub task: String,
    /// [`ModelIdentity::pooling`].
    pub pooling: String,
    /// [`ModelIdentity::normalized`].
    pub normalized: bool,
    /// [`ModelIdentity::prompts_digest`].
    pub prompts_digest: String,
    /// [`ModelIdentity::dimensions`].
    pub dimensions: usize,
    /// [`ModelIdentity::max_input_tokens`].
    pub max_input_tokens: usize,
}

impl From<&ModelIdentity> for IdentityV1 {
    fn from(identity: &ModelIdentity) -> IdentityV1 {
        let revision = identity.revision().to_string();
        let ModelIdentity {
            model_digest,
            engine: EngineSpec { kind, precision },
            task,
            pooling,
            normalized,
            prompts_digest,
            dimensions,
            max_input_tokens,
        } = identity;
        IdentityV1 {
            revision,
            model_digest: model_digest.clone(),
            engine: kind.to_string(),
            precision: precision.to_string(),
            task: task.to_string(),
            pooling: pooling.clone(),
            normalized: *normalized,
            prompts_digest: prompts_digest.clone(),
            dimensions: *dimensions,
            max_input_tokens: *max_input_tokens,
        }
    }
}

impl IdentityV1 {
    /// Returns the part of the identity that a region needs, for a replica whose model reference is `source`.
    ///
    /// # Errors
    ///
    /// The first field that cannot be parsed, with its value.
    pub fn reported(&self, source: &str) -> Result<ReportedModel, String> {
        fn field<T: std::str::FromStr<Err: std::fmt::Display>>(name: &str, text: &str) -> Result<T, String> {
            text.parse().map_err(|error| format!("identity.{name}: {error}"))
        }
        let revision: ModelRevision = field("revision", &self.revision)?;
        let engine = EngineSpec {
            kind: field("engine", &self.engine)?,
            precision: field("precision", &self.precision)?,
        };
        Ok(ReportedModel { revision, source: source.to_owned(), task: field("task", &self.task)?, engine })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use regions::{EngineKind, Precision, Task};

    #[test]
    fn a_region_parses_the_identity_of_a_replica_and_names_an_invalid_field() {
        let identity = ModelIdentity {
            model_digest: "00".repeat(32),
            engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::Int8 },
            task: Task::Embed,
            pooling: "mean".to_owned(),
            normalized: true,
            prompts_digest: "11".repeat(32),
            dimensions: 384,
            max_input_tokens: 256,
        };
        let wire = IdentityV1::from(&identity);
        let read = wire.reported("pypi://m").unwrap();
        assert_eq!((read.revision, read.engine), (identity.revision(), identity.engine));
        let wrong = IdentityV1 { precision: "int9".to_owned(), ..wire };
        assert!(wrong.reported("pypi://m").unwrap_err().contains("identity.precision: unknown `int9`"));
    }
}
