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
//! generator itself was is measured and printed with the rest. Who wants a closed loop can have one, beside which the
//! report says what it is.
//!
//! Reading order: [`options`] (what is asked for, checked), [`task`] and [`workload`] (what is done at once, and what requests
//! carry), [`profile`] (how many a second), [`arrival`] (when), [`pace`] (what is due now), `engine` (all requests and their
//! answers), [`exchange`] and [`answer`] (one of them), [`run`](run()) (a whole run), [`record`] (what is kept), [`slo`] and
//! [`capacity`] (was it good, and how much of it would be), and [`report`] (what is shown). [`drill`] says
//! what is done to a system under load, and what must hold.

pub mod answer;
pub mod arrival;
pub mod capacity;
pub mod client;
pub mod drill;
mod engine;
pub mod exchange;
pub mod find;
pub mod options;
pub mod pace;
pub mod priority;
pub mod profile;
pub mod record;
pub mod report;
mod run;
mod scan;
pub mod slo;
pub mod task;
mod trust;
pub mod workload;

pub use options::{Options, RawOptions};
pub use record::{Mark, Snapshot};
pub use report::Report;
pub use run::{CannotStart, run};
