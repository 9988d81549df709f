//! Embedding without a server: tokenizer and engine of one model in this process, for bulk jobs on one machine.
//!
//! A vector is the one that a replica with default settings returns for the same text: the same tokenizer, default prompt,
//! engine and post-processing. There are no requests, so there is neither a batcher nor a queue: the caller forms the
//! batches, of [`OfflineEmbedder::batch_tokens`] tokens at best.

use std::fmt::Display;
use std::num::NonZeroUsize;
use std::thread::available_parallelism;

use replica_api::input::{InvalidInput, OverlongPolicy, Readable, Truncation};
use replica_api::openai::check_dimensions;
use replica_api::prompt::PromptChoice;
use replica_core::Precision;
use replica_core::batch::BatchSettings;
use tokio::runtime::{self, Runtime};

use crate::cache::{CachedModel, ModelCache};
use crate::engine::cpu::{CpuEngine, CpuOptions, Isa, PackedCache};
use crate::engine::{BatchBuffer, Description, Engine, Output};
use crate::model::ModelDir;
use crate::purpose::{EmbeddingModel, Purpose};
use crate::tokenize::{EncodeOptions, TextInput, TextTokenizer, TokenizeError, Tokenized, TokenizerPool};
use crate::tune;
use crate::tune::file::Hardware;

/// Options of an embedder.
#[derive(Clone, Debug)]
pub struct OfflineOptions {
    /// Number format.
    pub precision: Precision,
    /// Threads; absent: the tuned number for this model and machine, or one for each core.
    pub threads: Option<NonZeroUsize>,
    /// Values to keep of each vector; absent: all that the model serves.
    pub dimensions: Option<u64>,
    /// Name of the prompt before each text; absent: the default of the model.
    pub prompt_name: Option<String>,
    /// Whether texts that are too long are truncated; otherwise they are rejected.
    pub truncate: bool,
}

/// Failure of an embedder, as a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct OfflineError(String);

/// Embedding model on the CPU engine.
pub struct OfflineEmbedder {
    tokenizer: TokenizerPool,
    /// Waits for the tokenizer threads.
    runtime: Runtime,
    options: EncodeOptions,
    engine: CpuEngine,
    embedding: EmbeddingModel,
    dimension: usize,
    batch_tokens: usize,
    notice: Option<String>,
}

impl OfflineEmbedder {
    /// Loads a model of the cache.
    pub fn load(
        cache: &ModelCache,
        cached: &CachedModel,
        options: &OfflineOptions,
    ) -> Result<OfflineEmbedder, OfflineError> {
        let failed = |reason: &dyn Display| OfflineError(format!("cannot load {}: {reason}", cached.source));
        let OfflineOptions { precision, threads, dimensions, prompt_name, truncate } = options;
        let model = ModelDir::open(&cached.path).map_err(|error| failed(&error))?;
        let hardware = Hardware::here(Isa::best().name());
        let (tuned, notice) = match tune::file::find(cache.root(), None, &cached.digest, &hardware) {
            Ok(tuned) => (tuned, None),
            Err(mismatch) => (None, Some(format!("tuned settings are not used: {mismatch}"))),
        };
        let choice = tuned
            .as_ref()
            .and_then(|(_, tuned)| tuned.choices.iter().find(|choice| choice.precision == *precision));
        let cores = || available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let threads = threads.or(choice.map(|choice| choice.threads)).unwrap_or_else(cores);
        let batch = choice.map_or_else(BatchSettings::default, |choice| choice.batch);
        let packed = Some(PackedCache::below(cache.root(), &cached.digest));
        let cpu = CpuOptions { threads, precision: *precision, packed, isa: None };
        let engine = CpuEngine::load(&model, cpu).map_err(|error| failed(&error))?;
        let description = engine.describe();
        let Purpose::Embed(embedding) = Purpose::of(&model, description) else {
            return Err(failed(&"it has a classification head; give a model that embeds"));
        };
        let dimension =
            check_dimensions(*dimensions, embedding.width).map_err(|refusal| failed(&refusal.message))?;
        let choice = prompt_name.clone().map_or(PromptChoice::Default, PromptChoice::Named);
        let prompt = embedding.prompt(&choice).map_err(|refusal| failed(&refusal.message))?;
        let overlong = Truncation { truncate: Some(*truncate), ..Truncation::default() }.overlong(false);
        let readable =
            Readable { max_input_tokens: description.max_tokens, vocabulary: description.vocabulary };
        let tokenizer = TextTokenizer::load(&model, readable, description.token_types);
        let tokenizer = TokenizerPool::start(tokenizer.map_err(|error| failed(&error))?, threads.get());
        Ok(OfflineEmbedder {
            tokenizer: tokenizer.map_err(|error| failed(&error))?,
            runtime: runtime::Builder::new_current_thread().build().map_err(|error| failed(&error))?,
            options: EncodeOptions { prompt, overlong, most: None },
            engine,
            embedding,
            dimension,
            batch_tokens: usize::try_from(batch.batch_tokens).unwrap_or(usize::MAX),
            notice,
        })
    }

    /// Returns the length of a vector.
    pub fn dimension(&self) -> usize {
        self.dimension
    }

    /// Returns the tokens of a batch at which the engine is fastest.
    pub fn batch_tokens(&self) -> usize {
        self.batch_tokens
    }

    /// Returns the properties of the engine.
    pub fn description(&self) -> &Description {
        self.engine.describe()
    }

    /// Returns the prompt before each text, if there is one.
    pub fn prompt(&self) -> Option<&str> {
        self.options.prompt.as_deref()
    }

    /// Returns a statement for the user about settings that do not apply, if there are any.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Returns the tokens of each text, or the reason why the model cannot read it. If `stops_at_first`, the first such
    /// text is the last of the result.
    pub fn tokenize(
        &self,
        texts: &[&str],
        stops_at_first: bool,
    ) -> Result<Vec<Result<Tokenized, String>>, OfflineError> {
        match self.encode(texts) {
            Ok(tokens) => return Ok(tokens.into_iter().map(Ok).collect()),
            Err(TokenizeError::Unreadable { .. }) => {}
            Err(error) => return Err(broken(error)),
        }
        // The pool reports one text only.
        let mut tokenized = Vec::with_capacity(texts.len());
        for text in texts {
            match self.encode(&[text]) {
                Ok(tokens) => tokenized.extend(tokens.into_iter().map(Ok)),
                Err(TokenizeError::Unreadable { reason, .. }) => {
                    tokenized.push(Err(self.reason(reason)));
                    if stops_at_first {
                        break;
                    }
                }
                Err(error) => return Err(broken(error)),
            }
        }
        Ok(tokenized)
    }

    fn encode(&self, texts: &[&str]) -> Result<Vec<Tokenized>, TokenizeError> {
        let inputs = texts.iter().map(|text| TextInput::One((*text).to_owned())).collect();
        self.runtime.block_on(self.tokenizer.encode(inputs, self.options.clone()))
    }

    fn reason(&self, invalid: InvalidInput) -> String {
        match invalid {
            InvalidInput::TooLong { limit, given } if self.options.overlong == OverlongPolicy::Reject => {
                format!(
                    "the text has {given} tokens and the limit of this model is {limit}; shorten it, or give --truncate"
                )
            }
            other => other.refusal("text", "text").message,
        }
    }

    /// Computes the vectors of a batch, contiguous and in its order.
    pub fn compute(&self, batch: &[&Tokenized]) -> Result<Vec<f32>, OfflineError> {
        let mut buffer = BatchBuffer::default();
        batch.iter().for_each(|text| buffer.push(&text.ids, text.types.as_deref()));
        let batch = buffer.batch();
        let description = self.engine.describe();
        let mut rows = vec![0.0; description.numbers(&batch, Output::Pooled)];
        let computed = self.engine.compute(&batch, Output::Pooled, &mut rows);
        computed.map_err(|error| OfflineError(error.to_string()))?;
        let finish = self.embedding.finish(Output::Pooled, self.dimension, Some(true));
        Ok(finish(rows, description.width))
    }
}

fn broken(error: TokenizeError) -> OfflineError {
    let reason = match error {
        TokenizeError::Broken(reason) | TokenizeError::Template { reason, .. } => reason,
        TokenizeError::Full | TokenizeError::Stopped | TokenizeError::Unreadable { .. } => {
            "the tokenizer threads have stopped".to_owned()
        }
    };
    OfflineError(format!("the tokenizer failed: {reason}"))
}
