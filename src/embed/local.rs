//! Backend of `meridian embed` in this process.

use crate::models;
use embed::backend::{BackendError, EmbeddingBackend, RejectedText, WindowVectors};
use embed::packing::pack;
use replica::cache::ModelSource;
use replica::offline::{OfflineEmbedder, OfflineError, OfflineOptions};
use replica::tokenize::Tokenized;
use std::collections::BTreeMap;

/// Embedder, and the handling of texts that it rejects.
pub(super) struct LocalBackend {
    embedder: OfflineEmbedder,
    skip_invalid: bool,
}

impl LocalBackend {
    /// Loads the model; fetches it first if it is not in the cache. Also returns the options that decide the result.
    pub(super) fn load(
        source: &ModelSource,
        options: &OfflineOptions,
        skip_invalid: bool,
    ) -> Result<(LocalBackend, BTreeMap<String, String>), String> {
        models::ensure(&source.to_string())?;
        let cache = models::cache()?;
        let cached = cache.resolve(source).map_err(|error| error.to_string())?;
        let embedder = OfflineEmbedder::load(&cache, &cached, options).map_err(|error| error.to_string())?;
        if let Some(notice) = embedder.notice() {
            eprintln!("meridian: {notice}");
        }
        let description = embedder.description();
        let settings = [
            ("digest of --model", cached.digest),
            ("--precision", description.engine.precision.to_string()),
            // Kernels of another instruction set round differently.
            ("instruction set", description.instruction_set.clone()),
            ("--dimensions", embedder.dimension().to_string()),
            ("prompt", embedder.prompt().unwrap_or_default().to_owned()),
        ];
        let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Ok((LocalBackend { embedder, skip_invalid }, settings))
    }
}

fn failed(error: OfflineError) -> BackendError {
    BackendError(error.to_string())
}

impl EmbeddingBackend for LocalBackend {
    fn embed(&mut self, texts: &[&str]) -> Result<WindowVectors, BackendError> {
        let mut vectors = WindowVectors::default();
        let mut tokenized: Vec<Tokenized> = Vec::with_capacity(texts.len());
        for (index, tokens) in
            self.embedder.tokenize(texts, !self.skip_invalid).map_err(failed)?.into_iter().enumerate()
        {
            match tokens {
                Ok(tokens) => tokenized.push(tokens),
                Err(reason) => vectors.rejected.push(RejectedText { index, reason }),
            }
        }
        if !vectors.rejected.is_empty() && !self.skip_invalid {
            return Ok(vectors);
        }
        let dimension = self.embedder.dimension();
        let lengths: Vec<usize> = tokenized.iter().map(|tokens| tokens.ids.len()).collect();
        vectors.values = vec![0.0; tokenized.len() * dimension];
        for batch in pack(&lengths, self.embedder.batch_tokens()) {
            let tokens: Vec<&Tokenized> = batch.iter().map(|index| &tokenized[*index]).collect();
            let rows = self.embedder.compute(&tokens).map_err(failed)?;
            for (index, row) in batch.into_iter().zip(rows.chunks_exact(dimension)) {
                vectors.values[index * dimension..(index + 1) * dimension].copy_from_slice(row);
            }
        }
        Ok(vectors)
    }

    fn dimension(&self) -> usize {
        self.embedder.dimension()
    }
}
