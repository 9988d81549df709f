//! Reranking and scoring of pairs: rerank in the formats of Cohere, Jina and TEI, and vLLM's scores.
//!
//! A cross-encoder reads query and document together; its score is the sigmoid of its logit, whatever activation its
//! configuration applies elsewhere, because these APIs promise 0 to 1. An embedding model computes a vector of each,
//! with its prompts for queries and documents; its score is (1 + cosine) / 2, which keeps every order. Ranks follow the
//! raw numbers, because the sigmoid of large logits saturates.

use std::sync::Arc;

use replica_api::input::{InputField, OverlongPolicy, PairTruncation, TruncationMethod, TruncationSide};
use replica_api::prompt::{PromptChoice, Role};
use replica_api::ranking::ranking;
use replica_api::refusal::Refusal;
use replica_api::rerank::{Document, RerankRequest, RerankResponse};
use replica_api::tei::{self, TextsRequest};
use replica_api::vllm::{ResponseMetadata, ScoreRequest};
use replica_api::voyage::{self, VoyageRerankRequest};
use replica_core::scores;

use super::call::{ApiCall, ComputedResponse, RequestCost, Tokens, unprompted};
use crate::engine::Output;
use crate::purpose::{ClassifierModel, EmbeddingModel, Ranker};
use crate::tokenize::{EncodeOptions, TextInput};

/// `POST /v1/rerank`.
pub(super) async fn v1(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.documents();
    let request = call.parse(body, move |body| RerankRequest::parse(body, limit)).await?;
    cohere(&call, request, RerankFormat::V1).await
}

/// `POST /v2/rerank`.
pub(super) async fn v2(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.documents();
    let request = call.parse(body, move |body| RerankRequest::parse(body, limit)).await?;
    cohere(&call, request, RerankFormat::V2).await
}

/// Infinity's `POST /rerank`.
pub(super) async fn infinity(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.documents();
    let request = call.parse(body, move |body| RerankRequest::parse(body, limit)).await?;
    cohere(&call, request, RerankFormat { api_version: "1", bare_documents: true }).await
}

/// Voyage's `POST /v1/rerank`.
pub(super) async fn voyage(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.documents();
    let request = call.parse(body, move |body| VoyageRerankRequest::parse(body, limit)).await?;
    let most = request.results();
    let VoyageRerankRequest { model, query, documents, top_k: _, return_documents, truncation } = request;
    let model = call.model(Some(model))?;
    let returned = return_documents.then(|| documents.clone());
    let overlong = match truncation.overlong(true) {
        OverlongPolicy::Truncate(cut) => {
            OverlongPolicy::Truncate(TruncationMethod { pair: PairTruncation::OnlySecond, ..cut })
        }
        OverlongPolicy::Reject => OverlongPolicy::Reject,
    };
    let fields = ["query", "documents"];
    let pairs = Pairs { first: vec![query], second: documents, fields, overlong, most: None };
    let PairScores { raw, scores, cost } = pairs.score(&call, "a rerank").await?;
    let order = ranking(&raw, most);
    let json = voyage::write_ranks(&model, &order, &scores, returned.as_deref(), cost.tokens);
    Ok(ComputedResponse { json, cost })
}

/// Differences of the response between API versions.
#[derive(Clone, Copy)]
struct RerankFormat {
    /// Version reported in Cohere's format.
    api_version: &'static str,
    /// Whether a document is returned as a bare string.
    bare_documents: bool,
}

impl RerankFormat {
    const V1: RerankFormat = RerankFormat { api_version: "1", bare_documents: false };
    const V2: RerankFormat = RerankFormat { api_version: "2", bare_documents: false };
}

/// `POST /rerank`: TEI's format; a body in another format is accepted as well.
pub(super) async fn tei(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    enum RerankBody {
        Tei(TextsRequest),
        Others(RerankRequest),
    }
    let limit = call.app.limits.documents();
    let parse = move |body: &[u8]| match TextsRequest::parse(body, limit)? {
        Some(request) => Ok(RerankBody::Tei(request)),
        None => RerankRequest::parse(body, limit).map(RerankBody::Others),
    };
    let request = match call.parse(body, parse).await? {
        RerankBody::Tei(request) => request,
        RerankBody::Others(request) => return cohere(&call, request, RerankFormat::V1).await,
    };
    let TextsRequest { query, texts, raw_scores, return_text, truncation } = request;
    let overlong = truncation.overlong(call.app.embeddings.auto_truncate);
    let returned = return_text.then(|| texts.clone());
    let pairs = Pairs { first: vec![query], second: texts, fields: ["query", "texts"], overlong, most: None };
    let PairScores { raw, scores, cost } = pairs.score(&call, "/rerank").await?;
    let order = ranking(&raw, raw.len());
    let shown = if raw_scores { &raw } else { &scores };
    Ok(ComputedResponse { json: tei::write_ranks(&order, shown, returned.as_deref()), cost })
}

/// `POST /score`.
pub(super) async fn score(call: Arc<ApiCall>, body: Vec<u8>) -> Result<ComputedResponse, Refusal> {
    let limit = call.app.limits.pairs();
    let request = call.parse(body, move |body| ScoreRequest::parse(body, limit)).await?;
    let ScoreRequest { model, first, second, truncation } = request;
    let model = call.model(model)?;
    let fields = ["text_1", "text_2"];
    let overlong = truncation.overlong(call.app.embeddings.auto_truncate);
    let pairs = Pairs { first, second, fields, overlong, most: None };
    let PairScores { raw, scores, cost } = pairs.score(&call, "/score").await?;
    // vLLM returns the cosine itself.
    let shown = match call.service().purpose.ranker("/score")? {
        Ranker::CrossEncoder(_) => scores,
        Ranker::Similarity(_) => raw,
    };
    let created = call.app.started_at;
    let around = ResponseMetadata { id: call.id.as_str(), created, model: &model, tokens: cost.tokens };
    Ok(ComputedResponse { json: around.write_scores(&shown), cost })
}

async fn cohere(
    call: &ApiCall,
    request: RerankRequest,
    format: RerankFormat,
) -> Result<ComputedResponse, Refusal> {
    let most = request.results();
    let RerankRequest { model, query, documents, top_n: _, return_documents, max_tokens_per_doc, raw_scores } =
        request;
    let RerankFormat { api_version, bare_documents } = format;
    let model = call.model(model)?;
    let (second, documents) = if return_documents {
        (documents.iter().map(|document| document.text.clone()).collect(), Some(documents))
    } else {
        (documents.into_iter().map(|Document { text, .. }| text).collect(), None)
    };
    // As in Cohere's API, a document that is too long is cut at its end.
    let overlong = OverlongPolicy::Truncate(TruncationMethod {
        side: TruncationSide::Right,
        pair: PairTruncation::OnlySecond,
    });
    let most_tokens = max_tokens_per_doc.map(|most| usize::try_from(most).unwrap_or(usize::MAX));
    let fields = ["query", "documents"];
    let pairs = Pairs { first: vec![query], second, fields, overlong, most: most_tokens };
    let PairScores { raw, scores, cost } = pairs.score(call, "a rerank").await?;
    let response = RerankResponse {
        id: call.id.as_str(),
        api_version,
        model: &model,
        order: &ranking(&raw, most),
        scores: if raw_scores { &raw } else { &scores },
        documents: documents.as_deref(),
        bare_documents,
        tokens: cost.tokens,
    };
    Ok(ComputedResponse { json: response.write(), cost })
}

/// Pairs of texts.
struct Pairs {
    /// One text for all pairs, or one for each.
    first: Vec<String>,
    second: Vec<String>,
    /// Field names of the two in the request.
    fields: [&'static str; 2],
    overlong: OverlongPolicy,
    /// Maximum tokens of each second text; longer ones are cut first.
    most: Option<usize>,
}

/// Scores of the pairs.
struct PairScores {
    /// Raw outputs: logits or cosines.
    raw: Vec<f32>,
    /// Scores from 0 to 1.
    scores: Vec<f32>,
    cost: RequestCost,
}

impl Pairs {
    async fn score(self, call: &ApiCall, requested: &str) -> Result<PairScores, Refusal> {
        match call.service().purpose.ranker(requested)? {
            Ranker::CrossEncoder(classifier) => self.score_with_cross_encoder(call, classifier).await,
            Ranker::Similarity(embedding) => self.score_by_similarity(call, embedding).await,
        }
    }

    async fn score_with_cross_encoder(
        self,
        call: &ApiCall,
        classifier: &ClassifierModel,
    ) -> Result<PairScores, Refusal> {
        let Pairs { first, second, fields, overlong, most } = self;
        let first: Vec<Arc<str>> = first.into_iter().map(Arc::from).collect();
        let of = |index: usize| Arc::clone(&first[if first.len() == 1 { 0 } else { index }]);
        let texts =
            second.into_iter().enumerate().map(|(i, second)| TextInput::Pair(of(i), second)).collect();
        let named = InputField { field: fields[1], single: false };
        let tokens =
            call.encode(texts, named, EncodeOptions { most, ..classifier.options(overlong) }).await?;
        let computed = call.compute(tokens, Output::Pooled).await?;
        let scores = computed.rows.iter().map(|logit| scores::sigmoid(*logit)).collect();
        Ok(PairScores { raw: computed.rows, scores, cost: computed.cost })
    }

    async fn score_by_similarity(
        self,
        call: &ApiCall,
        embedding: &EmbeddingModel,
    ) -> Result<PairScores, Refusal> {
        let Pairs { first, second, fields, overlong, most } = self;
        let count = first.len();
        let prompt = |role| embedding.prompt(&PromptChoice::For(role));
        let [queries, documents] = [prompt(Role::Query)?, prompt(Role::Document)?];
        let of_first = EncodeOptions { prompt: queries, ..unprompted(overlong) };
        let of_second = EncodeOptions { prompt: documents, overlong, most };
        let named = |field, single| InputField { field, single };
        let both = tokio::try_join!(
            call.encode(texts(first), named(fields[0], count == 1), of_first),
            call.encode(texts(second), named(fields[1], false), of_second),
        );
        let (first, second): (Tokens, Tokens) = both?;
        let computed = call.compute(first.and(second), Output::Pooled).await?;
        let row = |index: usize| &computed.rows[index * computed.width..][..embedding.width];
        let pairs = computed.rows.len() / computed.width - count;
        let cosine = |i: usize| scores::cosine(row(if count == 1 { 0 } else { i }), row(count + i));
        let raw: Vec<f32> = (0..pairs).map(cosine).collect();
        let scores = raw.iter().map(|cosine| scores::cosine_score(*cosine)).collect();
        Ok(PairScores { raw, scores, cost: computed.cost })
    }
}

fn texts(texts: Vec<String>) -> Vec<TextInput> {
    texts.into_iter().map(TextInput::One).collect()
}
