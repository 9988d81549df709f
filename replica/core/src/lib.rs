//! Decisions of the replica, without IO, clock or runtime: scheduling and batching. Requests, limits and errors are
//! defined in `replica_api`.
//!
//! In the order in which a request passes them:
//!
//! 1. [`tokenization`]: order in which texts are tokenized.
//! 2. [`batch`]: order in which tokens are computed, expiry and cancellation; with [`window`], whether a batching delay
//!    pays, and [`cost`] and [`rate`], the measured cost and speed of the engine.
//! 3. [`scores`]: model outputs to the values that an API specifies.
//!
//! Before the first request: [`download`], the remaining time of the download of the model.
//!
//! The shell around this crate (`replica`) owns the sockets, the threads and the clock, and executes the decisions.

pub mod batch;
pub mod cost;
pub mod download;
pub mod rate;
pub mod scores;
pub mod tokenization;
pub mod window;

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
