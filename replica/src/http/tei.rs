//! The routes of text-embeddings-inference and BEI.

use std::sync::Arc;
use std::time::{Duration, Instant};

use replica_core::input::InputField;
use replica_core::refusal::Refusal;
use replica_core::scores;
use replica_core::wire::openai::response::RowsView;
use replica_core::wire::tei::{
    self, ActivationFunction, DecodeRequest, EmbedRequest, Labels, PredictRequest, SimilarityRequest,
    TokenizeFormat, TokenizeRequest, VllmTokenizeOptions,
};
use replica_core::wire::vllm::{ClassifyRequest, ResponseMetadata, write_tokens};

use super::call::{Answer, Call, Done, Spent, text};
use super::openai::{self, Wanted};
use super::rerank;
use crate::engine::Output;
use crate::purpose::Purpose;
use crate::tokenize::{Reading, Text};

/// `POST /`: what the model is for, as TEI routes it; Hugging Face's clients know no other path.
pub(super) async fn root(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    match &call.service().purpose {
        Purpose::Embed(_) => embed_or_compare(call, body).await,
        Purpose::Label(labelling) if labelling.ranks() => rerank::tei(call, body).await,
        Purpose::Label(_) => predict(call, body).await,
    }
}

async fn embed_or_compare(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    enum Asked {
        Embed(EmbedRequest),
        Compare(SimilarityRequest),
    }
    let (inputs, sentences) = (call.app.limits.inputs(), call.app.limits.sentences());
    let parse = move |body: &[u8]| {
        if SimilarityRequest::is_one(body) {
            SimilarityRequest::parse(body, sentences).map(Asked::Compare)
        } else {
            EmbedRequest::parse(body, inputs).map(Asked::Embed)
        }
    };
    match call.parse(body, parse).await? {
        Asked::Embed(asked) => embedded(&call, asked).await,
        Asked::Compare(asked) => compared(&call, asked).await,
    }
}

/// `POST /embed`.
pub(super) async fn embed(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| EmbedRequest::parse(body, limit)).await?;
    embedded(&call, asked).await
}

async fn embedded(call: &Call, asked: EmbedRequest) -> Result<Answer, Refusal> {
    let EmbedRequest { inputs, single, truncation, prompt, normalize, dimensions } = asked;
    let named = InputField { field: "inputs", single };
    let (path, input) = ("/embed", inputs);
    let wanted = Wanted { path, input, named, prompt, truncation, dimensions, normalize };
    let (done, keep) = openai::embed(call, wanted).await?;
    call.write(done, move |done| tei::write_rows(RowsView::new(&done.rows, keep))).await
}

/// `POST /embed_all`: a row per token, special tokens included, as the last layer leaves it.
pub(super) async fn embed_all(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| EmbedRequest::parse(body, limit)).await?;
    let EmbedRequest { inputs, single, truncation, prompt, normalize, dimensions } = asked;
    if normalize == Some(true) {
        let problem = "is true, and the rows of tokens are returned as they are";
        return Err(Refusal::invalid("normalize", "normalize", problem, "false, or ask at /pooling"));
    }
    if dimensions.is_some() {
        let problem = "is given, and the rows of tokens are returned whole";
        return Err(Refusal::invalid("dimensions", "dimensions", problem, "no `dimensions`"));
    }
    call.service().purpose.token_rows("/embed_all")?;
    let embedding = call.service().purpose.embedding("/embed_all")?;
    let named = InputField { field: "inputs", single };
    let reading = Reading { prompt: embedding.prompt(&prompt)?, ..call.reading(truncation, named)? };
    let tokens = call.tokens(inputs, named, &prompt, reading).await?;
    let done = call.compute(tokens, Output::Tokens).await?;
    call.write(done, |done| tei::write_token_rows(&done.rows, done.width, &done.counts)).await
}

/// `POST /similarity`.
pub(super) async fn similarity(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.sentences();
    let asked = call.parse(body, move |body| SimilarityRequest::parse(body, limit)).await?;
    compared(&call, asked).await
}

async fn compared(call: &Call, asked: SimilarityRequest) -> Result<Answer, Refusal> {
    let SimilarityRequest { source, sentences, truncation, prompt } = asked;
    let embedding = call.service().purpose.embedding("/similarity")?;
    let [source_field, sentences_field] = SimilarityRequest::FIELDS;
    let reading = call.reading(truncation, InputField { field: sentences_field, single: false })?;
    let reading = Reading { prompt: embedding.prompt(&prompt)?, ..reading };
    let sentences = sentences.into_iter().map(Text::One).collect();
    let (source, sentences) = tokio::try_join!(
        call.read(vec![Text::One(source)], InputField { field: source_field, single: true }, reading.clone()),
        call.read(sentences, InputField { field: sentences_field, single: false }, reading),
    )?;
    let done = call.compute(source.and(sentences), Output::Pooled).await?;
    let (source, sentences) = done.rows.split_at(done.width);
    let cosine = |row: &[f32]| scores::cosine(&source[..embedding.width], &row[..embedding.width]);
    let cosines: Vec<f32> = sentences.chunks_exact(done.width).map(cosine).collect();
    Ok(Answer { json: super::to_json(&cosines), spent: done.spent })
}

/// `POST /predict`.
pub(super) async fn predict(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.pairs();
    let asked = call.parse(body, move |body| PredictRequest::parse(body, limit)).await?;
    let PredictRequest { inputs, single, raw_scores, truncation, parameters } = asked;
    let labelling = call.service().purpose.labels("/predict")?;
    let head = &labelling.head;
    let texts = inputs.into_iter().map(text).collect();
    let named = InputField { field: "inputs", single };
    let reading = Reading { prompt: labelling.prompt.clone(), ..call.reading(truncation, named)? };
    let tokens = call.read(texts, named, reading).await?;
    let mut done = call.compute(tokens, Output::Pooled).await?;
    match parameters.and_then(|parameters| parameters.function) {
        None if raw_scores => {}
        None => head.activate(&mut done.rows),
        Some(ActivationFunction::None) => {}
        Some(ActivationFunction::Softmax) => {
            done.rows.chunks_exact_mut(head.labels.len()).for_each(scores::softmax);
        }
        Some(ActivationFunction::Sigmoid) => {
            done.rows.iter_mut().for_each(|logit| *logit = scores::sigmoid(*logit));
        }
    }
    let names = head.labels.clone();
    let write = move |done: Done| {
        let top_k = parameters.and_then(|parameters| parameters.top_k);
        // Hugging Face's pipelines answer one text with a list in a list, and their clients take the first.
        let alone = single && parameters.is_none();
        tei::write_predictions(RowsView::new(&done.rows, done.width), Labels { names: &names, top_k, alone })
    };
    call.write(done, write).await
}

/// vLLM's `POST /classify`.
pub(super) async fn classify(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    labelled(call, body, false).await
}

/// Infinity's `POST /classify`.
pub(super) async fn classify_infinity(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    labelled(call, body, true).await
}

async fn labelled(call: Arc<Call>, body: Vec<u8>, as_infinity: bool) -> Result<Answer, Refusal> {
    let limit = call.app.limits.pairs();
    let asked = call.parse(body, move |body| ClassifyRequest::parse(body, limit)).await?;
    let ClassifyRequest { model, input, single, raw_scores, truncation } = asked;
    let model = call.model(model)?;
    let labelling = call.service().purpose.labels("/classify")?;
    let head = &labelling.head;
    let texts = input.into_iter().map(Text::One).collect();
    let named = InputField { field: "input", single };
    let reading = Reading { prompt: labelling.prompt.clone(), ..call.reading(truncation, named)? };
    let tokens = call.read(texts, named, reading).await?;
    let mut done = call.compute(tokens, Output::Pooled).await?;
    if !raw_scores {
        head.activate(&mut done.rows);
    }
    let (labels, created, id) = (head.labels.clone(), call.app.started_at, call.id.clone());
    let write = move |done: Done| {
        let around = ResponseMetadata { id: id.as_str(), created, model: &model, tokens: done.spent.tokens };
        let rows = RowsView::new(&done.rows, done.width);
        if as_infinity { around.write_labels(rows, &labels) } else { around.write_classes(rows, &labels) }
    };
    call.write(done, write).await
}

/// `POST /tokenize`, in the words of TEI or of vLLM.
pub(super) async fn tokenize(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| TokenizeRequest::parse(body, limit)).await?;
    let TokenizeRequest { texts, format, add_special_tokens, prompt } = asked;
    let prompt = match &call.service().purpose {
        Purpose::Embed(embedding) => embedding.prompt(&prompt)?,
        Purpose::Label(labelling) => labelling.prompt.clone(),
    };
    let named = match &format {
        TokenizeFormat::Tei { single } => InputField { field: "inputs", single: *single },
        TokenizeFormat::Vllm(asked) => {
            call.model(asked.model.clone())?;
            InputField { field: "prompt", single: true }
        }
    };
    let (inputs, started) = (texts.len(), Instant::now());
    let tokens = call.service().tokenizer.inspect(texts, prompt, add_special_tokens).await;
    let tokens = tokens.map_err(|error| call.unread(error, named))?;
    let count: usize = tokens.iter().map(Vec::len).sum();
    let spent = tokenized(&call, inputs, count, started.elapsed())?;
    let max_input_tokens = call.service().readable.max_input_tokens;
    let write = move || match format {
        TokenizeFormat::Tei { single: _ } => super::to_json(&tokens),
        TokenizeFormat::Vllm(VllmTokenizeOptions { model: _, with_texts }) => {
            write_tokens(&tokens.concat(), max_input_tokens, with_texts)
        }
    };
    let json = call.off_reactor(count > INLINE_TOKENS, write).await?;
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
    let texts = texts.map_err(|error| call.unread(error, InputField { field: "ids", single }))?;
    let spent = tokenized(&call, inputs, count, started.elapsed())?;
    Ok(Answer { json: super::to_json(&texts), spent })
}

/// What a request cost that did not come to the engine.
fn tokenized(call: &Call, inputs: usize, tokens: usize, tokenize: Duration) -> Result<Spent, Refusal> {
    let (queue, engine) = (Duration::ZERO, Duration::ZERO);
    let priority = call.priority(inputs)?;
    Ok(Spent { priority, inputs: inputs as u64, tokens: tokens as u64, tokenize, queue, engine })
}
