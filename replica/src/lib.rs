//! The model server: tokenizer threads, a batch manager, an engine, and the HTTP API in front of them.
//!
//! A request goes through `http`, `body`, the parser in `replica_core`, [`tokenize`], [`batcher`] and [`engine`], and
//! back. In reading order:
//!
//! 1. [`config`] — what a replica is told; [`server`] — its life, from the start to the end.
//! 2. `http` — the routes, over what `app` holds; `body` reads within limits, `respond` writes every refusal, `purpose`
//!    says what may be asked of the model.
//! 3. [`tokenize`] — texts to tokens and back, on threads of their own.
//! 4. [`batcher`] — drives the planner of `replica_core` and the engine; [`vectors`] — rows that were computed before.
//!    `identity` says which model that is, exactly.
//! 5. [`engine`] — what computes; [`model`] — a model on disk, as the engine reads it.
//! 6. [`cache`] — where models come from and where they lie; [`validate`] — whether a replica could load one.
//! 7. `events` — what is logged and, in [`metrics`], counted.
//! 8. [`tune`] — finds the settings of batches for a model and a machine, and keeps them for replicas; [`verify`] — whether an
//!    engine says the same as the reference.
// The keys of a published config.json are many for one `json!`.
#![cfg_attr(test, recursion_limit = "256")]

mod app;
pub mod batcher;
mod body;
pub mod cache;
pub mod config;
pub mod engine;
mod events;
mod http;
mod identity;
pub mod metrics;
pub mod model;
mod purpose;
mod respond;
pub mod server;
pub mod tokenize;
pub mod tune;
pub mod validate;
pub mod vectors;
pub mod verify;

pub use config::Config;
pub use server::{ServeError, run};
