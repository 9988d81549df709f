//! Bulk client: many texts in, one block of numbers out.
//!
//! Embedding a corpus means millions of short texts and one measure: the time until all are done. A client made for
//! single requests spends that time on its own overhead: a parser that creates a string and a list per row, an object
//! around it, a task per request. This client splits the texts into requests ([`split`]), keeps hundreds of them in
//! flight from one loop (`operation`), reads each response once into a buffer and decodes its rows from there to their
//! final position (`embeddings`). Results are in the order of the texts and validated: an invalid response is an error
//! that names the request.
//!
//! Failed attempts are retried within a budget ([`replica_api::retry`], [`retry`]), at another endpoint if there is one
//! ([`endpoints`]), and concurrency is reduced for an overloaded server ([`window`]). These modules are pure
//! decisions: time and randomness are arguments. To cancel an operation, drop its future.
//!
//! [`jobs`] submits durable jobs and reads their results.
//!
//! One operation runs on the task that awaits it, so it uses one core; concurrent operations use several.
//! docs/client.md documents the use from Rust and from Python.

mod body;
mod embeddings;
pub mod endpoints;
mod error;
mod http;
pub mod jobs;
mod operation;
pub mod retry;
mod scores;
pub mod settings;
pub mod split;
pub mod window;

use std::ops::Range;
use std::sync::Mutex;

use ::http::Method;
use replica_api::api::Operation;
use serde_json::{Map, Value};

pub use self::embeddings::DIMENSIONS_MAX;
pub use self::error::{ClientError, FailedRequest};
pub(crate) use self::http::{
    ClientTls, EndpointClient, HttpResponse, RequestTemplate, STREAMS_MAX, is_alpn_rejection,
};
pub use self::http::{HeaderLines, HttpAttemptError, HttpProtocol, RESPONSE_BYTES_MAX};
pub use self::operation::{OperationProgress, OperationStats, RequestRecord};
pub use self::scores::{LabelScore, RankedText};
pub use self::settings::{ClientSettings, EndpointSettings, Preference};
pub use crate::scan::DecodeError;

use self::body::BodyTemplate;
use self::embeddings::{EmbeddingsMetadata, VectorBlock};
use self::endpoints::EndpointSelector;
use self::operation::{BulkJob, OperationRoute, execute};
use crate::endpoint::authorization;

/// Progress callback, called after every response.
pub type ProgressCallback<'a> = &'a mut (dyn FnMut(OperationProgress) + Send);

/// Bulk client. Connections, and the load and ejections of endpoints, are kept between operations, which may run
/// concurrently.
pub struct Client {
    clients: Vec<EndpointClient>,
    /// Load and ejections of the endpoints, of all operations.
    endpoints: Mutex<EndpointSelector>,
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
    /// Requests that texts over the length limit are truncated instead of rejected; not part of OpenAI's API.
    pub truncate: bool,
}

/// Vectors, in the order of the texts.
#[derive(Debug)]
pub struct EmbeddedVectors {
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
    pub run: OperationStats,
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
    pub fn new(settings: &ClientSettings) -> Result<Client, ClientError> {
        let ClientSettings { endpoints, protocol, roots_pem } = settings;
        let mut problems = Vec::new();
        let mut note = |problem: String| problems.push(problem);
        let secured = endpoints.iter().any(|endpoint| endpoint.url.starts_with("https:"));
        let trust = secured.then(|| ClientTls::new(roots_pem.as_deref(), *protocol)).transpose();
        let trust = trust.map_err(&mut note).ok().flatten();
        let mut clients = Vec::new();
        for EndpointSettings { url, key, weight } in endpoints {
            if !(0.0..=1e6).contains(weight) {
                note(format!("weight {weight} of endpoint {url:?}: write a number from 0 to 1000000"));
            }
            let client = key.as_deref().map(|key| authorization("key", key)).transpose();
            let client = client.and_then(|key| EndpointClient::new(url, key, *protocol, trust.clone()));
            clients.extend(client.map_err(&mut note).ok());
        }
        if endpoints.is_empty() {
            note("endpoints: empty; give at least one URL".to_owned());
        }
        if !problems.is_empty() {
            return Err(ClientError::Invalid(problems));
        }
        let endpoints = EndpointSelector::new(endpoints.iter().map(|endpoint| endpoint.weight));
        Ok(Client { clients, endpoints: Mutex::new(endpoints) })
    }

    /// Embeds texts by `POST /v1/embeddings`.
    pub async fn embed<S: AsRef<str>>(
        &self,
        texts: &[S],
        options: &EmbedOptions,
        preference: &Preference,
        progress: ProgressCallback<'_>,
    ) -> Result<EmbeddedVectors, ClientError> {
        let EmbedOptions { model, dimensions, user, as_floats, truncate } = options;
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
        if *truncate {
            members.insert("truncate".to_owned(), true.into());
        }
        let template = BodyTemplate::new(members, "input", false);
        let requests = split_texts(texts, preference)?;
        let mut block = VectorBlock::new(texts.len(), *dimensions);
        let mut metadata = EmbeddingsMetadata::default();
        let job = BulkJob {
            requests,
            body: |inputs| template.body(&texts[inputs]),
            read: |_, inputs: Range<usize>, response: &[u8]| {
                let EmbeddingsMetadata { model, prompt_tokens, total_tokens } =
                    block.read(inputs.start, inputs.len(), response)?;
                if metadata.model.is_empty() {
                    metadata.model = model;
                }
                metadata.prompt_tokens += prompt_tokens;
                metadata.total_tokens += total_tokens;
                Ok(())
            },
        };
        let run =
            execute(self.route(Operation::Embeddings.definition().path), job, preference, progress).await?;
        let EmbeddingsMetadata { model, prompt_tokens, total_tokens } = metadata;
        let (dimensions, values) = (block.dimensions(), block.values);
        Ok(EmbeddedVectors { values, dimensions, model, prompt_tokens, total_tokens, run })
    }

    /// Ranks texts by relevance to `query`, by TEI's `POST /rerank`. The texts of each request are in the order in
    /// which the server ranked them, and the requests in the order of the texts. Scores do not depend on the other
    /// texts, so a caller that needs a global ranking sorts by score.
    pub async fn rerank<S: AsRef<str>>(
        &self,
        query: &str,
        texts: &[S],
        options: &ScoreOptions,
        preference: &Preference,
        progress: ProgressCallback<'_>,
    ) -> Result<(Vec<RankedText>, OperationStats), ClientError> {
        let mut members = options.members();
        members.insert("query".to_owned(), query.into());
        members.insert("return_text".to_owned(), options.return_text.into());
        let template = BodyTemplate::new(members, "texts", false);
        let read = |first: usize, count: usize, response: &[u8]| {
            let mut ranks = scores::ranks(response, count)?;
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
        progress: ProgressCallback<'_>,
    ) -> Result<(Vec<Vec<LabelScore>>, OperationStats), ClientError> {
        // One list per text: two texts in one list would be a pair.
        let template = BodyTemplate::new(options.members(), "inputs", true);
        let read = |_, count, response: &[u8]| scores::classes(response, count);
        self.scored("/predict", texts, template, read, preference, progress).await
    }

    /// Sends each of `bodies` to `path` as JSON; returns the response bodies in order. Failed requests are retried, so
    /// disable retries for requests that are not idempotent.
    pub async fn batch<B: AsRef<[u8]>>(
        &self,
        method: Method,
        path: &str,
        bodies: &[B],
        preference: &Preference,
        progress: ProgressCallback<'_>,
    ) -> Result<(Vec<Vec<u8>>, OperationStats), ClientError> {
        if bodies.is_empty() {
            return Err(ClientError::Invalid(vec!["payloads: empty; give at least one".to_owned()]));
        }
        let mut responses = vec![Vec::new(); bodies.len()];
        let job = BulkJob {
            requests: (0..bodies.len()).map(|index| index..index + 1).collect(),
            body: |input: Range<usize>| bodies[input.start].as_ref().to_vec(),
            read: |number, _, response: &[u8]| {
                responses[number] = response.to_vec();
                Ok(())
            },
        };
        let route = OperationRoute { method, ..self.route(path) };
        let run = execute(route, job, preference, progress).await?;
        Ok((responses, run))
    }

    async fn scored<S: AsRef<str>, T>(
        &self,
        path: &str,
        texts: &[S],
        template: BodyTemplate,
        read: impl Fn(usize, usize, &[u8]) -> Result<Vec<T>, DecodeError>,
        preference: &Preference,
        progress: ProgressCallback<'_>,
    ) -> Result<(Vec<T>, OperationStats), ClientError> {
        let requests = split_texts(texts, preference)?;
        let mut responses: Vec<Vec<T>> = requests.iter().map(|_| Vec::new()).collect();
        let job = BulkJob {
            requests,
            body: |inputs| template.body(&texts[inputs]),
            read: |number, inputs: Range<usize>, response: &[u8]| {
                responses[number] = read(inputs.start, inputs.len(), response)?;
                Ok(())
            },
        };
        let run = execute(self.route(path), job, preference, progress).await?;
        Ok((responses.into_iter().flatten().collect(), run))
    }

    fn route<'a>(&'a self, path: &'a str) -> OperationRoute<'a> {
        OperationRoute { clients: &self.clients, endpoints: &self.endpoints, method: Method::POST, path }
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
fn split_texts<S: AsRef<str>>(
    texts: &[S],
    preference: &Preference,
) -> Result<Vec<Range<usize>>, ClientError> {
    if texts.is_empty() {
        return Err(ClientError::Invalid(vec!["texts: empty; give at least one".to_owned()]));
    }
    Ok(split::split(texts, preference.request))
}
