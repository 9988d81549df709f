//! Results of many jobs, as they finish.
//!
//! Jobs are polled in turn by a bounded number of requests, and a result is held only between its response and the call of
//! the consumer. Nothing is sent while the consumer does not call, so a slow one slows the polls.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::time::sleep_until;

use super::{ClientJob, ClientJobError, ClientJobResult, ClientJobStatus, limited, poll};
use crate::client::retry::{self, RetryDecision, RetryRules};
use crate::client::settings::IN_FLIGHT_MAX;
use crate::client::{Client, ClientError, HttpAttemptError, Preference};

/// Requests about jobs in flight by default. A result can have some megabytes, and a job takes longer than a poll.
pub const IN_FLIGHT_DEFAULT: usize = 16;
/// Jobs that are polled in turn; further ones are taken when one has finished.
const WAITING_MAX: usize = 10_000;
/// Time for which the polls of a job may fail in a row. A gateway or a region is restarted or replaced meanwhile.
const OUTAGE_MAX: Duration = Duration::from_secs(600);
/// Failed polls in a row before the time counts: a consumer that paused for longer has measured nothing.
const OUTAGE_POLLS: u32 = 5;
/// First pause after a failed poll.
const FAILURE_PAUSE: Duration = Duration::from_millis(250);

/// A job that is polled.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct PolledJob {
    /// Next poll.
    due: Instant,
    /// Order of the jobs that are due at the same time.
    number: u64,
    id: String,
    polls: u32,
    /// Failed polls in a row, and the first of them.
    failures: u32,
    failing_since: Option<Instant>,
}

type FinishedPoll = (PolledJob, Result<(ClientJob, Option<Vec<u8>>), ClientJobError>);

/// Results of jobs as they finish; made by [`Client::results`].
pub struct ClientJobResults<I> {
    client: Arc<Client>,
    preference: Preference,
    ids: I,
    in_flight_max: usize,
    waiting: BinaryHeap<Reverse<PolledJob>>,
    polling: FuturesUnordered<BoxFuture<'static, FinishedPoll>>,
    taken: u64,
    /// End of the pause that a rate limit demands.
    paused_until: Option<Instant>,
    rng: SmallRng,
}

impl<I: Iterator<Item = String>> ClientJobResults<I> {
    pub(super) fn new(
        client: Arc<Client>,
        ids: I,
        in_flight_max: usize,
        preference: &Preference,
    ) -> Result<ClientJobResults<I>, ClientError> {
        preference.check().map_err(ClientError::Invalid)?;
        if !(1..=IN_FLIGHT_MAX).contains(&in_flight_max) {
            let problem = format!("max_concurrent {in_flight_max}: write a number from 1 to {IN_FLIGHT_MAX}");
            return Err(ClientError::Invalid(vec![problem]));
        }
        let mut preference = limited(preference);
        // Each poll is one attempt: this loop repeats them, for longer and at another endpoint.
        preference.retries.retries_max = 0;
        Ok(ClientJobResults {
            client,
            preference,
            ids,
            in_flight_max,
            waiting: BinaryHeap::new(),
            polling: FuturesUnordered::new(),
            taken: 0,
            paused_until: None,
            rng: SmallRng::from_os_rng(),
        })
    }

    /// Returns the next job that has finished, with its result, or the reason why there is none. `None` when all are returned.
    /// If the future is dropped, nothing is lost.
    pub async fn next(&mut self) -> Option<(String, Result<ClientJobResult, ClientJobError>)> {
        loop {
            self.take_ids();
            self.start_polls(Instant::now());
            if self.polling.is_empty() && self.waiting.is_empty() {
                return None;
            }
            let due = self.next_due();
            let finished = tokio::select! {
                biased;
                Some(finished) = self.polling.next(), if !self.polling.is_empty() => Some(finished),
                () = sleep_until(due.unwrap_or_else(Instant::now).into()), if due.is_some() => None,
            };
            if let Some((job, result)) = finished
                && let Some(finished) = self.polled(job, result, Instant::now())
            {
                return Some(finished);
            }
        }
    }

    fn len(&self) -> usize {
        self.waiting.len() + self.polling.len()
    }

    fn take_ids(&mut self) {
        while self.len() < WAITING_MAX
            && let Some(id) = self.ids.next()
        {
            self.taken += 1;
            let (due, number) = (Instant::now(), self.taken);
            let job = PolledJob { due, number, id, polls: 0, failures: 0, failing_since: None };
            self.waiting.push(Reverse(job));
        }
    }

    /// Returns the time at which the next poll may start; none if another one must end first.
    fn next_due(&self) -> Option<Instant> {
        let Reverse(job) = self.waiting.peek().filter(|_| self.polling.len() < self.in_flight_max)?;
        Some(self.paused_until.map_or(job.due, |until| until.max(job.due)))
    }

    fn start_polls(&mut self, now: Instant) {
        while self.next_due().is_some_and(|due| due <= now)
            && let Some(Reverse(job)) = self.waiting.pop()
        {
            let (client, preference) = (Arc::clone(&self.client), self.preference.clone());
            self.polling.push(Box::pin(async move {
                let read = client.read(&job.id, &preference).await;
                (job, read)
            }));
        }
    }

    /// Handles the end of a poll; returns the job if it has finished.
    fn polled(
        &mut self,
        mut job: PolledJob,
        result: Result<(ClientJob, Option<Vec<u8>>), ClientJobError>,
        now: Instant,
    ) -> Option<(String, Result<ClientJobResult, ClientJobError>)> {
        let draw = self.rng.random();
        match result {
            Ok((state, body)) => {
                let is_running = match state.status {
                    ClientJobStatus::Queued => false,
                    ClientJobStatus::Running => true,
                    _ => return Some((job.id, ended(state, body))),
                };
                job.polls += 1;
                (job.failures, job.failing_since) = (0, None);
                job.due = now + poll::pause(job.polls, is_running, state.estimate(), self.len() + 1, draw);
            }
            Err(ClientJobError::Request(ClientError::Failed { request, failure })) => {
                job.failures += 1;
                let since = *job.failing_since.get_or_insert(now);
                let is_over = job.failures >= OUTAGE_POLLS && now - since >= OUTAGE_MAX;
                let rules = RetryRules {
                    retries_max: u32::MAX,
                    backoff_first: FAILURE_PAUSE,
                    final_statuses: self.preference.retries.final_statuses.clone(),
                };
                match retry::decide(&failure, job.failures, &rules, now, draw) {
                    RetryDecision::RetryAt(at) if !is_over => {
                        let spread = now + poll::pause(1, true, None, self.len() + 1, draw);
                        job.due = at.max(spread);
                        if matches!(failure, HttpAttemptError::ErrorStatus { status: 429, .. }) {
                            self.paused_until = Some(self.paused_until.map_or(at, |until| until.max(at)));
                        }
                    }
                    RetryDecision::RetryAt(_) | RetryDecision::GiveUp => {
                        let error = ClientError::Failed { request, failure };
                        return Some((job.id, Err(error.into())));
                    }
                }
            }
            Err(error) => return Some((job.id, Err(error))),
        }
        self.waiting.push(Reverse(job));
        None
    }
}

/// Returns the result of a finished job.
fn ended(job: ClientJob, body: Option<Vec<u8>>) -> Result<ClientJobResult, ClientJobError> {
    let (id, reason) = (job.id.clone(), job.reason());
    Err(match (job.status, body) {
        (ClientJobStatus::Succeeded, Some(body)) => return Ok(ClientJobResult { job, body }),
        (ClientJobStatus::Cancelled, _) => ClientJobError::Cancelled { id },
        (ClientJobStatus::Expired, _) => ClientJobError::Expired { id, reason },
        (ClientJobStatus::Succeeded, None) => {
            ClientJobError::Failed { id, reason: "the response has no result".to_owned() }
        }
        _ => ClientJobError::Failed { id, reason },
    })
}
