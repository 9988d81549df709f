//! Execution of an operation: many requests, of which up to a few hundred are in flight.
//!
//! One loop owns all state: open requests, requests waiting for a retry, budgets. It passes the current time and random
//! draws to the pure decisions ([`super::retry`], [`super::budget`], [`super::endpoints`]). Attempts are futures that the
//! loop polls itself instead of tasks: dropping the operation drops them and their connections, and reading, decoding and
//! sending the next request stay on one core.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::{AbortHandle, abortable};
use futures_util::stream::FuturesUnordered;
use http::{HeaderMap, Method};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::time::{sleep_until, timeout_at};

use super::budget::{HedgeBudget, RetryBudget};
use super::endpoints::Endpoints;
use super::error::{ClientError, RequestName};
use super::fate::{self, Fate};
use super::http::{Answer, Failure, Headers, Outgoing, Wire};
use super::settings::Preference;
use super::window::Window;
use crate::scan::Wrong;

/// Progress of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Completed requests.
    pub requests_done: usize,
    /// Total requests.
    pub requests: usize,
    /// Completed inputs.
    pub inputs_done: usize,
    /// Total inputs.
    pub inputs: usize,
}

/// Statistics of one request.
#[derive(Clone, Debug, Default)]
pub struct RequestRecord {
    /// Time from the first attempt to the response.
    pub took: Duration,
    /// Number of attempts, including hedges.
    pub attempts: u32,
    /// Headers of the response.
    pub headers: Headers,
}

/// Source of request bodies and consumer of response bodies.
pub(super) trait Job {
    /// Returns the input range of each request.
    fn requests(&self) -> &[Range<usize>];
    /// Returns the body of a request.
    fn body(&self, number: usize) -> Vec<u8>;
    /// Decodes the response of a request. Called once per request, in any order.
    fn take(&mut self, number: usize, answer: &[u8]) -> Result<(), Wrong>;
}

/// Endpoints, method and path of an operation.
pub(super) struct Road<'a> {
    pub(super) wires: &'a [Wire],
    pub(super) weights: &'a [f64],
    pub(super) method: Method,
    pub(super) path: &'a str,
}

/// Request that has been started and is not complete.
struct Open {
    since: Instant,
    attempts: u32,
    /// Failed attempts that count against [`super::retry::RetryRules::retries_max`].
    failures: u32,
    /// Number of responses of the whole operation when this request was last rejected as overload.
    answers_seen: u64,
    last: usize,
    running: Vec<Attempt>,
}

struct Attempt {
    /// Number of the attempt within its request, from 1.
    attempt: u32,
    endpoint: usize,
    sent: Instant,
    handle: AbortHandle,
}

struct Done {
    number: usize,
    attempt: u32,
    endpoint: usize,
    result: Result<Answer, Failure>,
}

/// Delay before an unfundable retry is checked again. [`OperationState::failed`] prevents this case.
const UNPAID_WAIT: Duration = Duration::from_secs(1);

/// Executes `job`. `progress` is called after every response.
pub(super) async fn drive<J: Job>(
    road: Road<'_>,
    job: &mut J,
    preference: &Preference,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Vec<RequestRecord>, ClientError> {
    let headers = preference.check().map_err(ClientError::Invalid)?;
    let outgoing = outgoing(&road, &headers)?;
    let start = Instant::now();
    let requests = job.requests().len();
    let inputs = job.requests().last().map_or(0, |last| last.end);
    let mut operation = Operation {
        preference,
        deadline: preference.total_timeout.map(|total| start + total),
        endpoints: Endpoints::new(road.weights.iter().copied()),
        retries: RetryBudget::new(preference.retry_share, start),
        hedges: HedgeBudget::new(preference.hedge_share),
        window: Window::new(preference.in_flight_max),
        running: 0,
        answers: 0,
        chance: SmallRng::from_os_rng(),
        next: 0,
        requests,
        open: BTreeMap::new(),
        again: BinaryHeap::new(),
        late: VecDeque::new(),
    };
    let mut attempts = FuturesUnordered::new();
    let mut spare: Vec<Vec<u8>> = Vec::new();
    let mut records = vec![RequestRecord::default(); requests];
    let mut done = Progress { requests_done: 0, requests, inputs_done: 0, inputs };
    while done.requests_done < requests {
        let now = Instant::now();
        if operation.deadline.is_some_and(|deadline| deadline <= now) {
            let total = preference.total_timeout.unwrap_or_default();
            return Err(ClientError::OutOfTime { total, done: done.requests_done, requests });
        }
        while let Some((number, endpoint)) = operation.launch(now) {
            let body = job.body(number);
            let buffer = spare.pop().unwrap_or_default();
            let until = operation.until(now);
            let (wire, out) = (&road.wires[endpoint], &outgoing[endpoint]);
            let attempt = operation.attempts(number) + 1;
            let (sending, handle) = abortable(async move {
                let sent = timeout_at(until.into(), wire.send(out, body, buffer)).await;
                Done { number, attempt, endpoint, result: sent.unwrap_or(Err(Failure::TimedOut)) }
            });
            operation.launched(number, Attempt { attempt, endpoint, sent: now, handle });
            attempts.push(sending);
        }
        let due = operation.due();
        let ended = tokio::select! {
            biased;
            Some(ended) = attempts.next(), if !attempts.is_empty() => ended.ok(),
            () = sleep_until(due.unwrap_or(now).into()), if due.is_some() => None,
        };
        // `None`: a timer expired, or an aborted attempt was removed.
        let Some(Done { number, attempt, endpoint, result }) = ended else { continue };
        let now = Instant::now();
        match result {
            Ok(answer) => {
                let Open { since, attempts, .. } = operation.answered(number, attempt, endpoint, now);
                job.take(number, answer.body()).map_err(|wrong| {
                    let request = name(&road, job.requests(), number, endpoint, attempts);
                    ClientError::Wrong { request, wrong }
                })?;
                records[number] = RequestRecord { took: now - since, attempts, headers: answer.headers };
                spare.push(answer.buffer);
                done.requests_done += 1;
                done.inputs_done += job.requests()[number].len();
                progress(done);
            }
            // The operation's own timeout is reported at the top of the loop; it is more informative than the attempt's.
            Err(Failure::TimedOut) if operation.deadline.is_some_and(|deadline| deadline <= now) => {}
            Err(failure) => {
                if let Some(attempts) = operation.failed(number, attempt, endpoint, &failure, now) {
                    let request = name(&road, job.requests(), number, endpoint, attempts);
                    return Err(ClientError::Failed { request, failure });
                }
            }
        }
    }
    Ok(records)
}

fn outgoing(road: &Road<'_>, headers: &HeaderMap) -> Result<Vec<Outgoing>, ClientError> {
    let of = |wire: &Wire| wire.outgoing(&road.method, road.path, headers);
    road.wires.iter().map(of).collect::<Result<_, _>>().map_err(|problem| ClientError::Invalid(vec![problem]))
}

fn name(
    road: &Road<'_>,
    requests: &[Range<usize>],
    number: usize,
    endpoint: usize,
    attempts: u32,
) -> RequestName {
    let endpoint = road.wires[endpoint].name();
    RequestName { number, inputs: requests[number].clone(), endpoint, attempts }
}

struct Operation<'a> {
    preference: &'a Preference,
    deadline: Option<Instant>,
    endpoints: Endpoints,
    retries: RetryBudget,
    hedges: HedgeBudget,
    window: Window,
    /// Attempts in flight.
    running: usize,
    answers: u64,
    chance: SmallRng,
    /// First request that has not been started.
    next: usize,
    requests: usize,
    open: BTreeMap<usize, Open>,
    /// Requests that wait for a retry, by due time.
    again: BinaryHeap<Reverse<(Instant, usize)>>,
    /// Times at which first attempts become eligible for a hedge. Ordered, because the delay is the same for all.
    late: VecDeque<(Instant, usize)>,
}

impl Operation<'_> {
    /// Returns the next attempt to send now, and its endpoint.
    fn launch(&mut self, now: Instant) -> Option<(usize, usize)> {
        let number = self.hedge(now).or_else(|| {
            let may = self.running < self.window.size();
            may.then(|| self.retry(now).or_else(|| self.begin())).flatten()
        })?;
        let last = self.open.get(&number).map(|open| open.last);
        Some((number, self.endpoints.pick(now, last)))
    }

    fn retry(&mut self, now: Instant) -> Option<usize> {
        loop {
            let Reverse((at, number)) = *self.again.peek()?;
            if at > now {
                return None;
            }
            self.again.pop();
            match self.retries.withdraw(now) {
                Ok(()) => return Some(number),
                // `failed` admits only requests with a share above 0, so time earns a retry.
                Err(wait) => self.again.push(Reverse((now + wait.unwrap_or(UNPAID_WAIT), number))),
            }
        }
    }

    /// Hedges are sent in addition to the concurrency window, because their budget is small; but not while it is reduced.
    fn hedge(&mut self, now: Instant) -> Option<usize> {
        if self.window.is_cut() {
            return None;
        }
        loop {
            let (at, number) = *self.late.front()?;
            if at > now {
                return None;
            }
            self.late.pop_front();
            let alone =
                self.open.get(&number).is_some_and(|open| open.attempts == 1 && open.running.len() == 1);
            if alone && self.hedges.withdraw() {
                return Some(number);
            }
        }
    }

    fn begin(&mut self) -> Option<usize> {
        // Waiting requests count: after a `retry-after` the client must not send others in place of the delayed ones.
        let may = self.next < self.requests && self.open.len() < self.preference.in_flight_max;
        self.next += usize::from(may);
        may.then(|| self.next - 1)
    }

    fn until(&self, now: Instant) -> Instant {
        let until = now + self.preference.attempt_timeout;
        self.deadline.map_or(until, |deadline| deadline.min(until))
    }

    fn attempts(&self, number: usize) -> u32 {
        self.open.get(&number).map_or(0, |open| open.attempts)
    }

    fn launched(&mut self, number: usize, attempt: Attempt) {
        let (now, answers_seen) = (attempt.sent, self.answers);
        let new = || Open {
            since: now,
            attempts: 0,
            failures: 0,
            answers_seen,
            last: attempt.endpoint,
            running: Vec::new(),
        };
        let open = self.open.entry(number).or_insert_with(new);
        self.running += 1;
        open.attempts = attempt.attempt;
        open.last = attempt.endpoint;
        open.running.push(attempt);
        if let (1, Some(after)) = (open.attempts, self.preference.hedge_after) {
            self.late.push_back((now + after, number));
        }
    }

    /// Returns the next time at which the loop has work without a response.
    fn due(&self) -> Option<Instant> {
        // When no attempt may start, only a response can free the window, so retries are not due earlier.
        let may = self.running < self.window.size();
        let again = self.again.peek().map(|Reverse((at, _))| *at).filter(|_| may);
        let late = self.late.front().map(|(at, _)| *at).filter(|_| !self.window.is_cut());
        [again, late, self.deadline].into_iter().flatten().min()
    }

    /// Handles a response to `number` and aborts its other attempts.
    fn answered(&mut self, number: usize, attempt: u32, endpoint: usize, now: Instant) -> Open {
        self.endpoints.ended(endpoint, true, now);
        self.retries.succeeded();
        self.hedges.succeeded();
        self.window.answered();
        self.answers += 1;
        let mut open = self.open.remove(&number).expect("an attempt belongs to an open request");
        self.running -= open.running.len();
        for other in open.running.drain(..).filter(|other| other.attempt != attempt) {
            other.handle.abort();
            self.endpoints.taken_back(other.endpoint);
        }
        open
    }

    /// Handles a failed attempt at `number`. Returns the number of attempts if the request failed for good.
    fn failed(
        &mut self,
        number: usize,
        attempt: u32,
        endpoint: usize,
        failure: &Failure,
        now: Instant,
    ) -> Option<u32> {
        self.endpoints.ended(endpoint, !fate::shuns(failure), now);
        let chance = self.chance.random();
        let open = self.open.get_mut(&number).expect("an attempt belongs to an open request");
        self.running -= 1;
        let ended = open.running.iter().position(|running| running.attempt == attempt);
        let sent = ended.map_or(now, |place| open.running.swap_remove(place).sent);
        // An overloaded server that completed other requests since this one's last rejection makes progress, so the rejection
        // does not count as a failure.
        let busy = fate::is_busy(failure);
        let goes_on = busy && self.answers > open.answers_seen;
        open.answers_seen = self.answers;
        open.failures += u32::from(!goes_on || open.failures == 0);
        if busy {
            self.window.refused(sent, now);
        }
        if !open.running.is_empty() {
            // The original attempt or its hedge is still in flight and serves as the retry.
            return None;
        }
        let in_time = |at: &Instant| self.deadline.is_none_or(|deadline| *at < deadline);
        match fate::after(failure, open.failures, &self.preference.retries, now, chance) {
            Fate::RetryAt(at) if self.preference.retry_share > 0.0 && in_time(&at) => {
                self.again.push(Reverse((at, number)));
                None
            }
            Fate::RetryAt(_) | Fate::GiveUp => Some(open.attempts),
        }
    }
}
