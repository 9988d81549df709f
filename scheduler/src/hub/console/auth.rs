//! Authentication of a person at the console: the owner of a certificate, of a token of an identity provider, or of a session.

use std::time::{Duration, Instant};

use ::console::sessions::{ConsoleRole, Visitor};
use axum::http::{HeaderMap, header};
use identity::{ClientIdentity, ConnectedClient};
use regions::spiffe::Role;
use replica_api::error::ErrorCode;
use scheduler_api::error::HubErrorCode;
use scheduler_client::unix_time;
use scheduler_store::Store;

use super::context::{Admitted, ConsoleApi};
use super::state::Console;
use crate::hub::access::Caller;
use crate::respond::ErrorResponse;

/// Name of the cookie, before the port: browsers send a cookie to all ports of a host.
const COOKIE: &str = "meridian-console-";
/// Name of the person at a hub without an identity.
const LOCAL: &str = "local";

/// Returns the person who has sent a request to the hub, if it is a viewer or an operator.
pub(super) fn visitor(caller: &Caller) -> Option<Visitor> {
    let (role, name, certificate, until) = match caller {
        Caller::Local => (Some(Role::Operator), LOCAL.to_owned(), None, None),
        Caller::Certified(peer) => {
            // The last second belongs to the validity.
            let until = Duration::from_secs(peer.not_after.saturating_add(1));
            (Some(peer.role()), peer.id.to_string(), Some(peer.serial.to_string()), Some(until))
        }
        Caller::Token(operator) => (operator.role, operator.subject.clone(), None, Some(operator.until)),
    };
    let role = match role? {
        Role::Viewer => ConsoleRole::Viewer,
        Role::Operator => ConsoleRole::Operator,
        _ => return None,
    };
    // A time that an `Instant` cannot represent is never reached.
    let valid_until = until.and_then(|until| Instant::now().checked_add(until.saturating_sub(unix_time())));
    Some(Visitor { role, name, certificate, valid_until })
}

/// Returns the rejection of a caller without such a role.
pub(super) fn not_permitted() -> ErrorResponse {
    ErrorResponse::new(HubErrorCode::Forbidden, "The console is open to: viewer, operator.")
}

/// Authenticates a request of a browser. At a hub without an identity, which serves this machine only, everyone is an operator,
/// as at its other listener.
pub(super) async fn authenticate<S: Store>(
    api: &ConsoleApi<S>,
    peer: &ConnectedClient,
    headers: &HeaderMap,
) -> Result<Admitted, ErrorResponse> {
    let ConsoleApi { hub, console, has_identity } = api;
    let admitted = |caller: &Caller| {
        let visitor = visitor(caller).ok_or_else(not_permitted)?;
        Ok(Admitted { visitor, session: None })
    };
    if let ClientIdentity::Verified(identity) = &peer.identity {
        let admitted = admitted(&Caller::Certified(identity.clone()))?;
        if !api.is_admitted(&admitted) {
            let message = "The certificate of this connection has expired; connect with a new one.";
            return Err(ErrorResponse::new(ErrorCode::InvalidToken, message));
        }
        return Ok(admitted);
    }
    if let Some(session) = cookie(console, headers) {
        let found = console.sessions.lock().find(session, Instant::now());
        let found = found.map(|visitor| Admitted { visitor, session: Some(session.to_owned()) });
        if let Some(admitted) = found.filter(|admitted| api.is_admitted(admitted)) {
            return Ok(admitted);
        }
    }
    if !has_identity {
        return admitted(&Caller::Local);
    }
    if let (Some(tokens), true) = (&hub.tokens, headers.contains_key(header::AUTHORIZATION)) {
        let authenticated = tokens.authenticate(headers).await;
        let operator = authenticated.map_err(|reason| {
            hub.denials.record_unauthenticated(peer.address.ip(), reason, "console");
            ErrorResponse::unauthorized(format!("{}.", reason.message()), true)
        })?;
        return admitted(&Caller::Token(operator));
    }
    let message = "Sign in: `meridian console` prints a link.";
    Err(ErrorResponse::new(ErrorCode::InvalidToken, message))
}

fn cookie_name(console: &Console) -> String {
    // The last digits of the URL are its port, if it has one.
    let port = console.origin.url().rsplit(':').next().unwrap_or_default();
    let port: String = port.chars().filter(char::is_ascii_digit).collect();
    format!("{COOKIE}{port}")
}

/// Returns the secret of the session in the cookie.
pub(super) fn cookie<'a>(console: &Console, headers: &'a HeaderMap) -> Option<&'a str> {
    let name = cookie_name(console);
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    cookies.flat_map(|cookies| cookies.split(';')).find_map(|cookie| {
        let (known, value) = cookie.trim().split_once('=')?;
        (known == name).then_some(value)
    })
}

/// Returns the value of `set-cookie` for a session of this many seconds.
pub(super) fn set_cookie(console: &Console, session: &str, seconds: u64) -> String {
    let secure = if console.origin.is_secure() { "; Secure" } else { "" };
    let name = cookie_name(console);
    format!("{name}={session}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}")
}
