//! How a region stands with an edge, or a replica with its ingress, as operators read it.

use gateway_core::circuit::Standing;
use gateway_core::targets::CircuitState;
use serde_json::{Value, json};
use std::time::Instant;

/// A circuit's state, as JSON.
pub(crate) fn shown<K>(state: &CircuitState<K>, now: Instant) -> Value {
    let CircuitState { target: _, standing, in_flight, in_flight_max, first_byte } = state;
    let (name, until, share) = match standing {
        Standing::Closed => ("closed", None, None),
        Standing::Ejected { until } => ("ejected", Some(until), None),
        Standing::MayBeTried => ("may_be_tried", None, None),
        Standing::OnTrial => ("on_trial", None, None),
        Standing::Returning { share } => ("returning", None, Some(share.get())),
    };
    let first_byte: Vec<_> = first_byte
        .iter()
        .map(|(deployment, size, after)| {
            let after_ms = after.as_millis() as u64;
            json!({"deployment": deployment.as_str(), "tokens_from": size.tokens(), "late_after_ms": after_ms})
        })
        .collect();
    json!({
        "state": name,
        "ejected_for_ms": until.map(|until| until.saturating_duration_since(now).as_millis() as u64),
        "share_permille": share,
        "in_flight": in_flight,
        "in_flight_max": in_flight_max,
        "first_byte": first_byte,
    })
}
