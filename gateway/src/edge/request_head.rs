//! Headers of a request: its identifier, its declared length, and headers that may be sent once.

use crate::names;
use crate::respond::Rejection;
use http::header::CONTENT_LENGTH;
use pingora::protocols::http::ServerSession;
use rand::Rng;
use replica_api::error::ErrorCode;
use replica_api::headers;
use std::net::SocketAddr;

/// Longest request identifier that is accepted from a client.
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Returns the client's identifier if it is valid in a header and a log line, else a new one.
pub(super) fn request_id(session: &ServerSession) -> String {
    let given = header(session, headers::REQUEST_ID).and_then(|value| std::str::from_utf8(value).ok());
    let usable = |id: &&str| {
        (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
    };
    match given.filter(usable) {
        Some(id) => id.to_owned(),
        None => format!("req-{:032x}", rand::rng().random::<u128>()),
    }
}

/// Returns the declared length of the body; 0 if none is declared.
pub(super) fn declared_length(session: &ServerSession) -> u64 {
    let declared = session
        .get_header(CONTENT_LENGTH)
        .map(http::HeaderValue::as_bytes)
        .and_then(|value| std::str::from_utf8(value).ok());
    declared.and_then(|length| length.parse().ok()).unwrap_or(0)
}

fn header<'a>(session: &'a ServerSession, name: &'static str) -> Option<&'a [u8]> {
    session.get_header(names::name(name)).map(|value| value.as_bytes())
}

/// Headers that identify the tenant or describe the body: of two values, two readers could use different ones.
const ONCE: [&str; 6] =
    ["authorization", "api-key", "x-api-key", "content-type", "expect", "idempotency-key"];

/// Rejects a request that has one of them more than once.
pub(super) fn none_repeated(session: &ServerSession) -> Result<(), Rejection> {
    let headers = &session.req_header().headers;
    match ONCE.iter().find(|name| headers.get_all(**name).iter().nth(1).is_some()) {
        Some(name) => Err(repeated(name)),
        None => Ok(()),
    }
}

fn repeated(name: &'static str) -> Rejection {
    let message = format!("The header '{name}' is there more than once; send it once.");
    Rejection::new(ErrorCode::InvalidHeader, message).of(name)
}

/// Returns a header that may be sent once. Of two, either could be meant, and of two residencies the narrower would be lost.
pub(super) fn single<'a>(
    session: &'a ServerSession,
    name: &'static str,
) -> Result<Option<&'a [u8]>, Rejection> {
    let given = header(session, name);
    if given.is_some() && session.req_header().headers.get_all(name).iter().count() > 1 {
        return Err(repeated(name));
    }
    Ok(given)
}

/// Address of the client, or of the proxy in front of it.
pub(super) fn peer(session: &ServerSession) -> Option<SocketAddr> {
    session.client_addr().and_then(|address| address.as_inet()).copied()
}
