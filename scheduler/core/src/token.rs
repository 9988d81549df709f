//! Bearer tokens for the hub: of operators, who change its state, and of gateways and spokes, whose acknowledgements a
//! residency change waits for ([`crate::rollout`]).
//!
//! A token is sent as `authorization: Bearer TOKEN`. It is read from a file or a variable, it is too long to guess, and
//! it is never logged: its `Debug` output is a constant.

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;

/// Minimum length in bytes: a shorter token could be guessed.
pub const TOKEN_BYTES_MIN: usize = 16;
/// Maximum length in bytes: anything longer is not a token but a wrong file.
pub const TOKEN_BYTES_MAX: usize = 4096;
/// Maximum number of tokens that are valid at a time: the current ones, and the next during a rotation.
pub const TOKENS_MAX: usize = 4;

/// Secret token.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Arc<str>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// Parses the token from the content of a file or variable, without surrounding white space.
    ///
    /// # Errors
    ///
    /// A message about the problem that does not contain the token.
    pub fn read(text: &str) -> Result<Token, String> {
        let token = text.trim();
        let (len, hint) = (token.len(), "write one of letters and digits, as `openssl rand -hex 32` makes");
        if !(TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&len) {
            return Err(format!("has {len} bytes, not {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX}; {hint}"));
        }
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!("has characters that are not allowed in a header; {hint}"));
        }
        Ok(Token(token.into()))
    }

    /// Parses all tokens of a text, one per line.
    ///
    /// # Errors
    ///
    /// The error of the first invalid line; or that there are no tokens, or too many.
    pub fn read_all(text: &str) -> Result<Vec<Token>, String> {
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        match lines.len() {
            0 => Err("holds no token; write one, as `openssl rand -hex 32` makes".to_owned()),
            1..=TOKENS_MAX => lines.into_iter().map(Token::read).collect(),
            many => {
                Err(format!("holds {many} tokens; at most {TOKENS_MAX} are valid at a time; remove old ones"))
            }
        }
    }

    /// Returns the secret, for the header of a request only.
    pub fn secret(&self) -> &str {
        &self.0
    }

    /// Returns whether the value of an `authorization` header contains this token. The comparison takes constant time.
    pub fn is_presented_by(&self, header: &[u8]) -> bool {
        let Some(presented) = header.strip_prefix(b"Bearer ").map(<[u8]>::trim_ascii) else { return false };
        let token = self.0.as_bytes();
        let differing =
            token.iter().zip(presented).fold(0, |differing, (a, b)| black_box(differing | (a ^ b)));
        token.len() == presented.len() && differing == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_long_and_printable_and_does_not_match_a_part_of_it() {
        let token = Token::read("  0123456789abcdef\n").unwrap();
        assert!(token.is_presented_by(b"Bearer 0123456789abcdef"));
        for other in ["", "0123456789abcde", "0123456789abcdeg", "0123456789abcdef0", "x"] {
            assert!(!token.is_presented_by(format!("Bearer {other}").as_bytes()), "{other}");
        }
        assert!(!token.is_presented_by(b"0123456789abcdef"));
        assert!(!token.is_presented_by(b"Basic 0123456789abcdef"));
        assert_eq!(format!("{token:?}"), "Token");
    }

    #[test]
    fn a_token_at_its_limits_is_accepted_and_one_past_them_is_not() {
        let read = |len: usize| Token::read(&"a".repeat(len));
        for len in [TOKEN_BYTES_MIN, TOKEN_BYTES_MAX] {
            assert!(read(len).is_ok(), "{len}");
        }
        for len in [0, TOKEN_BYTES_MIN - 1, TOKEN_BYTES_MAX + 1] {
            assert!(read(len).is_err_and(|problem| problem.contains("bytes")), "{len}");
        }
        let problem = Token::read("0123456789 abcdef").unwrap_err();
        assert!(problem.contains("characters") && !problem.contains("0123"), "{problem}");
    }

    #[test]
    fn the_maximum_number_of_tokens_is_accepted_and_one_more_is_not() {
        let read = |count: usize| Token::read_all(&"0123456789abcdef\n\n".repeat(count));
        assert_eq!(read(TOKENS_MAX).unwrap().len(), TOKENS_MAX);
        assert!(read(0).is_err_and(|problem| problem.contains("no token")));
        assert!(read(TOKENS_MAX + 1).is_err_and(|problem| problem.contains("at most")));
        assert!(Token::read_all("0123456789abcdef\nshort").is_err());
    }
}
