//! Model server: tokenizer threads, batcher, engine and HTTP API.
//!
//! A request passes through `http`, `body`, the parser in `replica_core`, [`tokenize`], [`batcher`] and [`engine`], and
//! the response takes the same path back. In reading order:
//!
//! 1. [`config`]: configuration of a replica; [`server`]: its lifecycle, from startup to shutdown; `start`: the download
//!    of the model and the retries of a failed start.
//! 2. `http`: the routes over the shared state in `app`; `body` reads request bodies within limits, `respond` writes
//!    every error response, `purpose` decides which tasks the model serves.
//! 3. [`tokenize`]: text to tokens and back, on dedicated threads.
//! 4. [`batcher`]: drives the planner of `replica_core` and the engine; [`vectors`]: cache of computed rows. `identity`
//!    computes the exact identity of the loaded model.
//! 5. [`engine`]: computes batches; [`model`]: reads a model from disk for the engine.
//! 6. [`cache`]: downloads and stores models; [`validate`]: checks whether a replica could load a model.
//! 7. `events`: log lines and, in [`metrics`], counters.
//! 8. [`tune`]: finds and stores the batch settings of a model on a machine; [`verify`]: compares an engine with the
//!    reference; [`offline`]: embeds texts without a server.
// The tests put every key of a published config.json into one `json!`.
#![cfg_attr(test, recursion_limit = "256")]

mod app;
pub mod batcher;
mod body;
pub mod cache;
pub mod config;
pub mod engine;
mod events;
mod http;
pub mod metrics;
pub mod model;
mod model_identity;
pub mod offline;
mod purpose;
mod respond;
mod serve_error;
pub mod server;
mod start;
mod start_state;
pub mod tokenize;
mod trace;
pub mod tune;
pub mod validate;
pub mod vectors;
pub mod verify;

pub use config::Config;
pub use serve_error::{InvalidModel, ServeError};
pub use server::run;
