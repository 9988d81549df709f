//! From region to region until one answers.

use super::admit::Request;
use super::forward::{Edge, NotForwarded};
use super::refusals::{deadline_passed, in_words};
use super::view::View;
use crate::respond::Refusal;
use crate::upstream::Answer;
use gateway_core::outcome::Failure;
use gateway_core::plan::{RequestPlan, Step};
use gateway_core::trail::{Cause, End, Trail};
use regions::residency::ResidencyPolicy;
use regions::selection::{self, Query, Selection};
use regions::set::{RegionIndex, RegionSet};
use replica_core::wire::error::{ErrorCode, Remedy};
use replica_core::wire::headers;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The least and the most that a connection to a region may take to open; between them, two round trips and a bit.
const CONNECT_MIN: Duration = Duration::from_millis(100);
const CONNECT_MAX: Duration = Duration::from_millis(400);

/// How an attempt's answer came about.
pub(super) struct Answered {
    pub(super) answer: Answer,
    pub(super) region: RegionIndex,
    pub(super) waited: Duration,
}

impl Edge {
    /// The regions that could take the request, best first, and why the others cannot.
    pub(super) fn choose(&self, request: &Request, view: &View) -> Selection {
        let now = Instant::now();
        let known = self.watch.known();
        // A region knows its replicas better than the table, for which it registered some time ago.
        let mut serving = RegionSet::empty();
        for region in view.routed.iter() {
            let reported = known.fleet.serves(region, &request.deployment);
            if reported.unwrap_or(request.registered.contains(region)) {
                serving.insert(region);
            }
        }
        let mut selection = selection::select(&Query {
            considered: view.routed,
            allowed: request.allowed,
            routed: view.routed,
            serving,
            health: &|region| known.fleet.health(region, &request.deployment),
            rtt: &|region| match request.client {
                Some(place) => known.latency.prior_from(place, region),
                None => known.latency.estimate(region, now),
            },
        });
        // A piece of a larger request is asked for where there is room for it, and elsewhere as any other.
        let first = selection.order.iter().position(|candidate| Some(candidate.region) == request.first);
        if let Some(first) = first {
            selection.order[..=first].rotate_right(1);
        }
        selection
    }

    /// Goes from region to region until one answers.
    pub(super) async fn go(
        &self,
        request: &Request,
        view: &View,
        trail: &mut Trail,
    ) -> Result<Answered, NotForwarded> {
        // Heard from before the choice is made, so that no loss falls between the two.
        let mut bell = self.watch.bell();
        let selection = self.choose(request, view);
        let order = selection.order.iter().map(|candidate| candidate.region).collect();
        let mut plan = RequestPlan::new(order, request.arrived + request.timeout);
        let mut step = plan.start(Instant::now());
        let (mut held, mut cause) = (None, Cause::First);
        loop {
            let region = match step {
                Step::Send { region, .. } => region,
                Step::Relay => return Ok(held.take().expect("a plan relays what an attempt has brought")),
                Step::NobodyReachable => return Err(self.nobody_reachable(request, view, &selection).into()),
                Step::DeadlinePassed => return Err(deadline_passed(request.timeout).into()),
            };
            let attempt = trail.began(region, cause, Instant::now());
            let ended = self.attempt(request, view, &plan, region, &mut bell).await;
            let end = match &ended {
                Ok(answered) => End::Answered { status: answered.answer.head.status.as_u16() },
                Err(failure) => End::Failed(*failure),
            };
            trail.ended(attempt, end, Instant::now());
            let failure = match ended {
                Ok(answered) if !says_elsewhere(&answered.answer) => {
                    self.watch.answered(region);
                    return Ok(answered);
                }
                Ok(answered) => {
                    held = Some(answered);
                    Failure::Elsewhere
                }
                Err(failure) => failure,
            };
            tracing::debug!(id = request.id, region = region.as_usize(), ?failure, "an attempt failed");
            cause = Cause::after(failure);
            step = self.watch.failed(&mut plan, region, failure, &request.deployment);
        }
    }

    /// One attempt, ended by its answer, by the deadline, or by the loss of the region.
    async fn attempt(
        &self,
        request: &Request,
        view: &View,
        plan: &RequestPlan,
        region: RegionIndex,
        bell: &mut watch::Receiver<()>,
    ) -> Result<Answered, Failure> {
        assert!(
            request.allowed.contains(region),
            "a request is sent only where it is allowed (invariant 1, Lawful)"
        );
        let address = view.address(region).ok_or(Failure::Unreachable)?;
        let begun = Instant::now();
        let left = plan.left(begun);
        let (left_ms, attempt) = (left.as_millis().max(1).to_string(), plan.attempts().to_string());
        let residency = request.residency.to_string();
        let mut extra = vec![
            (headers::REQUEST_ID, request.id.as_str()),
            (headers::DEPLOYMENT, request.deployment.as_str()),
            (headers::TENANT, request.tenant.id.as_str()),
            (headers::TIMEOUT_MS, &left_ms),
            (headers::ATTEMPT, &attempt),
        ];
        if request.residency != ResidencyPolicy::Anywhere {
            extra.push((headers::RESIDENCY, &residency));
        }
        let head = request.crossing.head(request.path, &request.body.bytes, &extra);
        let connect =
            (2 * self.watch.known().latency.estimate(region, begun)).clamp(CONNECT_MIN, CONNECT_MAX);
        let _in_flight = self.watch.in_flight(region);
        let asked = self.upstream.ask(address, connect, head, request.body.bytes.clone(), request.whole_max);
        let lost = async {
            while bell.changed().await.is_ok() {
                if self.watch.gives_up(plan, region, &request.deployment) {
                    return;
                }
            }
        };
        tokio::select! {
            biased;
            answer = asked => answer.map(|answer| Answered { answer, region, waited: begun.elapsed() }),
            () = lost => Err(Failure::Lost),
            () = tokio::time::sleep(left) => Err(Failure::DeadlinePassed),
        }
    }

    fn nobody_reachable(&self, request: &Request, view: &View, selection: &Selection) -> Refusal {
        let catalogue = &self.config.catalogue;
        let tried = selection.order.iter().map(|candidate| candidate.region);
        let named = |region: RegionIndex| catalogue.region(region).id.to_string();
        let mut allowed: Vec<_> = tried.clone().map(|region| format!("{} (tried)", named(region))).collect();
        for (region, _) in view.regions().filter(|(region, _)| request.allowed.contains(*region)) {
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
                request.deployment, request.residency
            ),
        )
    }
}

/// The region's own word that another region could do what it cannot.
fn says_elsewhere(answer: &Answer) -> bool {
    let code =
        answer.head.headers.get(headers::ERROR).and_then(|value| ErrorCode::parse(value.to_str().ok()?));
    answer.head.status.is_server_error() && code.is_some_and(|code| code.remedy() == Remedy::Elsewhere)
}
