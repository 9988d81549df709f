//! Decisions of the replica, without IO, clock or runtime: request parsing, limits, scheduling and batching.
//!
//! In the order in which a request passes them:
//!
//! 1. [`wire`]: bytes to a request, or to the field that is invalid; responses to bytes.
//! 2. [`limits`]: maximum counts, lengths and sizes; each limit has a name, a value and a reason.
//! 3. [`prompt`]: prompts that are prepended to texts; [`input`]: checks that the model can read an input, and
//!    truncation.
//! 4. [`tokenization`]: order in which texts are tokenized.
//! 5. [`priority`]: interactive requests and bulk requests.
//! 6. [`batch`]: order in which tokens are computed, expiry and cancellation; with [`window`], whether a batching delay
//!    pays, and [`cost`] and [`rate`], the measured cost and speed of the engine.
//! 7. [`scores`]: model outputs to the values that an API specifies.
//! 8. [`refusal`]: every error message with which the replica rejects a request.
//!
//! The shell around this crate (`replica`) owns the sockets, the threads and the clock, and executes the decisions.

pub mod batch;
pub mod cost;
pub mod input;
pub mod limits;
pub mod priority;
pub mod prompt;
pub mod rate;
pub mod refusal;
pub mod scores;
pub mod tokenization;
pub mod window;
pub mod wire;

/// Task of a model, as its configuration defines it.
///
/// Deployments use the terms of their callers: a deployment that reranks has a model that classifies with one label, or
/// a model that embeds, in which case the score is a similarity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// One vector per text.
    Embed,
    /// One number per label, for each text or pair of texts.
    Classify,
}

/// Types of the deployment file that describe a replica.
pub use regions::engine::UnknownName;
pub use regions::{DeploymentName, EngineKind, EngineSpec, MAX_TENSOR_PARALLEL, ModelIdentity, Precision};

/// Task of a deployment, as its file names it.
pub use regions::Task as DeploymentTask;
