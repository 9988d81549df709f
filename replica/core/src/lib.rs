//! The replica's decisions, without IO, clock or runtime: what the wire says, what is too much, what goes into the
//! next batch.
//!
//! In the order in which a request meets them:
//!
//! 1. [`wire`] — bytes to a request, or to the field that is wrong with it; and answers to bytes.
//! 2. [`limits`] — what is too many, too long, too big; each limit has a name, a value and a reason.
//! 3. [`prompt`] — what stands before a text; [`input`] — whether the model can read it, and how it is cut.
//! 4. [`turns`] — whose texts are tokenised next.
//! 5. [`priority`] — who is waited for, and who wants throughput.
//! 6. [`batch`] — whose tokens are computed next, and whom nobody waits for any more; with [`window`], whether waiting
//!    for company pays, and what [`cost`] and [`rate`] have learnt of the engine.
//! 7. [`scores`] — from what the model computes to what an API promises.
//! 8. [`refusal`] — every sentence with which the replica says no.
//!
//! The shell around it (`replica`) owns the sockets, the threads and the clock, and does as it is told.

pub mod batch;
pub mod cost;
pub mod input;
pub mod limits;
pub mod priority;
pub mod prompt;
pub mod rate;
pub mod refusal;
pub mod scores;
pub mod turns;
pub mod window;
pub mod wire;

/// What a model is for, as its configuration says.
///
/// Deployments say it in the words of their callers: one that reranks has a model that classifies with one label, or a
/// model that embeds, whose answer is then a similarity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// One vector per text.
    Embed,
    /// A number per label for each text or pair of texts.
    Classify,
}

/// What a replica is asked to be, in the words of the deployment file.
pub use regions::deployment::UnknownName;
pub use regions::{DeploymentName, EngineKind, EngineSpec, MAX_TENSOR_PARALLEL, ModelIdentity, Precision};

/// What a deployment does, as its file says it.
pub use regions::Task as DeploymentTask;
