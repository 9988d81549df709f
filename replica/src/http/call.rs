//! One request that is computed, from its headers to its answer.
//!
//! Every route that computes goes the same way: is the replica there, how long will the caller wait, the body within its
//! limits, and then what the route itself does with a [`Call`]: parse, tokenise, compute, write. Work that grows with the
//! request (parsing a large body, writing many vectors) leaves the reactor's threads.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Response};
use replica_core::input::{Input, InputField, OverlongPolicy, TextOrPair, Truncation};
use replica_core::priority::Priority;
use replica_core::prompt::PromptChoice;
use replica_core::refusal::Refusal;
use replica_core::wire::error::Dialect;
use replica_core::wire::headers;
use tokio::task::spawn_blocking;
use tokio::time::timeout_at;

use super::RequestId;
use crate::app::{App, Service, State as Life};
use crate::batcher::{Computed, TenantKey, Unanswered, Work};
use crate::engine::Output;
use crate::events::{RequestAnswered, RequestReceived, RequestRefused, TokenizerFailed};
use crate::metrics::Route;
use crate::respond;
use crate::tokenize::{MAX_JOBS, Reading, Text, TokenizeError, Tokenized};

/// Above this, parsing takes longer (some 50 µs) than handing it to another thread.
const INLINE_BODY_BYTES: usize = 64 << 10;
/// Above this, so does writing: 16 vectors of 384 numbers.
pub(super) const INLINE_NUMBERS: usize = 16 * 384;

/// A request that the replica works on.
pub(super) struct Call {
    pub(super) app: Arc<App>,
    pub(super) id: RequestId,
    pub(super) received: Instant,
    priority: Option<HeaderValue>,
    tenant: Option<TenantKey>,
    deadline: Option<Instant>,
}

/// Above this, so does looking at token ids that were sent.
const INLINE_TOKENS: usize = 64 << 10;

/// Characters of what a chat template says against a text that are passed on; its author wrote them, with what he liked.
const TEMPLATE_WORDS: usize = 200;

/// Inputs that were tokenised.
pub(super) struct Tokens {
    inputs: Vec<Tokenized>,
    took: Duration,
    /// The elements of the longest list that was sent: what says whether somebody waits for the answer.
    listed: usize,
}

impl Tokens {
    /// These, and then those.
    pub(super) fn and(mut self, others: Tokens) -> Tokens {
        self.inputs.extend(others.inputs);
        let (took, listed) = (self.took.max(others.took), self.listed.max(others.listed));
        Tokens { inputs: self.inputs, took, listed }
    }
}

/// What a request cost, and where the time went.
#[derive(Clone, Copy)]
pub(super) struct Spent {
    pub(super) priority: Priority,
    pub(super) inputs: u64,
    pub(super) tokens: u64,
    pub(super) tokenize: Duration,
    pub(super) queue: Duration,
    pub(super) engine: Duration,
}

/// Rows that were computed.
pub(super) struct Done {
    pub(super) rows: Vec<f32>,
    /// Numbers of one row.
    pub(super) width: usize,
    /// Rows of each input.
    pub(super) counts: Vec<u32>,
    pub(super) spent: Spent,
}

/// An answer as JSON.
pub(super) struct Answer {
    pub(super) json: Vec<u8>,
    pub(super) spent: Spent,
}

/// Serves a request with what `handle` makes of it.
pub(super) async fn serve<H, F>(app: Arc<App>, id: RequestId, request: Request, handle: H) -> Response<Body>
where
    H: FnOnce(Arc<Call>, Vec<u8>) -> F,
    F: Future<Output = Result<Answer, Refusal>>,
{
    RequestReceived.record(&app.metrics);
    let received = Instant::now();
    let (route, dialect) = (Route::of(request.uri().path()), Dialect::of_path(request.uri().path()));
    let request_id = id.clone();
    let request_id = request_id.as_str();
    match within_time(&app, id, received, request, handle).await {
        Ok(Answer { json, spent }) => {
            let Spent { priority, inputs, tokens, tokenize, queue, engine } = spent;
            let mut response = respond::json(json);
            response.headers_mut().insert(headers::SERVER_TIMING, server_timing(queue, tokenize, engine));
            response.headers_mut().insert(headers::TOKENS, HeaderValue::from(tokens));
            let total = received.elapsed();
            RequestAnswered { route, priority, request_id, inputs, tokens, tokenize, queue, engine, total }
                .record(&app.metrics);
            response
        }
        Err(refusal) => {
            RequestRefused { route, request_id, refusal: &refusal }.record(&app.metrics);
            respond::refused(&refusal, dialect)
        }
    }
}

async fn within_time<H, F>(
    app: &Arc<App>,
    id: RequestId,
    received: Instant,
    request: Request,
    handle: H,
) -> Result<Answer, Refusal>
where
    H: FnOnce(Arc<Call>, Vec<u8>) -> F,
    F: Future<Output = Result<Answer, Refusal>>,
{
    match app.life() {
        Life::Ready => {}
        Life::Starting => return Err(Refusal::not_ready()),
        Life::Draining => return Err(Refusal::draining()),
    }
    let timeout = timeout_of(request.headers())?;
    let deadline = timeout.map(|timeout| received + timeout);
    let priority = request.headers().get(headers::PRIORITY).cloned();
    let tenant = request.headers().get(headers::TENANT).map(|tenant| TenantKey::new(tenant.as_bytes()));
    let call = Arc::new(Call { app: Arc::clone(app), id, received, priority, tenant, deadline });
    let answer = async {
        let (head, body) = request.into_parts();
        let body = app.bodies.read(&head.headers, body).await?;
        // The room of the body is given back with the answer: what was parsed of it lives as long.
        let _room = body.room;
        handle(call, body.bytes).await
    };
    let (Some(timeout), Some(deadline)) = (timeout, deadline) else { return answer.await };
    let answered = timeout_at(deadline.into(), answer).await;
    // Whichever notices first, the timer here or the queue, the caller hears the same.
    match answered {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(refusal)) if Instant::now() < deadline => Err(refusal),
        Ok(Err(_)) | Err(_) => Err(Refusal::deadline_exceeded(timeout)),
    }
}

impl Call {
    pub(super) fn service(&self) -> &Service {
        self.app.service().expect("a call begins when the model is there, and it never goes")
    }

    /// The deployment that answers: the one that was named, which must be served here, or else the first one.
    pub(super) fn model(&self, named: Option<String>) -> Result<String, Refusal> {
        let names = &self.app.names;
        match named {
            Some(named) if names.contains(&named) => Ok(named),
            Some(named) => Err(Refusal::model_not_found(&named, names)),
            None => Ok(names.first().cloned().unwrap_or_default()),
        }
    }

    /// How texts without a prompt are read, as the request says or else the replica's configuration.
    pub(super) fn reading(&self, truncation: Truncation, named: InputField) -> Result<Reading, Refusal> {
        let overlong = truncation.overlong(self.app.embeddings.auto_truncate);
        let most = truncation.max_tokens.map(|most| self.texts_of(most, named)).transpose()?;
        Ok(Reading { most, ..reading(overlong) })
    }

    /// The tokens of a text where `most` is the number with the special tokens around it.
    fn texts_of(&self, most: u64, named: InputField) -> Result<usize, Refusal> {
        let special = self.service().tokenizer.special_tokens();
        let limit = self.service().readable.max_input_tokens;
        let given = usize::try_from(most).unwrap_or(usize::MAX);
        if given <= special || given > limit {
            let place = format!("the number of tokens to which `{}` is cut", named.field);
            let problem = format!("is {most}, and this model reads {} to {limit}", special + 1);
            return Err(Refusal::invalid(named.field, &place, &problem, "such a number, or leave it out"));
        }
        Ok(given - special)
    }

    /// Reads the body.
    pub(super) async fn parse<T: Send + 'static>(
        &self,
        body: Vec<u8>,
        parse: impl FnOnce(&[u8]) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.off_reactor(body.len() > INLINE_BODY_BYTES, move || parse(&body)).await?
    }

    /// The tokens of texts, or those that were given.
    pub(super) async fn tokens(
        &self,
        input: Input,
        named: InputField,
        choice: &PromptChoice,
        reading: Reading,
    ) -> Result<Tokens, Refusal> {
        let lists = match input {
            Input::Texts(texts) => {
                return self.read(texts.into_iter().map(Text::One).collect(), named, reading).await;
            }
            Input::Tokens(lists) => lists,
        };
        if !matches!(choice, PromptChoice::Default) {
            return Err(Refusal::invalid(
                named.field,
                named.field,
                "is of token ids, which are computed as they stand, and a prompt is asked for",
                "texts, or the prompt's tokens with the others",
            ));
        }
        let started = Instant::now();
        let mut readable = self.service().readable;
        if let Some(most) = reading.most {
            // Of token ids the special ones are among those that are given.
            readable.max_input_tokens = most + self.service().tokenizer.special_tokens();
        }
        let check = move |(index, ids): (usize, Vec<u32>)| {
            let ids = readable.tokens(ids, reading.overlong).map_err(|why| named.refusal(index, why))?;
            Ok(Tokenized { ids: ids.into(), types: None })
        };
        let listed = lists.len();
        let large = lists.iter().map(Vec::len).sum::<usize>() > INLINE_TOKENS;
        let check_all = move || lists.into_iter().enumerate().map(check).collect::<Result<Vec<_>, Refusal>>();
        let inputs = self.off_reactor(large, check_all).await??;
        Ok(Tokens { inputs, took: started.elapsed(), listed })
    }

    /// The tokens of texts and pairs.
    pub(super) async fn read(
        &self,
        texts: Vec<Text>,
        named: InputField,
        reading: Reading,
    ) -> Result<Tokens, Refusal> {
        let (started, listed) = (Instant::now(), texts.len());
        let read = self.service().tokenizer.encode(texts, reading).await;
        let inputs = read.map_err(|error| self.unread(error, named))?;
        Ok(Tokens { inputs, took: started.elapsed(), listed })
    }

    /// Says no for a tokenizer that did.
    pub(super) fn unread(&self, error: TokenizeError, named: InputField) -> Refusal {
        match error {
            TokenizeError::Unreadable { index, why } => named.refusal(index, why),
            TokenizeError::Template { index, why } => {
                let why: String = why.chars().take(TEMPLATE_WORDS).collect();
                let problem = format!("is not taken by the model's chat template ({why})");
                Refusal::invalid(named.field, &named.path(index), &problem, "another text")
            }
            TokenizeError::Full => {
                Refusal::overloaded("too many requests wait for a tokenizer", MAX_JOBS as u64, None)
            }
            TokenizeError::Stopped => Refusal::draining(),
            TokenizeError::Broken(reason) => {
                TokenizerFailed { request_id: self.id.as_str(), reason: &reason }.record();
                Refusal::internal(self.id.as_str())
            }
        }
    }

    /// The priority of a request of so many inputs.
    pub(super) fn priority(&self, inputs: usize) -> Result<Priority, Refusal> {
        Priority::of(self.priority.as_ref().map(|priority| priority.to_str().unwrap_or("not text")), inputs)
    }

    /// What the model makes of the tokens.
    pub(super) async fn compute(&self, tokens: Tokens, output: Output) -> Result<Done, Refusal> {
        let Tokens { inputs, took, listed } = tokens;
        self.app.limits.check_request_tokens(inputs.iter().map(|input| input.ids.len() as u64).sum())?;
        let priority = self.priority(listed)?;
        let count = inputs.len() as u64;
        let work = Work { inputs, output, priority, deadline: self.deadline, tenant: self.tenant };
        let ticket = self.service().batcher.submit(work).map_err(|full| {
            let pending = format!("{} tokens are waiting", full.pending_tokens);
            Refusal::overloaded(&pending, full.max_queue_tokens, full.wait)
        })?;
        let computed = ticket.rows().await.map_err(|unanswered| match unanswered {
            Unanswered::Expired => Refusal::deadline_exceeded(self.received.elapsed()),
            Unanswered::EngineFailed => Refusal::internal(self.id.as_str()),
            Unanswered::NotFinite => Refusal::not_finite(),
            Unanswered::Stopped => Refusal::draining(),
        })?;
        let Computed { rows, width, counts, tokens, cached_inputs: _, queue, engine } = computed;
        let spent = Spent { priority, inputs: count, tokens, tokenize: took, queue, engine };
        Ok(Done { rows, width, counts, spent })
    }

    /// Writes the answer.
    pub(super) async fn write(
        &self,
        done: Done,
        write: impl FnOnce(Done) -> Vec<u8> + Send + 'static,
    ) -> Result<Answer, Refusal> {
        let spent = done.spent;
        let json = self.off_reactor(done.rows.len() > INLINE_NUMBERS, move || write(done)).await?;
        Ok(Answer { json, spent })
    }

    /// Does `work` here if it is small, else where it stops nobody.
    pub(super) async fn off_reactor<T: Send + 'static>(
        &self,
        large: bool,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        if large {
            spawn_blocking(work).await.map_err(|_| Refusal::internal(self.id.as_str()))
        } else {
            Ok(work())
        }
    }
}

/// Texts as they stand, without a prompt.
pub(super) fn reading(overlong: OverlongPolicy) -> Reading {
    Reading { prompt: None, overlong, most: None }
}

/// What the tokenizer reads.
pub(super) fn text(sequence: TextOrPair) -> Text {
    match sequence {
        TextOrPair::One(text) => Text::One(text),
        TextOrPair::Pair(first, second) => Text::Pair(first.into(), second),
    }
}

/// How long the caller is willing to wait.
fn timeout_of(headers: &HeaderMap) -> Result<Option<Duration>, Refusal> {
    let Some(given) = headers.get(headers::TIMEOUT_MS) else { return Ok(None) };
    let given = given.to_str().unwrap_or("not text");
    // A day is for ever, and keeps the sum with the clock from overflowing.
    match given.parse::<u64>() {
        Ok(millis @ 1..=86_400_000) => Ok(Some(Duration::from_millis(millis))),
        Ok(_) | Err(_) => {
            Err(Refusal::invalid_header(headers::TIMEOUT_MS, given, "whole milliseconds from 1 to 86400000"))
        }
    }
}

fn server_timing(queue: Duration, tokenize: Duration, engine: Duration) -> HeaderValue {
    let millis = |duration: Duration| duration.as_secs_f64() * 1e3;
    let (queue, tokenize, engine) = (millis(queue), millis(tokenize), millis(engine));
    let text = format!("queue;dur={queue:.3}, tokenize;dur={tokenize:.3}, engine;dur={engine:.3}");
    HeaderValue::from_str(&text).expect("letters, digits and punctuation are a header value")
}
