//! Why the last requests went where they went: `GET /explain/{id}`.
//!
//! What is known of a request when it is over is kept for a while in a ring: whoever asks about a request asks soon, or
//! looks into the log. It is put together when somebody asks, not when the request ends.

use crate::events::{FinishedRequest, RequestTimes};
use crate::metrics::RequestOutcome;
use gateway_core::labels::AttemptResult;
use gateway_core::trail::{AttemptEnd, AttemptRecord, Trail};
use regions::catalogue::Catalogue;
use regions::health::Health;
use regions::id::TenantId;
use regions::set::RegionIndex;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use supervision::Mutex;

/// Requests that are kept: some seconds of a busy edge and days of an idle one, at about a KiB each.
pub(super) const KEPT_MAX: usize = 4096;

/// The last requests.
pub(super) struct Explanations {
    /// Each with a lock of its own, which two threads want at once only when the ring has gone round in between.
    ring: Box<[Mutex<Option<Arc<FinishedRequest>>>]>,
    /// How many were ever put in.
    put: AtomicUsize,
}

impl Explanations {
    pub(super) fn new() -> Explanations {
        Explanations {
            ring: (0..KEPT_MAX).map(|_| Mutex::independent(None)).collect(),
            put: AtomicUsize::new(0),
        }
    }

    /// Keeps `request`, in the place of the oldest.
    pub(super) fn put(&self, request: Arc<FinishedRequest>) {
        let place = self.put.fetch_add(1, Ordering::Relaxed) % self.ring.len();
        // What was there is let go of after the lock.
        drop(self.ring[place].lock().replace(request));
    }

    /// The newest request of this identifier.
    pub(super) fn find(&self, id: &str) -> Option<Arc<FinishedRequest>> {
        let put = self.put.load(Ordering::Relaxed);
        let places = (1..=self.ring.len()).map(|back| put.wrapping_sub(back) % self.ring.len());
        let at = |place: usize| self.ring[place].lock().clone();
        places.filter_map(at).find(|request| request.id == id)
    }
}

/// A request, explained to people and machines.
pub(super) fn in_json(request: &FinishedRequest, catalogue: &Catalogue) -> Value {
    let FinishedRequest { id, at_ms, arrived, endpoint, outcome, tenant, trail, .. } = request;
    let FinishedRequest { served_by, tokens, total, resolved, .. } = request;
    let named = |region: RegionIndex| catalogue.region(region).id.as_str();
    let resolved = resolved.as_ref();
    json!({
        "id": id,
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
        "times": served_by.map(|(_, times)| told_times(&times)),
        "regions": considered(trail, catalogue),
        "attempts": trail.attempts().map(|attempt| told_attempt(attempt, *arrived, catalogue)).collect::<Vec<_>>(),
    })
}

/// Every region of the route table: its rank, or why it could not be chosen.
fn considered(trail: &Trail, catalogue: &Catalogue) -> Value {
    let Some(route) = trail.route() else { return Value::Null };
    let named = |region: RegionIndex| catalogue.region(region).id.as_str();
    let mut regions: Vec<_> = route
        .candidates
        .iter()
        .enumerate()
        .map(|(place, candidate)| {
            json!({
                "region": named(candidate.region),
                "rank": place + 1,
                "health": health_word(candidate.score.health),
                "draining": candidate.score.draining,
                "weight_permille": candidate.planned.map(|share| share.permille),
                "planned": candidate.planned.map(|share| share.why.as_str()),
                "rtt_ms": millis(candidate.score.rtt),
            })
        })
        .collect();
    let rejected = route.rejected.iter();
    regions.extend(rejected.map(|(region, why)| json!({"region": named(region), "refused": why.as_str()})));
    Value::Array(regions)
}

fn told_attempt(attempt: &AttemptRecord, arrived: Instant, catalogue: &Catalogue) -> Value {
    let AttemptRecord { number, region, cause, began, took, end, key: _, policy } = attempt;
    let status = match end {
        AttemptEnd::Responded { status } => Some(status),
        AttemptEnd::Failed(_) | AttemptEnd::Cancelled => None,
    };
    json!({
        "attempt": number,
        "region": catalogue.region(*region).id.as_str(),
        "cause": cause.as_str(),
        "end": AttemptResult::from(*end).as_str(),
        "status": status,
        "began_ms": millis(began.saturating_duration_since(arrived)),
        "took_ms": millis(*took),
        "policy_generation": policy.as_ref().map(|policy| policy.generation.to_string()),
    })
}

fn told_times(times: &RequestTimes) -> Value {
    let RequestTimes { to_head, waited, region } = times;
    json!({
        "gateway_ms": millis(to_head.saturating_sub(*waited)),
        "network_ms": region.region.map(|region| millis(waited.saturating_sub(region))),
        "queue_ms": region.queue.map(millis),
        "tokenize_ms": region.tokenize.map(millis),
        "engine_ms": region.engine.map(millis),
    })
}

pub(super) fn health_word(health: Health) -> &'static str {
    match health {
        Health::Healthy => "healthy",
        Health::Unknown => "unknown",
        Health::Suspect => "suspect",
        Health::Down => "down",
    }
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
            served_by: None,
            tokens: None,
            total: Duration::ZERO,
            resolved: None,
            receipt: None,
        })
    }

    #[test]
    fn the_last_requests_are_kept_and_the_one_before_them_is_not() {
        let explanations = Explanations::new();
        (0..=KEPT_MAX).for_each(|number| explanations.put(finished(&number.to_string(), 0)));
        assert!(explanations.find("0").is_none());
        assert!(explanations.find("1").is_some());
        assert!(explanations.find(&KEPT_MAX.to_string()).is_some());
        explanations.put(finished("7", 9));
        assert_eq!(explanations.find("7").map(|found| found.at_ms), Some(9), "the newest of two");
    }
}
