//! Bulk client: many texts in, one block of numbers out.
//!
//! Embedding a corpus means millions of short texts and one measure: the time until all are done. A client made for single
//! requests spends that time on its own overhead: a parser that creates a string and a list per row, an object around it, a
//! task per request. This client splits the texts into requests ([`split`]), keeps hundreds of them in flight from one loop
//! (`operation`), reads each response once into a buffer and decodes its rows from there to their final position
//! (`embeddings`). Results are in the order of the texts and validated: an invalid response is an error that names the
//! request.
//!
//! Failed attempts are retried within a budget ([`budget`], [`retry`]), at another endpoint if there is one ([`endpoints`]),
//! and concurrency is reduced for an overloaded server ([`window`]). These modules are pure decisions: time and randomness
//! are arguments. To cancel an operation, drop its future.
//!
//! One operation runs on the task that awaits it, so it uses one core; concurrent operations use several. docs/client.md
//! documents the use from Rust and from Python.

mod body;
pub mod budget;
mod drive;
mod embeddings;
pub mod endpoints;
mod error;
pub mod fate;
mod http;
mod jobs;
mod scores;
pub mod settings;
pub mod split;
pub mod window;

use std::ops::Range;
use std::time::{Duration, Instant};

use ::http::Method;
use serde_json::{Map, Value};

pub use self::drive::{Progress, RequestRecord};
pub use self::embeddings::DIMENSIONS_MAX;
pub use self::error::{ClientError, RequestName};
pub use self::http::{ANSWER_BYTES_MAX, Failure, HEAD_BYTES_MAX, Headers, Protocol};
pub use self::scores::{Class, Ranked};
pub use self::settings::{EndpointSettings, Preference, Settings};
pub use crate::scan::Wrong;

use self::body::Template;
use self::drive::{Road, drive};
use self::embeddings::{Beside, Block};
use self::http::{Trust, Wire};
use self::jobs::{Bodies, Embed, Scored};

/// Progress callback, called after every response.
pub type Listener<'a> = &'a mut (dyn FnMut(Progress) + Send);

/// Bulk client. Connections are kept between operations, which may run concurrently.
pub struct Client {
    wires: Vec<Wire>,
    weights: Vec<f64>,
}

/// Options of an embedding operation.
#[derive(Clone, Debug, Default)]
pub struct EmbedOptions {
    /// Name of the deployment.
    pub model: String,
    /// Requested length of the vectors, for models that support several.
    pub dimensions: Option<usize>,
    /// OpenAI's `user` field.
    pub user: Option<String>,
    /// Requests decimal digits instead of base64, for servers without base64 support.
    pub as_floats: bool,
}

/// Vectors, in the order of the texts.
#[derive(Debug)]
pub struct Embedded {
    /// All vectors, contiguous.
    pub values: Vec<f32>,
    /// Length of each vector.
    pub dimensions: usize,
    /// Model name in the response.
    pub model: String,
    /// Prompt tokens, as counted by the server.
    pub prompt_tokens: u64,
    /// Total tokens, as counted by the server.
    pub total_tokens: u64,
    /// Statistics of the operation.
    pub run: Run,
}

/// Statistics of an operation.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Wall-clock time of the operation.
    pub took: Duration,
    /// Statistics of its requests, in order.
    pub requests: Vec<RequestRecord>,
}

/// Options of TEI's rerank and predict requests.
#[derive(Clone, Debug)]
pub struct ScoreOptions {
    /// Name of the deployment, unless the path contains it.
    pub model: Option<String>,
    /// Requests the model's raw scores instead of scores from 0 to 1.
    pub raw_scores: bool,
    /// Whether the response contains the texts (rerank).
    pub return_text: bool,
    /// Whether texts over the length limit are truncated instead of rejected.
    pub truncate: bool,
    /// End that is truncated: `Right` or `Left`.
    pub truncation_direction: String,
}

impl Default for ScoreOptions {
    fn default() -> ScoreOptions {
        let truncation_direction = "Right".to_owned();
        ScoreOptions {
            model: None,
            raw_scores: false,
            return_text: false,
            truncate: false,
            truncation_direction,
        }
    }
}

impl Client {
    /// Creates a client, or returns all problems of the settings. Opens no connection.
    pub fn new(settings: &Settings) -> Result<Client, ClientError> {
        let Settings { endpoints, protocol, roots_pem } = settings;
        let mut problems = Vec::new();
        let mut note = |problem: String| problems.push(problem);
        let secured = endpoints.iter().any(|endpoint| endpoint.url.starts_with("https:"));
        let trust = secured.then(|| Trust::new(roots_pem.as_deref(), *protocol)).transpose();
        let trust = trust.map_err(&mut note).ok().flatten();
        let mut wires = Vec::new();
        for EndpointSettings { url, key, weight } in endpoints {
            if !(0.0..=1e6).contains(weight) {
                note(format!("weight {weight} of endpoint {url:?}: write a number from 0 to 1000000"));
            }
            let wire = key.as_deref().map(settings::authorization).transpose();
            let wire = wire.and_then(|key| Wire::new(url, key, *protocol, trust.clone()));
            wires.extend(wire.map_err(&mut note).ok());
        }
        if endpoints.is_empty() {
            note("endpoints: there are none; give the URL of at least one".to_owned());
        }
        if !problems.is_empty() {
            return Err(ClientError::Invalid(problems));
        }
        Ok(Client { wires, weights: endpoints.iter().map(|endpoint| endpoint.weight).collect() })
    }

    /// Embeds texts by `POST /v1/embeddings`.
    pub async fn embed<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: &EmbedOptions,
        preference: &Preference,
        progress: Listener<'_>,
    ) -> Result<Embedded, ClientError> {
        let EmbedOptions { model, dimensions, user, as_floats } = options;
        let start = Instant::now();
        let sensible = dimensions.is_none_or(|dimensions| (1..=DIMENSIONS_MAX).contains(&dimensions));
        if !sensible {
            let problem = format!("dimensions {dimensions:?}: write a number from 1 to {DIMENSIONS_MAX}");
            return Err(ClientError::Invalid(vec![problem]));
        }
        let mut members = Map::new();
        members.insert("model".to_owned(), model.as_str().into());
        members.insert("encoding_format".to_owned(), if *as_floats { "float" } else { "base64" }.into());
        if let Some(dimensions) = dimensions {
            members.insert("dimensions".to_owned(), (*dimensions).into());
        }
        if let Some(user) = user {
            members.insert("user".to_owned(), user.as_str().into());
        }
        let mut job = Embed {
            cut: cut(texts, preference)?,
            texts,
            template: Template::new(members, "input", false),
            block: Block::new(texts.len(), *dimensions),
            beside: Beside::default(),
        };
        let requests = drive(self.road("/v1/embeddings"), &mut job, preference, progress).await?;
        let Embed { block, beside: Beside { model, prompt_tokens, total_tokens }, .. } = job;
        let run = Run { took: start.elapsed(), requests };
        Ok(Embedded {
            dimensions: block.dimensions(),
            values: block.values,
            model,
            prompt_tokens,
            total_tokens,
            run,
        })
    }

    /// Ranks texts by relevance to `query`, by TEI's `POST /rerank`. The texts of each request are in the order in which the
    /// server ranked them, and the requests in the order of the texts. Scores do not depend on the other texts, so a caller
    /// that needs a global ranking sorts by score.
    pub async fn rerank<S: AsRef<str>>(
        &self,
        query: &str,
        texts: &[S],
        options: &ScoreOptions,
        preference: &Preference,
        progress: Listener<'_>,
    ) -> Result<(Vec<Ranked>, Run), ClientError> {
        let mut members = options.members();
        members.insert("query".to_owned(), query.into());
        members.insert("return_text".to_owned(), options.return_text.into());
        let template = Template::new(members, "texts", false);
        let read = |first: usize, count: usize, answer: &[u8]| {
            let mut ranks = scores::ranks(answer, count)?;
            ranks.iter_mut().for_each(|rank| rank.index += first);
            Ok(ranks)
        };
        self.scored("/rerank", texts, template, read, preference, progress).await
    }

    /// Classifies texts by TEI's `POST /predict`; returns the labels of each.
    pub async fn classify<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: &ScoreOptions,
        preference: &Preference,
        progress: Listener<'_>,
    ) -> Result<(Vec<Vec<Class>>, Run), ClientError> {
        // One list per text: two texts in one list would be a pair.
        let template = Template::new(options.members(), "inputs", true);
        let read = |_, count, answer: &[u8]| scores::classes(answer, count);
        self.scored("/predict", texts, template, read, preference, progress).await
    }

    /// Sends each of `bodies` to `path` as JSON; returns the response bodies in order. Failed requests are retried, so disable
    /// retries for requests that are not idempotent.
    pub async fn batch<B: AsRef<[u8]>>(
        &self,
        method: Method,
        path: &str,
        bodies: &[B],
        preference: &Preference,
        progress: Listener<'_>,
    ) -> Result<(Vec<Vec<u8>>, Run), ClientError> {
        let start = Instant::now();
        if bodies.is_empty() {
            return Err(ClientError::Invalid(vec!["payloads: there are none; give at least one".to_owned()]));
        }
        let cut = (0..bodies.len()).map(|place| place..place + 1).collect();
        let mut job = Bodies { cut, bodies, answers: vec![Vec::new(); bodies.len()] };
        let road = Road { method, ..self.road(path) };
        let requests = drive(road, &mut job, preference, progress).await?;
        Ok((job.answers, Run { took: start.elapsed(), requests }))
    }

    async fn scored<S: AsRef<str>, T>(
        &self,
        path: &str,
        texts: &[S],
        template: Template,
        read: impl Fn(usize, usize, &[u8]) -> Result<Vec<T>, Wrong>,
        preference: &Preference,
        progress: Listener<'_>,
    ) -> Result<(Vec<T>, Run), ClientError> {
        let start = Instant::now();
        let cut = cut(texts, preference)?;
        let answers = cut.iter().map(|_| Vec::new()).collect();
        let mut job = Scored { cut, texts, template, read, answers };
        let requests = drive(self.road(path), &mut job, preference, progress).await?;
        Ok((job.answers.into_iter().flatten().collect(), Run { took: start.elapsed(), requests }))
    }

    fn road<'a>(&'a self, path: &'a str) -> Road<'a> {
        Road { wires: &self.wires, weights: &self.weights, method: Method::POST, path }
    }
}

impl ScoreOptions {
    fn members(&self) -> Map<String, Value> {
        let ScoreOptions { model, raw_scores, return_text: _, truncate, truncation_direction } = self;
        let mut members = Map::new();
        if let Some(model) = model {
            members.insert("model".to_owned(), model.as_str().into());
        }
        members.insert("raw_scores".to_owned(), (*raw_scores).into());
        members.insert("truncate".to_owned(), (*truncate).into());
        members.insert("truncation_direction".to_owned(), truncation_direction.as_str().into());
        members
    }
}

/// Splits `texts` into requests; an error if there is no text.
fn cut<S: AsRef<str>>(texts: &[S], preference: &Preference) -> Result<Vec<Range<usize>>, ClientError> {
    if texts.is_empty() {
        return Err(ClientError::Invalid(vec!["texts: there are none; give at least one".to_owned()]));
    }
    Ok(split::split(texts, preference.request))
}
