//! Word pieces of plain text, without the bookkeeping of the reference.
//!
//! The `tokenizers` crate keeps, for each character, where it came from, through every step from text to tokens. It takes
//! 1.5 µs for a token (Zen 4, November 2026), where an engine in bytes takes 30 for the rest. Most texts that BERT's
//! tokenizer is given are ASCII, for which its steps are few: control characters go, letters become small, words end at
//! spaces, signs are words of their own, and a word is cut into the longest pieces that the vocabulary has, from its front
//! on.
//!
//! Everything else is left to the reference: other characters, other tokenizers, and texts with a character in them with
//! which a token begins that was added to the vocabulary, as `[MASK]` was. So both come to the same tokens, and a test
//! holds them to it.

use std::collections::HashMap;

use replica_core::input::TruncationSide;
use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

/// Pieces and their ids.
type Pieces = HashMap<Box<[u8]>, u32>;

/// What BERT's tokenizer does with plain text.
pub(super) struct WordPieces {
    /// Pieces that begin a word.
    heads: Pieces,
    /// Pieces that go on with one, without what marks them.
    tails: Pieces,
    /// Bytes of the longest piece.
    longest: usize,
    /// Bytes of the longest word that is looked at.
    most: usize,
    unknown: u32,
    lower_case: bool,
    /// Whether a token that was added to the vocabulary begins with this character.
    added: [bool; 128],
    /// Special tokens around a lone text.
    around: [Box<[u32]>; 2],
}

impl WordPieces {
    /// Of a tokenizer that works like this; of others nothing.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<WordPieces> {
        let Some(NormalizerWrapper::BertNormalizer(normalizer)) = tokenizer.get_normalizer() else {
            return None;
        };
        let Some(PreTokenizerWrapper::BertPreTokenizer(_)) = tokenizer.get_pre_tokenizer() else {
            return None;
        };
        let ModelWrapper::WordPiece(model) = tokenizer.get_model() else { return None };
        if !normalizer.clean_text {
            return None;
        }
        let vocabulary = tokenizer.get_vocab(false);
        let (mut heads, mut tails) = (Pieces::new(), Pieces::new());
        for (piece, id) in vocabulary.iter().filter(|(piece, _)| piece.is_ascii()) {
            heads.insert(piece.as_bytes().into(), *id);
            if let Some(tail) = piece.strip_prefix(&model.continuing_subword_prefix) {
                tails.insert(tail.as_bytes().into(), *id);
            }
        }
        let mut added = [false; 128];
        for token in tokenizer.get_added_tokens_decoder().values() {
            // A token that is looked for in normalised text is found by either letter.
            let first = *token.content.as_bytes().first()?;
            for first in [first.to_ascii_lowercase(), first.to_ascii_uppercase()] {
                if let Some(added) = added.get_mut(usize::from(first)) {
                    *added = true;
                }
            }
        }
        let longest = heads.keys().map(|piece| piece.len()).max()?;
        Some(WordPieces {
            unknown: *vocabulary.get(&model.unk_token)?,
            most: model.max_input_chars_per_word,
            lower_case: normalizer.lowercase,
            around: around(tokenizer, &heads)?,
            heads,
            tails,
            longest,
            added,
        })
    }

    /// The tokens of a text, special ones included, of which no more than so many are kept of the text; `None` if it is not
    /// for this to read.
    pub(super) fn encode(&self, text: &str, most: usize, side: TruncationSide) -> Option<Box<[u32]>> {
        let plain = |byte: &u8| self.added.get(usize::from(*byte)).is_some_and(|added| !added);
        if !text.as_bytes().iter().all(plain) {
            return None;
        }
        let [before, after] = &self.around;
        let mut ids = before.to_vec();
        let mut word = Vec::new();
        for byte in text.bytes() {
            match byte {
                b' ' | b'\t' | b'\n' | b'\r' => self.end(&mut word, &mut ids),
                // Within a word, the word goes on.
                _ if byte.is_ascii_control() => {}
                _ if byte.is_ascii_punctuation() => {
                    self.end(&mut word, &mut ids);
                    word.push(byte);
                    self.end(&mut word, &mut ids);
                }
                _ if self.lower_case => word.push(byte.to_ascii_lowercase()),
                _ => word.push(byte),
            }
        }
        self.end(&mut word, &mut ids);
        let tokens = ids.len() - before.len();
        match side {
            TruncationSide::Right => ids.truncate(before.len() + most.min(tokens)),
            TruncationSide::Left => {
                ids.drain(before.len()..before.len() + tokens.saturating_sub(most));
            }
        }
        ids.extend_from_slice(after);
        Some(ids.into())
    }

    /// Adds the pieces of a word, and begins another one.
    fn end(&self, word: &mut Vec<u8>, ids: &mut Vec<u32>) {
        let first = ids.len();
        let mut start = 0;
        while start < word.len() {
            let pieces = if start == 0 { &self.heads } else { &self.tails };
            let longest = word.len().min(start + self.longest);
            let found = (start + 1..=longest)
                .rev()
                .find_map(|end| pieces.get(&word[start..end]).map(|id| (*id, end)));
            let Some((id, end)) = found.filter(|_| word.len() <= self.most) else {
                ids.truncate(first);
                ids.push(self.unknown);
                break;
            };
            ids.push(id);
            start = end;
        }
        word.clear();
    }
}

/// Special tokens before and behind a lone text, if that is all that the tokenizer adds and they have no types.
fn around(tokenizer: &Tokenizer, heads: &Pieces) -> Option<[Box<[u32]>; 2]> {
    let words = heads.iter().filter(|(piece, _)| piece.iter().all(u8::is_ascii_lowercase));
    let (word, id) = words.min_by_key(|(_, id)| **id)?;
    let encoding = tokenizer.encode_fast(str::from_utf8(word).ok()?, true).ok()?;
    let ids = encoding.get_ids();
    let place = ids.iter().position(|found| found == id)?;
    let types = encoding.get_type_ids().iter().all(|kind| *kind == 0);
    types.then(|| [ids[..place].into(), ids[place + 1..].into()])
}
