//! OpenAI's `POST /v1/embeddings` and `GET /v1/models`, as its stock clients speak them.
//!
//! [`request`] reads what strangers send, so it is a parser with an answer for every mistake; [`response`] is written
//! by us and read back by our own load generator.

pub mod request;
pub mod response;

pub use request::{EmbeddingsRequest, Encoding, check_dimensions};
pub use response::{EmbeddingsResponse, ModelList, ModelObject, Usage};
