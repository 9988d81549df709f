//! How a region stands with an edge, or a replica with its ingress, as operators read it.

use gateway_core::circuit::Standing;
use gateway_core::targets::CircuitState;
use serde_json::{Value, json};
use std::time::Instant;

/// Every word for how somebody stands.
pub(crate) const WORDS: [&str; 5] = ["closed", "ejected", "may_be_tried", "on_trial", "returning"];

/// The word for how somebody stands.
pub(crate) fn word(standing: Standing) -> &'static str {
    match standing {
        Standing::Closed => WORDS[0],
        Standing::Ejected { .. } => WORDS[1],
        Standing::MayBeTried => WORDS[2],
        Standing::OnTrial => WORDS[3],
        Standing::Returning { .. } => WORDS[4],
    }
}

/// A circuit's state, as JSON.
pub(crate) fn shown<K>(state: &CircuitState<K>, now: Instant) -> Value {
    let CircuitState { target: _, standing, in_flight, in_flight_max, first_byte } = state;
    let (until, share) = match standing {
        Standing::Ejected { until } => (Some(until), None),
        Standing::Returning { share } => (None, Some(share.get())),
        Standing::Closed | Standing::MayBeTried | Standing::OnTrial => (None, None),
    };
    let first_byte: Vec<_> = first_byte
        .iter()
        .map(|(deployment, size, after)| {
            let after_ms = after.as_millis() as u64;
            json!({"deployment": deployment.as_str(), "tokens_from": size.tokens(), "late_after_ms": after_ms})
        })
        .collect();
    json!({
        "state": word(*standing),
        "ejected_for_ms": until.map(|until| until.saturating_duration_since(now).as_millis() as u64),
        "share_permille": share,
        "in_flight": in_flight,
        "in_flight_max": in_flight_max,
        "first_byte": first_byte,
    })
}
