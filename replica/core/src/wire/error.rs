//! Every way in which Meridian refuses or fails, as one closed list.
//!
//! An error has three readers. A *program* wants a stable code and a status; an *operator* wants to know whose fault
//! it was; and whoever holds the request (a client library, or the gateway between two attempts) wants to know what
//! would help: nothing, waiting, or going elsewhere. [`ErrorCode`] answers all three, and both the gateway and the
//! replica speak through it, so a code means the same at every door. `docs/errors.md` is rendered from this file.
//!
//! The body is that of the ecosystem whose path was asked ([`Dialect`]), because its stock clients parse it: OpenAI's
//! error object (<https://platform.openai.com/docs/guides/error-codes>), or that of TEI, Cohere or Voyage. The code travels in the header
//! `x-meridian-error` as well, so that a proxy need not read a body.

use serde::{Deserialize, Serialize};

/// Whose fault an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// The request itself cannot be served by anybody.
    Caller,
    /// The caller may not do this, or not this much of it.
    Quota,
    /// There is not enough room.
    Capacity,
    /// A replica broke.
    Replica,
    /// A machine between us and the replica could not be reached.
    Network,
    /// A rule forbids it; the rule is doing its work.
    Policy,
}

/// What would help whoever holds the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remedy {
    /// The same request will fail again, everywhere.
    Nothing,
    /// The same request may succeed later; `retry-after` says when.
    Wait,
    /// The same request may succeed in another region, now.
    Elsewhere,
}

macro_rules! error_codes {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal, $status:literal, $fault:ident, $remedy:ident;)+) => {
        /// A stable error code. The text form is part of the API: codes are added, never changed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum ErrorCode {
            $($(#[doc = $doc])+ $name,)+
        }

        impl ErrorCode {
            /// Every code, in the order of the documentation.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$name,)+];

            /// The code as clients see it, in `error.code` and in `x-meridian-error`.
            pub fn as_str(self) -> &'static str {
                match self { $(ErrorCode::$name => $text,)+ }
            }

            /// The HTTP status that carries this code.
            pub fn status(self) -> u16 {
                match self { $(ErrorCode::$name => $status,)+ }
            }

            /// Whose fault it is.
            pub fn fault(self) -> Fault {
                match self { $(ErrorCode::$name => Fault::$fault,)+ }
            }

            /// What would help.
            pub fn remedy(self) -> Remedy {
                match self { $(ErrorCode::$name => Remedy::$remedy,)+ }
            }

            fn meaning(self) -> &'static str {
                match self { $(ErrorCode::$name => concat!($($doc),+),)+ }
            }
        }
    };
}

error_codes! {
    /// The body is not JSON, or not of the shape that this path takes.
    InvalidJson = "invalid_json", 400, Caller, Nothing;
    /// A field that this path needs is absent; `param` names it.
    MissingField = "missing_field", 400, Caller, Nothing;
    /// A field has a type or a value that this path does not take; `param` names it.
    InvalidValue = "invalid_value", 400, Caller, Nothing;
    /// What came is not HTTP/1.1 as RFC 9112 has it, or could be read in two ways; the connection is closed.
    MalformedRequest = "malformed_request", 400, Caller, Nothing;
    /// The head of the request has more bytes or more fields than a head may; the connection is closed.
    HeadTooLarge = "head_too_large", 431, Caller, Nothing;
    /// The head of the request did not arrive within the time that a head may take; the connection is closed.
    HeadTimeout = "head_timeout", 408, Caller, Nothing;
    /// The body comes in a transfer coding other than `chunked`; the connection is closed.
    UnknownTransferCoding = "unknown_transfer_coding", 501, Caller, Nothing;
    /// The body comes in a content coding that is not spoken here; gzip is.
    UnsupportedEncoding = "unsupported_encoding", 415, Caller, Nothing;
    /// A header that Meridian reads has a value that it cannot read; `param` names it.
    InvalidHeader = "invalid_header", 400, Caller, Nothing;
    /// An input is empty: there is nothing to compute.
    EmptyInput = "empty_input", 400, Caller, Nothing;
    /// An input has more tokens than the model reads.
    InputTooLong = "input_too_long", 400, Caller, Nothing;
    /// The request carries more inputs than one request may.
    TooManyInputs = "too_many_inputs", 400, Caller, Nothing;
    /// The request has more tokens, all inputs together, than one request may.
    TooManyTokens = "too_many_tokens", 400, Caller, Nothing;
    /// The path asks for what this model does not do, as a classification of a model that embeds.
    WrongTask = "wrong_task", 400, Caller, Nothing;
    /// The body has more bytes than one request may.
    BodyTooLarge = "body_too_large", 413, Caller, Nothing;
    /// The body did not arrive within the time that a request may take to arrive.
    BodyTimeout = "body_timeout", 408, Caller, Nothing;
    /// No API key, or one that is not known here.
    InvalidApiKey = "invalid_api_key", 401, Quota, Nothing;
    /// The bearer token is not one that is taken here; the message says what is wrong with it.
    InvalidToken = "invalid_token", 401, Quota, Nothing;
    /// The caller has used up what it may use; `retry-after` says when there is more.
    RateLimited = "rate_limit_exceeded", 429, Quota, Wait;
    /// No deployment of this name exists; the message lists those that do.
    ModelNotFound = "model_not_found", 404, Caller, Nothing;
    /// No such path.
    NotFound = "not_found", 404, Caller, Nothing;
    /// The path exists, with another method.
    MethodNotAllowed = "method_not_allowed", 405, Caller, Nothing;
    /// The residency rules of the deployment and of the request together permit no region at all.
    RegionNotPermitted = "region_not_permitted", 403, Policy, Nothing;
    /// The tenant may not use the priority that the request asks for.
    PriorityNotPermitted = "priority_not_permitted", 403, Policy, Nothing;
    /// A region was asked to see a request that it is not allowed to see, and refused.
    NotResidentHere = "not_resident_here", 403, Policy, Elsewhere;
    /// Every region that is allowed to see the request is out of reach; the others were not asked.
    NoCapacityInAllowedRegions = "no_capacity_in_allowed_regions", 503, Capacity, Wait;
    /// The deployment is locked, each of its requests must leave a receipt, and none can be written at the moment.
    ReceiptUnavailable = "receipt_unavailable", 503, Capacity, Wait;
    /// The deployment is locked, and this process has not heard from a hub for longer than `policy_max_age`, so its residency
    /// policy may be out of date.
    PolicyTooOld = "policy_too_old", 503, Policy, Elsewhere;
    /// The queue is full, or the caller has more in it than its share.
    Overloaded = "overloaded", 429, Capacity, Wait;
    /// There is more work than can be done in time, and this request was not begun; `retry-after` says when there is room.
    Saturated = "saturated", 503, Capacity, Wait;
    /// No replica for this deployment is ready in this region.
    NotReady = "not_ready", 503, Capacity, Elsewhere;
    /// No replica for this deployment is ready; one is being started, and will not be ready before the request's deadline:
    /// `retry-after` says when it is.
    ColdStart = "cold_start", 503, Capacity, Wait;
    /// No replica of this region has the model revision that the request must be computed with.
    ModelRevisionUnavailable = "model_revision_unavailable", 503, Capacity, Elsewhere;
    /// The model of the deployment changed while the parts of the request were computed, and vectors of two models are never
    /// returned together; send the request again.
    ModelChanged = "model_changed", 503, Capacity, Wait;
    /// The process is going away and takes no new work.
    Draining = "draining", 503, Capacity, Elsewhere;
    /// The deadline passed before there was an answer.
    DeadlineExceeded = "deadline_exceeded", 504, Capacity, Nothing;
    /// The region could not be reached, or broke off before it answered.
    RegionUnreachable = "region_unreachable", 502, Network, Elsewhere;
    /// The replica could not be reached by its region, or broke off before it answered.
    ReplicaUnreachable = "replica_unreachable", 502, Replica, Elsewhere;
    /// The model computed NaN or an infinity for an input of the request; the same request fails again everywhere.
    NotFinite = "not_finite", 500, Replica, Nothing;
    /// Something that cannot happen did; the request identifier finds it in the logs.
    Internal = "internal", 500, Replica, Elsewhere;
}

impl ErrorCode {
    /// The code of this text, as read from `x-meridian-error`.
    pub fn parse(text: &str) -> Option<ErrorCode> {
        ErrorCode::ALL.iter().copied().find(|code| code.as_str() == text)
    }

    /// OpenAI's coarse `error.type`, by which its clients choose the exception that they raise.
    pub fn openai_type(self) -> &'static str {
        match self.fault() {
            Fault::Caller => "invalid_request_error",
            Fault::Quota | Fault::Capacity if self.status() == 429 => "rate_limit_exceeded",
            Fault::Quota => "authentication_error",
            Fault::Policy => "permission_error",
            Fault::Capacity => "service_unavailable",
            Fault::Replica | Fault::Network => "server_error",
        }
    }
}

/// `{"error": {...}}`, as OpenAI's clients read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The one member.
    pub error: ErrorObject,
}

/// OpenAI's error object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorObject {
    /// One sentence for a person: the field, the limit, and what to do.
    pub message: String,
    /// [`ErrorCode::openai_type`].
    #[serde(rename = "type")]
    pub kind: String,
    /// [`ErrorCode::as_str`].
    pub code: String,
    /// The field or header that is wrong, where there is one.
    pub param: Option<String>,
}

impl ErrorBody {
    /// The body for `code`, with the sentence `message` about the field `param`.
    pub fn new(code: ErrorCode, message: impl Into<String>, param: Option<&str>) -> ErrorBody {
        ErrorBody {
            error: ErrorObject {
                message: message.into(),
                kind: code.openai_type().to_owned(),
                code: code.as_str().to_owned(),
                param: param.map(str::to_owned),
            },
        }
    }

    /// The body as JSON bytes.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings serialise to JSON")
    }
}

/// In whose words an error is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's error object: its own paths, those of Cohere and Jina, and everything that is ours.
    OpenAi,
    /// `{"error", "error_type"}`, as text-embeddings-inference and BEI have it.
    Tei,
    /// `{"message"}`, which Cohere's clients read, beside OpenAI's object, on the paths that are Cohere's alone.
    Cohere,
    /// `{"detail"}`, as Voyage has it.
    Voyage,
}

/// The paths on which clients of Cohere are met and no others.
const COHERE_PATHS: &[&str] = &["/v1/embed", "/v2/embed", "/v2/rerank"];
/// What the paths of Voyage begin with.
const VOYAGE_PREFIX: &str = "/voyage/";

/// The paths on which clients of TEI are met.
const TEI_PATHS: &[&str] =
    &["/", "/embed", "/embed_all", "/rerank", "/predict", "/similarity", "/tokenize", "/decode"];

impl Dialect {
    /// The words of whoever asks at `path`.
    pub fn of_path(path: &str) -> Dialect {
        match path {
            path if TEI_PATHS.contains(&path) => Dialect::Tei,
            path if COHERE_PATHS.contains(&path) => Dialect::Cohere,
            path if path.starts_with(VOYAGE_PREFIX) => Dialect::Voyage,
            _ => Dialect::OpenAi,
        }
    }

    /// The status that carries `code`.
    pub fn status(self, code: ErrorCode) -> u16 {
        match self {
            Dialect::OpenAi | Dialect::Cohere | Dialect::Voyage => code.status(),
            Dialect::Tei => code.tei().1,
        }
    }

    /// The body for `code`, with the sentence `message` about the field `param`.
    pub fn body(self, code: ErrorCode, message: &str, param: Option<&str>) -> Vec<u8> {
        match self {
            Dialect::OpenAi => ErrorBody::new(code, message, param).to_json(),
            Dialect::Tei => {
                let body = TeiErrorBody { error: message.to_owned(), error_type: code.tei().0 };
                serde_json::to_vec(&body).expect("strings serialise to JSON")
            }
            Dialect::Cohere => {
                #[derive(Serialize)]
                struct Body<'a> {
                    message: &'a str,
                    error: ErrorObject,
                }
                let body = Body { message, error: ErrorBody::new(code, message, param).error };
                serde_json::to_vec(&body).expect("strings serialise to JSON")
            }
            Dialect::Voyage => {
                #[derive(Serialize)]
                struct Body<'a> {
                    detail: &'a str,
                }
                serde_json::to_vec(&Body { detail: message }).expect("strings serialise to JSON")
            }
        }
    }
}

/// TEI's coarse kinds of error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TeiErrorType {
    /// It does not serve at all now.
    Unhealthy,
    /// The model failed, or is of another kind.
    Backend,
    /// The queue is full.
    Overloaded,
    /// Too long, too many, too large.
    Validation,
    /// The text or the body cannot be read.
    Tokenizer,
    /// There is nothing in it.
    Empty,
}

/// `{"error", "error_type"}`, as TEI's clients read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TeiErrorBody {
    /// One sentence for a person.
    pub error: String,
    /// What kind of error it is.
    pub error_type: TeiErrorType,
}

impl ErrorCode {
    /// TEI's kind of error, and the status that it carries there. What is the server's fault keeps its own status
    /// (TEI says 424 to a failed model as well), because proxies that know neither of us count 5xx; and so does what
    /// TEI has no word for.
    pub fn tei(self) -> (TeiErrorType, u16) {
        use ErrorCode::*;
        match self {
            InvalidJson | MissingField | InvalidValue => (TeiErrorType::Tokenizer, 422),
            EmptyInput => (TeiErrorType::Empty, 400),
            InputTooLong | TooManyInputs | TooManyTokens | BodyTooLarge => (TeiErrorType::Validation, 413),
            WrongTask => (TeiErrorType::Backend, 424),
            Overloaded | RateLimited => (TeiErrorType::Overloaded, 429),
            MalformedRequest | HeadTooLarge | HeadTimeout | UnknownTransferCoding | UnsupportedEncoding => {
                (TeiErrorType::Validation, self.status())
            }
            InvalidHeader | BodyTimeout | InvalidApiKey | InvalidToken | ModelNotFound | NotFound
            | MethodNotAllowed | RegionNotPermitted | PriorityNotPermitted | NotResidentHere => {
                (TeiErrorType::Validation, self.status())
            }
            NoCapacityInAllowedRegions
            | ReceiptUnavailable
            | PolicyTooOld
            | Saturated
            | NotReady
            | ColdStart
            | ModelRevisionUnavailable
            | ModelChanged
            | Draining
            | RegionUnreachable
            | ReplicaUnreachable => (TeiErrorType::Unhealthy, self.status()),
            DeadlineExceeded | NotFinite | Internal => (TeiErrorType::Backend, self.status()),
        }
    }
}

/// `docs/errors.md`, rendered.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Errors\n\n\
         This page is rendered from `replica/core/src/wire/error.rs`; a test holds the two together.\n\n\
         The body is `{\"error\": {\"message\", \"type\", \"code\", \"param\"}}`, as OpenAI has it; on the paths of TEI \
         (`/embed`, `/embed_all`, `/rerank`, `/predict`, `/similarity`, `/tokenize`, `/decode`, and `/`) it is TEI's \
         `{\"error\", \"error_type\"}` with the status under *at TEI's paths*. On Cohere's own paths (`/v1/embed`, \
         `/v2/embed`, `/v2/rerank`) there is a `message` beside the object, and below `/voyage/` the body is Voyage's \
         `{\"detail\"}`. The code stands in the header \
         `x-meridian-error` in all cases. *Helps* says what whoever holds the request can do: nothing, wait (see \
         `retry-after`), or go elsewhere (the gateway does this by itself, within the allowed regions).\n\n\
         | code | status | at TEI's paths | fault | helps | meaning |\n|---|---|---|---|---|---|\n",
    );
    for code in ErrorCode::ALL {
        let (text, status, meaning) = (code.as_str(), code.status(), code.meaning().trim());
        let fault = format!("{:?}", code.fault()).to_lowercase();
        let remedy = format!("{:?}", code.remedy()).to_lowercase();
        let (tei_type, tei_status) = code.tei();
        let tei = format!("{tei_status} `{tei_type:?}`");
        page.push_str(&format!("| `{text}` | {status} | {tei} | {fault} | {remedy} | {meaning} |\n"));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_survives_the_header_it_travels_in() {
        for code in ErrorCode::ALL {
            assert_eq!(ErrorCode::parse(code.as_str()), Some(*code));
        }
        assert_eq!(ErrorCode::parse("no_such_code"), None);
    }

    #[test]
    fn only_errors_of_the_server_side_send_a_request_elsewhere() {
        for code in ErrorCode::ALL.iter().filter(|code| code.remedy() == Remedy::Elsewhere) {
            assert!(code.fault() != Fault::Caller && code.fault() != Fault::Quota, "{code:?}");
        }
    }

    #[test]
    fn each_path_is_answered_in_the_words_of_its_ecosystem() {
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
        ] {
            let dialect = Dialect::of_path(path);
            assert_eq!(dialect.status(ErrorCode::InputTooLong), status);
            let written = dialect.body(ErrorCode::InputTooLong, "long", Some("input"));
            assert_eq!(String::from_utf8_lossy(&written), body);
        }
        for code in ErrorCode::ALL {
            let (ours, theirs) = (code.status(), code.tei().1);
            assert_eq!(ours >= 500, theirs >= 500, "{code:?} is the same side's fault in both");
        }
    }

    #[test]
    fn the_page_of_errors_is_the_one_that_this_file_renders() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/errors.md");
        let page = std::fs::read_to_string(path).expect("docs/errors.md");
        assert_eq!(page, markdown(), "write the rendered page to docs/errors.md");
    }
}
