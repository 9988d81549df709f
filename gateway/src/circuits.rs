//! Circuit breaker state of a region (at a gateway) or of a replica (at its ingress), as operators read it.

use gateway_core::circuit::{BreakerState, Probe};
use gateway_core::targets::TargetStatus;
use serde_json::{Value, json};
use std::time::Instant;

/// All names of circuit breaker states.
pub(crate) const STATE_NAMES: [&str; 5] = ["closed", "ejected", "half_open", "probing", "recovering"];

/// Returns the name of a circuit breaker state.
pub(crate) fn state_name(standing: Standing) -> &'static str {
    match standing {
        Standing::Closed => STATE_NAMES[0],
        Standing::Ejected { .. } => STATE_NAMES[1],
        Standing::MayBeTried => STATE_NAMES[2],
        Standing::OnTrial => STATE_NAMES[3],
        Standing::Returning { .. } => STATE_NAMES[4],
    }
}

/// Returns the state of a circuit breaker as JSON.
pub(crate) fn to_json<K>(state: &CircuitState<K>, now: Instant) -> Value {
    let CircuitState { target: _, standing, in_flight, in_flight_max, first_byte } = state;
    let (until, share) = match standing {
        Standing::Ejected { until } => (Some(until), None),
        Standing::Returning { share } => (None, Some(share.get())),
        Standing::Closed | Standing::MayBeTried | Standing::OnTrial => (None, None),
    };
    let first_byte: Vec<_> = first_byte_timeouts
        .iter()
        .map(|(deployment, size, after)| {
            let after_ms = after.as_millis() as u64;
            json!({"deployment": deployment.as_str(), "tokens_from": size.tokens(), "timeout_ms": after_ms})
        })
        .collect();
    json!({
        "state": state_name(*standing),
        "ejected_for_ms": until.map(|until| until.saturating_duration_since(now).as_millis() as u64),
        "traffic_share_permille": share,
        "in_flight": in_flight,
        "in_flight_max": in_flight_max,
        "first_byte": first_byte,
    })
}
