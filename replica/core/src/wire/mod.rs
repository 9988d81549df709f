//! Wire formats of inference: request and response bodies, errors, headers.
//!
//! One module per ecosystem whose stock clients are served: [`openai`], [`rerank`] (Cohere, Jina), [`cohere`],
//! [`voyage`], [`tei`] (TEI, BEI) and [`vllm`] (vLLM, Infinity). Each parses untrusted requests, with an error for
//! every mistake, and writes its responses by hand, because they are mostly numbers.

pub mod api;
pub mod body;
pub mod cohere;
pub mod error;
mod fields;
pub mod headers;
pub mod identity;
pub mod info;
pub mod openai;
pub mod rerank;
pub mod status;
pub mod tei;
pub mod vllm;
pub mod voyage;
