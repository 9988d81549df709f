//! Circuit breaker state of a region (at a gateway) or of a replica (at its ingress), as operators read it.

use gateway_core::circuit::{BreakerState, Permille, Probe};
use gateway_core::targets::TargetStatus;
use rand::Rng;
use serde_json::{Value, json};
use std::time::Instant;

/// Returns a random draw: of a request, which states the share of requests that it belongs to, or for the jitter of an ejection.
pub(crate) fn random_draw() -> Permille {
    Permille::new(rand::rng().random_range(0..1000))
}

/// All names of circuit breaker states.
pub(crate) const STATE_NAMES: [&str; 5] = ["closed", "ejected", "half_open", "probing", "recovering"];

/// Returns the name of a circuit breaker state.
pub(crate) fn state_name(standing: BreakerState) -> &'static str {
    match standing {
        BreakerState::Closed => STATE_NAMES[0],
        BreakerState::Ejected { .. } => STATE_NAMES[1],
        BreakerState::HalfOpen { probe: Probe::Idle } => STATE_NAMES[2],
        BreakerState::HalfOpen { probe: Probe::InFlight } => STATE_NAMES[3],
        BreakerState::Recovering { .. } => STATE_NAMES[4],
    }
}

/// Returns the state of a circuit breaker as JSON.
pub(crate) fn to_json<K>(state: &TargetStatus<K>, now: Instant) -> Value {
    let TargetStatus { target: _, state: breaker, in_flight, in_flight_max, first_byte_timeouts } = state;
    let (until, share) = match breaker {
        BreakerState::Ejected { until } => (Some(until), None),
        BreakerState::Recovering { traffic_share } => (None, Some(traffic_share.get())),
        BreakerState::Closed
        | BreakerState::HalfOpen { probe: Probe::Idle }
        | BreakerState::HalfOpen { probe: Probe::InFlight } => (None, None),
    };
    let first_byte: Vec<_> = first_byte_timeouts
        .iter()
        .map(|(deployment, size, after)| {
            let after_ms = after.as_millis() as u64;
            json!({"deployment": deployment.as_str(), "tokens_from": size.tokens(), "timeout_ms": after_ms})
        })
        .collect();
    json!({
        "state": state_name(*breaker),
        "ejected_for_ms": until.map(|until| until.saturating_duration_since(now).as_millis() as u64),
        "traffic_share_permille": share,
        "in_flight": in_flight,
        "in_flight_max": in_flight_max,
        "first_byte": first_byte,
    })
}
