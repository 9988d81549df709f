//! Pairs and what a model says about them: rerank in the words of Cohere and Jina, of TEI, and vLLM's scores.
//!
//! A cross-encoder reads query and document together, and its score is the sigmoid of what it says, whatever its
//! configuration applies elsewhere: these APIs promise 0 to 1. A model that embeds is asked for a vector of each, with
//! the prompts that it has for queries and documents; its score is (1 + cosine) / 2, which keeps every order. Ranks are
//! those of the raw numbers, for the sigmoid of large ones is the same number.

use std::sync::Arc;

use replica_core::input::{InputField, OverlongPolicy, PairTruncation, TruncationMethod, TruncationSide};
use replica_core::prompt::{PromptChoice, Role};
use replica_core::refusal::Refusal;
use replica_core::scores;
use replica_core::wire::rerank::{Document, RerankRequest, RerankResponse};
use replica_core::wire::tei::{self, TextsRequest};
use replica_core::wire::vllm::{ResponseMetadata, ScoreRequest};
use replica_core::wire::voyage::{self, VoyageRerankRequest};

use super::call::{Answer, Call, Spent, Tokens, reading};
use crate::engine::Output;
use crate::purpose::{Embedding, Labelling, Ranker};
use crate::tokenize::{Reading, Text};

/// `POST /v1/rerank`.
pub(super) async fn v1(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.documents();
    let asked = call.parse(body, move |body| RerankRequest::parse(body, limit)).await?;
    cohere(&call, asked, Flavour::V1).await
}

/// `POST /v2/rerank`.
pub(super) async fn v2(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.documents();
    let asked = call.parse(body, move |body| RerankRequest::parse(body, limit)).await?;
    cohere(&call, asked, Flavour::V2).await
}

/// Infinity's `POST /rerank`.
pub(super) async fn infinity(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.documents();
    let asked = call.parse(body, move |body| RerankRequest::parse(body, limit)).await?;
    cohere(&call, asked, Flavour { api_version: "1", bare_documents: true }).await
}

/// Voyage's `POST /v1/rerank`.
pub(super) async fn voyage(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.documents();
    let asked = call.parse(body, move |body| VoyageRerankRequest::parse(body, limit)).await?;
    let most = asked.results();
    let VoyageRerankRequest { model, query, documents, top_k: _, return_documents, truncation } = asked;
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
    let Scored { raw, scores, spent } = pairs.score(&call, "a rerank").await?;
    let order = scores::ranking(&raw, most);
    let json = voyage::write_ranks(&model, &order, &scores, returned.as_deref(), spent.tokens);
    Ok(Answer { json, spent })
}

/// What of an answer depends on the path that was asked.
#[derive(Clone, Copy)]
struct Flavour {
    /// Cohere's.
    api_version: &'static str,
    /// Whether a document comes back as its bare text.
    bare_documents: bool,
}

impl Flavour {
    const V1: Flavour = Flavour { api_version: "1", bare_documents: false };
    const V2: Flavour = Flavour { api_version: "2", bare_documents: false };
}

/// `POST /rerank`: TEI's, unless the body is in the words of the others.
pub(super) async fn tei(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    enum Asked {
        Tei(TextsRequest),
        Others(RerankRequest),
    }
    let limit = call.app.limits.documents();
    let parse = move |body: &[u8]| match TextsRequest::parse(body, limit)? {
        Some(asked) => Ok(Asked::Tei(asked)),
        None => RerankRequest::parse(body, limit).map(Asked::Others),
    };
    let asked = match call.parse(body, parse).await? {
        Asked::Tei(asked) => asked,
        Asked::Others(asked) => return cohere(&call, asked, Flavour::V1).await,
    };
    let TextsRequest { query, texts, raw_scores, return_text, truncation } = asked;
    let overlong = truncation.overlong(call.app.embeddings.auto_truncate);
    let returned = return_text.then(|| texts.clone());
    let pairs = Pairs { first: vec![query], second: texts, fields: ["query", "texts"], overlong, most: None };
    let Scored { raw, scores, spent } = pairs.score(&call, "/rerank").await?;
    let order = scores::ranking(&raw, raw.len());
    let shown = if raw_scores { &raw } else { &scores };
    Ok(Answer { json: tei::write_ranks(&order, shown, returned.as_deref()), spent })
}

/// `POST /score`.
pub(super) async fn score(call: Arc<Call>, body: Vec<u8>) -> Result<Answer, Refusal> {
    let limit = call.app.limits.pairs();
    let asked = call.parse(body, move |body| ScoreRequest::parse(body, limit)).await?;
    let ScoreRequest { model, first, second, truncation } = asked;
    let model = call.model(model)?;
    let fields = ["text_1", "text_2"];
    let overlong = truncation.overlong(call.app.embeddings.auto_truncate);
    let pairs = Pairs { first, second, fields, overlong, most: None };
    let Scored { raw, scores, spent } = pairs.score(&call, "/score").await?;
    // vLLM shows a cosine as it is.
    let shown = match call.service().purpose.ranker("/score")? {
        Ranker::CrossEncoder(_) => scores,
        Ranker::Similarity(_) => raw,
    };
    let created = call.app.started_at;
    let around = ResponseMetadata { id: call.id.as_str(), created, model: &model, tokens: spent.tokens };
    Ok(Answer { json: around.write_scores(&shown), spent })
}

async fn cohere(call: &Call, asked: RerankRequest, flavour: Flavour) -> Result<Answer, Refusal> {
    let most = asked.results();
    let RerankRequest { model, query, documents, top_n: _, return_documents, max_tokens_per_doc, raw_scores } =
        asked;
    let Flavour { api_version, bare_documents } = flavour;
    let model = call.model(model)?;
    let (second, documents) = if return_documents {
        (documents.iter().map(|document| document.text.clone()).collect(), Some(documents))
    } else {
        (documents.into_iter().map(|Document { text, .. }| text).collect(), None)
    };
    // As Cohere does it, a document that is too long is cut, at its end.
    let overlong = OverlongPolicy::Truncate(TruncationMethod {
        side: TruncationSide::Right,
        pair: PairTruncation::OnlySecond,
    });
    let most_tokens = max_tokens_per_doc.map(|most| usize::try_from(most).unwrap_or(usize::MAX));
    let fields = ["query", "documents"];
    let pairs = Pairs { first: vec![query], second, fields, overlong, most: most_tokens };
    let Scored { raw, scores, spent } = pairs.score(call, "a rerank").await?;
    let response = RerankResponse {
        id: call.id.as_str(),
        api_version,
        model: &model,
        order: &scores::ranking(&raw, most),
        scores: if raw_scores { &raw } else { &scores },
        documents: documents.as_deref(),
        bare_documents,
        tokens: spent.tokens,
    };
    Ok(Answer { json: response.write(), spent })
}

/// Pairs of texts.
struct Pairs {
    /// One for all, or as many as there are second ones.
    first: Vec<String>,
    second: Vec<String>,
    /// What the request calls the two.
    fields: [&'static str; 2],
    overlong: OverlongPolicy,
    /// Second texts are cut to so many tokens before anything else.
    most: Option<usize>,
}

/// What a model says about pairs.
struct Scored {
    /// Its own numbers: logits or cosines.
    raw: Vec<f32>,
    /// The same from 0 to 1.
    scores: Vec<f32>,
    spent: Spent,
}

impl Pairs {
    async fn score(self, call: &Call, asked: &str) -> Result<Scored, Refusal> {
        match call.service().purpose.ranker(asked)? {
            Ranker::CrossEncoder(labelling) => self.read_together(call, labelling).await,
            Ranker::Similarity(embedding) => self.compare(call, embedding).await,
        }
    }

    async fn read_together(self, call: &Call, labelling: &Labelling) -> Result<Scored, Refusal> {
        let Pairs { first, second, fields, overlong, most } = self;
        let first: Vec<Arc<str>> = first.into_iter().map(Arc::from).collect();
        let of = |index: usize| Arc::clone(&first[if first.len() == 1 { 0 } else { index }]);
        let texts = second.into_iter().enumerate().map(|(i, second)| Text::Pair(of(i), second)).collect();
        let named = InputField { field: fields[1], single: false };
        let tokens = call.read(texts, named, Reading { most, ..labelling.reading(overlong) }).await?;
        let done = call.compute(tokens, Output::Pooled).await?;
        let scores = done.rows.iter().map(|logit| scores::sigmoid(*logit)).collect();
        Ok(Scored { raw: done.rows, scores, spent: done.spent })
    }

    async fn compare(self, call: &Call, embedding: &Embedding) -> Result<Scored, Refusal> {
        let Pairs { first, second, fields, overlong, most } = self;
        let count = first.len();
        let prompt = |role| embedding.prompt(&PromptChoice::For(role));
        let [queries, documents] = [prompt(Role::Query)?, prompt(Role::Document)?];
        let of_first = Reading { prompt: queries, ..reading(overlong) };
        let of_second = Reading { prompt: documents, overlong, most };
        let named = |field, single| InputField { field, single };
        let both = tokio::try_join!(
            call.read(texts(first), named(fields[0], count == 1), of_first),
            call.read(texts(second), named(fields[1], false), of_second),
        );
        let (first, second): (Tokens, Tokens) = both?;
        let done = call.compute(first.and(second), Output::Pooled).await?;
        let row = |index: usize| &done.rows[index * done.width..][..embedding.width];
        let pairs = done.rows.len() / done.width - count;
        let cosine = |i: usize| scores::cosine(row(if count == 1 { 0 } else { i }), row(count + i));
        let raw: Vec<f32> = (0..pairs).map(cosine).collect();
        let scores = raw.iter().map(|cosine| scores::cosine_score(*cosine)).collect();
        Ok(Scored { raw, scores, spent: done.spent })
    }
}

fn texts(texts: Vec<String>) -> Vec<Text> {
    texts.into_iter().map(Text::One).collect()
}
