//! Dispatches the parts of a split request until the response is complete.
//!
//! **Rejected parts are retried.** When a region reports overload (429 `overloaded`, 503 `saturated`), or that another
//! region could serve the part and its plan had no other or no retry budget for one, the part goes back into the queue.
//! The region gets no part before the time it has named; another region may get the part meanwhile. Every further try
//! is charged to the retry budget like any retry, and waits while that is empty. When the tries or the time of a part
//! do not suffice, the client gets the last rejection of the part.
//!
//! **Bounded buffering.** A response of more than `BUFFERED_RESPONSE_MAX` is not read before [`JoinBuffer`] has
//! capacity for it: until then it stays in the region and the network. The part that is next in the response is always
//! read, to avoid a deadlock.

use super::super::refusals::deadline_passed;
use super::super::request::ReceiptIds;
use super::super::request::Request;
use super::super::view::View;
use super::join_buffer::{JoinBuffer, JoinedEvent};
use super::part::{PartContext, PartFailure, PartProgress, PartStage, PendingPart, StreamingPart};
use super::split::RequestSplit;
use super::split::Splitter;
use crate::metrics::PartOutcome;
use crate::respond::{ForwardError, Rejection};
use futures_util::stream::{FuturesUnordered, StreamExt};
use gateway_core::scatter::dispatch::{SplitTarget, SubRequestDispatcher};
use gateway_core::scatter::split::SubRequest;
use gateway_core::trail::Trail;
use http::header::RETRY_AFTER;
use regions::health::Health;
use regions::set::RegionIndex;
use replica_api::error::{ErrorCode, Fault, Remedy};
use replica_api::headers;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::SemaphorePermit;
use tokio::sync::mpsc::Sender;

/// Limit on the rejections of a part; more of them are not a temporary overload.
const PART_REJECTIONS_MAX: u32 = 8;
/// Retry delay of a part whose rejection names none, and of one that waits for the retry budget, which gains ten
/// retries per second.
const PART_RETRY_AFTER: Duration = Duration::from_millis(100);
/// Limit on the retry delay that a region may name; no request has a later deadline.
const PART_RETRY_AFTER_MAX: Duration = gateway_core::request_options::TIMEOUT_MAX;
/// Minimum time without parts for a region that has rejected one, even if it names a shorter one.
const REGION_PAUSE_MIN: Duration = Duration::from_millis(50);

/// Failure of a split request, and whether the response to the client has started.
pub(super) type SplitFailure = (PartFailure, bool);

type PartFuture<'a> = Pin<Box<dyn Future<Output = PartProgress<'a>> + Send + 'a>>;

/// Retry of a part: its delay, and the region that gets no part until then.
struct PartRetry {
    wait: Duration,
    paused_region: Option<RegionIndex>,
}

impl Splitter {
    /// Sends parts while there is capacity, joins their responses in order, and sends the result to the writer.
    pub(super) async fn produce(
        &self,
        request: &Request,
        view: &Arc<View>,
        split: RequestSplit<'_>,
        receipts: Option<&ReceiptIds<'_>>,
        trails: &mut [Trail],
        sender: Sender<JoinedEvent>,
    ) -> Result<(), SplitFailure> {
        let RequestSplit { splittable, sub_requests, targets, permit } = split;
        let _permit = match permit {
            Some(permit) => permit,
            None => self.acquire_request(request).await.map_err(|refusal| (refusal.into(), false))?,
        };
        let context = PartContext { request, view, splittable: &splittable, receipts };
        let mut parts = SplitExecution::new(self, context, sub_requests, trails, &targets);
        loop {
            let wake = parts.send_pending();
            parts.read_streaming()?;
            parts.advance_buffer()?;
            if parts.buffer.is_finished() {
                return Ok(());
            }
            tokio::select! {
                biased;
                Some(progress) = parts.in_flight.next() => parts.progressed(progress)?,
                reserved = sender.reserve(), if parts.buffer.has_event() => match reserved {
                    Ok(slot) => slot.send(parts.buffer.next()),
                    // The writer has ended, and its result ends the request.
                    Err(_) => std::future::pending().await,
                },
                () = tokio::time::sleep_until(wake.into()), if !parts.is_complete() => parts.check_deadline()?,
            }
        }
    }

    /// Waits for the permit of a split request until its deadline.
    async fn acquire_request(&self, request: &Request) -> Result<SemaphorePermit<'_>, Rejection> {
        let left = (request.arrived + request.timeout).saturating_duration_since(Instant::now());
        let permit = tokio::time::timeout(left, self.split_capacity.acquire_request()).await;
        permit.map_err(|_| deadline_passed(request.timeout))
    }
}

/// Execution of a split request: its parts, each in one of three stages, and the buffer that joins their responses.
struct SplitExecution<'a> {
    splitter: &'a Splitter,
    context: PartContext<'a>,
    deadline: Instant,
    /// Parts that are being sent or read.
    in_flight: FuturesUnordered<PartFuture<'a>>,
    /// Parts whose response has started and is not read before the buffer has capacity for it.
    streaming: BTreeMap<usize, (PendingPart<'a>, RegionIndex, StreamingPart)>,
    /// Parts to be sent, by number: the first part is the one that the response needs next.
    pending: BTreeMap<usize, PendingPart<'a>>,
    buffer: JoinBuffer,
    dispatcher: SubRequestDispatcher,
}

impl<'a> SplitExecution<'a> {
    fn new(
        splitter: &'a Splitter,
        context: PartContext<'a>,
        sub_requests: Vec<SubRequest>,
        trails: &'a mut [Trail],
        targets: &[SplitTarget],
    ) -> SplitExecution<'a> {
        SplitExecution {
            splitter,
            context,
            deadline: context.request.arrived + context.request.timeout,
            in_flight: FuturesUnordered::new(),
            streaming: BTreeMap::new(),
            pending: sub_requests.into_iter().enumerate().zip(trails).map(pending_part).collect(),
            buffer: JoinBuffer::new(context.splittable),
            dispatcher: SubRequestDispatcher::new(targets),
        }
    }

    /// Number of parts that were sent and not received completely.
    fn outstanding(&self) -> usize {
        self.in_flight.len() + self.streaming.len()
    }

    fn is_complete(&self) -> bool {
        self.outstanding() == 0 && self.pending.is_empty()
    }

    /// Sends pending parts while there is memory, capacity for their responses, and a region that accepts them. Returns
    /// the time of the next action if no part makes progress before.
    fn send_pending(&mut self) -> Instant {
        let (splitter, context) = (self.splitter, self.context);
        while let Some((_, next)) = self.pending.first_key_value() {
            let now = Instant::now();
            let bytes = context.splittable.body_bytes(context.request.body.bytes.len(), &next.sub_request);
            let body_permit = splitter.split_capacity.try_reserve_body(bytes);
            // Only a request that holds no memory for bodies may wait for some, to avoid a deadlock.
            let may_start = body_permit.is_some() || self.in_flight.is_empty();
            if !may_start || !self.buffer.has_capacity_for(next.number, self.outstanding()) {
                break;
            }
            if next.not_before > now {
                return next.not_before.min(self.deadline);
            }
            let (tokens, is_retry) = (next.sub_request.tokens, next.rejections > 0);
            let Some(region) = self.next_target(tokens, now) else {
                let accepting = self.dispatcher.next_accepting(now).unwrap_or(self.deadline);
                return accepting.min(self.deadline);
            };
            if is_retry && !splitter.region_monitor.states().budgets.retry.withdraw(now) {
                self.dispatcher.ended(region, tokens);
                return (now + PART_RETRY_AFTER).min(self.deadline);
            }
            let (_, next) = self.pending.pop_first().expect("it is the first");
            let revision = self.buffer.revision();
            self.in_flight.push(Box::pin(splitter.forward_pending(
                context,
                next,
                region,
                revision,
                body_permit,
            )));
        }
        self.deadline
    }

    fn next_target(&mut self, tokens: u64, now: Instant) -> Option<RegionIndex> {
        let request = self.context.request;
        let region_states = self.splitter.region_monitor.states();
        let health = |region| region_states.fleet.health(region, &request.deployment);
        let region = self.dispatcher.next(tokens, health, now)?;
        assert!(
            request.allowed.contains(region),
            "a part is sent only to an allowed region of its request (invariant 1, Residency)"
        );
        Some(region)
    }

    /// Reads the streaming responses for which the buffer has capacity, in order.
    fn read_streaming(&mut self) -> Result<(), SplitFailure> {
        while let Some(next) = self.streaming.first_entry() {
            let (number, bytes) = (*next.key(), next.get().2.bytes);
            let is_reading = self.buffer.try_start_reading(number, bytes);
            if !is_reading.map_err(|refusal| (refusal.into(), self.buffer.is_started))? {
                break;
            }
            let (pending, region, streaming) = next.remove();
            let read = self.splitter.read_streaming(self.context, pending, region, streaming);
            self.in_flight.push(Box::pin(read));
        }
        Ok(())
    }

    /// Finishes the buffer after the last part, or makes room in it for the next one.
    fn advance_buffer(&mut self) -> Result<(), SplitFailure> {
        let outstanding = self.outstanding();
        if self.is_complete() {
            self.buffer.finish();
            return Ok(());
        }
        let next = self.pending.keys().next();
        if next.is_some_and(|next| !self.buffer.has_capacity_for(*next, outstanding)) {
            self.buffer.relieve(outstanding).map_err(|refusal| (refusal.into(), false))?;
        }
        Ok(())
    }

    /// Records that a part has reached another stage.
    fn progressed(&mut self, progress: PartProgress<'a>) -> Result<(), SplitFailure> {
        let PartProgress { region, pending: part, stage } = progress;
        match stage {
            PartStage::Streaming(response) => {
                self.streaming.insert(part.number, (part, region, response));
                Ok(())
            }
            PartStage::Received(received) if self.buffer.accept_revision(received.source.revision) => {
                self.splitter.metrics.parts.count(PartOutcome::Succeeded);
                self.dispatcher.ended(region, part.sub_request.tokens);
                let received = self.buffer.receive(part.number, received);
                received.map_err(|refusal| (refusal.into(), self.buffer.is_started))
            }
            PartStage::Received(_) => self.failed(part, region, model_changed(self.context.request).into()),
            PartStage::Failed(failed) => self.failed(part, region, failed),
        }
    }

    /// Queues a failed part again, or fails the request with it.
    fn failed(
        &mut self,
        mut part: PendingPart<'a>,
        region: RegionIndex,
        failed: PartFailure,
    ) -> Result<(), SplitFailure> {
        let parts = &self.splitter.metrics.parts;
        self.dispatcher.ended(region, part.sub_request.tokens);
        self.buffer.abandon(part.number);
        let now = Instant::now();
        match part_retry(&failed) {
            Some(PartRetry { wait, paused_region: Some(region) }) => {
                self.dispatcher.reject_until(region, now + wait.max(REGION_PAUSE_MIN));
            }
            Some(PartRetry { wait, paused_region: None }) => part.not_before = now + wait,
            None => {
                parts.count(PartOutcome::Failed);
                return Err((failed, self.buffer.is_started));
            }
        }
        let in_time = part.not_before < self.deadline && self.is_any_target_accepting();
        if part.rejections == PART_REJECTIONS_MAX || !in_time {
            parts.count(PartOutcome::Failed);
            return Err((for_client(failed, self.context.request), self.buffer.is_started));
        }
        parts.count(PartOutcome::Rejected);
        part.rejections += 1;
        part.last_failure = Some(failed);
        self.pending.insert(part.number, part);
        Ok(())
    }

    /// Whether any region that is not down accepts parts before the deadline.
    fn is_any_target_accepting(&self) -> bool {
        let region_states = self.splitter.region_monitor.states();
        let deployment = &self.context.request.deployment;
        let is_up = |region| region_states.fleet.health(region, deployment) != Health::Down;
        self.dispatcher.accepting_before(self.deadline).any(is_up)
    }

    /// Fails the request after its deadline, with the last failure of the first part that has one.
    fn check_deadline(&mut self) -> Result<(), SplitFailure> {
        if Instant::now() < self.deadline {
            return Ok(());
        }
        let pending = std::mem::take(&mut self.pending);
        let last_failure = pending.into_values().find_map(|pending| pending.last_failure);
        let failed = last_failure.unwrap_or_else(|| deadline_passed(self.context.request.timeout).into());
        Err((failed, self.buffer.is_started))
    }
}

/// Retry of a part after this failure, if it may be retried.
fn part_retry(failed: &PartFailure) -> Option<PartRetry> {
    let (code, wait, paused_region) = match failed {
        PartFailure::Truncated(_) => return Some(PartRetry { wait: Duration::ZERO, paused_region: None }),
        PartFailure::Request(ForwardError::ClientDisconnected) => return None,
        PartFailure::Request(ForwardError::Rejected(refusal)) => (refusal.code, refusal.retry_after, None),
        PartFailure::Response(received) => {
            let text = |name: &str| received.response.head.headers.get(name)?.to_str().ok();
            let number = |name| text(name).and_then(|number| number.parse().ok());
            let wait = number(headers::RETRY_AFTER_MS).map(Duration::from_millis);
            let wait = wait.or(number(RETRY_AFTER.as_str()).map(Duration::from_secs));
            (ErrorCode::parse(text(headers::ERROR)?)?, wait, Some(received.region))
        }
    };
    let is_retryable = match (code.fault(), code.remedy()) {
        (Fault::Capacity | Fault::Network, Remedy::Wait | Remedy::Elsewhere) => true,
        // An unreachable replica is one of several, so a retry can succeed; an internal error of a replica is not
        // retried.
        (Fault::Replica, _) => code == ErrorCode::ReplicaUnreachable,
        (Fault::Caller | Fault::Quota | Fault::Policy, _) | (_, Remedy::Nothing) => false,
    };
    is_retryable.then(|| PartRetry {
        wait: wait.unwrap_or(PART_RETRY_AFTER).min(PART_RETRY_AFTER_MAX),
        paused_region,
    })
}

/// Rejection of a part that was computed by another model revision than the parts before it; it is retried with their
/// revision.
fn model_changed(request: &Request) -> Rejection {
    let message = format!(
        "The model of '{}' changed while the parts of this request were computed; send the request again.",
        request.deployment
    );
    Rejection::new(ErrorCode::ModelChanged, message).after(PART_RETRY_AFTER)
}

/// Failure as reported to the client: `model_changed` if no replica has the model revision of the other parts any
/// longer.
fn for_client(failed: PartFailure, request: &Request) -> PartFailure {
    let code = match &failed {
        PartFailure::Response(received) => {
            let value = received.response.head.headers.get(headers::ERROR);
            value.and_then(|value| value.to_str().ok()).and_then(ErrorCode::parse)
        }
        PartFailure::Truncated(_) | PartFailure::Request(_) => None,
    };
    if code == Some(ErrorCode::ModelRevisionUnavailable) { model_changed(request).into() } else { failed }
}

/// Part that was not sent yet.
fn pending_part<'t>(
    ((number, sub_request), trail): ((usize, SubRequest), &'t mut Trail),
) -> (usize, PendingPart<'t>) {
    (
        number,
        PendingPart {
            number,
            sub_request,
            trail,
            rejections: 0,
            last_failure: None,
            not_before: Instant::now(),
        },
    )
}
