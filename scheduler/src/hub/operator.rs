//! Who may change what the hub keeps: whoever shows the operator's token.
//!
//! Spokes and gateways say who they are by where they stand in the network; an operator's word changes the law for
//! everybody, so it is proven. One token for the hub, from a file or from the environment: who has it is for the house's own
//! store of secrets to say. A hub without one takes no changes at all.

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use scheduler_store::Store;

use super::http::Desk;
use crate::respond::{Code, Refusal};

/// The fewest bytes of a token: what is shorter can be guessed.
pub const TOKEN_BYTES_MIN: usize = 16;
/// And the most: beyond is no token, but a file that was meant for something else.
pub const TOKEN_BYTES_MAX: usize = 4096;

/// The token of a hub's operators. It is never written anywhere.
#[derive(Clone, PartialEq, Eq)]
pub struct OperatorToken(Arc<[u8]>);

impl fmt::Debug for OperatorToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OperatorToken")
    }
}

impl OperatorToken {
    /// The token in a file or a variable, without the white space around it.
    ///
    /// # Errors
    ///
    /// What is wrong with it, in words that do not show it.
    pub fn read(text: &str) -> Result<OperatorToken, String> {
        let token = text.trim().as_bytes();
        let (len, words) = (token.len(), "write one of letters and digits, as `openssl rand -hex 32` makes");
        if !(TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&len) {
            return Err(format!("has {len} bytes, not {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX}; {words}"));
        }
        if !token.iter().all(u8::is_ascii_graphic) {
            return Err(format!("has characters that no header can carry; {words}"));
        }
        Ok(OperatorToken(token.into()))
    }

    /// Whether `shown` is this token, in a time that says nothing of how much of it is.
    fn is(&self, shown: &[u8]) -> bool {
        let differing = self.0.iter().zip(shown).fold(0, |differing, (a, b)| black_box(differing | (a ^ b)));
        self.0.len() == shown.len() && differing == 0
    }
}

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
        let Some(shown) = shown.and_then(|shown| shown.strip_prefix(b"Bearer ")) else {
            return refusal(
                "Only an operator may do this: send `authorization: Bearer` and the operator's token.",
            );
        };
        if token.is(shown.trim_ascii()) {
            Ok(Operator)
        } else {
            refusal("This is not the operator's token of this hub.")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_long_enough_printable_and_known_to_nobody_who_has_a_part_of_it() {
        let token = OperatorToken::read("  0123456789abcdef\n").unwrap();
        assert!(token.is(b"0123456789abcdef"));
        for other in ["", "0123456789abcde", "0123456789abcdeg", "0123456789abcdef0", "x"] {
            assert!(!token.is(other.as_bytes()), "{other}");
        }
        assert_eq!(format!("{token:?}"), "OperatorToken");
    }

    #[test]
    fn a_token_at_its_limits_is_read_and_one_past_them_is_not() {
        let read = |len: usize| OperatorToken::read(&"a".repeat(len));
        for len in [TOKEN_BYTES_MIN, TOKEN_BYTES_MAX] {
            assert!(read(len).is_ok(), "{len}");
        }
        for len in [0, TOKEN_BYTES_MIN - 1, TOKEN_BYTES_MAX + 1] {
            assert!(read(len).is_err_and(|problem| problem.contains("bytes")), "{len}");
        }
        let problem = OperatorToken::read("0123456789 abcdef").unwrap_err();
        assert!(problem.contains("characters") && !problem.contains("0123"), "{problem}");
    }
}
