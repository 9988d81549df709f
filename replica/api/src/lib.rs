//! Data-plane API of Meridian, defined once: paths, headers, error codes, priorities, limits, and the bodies of requests
//! and responses. Gateway, replica, load generator and clients use these definitions. The crate is pure.
//!
//! In reading order:
//!
//! - [`api`]: every endpoint with its path, dialect and body; [`paths`] of the others; [`headers`]; [`priority`]; [`limits`].
//! - [`error`]: the closed list of error codes; [`refusal`]: every error message with which a replica rejects a request.
//! - One module for each API whose stock clients are served: [`openai`], [`rerank`] (Cohere, Jina), [`cohere`],
//!   [`voyage`], [`bedrock`], [`tei`] (TEI, BEI) and [`vllm`] (vLLM, Infinity). Each parses untrusted requests, with an
//!   error for every mistake ([`body`]), and writes its responses and errors, by hand where they are mostly numbers.
//! - [`embeddings`], [`vectors`], [`input`], [`prompt`] and [`ranking`]: types that the dialects share.
//! - [`jobs`]: requests that are computed later.
//! - [`retry`]: budgets that every client of the API keeps to.
//! - [`info`], [`identity`] and [`status`]: a replica's description of itself; [`start_failure`]: why it does not become ready.

pub mod api;
pub mod batches;
pub mod bedrock;
pub mod body;
pub mod cohere;
pub mod embeddings;
pub mod error;
pub mod error_page;
mod fields;
pub mod headers;
pub mod identity;
pub mod info;
pub mod input;
pub mod jobs;
pub mod limits;
pub mod openai;
pub mod paths;
pub mod priority;
pub mod prompt;
pub mod ranking;
pub mod refusal;
pub mod rerank;
pub mod retry;
pub mod start_failure;
pub mod status;
pub mod tei;
pub mod vectors;
pub mod vllm;
pub mod voyage;
