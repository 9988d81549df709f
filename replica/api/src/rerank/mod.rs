//! Rerank API of Cohere (`POST /v1/rerank`, `/v2/rerank`), Jina and vLLM (`/v1/rerank`).
//!
//! All agree on the request and on `results`; members that one of them adds to the response (`meta`, `model`, `usage`)
//! are ignored by the others, so there is one response for all.

pub mod request;
pub mod response;

pub use request::{Document, RerankRequest};
pub use response::RerankResponse;
