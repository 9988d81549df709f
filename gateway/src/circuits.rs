//! How a region stands with an edge, or a replica with its ingress, as operators read it.

use gateway_core::circuit::{BreakerState, Probe};
use gateway_core::targets::TargetStatus;
use serde_json::{Value, json};
use std::time::Instant;

/// Every word for how somebody stands.
pub(crate) const WORDS: [&str; 5] = ["closed", "ejected", "may_be_tried", "on_trial", "returning"];

/// The word for how somebody stands.
pub(crate) fn word(standing: BreakerState) -> &'static str {
    match standing {
        BreakerState::Closed => WORDS[0],
        BreakerState::Ejected { .. } => WORDS[1],
        BreakerState::HalfOpen { probe: Probe::Idle } => WORDS[2],
        BreakerState::HalfOpen { probe: Probe::InFlight } => WORDS[3],
        BreakerState::Recovering { .. } => WORDS[4],
    }
}

/// A circuit's state, as JSON.
pub(crate) fn shown<K>(state: &TargetStatus<K>, now: Instant) -> Value {
    let TargetStatus { target: _, state: breaker, in_flight, in_flight_max, first_byte_timeouts } = state;
    let (until, share) = match breaker {
        BreakerState::Ejected { until } => (Some(until), None),
        BreakerState::Recovering { traffic_share } => (None, Some(traffic_share.get())),
        BreakerState::Closed | BreakerState::HalfOpen { .. } => (None, None),
    };
    let first_byte: Vec<_> = first_byte_timeouts
        .iter()
        .map(|(deployment, size, after)| {
            let after_ms = after.as_millis() as u64;
            json!({"deployment": deployment.as_str(), "tokens_from": size.tokens(), "late_after_ms": after_ms})
        })
        .collect();
    json!({
        "state": word(*breaker),
        "ejected_for_ms": until.map(|until| until.saturating_duration_since(now).as_millis() as u64),
        "share_permille": share,
        "in_flight": in_flight,
        "in_flight_max": in_flight_max,
        "first_byte": first_byte,
    })
}
