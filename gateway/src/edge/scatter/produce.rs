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
use crate::respond::ForwardError;
use crate::respond::{RETRY_AFTER_MS, Rejection};
use futures_util::stream::{FuturesUnordered, StreamExt};
use gateway_core::scatter::dispatch::SubRequestDispatcher;
use gateway_core::scatter::split;
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
        let deadline = request.arrived + request.timeout;
        let mut dispatcher = SubRequestDispatcher::new(&targets);
        let mut buffer = JoinBuffer::new(&splittable);
        // Ordered by number: the first part is the one that the response needs next.
        let mut pending: BTreeMap<usize, _> =
            sub_requests.into_iter().enumerate().zip(trails).map(pending_part).collect();
        let mut streaming: BTreeMap<usize, (PendingPart<'_>, RegionIndex, StreamingPart)> = BTreeMap::new();
        let mut in_flight: FuturesUnordered<PartFuture<'_>> = FuturesUnordered::new();
        loop {
            // Time of the next action if no part makes progress before.
            let mut wake = deadline;
            while let Some((_, next)) = pending.first_key_value() {
                let now = Instant::now();
                let bytes = splittable.body_bytes(request.body.bytes.len(), &next.sub_request);
                let body_permit = self.split_capacity.try_reserve_body(bytes);
                // Only a request that holds no memory for bodies may wait for some, to avoid a deadlock.
                let may_start = body_permit.is_some() || in_flight.is_empty();
                if !may_start || !buffer.has_capacity_for(next.number, in_flight.len() + streaming.len()) {
                    break;
                }
                if next.not_before > now {
                    wake = wake.min(next.not_before);
                    break;
                }
                let Some(region) = self.next_target(&mut dispatcher, next.sub_request.tokens, request, now)
                else {
                    wake = wake.min(dispatcher.next_accepting(now).unwrap_or(deadline));
                    break;
                };
                if next.rejections > 0 && !self.region_monitor.states().budgets.retry.withdraw(now) {
                    dispatcher.ended(region, next.sub_request.tokens);
                    wake = wake.min(now + PART_RETRY_AFTER);
                    break;
                }
                let (_, next) = pending.pop_first().expect("it is the first");
                in_flight.push(Box::pin(self.forward_pending(
                    context,
                    next,
                    region,
                    buffer.revision(),
                    body_permit,
                )));
            }
            while let Some(next) = streaming.first_entry() {
                let (number, bytes) = (*next.key(), next.get().2.bytes);
                if !buffer
                    .try_start_reading(number, bytes)
                    .map_err(|refusal| (refusal.into(), buffer.is_started))?
                {
                    break;
                }
                let (pending, region, streaming) = next.remove();
                in_flight.push(Box::pin(self.read_streaming(context, pending, region, streaming)));
            }
            let outstanding = in_flight.len() + streaming.len();
            let is_complete = outstanding == 0 && pending.is_empty();
            if is_complete {
                buffer.finish();
            } else if pending.keys().next().is_some_and(|next| !buffer.has_capacity_for(*next, outstanding)) {
                buffer.relieve(outstanding).map_err(|refusal| (refusal.into(), false))?;
            }
            if buffer.is_finished() {
                return Ok(());
            }
            tokio::select! {
                biased;
                Some(progress) = in_flight.next() => {
                    let PartProgress { region, pending: mut part, stage } = progress;
                    let (number, tokens) = (part.number, part.sub_request.tokens);
                    match stage {
                        PartStage::Streaming(response) => drop(streaming.insert(number, (part, region, response))),
                        PartStage::Received(received) if buffer.accept_revision(received.source.revision) => {
                            self.metrics.parts.count(PartOutcome::Succeeded);
                            dispatcher.ended(region, tokens);
                            buffer.receive(number, received).map_err(|refusal| (refusal.into(), buffer.is_started))?;
                        }
                        stage => {
                            let failed = match stage {
                                PartStage::Failed(failed) => failed,
                                PartStage::Received(_) | PartStage::Streaming(_) => model_changed(request).into(),
                            };
                            dispatcher.ended(region, tokens);
                            buffer.abandon(number);
                            let now = Instant::now();
                            match part_retry(&failed) {
                                Some(PartRetry { wait, paused_region: Some(region) }) => {
                                    dispatcher.reject_until(region, now + wait.max(REGION_PAUSE_MIN));
                                }
                                Some(PartRetry { wait, paused_region: None }) => part.not_before = now + wait,
                                None => {
                                    self.metrics.parts.count(PartOutcome::Failed);
                                    return Err((failed, buffer.is_started));
                                }
                            }
                            let in_time = part.not_before < deadline
                                && self.is_any_target_accepting(request, &dispatcher, deadline);
                            if part.rejections == PART_REJECTIONS_MAX || !in_time {
                                self.metrics.parts.count(PartOutcome::Failed);
                                return Err((for_client(failed, request), buffer.is_started));
                            }
                            self.metrics.parts.count(PartOutcome::Rejected);
                            part.rejections += 1;
                            part.last_failure = Some(failed);
                            pending.insert(number, part);
                        }
                    }
                }
                reserved = sender.reserve(), if buffer.has_event() => match reserved {
                    Ok(slot) => slot.send(buffer.next()),
                    // The writer has ended, and its result ends the request.
                    Err(_) => std::future::pending().await,
                },
                () = tokio::time::sleep_until(wake.into()), if !is_complete => {
                    if Instant::now() >= deadline {
                        let last_failure = pending.into_values().find_map(|pending| pending.last_failure);
                        let failed = last_failure.unwrap_or_else(|| deadline_passed(request.timeout).into());
                        return Err((failed, buffer.is_started));
                    }
                }
            }
        }
    }

    /// Waits for the permit of a split request until its deadline.
    async fn acquire_request(&self, request: &Request) -> Result<SemaphorePermit<'_>, Rejection> {
        let left = (request.arrived + request.timeout).saturating_duration_since(Instant::now());
        let permit = tokio::time::timeout(left, self.split_capacity.acquire_request()).await;
        permit.map_err(|_| deadline_passed(request.timeout))
    }

    fn next_target(
        &self,
        dispatcher: &mut SubRequestDispatcher,
        tokens: u64,
        request: &Request,
        now: Instant,
    ) -> Option<RegionIndex> {
        let region_states = self.region_monitor.states();
        let health = |region| region_states.fleet.health(region, &request.deployment);
        let region = dispatcher.next(tokens, health, now)?;
        assert!(
            request.allowed.contains(region),
            "a part is sent only to an allowed region of its request (invariant 1, Residency)"
        );
        Some(region)
    }

    /// Whether any region that is not down accepts parts before the deadline.
    fn is_any_target_accepting(
        &self,
        request: &Request,
        dispatcher: &SubRequestDispatcher,
        deadline: Instant,
    ) -> bool {
        let region_states = self.region_monitor.states();
        let is_up = |region| region_states.fleet.health(region, &request.deployment) != Health::Down;
        dispatcher.accepting_before(deadline).any(is_up)
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
            let wait = number(RETRY_AFTER_MS).map(Duration::from_millis);
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
    ((number, sub_request), trail): ((usize, split::SubRequest), &'t mut Trail),
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
