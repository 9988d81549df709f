//! Execution of an operation: many requests, of which up to a few hundred are in flight.
//!
//! One loop owns all state of its operation: open requests, requests waiting for a retry, budgets. The load and the
//! ejections of the endpoints are shared by the operations of a client. The loop passes the current time and
//! random draws to the pure decisions ([`super::retry`], [`replica_api::retry`], [`super::endpoints`]). Attempts are
//! futures that the loop polls itself instead of tasks: dropping the operation drops them and their connections, and
//! reading, decoding and sending the next request stay on one core.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::{AbortHandle, abortable};
use futures_util::stream::FuturesUnordered;
use http::{HeaderMap, Method};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use replica_api::retry::{HedgeBudget, RetryBudget};
use tokio::time::{sleep_until, timeout_at};

use super::endpoints::EndpointSelector;
use super::error::{ClientError, FailedRequest};
use super::http::{EndpointClient, HeaderLines, HttpAttemptError, HttpResponse, RequestTemplate};
use super::retry::{self, RetryDecision};
use super::settings::Preference;
use super::window::ConcurrencyWindow;
use crate::scan::DecodeError;

/// Progress of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationProgress {
    /// Completed requests.
    pub requests_done: usize,
    /// Total requests.
    pub requests: usize,
    /// Completed inputs.
    pub inputs_done: usize,
    /// Total inputs.
    pub inputs: usize,
}

/// Statistics of an operation.
#[derive(Clone, Debug, Default)]
pub struct OperationStats {
    /// Wall-clock time of the operation.
    pub elapsed: Duration,
    /// Statistics of its requests, in order.
    pub requests: Vec<RequestRecord>,
}

/// Statistics of one request.
#[derive(Clone, Debug, Default)]
pub struct RequestRecord {
    /// Time from the first attempt to the response.
    pub elapsed: Duration,
    /// Number of attempts, including hedges.
    pub attempts: u32,
    /// Headers of the response.
    pub headers: HeaderLines,
}

/// Content of an operation: its requests, the source of their bodies and the consumer of the responses.
pub(super) struct BulkJob<B, R> {
    /// Input range of each request.
    pub(super) requests: Vec<Range<usize>>,
    /// Returns the body of a request with these inputs.
    pub(super) body: B,
    /// Decodes the response of a request, by its number and inputs. Called once per request, in any order.
    pub(super) read: R,
}

/// Endpoints, method and path of an operation.
pub(super) struct OperationRoute<'a> {
    pub(super) clients: &'a [EndpointClient],
    pub(super) endpoints: &'a Mutex<EndpointSelector>,
    pub(super) method: Method,
    pub(super) path: &'a str,
}

/// Request that has been started and is not complete.
struct OpenRequest {
    since: Instant,
    attempts: u32,
    /// Failed attempts that count against [`super::retry::RetryRules::retries_max`].
    failures: u32,
    /// Number of responses of the whole operation when this request was last rejected as overload.
    responses_at_rejection: u64,
    last: usize,
    /// Endpoint to which a response has redirected the request.
    redirected: Option<usize>,
    running: Vec<AbortableAttempt>,
}

struct AbortableAttempt {
    /// Number of the attempt within its request, from 1.
    attempt: u32,
    endpoint: usize,
    sent: Instant,
    handle: AbortHandle,
}

struct FinishedAttempt {
    number: usize,
    attempt: u32,
    endpoint: usize,
    result: Result<HttpResponse, HttpAttemptError>,
}

/// Executes `job`. `progress` is called after every response.
pub(super) async fn execute<B, R>(
    route: OperationRoute<'_>,
    mut job: BulkJob<B, R>,
    preference: &Preference,
    progress: &mut (dyn FnMut(OperationProgress) + Send),
) -> Result<OperationStats, ClientError>
where
    B: Fn(Range<usize>) -> Vec<u8>,
    R: FnMut(usize, Range<usize>, &[u8]) -> Result<(), DecodeError>,
{
    let headers = preference.check().map_err(ClientError::Invalid)?;
    let outgoing = outgoing(&route, &headers)?;
    let start = Instant::now();
    let requests = job.requests.len();
    let inputs = job.requests.last().map_or(0, |last| last.end);
    let mut operation = OperationState {
        preference,
        deadline: preference.total_timeout.map(|total| start + total),
        endpoints: route.endpoints,
        retries: RetryBudget::with_share(preference.retry_share, start),
        hedges: HedgeBudget::with_share(preference.hedge_share),
        window: ConcurrencyWindow::new(preference.in_flight_max),
        running: 0,
        responses: 0,
        rng: SmallRng::from_os_rng(),
        next: 0,
        requests,
        open: BTreeMap::new(),
        retry_queue: BinaryHeap::new(),
        redirects: VecDeque::new(),
        hedge_queue: VecDeque::new(),
    };
    let mut attempts = FuturesUnordered::new();
    let mut spare: Vec<Vec<u8>> = Vec::new();
    let mut records = vec![RequestRecord::default(); requests];
    let mut done = OperationProgress { requests_done: 0, requests, inputs_done: 0, inputs };
    while done.requests_done < requests {
        let now = Instant::now();
        if operation.deadline.is_some_and(|deadline| deadline <= now) {
            let total = preference.total_timeout.unwrap_or_default();
            return Err(ClientError::Timeout { total, done: done.requests_done, requests });
        }
        while let Some((number, endpoint)) = operation.next_attempt(now) {
            let body = (job.body)(job.requests[number].clone());
            let buffer = spare.pop().unwrap_or_default();
            let until = operation.attempt_deadline(now);
            let (client, out) = (&route.clients[endpoint], &outgoing[endpoint]);
            let attempt = operation.attempts(number) + 1;
            let (sending, handle) = abortable(async move {
                let sent = timeout_at(until.into(), client.send(out, body, buffer)).await;
                FinishedAttempt {
                    number,
                    attempt,
                    endpoint,
                    result: sent.unwrap_or(Err(HttpAttemptError::Timeout)),
                }
            });
            operation.started(number, AbortableAttempt { attempt, endpoint, sent: now, handle });
            attempts.push(sending);
        }
        let next_deadline = operation.next_deadline();
        let finished = tokio::select! {
            biased;
            Some(finished) = attempts.next(), if !attempts.is_empty() => finished.ok(),
            () = sleep_until(next_deadline.unwrap_or(now).into()), if next_deadline.is_some() => None,
        };
        // `None`: a timer expired, or an aborted attempt was removed.
        let Some(FinishedAttempt { number, attempt, endpoint, result }) = finished else { continue };
        let now = Instant::now();
        match result {
            Ok(response) => {
                let OpenRequest { since, attempts, .. } = operation.completed(number, attempt, endpoint, now);
                (job.read)(number, job.requests[number].clone(), response.body()).map_err(|error| {
                    let request = name(&route, &job.requests, number, endpoint, attempts);
                    ClientError::InvalidResponse { request, error }
                })?;
                records[number] = RequestRecord { elapsed: now - since, attempts, headers: response.headers };
                spare.push(response.buffer);
                done.requests_done += 1;
                done.inputs_done += job.requests[number].len();
                progress(done);
            }
            // The operation's own timeout is reported at the top of the loop; it is more informative than the
            // attempt's.
            Err(HttpAttemptError::Timeout) if operation.deadline.is_some_and(|deadline| deadline <= now) => {}
            Err(HttpAttemptError::Redirected { location, message }) => {
                // Only to an endpoint of the caller: the API key must not be sent to a host that a response names.
                let target = route.clients.iter().position(|client| client.serves(&location, route.path));
                if !target.is_some_and(|target| operation.redirected(number, attempt, target, now)) {
                    let request = name(&route, &job.requests, number, endpoint, attempt);
                    let failure = HttpAttemptError::Redirected { location, message };
                    return Err(ClientError::Failed { request, failure });
                }
            }
            Err(failure) => {
                if let Some(attempts) = operation.failed(number, attempt, endpoint, &failure, now) {
                    let request = name(&route, &job.requests, number, endpoint, attempts);
                    return Err(ClientError::Failed { request, failure });
                }
            }
        }
    }
    Ok(OperationStats { elapsed: start.elapsed(), requests: records })
}

fn outgoing(route: &OperationRoute<'_>, headers: &HeaderMap) -> Result<Vec<RequestTemplate>, ClientError> {
    let of = |client: &EndpointClient| client.outgoing(&route.method, route.path, headers);
    route
        .clients
        .iter()
        .map(of)
        .collect::<Result<_, _>>()
        .map_err(|problem| ClientError::Invalid(vec![problem]))
}

fn name(
    route: &OperationRoute<'_>,
    requests: &[Range<usize>],
    number: usize,
    endpoint: usize,
    attempts: u32,
) -> FailedRequest {
    let endpoint = route.clients[endpoint].name();
    FailedRequest { number, inputs: requests[number].clone(), endpoint, attempts }
}

struct OperationState<'a> {
    preference: &'a Preference,
    deadline: Option<Instant>,
    endpoints: &'a Mutex<EndpointSelector>,
    retries: RetryBudget,
    hedges: HedgeBudget,
    window: ConcurrencyWindow,
    /// Attempts in flight.
    running: usize,
    responses: u64,
    rng: SmallRng,
    /// First request that has not been started.
    next: usize,
    requests: usize,
    open: BTreeMap<usize, OpenRequest>,
    /// Requests that wait for a retry, by due time.
    retry_queue: BinaryHeap<Reverse<(Instant, usize)>>,
    /// Requests that were redirected and are sent at once.
    redirects: VecDeque<usize>,
    /// Times at which first attempts become eligible for a hedge. Ordered, because the delay is the same for all.
    hedge_queue: VecDeque<(Instant, usize)>,
}

impl Drop for OperationState<'_> {
    /// Attempts in flight end with the operation.
    fn drop(&mut self) {
        for attempt in self.open.values().flat_map(|open| &open.running) {
            self.endpoints().aborted(attempt.endpoint);
        }
    }
}

impl OperationState<'_> {
    fn endpoints(&self) -> MutexGuard<'_, EndpointSelector> {
        self.endpoints.lock().expect("no panic while the lock is held")
    }

    /// Returns the next attempt to send now, and its endpoint.
    fn next_attempt(&mut self, now: Instant) -> Option<(usize, usize)> {
        let redirected = self.redirects.pop_front();
        let number = redirected.or_else(|| self.hedge(now)).or_else(|| {
            let has_capacity = self.running < self.window.size();
            has_capacity.then(|| self.retry(now).or_else(|| self.start_next())).flatten()
        })?;
        let open = self.open.get(&number);
        if let Some(endpoint) = open.and_then(|open| open.redirected) {
            self.endpoints().start(endpoint);
            return Some((number, endpoint));
        }
        let last = open.map(|open| open.last);
        Some((number, self.endpoints().pick(now, last)))
    }

    /// Sends a redirected request to endpoint `target`, also its retries. Returns false if it was redirected before.
    fn redirected(&mut self, number: usize, attempt: u32, target: usize, now: Instant) -> bool {
        let open = self.open.get_mut(&number).expect("an attempt belongs to an open request");
        if open.redirected.is_some() {
            return false;
        }
        open.redirected = Some(target);
        self.running -= 1;
        let finished = open.running.iter().position(|running| running.attempt == attempt);
        let endpoint = finished.map(|index| open.running.swap_remove(index).endpoint);
        if let Some(endpoint) = endpoint {
            self.endpoints().finished(endpoint, true, now);
        }
        self.redirects.push_back(number);
        true
    }

    fn retry(&mut self, now: Instant) -> Option<usize> {
        loop {
            let Reverse((at, number)) = *self.retry_queue.peek()?;
            if at > now {
                return None;
            }
            self.retry_queue.pop();
            if self.retries.withdraw(now) {
                return Some(number);
            }
            // Delayed and not abandoned: `failed` admits only requests with a share above 0, so time earns a retry.
            self.retry_queue.push(Reverse((now + self.retries.time_to_next(), number)));
        }
    }

    /// Hedges are sent in addition to the concurrency window, because their budget is small; but not while it is
    /// reduced.
    fn hedge(&mut self, now: Instant) -> Option<usize> {
        if self.window.is_reduced() {
            return None;
        }
        loop {
            let (at, number) = *self.hedge_queue.front()?;
            if at > now {
                return None;
            }
            self.hedge_queue.pop_front();
            let alone =
                self.open.get(&number).is_some_and(|open| open.attempts == 1 && open.running.len() == 1);
            if alone && self.hedges.withdraw() {
                return Some(number);
            }
        }
    }

    fn start_next(&mut self) -> Option<usize> {
        // Waiting requests count: after a `retry-after` the client must not send others in place of the delayed ones.
        let has_capacity = self.next < self.requests && self.open.len() < self.preference.in_flight_max;
        self.next += usize::from(has_capacity);
        has_capacity.then(|| self.next - 1)
    }

    /// Returns the deadline of an attempt that starts now.
    fn attempt_deadline(&self, now: Instant) -> Instant {
        let end = now + self.preference.attempt_timeout;
        self.deadline.map_or(end, |deadline| deadline.min(end))
    }

    fn attempts(&self, number: usize) -> u32 {
        self.open.get(&number).map_or(0, |open| open.attempts)
    }

    fn started(&mut self, number: usize, attempt: AbortableAttempt) {
        let (now, responses_at_rejection) = (attempt.sent, self.responses);
        let new = || OpenRequest {
            since: now,
            attempts: 0,
            failures: 0,
            responses_at_rejection,
            last: attempt.endpoint,
            redirected: None,
            running: Vec::new(),
        };
        let open = self.open.entry(number).or_insert_with(new);
        self.running += 1;
        open.attempts = attempt.attempt;
        open.last = attempt.endpoint;
        open.running.push(attempt);
        if let (1, Some(after)) = (open.attempts, self.preference.hedge_after) {
            self.hedge_queue.push_back((now + after, number));
        }
    }

    /// Returns the next time at which the loop has work without a response.
    fn next_deadline(&self) -> Option<Instant> {
        // When no attempt may start, only a response can free the window, so retries are not due earlier.
        let has_capacity = self.running < self.window.size();
        let next_retry = self.retry_queue.peek().map(|Reverse((at, _))| *at).filter(|_| has_capacity);
        let next_hedge = self.hedge_queue.front().map(|(at, _)| *at).filter(|_| !self.window.is_reduced());
        [next_retry, next_hedge, self.deadline].into_iter().flatten().min()
    }

    /// Handles a response to `number` and aborts its other attempts.
    fn completed(&mut self, number: usize, attempt: u32, endpoint: usize, now: Instant) -> OpenRequest {
        self.endpoints().finished(endpoint, true, now);
        self.retries.succeeded();
        self.hedges.deposit();
        self.window.succeeded();
        self.responses += 1;
        let mut open = self.open.remove(&number).expect("an attempt belongs to an open request");
        self.running -= open.running.len();
        for other in open.running.drain(..).filter(|other| other.attempt != attempt) {
            other.handle.abort();
            self.endpoints().aborted(other.endpoint);
        }
        open
    }

    /// Handles a failed attempt at `number`. Returns the number of attempts if the request failed for good.
    fn failed(
        &mut self,
        number: usize,
        attempt: u32,
        endpoint: usize,
        failure: &HttpAttemptError,
        now: Instant,
    ) -> Option<u32> {
        self.endpoints().finished(endpoint, !retry::is_endpoint_failure(failure), now);
        let draw = self.rng.random();
        let open = self.open.get_mut(&number).expect("an attempt belongs to an open request");
        self.running -= 1;
        let finished = open.running.iter().position(|running| running.attempt == attempt);
        let sent = finished.map_or(now, |index| open.running.swap_remove(index).sent);
        // An overloaded server that completed other requests since this one's last rejection makes progress, so the
        // rejection does not count as a failure.
        let overloaded = retry::is_overload(failure);
        let makes_progress = overloaded && self.responses > open.responses_at_rejection;
        open.responses_at_rejection = self.responses;
        open.failures += u32::from(!makes_progress || open.failures == 0);
        if overloaded {
            self.window.rejected(sent, now);
        }
        if !open.running.is_empty() {
            // The original attempt or its hedge is still in flight and serves as the retry.
            return None;
        }
        let in_time = |at: &Instant| self.deadline.is_none_or(|deadline| *at < deadline);
        match retry::decide(failure, open.failures, &self.preference.retries, now, draw) {
            RetryDecision::RetryAt(at) if self.preference.retry_share > 0.0 && in_time(&at) => {
                self.retry_queue.push(Reverse((at, number)));
                None
            }
            RetryDecision::RetryAt(_) | RetryDecision::GiveUp => Some(open.attempts),
        }
    }
}
