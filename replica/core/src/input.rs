//! What is to be computed, and whether the model can read it.

use crate::refusal::Refusal;

/// What to embed: at least one input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Texts.
    Texts(Vec<String>),
    /// Token ids of the model's own vocabulary, special tokens included: they are computed as they stand. None is empty.
    Tokens(Vec<Vec<u32>>),
}

impl Input {
    /// How many inputs there are.
    pub fn count(&self) -> usize {
        match self {
            Input::Texts(texts) => texts.len(),
            Input::Tokens(tokens) => tokens.len(),
        }
    }
}

/// What a label head reads: a text, or two that belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sequence {
    /// One text.
    One(String),
    /// Two, as in question and answer.
    Pair(String, String),
}

/// What becomes of an input that has more tokens than the model reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overlong {
    /// It is refused: a vector of half a text, handed out as that of the whole, is an error that nobody sees.
    Refuse,
    /// It is cut, because the caller said so or the API always does it.
    Cut(Cut),
}

/// What a request says about inputs that are too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truncation {
    /// Whether they are cut; where the request does not say, the replica's `auto_truncate` decides.
    pub truncate: Option<bool>,
    /// The end that is lost.
    pub loses: End,
    /// Every input is cut to so many tokens, special tokens included.
    pub most: Option<u64>,
}

impl Truncation {
    /// As Voyage and Cohere do without being told: an input that is too long loses its end.
    pub const END: Truncation = Truncation { truncate: Some(true), loses: End::Right, most: None };

    /// What becomes of inputs that are too long, where `auto_truncate` is the replica's setting.
    pub fn overlong(self, auto_truncate: bool) -> Overlong {
        match self.truncate.unwrap_or(auto_truncate) {
            true => Overlong::Cut(Cut { loses: self.loses, pair: PairCut::LongestFirst }),
            false => Overlong::Refuse,
        }
    }
}

/// How an input is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The end that is lost.
    pub loses: End,
    /// What of a pair is cut.
    pub pair: PairCut,
}

/// An end of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// Its beginning.
    Left,
    /// Its end.
    #[default]
    Right,
}

/// What of a pair is cut, in the words of `transformers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairCut {
    /// `longest_first`: the longer one until they are equal, then both.
    LongestFirst,
    /// `only_second`: the second; and the first to half the room where it would take more, as Cohere does, for a
    /// document of which nothing is left cannot be ranked.
    OnlySecond,
}

impl PairCut {
    /// Of a pair of so many tokens, how many of each are kept where there is room for so many together.
    pub fn shares(self, [first, second]: [usize; 2], room: usize) -> [usize; 2] {
        let half = room / 2;
        if first.saturating_add(second) <= room {
            return [first, second];
        }
        match self {
            PairCut::OnlySecond => {
                // Where the reference would leave nothing of the second text, or fail, each has half.
                let of_first = first.min(half.max(room.saturating_sub(second)));
                [of_first, room - of_first]
            }
            // An odd token is the longer one's.
            PairCut::LongestFirst if first <= second => {
                let of_first = first.min(half);
                [of_first, room - of_first]
            }
            PairCut::LongestFirst => {
                let of_second = second.min(half);
                [room - of_second, of_second]
            }
        }
    }
}

/// What a model can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readable {
    /// Tokens of the longest input, special tokens included.
    pub max_input_tokens: usize,
    /// Token ids are smaller than this.
    pub vocabulary: usize,
}

/// Why an input cannot be read. Where it stood in the request, and in which field, only the request knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// It has no tokens.
    Empty,
    /// It is one text, and the model judges pairs.
    Alone,
    /// It has more tokens than the model reads.
    TooLong {
        /// What the model reads.
        limit: usize,
        /// What it has.
        given: usize,
    },
    /// A token id is not in the vocabulary.
    UnknownToken {
        /// The id.
        id: u32,
        /// Ids are smaller than this.
        vocabulary: usize,
    },
}

impl Unreadable {
    /// Says no to the input at `place`, which is `field` or an element of it.
    pub fn refusal(self, field: &'static str, place: &str) -> Refusal {
        match self {
            Unreadable::Empty => Refusal::empty_input(field, place),
            Unreadable::Alone => Refusal::invalid(
                field,
                place,
                "is one text, and this model judges how a document fits a query",
                "a pair of both",
            ),
            Unreadable::TooLong { limit, given } => Refusal::input_too_long(field, place, limit, given),
            Unreadable::UnknownToken { id, vocabulary } => Refusal::invalid(
                field,
                place,
                &format!("has the token id {id}, which this model does not know"),
                &format!("ids from 0 to {}", vocabulary.saturating_sub(1)),
            ),
        }
    }
}

impl Readable {
    /// Whether the model reads an input of so many tokens. A text of nothing but spaces has none with a tokenizer
    /// that adds no tokens of its own.
    pub fn check_length(self, tokens: usize) -> Result<(), Unreadable> {
        let limit = self.max_input_tokens;
        match tokens {
            0 => Err(Unreadable::Empty),
            given if given > limit => Err(Unreadable::TooLong { limit, given }),
            _ => Ok(()),
        }
    }

    /// The tokens as the model reads them, which are fewer than given if they are cut.
    pub fn tokens(self, mut tokens: Vec<u32>, overlong: Overlong) -> Result<Vec<u32>, Unreadable> {
        if let Some(unknown) = tokens.iter().find(|id| **id as usize >= self.vocabulary) {
            return Err(Unreadable::UnknownToken { id: *unknown, vocabulary: self.vocabulary });
        }
        if let Overlong::Cut(cut) = overlong {
            let excess = tokens.len().saturating_sub(self.max_input_tokens);
            match cut.loses {
                End::Left => drop(tokens.drain(..excess)),
                End::Right => tokens.truncate(self.max_input_tokens),
            }
        }
        self.check_length(tokens.len()).map(|()| tokens)
    }
}

/// How the inputs of a field are called in sentences about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// The field.
    pub field: &'static str,
    /// Whether it holds one input and not a list of them.
    pub single: bool,
}

impl Named {
    /// What the input at `index` is called.
    pub fn place(self, index: usize) -> String {
        if self.single { self.field.to_owned() } else { format!("{}[{index}]", self.field) }
    }

    /// Says no to the input at `index`.
    pub fn refuse(self, index: usize, unreadable: Unreadable) -> Refusal {
        unreadable.refusal(self.field, &self.place(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::error::ErrorCode;

    const MODEL: Readable = Readable { max_input_tokens: 4, vocabulary: 100 };
    const CUT_LEFT: Overlong = Overlong::Cut(Cut { loses: End::Left, pair: PairCut::LongestFirst });
    const CUT_RIGHT: Overlong = Overlong::Cut(Cut { loses: End::Right, pair: PairCut::LongestFirst });

    #[test]
    fn the_limit_of_tokens_holds_at_it_and_one_past_it() {
        assert_eq!(MODEL.tokens(vec![1; 4], Overlong::Refuse), Ok(vec![1; 4]));
        let unreadable = MODEL.tokens(vec![1; 5], Overlong::Refuse).expect_err("five tokens");
        assert_eq!(unreadable, Unreadable::TooLong { limit: 4, given: 5 });
        let refusal = Named { field: "input", single: false }.refuse(1, unreadable);
        assert_eq!((refusal.code, refusal.param), (ErrorCode::InputTooLong, Some("input")));
        assert!(
            refusal.message.starts_with("`input[1]` has 5 tokens and this model reads 4"),
            "{}",
            refusal.message
        );
        let refusal = Named { field: "query", single: true }.refuse(0, unreadable);
        assert!(refusal.message.starts_with("`query` has 5"), "{}", refusal.message);
    }

    #[test]
    fn tokens_are_cut_at_the_end_that_the_caller_names() {
        assert_eq!(MODEL.tokens(vec![1, 2, 3, 4, 5], CUT_RIGHT), Ok(vec![1, 2, 3, 4]));
        assert_eq!(MODEL.tokens(vec![1, 2, 3, 4, 5], CUT_LEFT), Ok(vec![2, 3, 4, 5]));
        assert_eq!(MODEL.tokens(vec![1, 2, 3, 4], CUT_LEFT), Ok(vec![1, 2, 3, 4]));
        assert_eq!(MODEL.tokens(vec![], CUT_LEFT), Err(Unreadable::Empty));
    }

    #[test]
    fn what_is_kept_of_a_pair_fills_the_room_and_no_more() {
        let check = |cut: PairCut, given: [usize; 2], room, kept: [usize; 2]| {
            assert_eq!(cut.shares(given, room), kept, "{cut:?} {given:?} {room}");
        };
        let (longest, second) = (PairCut::LongestFirst, PairCut::OnlySecond);
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
    fn the_limit_of_token_ids_holds_at_it_and_one_past_it() {
        assert_eq!(MODEL.tokens(vec![0, 99], Overlong::Refuse), Ok(vec![0, 99]));
        let unreadable = MODEL.tokens(vec![0, 100], Overlong::Refuse).expect_err("an unknown token");
        let refusal = unreadable.refusal("input", "input");
        assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidValue, Some("input")));
        assert!(
            refusal.message.contains("100") && refusal.message.contains("0 to 99"),
            "{}",
            refusal.message
        );
    }
}
