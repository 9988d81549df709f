//! Error codes of Meridian, as one closed list.
//!
//! An error has three readers. A *program* needs a stable code and a status; an *operator* needs to know the side at
//! fault; and the holder of the request (a client library, or the gateway between two attempts) needs to know the
//! remedy: none, wait, or use another region. [`ErrorCode`] serves all three, and both the gateway and the replica use
//! it, so a code has the same meaning everywhere. `docs/errors.md` is rendered from this file.
//!
//! The body has the format of the ecosystem that defines the requested path ([`Dialect`]), because its stock clients
//! parse it: OpenAI's error object (<https://platform.openai.com/docs/guides/error-codes>), or that of TEI, Cohere or
//! Voyage. The code is also in the header `x-meridian-error`, so that a proxy need not read a body.

use serde::{Deserialize, Serialize};

/// Side at fault for an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// The request itself; no server can serve it.
    Caller,
    /// The caller exceeds its permissions or its limits.
    Quota,
    /// There is not enough capacity.
    Capacity,
    /// A replica failed.
    Replica,
    /// A machine between the client and the replica could not be reached.
    Network,
    /// A policy forbids the request.
    Policy,
}

/// Remedy for the holder of the request.
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
        /// Stable error code. The text form is part of the API: codes are added, never changed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum ErrorCode {
            $($(#[doc = $doc])+ $name,)+
        }

        impl ErrorCode {
            /// Every code, in the order of the documentation.
            pub const ALL: &'static [ErrorCode] = &[$(ErrorCode::$name,)+];

            /// Returns the code as clients see it, in `error.code` and in `x-meridian-error`.
            pub fn as_str(self) -> &'static str {
                match self { $(ErrorCode::$name => $text,)+ }
            }

            /// Returns the HTTP status of this code.
            pub fn status(self) -> u16 {
                match self { $(ErrorCode::$name => $status,)+ }
            }

            /// Returns the side at fault.
            pub fn fault(self) -> Fault {
                match self { $(ErrorCode::$name => Fault::$fault,)+ }
            }

            /// Returns the remedy.
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
    /// The body is not JSON, or does not have the structure that this path requires.
    InvalidJson = "invalid_json", 400, Caller, Nothing;
    /// A field that this path requires is absent; `param` names it.
    MissingField = "missing_field", 400, Caller, Nothing;
    /// A field has a type or a value that this path does not support; `param` names it.
    InvalidValue = "invalid_value", 400, Caller, Nothing;
    /// The request is not HTTP/1.1 according to RFC 9112, or is ambiguous; the connection is closed.
    MalformedRequest = "malformed_request", 400, Caller, Nothing;
    /// The head of the request exceeds the limit of bytes or fields; the connection is closed.
    HeadTooLarge = "head_too_large", 431, Caller, Nothing;
    /// The head of the request did not arrive within the time limit; the connection is closed.
    HeadTimeout = "head_timeout", 408, Caller, Nothing;
    /// The body has a transfer coding other than `chunked`; the connection is closed.
    UnknownTransferCoding = "unknown_transfer_coding", 501, Caller, Nothing;
    /// The body has an unsupported content coding; gzip is supported.
    UnsupportedEncoding = "unsupported_encoding", 415, Caller, Nothing;
    /// A header that Meridian reads has an invalid value; `param` names it.
    InvalidHeader = "invalid_header", 400, Caller, Nothing;
    /// An input is empty.
    EmptyInput = "empty_input", 400, Caller, Nothing;
    /// An input has more tokens than the model reads.
    InputTooLong = "input_too_long", 400, Caller, Nothing;
    /// The request has more inputs than the limit.
    TooManyInputs = "too_many_inputs", 400, Caller, Nothing;
    /// The inputs of the request have more tokens together than the limit.
    TooManyTokens = "too_many_tokens", 400, Caller, Nothing;
    /// The path requires another task than that of this model, such as a classification with an embedding model.
    WrongTask = "wrong_task", 400, Caller, Nothing;
    /// The body has more bytes than the limit.
    BodyTooLarge = "body_too_large", 413, Caller, Nothing;
    /// The body did not arrive within the time limit.
    BodyTimeout = "body_timeout", 408, Caller, Nothing;
    /// The API key is absent or unknown.
    InvalidApiKey = "invalid_api_key", 401, Quota, Nothing;
    /// The bearer token is invalid; the message has the reason.
    InvalidToken = "invalid_token", 401, Quota, Nothing;
    /// The caller has reached its rate limit; `retry-after` says when it may continue.
    RateLimited = "rate_limit_exceeded", 429, Quota, Wait;
    /// No deployment of this name exists; the message lists those that do.
    ModelNotFound = "model_not_found", 404, Caller, Nothing;
    /// The path does not exist.
    NotFound = "not_found", 404, Caller, Nothing;
    /// The path exists, with another method.
    MethodNotAllowed = "method_not_allowed", 405, Caller, Nothing;
    /// The residency policies of the deployment and of the request together allow no region.
    RegionNotPermitted = "region_not_permitted", 403, Policy, Nothing;
    /// The tenant may not use the requested priority.
    PriorityNotPermitted = "priority_not_permitted", 403, Policy, Nothing;
    /// The region is not allowed to see the request, and rejected it.
    NotResidentHere = "not_resident_here", 403, Policy, Elsewhere;
    /// Every region that is allowed to see the request is unreachable; no other region was tried.
    NoCapacityInAllowedRegions = "no_capacity_in_allowed_regions", 503, Capacity, Wait;
    /// The deployment is locked, each of its requests requires a receipt, and none can be written at the moment.
    ReceiptUnavailable = "receipt_unavailable", 503, Capacity, Wait;
    /// The deployment is locked, and this process has had no contact with a hub for longer than `policy_max_age`, so
    /// its residency policy may be out of date.
    PolicyTooOld = "policy_too_old", 503, Policy, Elsewhere;
    /// The queue is full, or the caller exceeds its fair share of it.
    Overloaded = "overloaded", 429, Capacity, Wait;
    /// There is not enough capacity to serve the request in time, and it was not started; `retry-after` says when there
    /// should be capacity.
    Saturated = "saturated", 503, Capacity, Wait;
    /// No replica of this deployment is ready in this region.
    NotReady = "not_ready", 503, Capacity, Elsewhere;
    /// No replica of this deployment is ready; one is being started, and will not be ready before the request's
    /// deadline: `retry-after` says when it is.
    ColdStart = "cold_start", 503, Capacity, Wait;
    /// No replica of this region has the model revision that the request must be computed with.
    ModelRevisionUnavailable = "model_revision_unavailable", 503, Capacity, Elsewhere;
    /// The model of the deployment changed while the parts of the request were computed, and vectors of two models are
    /// never returned together; send the request again.
    ModelChanged = "model_changed", 503, Capacity, Wait;
    /// The process is draining and accepts no new requests.
    Draining = "draining", 503, Capacity, Elsewhere;
    /// The deadline passed before the response was complete.
    DeadlineExceeded = "deadline_exceeded", 504, Capacity, Nothing;
    /// The region could not be reached, or reset the connection before its response.
    RegionUnreachable = "region_unreachable", 502, Network, Elsewhere;
    /// The replica could not be reached by its region, or reset the connection before its response.
    ReplicaUnreachable = "replica_unreachable", 502, Replica, Elsewhere;
    /// The model computed NaN or an infinity for an input of the request; the same request fails again everywhere.
    NotFinite = "not_finite", 500, Replica, Nothing;
    /// An internal error occurred; the logs have its cause under the request identifier.
    Internal = "internal", 500, Replica, Elsewhere;
}

impl ErrorCode {
    /// Returns the code with this text, as in `x-meridian-error`.
    pub fn parse(text: &str) -> Option<ErrorCode> {
        ErrorCode::ALL.iter().copied().find(|code| code.as_str() == text)
    }

    /// Returns OpenAI's coarse `error.type`, by which its clients choose the exception that they raise.
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
    /// The error.
    pub error: ErrorObject,
}

/// OpenAI's error object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorObject {
    /// One sentence for a person: the field, the limit, and the fix.
    pub message: String,
    /// [`ErrorCode::openai_type`].
    #[serde(rename = "type")]
    pub kind: String,
    /// [`ErrorCode::as_str`].
    pub code: String,
    /// Field or header that is invalid, if any.
    pub param: Option<String>,
}

impl ErrorBody {
    /// Creates the body for `code`, with the sentence `message` about the field `param`.
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

    /// Returns the body as JSON.
    pub fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings serialise to JSON")
    }
}

/// Format of error bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// OpenAI's error object: its own paths, those of Cohere and Jina, and Meridian's own.
    OpenAi,
    /// `{"error", "error_type"}`, as in text-embeddings-inference and BEI.
    Tei,
    /// `{"message"}`, which Cohere's clients read, beside OpenAI's object, on the paths that only Cohere defines.
    Cohere,
    /// `{"detail"}`, as in Voyage's API.
    Voyage,
}

/// Paths that only clients of Cohere use.
const COHERE_PATHS: &[&str] = &["/v1/embed", "/v2/embed", "/v2/rerank"];
/// Prefix of the paths of Voyage.
const VOYAGE_PREFIX: &str = "/voyage/";

/// Paths that clients of TEI use.
const TEI_PATHS: &[&str] =
    &["/", "/embed", "/embed_all", "/rerank", "/predict", "/similarity", "/tokenize", "/decode"];

impl Dialect {
    /// Returns the format for clients of `path`.
    pub fn of_path(path: &str) -> Dialect {
        match path {
            path if TEI_PATHS.contains(&path) => Dialect::Tei,
            path if COHERE_PATHS.contains(&path) => Dialect::Cohere,
            path if path.starts_with(VOYAGE_PREFIX) => Dialect::Voyage,
            _ => Dialect::OpenAi,
        }
    }

    /// Returns the HTTP status of `code`.
    pub fn status(self, code: ErrorCode) -> u16 {
        match self {
            Dialect::OpenAi | Dialect::Cohere | Dialect::Voyage => code.status(),
            Dialect::Tei => code.tei().1,
        }
    }

    /// Returns the body for `code`, with the sentence `message` about the field `param`.
    pub fn body(self, code: ErrorCode, message: &str, param: Option<&str>) -> Vec<u8> {
        match self {
            Dialect::OpenAi => ErrorBody::new(code, message, param).to_json(),
            Dialect::Tei => {
                let body = TeiErrorBody { error: message.to_owned(), error_type: code.tei().0 };
                serde_json::to_vec(&body).expect("strings serialise to JSON")
            }
            Dialect::Cohere => {
                #[derive(Serialize)]
                struct CohereErrorBody<'a> {
                    message: &'a str,
                    error: ErrorObject,
                }
                let body = CohereErrorBody { message, error: ErrorBody::new(code, message, param).error };
                serde_json::to_vec(&body).expect("strings serialise to JSON")
            }
            Dialect::Voyage => {
                #[derive(Serialize)]
                struct VoyageErrorBody<'a> {
                    detail: &'a str,
                }
                serde_json::to_vec(&VoyageErrorBody { detail: message }).expect("strings serialise to JSON")
            }
        }
    }
}

/// Error types of TEI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TeiErrorType {
    /// The server is not available.
    Unhealthy,
    /// The model failed, or has another task.
    Backend,
    /// The queue is full.
    Overloaded,
    /// The input is too long, too large, or has too many elements.
    Validation,
    /// The text or the body cannot be parsed.
    Tokenizer,
    /// The input is empty.
    Empty,
}

/// `{"error", "error_type"}`, as TEI's clients read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TeiErrorBody {
    /// One sentence for a person.
    pub error: String,
    /// Type of the error.
    pub error_type: TeiErrorType,
}

impl ErrorCode {
    /// Returns TEI's error type, and the status that TEI uses for it. Server errors keep their own status (TEI uses 424
    /// for a failed model as well), because generic proxies count 5xx; so do errors for which TEI has no type.
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

/// Renders `docs/errors.md`.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Errors\n\n\
         This page is rendered from `replica/api/src/error.rs`; a test compares the two.\n\n\
         The body is `{\"error\": {\"message\", \"type\", \"code\", \"param\"}}`, OpenAI's format; on the paths of TEI \
         (`/embed`, `/embed_all`, `/rerank`, `/predict`, `/similarity`, `/tokenize`, `/decode`, and `/`) it is TEI's \
         `{\"error\", \"error_type\"}` with the status under *at TEI's paths*. On Cohere's own paths (`/v1/embed`, \
         `/v2/embed`, `/v2/rerank`) there is a `message` beside the object, and below `/voyage/` the body is Voyage's \
         `{\"detail\"}`. The code is in the header \
         `x-meridian-error` in all cases. *Helps* is the remedy: nothing, wait (see `retry-after`), or elsewhere, which is \
         another region (the gateway retries there by itself, within the allowed regions).\n\n\
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
    fn an_error_code_round_trips_through_its_header() {
        for code in ErrorCode::ALL {
            assert_eq!(ErrorCode::parse(code.as_str()), Some(*code));
        }
        assert_eq!(ErrorCode::parse("no_such_code"), None);
    }

    #[test]
    fn only_server_side_errors_have_the_remedy_elsewhere() {
        for code in ErrorCode::ALL.iter().filter(|code| code.remedy() == Remedy::Elsewhere) {
            assert!(code.fault() != Fault::Caller && code.fault() != Fault::Quota, "{code:?}");
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
    fn docs_errors_md_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/errors.md");
        let page = std::fs::read_to_string(path).expect("docs/errors.md");
        assert_eq!(page, markdown(), "write the rendered page to docs/errors.md");
    }
}
