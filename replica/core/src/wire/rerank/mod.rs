//! Rerank as Cohere (`POST /v1/rerank`, `/v2/rerank`), Jina and vLLM (`/v1/rerank`) have it.
//!
//! The four agree on the request and on `results`; what one of them adds to the answer (`meta`, `model`, `usage`) the
//! others ignore, so there is one answer for all.

pub mod request;
pub mod response;

pub use request::{Document, RerankRequest};
pub use response::RerankResponse;
