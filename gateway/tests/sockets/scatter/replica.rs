//! Responses of a replica, made with its own parsers and serializers and a model that takes no time: the vector of an
//! input depends only on its bytes.

use replica_api::api::Dialect;
use replica_api::input::{Input, TextOrPair};
use replica_api::openai::{EmbeddingsRequest, EmbeddingsResponse};
use replica_api::ranking::ranking;
use replica_api::refusal::{ListLimit, Refusal};
use replica_api::rerank::{Document, RerankRequest, RerankResponse};
use replica_api::tei::{self, DecodeRequest, EmbedRequest, PredictRequest, TextsRequest};
use replica_api::tei::{SimilarityRequest, TokenizeRequest};
use replica_api::vectors::RowsView;
use replica_api::vllm::{ClassifyRequest, ResponseMetadata, ScoreRequest};

/// Response, and its number of tokens.
pub(crate) struct ReplicaResponse {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
    pub(crate) tokens: u64,
}

/// Responds to a request with at most `inputs_max` inputs, with vectors of `width` numbers.
pub(crate) fn response(path: &str, body: &[u8], inputs_max: usize, width: usize) -> ReplicaResponse {
    let limit = ListLimit { count: inputs_max, key: "max_inputs" };
    match computed(path, body, limit, width) {
        Ok((body, tokens)) => ReplicaResponse { status: 200, body, tokens },
        Err(refusal) => {
            let dialect = Dialect::of_path(path);
            ReplicaResponse {
                status: dialect.status(refusal.code),
                body: dialect.refusal(&refusal),
                tokens: 0,
            }
        }
    }
}

fn computed(path: &str, body: &[u8], limit: ListLimit, width: usize) -> Result<(Vec<u8>, u64), Refusal> {
    let (around, labels) = (
        ResponseMetadata { id: "r", created: 7, model: "m", tokens: 0 },
        ["no".to_owned(), "yes".to_owned()],
    );
    Ok(match path {
        "/v1/embeddings" => {
            let request = EmbeddingsRequest::parse(body, limit)?;
            let (rows, tokens) = (vectors(&request.input, width), tokens(&request.input));
            (
                EmbeddingsResponse::write(
                    &request.model,
                    RowsView::new(&rows, width),
                    request.encoding,
                    tokens,
                ),
                tokens,
            )
        }
        "/embed" | "/" => {
            let request = EmbedRequest::parse(body, limit)?;
            (tei::write_rows(RowsView::new(&vectors(&request.inputs, width), width)), tokens(&request.inputs))
        }
        "/predict" => {
            let request = PredictRequest::parse(body, limit)?;
            let text = |input: &TextOrPair| match input {
                TextOrPair::One(text) => text.clone(),
                TextOrPair::Pair(first, second) => format!("{first}{second}"),
            };
            let texts = Input::Texts(request.inputs.iter().map(text).collect());
            let rows = vectors(&texts, 2);
            let labels = tei::Labels { names: &labels, top_k: None, alone: request.single };
            (tei::write_predictions(RowsView::new(&rows, 2), labels), tokens(&texts))
        }
        "/similarity" => {
            let request = SimilarityRequest::parse(body, limit)?;
            let source = vector(request.source.as_bytes(), width);
            let cosines: Vec<f32> = request
                .sentences
                .iter()
                .map(|text| cosine(&source, &vector(text.as_bytes(), width)))
                .collect();
            (serde_json::to_vec(&cosines).unwrap(), tokens(&Input::Texts(request.sentences)))
        }
        "/tokenize" => {
            let request = TokenizeRequest::parse(body, limit)?;
            let token = |text: &String| tei::SimpleToken {
                id: text.len() as u32,
                text: text.clone(),
                special: false,
                start: Some(0),
                stop: Some(text.len()),
            };
            let lists: Vec<_> = request.texts.iter().map(|text| [token(text)]).collect();
            (serde_json::to_vec(&lists).unwrap(), lists.len() as u64)
        }
        "/decode" => {
            let request = DecodeRequest::parse(body, limit)?;
            let texts: Vec<String> = request.ids.iter().map(|ids| format!("\"{ids:?}\\")).collect();
            (serde_json::to_vec(&texts).unwrap(), texts.len() as u64)
        }
        "/classify" => {
            let texts = Input::Texts(ClassifyRequest::parse(body, limit)?.input);
            let (rows, tokens) = (vectors(&texts, 2), tokens(&texts));
            (ResponseMetadata { tokens, ..around }.write_classes(RowsView::new(&rows, 2), &labels), tokens)
        }
        "/score" => {
            let texts = ScoreRequest::parse(body, limit)?.second;
            let (scores, tokens) = (scores(&texts), tokens(&Input::Texts(texts)));
            (ResponseMetadata { tokens, ..around }.write_scores(&scores), tokens)
        }
        "/rerank" => {
            let request = TextsRequest::parse(body, limit)?.expect("texts");
            let scores = scores(&request.texts);
            let order = ranking(&scores, scores.len());
            let texts = request.return_text.then_some(request.texts.as_slice());
            (tei::write_ranks(&order, &scores, texts), tokens(&Input::Texts(request.texts.clone())))
        }
        "/v2/rerank" => {
            let request = RerankRequest::parse(body, limit)?;
            let texts: Vec<String> =
                request.documents.iter().map(|document: &Document| document.text.clone()).collect();
            let (scores, tokens) = (scores(&texts), tokens(&Input::Texts(texts)));
            let response = RerankResponse {
                id: "r",
                api_version: "2",
                model: "m",
                order: &ranking(&scores, request.results()),
                scores: &scores,
                documents: request.return_documents.then_some(request.documents.as_slice()),
                bare_documents: false,
                tokens,
            };
            (response.write(), tokens)
        }
        path => panic!("no such path {path}"),
    })
}

/// Counts a token for each byte or id.
fn tokens(input: &Input) -> u64 {
    let tokens: usize = match input {
        Input::Texts(texts) => texts.iter().map(String::len).sum(),
        Input::Tokens(lists) => lists.iter().map(Vec::len).sum(),
    };
    tokens as u64
}

fn scores(texts: &[String]) -> Vec<f32> {
    texts.iter().map(|text| vector(text.as_bytes(), 1)[0]).collect()
}

fn vectors(input: &Input, width: usize) -> Vec<f32> {
    match input {
        Input::Texts(texts) => texts.iter().flat_map(|text| vector(text.as_bytes(), width)).collect(),
        Input::Tokens(lists) => lists
            .iter()
            .flat_map(|ids| vector(&ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>(), width))
            .collect(),
    }
}

/// Numbers from 0 to 1 derived from the bytes (FNV-1a).
fn vector(bytes: &[u8], width: usize) -> Vec<f32> {
    let mut hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let next = |_| {
        hash = (hash ^ (hash >> 29)).wrapping_mul(0x0100_0000_01b3);
        (hash >> 40) as f32 / (1 << 24) as f32
    };
    (0..width).map(next).collect()
}

/// Returns the cosine of the angle between two vectors.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
