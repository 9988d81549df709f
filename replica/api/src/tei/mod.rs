//! The API of text-embeddings-inference (TEI), which BEI implements as well.
//!
//! `truncate` decides whether an input that is too long is truncated; the default is the replica's `auto_truncate`,
//! which is false unless the replica's configuration sets it, and which `/info` shows.
//!
//! `POST /tokenize` also supports the format of vLLM, whose clients use the same path.

pub mod error;
pub mod request;
pub mod response;

pub use error::{TeiErrorBody, TeiErrorType};
pub use request::{
    ActivationFunction, Classification, DecodeRequest, EmbedRequest, PredictRequest, SimilarityRequest,
    TextsRequest, TokenizeFormat, TokenizeRequest, VllmTokenizeOptions,
};
pub use response::{Labels, SimpleToken, write_predictions, write_ranks, write_rows, write_token_rows};
