//! OpenAI's `POST /v1/embeddings` and `GET /v1/models`, compatible with its stock clients.
//!
//! [`request`] parses untrusted requests, with an error for every mistake; [`response`] is written by the replica and
//! read by the load generator.

pub mod request;
pub mod response;

pub use request::{EmbeddingsRequest, check_dimensions};
pub use response::{EmbeddingsResponse, ModelList, ModelObject, Usage};
