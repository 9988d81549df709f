//! Fast path of WordPiece tokenization for plain ASCII text.
//!
//! The `tokenizers` crate tracks the origin of every character through all steps from text to tokens. That takes
//! 1.5 µs per token (Zen 4, November 2026), while an int8 engine takes 30 for everything else. Most texts for BERT's tokenizer
//! are ASCII, and for them the steps are few: remove control characters, lower-case, split at spaces, make each
//! punctuation character a word of its own, and split each word greedily, from its start, into the longest pieces in
//! the vocabulary.
//!
//! All other texts use the reference: other characters, other tokenizers, and texts that contain the first character of
//! a token added to the vocabulary, such as `[MASK]`. A test compares the tokens of both.

use std::collections::HashMap;

use replica_api::input::TruncationSide;
use tokenizers::{ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, Tokenizer};

/// Pieces and their ids.
type Pieces = HashMap<Box<[u8]>, u32>;

/// WordPiece tokenizer for plain ASCII text.
pub(super) struct WordPieces {
    /// Pieces that begin a word.
    heads: Pieces,
    /// Pieces that continue a word, without their prefix.
    tails: Pieces,
    /// Bytes of the longest piece.
    longest: usize,
    /// Maximum bytes of a word; a longer one is unknown.
    most: usize,
    unknown: u32,
    lower_case: bool,
    /// Whether a token that was added to the vocabulary begins with this character.
    added: [bool; 128],
    /// Special tokens before and after a single text.
    around: [Box<[u32]>; 2],
}

impl WordPieces {
    /// Returns the fast path of a BERT tokenizer; `None` for others.
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
            // A token that is matched in normalized text matches in either case.
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

    /// Returns the tokens of a text, special ones included, with at most `most` tokens of the text itself; `None` if
    /// the text needs the reference.
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
                // Removed; the word continues.
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

    /// Appends the pieces of the word, and starts another one.
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

/// Returns the special tokens before and after a single text, if the tokenizer adds nothing else and they have no
/// types.
fn around(tokenizer: &Tokenizer, heads: &Pieces) -> Option<[Box<[u32]>; 2]> {
    let words = heads.iter().filter(|(piece, _)| piece.iter().all(u8::is_ascii_lowercase));
    let (word, id) = words.min_by_key(|(_, id)| **id)?;
    let encoding = tokenizer.encode_fast(str::from_utf8(word).ok()?, true).ok()?;
    let ids = encoding.get_ids();
    let place = ids.iter().position(|found| found == id)?;
    let types = encoding.get_type_ids().iter().all(|kind| *kind == 0);
    types.then(|| [ids[..place].into(), ids[place + 1..].into()])
}
