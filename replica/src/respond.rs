//! HTTP responses; the only module that writes error responses.
//!
//! A rejection becomes a status and a body in the format of the API that was called, its code in `x-meridian-error`,
//! and, where waiting helps, `retry-after` in whole seconds (defined by HTTP) and `retry-after-ms` (preferred by
//! OpenAI's clients).

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use replica_api::api::Dialect;
use replica_api::headers;
use replica_api::refusal::Refusal;

/// Returns the error response of a rejection.
pub(crate) fn refused(refusal: &Refusal, dialect: Dialect) -> Response<Body> {
    let status = StatusCode::from_u16(dialect.status(refusal.code));
    let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json(dialect.refusal(refusal));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(headers::ERROR, HeaderValue::from_static(refusal.code.as_str()));
    if let Some(wait) = refusal.retry_after {
        let seconds = wait.as_millis().div_ceil(1000) as u64;
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        headers.insert(headers::RETRY_AFTER_MS, HeaderValue::from(wait.as_millis() as u64));
    }
    response
}

/// Returns a JSON response.
pub(crate) fn json(body: Vec<u8>) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Returns a text response.
pub(crate) fn text(content_type: &'static str, body: String) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use replica_api::error::ErrorCode;

    use super::*;

    fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
        response.headers().get(name)?.to_str().ok()
    }

    #[test]
    fn a_rejection_carries_its_code_and_whole_seconds_to_wait() {
        let refusal = Refusal::overloaded("the queue", 1, Some(Duration::from_millis(1_200)));
        let response = refused(&refusal, Dialect::OpenAi);
        assert_eq!(response.status().as_u16(), ErrorCode::Overloaded.status());
        assert_eq!(header(&response, headers::ERROR), Some("overloaded"));
        assert_eq!(header(&response, "retry-after"), Some("2"));
        assert_eq!(header(&response, "retry-after-ms"), Some("1200"));
    }

    #[test]
    fn a_rejection_that_waiting_does_not_resolve_has_no_retry_after() {
        let response = refused(&Refusal::empty_input("input", "input"), Dialect::OpenAi);
        assert_eq!(response.status().as_u16(), 400);
        assert_eq!(header(&response, "retry-after"), None);
    }
}
