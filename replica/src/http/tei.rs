//! Routes of text-embeddings-inference (TEI) and Baseten Embeddings Inference (BEI).

use std::sync::Arc;
use std::time::{Duration, Instant};

use replica_api::input::InputField;
use replica_api::refusal::Refusal;
use replica_api::tei::{
    self, ActivationFunction, DecodeRequest, EmbedRequest, Labels, PredictRequest, SimilarityRequest,
    TokenizeFormat, TokenizeRequest, VllmTokenizeOptions,
};
use replica_api::vectors::RowsView;
use replica_api::vllm::{ClassifyRequest, ResponseMetadata, write_tokens};
use replica_core::scores;

use super::call::{ApiCall, ComputeResult, ComputedResponse, RequestCost, text};
use super::embeddings;
use super::rerank;
use crate::engine::Output;
use crate::purpose::Purpose;
use crate::tokenize::{EncodeOptions, TextInput};

/// `POST /`: dispatches by the task of the model, as TEI does; clients of Hugging Face use no other path.
pub(super) async fn root(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    match &call.service().purpose {
        Purpose::Embed(_) => embed_or_score_similarity(call, body).await,
        Purpose::Label(classifier) if classifier.ranks() => rerank::tei(call, body).await,
        Purpose::Label(_) => predict(call, body).await,
    }
}

async fn embed_or_score_similarity(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    enum RootBody {
        Embed(EmbedRequest),
        Compare(SimilarityRequest),
    }
    let (inputs, sentences) = (call.app.limits.inputs(), call.app.limits.sentences());
    let parse = move |body: &[u8]| {
        if SimilarityRequest::is_one(body) {
            SimilarityRequest::parse(body, sentences).map(RootBody::Compare)
        } else {
            EmbedRequest::parse(body, inputs).map(RootBody::Embed)
        }
    };
    match call.parse(body, parse).await? {
        RootBody::Embed(request) => embeddings::respond(&call, "/embed", request).await,
        RootBody::Compare(request) => similarity_response(&call, request).await,
    }
}

/// `POST /embed_all`: one row per token, special tokens included, as the last layer outputs it.
pub(super) async fn embed_all(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.inputs();
    let request = call.parse(body, move |body| EmbedRequest::parse(body, limit)).await?;
    let EmbedRequest { inputs, single, truncation, prompt, normalize, dimensions } = request;
    if normalize == Some(true) {
        let problem = "is true, and the rows of tokens are returned as they are";
        return Err(Refusal::invalid("normalize", "normalize", problem, "false, or use /pooling"));
    }
    if dimensions.is_some() {
        let problem = "is given, and the rows of tokens are returned whole";
        return Err(Refusal::invalid("dimensions", "dimensions", problem, "no `dimensions`"));
    }
    call.service().purpose.token_rows("/embed_all")?;
    let embedding = call.service().purpose.embedding("/embed_all")?;
    let named = InputField { field: "inputs", single };
    let options = EncodeOptions { prompt: embedding.prompt(&prompt)?, ..call.options(truncation, named)? };
    let tokens = call.tokens(inputs, named, &prompt, options).await?;
    let computed = call.compute(tokens, Output::Tokens).await?;
    call.write(computed, |computed| tei::write_token_rows(&computed.rows, computed.width, &computed.counts))
        .await
}

/// `POST /similarity`.
pub(super) async fn similarity(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.sentences();
    let request = call.parse(body, move |body| SimilarityRequest::parse(body, limit)).await?;
    similarity_response(&call, request).await
}

async fn similarity_response(
    call: &ApiCall,
    request: SimilarityRequest,
) -> Result<ComputedResponse, Refusal> {
    let SimilarityRequest { source, sentences, truncation, prompt } = request;
    let embedding = call.service().purpose.embedding("/similarity")?;
    let [source_field, sentences_field] = SimilarityRequest::FIELDS;
    let options = call.options(truncation, InputField { field: sentences_field, single: false })?;
    let options = EncodeOptions { prompt: embedding.prompt(&prompt)?, ..options };
    let sentences = sentences.into_iter().map(TextInput::One).collect();
    let (source, sentences) = tokio::try_join!(
        call.encode(
            vec![TextInput::One(source)],
            InputField { field: source_field, single: true },
            options.clone()
        ),
        call.encode(sentences, InputField { field: sentences_field, single: false }, options),
    )?;
    let computed = call.compute(source.and(sentences), Output::Pooled).await?;
    let (source, sentences) = computed.rows.split_at(computed.width);
    let cosine = |row: &[f32]| scores::cosine(&source[..embedding.width], &row[..embedding.width]);
    let cosines: Vec<f32> = sentences.chunks_exact(computed.width).map(cosine).collect();
    Ok(ComputedResponse { json: super::to_json(&cosines), cost: computed.cost })
}

/// `POST /predict`.
pub(super) async fn predict(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.pairs();
    let request = call.parse(body, move |body| PredictRequest::parse(body, limit)).await?;
    let PredictRequest { inputs, single, raw_scores, truncation, parameters } = request;
    let classifier = call.service().purpose.labels("/predict")?;
    let head = &classifier.head;
    let texts = inputs.into_iter().map(text).collect();
    let named = InputField { field: "inputs", single };
    let options = EncodeOptions { prompt: classifier.prompt.clone(), ..call.options(truncation, named)? };
    let tokens = call.encode(texts, named, options).await?;
    let mut computed = call.compute(tokens, Output::Pooled).await?;
    match parameters.and_then(|parameters| parameters.function) {
        None if raw_scores => {}
        None => head.activate(&mut computed.rows),
        Some(ActivationFunction::None) => {}
        Some(ActivationFunction::Softmax) => {
            computed.rows.chunks_exact_mut(head.labels.len()).for_each(scores::softmax);
        }
        Some(ActivationFunction::Sigmoid) => {
            computed.rows.iter_mut().for_each(|logit| *logit = scores::sigmoid(*logit));
        }
    }
    let names = head.labels.clone();
    let write = move |computed: ComputeResult| {
        let top_k = parameters.and_then(|parameters| parameters.top_k);
        // Pipelines of Hugging Face return a list in a list for one text, and their clients take the first.
        let alone = single && parameters.is_none();
        tei::write_predictions(
            RowsView::new(&computed.rows, computed.width),
            Labels { names: &names, top_k, alone },
        )
    };
    call.write(computed, write).await
}

/// vLLM's `POST /classify`.
pub(super) async fn classify(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    labelled(call, body, false).await
}

/// Infinity's `POST /classify`.
pub(super) async fn classify_infinity(
    call: Arc<ApiCall>,
    body: Vec<u8>,
) -> Result<ComputedResponse, Refusal> {
    labelled(call, body, true).await
}

async fn labelled(call: Arc<ApiCall>, body: Vec<u8>, as_infinity: bool) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.pairs();
    let request = call.parse(body, move |body| ClassifyRequest::parse(body, limit)).await?;
    let ClassifyRequest { model, input, single, raw_scores, truncation } = request;
    let model = call.model(model)?;
    let classifier = call.service().purpose.labels("/classify")?;
    let head = &classifier.head;
    let texts = input.into_iter().map(TextInput::One).collect();
    let named = InputField { field: "input", single };
    let options = EncodeOptions { prompt: classifier.prompt.clone(), ..call.options(truncation, named)? };
    let tokens = call.encode(texts, named, options).await?;
    let mut computed = call.compute(tokens, Output::Pooled).await?;
    if !raw_scores {
        head.activate(&mut computed.rows);
    }
    let (labels, created, id) = (head.labels.clone(), call.app.started_at, call.id.clone());
    let write = move |computed: ComputeResult| {
        let around =
            ResponseMetadata { id: id.as_str(), created, model: &model, tokens: computed.cost.tokens };
        let rows = RowsView::new(&computed.rows, computed.width);
        if as_infinity { around.write_labels(rows, &labels) } else { around.write_classes(rows, &labels) }
    };
    call.write(computed, write).await
}

/// `POST /tokenize`, in the format of TEI or of vLLM.
pub(super) async fn tokenize(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.inputs();
    let request = call.parse(body, move |body| TokenizeRequest::parse(body, limit)).await?;
    let TokenizeRequest { texts, format, add_special_tokens, prompt } = request;
    let prompt = match &call.service().purpose {
        Purpose::Embed(embedding) => embedding.prompt(&prompt)?,
        Purpose::Label(classifier) => classifier.prompt.clone(),
    };
    let named = match &format {
        TokenizeFormat::Tei { single } => InputField { field: "inputs", single: *single },
        TokenizeFormat::Vllm(request) => {
            call.model(request.model.clone())?;
            InputField { field: "prompt", single: true }
        }
    };
    let (inputs, started) = (texts.len(), Instant::now());
    let tokens = call.service().tokenizer.inspect(texts, prompt, add_special_tokens).await;
    let tokens = tokens.map_err(|error| call.tokenize_refusal(error, named))?;
    let count: usize = tokens.iter().map(Vec::len).sum();
    let cost = tokenized(&call, inputs, count, started.elapsed())?;
    let max_input_tokens = call.service().readable.max_input_tokens;
    let write = move || match format {
        TokenizeFormat::Tei { single: _ } => super::to_json(&tokens),
        TokenizeFormat::Vllm(VllmTokenizeOptions { model: _, with_texts }) => {
            write_tokens(&tokens.concat(), max_input_tokens, with_texts)
        }
    };
    let json = call.off_reactor(count > INLINE_TOKENS, write).await?;
    Ok(ComputedResponse { json, cost })
}

/// Number of tokens up to which writing the response inline is as fast as handing it to another thread.
const INLINE_TOKENS: usize = 512;

/// `POST /decode`.
pub(super) async fn decode(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.inputs();
    let request = call.parse(body, move |body| DecodeRequest::parse(body, limit)).await?;
    let DecodeRequest { ids, single, skip_special_tokens } = request;
    let (inputs, count) = (ids.len(), ids.iter().map(Vec::len).sum());
    let started = Instant::now();
    let texts = call.service().tokenizer.decode(ids, skip_special_tokens).await;
    let texts = texts.map_err(|error| call.tokenize_refusal(error, InputField { field: "ids", single }))?;
    let cost = tokenized(&call, inputs, count, started.elapsed())?;
    Ok(ComputedResponse { json: super::to_json(&texts), cost })
}

/// Returns the cost of a request that did not use the engine.
fn tokenized(
    call: &ApiCall,
    inputs: usize,
    tokens: usize,
    tokenize: Duration,
) -> Result<RequestCost, Refusal> {
    let (queue, engine) = (Duration::ZERO, Duration::ZERO);
    let priority = call.priority(inputs)?;
    Ok(RequestCost { priority, inputs: inputs as u64, tokens: tokens as u64, tokenize, queue, engine })
}
