//! Model identity: everything that determines the vector or score of a text.
//!
//! Two replicas with equal [`ModelIdentity`] return equal rows (within the tolerance of the engine); the rows of two
//! replicas with different identities must never be compared. A replica computes its identity from the model it has
//! loaded, not from its configuration. The hub pins one [`ModelRevision`] for each deployment ([`ServedRevision`]), and
//! a region routes only to replicas of that revision.
//!
//! The digest of the files covers weights, tokenizer and every configuration file of the model. The other fields record
//! in which way the replica serves these files, because the same files can be served in different ways (another precision, another
//! prompt), and so that an operator can read in which field two replicas differ.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

use crate::deployment::Deployment;
use crate::engine::{EngineSpec, Task};

/// Length of a revision in hexadecimal digits: 64 bits of the digest, enough for the few models of one deployment.
pub const REVISION_LEN: usize = 16;

/// Everything that determines the rows that a replica returns for a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelIdentity {
    /// SHA-256 over the names and digests of the model's files, tokenizer and configuration included.
    pub model_digest: String,
    /// Engine and number format.
    pub engine: EngineSpec,
    /// Task, which determines the meaning of a row.
    pub task: Task,
    /// Pooling of token rows into one row; empty for a model with a head.
    pub pooling: String,
    /// Whether vectors are normalised to length one.
    pub normalized: bool,
    /// SHA-256 over the prompts that are put before texts, with the name of the default.
    pub prompts_digest: String,
    /// Number of values in a row.
    pub dimensions: usize,
    /// Maximum number of tokens of an input; a longer one is truncated if the request permits it.
    pub max_input_tokens: usize,
}

impl ModelIdentity {
    /// Returns the revision: the short name of this identity in headers, logs and route tables.
    pub fn revision(&self) -> ModelRevision {
        let ModelIdentity {
            model_digest,
            engine: EngineSpec { kind, precision },
            task,
            pooling,
            normalized,
            prompts_digest,
            dimensions,
            max_input_tokens,
        } = self;
        // The Debug format escapes line breaks, so a value cannot extend into the next line.
        let text = format!(
            "model={model_digest:?}\nengine={kind}\nprecision={precision}\ntask={task}\npooling={pooling:?}\n\
             normalized={normalized}\nprompts={prompts_digest:?}\ndimensions={dimensions}\n\
             max_input_tokens={max_input_tokens}\n"
        );
        let digest = Sha256::digest(text.as_bytes());
        ModelRevision(
            digest.iter().take(REVISION_LEN / 2).fold(0, |short, byte| short << 8 | u64::from(*byte)),
        )
    }
}

/// Short digest of a [`ModelIdentity`]: 16 hexadecimal digits, the value of `x-meridian-model-revision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelRevision(u64);

/// Error for a text that is not the revision of a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a model revision: write {REVISION_LEN} lowercase hexadecimal digits, such as 00ff00ff00ff00ff"
)]
pub struct RevisionError(String);

impl fmt::Display for ModelRevision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl FromStr for ModelRevision {
    type Err = RevisionError;

    fn from_str(text: &str) -> Result<ModelRevision, RevisionError> {
        let hexadecimal = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let digits = (text.len() == REVISION_LEN && text.bytes().all(hexadecimal)).then_some(text);
        let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
        number.map(ModelRevision).ok_or_else(|| RevisionError(text.chars().take(64).collect()))
    }
}

/// Part of a deployment that determines the identity of its replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSpec {
    /// Task of the model.
    pub task: Task,
    /// Model reference.
    pub model: String,
    /// Engine and number format.
    pub engine: EngineSpec,
}

impl Deployment {
    /// Returns the part that determines the identity of the replicas.
    pub fn model_spec(&self) -> ModelSpec {
        ModelSpec { task: self.task, model: self.model.clone(), engine: self.engine }
    }

    /// Returns the same deployment with another model.
    pub fn with_model(&self, spec: &ModelSpec) -> Deployment {
        let ModelSpec { task, model, engine } = spec.clone();
        Deployment { task, model, engine, ..self.clone() }
    }
}

/// Model as reported by a replica.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReportedModel {
    /// Revision of its identity.
    pub revision: ModelRevision,
    /// Model reference of its configuration.
    pub source: String,
    /// Task of the model.
    pub task: Task,
    /// Engine and number format.
    pub engine: EngineSpec,
}

/// Strictness of the comparison between a reported model and a deployment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelMatch {
    /// Engine, precision and model reference must match. A directory matches every reference, because directories differ
    /// between machines.
    Engine,
    /// Engine, precision and model reference must match, without exceptions.
    EngineAndModel,
}

impl ReportedModel {
    /// Returns whether the replica runs the model of `spec`.
    pub fn runs(&self, spec: &ModelSpec, required: ModelMatch) -> bool {
        let is_directory = |reference: &str| !reference.contains("://");
        let same_model = canonical(&self.source) == canonical(&spec.model)
            || required == ModelMatch::Engine && (is_directory(&self.source) || is_directory(&spec.model));
        self.engine == spec.engine && same_model
    }
}

/// Returns the canonical spelling of a model reference. Replicas report `pypi://` packages as PEP 503 normalises them
/// (runs of `-`, `_` and `.` become one `-`, in lower case), and folders of buckets and web servers with or without the last `/`.
fn canonical(reference: &str) -> String {
    let Some(rest) = reference.strip_prefix("pypi://") else {
        let folder = reference.strip_suffix('/').filter(|_| reference.contains("://"));
        return folder.unwrap_or(reference).to_owned();
    };
    let (package, version) =
        rest.split_once("==").map_or((rest, None), |(package, version)| (package, Some(version)));
    let parts: Vec<&str> = package.split(['-', '_', '.']).filter(|part| !part.is_empty()).collect();
    let package = parts.join("-").to_ascii_lowercase();
    version.map_or_else(|| format!("pypi://{package}"), |version| format!("pypi://{package}=={version}"))
}

/// Revision that a deployment is served with, and the one that replaces it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedRevision {
    /// Regions route to replicas of this revision only.
    pub current: ModelRevision,
    /// Change in progress.
    pub next: Option<NextRevision>,
}

/// Model that replaces the served one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextRevision {
    /// Model that its replicas run.
    pub spec: ModelSpec,
    /// Revision that the first of its replicas reported; `None` until then.
    pub revision: Option<ModelRevision>,
    /// Whether the change waits for an operator (`meridian apply --promote`) even when its replicas are ready.
    pub held: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{EngineKind, Precision};

    fn identity() -> ModelIdentity {
        ModelIdentity {
            model_digest: "ab".repeat(32),
            engine: EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 },
            task: Task::Embed,
            pooling: "mean".to_owned(),
            normalized: true,
            prompts_digest: "cd".repeat(32),
            dimensions: 384,
            max_input_tokens: 256,
        }
    }

    #[test]
    fn every_field_changes_the_revision() {
        let changes: [fn(&mut ModelIdentity); 9] = [
            |it| it.model_digest.replace_range(0..1, "0"),
            |it| it.engine.kind = EngineKind::TensorrtLlm,
            |it| it.engine.precision = Precision::Int8,
            |it| it.task = Task::Classify,
            |it| it.pooling = "cls".to_owned(),
            |it| it.normalized = false,
            |it| it.prompts_digest.replace_range(0..1, "0"),
            |it| it.dimensions = 256,
            |it| it.max_input_tokens = 512,
        ];
        let mut revisions = std::collections::BTreeSet::from([identity().revision()]);
        for change in changes {
            let mut changed = identity();
            change(&mut changed);
            assert!(revisions.insert(changed.revision()), "{changed:?}");
        }
        assert_eq!(identity().revision(), identity().revision());
    }

    #[test]
    fn a_revision_round_trips_and_other_texts_are_rejected() {
        let revision = identity().revision();
        assert_eq!(revision.to_string().parse(), Ok(revision));
        assert_eq!("00000000000000ff".parse::<ModelRevision>().unwrap().to_string(), "00000000000000ff");
        let upper = revision.to_string().to_ascii_uppercase() + "F";
        for text in ["", "ab", "00ff00ff00ff00fg", "00FF00FF00FF00FF", "00ff00ff00ff00ff0", &upper] {
            assert!(text.parse::<ModelRevision>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_report_matches_a_deployment_by_engine_and_reference() {
        let engine = EngineSpec { kind: EngineKind::Cpu, precision: Precision::F32 };
        let spec = |model: &str, engine| ModelSpec { task: Task::Embed, model: model.to_owned(), engine };
        let report = |source: &str| ReportedModel {
            revision: identity().revision(),
            source: source.to_owned(),
            task: Task::Embed,
            engine,
        };
        let check = |source: &str, model: &str, required: ModelMatch, expected: bool| {
            assert_eq!(report(source).runs(&spec(model, engine), required), expected, "{source} {model}");
        };
        check("pypi://a", "pypi://a", ModelMatch::EngineAndModel, true);
        check("pypi://a", "pypi://b", ModelMatch::Engine, false);
        check("pypi://gt-a", "pypi://GT__a", ModelMatch::EngineAndModel, true);
        check("pypi://a==1.0", "pypi://a==1.1", ModelMatch::EngineAndModel, false);
        check("s3://models/a", "s3://models/a/", ModelMatch::EngineAndModel, true);
        check(
            "https://models.example.com/a/",
            "https://models.example.com/a",
            ModelMatch::EngineAndModel,
            true,
        );
        check("s3://models/a", "s3://models/b", ModelMatch::Engine, false);
        check("/models/a", "pypi://a", ModelMatch::Engine, true);
        check("/models/a", "pypi://a", ModelMatch::EngineAndModel, false);
        let int8 = EngineSpec { precision: Precision::Int8, ..engine };
        assert!(!report("pypi://a").runs(&spec("pypi://a", int8), ModelMatch::Engine));
    }
}
