//! What crosses a process border on the inference side: the APIs' shapes, their errors, their headers.
//!
//! One module per ecosystem whose stock clients are served: [`openai`], [`rerank`] (Cohere, Jina), [`cohere`], [`voyage`],
//! [`tei`] (TEI, BEI) and [`vllm`] (vLLM, Infinity). Each has a `request` that reads what strangers send, with an answer for every mistake, and writes its
//! answers by hand, because they are mostly numbers.

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
