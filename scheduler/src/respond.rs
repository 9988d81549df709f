//! The only writer of error bodies, in the format of OpenAI's error object.
//!
//! The hub's clients are spokes, gateways and operators. Its codes are those of the client API ([`ErrorCode`]), where one has
//! the meaning, and otherwise codes of its own ([`HubErrorCode`]); `docs/errors.md` lists both.

use axum::Json;
use axum::http::header::WWW_AUTHENTICATE;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use replica_api::error::{ErrorBody, ErrorCode, ErrorObject};
use replica_api::headers;
use scheduler_api::WireError;
use scheduler_api::error::HubErrorCode;
use scheduler_store::StoreError;
use serde::Serialize;

/// Repeats the error code as a header, so that a proxy need not parse the body.
const ERROR_HEADER: HeaderName = HeaderName::from_static(headers::ERROR);

/// Error code of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// Code of the client API.
    Api(ErrorCode),
    /// Code of the hub's own.
    Hub(HubErrorCode),
}

impl From<ErrorCode> for Code {
    fn from(code: ErrorCode) -> Code {
        Code::Api(code)
    }
}

impl From<HubErrorCode> for Code {
    fn from(code: HubErrorCode) -> Code {
        Code::Hub(code)
    }
}

impl Code {
    /// Returns the code, the status and the `type` of OpenAI's error object.
    fn parts(self) -> (&'static str, StatusCode, &'static str) {
        let (code, status, kind) = match self {
            Code::Api(code) => (code.as_str(), code.status(), code.openai_type()),
            Code::Hub(code) => (code.as_str(), code.status(), code.openai_type()),
        };
        (code, StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), kind)
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
    pub(crate) fn new(code: impl Into<Code>, message: impl Into<String>) -> ErrorResponse {
        ErrorResponse { code: code.into(), message: message.into(), field: None, challenge: None }
    }

    /// Creates the response to a request without a token, or with an invalid one (RFC 6750, 3). `message` has no `"`.
    pub(crate) fn unauthorized(message: String, has_token: bool) -> ErrorResponse {
        let reason = format!("Bearer error=\"invalid_token\", error_description=\"{message}\"");
        let challenge = if has_token { reason } else { "Bearer".to_owned() };
        ErrorResponse { challenge: Some(challenge), ..ErrorResponse::new(ErrorCode::InvalidToken, message) }
    }

    #[cfg(test)]
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    pub(crate) fn with_field(mut self, field: impl Into<String>) -> ErrorResponse {
        self.field = Some(field.into());
        self
    }
}

/// Returns a response with the status and the header of this code, and a body of its own.
pub(crate) fn with_body(code: HubErrorCode, body: impl Serialize) -> Response {
    let (code, status, _) = Code::Hub(code).parts();
    (status, [(ERROR_HEADER, code)], Json(body)).into_response()
}

impl From<StoreError> for ErrorResponse {
    fn from(error: StoreError) -> ErrorResponse {
        let code: Code = match &error {
            StoreError::NoSuchLease(_) => {
                let message = format!("{error}; register again.");
                return ErrorResponse::new(HubErrorCode::LeaseNotFound, message).with_field("lease");
            }
            StoreError::TooManyLeases => ErrorCode::Overloaded.into(),
            StoreError::TooLarge(_) => ErrorCode::BodyTooLarge.into(),
            StoreError::TooManyOps(_)
            | StoreError::DuplicateKey(_)
            | StoreError::Unavailable(_)
            | StoreError::Closed => HubErrorCode::StoreUnavailable.into(),
        };
        ErrorResponse::new(code, error.to_string())
    }
}

impl From<WireError> for ErrorResponse {
    fn from(error: WireError) -> ErrorResponse {
        ErrorResponse::new(ErrorCode::InvalidValue, format!("{error}.")).with_field(error.field)
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        let ErrorResponse { code, message, field, challenge } = self;
        let (code, status, kind) = code.parts();
        let body = ErrorBody {
            error: ErrorObject { message, kind: kind.to_owned(), code: code.to_owned(), param: field },
        };
        let mut response = (status, [(ERROR_HEADER, code)], Json(body)).into_response();
        if let Some(challenge) = challenge.and_then(|challenge| HeaderValue::try_from(challenge).ok()) {
            response.headers_mut().insert(WWW_AUTHENTICATE, challenge);
        }
        response
    }
}
