//! Inputs of a model: types, validation and truncation.

use crate::refusal::Refusal;

/// Inputs to embed: at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Texts.
    Texts(Vec<String>),
    /// Token ids of the model's own vocabulary, special tokens included, which are computed unchanged. No list is
    /// empty.
    Tokens(Vec<Vec<u32>>),
}

impl Input {
    /// Returns the number of inputs.
    pub fn count(&self) -> usize {
        match self {
            Input::Texts(texts) => texts.len(),
            Input::Tokens(tokens) => tokens.len(),
        }
    }
}

/// Input of a label head: a text, or a pair of texts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextOrPair {
    /// One text.
    One(String),
    /// Two texts, such as question and answer.
    Pair(String, String),
}

/// Handling of an input that has more tokens than the model reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverlongPolicy {
    /// It is rejected: a vector of half a text that is returned as that of the whole is an unnoticed error.
    Reject,
    /// It is truncated, because the caller requested it or the API always does it.
    Truncate(TruncationMethod),
}

/// Truncation options of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truncation {
    /// Whether inputs are truncated; absent: the replica's `auto_truncate` decides.
    pub truncate: Option<bool>,
    /// Side from which tokens are removed.
    pub side: TruncationSide,
    /// Maximum number of tokens of every input, special tokens included.
    pub max_tokens: Option<u64>,
}

impl Truncation {
    /// Default of Voyage and Cohere: an input that is too long loses its end.
    pub const END: Truncation =
        Truncation { truncate: Some(true), side: TruncationSide::Right, max_tokens: None };

    /// Returns the handling of inputs that are too long, where `auto_truncate` is the replica's setting.
    pub fn overlong(self, auto_truncate: bool) -> OverlongPolicy {
        match self.truncate.unwrap_or(auto_truncate) {
            true => OverlongPolicy::Truncate(TruncationMethod {
                side: self.side,
                pair: PairTruncation::LongestFirst,
            }),
            false => OverlongPolicy::Reject,
        }
    }
}

/// Truncation of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TruncationMethod {
    /// Side from which tokens are removed.
    pub side: TruncationSide,
    /// Handling of a pair.
    pub pair: PairTruncation,
}

/// Side of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TruncationSide {
    /// Its beginning.
    Left,
    /// Its end.
    #[default]
    Right,
}

/// Truncation strategy of a pair, as in `transformers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairTruncation {
    /// `longest_first`: the longer text until both are equal, then both.
    LongestFirst,
    /// `only_second`: the second text, and the first as well where it would take more than half of the limit. Cohere
    /// does the same, because a document without any tokens cannot be ranked.
    OnlySecond,
}

impl PairTruncation {
    /// Returns how many tokens of each text of a pair are kept within `limit` tokens for both.
    pub fn shares(self, [first, second]: [usize; 2], limit: usize) -> [usize; 2] {
        let half = limit / 2;
        if first.saturating_add(second) <= limit {
            return [first, second];
        }
        match self {
            PairTruncation::OnlySecond => {
                // Where the reference would leave nothing of the second text, or fail, each gets half.
                let of_first = first.min(half.max(limit.saturating_sub(second)));
                [of_first, limit - of_first]
            }
            // The longer text gets an odd token.
            PairTruncation::LongestFirst if first <= second => {
                let of_first = first.min(half);
                [of_first, limit - of_first]
            }
            PairTruncation::LongestFirst => {
                let of_second = second.min(half);
                [limit - of_second, of_second]
            }
        }
    }
}

/// Limits of the inputs of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readable {
    /// Tokens of the longest input, special tokens included.
    pub max_input_tokens: usize,
    /// Size of the vocabulary; token ids are smaller.
    pub vocabulary: usize,
}

/// Reason why a model cannot read an input. The request adds the field and the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidInput {
    /// The input has no tokens.
    Empty,
    /// The input is one text, and the model is a cross-encoder.
    PairRequired,
    /// The input has more tokens than the model reads.
    TooLong {
        /// Limit of the model.
        limit: usize,
        /// Tokens of the input.
        given: usize,
    },
    /// A token id is not in the vocabulary.
    UnknownToken {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
}

impl InvalidInput {
    /// Returns the error for the input at `path`, which is `field` or an element of it.
    pub fn refusal(self, field: &'static str, path: &str) -> Refusal {
        match self {
            InvalidInput::Empty => Refusal::empty_input(field, path),
            InvalidInput::PairRequired => Refusal::invalid(
                field,
                path,
                "is one text, and this model is a cross-encoder that scores a query with a document",
                "a pair of both",
            ),
            InvalidInput::TooLong { limit, given } => Refusal::input_too_long(field, path, limit, given),
            InvalidInput::UnknownToken { id, vocabulary } => Refusal::invalid(
                field,
                path,
                &format!("has the token id {id}, which is not in the vocabulary of this model"),
                &format!("ids from 0 to {}", vocabulary.saturating_sub(1)),
            ),
        }
    }
}

impl Readable {
    /// Checks that the model reads an input with this number of tokens. A text of spaces only has none with a tokenizer
    /// that adds no special tokens.
    pub fn check_length(self, tokens: usize) -> Result<(), InvalidInput> {
        let limit = self.max_input_tokens;
        match tokens {
            0 => Err(InvalidInput::Empty),
            given if given > limit => Err(InvalidInput::TooLong { limit, given }),
            _ => Ok(()),
        }
    }

    /// Returns the tokens that the model reads, truncated if `overlong` says so.
    pub fn tokens(self, mut tokens: Vec<u32>, overlong: OverlongPolicy) -> Result<Vec<u32>, InvalidInput> {
        if let Some(unknown) = tokens.iter().find(|id| **id as usize >= self.vocabulary) {
            return Err(InvalidInput::UnknownToken { id: *unknown, vocabulary: self.vocabulary });
        }
        if let OverlongPolicy::Truncate(method) = overlong {
            let excess = tokens.len().saturating_sub(self.max_input_tokens);
            match method.side {
                TruncationSide::Left => drop(tokens.drain(..excess)),
                TruncationSide::Right => tokens.truncate(self.max_input_tokens),
            }
        }
        self.check_length(tokens.len()).map(|()| tokens)
    }
}

/// Name of the field of inputs, for error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputField {
    /// The field.
    pub field: &'static str,
    /// Whether the field holds one input and not a list of them.
    pub single: bool,
}

impl InputField {
    /// Returns the path of the input at `index`, such as `input[3]`.
    pub fn path(self, index: usize) -> String {
        if self.single { self.field.to_owned() } else { format!("{}[{index}]", self.field) }
    }

    /// Returns the error for the input at `index`.
    pub fn refusal(self, index: usize, invalid: InvalidInput) -> Refusal {
        invalid.refusal(self.field, &self.path(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorCode;

    const MODEL: Readable = Readable { max_input_tokens: 4, vocabulary: 100 };
    const TRUNCATE_LEFT: OverlongPolicy = OverlongPolicy::Truncate(TruncationMethod {
        side: TruncationSide::Left,
        pair: PairTruncation::LongestFirst,
    });
    const TRUNCATE_RIGHT: OverlongPolicy = OverlongPolicy::Truncate(TruncationMethod {
        side: TruncationSide::Right,
        pair: PairTruncation::LongestFirst,
    });

    #[test]
    fn the_token_limit_holds_at_the_limit_and_one_past_it() {
        assert_eq!(MODEL.tokens(vec![1; 4], OverlongPolicy::Reject), Ok(vec![1; 4]));
        let invalid = MODEL.tokens(vec![1; 5], OverlongPolicy::Reject).expect_err("five tokens");
        assert_eq!(invalid, InvalidInput::TooLong { limit: 4, given: 5 });
        let refusal = InputField { field: "input", single: false }.refusal(1, invalid);
        assert_eq!((refusal.code, refusal.param), (ErrorCode::InputTooLong, Some("input")));
        assert!(
            refusal.message.starts_with("`input[1]` has 5 tokens and the limit of this model is 4"),
            "{}",
            refusal.message
        );
        let refusal = InputField { field: "query", single: true }.refusal(0, invalid);
        assert!(refusal.message.starts_with("`query` has 5"), "{}", refusal.message);
    }

    #[test]
    fn tokens_are_removed_from_the_side_that_the_caller_names() {
        assert_eq!(MODEL.tokens(vec![1, 2, 3, 4, 5], TRUNCATE_RIGHT), Ok(vec![1, 2, 3, 4]));
        assert_eq!(MODEL.tokens(vec![1, 2, 3, 4, 5], TRUNCATE_LEFT), Ok(vec![2, 3, 4, 5]));
        assert_eq!(MODEL.tokens(vec![1, 2, 3, 4], TRUNCATE_LEFT), Ok(vec![1, 2, 3, 4]));
        assert_eq!(MODEL.tokens(vec![], TRUNCATE_LEFT), Err(InvalidInput::Empty));
    }

    #[test]
    fn a_truncated_pair_uses_the_whole_limit() {
        let check = |cut: PairTruncation, given: [usize; 2], limit, kept: [usize; 2]| {
            assert_eq!(cut.shares(given, limit), kept, "{cut:?} {given:?} {limit}");
        };
        let (longest, second) = (PairTruncation::LongestFirst, PairTruncation::OnlySecond);
        for cut in [longest, second] {
            check(cut, [3, 4], 7, [3, 4]);
            check(cut, [3, 5], 7, [3, 4]);
            check(cut, [9, 9], 7, [3, 4]);
            check(cut, [1, 9], 0, [0, 0]);
            check(cut, [0, 9], 1, [0, 1]);
        }
        check(longest, [9, 8], 7, [4, 3]);
        check(longest, [9, 1], 7, [6, 1]);
        check(second, [9, 1], 7, [6, 1]);
        check(second, [5, 9], 7, [3, 4]);
        check(second, [9, 8], 7, [3, 4]);
        assert_eq!(second.shares([usize::MAX, usize::MAX], 5), [2, 3]);
    }

    #[test]
    fn the_limit_of_token_ids_holds_at_the_limit_and_one_past_it() {
        assert_eq!(MODEL.tokens(vec![0, 99], OverlongPolicy::Reject), Ok(vec![0, 99]));
        let invalid = MODEL.tokens(vec![0, 100], OverlongPolicy::Reject).expect_err("an unknown token");
        let refusal = invalid.refusal("input", "input");
        assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidValue, Some("input")));
        assert!(
            refusal.message.contains("100") && refusal.message.contains("0 to 99"),
            "{}",
            refusal.message
        );
    }
}
