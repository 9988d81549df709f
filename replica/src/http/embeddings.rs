//! Embeddings in every dialect, and vLLM's `/pooling`.

use std::sync::Arc;

use replica_api::embeddings::{EmbeddingsCall, EmbeddingsDialect, EmbeddingsResult};
use replica_api::input::{Input, InputField, Truncation};
use replica_api::openai::check_dimensions;
use replica_api::prompt::PromptChoice;
use replica_api::refusal::{ListLimit, Refusal};
use replica_api::vectors::RowsView;
use replica_api::vllm::{PoolingRequest, PoolingTask, ResponseMetadata};

use super::call::{ApiCall, ComputeResult, ComputedResponse};
use crate::engine::Output;
use crate::purpose::Purpose;
use crate::tokenize::{EncodeOptions, TextInput};

/// Computes embeddings for a dialect whose body is parsed by `parse`.
pub(super) async fn embeddings<R: EmbeddingsDialect>(
    call: Arc<ApiCall>,
    body: Vec<u8>,
    path: &'static str,
    parse: fn(&[u8], ListLimit) -> Result<R, Refusal>,
) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.inputs();
    let request = call.parse(body, move |body| parse(body, limit)).await?;
    respond(&call, path, request).await
}

/// Computes the embeddings of a parsed request, and writes its response.
pub(super) async fn respond<R: EmbeddingsDialect>(
    call: &ApiCall,
    path: &'static str,
    request: R,
) -> Result<ComputedResponse, Refusal> {
    request.check_token_ids(call.app.token_inputs, &call.service().model.digest)?;
    let (mut embeddings, write) = request.into_call();
    let model = call.model(embeddings.model.take())?;
    let (computed, keep) = rows(call, path, embeddings, Output::Pooled).await?;
    let id = call.id.clone();
    let write = move |computed: ComputeResult| {
        let (rows, tokens) = (RowsView::new(&computed.rows, keep), computed.cost.tokens);
        write(EmbeddingsResult { id: id.as_str(), model: &model, rows, tokens })
    };
    call.write(computed, write).await
}

/// vLLM's `POST /pooling`.
pub(super) async fn pooling(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.inputs();
    let request = call.parse(body, move |body| PoolingRequest::parse(body, limit)).await?;
    let PoolingRequest { model, input, single, task, encoding, dimensions, normalize, truncation } = request;
    let model = call.model(model)?;
    let field = InputField { field: "input", single };
    let task = task.unwrap_or(match call.service().purpose {
        Purpose::Embed(_) => PoolingTask::TokenEmbed,
        Purpose::Label(_) => PoolingTask::Classify,
    });
    let path = "/pooling";
    let (computed, width) = match task {
        PoolingTask::Embed | PoolingTask::TokenEmbed => {
            let output = if task == PoolingTask::Embed { Output::Pooled } else { Output::Tokens };
            if task == PoolingTask::TokenEmbed {
                call.service().purpose.token_rows(path)?;
            }
            let (prompt, normalize) = (PromptChoice::Default, Some(normalize));
            let embeddings =
                EmbeddingsCall { model: None, input, field, prompt, truncation, dimensions, normalize };
            rows(&call, path, embeddings, output).await?
        }
        PoolingTask::Classify => {
            if dimensions.is_some() {
                let problem = "is given for a classification, which has one number for each label";
                return Err(Refusal::invalid("dimensions", "dimensions", problem, "no `dimensions`"));
            }
            labelled(&call, input, field, truncation).await?
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

/// Computes vectors of inputs or of their tokens. Returns the rows and the number of values to keep of each.
async fn rows(
    call: &ApiCall,
    path: &'static str,
    embeddings: EmbeddingsCall,
    output: Output,
) -> Result<(ComputeResult, usize), Refusal> {
    let EmbeddingsCall { model: _, input, field, prompt, truncation, dimensions, normalize } = embeddings;
    let embedding = call.service().purpose.embedding(path)?;
    let keep = check_dimensions(dimensions, embedding.width_of(output))?;
    let options = EncodeOptions { prompt: embedding.prompt(&prompt)?, ..call.options(truncation, field)? };
    let tokens = call.tokens(input, field, &prompt, options).await?;
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
