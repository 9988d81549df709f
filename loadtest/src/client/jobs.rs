//! Operations: request bodies, and destinations of the responses.

use std::ops::Range;

use super::body::BodyTemplate;
use super::embeddings::{EmbeddingsMetadata, VectorBlock};
use super::operation::BulkJob;
use crate::scan::DecodeError;

pub(super) struct EmbedJob<'a, S> {
    pub(super) ranges: Vec<Range<usize>>,
    pub(super) texts: &'a [S],
    pub(super) template: BodyTemplate,
    pub(super) block: VectorBlock,
    pub(super) metadata: EmbeddingsMetadata,
}

impl<S: AsRef<str>> BulkJob for EmbedJob<'_, S> {
    fn requests(&self) -> &[Range<usize>] {
        &self.ranges
    }

    fn body(&self, number: usize) -> Vec<u8> {
        self.template.body(&self.texts[self.ranges[number].clone()])
    }

    fn take(&mut self, number: usize, response: &[u8]) -> Result<(), DecodeError> {
        let request = self.ranges[number].clone();
        let EmbeddingsMetadata { model, prompt_tokens, total_tokens } =
            self.block.read(request.start, request.len(), response)?;
        if self.metadata.model.is_empty() {
            self.metadata.model = model;
        }
        self.metadata.prompt_tokens += prompt_tokens;
        self.metadata.total_tokens += total_tokens;
        Ok(())
    }
}

pub(super) struct ScoreJob<'a, S, R, T> {
    pub(super) ranges: Vec<Range<usize>>,
    pub(super) texts: &'a [S],
    pub(super) template: BodyTemplate,
    pub(super) read: R,
    pub(super) responses: Vec<Vec<T>>,
}

impl<S: AsRef<str>, R: Fn(usize, usize, &[u8]) -> Result<Vec<T>, DecodeError>, T> BulkJob
    for ScoreJob<'_, S, R, T>
{
    fn requests(&self) -> &[Range<usize>] {
        &self.ranges
    }

    fn body(&self, number: usize) -> Vec<u8> {
        self.template.body(&self.texts[self.ranges[number].clone()])
    }

    fn take(&mut self, number: usize, response: &[u8]) -> Result<(), DecodeError> {
        let request = &self.ranges[number];
        self.responses[number] = (self.read)(request.start, request.len(), response)?;
        Ok(())
    }
}

pub(super) struct PostJob<'a, B> {
    pub(super) ranges: Vec<Range<usize>>,
    pub(super) bodies: &'a [B],
    pub(super) responses: Vec<Vec<u8>>,
}

impl<B: AsRef<[u8]>> BulkJob for PostJob<'_, B> {
    fn requests(&self) -> &[Range<usize>] {
        &self.ranges
    }

    fn body(&self, number: usize) -> Vec<u8> {
        self.bodies[number].as_ref().to_vec()
    }

    fn take(&mut self, number: usize, response: &[u8]) -> Result<(), DecodeError> {
        self.responses[number] = response.to_vec();
        Ok(())
    }
}
