//! Vectors: `POST /v1/embeddings`, Cohere's `/v1/embed` and `/v2/embed`, Voyage's embeddings, and vLLM's `/pooling`.
//!
//! The four differ in the names of their fields and in what surrounds the vectors. What is computed is the same, and
//! [`embed`] is the one way to it.

use std::sync::Arc;

use replica_core::input::{Input, InputField, Truncation};
use replica_core::prompt::PromptChoice;
use replica_core::refusal::Refusal;
use replica_core::wire::cohere::{CohereEmbedRequest, CohereEmbedResponse};
use replica_core::wire::openai::response::RowsView;
use replica_core::wire::openai::{EmbeddingsRequest, EmbeddingsResponse, check_dimensions};
use replica_core::wire::vllm::{PoolingRequest, PoolingTask, ResponseMetadata};
use replica_core::wire::voyage::{self, VoyageEmbeddingsRequest};

use super::call::{Answer, Call, Done};
use crate::engine::Output;
use crate::purpose::Purpose;
use crate::tokenize::{Reading, Text};

/// `POST /v1/embeddings`.
pub(super) async fn embeddings(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| EmbeddingsRequest::parse(body, limit)).await?;
    let model = call.model(Some(asked.model.clone()))?;
    asked.check_token_ids(call.app.token_inputs, &call.service().model.digest)?;
    let EmbeddingsRequest { input, single, encoding, dimensions, prompt, truncation, normalize, .. } = asked;
    let named = InputField { field: "input", single };
    let wanted = Wanted { path: "/v1/embeddings", input, named, prompt, truncation, dimensions, normalize };
    let (done, keep) = embed(&call, wanted).await?;
    let write = move |done: Done| {
        EmbeddingsResponse::write(&model, RowsView::new(&done.rows, keep), encoding, done.spent.tokens)
    };
    call.write(done, write).await
}

/// Cohere's `POST /v1/embed`.
pub(super) async fn cohere_v1(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| CohereEmbedRequest::parse_v1(body, limit)).await?;
    cohere(call, asked, "/v1/embed", "1").await
}

/// Cohere's `POST /v2/embed`.
pub(super) async fn cohere_v2(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| CohereEmbedRequest::parse_v2(body, limit)).await?;
    cohere(call, asked, "/v2/embed", "2").await
}

async fn cohere(
    call: Arc<Call>,
    asked: CohereEmbedRequest,
    path: &'static str,
    api_version: &'static str,
) -> Result<Answer, Refusal> {
    let CohereEmbedRequest { model, texts, field, prompt, types, dimensions, truncation } = asked;
    call.model(model)?;
    let named = InputField { field, single: false };
    let input = Input::Texts(texts.clone());
    let wanted = Wanted { path, input, named, prompt, truncation, dimensions, normalize: None };
    let (done, keep) = embed(&call, wanted).await?;
    let id = call.id.clone();
    let write = move |done: Done| {
        let (rows, tokens) = (RowsView::new(&done.rows, keep), done.spent.tokens);
        let types = types.as_deref();
        CohereEmbedResponse { id: id.as_str(), api_version, rows, types, texts: &texts, tokens }.write()
    };
    call.write(done, write).await
}

/// Voyage's `POST /v1/embeddings`.
pub(super) async fn voyage(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| VoyageEmbeddingsRequest::parse(body, limit)).await?;
    let VoyageEmbeddingsRequest { model, input, single, prompt, truncation, dimensions, encoding } = asked;
    let model = call.model(Some(model))?;
    let (input, named) = (Input::Texts(input), InputField { field: "input", single });
    let path = "/voyage/v1/embeddings";
    let wanted = Wanted { path, input, named, prompt, truncation, dimensions, normalize: None };
    let (done, keep) = embed(&call, wanted).await?;
    let write = move |done: Done| {
        voyage::write_embeddings(&model, RowsView::new(&done.rows, keep), encoding, done.spent.tokens)
    };
    call.write(done, write).await
}

/// vLLM's `POST /pooling`.
pub(super) async fn pooling(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.inputs();
    let asked = call.parse(body, move |body| PoolingRequest::parse(body, limit)).await?;
    let PoolingRequest { model, input, single, task, encoding, dimensions, normalize, truncation } = asked;
    let model = call.model(model)?;
    let named = InputField { field: "input", single };
    let task = task.unwrap_or(match call.service().purpose {
        Purpose::Embed(_) => PoolingTask::TokenEmbed,
        Purpose::Label(_) => PoolingTask::Classify,
    });
    let path = "/pooling";
    let (done, width) = match task {
        PoolingTask::Embed => {
            let (prompt, normalize) = (PromptChoice::Default, Some(normalize));
            embed(&call, Wanted { path, input, named, prompt, truncation, dimensions, normalize }).await?
        }
        PoolingTask::TokenEmbed => {
            call.service().purpose.token_rows(path)?;
            let (prompt, normalize) = (PromptChoice::Default, Some(normalize));
            let wanted = Wanted { path, input, named, prompt, truncation, dimensions, normalize };
            rows(&call, wanted, Output::Tokens).await?
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
    let write = move |done: Done| {
        let around = ResponseMetadata { id: id.as_str(), created, model: &model, tokens: done.spent.tokens };
        let counts = (task == PoolingTask::TokenEmbed).then_some(done.counts.as_slice());
        around.write_pooled(RowsView::new(&done.rows, width), counts, encoding)
    };
    call.write(done, write).await
}

/// The probabilities of the labels of each text.
async fn labelled(
    call: &Call,
    input: Input,
    named: InputField,
    truncation: Truncation,
) -> Result<(Done, usize), Refusal> {
    let labelling = call.service().purpose.labels("/pooling")?;
    let reading = Reading { prompt: labelling.prompt.clone(), ..call.reading(truncation, named)? };
    let tokens = match input {
        Input::Texts(texts) => call.read(texts.into_iter().map(Text::One).collect(), named, reading).await?,
        Input::Tokens(_) => call.tokens(input, named, &PromptChoice::Default, reading).await?,
    };
    let mut done = call.compute(tokens, Output::Pooled).await?;
    labelling.head.activate(&mut done.rows);
    let width = done.width;
    Ok((done, width))
}

/// What a request for vectors wants, in whichever words it came.
pub(super) struct Wanted {
    /// The path, for refusals.
    pub(super) path: &'static str,
    pub(super) input: Input,
    pub(super) named: InputField,
    pub(super) prompt: PromptChoice,
    pub(super) truncation: Truncation,
    pub(super) dimensions: Option<u64>,
    /// Whether vectors have length one; absent: as the replica's configuration says.
    pub(super) normalize: Option<bool>,
}

/// One vector for each input, and how many numbers it has.
pub(super) async fn embed(call: &Call, wanted: Wanted) -> Result<(Done, usize), Refusal> {
    rows(call, wanted, Output::Pooled).await
}

/// Vectors of inputs or of their tokens, and how many numbers each has.
async fn rows(call: &Call, wanted: Wanted, output: Output) -> Result<(Done, usize), Refusal> {
    let Wanted { path, input, named, prompt, truncation, dimensions, normalize } = wanted;
    let embedding = call.service().purpose.embedding(path)?;
    let keep = check_dimensions(dimensions, embedding.width_of(output))?;
    let reading = Reading { prompt: embedding.prompt(&prompt)?, ..call.reading(truncation, named)? };
    let tokens = call.tokens(input, named, &prompt, reading).await?;
    let mut done = call.compute(tokens, output).await?;
    let normalize = normalize.or(call.app.embeddings.normalize.then_some(true));
    let finish = embedding.finish(output, keep, normalize);
    done.rows = call
        .off_reactor(done.rows.len() > super::call::INLINE_NUMBERS, {
            let (rows, width) = (std::mem::take(&mut done.rows), done.width);
            move || finish(rows, width)
        })
        .await?;
    Ok((done, keep))
}
