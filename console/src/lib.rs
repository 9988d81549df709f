//! Console of a hub: the page and the state that it shows.
//!
//! ```text
//!  gateways ──traffic──▶ TrafficState ─┐
//!  store ──table, replicas─────────────┴─▶ FleetSnapshot ──JSON──▶ page (assets)
//! ```
//!
//! [`traffic`] aggregates the reports of the gateways, and [`observed`] what they observe of the regions; [`snapshot`] joins them
//! with the route table and the replicas; [`history`] has the last five minutes for the charts. [`sessions`] has the persons who are
//! signed in, and [`open_pages`] the number of their pages; [`origin`] decides which requests of a browser are accepted, [`lookups`]
//! has the requests that gateways are to explain, [`searches`] what they are to find, [`colours`] the colours of the regions, and [`assets`] the files.
//!
//! Time and randomness are arguments; the hub serves it.

pub mod assets;
pub mod colours;
pub mod events;
pub mod history;
pub mod lookups;
pub mod observed;
pub mod open_pages;
pub mod origin;
pub mod searches;
pub mod sessions;
pub mod snapshot;
pub mod traffic;

/// Rounds to two decimals: more would only be bytes.
fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

fn millis(duration: std::time::Duration) -> f64 {
    rounded(duration.as_secs_f64() * 1e3)
}

/// Returns an arbitrary instant for tests.
#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "an Instant cannot be constructed, and no test depends on its value"
)]
fn some_instant() -> std::time::Instant {
    std::time::Instant::now()
}
