//! Access control in front of the hub's paths, by [`scheduler_core::access`].
//!
//! It is a layer around whole groups of paths, so a handler cannot forget it, and it runs before a body is read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use scheduler_core::access::{Access, Denied, Tokens};

use crate::events::AccessDenied;
use crate::respond::{Code, ErrorResponse};

/// Requires `access` for requests to `paths`.
pub(super) fn guarded<S: Clone + Send + Sync + 'static>(
    paths: Router<S>,
    access: Access,
    tokens: &Arc<Tokens>,
) -> Router<S> {
    let guard = Guard { tokens: tokens.clone(), access, has_denied: Arc::default() };
    paths.route_layer(from_fn_with_state(guard, check))
}

/// Guard of a group of paths.
#[derive(Clone)]
struct Guard {
    tokens: Arc<Tokens>,
    access: Access,
    /// Set at the first denial, which is logged as a warning; a misconfigured gateway repeats its request.
    has_denied: Arc<AtomicBool>,
}

async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    match guard.tokens.check(guard.access, authorization(request.headers())) {
        Ok(()) => next.run(request).await,
        Err(denied) => {
            let path = request.uri().path();
            if guard.has_denied.swap(true, Ordering::Relaxed) {
                tracing::debug!(path, reason = %denied, "request denied");
            } else {
                AccessDenied { path, reason: &denied }.emit();
            }
            denied_response(denied).into_response()
        }
    }
}

/// Returns the value of the Authorization header; of several such headers, none is accepted.
fn authorization(headers: &HeaderMap) -> Option<&[u8]> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    match (values.next(), values.next()) {
        (Some(only), None) => Some(only.as_bytes()),
        (None, _) | (Some(_), Some(_)) => None,
    }
}

fn denied_response(denied: Denied) -> ErrorResponse {
    let code = match denied {
        Denied::NoToken(_) | Denied::UnknownToken(_) => Code::Unauthenticated,
        Denied::NotAnOperator | Denied::NoOperatorConfigured => Code::OperatorOnly,
    };
    ErrorResponse::new(code, format!("{denied}."))
}
