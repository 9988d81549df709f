//! Responses that wait for rows.
//!
//! A pending response holds the rows of all inputs of a request; the missing ones are filled in any order, by two
//! threads, and the thread that fills the last one sends the response. Each has a lock of its own, so that copying a
//! large response delays its own caller only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use supervision::Mutex;

use replica_core::batch::{BatchRequestId, RowOwner};
use telemetry::context::TraceContext;
use tokio::sync::oneshot;

use crate::trace::{BatchTrace, push_batch};

/// Rows of one request.
#[derive(Debug)]
pub struct ComputedRows {
    /// Rows, concatenated in the order of the inputs.
    pub rows: Vec<f32>,
    /// Number of values in a row.
    pub width: usize,
    /// Rows of each input: 1, or its number of tokens.
    pub counts: Vec<u32>,
    /// Tokens of all inputs.
    pub tokens: u64,
    /// Inputs whose rows were in the cache.
    pub cached_inputs: u64,
    /// Total time in the queue.
    pub queue: Duration,
    /// Total compute time of the batches with inputs of this request.
    pub engine: Duration,
    /// These batches, if the request has a trace.
    pub(crate) batches: Vec<Arc<BatchTrace>>,
}

/// Reason why a request has no rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeError {
    /// The deadline passed before the rows were complete.
    Expired,
    /// The engine failed; an event reports the reason.
    EngineFailed,
    /// The engine computed NaN or an infinity.
    NotFinite,
    /// The batcher was stopped.
    Stopped,
}

/// Response of one request, not yet sent.
pub(super) struct PendingResponse {
    rows: Vec<f32>,
    width: usize,
    counts: Vec<u32>,
    /// Offset in `rows`, in values, at which the rows of each missing input begin.
    missing: Vec<usize>,
    missing_count: usize,
    tokens: u64,
    cached: u64,
    enqueued_at: Instant,
    engine: Duration,
    /// Span of the request, if it has a trace.
    trace: Option<TraceContext>,
    batches: Vec<Arc<BatchTrace>>,
    sender: oneshot::Sender<Result<ComputedRows, ComputeError>>,
}

impl PendingResponse {
    pub(super) fn new(
        width: usize,
        enqueued_at: Instant,
        trace: Option<TraceContext>,
        sender: oneshot::Sender<Result<ComputedRows, ComputeError>>,
    ) -> PendingResponse {
        PendingResponse {
            rows: Vec::new(),
            width,
            counts: Vec::new(),
            missing: Vec::new(),
            missing_count: 0,
            tokens: 0,
            cached: 0,
            enqueued_at,
            engine: Duration::ZERO,
            trace,
            batches: Vec::new(),
            sender,
        }
    }

    fn push(&mut self, tokens: usize, rows: usize) {
        self.tokens += tokens as u64;
        self.counts.push(u32::try_from(rows).expect("an input has a limit far below four billion tokens"));
    }

    /// Appends an input of `tokens` tokens whose rows are cached.
    pub(super) fn push_cached(&mut self, tokens: usize, rows: usize, cached: &[f32]) {
        assert_eq!(cached.len(), rows * self.width, "cached rows are those of the input");
        self.push(tokens, rows);
        self.cached += 1;
        self.rows.extend_from_slice(cached);
    }

    /// Appends an input of `tokens` tokens whose rows have to be computed.
    pub(super) fn push_missing(&mut self, tokens: usize, rows: usize) {
        self.push(tokens, rows);
        self.missing.push(self.rows.len());
        self.missing_count += 1;
        self.rows.resize(self.rows.len() + rows * self.width, 0.0);
    }

    /// Returns the number of inputs whose rows were cached.
    pub(super) fn cached(&self) -> u64 {
        self.cached
    }

    /// Sends the response.
    pub(super) fn send(self, now: Instant) {
        let PendingResponse { rows, width, counts, tokens, cached, enqueued_at, engine, .. } = self;
        let (batches, sender) = (self.batches, self.sender);
        let queue = now.saturating_duration_since(enqueued_at).saturating_sub(engine);
        // The send fails if the caller has just disconnected; its rows are dropped.
        let _ = sender.send(Ok(ComputedRows {
            rows,
            width,
            counts,
            tokens,
            cached_inputs: cached,
            queue,
            engine,
            batches,
        }));
    }
}

/// Pending responses of all requests.
#[derive(Default)]
pub(super) struct PendingResponses(Mutex<BTreeMap<BatchRequestId, Arc<Mutex<Option<PendingResponse>>>>>);

impl PendingResponses {
    pub(super) fn insert(&self, request: BatchRequestId, response: PendingResponse) {
        self.0.lock().insert(request, Arc::new(Mutex::independent(Some(response))));
    }

    /// Removes and returns a response, unless it was sent.
    pub(super) fn take(&self, request: BatchRequestId) -> Option<PendingResponse> {
        let response = self.0.lock().remove(&request)?;
        response.lock().take()
    }

    /// Completes a request with an error, unless its response was sent.
    pub(super) fn fail(&self, request: BatchRequestId, error: ComputeError) {
        if let Some(response) = self.take(request) {
            // As above: the caller may have disconnected.
            let _ = response.sender.send(Err(error));
        }
    }

    /// Fills the rows of one missing input.
    pub(super) fn fill(&self, owner: RowOwner, rows: &[f32]) {
        self.change(owner.request, |response| {
            let begin = response.missing[owner.index];
            response.rows[begin..begin + rows.len()].copy_from_slice(rows);
            response.missing_count -= 1;
        });
    }

    /// Returns the spans of those of the requests that have a trace.
    pub(super) fn traces(&self, requests: &BTreeSet<BatchRequestId>) -> Vec<TraceContext> {
        let mut traces = Vec::new();
        for request in requests {
            self.change(*request, |response| traces.extend(response.trace));
        }
        traces
    }

    /// Adds the compute time `busy` of a batch, and its record for traces, to the response, and sends the response if it is
    /// complete.
    pub(super) fn filled(
        &self,
        request: BatchRequestId,
        busy: Duration,
        batch: Option<&Arc<BatchTrace>>,
        now: Instant,
    ) {
        let mut complete = false;
        self.change(request, |response| {
            response.engine += busy;
            if let Some(batch) = batch.filter(|_| response.trace.is_some()) {
                push_batch(&mut response.batches, batch);
            }
            complete = response.missing_count == 0;
        });
        if complete && let Some(response) = self.take(request) {
            response.send(now);
        }
    }

    /// Drops all pending responses.
    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }

    /// Applies `change`. Does nothing if the request was cancelled or expired while its inputs were computed.
    fn change(&self, request: BatchRequestId, change: impl FnOnce(&mut PendingResponse)) {
        let Some(response) = self.0.lock().get(&request).map(Arc::clone) else { return };
        if let Some(response) = response.lock().as_mut() {
            change(response);
        }
    }
}
