//! The only writer of error bodies: what went wrong, as OpenAI's error object.
//!
//! The hub speaks to spokes, gateways and operators, so its list of codes is its own; where it means the same as the one
//! that clients see (`docs/errors.md`), it is called the same.

use axum::Json;
use axum::http::header::WWW_AUTHENTICATE;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// Carries the code beside the body, so that a proxy need not read one.
const ERROR_HEADER: HeaderName = HeaderName::from_static("x-meridian-error");

/// Why something is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// The body is not JSON, or not of the shape that this path takes.
    InvalidJson,
    /// A field has a value that this path does not take.
    InvalidValue,
    /// The body has more bytes than one request may.
    BodyTooLarge,
    /// No such path.
    NotFound,
    /// The path exists, with another method.
    MethodNotAllowed,
    /// The request carries no token, or one that this hub does not know.
    Unauthenticated,
    /// The request needs the operator token, and carries the fleet token, or this hub has none.
    OperatorOnly,
    /// The files that are to be applied are wrong.
    InvalidFiles,
    /// Somebody else has changed the same meanwhile.
    Conflict,
    /// The lease has ended; register again.
    LeaseNotFound,
    /// There are too many already.
    Overloaded,
    /// The store does not do its part.
    StoreUnavailable,
    /// Nothing has been published yet, or the hub cannot answer.
    NotReady,
    /// The request met a defect of the hub.
    Internal,
}

impl Code {
    /// The code, the status and OpenAI's coarse type.
    fn parts(self) -> (&'static str, StatusCode, &'static str) {
        const CALLER: &str = "invalid_request_error";
        const CAPACITY: &str = "service_unavailable";
        match self {
            Code::InvalidJson => ("invalid_json", StatusCode::BAD_REQUEST, CALLER),
            Code::InvalidValue => ("invalid_value", StatusCode::BAD_REQUEST, CALLER),
            Code::BodyTooLarge => ("body_too_large", StatusCode::PAYLOAD_TOO_LARGE, CALLER),
            Code::NotFound => ("not_found", StatusCode::NOT_FOUND, CALLER),
            Code::MethodNotAllowed => ("method_not_allowed", StatusCode::METHOD_NOT_ALLOWED, CALLER),
            Code::Unauthenticated => ("unauthenticated", StatusCode::UNAUTHORIZED, "authentication_error"),
            Code::OperatorOnly => ("operator_only", StatusCode::FORBIDDEN, "permission_error"),
            Code::InvalidFiles => ("invalid_files", StatusCode::UNPROCESSABLE_ENTITY, CALLER),
            Code::Conflict => ("conflict", StatusCode::CONFLICT, CALLER),
            Code::LeaseNotFound => ("lease_not_found", StatusCode::NOT_FOUND, CALLER),
            Code::Overloaded => ("overloaded", StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded"),
            Code::StoreUnavailable => ("store_unavailable", StatusCode::SERVICE_UNAVAILABLE, CAPACITY),
            Code::NotReady => ("not_ready", StatusCode::SERVICE_UNAVAILABLE, CAPACITY),
            Code::Internal => ("internal", StatusCode::INTERNAL_SERVER_ERROR, "server_error"),
        }
    }
}

/// A refusal: a code, a sentence for a person, and the field that is wrong, where there is one.
#[derive(Debug)]
pub(crate) struct Refusal {
    code: Code,
    message: String,
    field: Option<String>,
}

impl Refusal {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Refusal {
        Refusal { code, message: message.into(), field: None }
    }

    pub(crate) fn of(mut self, field: impl Into<String>) -> Refusal {
        self.field = Some(field.into());
        self
    }
}

/// An answer of its own with the status and the header of this code.
pub(crate) fn told(code: Code, body: impl Serialize) -> Response {
    let (code, status, _) = code.parts();
    (status, [(ERROR_HEADER, code)], Json(body)).into_response()
}

#[derive(Serialize)]
struct Body {
    error: Object,
}

#[derive(Serialize)]
struct Object {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    code: &'static str,
    param: Option<String>,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Refusal { code, message, field } = self;
        let (code, status, kind) = code.parts();
        let body = Body { error: Object { message, kind, code, param: field } };
        let mut response = (status, [(ERROR_HEADER, code)], Json(body)).into_response();
        if status == StatusCode::UNAUTHORIZED {
            // RFC 9110, 11.6.1: a 401 names the scheme that is accepted.
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
