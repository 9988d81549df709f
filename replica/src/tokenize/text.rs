//! One text or pair of texts, as one model wants it.
//!
//! The arithmetic is that of the `tokenizers` crate, which is the reference. What is ours is the order: each text is
//! tokenised without special tokens, cut to the room that the special tokens leave, and only then put into the
//! tokenizer's template. So truncation is an argument of a request and not a setting of the tokenizer, of which there is
//! one for all threads; and the query of a rerank is tokenised once and not with each document.
//!
//! Of a model with a chat template a pair is one text, which [`templated`](super::templated) makes tokens of.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use replica_core::input::{InvalidInput, OverlongPolicy, Readable, TruncationSide};
use replica_core::wire::tei::SimpleToken;
use supervision::request::contain_work;
use tokenizers::{Encoding, PostProcessor, Tokenizer, TruncationDirection};

use super::word_pieces::WordPieces;
use super::{Tokenized, settings};
use crate::model::{ModelDir, PairTemplate, TokenizerConfig};

/// A tokenizer that cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[error("cannot load the tokenizer {path}: {reason}")]
pub struct LoadError {
    path: String,
    reason: String,
}

/// What a model computes at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Text {
    /// One text.
    One(String),
    /// Two; the first may be that of many pairs.
    Pair(Arc<str>, String),
}

impl Text {
    /// What it takes to read it.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Text::One(text) => text.len(),
            Text::Pair(first, second) => first.len() + second.len(),
        }
    }
}

/// How the texts of a request are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// What stands before each lone text, and of a pair before the first. A pair of a chat template has its own.
    pub prompt: Option<Arc<str>>,
    /// What becomes of inputs that are too long.
    pub overlong: OverlongPolicy,
    /// A lone text, or the second of a pair, is cut to so many tokens before anything else.
    pub most: Option<usize>,
}

impl Reading {
    /// Texts as they stand; what is too long is refused.
    pub const WHOLE: Reading = Reading { prompt: None, overlong: OverlongPolicy::Reject, most: None };
}

/// Why a text did not become tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// The model cannot read it.
    Unreadable(InvalidInput),
    /// The chat template does not take it, for this reason.
    Template(String),
    /// The tokenizer failed.
    Broken(String),
}

impl From<tokenizers::Error> for Problem {
    fn from(error: tokenizers::Error) -> Problem {
        Problem::Broken(error.to_string())
    }
}

/// The first texts of pairs, tokenised; the last one is remembered.
#[derive(Default)]
pub(super) struct LastFirst(Option<(Arc<str>, Encoding)>);

/// What makes tokens of a text, as one model wants it.
pub struct TextTokenizer {
    pub(super) tokenizer: Tokenizer,
    /// A shorter way to the same tokens, for the texts that it knows.
    pub(super) pieces: Option<WordPieces>,
    /// What makes one text of a pair, where pairs are not joined by their tokens.
    pub(super) template: Option<PairTemplate>,
    pub(super) readable: Readable,
    /// Types of tokens that the model tells apart. Tokenizers write types for models that have none.
    token_types: usize,
}

impl TextTokenizer {
    /// Loads `tokenizer.json` from `model_folder`, without the truncation and padding that it may ask for: a request
    /// says what becomes of too long an input, and batches are ragged.
    pub fn load(
        model: &ModelDir,
        readable: Readable,
        token_types: usize,
    ) -> Result<TextTokenizer, LoadError> {
        let ModelDir { folder, sentence, template, tokenizer, .. } = model;
        TextTokenizer::load_from(
            folder,
            tokenizer,
            sentence.lower_case,
            template.clone(),
            readable,
            token_types,
        )
    }

    /// The same, by what the other files of the folder say; `lower_case` is for models that were trained on lower-case
    /// text and leave that to whoever calls the tokenizer.
    pub fn load_from(
        model_folder: &Path,
        config: &TokenizerConfig,
        lower_case: bool,
        template: Option<PairTemplate>,
        readable: Readable,
        token_types: usize,
    ) -> Result<TextTokenizer, LoadError> {
        let path = model_folder.join("tokenizer.json");
        let failed = |reason: tokenizers::Error| LoadError {
            path: path.display().to_string(),
            reason: reason.to_string(),
        };
        let mut tokenizer = Tokenizer::from_file(&path).map_err(failed)?;
        tokenizer.with_truncation(None).map_err(failed)?;
        tokenizer.with_padding(None);
        let problems = settings::apply(&mut tokenizer, config, lower_case, readable.vocabulary);
        if !problems.is_empty() {
            return Err(failed(problems.join("; ").into()));
        }
        let pieces = WordPieces::of(&tokenizer);
        let token_types = if config.tells_types() { token_types } else { 1 };
        let loaded = TextTokenizer { tokenizer, pieces, template, readable, token_types };
        loaded.check_template().map_err(|reason| failed(reason.into()))?;
        Ok(loaded)
    }

    /// The tokens of a text, special tokens included.
    pub(super) fn encode(
        &self,
        text: &Text,
        reading: &Reading,
        firsts: &mut LastFirst,
    ) -> Result<Tokenized, Problem> {
        let tokens = caught(|| match (text, &self.template) {
            (Text::One(_), Some(_)) => Err(Problem::Unreadable(InvalidInput::PairRequired)),
            (Text::One(text), None) => {
                Ok(self.encode_one(&self.prepared(text, reading.prompt.as_deref()), reading)?)
            }
            (Text::Pair(first, second), Some(template)) => {
                self.encode_templated(template, first, second, reading)
            }
            (Text::Pair(first, second), None) => {
                Ok(self.told(&self.encode_pair(first, second, reading, firsts)?))
            }
        })?;
        let Readable { max_input_tokens: _, vocabulary } = self.readable;
        if let Some(id) = tokens.ids.iter().copied().find(|id| *id as usize >= vocabulary) {
            // A tokenizer may have tokens that its model was never given.
            return Err(Problem::Unreadable(InvalidInput::UnknownToken { id, vocabulary }));
        }
        self.readable.check_length(tokens.ids.len()).map_err(Problem::Unreadable)?;
        Ok(tokens)
    }

    /// What the model is told of an encoding.
    fn told(&self, encoding: &Encoding) -> Tokenized {
        let told_apart = self.token_types > 1 && encoding.get_type_ids().iter().any(|id| *id != 0);
        Tokenized {
            ids: encoding.get_ids().into(),
            types: told_apart.then(|| encoding.get_type_ids().into()),
        }
    }

    fn encode_one(&self, text: &str, reading: &Reading) -> tokenizers::Result<Tokenized> {
        let Reading { prompt: _, overlong, most } = reading;
        let (cut, side) = match overlong {
            OverlongPolicy::Reject => (usize::MAX, TruncationSide::Right),
            OverlongPolicy::Truncate(cut) => (self.room(false), cut.side),
        };
        let most = most.unwrap_or(usize::MAX).min(cut);
        if let Some(ids) = self.pieces.as_ref().and_then(|pieces| pieces.encode(text, most, side)) {
            return Ok(Tokenized { ids, types: None });
        }
        if most == usize::MAX {
            return self.tokenizer.encode_fast(text, true).map(|encoding| self.told(&encoding));
        }
        let mut encoding = self.tokenizer.encode_fast(text, false)?;
        truncate(&mut encoding, most, side);
        self.tokenizer.post_process(encoding, None, true).map(|encoding| self.told(&encoding))
    }

    fn encode_pair(
        &self,
        first: &Arc<str>,
        second: &str,
        reading: &Reading,
        firsts: &mut LastFirst,
    ) -> tokenizers::Result<Encoding> {
        let mut second = self.tokenizer.encode_fast(self.prepared(second, None), false)?;
        if firsts.0.as_ref().is_none_or(|(known, _)| !Arc::ptr_eq(known, first)) {
            let whole = self.prepared(first, reading.prompt.as_deref());
            let encoding = self.tokenizer.encode_fast(whole, false)?;
            firsts.0 = Some((Arc::clone(first), encoding));
        }
        let mut first = firsts.0.as_ref().map(|(_, encoding)| encoding.clone()).unwrap_or_default();
        if let Some(most) = reading.most {
            truncate(&mut second, most, TruncationSide::Right);
        }
        if let OverlongPolicy::Truncate(cut) = reading.overlong {
            let [of_first, of_second] = cut.pair.shares([first.len(), second.len()], self.room(true));
            truncate(&mut first, of_first, cut.side);
            truncate(&mut second, of_second, cut.side);
        }
        // By itself it was a first text; a tokenizer without a template keeps the types that it finds.
        second.set_type_ids(vec![1; second.len()]);
        self.tokenizer.post_process(first, Some(second), true)
    }

    /// Tokens that are left beside the special ones.
    fn room(&self, pair: bool) -> usize {
        self.readable.max_input_tokens.saturating_sub(self.special_tokens(pair))
    }

    /// Tokens that are put around a text or a pair.
    pub(super) fn special_tokens(&self, pair: bool) -> usize {
        self.tokenizer.get_post_processor().map_or(0, |template| template.added_tokens(pair))
    }

    fn prepared<'a>(&self, text: &'a str, prompt: Option<&str>) -> Cow<'a, str> {
        prompt.map_or(Cow::Borrowed(text), |prompt| Cow::Owned([prompt, text].concat()))
    }

    /// The tokens of a text with their places in it. Nothing is too long for it.
    pub(super) fn inspect(
        &self,
        text: &str,
        prompt: Option<&str>,
        special: bool,
    ) -> Result<Vec<SimpleToken>, Problem> {
        let text = self.prepared(text, prompt);
        let encoding = caught(|| Ok(self.tokenizer.encode(&*text, special)?))?;
        let token = |at: usize| {
            let id = encoding.get_ids()[at];
            if encoding.get_special_tokens_mask()[at] == 1 {
                let text = encoding.get_tokens()[at].clone();
                return SimpleToken { id, text, special: true, start: None, stop: None };
            }
            let (start, stop) = encoding.get_offsets()[at];
            // Tokens of byte-level vocabularies may end inside a character.
            let bytes = text.as_bytes().get(start..stop).unwrap_or_default();
            let text = String::from_utf8_lossy(bytes).into_owned();
            SimpleToken { id, text, special: false, start: Some(start), stop: Some(stop) }
        };
        Ok((0..encoding.len()).map(token).collect())
    }

    /// The text of tokens.
    pub(super) fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, Problem> {
        let vocabulary = self.readable.vocabulary;
        if let Some(id) = ids.iter().copied().find(|id| *id as usize >= vocabulary) {
            return Err(Problem::Unreadable(InvalidInput::UnknownToken { id, vocabulary }));
        }
        caught(|| Ok(self.tokenizer.decode(ids, skip_special_tokens)?))
    }
}

fn direction(side: TruncationSide) -> TruncationDirection {
    match side {
        TruncationSide::Left => TruncationDirection::Left,
        TruncationSide::Right => TruncationDirection::Right,
    }
}

/// What is cut off is thrown away at once: the template would go round each piece of it.
fn truncate(encoding: &mut Encoding, most: usize, side: TruncationSide) {
    encoding.truncate(most, 0, direction(side));
    encoding.take_overflowing();
}

/// Third-party code meets strangers' text here; if it panics, that costs this request and not the thread.
fn caught<T>(work: impl FnOnce() -> Result<T, Problem>) -> Result<T, Problem> {
    contain_work(work).unwrap_or_else(|_| Err(Problem::Broken("it panicked".to_owned())))
}
