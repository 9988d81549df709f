//! An operation: many requests, of which a few hundred are open at any time.
//!
//! One loop owns everything: which requests are open, what waits for another attempt, which budget pays. It asks the pure
//! decisions ([`super::fate`], [`super::budget`], [`super::endpoints`]) with the time and chance in its hand. Attempts are
//! futures that it polls itself, and no tasks: whoever drops the operation drops them, and their connections with them, and
//! reading, decoding and the next request stay on one core.

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

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Requests that were answered.
    pub requests_done: usize,
    /// Of how many.
    pub requests: usize,
    /// Inputs that were answered.
    pub inputs_done: usize,
    /// Of how many.
    pub inputs: usize,
}

/// How one request went.
#[derive(Clone, Debug, Default)]
pub struct RequestRecord {
    /// From its first attempt to its answer.
    pub took: Duration,
    /// How many attempts there were, hedges included.
    pub attempts: u32,
    /// The headers of its answer.
    pub headers: Headers,
}

/// What is asked, and what is done with the answers.
pub(super) trait Job {
    /// The inputs of each request.
    fn requests(&self) -> &[Range<usize>];
    /// The body of a request.
    fn body(&self, number: usize) -> Vec<u8>;
    /// The answer to a request; each comes once, in any order.
    fn take(&mut self, number: usize, answer: &[u8]) -> Result<(), Wrong>;
}

/// Where requests go.
pub(super) struct Road<'a> {
    pub(super) wires: &'a [Wire],
    pub(super) weights: &'a [f64],
    pub(super) method: Method,
    pub(super) path: &'a str,
}

/// A request that is open.
struct Open {
    since: Instant,
    attempts: u32,
    /// Attempts that count against [`super::fate::RetryRules::retries_max`].
    failures: u32,
    /// How many answers the operation had when this request was last refused.
    answers_seen: u64,
    last: usize,
    running: Vec<Attempt>,
}

struct Attempt {
    /// Which of its request, from 1.
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

/// When an attempt is looked at again that nothing will pay for, which [`Operation::failed`] does not let happen.
const UNPAID_WAIT: Duration = Duration::from_secs(1);

/// Carries `job` out. `progress` hears of every answer.
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
        // None: something is due, or an attempt that was taken back is out of the way.
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
            // That everything was too slow is said above, and says more than that its last attempt was.
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
    /// Attempts that are out.
    running: usize,
    answers: u64,
    chance: SmallRng,
    /// The first request that was not begun.
    next: usize,
    requests: usize,
    open: BTreeMap<usize, Open>,
    /// Requests that wait for another attempt, and until when.
    again: BinaryHeap<Reverse<(Instant, usize)>>,
    /// When first attempts will be late; in their order, since all are given the same time.
    late: VecDeque<(Instant, usize)>,
}

impl Operation<'_> {
    /// The next attempt that may be made now, and where.
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
                // It was let in by `failed`, so that the share is above nothing and time earns one.
                Err(wait) => self.again.push(Reverse((now + wait.unwrap_or(UNPAID_WAIT), number))),
            }
        }
    }

    /// Beside what the window allows, since its budget is small; but not for a server that has too much to do.
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
        // Those that wait are counted: who is told to come back later does not come with others meanwhile.
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

    /// When something is to be done that is not an answer.
    fn due(&self) -> Option<Instant> {
        // Where no attempt may be made, the next answer makes room or widens the window, and nothing is due before.
        let may = self.running < self.window.size();
        let again = self.again.peek().map(|Reverse((at, _))| *at).filter(|_| may);
        let late = self.late.front().map(|(at, _)| *at).filter(|_| !self.window.is_cut());
        [again, late, self.deadline].into_iter().flatten().min()
    }

    /// An answer to `number`: whatever else was asked for it is taken back.
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

    /// An attempt at `number` failed. How many there were, if that was the last.
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
        // A server that is too busy for this request and has answered others since it last was gets to it in the end.
        let busy = fate::is_busy(failure);
        let goes_on = busy && self.answers > open.answers_seen;
        open.answers_seen = self.answers;
        open.failures += u32::from(!goes_on || open.failures == 0);
        if busy {
            self.window.refused(sent, now);
        }
        if !open.running.is_empty() {
            // A hedge or what it was made for is still out: that is the second attempt.
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
