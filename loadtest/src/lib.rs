//! Load from outside: what would a crowd of callers see?
//!
//! The generator is *open loop*. A crowd does not wait for the last answer before the next person asks, so every
//! request has an intended start that is fixed before the run ([`arrival`]), starts then whatever earlier answers do
//! ([`pace`]), and its latency counts from that intended start. A server that stalls for a second therefore shows the
//! stall in every request that a caller would have made meanwhile; a closed loop of N callers would have asked N
//! times and called it a good second (this is *coordinated omission*).
//!
//! Nothing is forgotten: a request that cannot start, because [`options::IN_FLIGHT_MAX`] others have not been answered, is a
//! failed request in the report; an answer counts as ok only after its rows were checked ([`answer`]); and how late the
//! generator itself was is measured and printed with the rest.
//!
//! Reading order: [`options`] (what is asked for, checked), [`profile`] (how many a second), [`arrival`] and [`texts`]
//! (when, and with what), [`pace`] (what is due now), [`client`] and [`answer`] (one request), [`run`](run()) (all of them), [`record`] (what is kept)
//! and [`report`] (what is shown).

pub mod answer;
pub mod arrival;
pub mod client;
mod json;
pub mod options;
pub mod pace;
pub mod profile;
pub mod record;
pub mod report;
mod run;
pub mod texts;

pub use options::{Options, RawOptions};
pub use record::Snapshot;
pub use report::Report;
pub use run::{CannotStart, run};
