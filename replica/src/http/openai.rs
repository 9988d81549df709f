//! `POST /v1/embeddings`, as OpenAI's clients ask and are answered.
//!
//! What is too long is refused and never cut, as OpenAI does it.

use std::sync::Arc;

use replica_core::input::{Named, Overlong};
use replica_core::refusal::Refusal;
use replica_core::scores;
use replica_core::wire::openai::response::Rows;
use replica_core::wire::openai::{EmbeddingsRequest, EmbeddingsResponse, check_dimensions};

use super::call::{Answer, Call, Done};
use crate::engine::Output;
use crate::tokenize::Reading;

pub(super) async fn embeddings(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| EmbeddingsRequest::parse(body, limit)).await?;
    let EmbeddingsRequest { model, input, single, encoding, dimensions, prompt } = asked;
    let model = call.model(Some(model))?;
    let embedding = call.service().purpose.embedding("/v1/embeddings")?;
    let keep = check_dimensions(dimensions, embedding.width)?;
    let reading = Reading { prompt: embedding.prompt(&prompt)?, overlong: Overlong::Refuse, most: None };
    let named = Named { field: "input", single };
    let tokens = call.tokens(input, named, &prompt, reading).await?;
    let done = call.compute(tokens, Output::Pooled).await?;
    let normalize = embedding.normalize;
    let write = move |done| {
        let Done { spent, .. } = done;
        let rows = vectors(done, keep, normalize);
        EmbeddingsResponse::write(&model, Rows::new(&rows, keep), encoding, spent.tokens)
    };
    call.write(done, write).await
}

/// Vectors of `keep` numbers.
pub(super) fn vectors(done: Done, keep: usize, normalize: bool) -> Vec<f32> {
    let mut rows = scores::shorten(done.rows, done.width, keep);
    if normalize {
        scores::normalize(&mut rows, keep);
    }
    rows
}
