//! The API of text-embeddings-inference (TEI), which BEI has as well.
//!
//! `truncate` decides what becomes of an input that is too long; without it the replica's `auto_truncate` does, which is
//! false unless the replica's configuration says otherwise, and `/info` shows it.
//!
//! `POST /tokenize` has the words of vLLM as well, whose clients meet the same path.

pub mod request;
pub mod response;

pub use request::{
    Classification, DecodeRequest, EmbedRequest, Function, PredictRequest, SimilarityRequest, TextsRequest,
    TokenizeAnswer, TokenizeRequest, VllmTokens,
};
pub use response::{Labels, SimpleToken, write_predictions, write_ranks, write_rows, write_token_rows};
