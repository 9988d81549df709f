//! Operations: request bodies, and destinations of the responses.

use std::ops::Range;

use super::body::Template;
use super::drive::Job;
use super::embeddings::{Beside, Block};
use crate::scan::Wrong;

pub(super) struct Embed<'a, S> {
    pub(super) cut: Vec<Range<usize>>,
    pub(super) texts: &'a [S],
    pub(super) template: Template,
    pub(super) block: Block,
    pub(super) beside: Beside,
}

impl<S: AsRef<str>> Job for Embed<'_, S> {
    fn requests(&self) -> &[Range<usize>] {
        &self.cut
    }

    fn body(&self, number: usize) -> Vec<u8> {
        self.template.body(&self.texts[self.cut[number].clone()])
    }

    fn take(&mut self, number: usize, answer: &[u8]) -> Result<(), Wrong> {
        let request = self.cut[number].clone();
        let Beside { model, prompt_tokens, total_tokens } =
            self.block.read(request.start, request.len(), answer)?;
        if self.beside.model.is_empty() {
            self.beside.model = model;
        }
        self.beside.prompt_tokens += prompt_tokens;
        self.beside.total_tokens += total_tokens;
        Ok(())
    }
}

pub(super) struct Scored<'a, S, R, T> {
    pub(super) cut: Vec<Range<usize>>,
    pub(super) texts: &'a [S],
    pub(super) template: Template,
    pub(super) read: R,
    pub(super) answers: Vec<Vec<T>>,
}

impl<S: AsRef<str>, R: Fn(usize, usize, &[u8]) -> Result<Vec<T>, Wrong>, T> Job for Scored<'_, S, R, T> {
    fn requests(&self) -> &[Range<usize>] {
        &self.cut
    }

    fn body(&self, number: usize) -> Vec<u8> {
        self.template.body(&self.texts[self.cut[number].clone()])
    }

    fn take(&mut self, number: usize, answer: &[u8]) -> Result<(), Wrong> {
        let request = &self.cut[number];
        self.answers[number] = (self.read)(request.start, request.len(), answer)?;
        Ok(())
    }
}

pub(super) struct Bodies<'a, B> {
    pub(super) cut: Vec<Range<usize>>,
    pub(super) bodies: &'a [B],
    pub(super) answers: Vec<Vec<u8>>,
}

impl<B: AsRef<[u8]>> Job for Bodies<'_, B> {
    fn requests(&self) -> &[Range<usize>] {
        &self.cut
    }

    fn body(&self, number: usize) -> Vec<u8> {
        self.bodies[number].as_ref().to_vec()
    }

    fn take(&mut self, number: usize, answer: &[u8]) -> Result<(), Wrong> {
        self.answers[number] = answer.to_vec();
        Ok(())
    }
}
