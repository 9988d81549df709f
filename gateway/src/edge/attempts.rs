//! From region to region until one answers.

use super::admit::Request;
use super::forward::{Edge, NotForwarded};
use super::known::{About, REGION_IN_FLIGHT_MAX};
use super::policy::Permit;
use super::race::{Beginning, Race};
use super::refusals::{deadline_passed, in_words, no_receipt};
use super::view::View;
use super::watch::{InFlight, Next};
use crate::events::at;
use crate::names;
use crate::receipts::{Before, NoReceipt, Recorder, Sending};
use crate::respond::Refusal;
use crate::upstream::{Answer, WHOLE_ANSWER_MAX};
use gateway_core::outcome::AttemptFailure;
use gateway_core::plan::{RequestPlan, Step};
use gateway_core::priority::Priority;
use gateway_core::trail::{AttemptCause, AttemptEnd, Trail};
use regions::selection::{self, Candidate, Query, Selection};
use regions::set::{RegionIndex, RegionSet};
use replica_core::wire::error::{ErrorCode, Remedy};
use replica_core::wire::headers;
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The least and the most that a connection to a region may take to open; between them, two round trips and a bit.
const CONNECT_MIN: Duration = Duration::from_millis(100);
const CONNECT_MAX: Duration = Duration::from_millis(400);

/// When to come back where a region has as much as it may: half of what waits there has been answered by then.
const FULL_RETRY_AFTER: Duration = Duration::from_secs(1);

/// How an attempt's answer came about.
pub(super) struct Answered {
    pub(super) answer: Answer,
    pub(super) region: RegionIndex,
    pub(super) waited: Duration,
}

/// Regions whose distances differ by no more than this are as near: a client does not notice which of them it is, and notices
/// a slow one.
const AS_NEAR: Duration = Duration::from_millis(25);

thread_local! {
    /// The room of an order that is no longer needed, for the next request of this thread: where there are many regions,
    /// allocating it is what made the slowest decisions slow.
    static ROOM: Cell<Vec<Candidate>> = const { Cell::new(Vec::new()) };
}

/// A choice for as long as its request is under way; then its room is the next one's.
struct Chosen(Selection);

impl Drop for Chosen {
    fn drop(&mut self) {
        ROOM.set(std::mem::take(&mut self.0.order));
    }
}

/// Event that a request waits for while attempts are in flight.
enum Happened<'a> {
    Ended(InFlight<'a>, Result<Answered, AttemptFailure>),
    /// A region has got worse.
    Worse,
    /// Something of the plan has come to its time.
    Due,
}

/// One attempt, as it is sent.
struct Attempt {
    region: RegionIndex,
    /// Which one at the request, from 1.
    number: u32,
    cause: AttemptCause,
    /// Its number among all of the process.
    key: u64,
    began: Instant,
    /// Remaining time of the request.
    left: Duration,
}

impl Edge {
    /// The regions that could take the request, best first, and why the others cannot.
    pub(super) fn choose(
        &self,
        request: &Request,
        view: &View,
        allowed: RegionSet,
        about: &About<'_>,
    ) -> Selection {
        let now = Instant::now();
        let known = self.watch.known();
        // A region knows its replicas better than the table, for which it registered some time ago.
        let serving = known.fleet.serving(&request.deployment, request.registered);
        let query = Query {
            considered: view.routed,
            allowed,
            routed: view.routed,
            serving,
            draining: view.draining,
            health: &|region| known.health(region, about, now),
            rtt: &|region| match request.client {
                Some(place) => known.latency.prior_from(place, region),
                None => known.latency.estimate(region, now),
            },
        };
        let mut selection = selection::select_in(&query, ROOM.take());
        self.put_drawn_first(request, &mut selection);
        if let [Candidate { score: best, .. }, _, ..] = selection.order[..] {
            let as_near = |candidate: &&Candidate| {
                candidate.score.health == best.health
                    && candidate.score.draining == best.draining
                    && candidate.score.rtt.abs_diff(best.rtt) <= AS_NEAR
            };
            let near = selection.order.iter().filter(as_near).map(|candidate| candidate.region);
            let preferred = known.targets.preferred(near, about.deployment, about.size, about.chance, now);
            let place = |first| selection.order.iter().position(|candidate| candidate.region == first);
            if let Some(place) = preferred.and_then(place) {
                selection.order[..=place].rotate_right(1);
            }
        }
        known.soonest_first(&mut selection, about);
        // A piece of a larger request is asked for where there is room for it, and elsewhere as any other.
        let first = selection.order.iter().position(|candidate| Some(candidate.region) == request.first);
        if let Some(first) = first {
            selection.order[..=first].rotate_right(1);
        }
        selection
    }

    /// Notes what the plan says of each region, and puts the one that was drawn in front of those that are as well.
    fn put_drawn_first(&self, request: &Request, selection: &mut Selection) {
        let planned = self.planned.borrow();
        let Some(weights) = planned.as_ref() else { return };
        let shares = weights.of(&request.deployment, request.origin, &request.allowed);
        for candidate in &mut selection.order {
            candidate.planned = shares.iter().find(|share| share.region == candidate.region).copied();
        }
        let best = selection.order.first().map(|candidate| candidate.score.health);
        let drawn = selection.order.iter().position(|candidate| {
            Some(candidate.region) == request.drawn && Some(candidate.score.health) == best
        });
        if let Some(drawn) = drawn {
            selection.order[..=drawn].rotate_right(1);
        }
    }

    /// Goes from region to region until one answers. Before each attempt the policy is checked against the newest route
    /// table ([`super::policy`]).
    pub(super) async fn go(
        &self,
        request: &Request,
        view: &Arc<View>,
        trail: &mut Trail,
    ) -> Result<Answered, NotForwarded> {
        // Heard from before the choice is made, so that no loss falls between the two.
        let mut bell = self.watch.bell();
        let about = request.about();
        let mut permit = Permit::of(request, view);
        self.renew(request, &mut permit)?;
        let chosen = Chosen(self.choose(request, &permit.view, *permit.allowed, &about));
        let selection = &chosen.0;
        trail.set_selection(selection.clone());
        let order = selection.order.iter().map(|candidate| candidate.region).collect();
        let hedges = self.config.hedge && request.priority == Priority::Interactive;
        let mut plan = RequestPlan::new(order, hedges, request.arrived + request.timeout);
        let mut next = self.watch.start(&mut plan, &about);
        // A piece of a larger request may have been turned away before.
        let before = trail.count() as u32;
        let (mut at_hand, mut denied, mut race) = (None, None, Race::new(trail));
        loop {
            match next.step {
                Step::Send { region, attempt, cause, instead_of } => {
                    if let Some(late) = instead_of {
                        drop(race.leave(late, AttemptEnd::Failed(AttemptFailure::FirstByteTimeout)));
                    }
                    let (number, cause) = match cause {
                        AttemptCause::First if before > 0 => (attempt + before, AttemptCause::Retry),
                        cause => (attempt + before, cause),
                    };
                    let overflows = cause == AttemptCause::First && request.overflows_to(region);
                    let cause = if overflows { AttemptCause::Spillover } else { cause };
                    let (began, key) = (Instant::now(), self.next_key());
                    let left = plan.time_left(began);
                    let policy = permit.newer_than(request);
                    let attempt = Attempt { region, number, cause, key, began, left };
                    let asked = self.attempt(request, permit.clone(), &selection.order, attempt);
                    let in_flight = next.in_flight.take().expect("whoever is asked counts as waiting");
                    race.enter(cause, in_flight, Beginning { began, key, policy }, asked);
                }
                Step::Wait => {}
                Step::RelayResponse | Step::NoRegionReachable if denied.is_some() => {
                    return Err(denied.take().expect("checked above"));
                }
                Step::RelayResponse => {
                    return Ok(at_hand.take().expect("a plan relays what an attempt has brought"));
                }
                Step::NoRegionReachable => {
                    return Err(self.nobody_reachable(request, &permit, selection).into());
                }
                Step::RegionFull(region) => return Err(self.full(region).into()),
                Step::ReceiptUnavailable => return Err(no_receipt().into()),
                Step::DeadlineExceeded => {
                    race.leave_all(AttemptEnd::Failed(AttemptFailure::DeadlineExceeded));
                    return Err(deadline_passed(request.timeout).into());
                }
            }
            let happened = tokio::select! {
                biased;
                (attempt, ended) = race.next() => Happened::Ended(attempt, ended),
                _ = bell.changed() => Happened::Worse,
                () = tokio::time::sleep_until(plan.next_timer().into()) => Happened::Due,
            };
            // What is under way was sent under the policy of its time; nothing more is sent but under the newest.
            if let Err(refusal) = self.renew(request, &mut permit) {
                denied = Some(refusal.into());
            }
            plan.restrict(if denied.is_some() { RegionSet::EMPTY } else { *permit.allowed });
            next = match happened {
                Happened::Ended(attempt, Ok(answered)) if !says_elsewhere(&answered.answer) => {
                    let status = answered.answer.head.status.as_u16();
                    let took = answered.waited.saturating_sub(held(&answered.answer));
                    self.watch.answered(&mut plan, attempt, &about, status, took);
                    race.overtaken().for_each(|slower| self.watch.overtaken(slower));
                    race.leave_all(AttemptEnd::Cancelled);
                    return Ok(answered);
                }
                Happened::Ended(attempt, Ok(answered)) => {
                    let status = answered.answer.head.status.as_u16();
                    at_hand = Some(answered);
                    self.watch.failed(&mut plan, attempt, AttemptFailure::Declined, Some(status), &about)
                }
                Happened::Ended(attempt, Err(failure)) => {
                    let region = attempt.region().as_usize();
                    tracing::debug!(id = request.id, region, ?failure, "an attempt failed");
                    self.watch.failed(&mut plan, attempt, failure, None, &about)
                }
                Happened::Worse => match race.find(|region| self.watch.gives_up(&plan, region, &about)) {
                    Some(region) => {
                        let attempt = race.leave(region, AttemptEnd::Failed(AttemptFailure::RegionDown));
                        // Another that races may be given up as well: the bell is heard again.
                        bell.mark_changed();
                        self.watch.failed(&mut plan, attempt, AttemptFailure::RegionDown, None, &about)
                    }
                    None => Next::WAIT,
                },
                Happened::Due => self.watch.woke(&mut plan, &about),
            };
        }
    }

    /// The number of the next attempt among all of this process.
    fn next_key(&self) -> u64 {
        self.recorder.as_ref().map_or(0, Recorder::number)
    }

    /// One attempt; whoever waits for it bounds its time by dropping it. Where a receipt is required it is durable before a
    /// connection is opened.
    async fn attempt(
        &self,
        request: &Request,
        permit: Permit,
        order: &[Candidate],
        attempt: Attempt,
    ) -> Result<Answered, AttemptFailure> {
        let Attempt { region, number, cause, key, began, left } = attempt;
        let Permit { view, allowed, policy } = permit;
        let address = view.address(region).ok_or(AttemptFailure::Unreachable)?;
        let to = allowed.open(region, address);
        let to = to.expect("a plan goes only where it is allowed (invariant 1, Residency)");
        let locked = policy.residency.is_locked();
        if let Some(recorder) = self.recorder.as_ref().filter(|recorder| locked && recorder.required()) {
            let sending = Sending {
                number: key,
                request: request.id.clone(),
                attempt: number,
                tenant: request.tenant.id.clone(),
                deployment: request.deployment.clone(),
                policy: policy.clone(),
                tls_ended_here: request.tls_ended_here,
                region,
                at_ms: at(began, request.arrived, request.at_ms),
                cause,
            };
            let durable = recorder.commit(Before::Sending(sending)).await;
            durable.map_err(|NoReceipt| AttemptFailure::ReceiptUnavailable)?;
        }
        let begun = Instant::now();
        let left = left.saturating_sub(begun.saturating_duration_since(began));
        let (left_ms, number) = (left.as_millis().max(1).to_string(), number.to_string());
        let mut extra = vec![
            (headers::REQUEST_ID, request.id.as_str()),
            (headers::DEPLOYMENT, request.deployment.as_str()),
            (headers::TENANT, request.tenant.id.as_str()),
            (headers::TIMEOUT_MS, &left_ms),
            (headers::ATTEMPT, &number),
        ];
        let key = self.recorder.as_ref().map(|recorder| recorder.key(key).to_string());
        extra.extend(key.as_deref().map(|key| (headers::ATTEMPT_KEY, key)));
        if locked {
            extra.push((headers::RESIDENCY, policy.residency.as_str()));
        }
        if request.overflows_to(region) {
            extra.push((headers::OVERFLOW, "1"));
        }
        let revision = request.revision.map(|revision| revision.to_string());
        extra.extend(revision.as_deref().map(|revision| (headers::MODEL_REVISION, revision)));
        let required = request.required.map(|revision| revision.to_string());
        extra.extend(required.as_deref().map(|revision| (headers::REQUIRED_REVISION, revision)));
        let (connect, elsewhere) = {
            let known = self.watch.known();
            (2 * known.latency.estimate(region, begun), known.elsewhere(request, order, region))
        };
        let connect = connect.clamp(CONNECT_MIN, CONNECT_MAX);
        let elsewhere_ms = elsewhere.map(|there| there.as_millis().to_string());
        extra.extend(elsewhere_ms.as_deref().map(|there| (headers::ELSEWHERE_MS, there)));
        let head = request.crossing.head(request.path, &request.body.bytes, &extra);
        let body = allowed.seal(request.body.bytes.clone());
        let answer = self.upstream.ask(to, connect, head, body, WHOLE_ANSWER_MAX).await?;
        Ok(Answered { answer, region, waited: begun.elapsed() })
    }

    fn full(&self, region: RegionIndex) -> Refusal {
        let region = &self.config.catalogue.region(region).id;
        let message = format!(
            "{REGION_IN_FLIGHT_MAX} requests of this gateway wait for {region} already, as many as may; try again \
             shortly, or send fewer at once. They are not sent to a region further away, which has not offered room."
        );
        Refusal::new(ErrorCode::Overloaded, message).after(FULL_RETRY_AFTER)
    }

    fn nobody_reachable(&self, request: &Request, permit: &Permit, selection: &Selection) -> Refusal {
        let Permit { view, allowed: permitted, policy } = permit;
        let catalogue = &self.config.catalogue;
        let tried = selection.order.iter().map(|candidate| candidate.region);
        let named = |region: RegionIndex| catalogue.region(region).id.to_string();
        let mut allowed: Vec<_> = tried.clone().map(|region| format!("{} (tried)", named(region))).collect();
        for (region, _) in view.regions().filter(|(region, _)| permitted.contains(*region)) {
            if let Some(reason) = selection.refused.reason(region) {
                allowed.push(format!("{} ({})", named(region), in_words(reason)));
            }
        }
        let places = if allowed.is_empty() { "none has registered".to_owned() } else { allowed.join(", ") };
        Refusal::new(
            ErrorCode::NoCapacityInAllowedRegions,
            format!(
                "No region that may serve '{}' under the residency '{}' can be reached: {places}. Try again shortly; \
                 other regions were not asked.",
                request.deployment,
                policy.residency.as_str()
            ),
        )
    }
}

/// For how long the region held the request because no replica was ready: that says nothing of how long it takes.
fn held(answer: &Answer) -> Duration {
    let held = answer.head.headers.get(names::name(headers::HELD_MS));
    let held = held.and_then(|value| value.to_str().ok()?.parse().ok());
    held.map(Duration::from_millis).unwrap_or_default()
}

/// The region's own word that another region could do what it cannot.
fn says_elsewhere(answer: &Answer) -> bool {
    let said = || answer.head.headers.get(names::name(headers::ERROR))?.to_str().ok();
    let code = || said().and_then(ErrorCode::parse);
    answer.head.status.is_server_error() && code().is_some_and(|code| code.remedy() == Remedy::Elsewhere)
}
