//! Routing decisions and attempts of recent requests: `GET /explain/{id}`.
//!
//! A finished request is kept in a ring buffer for a while. Of older requests, those with a reason are on disk
//! ([`super::explanation_archive`]), and all are in the log. The JSON is rendered when an operator requests it, or by the writer of
//! that archive, not when the request ends.

use crate::events::{FinishedRequest, RequestTimes};
use crate::metrics::RequestOutcome;
use gateway_core::labels::AttemptResult;
use gateway_core::route::RouteDecision;
use gateway_core::trail::{AttemptEnd, AttemptRecord, Trail};
use regions::catalogue::Catalogue;
use regions::id::{InstanceName, TenantId};
use regions::set::RegionIndex;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use supervision::Mutex;

/// Capacity of the ring buffer: some seconds of a busy gateway and days of an idle one, at about 1 KiB per request.
pub(super) const RECENT_REQUESTS_MAX: usize = 4096;

/// Ring buffer of the last requests.
pub(super) struct Explanations {
    /// Each slot has its own lock; two threads contend for it only if the ring wraps around in between.
    ring: Box<[Mutex<Option<Arc<FinishedRequest>>>]>,
    /// Number of requests recorded so far.
    recorded: AtomicUsize,
}

impl Explanations {
    pub(super) fn new() -> Explanations {
        Explanations {
            ring: (0..RECENT_REQUESTS_MAX).map(|_| Mutex::independent(None)).collect(),
            recorded: AtomicUsize::new(0),
        }
    }

    /// Stores `request` in the slot of the oldest.
    pub(super) fn record(&self, request: Arc<FinishedRequest>) {
        let slot = self.recorded.fetch_add(1, Ordering::Relaxed) % self.ring.len();
        // The previous entry is dropped after the lock is released.
        drop(self.ring[slot].lock().replace(request));
    }

    /// Returns the number of requests recorded so far.
    pub(super) fn recorded(&self) -> usize {
        self.recorded.load(Ordering::Relaxed)
    }

    /// Returns the requests that were recorded after the first `after` ones and are still in the ring, with the number of
    /// requests recorded so far.
    pub(super) fn since(&self, after: usize) -> (Vec<Arc<FinishedRequest>>, usize) {
        let recorded = self.recorded();
        let count = recorded.wrapping_sub(after).min(self.ring.len());
        let slots = (1..=count).map(|back| recorded.wrapping_sub(back) % self.ring.len());
        (slots.filter_map(|slot| self.ring[slot].lock().clone()).collect(), recorded)
    }

    /// Returns the newest request with this identifier.
    pub(super) fn find(&self, id: &str) -> Option<Arc<FinishedRequest>> {
        let recorded = self.recorded.load(Ordering::Relaxed);
        let slots = (1..=self.ring.len()).map(|back| recorded.wrapping_sub(back) % self.ring.len());
        let at = |slot: usize| self.ring[slot].lock().clone();
        slots.filter_map(at).find(|request| request.id == id)
    }
}

/// Renders a request as JSON.
pub(super) fn to_json(request: &FinishedRequest, catalogue: &Catalogue) -> Value {
    let FinishedRequest { id, at_ms, arrived, endpoint, outcome, tenant, trail, routed_at, .. } = request;
    let FinishedRequest { served_by, tokens, total, resolved, trace, .. } = request;
    let named = |region: RegionIndex| catalogue.region(region).id.as_str();
    let resolved = resolved.as_ref();
    json!({
        "id": id,
        "trace_id": trace.map(|trace| trace.trace.to_string()),
        "at_ms": at_ms,
        "endpoint": endpoint.as_str(),
        "outcome": RequestOutcome::name(outcome.index()),
        "status": outcome.status(),
        "tenant": tenant.as_ref().map(TenantId::as_str),
        "deployment": resolved.map(|resolved| resolved.deployment.as_str()),
        "residency": resolved.map(|resolved| resolved.policy.residency.as_str()),
        "generation": resolved.map(|resolved| resolved.policy.generation.to_string()),
        "inputs": resolved.map(|resolved| resolved.cost.inputs),
        "tokens_estimated": resolved.map(|resolved| resolved.cost.tokens),
        "tokens": tokens,
        "region": served_by.map(|(region, _)| named(region)),
        "total_ms": millis(*total),
        "routing": routed_at.map(|(began, ended)| json!({
            "began_ms": millis(began.saturating_duration_since(*arrived)),
            "took_ms": millis(ended.saturating_duration_since(began)),
        })),
        "times": served_by.map(|(_, times)| times_json(&times)),
        "origin": trail.route().map(|route| named(route.origin)),
        "order": trail.route().and_then(|route| order_json(route, catalogue)),
        "rejection": trail.route().and_then(|route| route.rejection).map(|rejection| json!({
            "reason": rejection.reason.as_str(),
            "wait_ms": millis(rejection.wait),
            "retry_after_ms": millis(rejection.retry_after),
        })),
        "spillover": trail.route().and_then(|route| route.spillover).map(|spillover| json!({
            "demand_tokens": spillover.demand,
            "tokens": spillover.tokens,
            "to": spillover.to.map(named),
        })),
        "admission_pool": trail.route().and_then(RouteDecision::admission_pool).map(named),
        "regions": regions_json(trail, catalogue),
        "attempts": trail.attempts().map(|attempt| attempt_json(attempt, *arrived, catalogue)).collect::<Vec<_>>(),
    })
}

/// Order of the deployment's regions: the place of the primary in it, from 1, and why the earlier regions did not take the
/// request. `None` without an order.
fn order_json(route: &RouteDecision, catalogue: &Catalogue) -> Option<Value> {
    let named = |region: RegionIndex| catalogue.region(region).id.as_str();
    let regions: Vec<_> = route.order.as_ref()?.iter().map(|region| named(*region)).collect();
    let passed_over = route
        .passed_over()
        .map(|(region, reason)| json!({"region": named(region), "reason": reason.as_str()}))
        .collect::<Vec<_>>();
    Some(json!({
        "regions": regions,
        "place": route.order_index().map(|index| index + 1),
        "passed_over": passed_over,
    }))
}

/// Regions of the route table: the rank of each candidate, and the reject reason of every other.
fn regions_json(trail: &Trail, catalogue: &Catalogue) -> Value {
    let Some(route) = trail.route() else { return Value::Null };
    let named = |region: RegionIndex| catalogue.region(region).id.as_str();
    let mut regions: Vec<_> = route
        .candidates
        .iter()
        .enumerate()
        .map(|(slot, candidate)| {
            json!({
                "region": named(candidate.region),
                "rank": slot + 1,
                "assigned": candidate.score.assigned.0,
                "health": candidate.score.health.as_str(),
                "response_in_ms": millis(candidate.score.response_in),
                "holds": candidate.score.holds,
                "fastest": candidate.score.fastest.0,
                "drawn": candidate.score.drawn.0,
                "draining": candidate.score.draining,
                "weight_permille": candidate.planned.map(|share| share.permille),
                "planned": candidate.planned.map(|share| share.reason.as_str()),
                "rtt_ms": millis(candidate.score.rtt),
            })
        })
        .collect();
    let rejected = route.rejected.iter();
    regions.extend(
        rejected.map(|(region, reason)| json!({"region": named(region), "rejected": reason.as_str()})),
    );
    Value::Array(regions)
}

fn attempt_json(attempt: &AttemptRecord, arrived: Instant, catalogue: &Catalogue) -> Value {
    let AttemptRecord { number, region, instance, cause, began, took, end, key: _, policy, trace: _ } =
        attempt;
    let status = match end {
        AttemptEnd::Responded { status } => Some(status),
        AttemptEnd::Failed(_) | AttemptEnd::Cancelled => None,
    };
    json!({
        "attempt": number,
        "region": catalogue.region(*region).id.as_str(),
        "instance": instance.as_ref().map(InstanceName::as_str),
        "cause": cause.as_str(),
        "end": AttemptResult::from(*end).as_str(),
        "status": status,
        "began_ms": millis(began.saturating_duration_since(arrived)),
        "took_ms": millis(*took),
        "policy_generation": policy.as_ref().map(|policy| policy.generation.to_string()),
    })
}

fn times_json(times: &RequestTimes) -> Value {
    let RequestTimes { to_head, waited, region } = times;
    json!({
        "to_head_ms": millis(*to_head),
        "gateway_ms": millis(to_head.saturating_sub(*waited)),
        "network_ms": region.region.map(|region| millis(waited.saturating_sub(region))),
        "queue_ms": region.queue.map(millis),
        "tokenize_ms": region.tokenize.map(millis),
        "engine_ms": region.engine.map(millis),
    })
}

fn millis(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::EndpointLabel;

    fn finished(id: &str, at_ms: u64) -> Arc<FinishedRequest> {
        Arc::new(FinishedRequest {
            id: id.to_owned(),
            arrived: Instant::now(),
            at_ms,
            tls_ended_here: false,
            endpoint: EndpointLabel::OTHER,
            outcome: RequestOutcome::ClientDisconnected,
            tenant: None,
            trail: Trail::default(),
            routed_at: None,
            served_by: None,
            tokens: None,
            total: Duration::ZERO,
            resolved: None,
            receipt: None,
            trace: None,
        })
    }

    #[test]
    fn the_ring_keeps_the_last_requests_and_drops_older_ones() {
        let explanations = Explanations::new();
        (0..=RECENT_REQUESTS_MAX).for_each(|number| explanations.record(finished(&number.to_string(), 0)));
        assert!(explanations.find("0").is_none());
        assert!(explanations.find("1").is_some());
        assert!(explanations.find(&RECENT_REQUESTS_MAX.to_string()).is_some());
        explanations.record(finished("7", 9));
        assert_eq!(explanations.find("7").map(|found| found.at_ms), Some(9), "the newest of two");
    }

    #[test]
    fn the_requests_since_a_number_are_those_that_the_ring_still_has() {
        let explanations = Explanations::new();
        let since = |after| {
            let (requests, recorded) = explanations.since(after);
            (requests.len(), recorded)
        };
        assert_eq!(since(0), (0, 0));
        (0..3).for_each(|number| explanations.record(finished(&number.to_string(), 0)));
        assert_eq!((since(0), since(2), since(3)), ((3, 3), (1, 3), (0, 3)));
        (0..RECENT_REQUESTS_MAX).for_each(|number| explanations.record(finished(&number.to_string(), 0)));
        assert_eq!(since(0), (RECENT_REQUESTS_MAX, RECENT_REQUESTS_MAX + 3));
    }
}
