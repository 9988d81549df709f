//! Tokenization of one text or pair for one model.
//!
//! The algorithms are those of the `tokenizers` crate, which is the reference; only the order is ours: each text is
//! tokenized without special tokens, truncated to the limit minus the special tokens, and only then passed to the
//! tokenizer's template. So truncation is an option of a request and not a setting of the tokenizer, of which all
//! threads share one; and the query of a rerank is tokenized once and not with each document.
//!
//! For a model with a chat template a pair is one text, which [`templated`](super::templated) tokenizes.

use std::borrow::Cow;
use std::path::Path;
use std::str::FromStr as _;
use std::sync::Arc;

use replica_api::input::{InvalidInput, OverlongPolicy, Readable, TruncationSide};
use replica_api::tei::SimpleToken;
use supervision::request::contain_work;
use tokenizers::{Encoding, PostProcessor, Tokenizer, TruncationDirection};

use super::word_pieces::WordPieces;
use super::{Tokenized, settings};
use crate::model::{ModelDir, PairTemplate, TokenizerConfig, is_of_this_machine, shortened_text};

/// Error of loading a tokenizer: its file is missing or invalid, or cannot be read. The text has the cause.
#[derive(Debug, thiserror::Error)]
#[error("cannot load the tokenizer {path}: {reason}")]
pub struct TokenizerLoadError {
    path: String,
    reason: String,
    /// Whether the cause is on this machine: the file exists and cannot be read.
    pub(crate) is_of_this_machine: bool,
}

/// Input of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextInput {
    /// One text.
    One(String),
    /// Two texts; the first may be shared by many pairs.
    Pair(Arc<str>, String),
}

impl TextInput {
    /// Returns the bytes to tokenize.
    pub(super) fn bytes(&self) -> usize {
        match self {
            TextInput::One(text) => text.len(),
            TextInput::Pair(first, second) => first.len() + second.len(),
        }
    }
}

/// Options of tokenizing the texts of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodeOptions {
    /// Prompt before each single text, and before the first of a pair. The pairs of a chat template have their own.
    pub prompt: Option<Arc<str>>,
    /// Handling of inputs that are too long.
    pub overlong: OverlongPolicy,
    /// Maximum tokens of a single text, or of the second of a pair; it is cut to them first.
    pub most: Option<usize>,
}

impl EncodeOptions {
    /// Unchanged texts; too long ones are rejected.
    pub const WHOLE: EncodeOptions =
        EncodeOptions { prompt: None, overlong: OverlongPolicy::Reject, most: None };
}

/// Reason why a text could not be tokenized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    /// The model cannot read it.
    Unreadable(InvalidInput),
    /// The chat template rejects it, with this message.
    Template(String),
    /// The tokenizer failed.
    Broken(String),
}

impl From<tokenizers::Error> for Problem {
    fn from(error: tokenizers::Error) -> Problem {
        Problem::Broken(error.to_string())
    }
}

/// Tokens of the last first text of a pair, for reuse.
#[derive(Default)]
pub(super) struct FirstEncoding(Option<(Arc<str>, Encoding)>);

/// Tokenizer of one model.
pub struct TextTokenizer {
    pub(super) tokenizer: Tokenizer,
    /// Fast path for plain ASCII texts.
    pub(super) pieces: Option<WordPieces>,
    /// Template that formats a pair as one text, for models with one.
    pub(super) template: Option<PairTemplate>,
    pub(super) readable: Readable,
    /// Number of token types that the model has. Tokenizers write types even for models without them.
    token_types: usize,
}

impl TextTokenizer {
    /// Loads `tokenizer.json` from the model's folder, and disables its truncation and padding: requests choose the
    /// handling of long inputs, and batches are ragged.
    pub fn load(
        model: &ModelDir,
        readable: Readable,
        token_types: usize,
    ) -> Result<TextTokenizer, TokenizerLoadError> {
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

    /// Loads `tokenizer.json` with the settings of the other files; `lower_case` is for models that were trained on
    /// lower-case text and expect the caller to convert it.
    pub fn load_from(
        model_folder: &Path,
        config: &TokenizerConfig,
        lower_case: bool,
        template: Option<PairTemplate>,
        readable: Readable,
        token_types: usize,
    ) -> Result<TextTokenizer, TokenizerLoadError> {
        let path = model_folder.join("tokenizer.json");
        let failed = |reason: tokenizers::Error| TokenizerLoadError {
            path: path.display().to_string(),
            reason: reason.to_string(),
            is_of_this_machine: false,
        };
        let text = std::fs::read_to_string(&path).map_err(|error| TokenizerLoadError {
            is_of_this_machine: is_of_this_machine(&error),
            ..failed(error.into())
        })?;
        let read = Tokenizer::from_str(&text);
        let mut tokenizer = read.map_err(|error| failed(shortened_text(&error.to_string()).into()))?;
        tokenizer.with_truncation(None).map_err(failed)?;
        tokenizer.with_padding(None);
        let problems = settings::apply(&mut tokenizer, config, lower_case, readable.vocabulary);
        if !problems.is_empty() {
            return Err(failed(problems.join("; ").into()));
        }
        let pieces = WordPieces::of(&tokenizer);
        let token_types = if config.uses_token_types() { token_types } else { 1 };
        let loaded = TextTokenizer { tokenizer, pieces, template, readable, token_types };
        loaded.check_template().map_err(|reason| failed(reason.into()))?;
        Ok(loaded)
    }

    /// Returns the tokens of an input, special tokens included.
    pub(super) fn encode(
        &self,
        text: &TextInput,
        options: &EncodeOptions,
        first_encoding: &mut FirstEncoding,
    ) -> Result<Tokenized, Problem> {
        let tokens = caught(|| match (text, &self.template) {
            (TextInput::One(_), Some(_)) => Err(Problem::Unreadable(InvalidInput::PairRequired)),
            (TextInput::One(text), None) => {
                Ok(self.encode_one(&self.with_prompt(text, options.prompt.as_deref()), options)?)
            }
            (TextInput::Pair(first, second), Some(template)) => {
                self.encode_templated(template, first, second, options)
            }
            (TextInput::Pair(first, second), None) => {
                Ok(self.tokenized(&self.encode_pair(first, second, options, first_encoding)?))
            }
        })?;
        let Readable { max_input_tokens: _, vocabulary } = self.readable;
        if let Some(id) = tokens.ids.iter().copied().find(|id| *id as usize >= vocabulary) {
            // A tokenizer may have tokens without an embedding in its model.
            return Err(Problem::Unreadable(InvalidInput::UnknownToken { id, vocabulary }));
        }
        self.readable.check_length(tokens.ids.len()).map_err(Problem::Unreadable)?;
        Ok(tokens)
    }

    /// Converts an encoding; types are omitted if the model has none.
    fn tokenized(&self, encoding: &Encoding) -> Tokenized {
        let has_types = self.token_types > 1 && encoding.get_type_ids().iter().any(|id| *id != 0);
        Tokenized { ids: encoding.get_ids().into(), types: has_types.then(|| encoding.get_type_ids().into()) }
    }

    fn encode_one(&self, text: &str, options: &EncodeOptions) -> tokenizers::Result<Tokenized> {
        let EncodeOptions { prompt: _, overlong, most } = options;
        let (cut, side) = match overlong {
            OverlongPolicy::Reject => (usize::MAX, TruncationSide::Right),
            OverlongPolicy::Truncate(cut) => (self.text_capacity(false), cut.side),
        };
        let most = most.unwrap_or(usize::MAX).min(cut);
        if let Some(ids) = self.pieces.as_ref().and_then(|pieces| pieces.encode(text, most, side)) {
            return Ok(Tokenized { ids, types: None });
        }
        if most == usize::MAX {
            return self.tokenizer.encode_fast(text, true).map(|encoding| self.tokenized(&encoding));
        }
        let mut encoding = self.tokenizer.encode_fast(text, false)?;
        truncate(&mut encoding, most, side);
        self.tokenizer.post_process(encoding, None, true).map(|encoding| self.tokenized(&encoding))
    }

    fn encode_pair(
        &self,
        first: &Arc<str>,
        second: &str,
        options: &EncodeOptions,
        first_encoding: &mut FirstEncoding,
    ) -> tokenizers::Result<Encoding> {
        let mut second = self.tokenizer.encode_fast(self.with_prompt(second, None), false)?;
        if first_encoding.0.as_ref().is_none_or(|(known, _)| !Arc::ptr_eq(known, first)) {
            let whole = self.with_prompt(first, options.prompt.as_deref());
            let encoding = self.tokenizer.encode_fast(whole, false)?;
            first_encoding.0 = Some((Arc::clone(first), encoding));
        }
        let mut first = first_encoding.0.as_ref().map(|(_, encoding)| encoding.clone()).unwrap_or_default();
        if let Some(most) = options.most {
            truncate(&mut second, most, TruncationSide::Right);
        }
        if let OverlongPolicy::Truncate(cut) = options.overlong {
            let [of_first, of_second] =
                cut.pair.shares([first.len(), second.len()], self.text_capacity(true));
            truncate(&mut first, of_first, cut.side);
            truncate(&mut second, of_second, cut.side);
        }
        // As a single text it has type 0; a tokenizer without a template keeps the existing types.
        second.set_type_ids(vec![1; second.len()]);
        self.tokenizer.post_process(first, Some(second), true)
    }

    /// Returns the number of tokens left beside the special ones.
    fn text_capacity(&self, pair: bool) -> usize {
        self.readable.max_input_tokens.saturating_sub(self.special_tokens(pair))
    }

    /// Returns the number of special tokens around a text or a pair.
    pub(super) fn special_tokens(&self, pair: bool) -> usize {
        self.tokenizer.get_post_processor().map_or(0, |template| template.added_tokens(pair))
    }

    fn with_prompt<'a>(&self, text: &'a str, prompt: Option<&str>) -> Cow<'a, str> {
        prompt.map_or(Cow::Borrowed(text), |prompt| Cow::Owned([prompt, text].concat()))
    }

    /// Returns the tokens of a text with their offsets. The text may be of any length.
    pub(super) fn inspect(
        &self,
        text: &str,
        prompt: Option<&str>,
        special: bool,
    ) -> Result<Vec<SimpleToken>, Problem> {
        let text = self.with_prompt(text, prompt);
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

    /// Returns the text of tokens.
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

/// Cuts an encoding. The part cut off is dropped at once: the template would process each piece of it.
fn truncate(encoding: &mut Encoding, most: usize, side: TruncationSide) {
    encoding.truncate(most, 0, direction(side));
    encoding.take_overflowing();
}

/// Runs third-party code on client input; a panic fails this request and not the thread.
fn caught<T>(work: impl FnOnce() -> Result<T, Problem>) -> Result<T, Problem> {
    contain_work(work).unwrap_or_else(|_| Err(Problem::Broken("it panicked".to_owned())))
}
