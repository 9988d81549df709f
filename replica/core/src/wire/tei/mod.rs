//! The API of text-embeddings-inference (TEI), which BEI has as well.
//!
//! One deviation from today's TEI, where it matters to whoever moves over: nothing is cut silently. `truncate` is false
//! unless the request says otherwise, as it was in TEI before it became an option of the server, and `/info` says so.

pub mod request;
pub mod response;

pub use request::{
    DecodeRequest, EmbedRequest, PredictRequest, SimilarityRequest, TextsRequest, TokenizeRequest,
};
pub use response::{SimpleToken, write_predictions, write_ranks, write_rows, write_token_rows};
