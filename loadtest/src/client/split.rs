//! Partition of a list of texts into requests.
//!
//! A request is limited by the number of texts, of characters and of tokens, whichever is reached first. A text above a
//! limit is sent alone, because only the server knows whether it is too long. Texts stay in order and are never cut.
//!
//! Tokens are estimated, because the client does not have the model's tokenizer: one token per four bytes of ASCII,
//! and one per other character. This is above the counts of embedding models' tokenizers for common languages.

use std::ops::Range;

/// Size limits of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// Maximum number of texts.
    pub texts: usize,
    /// Maximum characters of all texts.
    pub chars: usize,
    /// Maximum estimated tokens of all texts.
    pub tokens: Option<usize>,
}

/// Size of a text.
#[derive(Clone, Copy, Debug, Default)]
struct TextSize {
    chars: usize,
    tokens: usize,
}

impl TextSize {
    fn of(text: &str) -> TextSize {
        let bytes = text.len();
        let ascii = text.bytes().filter(u8::is_ascii).count();
        if ascii == bytes {
            return TextSize { chars: bytes, tokens: bytes.div_ceil(4) };
        }
        let chars = text.chars().count();
        TextSize { chars, tokens: ascii.div_ceil(4) + (chars - ascii) }
    }
}

/// Returns the requests for `texts` as consecutive ranges that cover all of them.
pub fn split<S: AsRef<str>>(texts: &[S], limits: RequestLimits) -> Vec<Range<usize>> {
    let mut requests = Vec::with_capacity(texts.len() / limits.texts.max(1) + 1);
    let mut begin = 0;
    let mut sum = TextSize::default();
    for (index, text) in texts.iter().enumerate() {
        let size = TextSize::of(text.as_ref());
        let full = index - begin >= limits.texts
            || sum.chars + size.chars > limits.chars
            || limits.tokens.is_some_and(|most| sum.tokens + size.tokens > most);
        if full && index > begin {
            requests.push(begin..index);
            (begin, sum) = (index, TextSize::default());
        }
        sum.chars += size.chars;
        sum.tokens += size.tokens;
    }
    if begin < texts.len() {
        requests.push(begin..texts.len());
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(
        texts: &[&str],
        texts_max: usize,
        chars: usize,
        tokens: Option<usize>,
        expected: &[Range<usize>],
    ) {
        let limits = RequestLimits { texts: texts_max, chars, tokens };
        assert_eq!(split(texts, limits), expected, "{texts:?} by {limits:?}");
    }

    #[test]
    fn a_request_is_limited_by_count_characters_and_tokens() {
        let four = ["aaaa", "bbbb", "cccc", "dddd"];
        check(&four, 2, 1000, None, &[0..2, 2..4]);
        check(&four, 3, 1000, None, &[0..3, 3..4]);
        check(&four, 9, 8, None, &[0..2, 2..4]);
        check(&four, 9, 7, None, &[0..1, 1..2, 2..3, 3..4]);
        check(&four, 9, 1000, Some(3), &[0..3, 3..4]);
        check(&["аб", "вг"], 9, 3, None, &[0..1, 1..2]);
        check(&["аб", "вг", "д"], 9, 4, Some(4), &[0..2, 2..3]);
        check(&["long by itself", "a", "b"], 9, 2, None, &[0..1, 1..3]);
        check(&["", "", "a"], 9, 0, Some(0), &[0..2, 2..3]);
        check(&[], 9, 9, None, &[]);
    }

    proptest! {
        #[test]
        fn every_text_is_in_one_request_and_in_its_place(
            texts in prop::collection::vec(".{0,12}", 0..60), count in 1usize..9, chars in 1usize..40,
            tokens in prop::option::of(1usize..20),
        ) {
            let requests = split(&texts, RequestLimits { texts: count, chars, tokens });
            let mut next = 0;
            for request in &requests {
                prop_assert_eq!(request.start, next);
                prop_assert!(!request.is_empty() && request.len() <= count);
                let sum: usize = texts[request.clone()].iter().map(|text| text.chars().count()).sum();
                prop_assert!(sum <= chars || request.len() == 1);
                next = request.end;
            }
            prop_assert_eq!(next, texts.len());
        }
    }
}
