//! The routes of text-embeddings-inference and BEI.

use std::sync::Arc;
use std::time::{Duration, Instant};

use replica_core::input::{Named, Overlong};
use replica_core::refusal::Refusal;
use replica_core::scores;
use replica_core::wire::openai::check_dimensions;
use replica_core::wire::openai::response::Rows;
use replica_core::wire::tei::{
    self, DecodeRequest, EmbedRequest, PredictRequest, SimilarityRequest, TokenizeRequest,
};
use replica_core::wire::vllm::{Around, ClassifyRequest};

use super::call::{Answer, Call, Done, Spent, reading, text};
use super::openai::vectors;
use super::rerank;
use crate::engine::Output;
use crate::purpose::{Purpose, activate};
use crate::tokenize::{Reading, Text};

/// `POST /`: what the model is for, as TEI routes it.
pub(super) async fn root(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    match &call.service().purpose {
        Purpose::Embed(_) => embed(call, body).await,
        Purpose::Label(labelling) if labelling.ranks() => rerank::tei(call, body).await,
        Purpose::Label(_) => predict(call, body).await,
    }
}

/// `POST /embed`.
pub(super) async fn embed(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| EmbedRequest::parse(body, limit)).await?;
    let embedding = call.service().purpose.embedding("/embed")?;
    let keep = check_dimensions(asked.dimensions, embedding.width)?;
    let normalize = asked.normalize;
    let done = embedded(&call, asked, Output::Pooled).await?;
    call.write(done, move |done| tei::write_rows(Rows::new(&vectors(done, keep, normalize), keep))).await
}

/// `POST /embed_all`: a row per token, special tokens included, as the last layer leaves it.
pub(super) async fn embed_all(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| EmbedRequest::parse(body, limit)).await?;
    call.service().purpose.token_rows("/embed_all")?;
    let done = embedded(&call, asked, Output::Tokens).await?;
    call.write(done, |done| tei::write_token_rows(&done.rows, done.width, &done.counts)).await
}

async fn embedded(call: &Call, asked: EmbedRequest, output: Output) -> Result<Done, Refusal> {
    let EmbedRequest { inputs, single, overlong, prompt, normalize: _, dimensions: _ } = asked;
    let embedding = call.service().purpose.embedding("/embed")?;
    let reading = Reading { prompt: embedding.prompt(&prompt)?, ..reading(overlong) };
    let named = Named { field: "inputs", single };
    let tokens = call.tokens(inputs, named, &prompt, reading).await?;
    call.compute(tokens, output).await
}

/// `POST /similarity`.
pub(super) async fn similarity(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.sentences();
    let asked = call.parse(body, move |body| SimilarityRequest::parse(body, limit)).await?;
    let SimilarityRequest { source, sentences, overlong, prompt } = asked;
    let embedding = call.service().purpose.embedding("/similarity")?;
    let reading = Reading { prompt: embedding.prompt(&prompt)?, ..reading(overlong) };
    let [source_field, sentences_field] = SimilarityRequest::FIELDS;
    let sentences = sentences.into_iter().map(Text::One).collect();
    let (source, sentences) = tokio::try_join!(
        call.read(vec![Text::One(source)], Named { field: source_field, single: true }, reading.clone()),
        call.read(sentences, Named { field: sentences_field, single: false }, reading),
    )?;
    let done = call.compute(source.and(sentences), Output::Pooled).await?;
    let (source, sentences) = done.rows.split_at(done.width);
    let cosines: Vec<f32> =
        sentences.chunks_exact(done.width).map(|row| scores::cosine(source, row)).collect();
    Ok(Answer { json: super::to_json(&cosines), spent: done.spent })
}

/// `POST /predict`.
pub(super) async fn predict(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.pairs();
    let asked = call.parse(body, move |body| PredictRequest::parse(body, limit)).await?;
    let PredictRequest { inputs, single, raw_scores, overlong } = asked;
    let labelling = call.service().purpose.labels("/predict")?;
    let head = &labelling.head;
    let texts = inputs.into_iter().map(text).collect();
    let tokens = call.read(texts, Named { field: "inputs", single }, labelling.reading(overlong)).await?;
    let mut done = call.compute(tokens, Output::Pooled).await?;
    if !raw_scores {
        activate(head, &mut done.rows);
    }
    let labels = head.labels.clone();
    let write = move |done: Done| tei::write_predictions(Rows::new(&done.rows, done.width), &labels, single);
    call.write(done, write).await
}

/// vLLM's `POST /classify`.
pub(super) async fn classify(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.pairs();
    let asked = call.parse(body, move |body| ClassifyRequest::parse(body, limit)).await?;
    let ClassifyRequest { model, input } = asked;
    let model = call.model(model)?;
    let labelling = call.service().purpose.labels("/classify")?;
    let head = &labelling.head;
    let texts = input.into_iter().map(Text::One).collect();
    let named = Named { field: "input", single: false };
    let tokens = call.read(texts, named, labelling.reading(Overlong::Refuse)).await?;
    let mut done = call.compute(tokens, Output::Pooled).await?;
    activate(head, &mut done.rows);
    let (labels, created, id) = (head.labels.clone(), call.app.started_at, call.id.clone());
    let write = move |done: Done| {
        let around = Around { id: id.as_str(), created, model: &model, tokens: done.spent.tokens };
        around.write_classes(Rows::new(&done.rows, done.width), &labels)
    };
    call.write(done, write).await
}

/// `POST /tokenize`.
pub(super) async fn tokenize(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| TokenizeRequest::parse(body, limit)).await?;
    let TokenizeRequest { texts, single, add_special_tokens, prompt } = asked;
    let prompt = match &call.service().purpose {
        Purpose::Embed(embedding) => embedding.prompt(&prompt)?,
        Purpose::Label(labelling) => labelling.prompt.clone(),
    };
    let (inputs, started) = (texts.len(), Instant::now());
    let tokens = call.service().tokenizer.inspect(texts, prompt, add_special_tokens).await;
    let tokens = tokens.map_err(|error| call.unread(error, Named { field: "inputs", single }))?;
    let count: usize = tokens.iter().map(Vec::len).sum();
    let spent = tokenized(&call, inputs, count, started.elapsed())?;
    let json = call.off_reactor(count > INLINE_TOKENS, move || super::to_json(&tokens)).await?;
    Ok(Answer { json, spent })
}

/// Tokens that are written as quickly as they would be handed to another thread.
const INLINE_TOKENS: usize = 512;

/// `POST /decode`.
pub(super) async fn decode(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| DecodeRequest::parse(body, limit)).await?;
    let DecodeRequest { ids, single, skip_special_tokens } = asked;
    let (inputs, count) = (ids.len(), ids.iter().map(Vec::len).sum());
    let started = Instant::now();
    let texts = call.service().tokenizer.decode(ids, skip_special_tokens).await;
    let texts = texts.map_err(|error| call.unread(error, Named { field: "ids", single }))?;
    let spent = tokenized(&call, inputs, count, started.elapsed())?;
    Ok(Answer { json: super::to_json(&texts), spent })
}

/// What a request cost that did not come to the engine.
fn tokenized(call: &Call, inputs: usize, tokens: usize, tokenize: Duration) -> Result<Spent, Refusal> {
    let (queue, engine) = (Duration::ZERO, Duration::ZERO);
    let lane = call.lane(inputs)?;
    Ok(Spent { lane, inputs: inputs as u64, tokens: tokens as u64, tokenize, queue, engine })
}
