//! What is to be embedded, and whether the model can read it.

use crate::refusal::Refusal;

/// What to embed: at least one input, and none of them empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// Texts.
    Texts(Vec<String>),
    /// Token ids of the model's own vocabulary, special tokens included: they are computed as they stand.
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

/// What a model can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readable {
    /// Tokens of the longest input, special tokens included.
    pub max_input_tokens: usize,
    /// Token ids are smaller than this.
    pub vocabulary: usize,
}

impl Readable {
    /// Refuses the input at `index` of `count` if its `tokens` are more than the model reads, or none: a text of
    /// nothing but spaces is nothing to a tokenizer that adds no tokens of its own.
    ///
    /// Refused, not cut: a vector of half a text, handed out as that of the whole, is an error that nobody sees.
    pub fn check_length(self, index: usize, count: usize, tokens: usize) -> Result<(), Refusal> {
        if tokens == 0 {
            return Err(Refusal::empty_input(&place(index, count)));
        }
        if tokens > self.max_input_tokens {
            return Err(Refusal::input_too_long(&place(index, count), self.max_input_tokens, tokens));
        }
        Ok(())
    }

    /// Refuses token ids that the model cannot read.
    pub fn check_tokens(self, inputs: &[Vec<u32>]) -> Result<(), Refusal> {
        for (index, tokens) in inputs.iter().enumerate() {
            self.check_length(index, inputs.len(), tokens.len())?;
            if let Some(unknown) = tokens.iter().find(|id| **id as usize >= self.vocabulary) {
                return Err(Refusal::invalid(
                    "input",
                    &place(index, inputs.len()),
                    &format!("has the token id {unknown}, which this model does not know"),
                    &format!("ids from 0 to {}", self.vocabulary.saturating_sub(1)),
                ));
            }
        }
        Ok(())
    }
}

/// How the input at `index` of `count` is called in a sentence about it.
fn place(index: usize, count: usize) -> String {
    if count == 1 { "input".to_owned() } else { format!("input[{index}]") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::error::ErrorCode;

    const MODEL: Readable = Readable { max_input_tokens: 4, vocabulary: 100 };

    #[test]
    fn the_limit_of_tokens_holds_at_it_and_one_past_it() {
        assert_eq!(MODEL.check_tokens(&[vec![1; 4], vec![1; 4]]), Ok(()));
        let refusal = MODEL.check_tokens(&[vec![1; 4], vec![1; 5]]).expect_err("five tokens");
        assert_eq!((refusal.code, refusal.param), (ErrorCode::InputTooLong, Some("input")));
        assert!(
            refusal.message.starts_with("`input[1]` has 5 tokens and this model reads 4"),
            "{}",
            refusal.message
        );
        assert!(MODEL.check_length(0, 1, 5).expect_err("five").message.starts_with("`input` has 5"));
    }

    #[test]
    fn the_limit_of_token_ids_holds_at_it_and_one_past_it() {
        assert_eq!(MODEL.check_tokens(&[vec![0, 99]]), Ok(()));
        let refusal = MODEL.check_tokens(&[vec![0, 100]]).expect_err("an unknown token");
        assert_eq!((refusal.code, refusal.param), (ErrorCode::InvalidValue, Some("input")));
        assert!(
            refusal.message.contains("100") && refusal.message.contains("0 to 99"),
            "{}",
            refusal.message
        );
    }
}
