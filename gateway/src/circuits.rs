//! Circuit breaker state of a region (at a gateway) or of a replica (at its ingress), as operators read it.

use crate::metrics::InGateway;
use gateway_core::circuit::{BreakerState, Permille, Probe};
use gateway_core::targets::TargetStatus;
use metrics::Label;
use rand::Rng;
use serde_json::{Value, json};
use std::time::Instant;

/// Returns a random draw: of a request, which states the share of requests that it belongs to, or for the jitter of an ejection.
pub(crate) fn random_draw() -> Permille {
    Permille::new(rand::rng().random_range(0..1000))
}

/// Names of the states of a circuit breaker.
const STATE_NAMES: [&str; 5] = ["closed", "ejected", "half_open", "probing", "recovering"];

impl Label<InGateway> for BreakerState {
    fn values() -> Vec<&'static str> {
        STATE_NAMES.to_vec()
    }

    fn index(self) -> usize {
        match self {
            BreakerState::Closed => 0,
            BreakerState::Ejected { .. } => 1,
            BreakerState::HalfOpen { probe: Probe::Idle } => 2,
            BreakerState::HalfOpen { probe: Probe::InFlight } => 3,
            BreakerState::Recovering { .. } => 4,
        }
    }
}

/// Returns the name of the state of a circuit breaker.
pub(crate) fn state_name(state: BreakerState) -> &'static str {
    STATE_NAMES[state.index()]
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
