//! Who is known to the hub: an operator, and whoever runs its tables.
//!
//! An operator's word changes the law for everybody, so it is proven: by one token for the hub, from a file or from the
//! environment. Who has it is for the house's own store of secrets to say. A hub without one takes no changes at all.
//!
//! A gateway or spoke that says which table it runs is proven as well, by a token of the fleet: for what it says a change of the
//! law waits, or does not wait ([`scheduler_core::rollout`]). Whoever shows none is told the table, and counts for nothing. So a
//! stranger can neither hold up a change, under a name that acknowledges nothing, nor hasten one, under the name of another. A
//! hub without such a token counts everybody who asks, and is for networks where nobody else can.

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use scheduler_core::token::Token;
use scheduler_store::Store;

use super::http::Desk;
use crate::respond::{Code, Refusal};

/// A request that shows the operator's token. It is asked for before the body is read.
pub(super) struct Operator;

impl<S: Store> FromRequestParts<Desk<S>> for Operator {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, desk: &Desk<S>) -> Result<Operator, Refusal> {
        let refusal = |message| Err(Refusal::new(Code::OperatorOnly, message));
        let Some(token) = &desk.operator else {
            return refusal("This hub takes no changes: it has no operator_token_file in its configuration.");
        };
        let shown = parts.headers.get(AUTHORIZATION).map(|value| value.as_bytes());
        let Some(shown) = shown.filter(|shown| shown.starts_with(b"Bearer ")) else {
            return refusal(
                "Only an operator may do this: send `authorization: Bearer` and the operator's token.",
            );
        };
        if token.is_shown_by(shown) {
            Ok(Operator)
        } else {
            refusal("This is not the operator's token of this hub.")
        }
    }
}

/// Whether whoever sends these headers is of the fleet, which has these tokens; without any, everybody is.
pub(super) fn is_of_the_fleet(tokens: &[Token], headers: &HeaderMap) -> bool {
    let shown = headers.get(AUTHORIZATION).map_or(&b""[..], |value| value.as_bytes());
    tokens.is_empty() || tokens.iter().any(|token| token.is_shown_by(shown))
}
