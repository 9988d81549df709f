//! The only writer of error bodies, in the format of OpenAI's error object.
//!
//! The hub's clients are spokes, gateways and operators, so it has an error list of its own; codes with the same
//! meaning as those of the client API (`docs/errors.md`) have the same name.

use axum::Json;
use axum::http::header::WWW_AUTHENTICATE;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use scheduler_api::WireError;
use scheduler_store::StoreError;
use serde::Serialize;

/// Repeats the error code as a header, so that a proxy need not parse the body.
const ERROR_HEADER: HeaderName = HeaderName::from_static("x-meridian-error");

/// Error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// The body is not JSON, or does not match the schema of this path.
    InvalidJson,
    /// A field has an invalid value.
    InvalidValue,
    /// The body exceeds the size limit.
    BodyTooLarge,
    /// Unknown path.
    NotFound,
    /// The path exists with another method.
    MethodNotAllowed,
    /// The request has no valid token.
    Unauthorized,
    /// The role or the region of the peer may not send this request.
    Forbidden,
    /// The files to apply are invalid.
    InvalidFiles,
    /// Another writer has changed the same record.
    Conflict,
    /// Another spoke of the region has the same instance name.
    InstanceInUse,
    /// The lease has ended; register again.
    LeaseNotFound,
    /// A limit on the number of requests or records is reached.
    Overloaded,
    /// The store is unavailable.
    StoreUnavailable,
    /// No route table is published yet, or the hub cannot serve requests.
    NotReady,
    /// The request failed because of a defect of the hub.
    Internal,
}

impl Code {
    /// Returns the code, the status and the `type` of OpenAI's error object.
    fn parts(self) -> (&'static str, StatusCode, &'static str) {
        const CALLER: &str = "invalid_request_error";
        const CAPACITY: &str = "service_unavailable";
        match self {
            Code::InvalidJson => ("invalid_json", StatusCode::BAD_REQUEST, CALLER),
            Code::InvalidValue => ("invalid_value", StatusCode::BAD_REQUEST, CALLER),
            Code::BodyTooLarge => ("body_too_large", StatusCode::PAYLOAD_TOO_LARGE, CALLER),
            Code::NotFound => ("not_found", StatusCode::NOT_FOUND, CALLER),
            Code::MethodNotAllowed => ("method_not_allowed", StatusCode::METHOD_NOT_ALLOWED, CALLER),
            Code::Unauthorized => ("invalid_token", StatusCode::UNAUTHORIZED, "authentication_error"),
            Code::Forbidden => ("forbidden", StatusCode::FORBIDDEN, "permission_error"),
            Code::InvalidFiles => ("invalid_files", StatusCode::UNPROCESSABLE_ENTITY, CALLER),
            Code::Conflict => ("conflict", StatusCode::CONFLICT, CALLER),
            Code::InstanceInUse => ("instance_in_use", StatusCode::CONFLICT, CALLER),
            Code::LeaseNotFound => ("lease_not_found", StatusCode::NOT_FOUND, CALLER),
            Code::Overloaded => ("overloaded", StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded"),
            Code::StoreUnavailable => ("store_unavailable", StatusCode::SERVICE_UNAVAILABLE, CAPACITY),
            Code::NotReady => ("not_ready", StatusCode::SERVICE_UNAVAILABLE, CAPACITY),
            Code::Internal => ("internal", StatusCode::INTERNAL_SERVER_ERROR, "server_error"),
        }
    }
}

/// Error response: a code, a message, and the invalid field, if there is one.
#[derive(Debug)]
pub(crate) struct ErrorResponse {
    code: Code,
    message: String,
    field: Option<String>,
    /// Value of `www-authenticate`.
    challenge: Option<String>,
}

impl ErrorResponse {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> ErrorResponse {
        ErrorResponse { code, message: message.into(), field: None, challenge: None }
    }

    /// Creates the response to a request without a token, or with an invalid one (RFC 6750, 3). `message` has no `"`.
    pub(crate) fn unauthorized(message: String, has_token: bool) -> ErrorResponse {
        let reason = format!("Bearer error=\"invalid_token\", error_description=\"{message}\"");
        let challenge = if has_token { reason } else { "Bearer".to_owned() };
        ErrorResponse { challenge: Some(challenge), ..ErrorResponse::new(Code::Unauthorized, message) }
    }

    pub(crate) fn with_field(mut self, field: impl Into<String>) -> ErrorResponse {
        self.field = Some(field.into());
        self
    }
}

/// Returns a response with the status and the header of this code, and a body of its own.
pub(crate) fn with_body(code: Code, body: impl Serialize) -> Response {
    let (code, status, _) = code.parts();
    (status, [(ERROR_HEADER, code)], Json(body)).into_response()
}

impl From<StoreError> for ErrorResponse {
    fn from(error: StoreError) -> ErrorResponse {
        let code = match &error {
            StoreError::NoSuchLease(_) => {
                let message = format!("{error}; register again.");
                return ErrorResponse::new(Code::LeaseNotFound, message).with_field("lease");
            }
            StoreError::TooManyLeases => Code::Overloaded,
            StoreError::TooLarge(_) => Code::BodyTooLarge,
            StoreError::TooManyOps(_)
            | StoreError::DuplicateKey(_)
            | StoreError::Unavailable(_)
            | StoreError::Closed => Code::StoreUnavailable,
        };
        ErrorResponse::new(code, error.to_string())
    }
}

impl From<WireError> for ErrorResponse {
    fn from(error: WireError) -> ErrorResponse {
        ErrorResponse::new(Code::InvalidValue, format!("{error}.")).with_field(error.field)
    }
}

#[derive(Serialize)]
struct HubErrorBody {
    error: HubErrorObject,
}

#[derive(Serialize)]
struct HubErrorObject {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    code: &'static str,
    param: Option<String>,
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let ErrorResponse { code, message, field, challenge } = self;
        let (code, status, kind) = code.parts();
        let body = HubErrorBody { error: HubErrorObject { message, kind, code, param: field } };
        let mut response = (status, [(ERROR_HEADER, code)], Json(body)).into_response();
        if let Some(challenge) = challenge.and_then(|challenge| HeaderValue::try_from(challenge).ok()) {
            response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
        }
        response
    }
}
