//! One request that needs the engine, from its headers to its response.
//!
//! Every such route takes the same steps: check the lifecycle state, read the client's timeout, read the body within
//! its limits, then run the route's own handler with an [`ApiCall`]: parse, tokenize, compute, write. Work that grows
//! with the request (parsing a large body, writing many vectors) leaves the reactor threads.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Response};
use replica_api::api::Operation;
use replica_api::headers;
use replica_api::input::{Input, InputField, OverlongPolicy, TextOrPair, Truncation};
use replica_api::priority::{self, Priority};
use replica_api::prompt::PromptChoice;
use replica_api::refusal::Refusal;
use tokio::task::spawn_blocking;
use tokio::time::timeout_at;

use crate::app::{App, Lifecycle, Service};
use crate::batcher::{ComputeError, ComputeRequest, ComputedRows, TenantKey};
use crate::engine::Output;
use crate::events::{RequestCompleted, RequestReceived, RequestRejected, TokenizerFailed};
use crate::respond;
use crate::tokenize::{EncodeOptions, MAX_JOBS, TextInput, TokenizeError, Tokenized};
use crate::trace::{RequestEnd, RequestStages, TraceStage, TracedRequest};

/// Maximum length of a request id that is taken over from a client.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// Body size above which parsing (some 50 µs) takes longer than handing it to another thread.
const INLINE_BODY_BYTES: usize = 64 << 10;
/// Number of values above which writing does: 16 vectors of 384 numbers.
pub(super) const INLINE_NUMBERS: usize = 16 * 384;

/// Identifier of a request in logs and responses: the client's, or a generated one.
#[derive(Clone)]
pub(super) struct HttpRequestId(pub(super) HeaderValue);

impl HttpRequestId {
    pub(super) fn of(headers: &HeaderMap) -> HttpRequestId {
        let given = headers.get(headers::REQUEST_ID).filter(|id| {
            let printable = id.as_bytes().iter().all(u8::is_ascii_graphic);
            printable && (1..=MAX_REQUEST_ID_BYTES).contains(&id.len())
        });
        let made = || {
            let id = format!("{:032x}", rand::random::<u128>());
            HeaderValue::from_str(&id).expect("hexadecimal digits are a header value")
        };
        HttpRequestId(given.cloned().unwrap_or_else(made))
    }

    pub(super) fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

/// Context of a request that is being processed.
pub(super) struct ApiCall {
    pub(super) app: Arc<App>,
    pub(super) id: HttpRequestId,
    pub(super) received: Instant,
    priority: Option<HeaderValue>,
    tenant: Option<TenantKey>,
    deadline: Option<Instant>,
    /// Stages of the request, if it has a trace.
    stages: Option<Arc<RequestStages>>,
}

/// Number of token ids above which checking them does.
const INLINE_TOKENS: usize = 64 << 10;

/// Limit, in characters, of a chat template's error message in a response: the template's author wrote the text.
const MAX_TEMPLATE_MESSAGE_CHARS: usize = 200;

/// Tokenized inputs.
pub(super) struct Tokens {
    inputs: Vec<Tokenized>,
    took: Duration,
    /// Elements of the longest list in the request; decides the default priority.
    listed: usize,
}

impl Tokens {
    /// Appends the inputs of `others`.
    pub(super) fn and(mut self, others: Tokens) -> Tokens {
        self.inputs.extend(others.inputs);
        let (took, listed) = (self.took.max(others.took), self.listed.max(others.listed));
        Tokens { inputs: self.inputs, took, listed }
    }
}

/// Cost of a request and the time of each stage.
#[derive(Clone, Copy)]
pub(super) struct RequestCost {
    pub(super) priority: Priority,
    pub(super) inputs: u64,
    pub(super) tokens: u64,
    pub(super) tokenize: Duration,
    pub(super) queue: Duration,
    pub(super) engine: Duration,
}

/// Rows that the engine computed.
pub(super) struct ComputeResult {
    pub(super) rows: Vec<f32>,
    /// Number of values in a row.
    pub(super) width: usize,
    /// Rows of each input.
    pub(super) counts: Vec<u32>,
    pub(super) cost: RequestCost,
}

/// JSON response.
pub(super) struct ComputedResponse {
    pub(super) json: Vec<u8>,
    pub(super) cost: RequestCost,
}

/// Serves a request with `handle`.
pub(super) async fn serve<H, F>(
    app: Arc<App>,
    id: HttpRequestId,
    operation: Operation,
    request: Request,
    handle: H,
) -> Response<Body>
where
    H: FnOnce(Arc<ApiCall>, Vec<u8>) -> F,
    F: Future<Output = Result<ComputedResponse, Refusal>>,
{
    RequestReceived.record(&app.metrics);
    let received = Instant::now();
    let dialect = operation.definition().dialect;
    let request_id = id.clone();
    let request_id = request_id.as_str();
    let mut traced = app.tracer.as_ref().map(|tracer| {
        let traceparent = request.headers().get_all(headers::TRACEPARENT).iter().map(HeaderValue::as_bytes);
        TracedRequest::begin(tracer, traceparent, (operation, request_id), received)
    });
    let stages = traced.as_ref().map(|traced| Arc::clone(traced.stages()));
    let trace = stages.as_ref().map(|stages| stages.context());
    match within_time(&app, (id, stages), received, request, handle).await {
        Ok(ComputedResponse { json, cost }) => {
            let RequestCost { priority, inputs, tokens, tokenize, queue, engine } = cost;
            let mut response = respond::json(json);
            response.headers_mut().insert(headers::SERVER_TIMING, server_timing(queue, tokenize, engine));
            response.headers_mut().insert(headers::TOKENS, HeaderValue::from(tokens));
            let total = received.elapsed();
            let end = RequestEnd::Completed { inputs, tokens, priority };
            let exported = traced.as_mut().and_then(|traced| traced.ended(end, total));
            let exemplar = exported.map(|trace| telemetry::exemplar(trace, received + total));
            RequestCompleted {
                operation,
                priority,
                request_id,
                trace,
                inputs,
                tokens,
                tokenize,
                queue,
                engine,
                total,
                exemplar,
            }
            .record(&app.metrics);
            response
        }
        Err(refusal) => {
            if let Some(traced) = &mut traced {
                traced.ended(RequestEnd::Rejected(refusal.code), received.elapsed());
            }
            RequestRejected { operation, request_id, trace, refusal: &refusal }.record(&app.metrics);
            respond::refused(&refusal, dialect)
        }
    }
}

async fn within_time<H, F>(
    app: &Arc<App>,
    (id, stages): (HttpRequestId, Option<Arc<RequestStages>>),
    received: Instant,
    request: Request,
    handle: H,
) -> Result<ComputedResponse, Refusal>
where
    H: FnOnce(Arc<ApiCall>, Vec<u8>) -> F,
    F: Future<Output = Result<ComputedResponse, Refusal>>,
{
    match app.lifecycle() {
        Lifecycle::Ready => {}
        Lifecycle::Starting => return Err(Refusal::not_ready()),
        Lifecycle::Draining => return Err(Refusal::draining()),
    }
    let timeout = timeout_of(request.headers())?;
    let deadline = timeout.map(|timeout| received + timeout);
    let priority = request.headers().get(headers::PRIORITY).cloned();
    let tenant = request.headers().get(headers::TENANT).map(|tenant| TenantKey::new(tenant.as_bytes()));
    let call = Arc::new(ApiCall { app: Arc::clone(app), id, received, priority, tenant, deadline, stages });
    let response = async {
        let (head, body) = request.into_parts();
        let body = app.bodies.read(&head.headers, body).await?;
        // The permits of the body are held until the response is complete: the parsed values live as long.
        let _permit = body.permit;
        handle(call, body.bytes).await
    };
    let (Some(timeout), Some(deadline)) = (timeout, deadline) else { return response.await };
    let outcome = timeout_at(deadline.into(), response).await;
    // The client gets the same error whether this timer or the queue expires first.
    match outcome {
        Ok(Ok(response)) => Ok(response),
        Ok(Err(refusal)) if Instant::now() < deadline => Err(refusal),
        Ok(Err(_)) | Err(_) => Err(Refusal::deadline_exceeded(timeout)),
    }
}

impl ApiCall {
    /// Records a stage that began at `began` and ends now, if the request has a trace.
    fn stage_ended(&self, stage: TraceStage, began: Instant) {
        if let Some(stages) = &self.stages {
            stages.ended(stage, began);
        }
    }

    pub(super) fn service(&self) -> &Service {
        self.app.service().expect("a call begins when the model is there, and it never goes")
    }

    /// Returns the deployment named in the request, which must be served here, or else the first one.
    pub(super) fn model(&self, named: Option<String>) -> Result<String, Refusal> {
        let names = &self.app.names;
        let model = match named {
            Some(named) if names.contains(&named) => named,
            Some(named) => return Err(Refusal::model_not_found(&named, names)),
            None => names.first().cloned().unwrap_or_default(),
        };
        if let Some(stages) = &self.stages {
            stages.named(&model);
        }
        Ok(model)
    }

    /// Returns how texts without a prompt are tokenized, by the request or else by the configuration.
    pub(super) fn options(
        &self,
        truncation: Truncation,
        named: InputField,
    ) -> Result<EncodeOptions, Refusal> {
        let overlong = truncation.overlong(self.app.embeddings.auto_truncate);
        let most = truncation.max_tokens.map(|most| self.text_limit(most, named)).transpose()?;
        Ok(EncodeOptions { most, ..unprompted(overlong) })
    }

    /// Returns the limit of tokens of a text, given the limit `most` that includes the special tokens.
    fn text_limit(&self, most: u64, named: InputField) -> Result<usize, Refusal> {
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

    /// Parses the body.
    pub(super) async fn parse<T: Send + 'static>(
        &self,
        body: Vec<u8>,
        parse: impl FnOnce(&[u8]) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        let parsed = self.off_reactor(body.len() > INLINE_BODY_BYTES, move || parse(&body)).await;
        // From the head of the request, so that the time in which its body arrived is included.
        self.stage_ended(TraceStage::Parse, self.received);
        parsed?
    }

    /// Tokenizes texts, or checks token ids of the request.
    pub(super) async fn tokens(
        &self,
        input: Input,
        named: InputField,
        choice: &PromptChoice,
        options: EncodeOptions,
    ) -> Result<Tokens, Refusal> {
        let lists = match input {
            Input::Texts(texts) => {
                return self.encode(texts.into_iter().map(TextInput::One).collect(), named, options).await;
            }
            Input::Tokens(lists) => lists,
        };
        if !matches!(choice, PromptChoice::Default) {
            return Err(Refusal::invalid(
                named.field,
                named.field,
                "contains token ids, and a prompt applies to texts only",
                "texts, or token ids that include those of the prompt",
            ));
        }
        let started = Instant::now();
        let mut readable = self.service().readable;
        if let Some(most) = options.most {
            // Token ids of a request include the special tokens.
            readable.max_input_tokens = most + self.service().tokenizer.special_tokens();
        }
        let check = move |(index, ids): (usize, Vec<u32>)| {
            let ids =
                readable.tokens(ids, options.overlong).map_err(|reason| named.refusal(index, reason))?;
            Ok(Tokenized { ids: ids.into(), types: None })
        };
        let listed = lists.len();
        let large = lists.iter().map(Vec::len).sum::<usize>() > INLINE_TOKENS;
        let check_all = move || lists.into_iter().enumerate().map(check).collect::<Result<Vec<_>, Refusal>>();
        let checked = self.off_reactor(large, check_all).await;
        self.stage_ended(TraceStage::Tokenize, started);
        let inputs = checked??;
        Ok(Tokens { inputs, took: started.elapsed(), listed })
    }

    /// Tokenizes texts and pairs.
    pub(super) async fn encode(
        &self,
        texts: Vec<TextInput>,
        named: InputField,
        options: EncodeOptions,
    ) -> Result<Tokens, Refusal> {
        let (started, listed) = (Instant::now(), texts.len());
        let read = self.service().tokenizer.encode(texts, options).await;
        self.stage_ended(TraceStage::Tokenize, started);
        let inputs = read.map_err(|error| self.tokenize_refusal(error, named))?;
        Ok(Tokens { inputs, took: started.elapsed(), listed })
    }

    /// Converts an error of the tokenizer.
    pub(super) fn tokenize_refusal(&self, error: TokenizeError, named: InputField) -> Refusal {
        match error {
            TokenizeError::Unreadable { index, reason } => named.refusal(index, reason),
            TokenizeError::Template { index, reason } => {
                let reason: String = reason.chars().take(MAX_TEMPLATE_MESSAGE_CHARS).collect();
                let problem = format!("is not taken by the model's chat template ({reason})");
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

    /// Returns the priority of a request with this many inputs.
    pub(super) fn priority(&self, inputs: usize) -> Result<Priority, Refusal> {
        priority::of_request(self.priority.as_ref().map(HeaderValue::as_bytes), inputs)
    }

    /// Computes the rows of the tokens.
    pub(super) async fn compute(&self, tokens: Tokens, output: Output) -> Result<ComputeResult, Refusal> {
        let Tokens { inputs, took, listed } = tokens;
        self.app.limits.check_request_tokens(inputs.iter().map(|input| input.ids.len() as u64).sum())?;
        let priority = self.priority(listed)?;
        let count = inputs.len() as u64;
        let work = ComputeRequest { inputs, output, priority, deadline: self.deadline, tenant: self.tenant };
        let (submitted, trace) = (Instant::now(), self.stages.as_ref().map(|stages| stages.context()));
        let ticket = self.service().batcher.submit_traced(work, trace).map_err(|full| {
            let pending = format!("{} tokens are waiting", full.pending_tokens);
            Refusal::overloaded(&pending, full.max_queue_tokens, full.wait)
        })?;
        let computed = ticket.rows().await;
        self.stage_ended(TraceStage::Compute, submitted);
        let computed = computed.map_err(|unanswered| match unanswered {
            ComputeError::Expired => Refusal::deadline_exceeded(self.received.elapsed()),
            ComputeError::EngineFailed => Refusal::internal(self.id.as_str()),
            ComputeError::NotFinite => Refusal::not_finite(),
            ComputeError::Stopped => Refusal::draining(),
        })?;
        let ComputedRows { rows, width, counts, tokens, cached_inputs, queue, engine, batches } = computed;
        if let Some(stages) = &self.stages {
            stages.computed(batches, cached_inputs);
        }
        let cost = RequestCost { priority, inputs: count, tokens, tokenize: took, queue, engine };
        Ok(ComputeResult { rows, width, counts, cost })
    }

    /// Writes the response.
    pub(super) async fn write(
        &self,
        computed: ComputeResult,
        write: impl FnOnce(ComputeResult) -> Vec<u8> + Send + 'static,
    ) -> Result<ComputedResponse, Refusal> {
        let cost = computed.cost;
        let began = Instant::now();
        let json = self.off_reactor(computed.rows.len() > INLINE_NUMBERS, move || write(computed)).await?;
        self.stage_ended(TraceStage::Write, began);
        Ok(ComputedResponse { json, cost })
    }

    /// Runs `work` inline if it is small, else on a blocking thread.
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

/// Options for texts without a prompt.
pub(super) fn unprompted(overlong: OverlongPolicy) -> EncodeOptions {
    EncodeOptions { prompt: None, overlong, most: None }
}

/// Converts a parsed sequence into the tokenizer's input.
pub(super) fn text(sequence: TextOrPair) -> TextInput {
    match sequence {
        TextOrPair::One(text) => TextInput::One(text),
        TextOrPair::Pair(first, second) => TextInput::Pair(first.into(), second),
    }
}

/// Returns the client's timeout.
fn timeout_of(headers: &HeaderMap) -> Result<Option<Duration>, Refusal> {
    let Some(given) = headers.get(headers::TIMEOUT_MS) else { return Ok(None) };
    let given = given.to_str().unwrap_or("not text");
    // The limit of one day keeps the sum with the clock from overflowing.
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
