//! The replica's decisions, without IO, clock or runtime: what the wire says, what is too much, what goes into the
//! next batch.
//!
//! In the order in which a request meets them:
//!
//! 1. [`wire::openai`] — bytes to a request, or to the field that is wrong with it.
//! 2. [`limits`] — what is too many, too long, too big; each limit has a name, a value and a reason.
//! 3. [`input`] — what is to be embedded, and whether the model can read it.
//! 4. [`batch`] — whose tokens are computed next, and whom nobody waits for any more.
//! 5. [`refusal`] — every sentence with which the replica says no.
//!
//! The shell around it (`replica`) owns the sockets, the threads and the clock, and does as it is told.

pub mod batch;
pub mod input;
pub mod limits;
pub mod rate;
pub mod refusal;
pub mod wire;

/// What a replica is asked to be, in the words of the deployment file.
pub use regions::{DeploymentName, EngineKind, EngineSpec, Precision};
