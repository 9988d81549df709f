//! Embeddings: `POST /v1/embeddings`, Cohere's `/v1/embed` and `/v2/embed`, Voyage's embeddings, and vLLM's `/pooling`.
//!
//! The APIs differ in field names and response formats; all of them compute through [`embed`].

use std::sync::Arc;

use replica_api::cohere::{CohereEmbedRequest, CohereEmbedResponse};
use replica_api::input::{Input, InputField, Truncation};
use replica_api::openai::response::RowsView;
use replica_api::openai::{EmbeddingsRequest, EmbeddingsResponse, check_dimensions};
use replica_api::prompt::PromptChoice;
use replica_api::refusal::Refusal;
use replica_api::vllm::{PoolingRequest, PoolingTask, ResponseMetadata};
use replica_api::voyage::{self, VoyageEmbeddingsRequest};

use super::call::{ApiCall, ComputeResult, ComputedResponse};
use crate::engine::Output;
use crate::purpose::Purpose;
use crate::tokenize::{EncodeOptions, TextInput};

/// `POST /v1/embeddings`.
pub(super) async fn embeddings(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.inputs();
    let request = call.parse(body, move |body| EmbeddingsRequest::parse(body, limit)).await?;
    let model = call.model(Some(request.model.clone()))?;
    request.check_token_ids(call.app.token_inputs, &call.service().model.digest)?;
    let EmbeddingsRequest { input, single, encoding, dimensions, prompt, truncation, normalize, .. } =
        request;
    let named = InputField { field: "input", single };
    let request =
        EmbeddingRequest { path: "/v1/embeddings", input, named, prompt, truncation, dimensions, normalize };
    let (computed, keep) = embed(&call, request).await?;
    let write = move |computed: ComputeResult| {
        EmbeddingsResponse::write(&model, RowsView::new(&computed.rows, keep), encoding, computed.cost.tokens)
    };
    call.write(computed, write).await
}

/// Cohere's `POST /v1/embed`.
pub(super) async fn cohere_v1(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.inputs();
    let request = call.parse(body, move |body| CohereEmbedRequest::parse_v1(body, limit)).await?;
    cohere(call, request, "/v1/embed", "1").await
}

/// Cohere's `POST /v2/embed`.
pub(super) async fn cohere_v2(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.inputs();
    let request = call.parse(body, move |body| CohereEmbedRequest::parse_v2(body, limit)).await?;
    cohere(call, request, "/v2/embed", "2").await
}

async fn cohere(
    call: Arc<ApiCall>,
    request: CohereEmbedRequest,
    path: &'static str,
    api_version: &'static str,
) -> Result<ComputedResponse, Refusal> {
    let CohereEmbedRequest { model, texts, field, prompt, types, dimensions, truncation } = request;
    call.model(model)?;
    let named = InputField { field, single: false };
    let input = Input::Texts(texts.clone());
    let request = EmbeddingRequest { path, input, named, prompt, truncation, dimensions, normalize: None };
    let (computed, keep) = embed(&call, request).await?;
    let id = call.id.clone();
    let write = move |computed: ComputeResult| {
        let (rows, tokens) = (RowsView::new(&computed.rows, keep), computed.cost.tokens);
        let types = types.as_deref();
        CohereEmbedResponse { id: id.as_str(), api_version, rows, types, texts: &texts, tokens }.write()
    };
    call.write(computed, write).await
}

/// Voyage's `POST /v1/embeddings`.
pub(super) async fn voyage(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.inputs();
    let request = call.parse(body, move |body| VoyageEmbeddingsRequest::parse(body, limit)).await?;
    let VoyageEmbeddingsRequest { model, input, single, prompt, truncation, dimensions, encoding } = request;
    let model = call.model(Some(model))?;
    let (input, named) = (Input::Texts(input), InputField { field: "input", single });
    let path = "/voyage/v1/embeddings";
    let request = EmbeddingRequest { path, input, named, prompt, truncation, dimensions, normalize: None };
    let (computed, keep) = embed(&call, request).await?;
    let write = move |computed: ComputeResult| {
        voyage::write_embeddings(&model, RowsView::new(&computed.rows, keep), encoding, computed.cost.tokens)
    };
    call.write(computed, write).await
}

/// vLLM's `POST /pooling`.
pub(super) async fn pooling(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.inputs();
    let request = call.parse(body, move |body| PoolingRequest::parse(body, limit)).await?;
    let PoolingRequest { model, input, single, task, encoding, dimensions, normalize, truncation } = request;
    let model = call.model(model)?;
    let named = InputField { field: "input", single };
    let task = task.unwrap_or(match call.service().purpose {
        Purpose::Embed(_) => PoolingTask::TokenEmbed,
        Purpose::Label(_) => PoolingTask::Classify,
    });
    let path = "/pooling";
    let (computed, width) = match task {
        PoolingTask::Embed => {
            let (prompt, normalize) = (PromptChoice::Default, Some(normalize));
            embed(&call, EmbeddingRequest { path, input, named, prompt, truncation, dimensions, normalize })
                .await?
        }
        PoolingTask::TokenEmbed => {
            call.service().purpose.token_rows(path)?;
            let (prompt, normalize) = (PromptChoice::Default, Some(normalize));
            let request = EmbeddingRequest { path, input, named, prompt, truncation, dimensions, normalize };
            rows(&call, request, Output::Tokens).await?
        }
        PoolingTask::Classify => {
            if dimensions.is_some() {
                let problem = "is given for a classification, which has one number for each label";
                return Err(Refusal::invalid("dimensions", "dimensions", problem, "no `dimensions`"));
            }
            labelled(&call, input, named, truncation).await?
        }
    };
    let (created, id) = (call.app.started_at, call.id.clone());
    let write = move |computed: ComputeResult| {
        let around =
            ResponseMetadata { id: id.as_str(), created, model: &model, tokens: computed.cost.tokens };
        let counts = (task == PoolingTask::TokenEmbed).then_some(computed.counts.as_slice());
        around.write_pooled(RowsView::new(&computed.rows, width), counts, encoding)
    };
    call.write(computed, write).await
}

/// Computes the probabilities of the labels of each text.
async fn labelled(
    call: &ApiCall,
    input: Input,
    named: InputField,
    truncation: Truncation,
) -> Result<(ComputeResult, usize), Refusal> {
    let classifier = call.service().purpose.labels("/pooling")?;
    let options = EncodeOptions { prompt: classifier.prompt.clone(), ..call.options(truncation, named)? };
    let tokens = match input {
        Input::Texts(texts) => {
            call.encode(texts.into_iter().map(TextInput::One).collect(), named, options).await?
        }
        Input::Tokens(_) => call.tokens(input, named, &PromptChoice::Default, options).await?,
    };
    let mut computed = call.compute(tokens, Output::Pooled).await?;
    classifier.head.activate(&mut computed.rows);
    let width = computed.width;
    Ok((computed, width))
}

/// Request for embeddings, independent of the API.
pub(super) struct EmbeddingRequest {
    /// Path of the request, for error messages.
    pub(super) path: &'static str,
    pub(super) input: Input,
    pub(super) named: InputField,
    pub(super) prompt: PromptChoice,
    pub(super) truncation: Truncation,
    pub(super) dimensions: Option<u64>,
    /// Whether vectors are normalized to length one; absent = as configured for the replica.
    pub(super) normalize: Option<bool>,
}

/// Computes one vector for each input. Returns the rows and the number of values to keep of each.
pub(super) async fn embed(
    call: &ApiCall,
    request: EmbeddingRequest,
) -> Result<(ComputeResult, usize), Refusal> {
    rows(call, request, Output::Pooled).await
}

/// Computes vectors of inputs or of their tokens. Returns the rows and the number of values to keep of each.
async fn rows(
    call: &ApiCall,
    request: EmbeddingRequest,
    output: Output,
) -> Result<(ComputeResult, usize), Refusal> {
    let EmbeddingRequest { path, input, named, prompt, truncation, dimensions, normalize } = request;
    let embedding = call.service().purpose.embedding(path)?;
    let keep = check_dimensions(dimensions, embedding.width_of(output))?;
    let options = EncodeOptions { prompt: embedding.prompt(&prompt)?, ..call.options(truncation, named)? };
    let tokens = call.tokens(input, named, &prompt, options).await?;
    let mut computed = call.compute(tokens, output).await?;
    let normalize = normalize.or(call.app.embeddings.normalize.then_some(true));
    let finish = embedding.finish(output, keep, normalize);
    computed.rows = call
        .off_reactor(computed.rows.len() > super::call::INLINE_NUMBERS, {
            let (rows, width) = (std::mem::take(&mut computed.rows), computed.width);
            move || finish(rows, width)
        })
        .await?;
    Ok((computed, keep))
}
