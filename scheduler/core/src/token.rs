//! What somebody shows to the hub to be known by it: an operator, who changes what it keeps, or a gateway or spoke, for which
//! a change of a residency policy waits ([`crate::rollout`]).
//!
//! A token is shown as `authorization: Bearer TOKEN`. It is read from a file or a variable, it cannot be guessed, and it is
//! never written anywhere: what prints one prints a word for it.

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;

/// The fewest bytes of a token: what is shorter can be guessed.
pub const TOKEN_BYTES_MIN: usize = 16;
/// And the most: beyond is no token, but a file that was meant for something else.
pub const TOKEN_BYTES_MAX: usize = 4096;
/// Tokens that are good at once: the one in use, and the next, for as long as not everybody has it.
pub const TOKENS_MAX: usize = 4;

/// Bytes that only those have to whom they were given.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Arc<str>);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// The token in a file or a variable, without the white space around it.
    ///
    /// # Errors
    ///
    /// What is wrong with it, in words that do not show it.
    pub fn read(text: &str) -> Result<Token, String> {
        let token = text.trim();
        let (len, words) = (token.len(), "write one of letters and digits, as `openssl rand -hex 32` makes");
        if !(TOKEN_BYTES_MIN..=TOKEN_BYTES_MAX).contains(&len) {
            return Err(format!("has {len} bytes, not {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX}; {words}"));
        }
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!("has characters that no header can carry; {words}"));
        }
        Ok(Token(token.into()))
    }

    /// All tokens of a text, one a line.
    ///
    /// # Errors
    ///
    /// As above, of the first line that is wrong; or that there is none, or too many.
    pub fn read_all(text: &str) -> Result<Vec<Token>, String> {
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        match lines.len() {
            0 => Err("holds no token; write one, as `openssl rand -hex 32` makes".to_owned()),
            1..=TOKENS_MAX => lines.into_iter().map(Token::read).collect(),
            many => {
                Err(format!("holds {many} tokens; at most {TOKENS_MAX} are good at once: take old ones out"))
            }
        }
    }

    /// For the header that shows it, and for nothing else.
    pub fn to_show(&self) -> &str {
        &self.0
    }

    /// Whether the value of an `authorization` header shows this token, in a time that says nothing of how much of it is
    /// right.
    pub fn is_shown_by(&self, header: &[u8]) -> bool {
        let Some(shown) = header.strip_prefix(b"Bearer ").map(<[u8]>::trim_ascii) else { return false };
        let token = self.0.as_bytes();
        let differing = token.iter().zip(shown).fold(0, |differing, (a, b)| black_box(differing | (a ^ b)));
        token.len() == shown.len() && differing == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_long_enough_printable_and_known_to_nobody_who_has_a_part_of_it() {
        let token = Token::read("  0123456789abcdef\n").unwrap();
        assert!(token.is_shown_by(b"Bearer 0123456789abcdef"));
        for other in ["", "0123456789abcde", "0123456789abcdeg", "0123456789abcdef0", "x"] {
            assert!(!token.is_shown_by(format!("Bearer {other}").as_bytes()), "{other}");
        }
        assert!(!token.is_shown_by(b"0123456789abcdef"));
        assert!(!token.is_shown_by(b"Basic 0123456789abcdef"));
        assert_eq!(format!("{token:?}"), "Token");
    }

    #[test]
    fn a_token_at_its_limits_is_read_and_one_past_them_is_not() {
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
    fn as_many_tokens_as_may_be_good_at_once_are_read_and_one_more_is_not() {
        let read = |count: usize| Token::read_all(&"0123456789abcdef\n\n".repeat(count));
        assert_eq!(read(TOKENS_MAX).unwrap().len(), TOKENS_MAX);
        assert!(read(0).is_err_and(|problem| problem.contains("no token")));
        assert!(read(TOKENS_MAX + 1).is_err_and(|problem| problem.contains("at most")));
        assert!(Token::read_all("0123456789abcdef\nshort").is_err());
    }
}
