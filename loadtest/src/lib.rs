//! Load generator, bulk client and drills for an embeddings endpoint.
//!
//! The generator is *open loop*. Independent clients do not wait for each other's responses, so every request has an
//! intended start that is fixed before the run ([`arrival`]). It starts then, whatever the state of earlier requests
//! ([`pace`]), and its latency counts from that intended start. A server that stalls for a second therefore shows the
//! stall in every request that a client would have sent during it. A closed loop of N callers sends only N requests
//! during the stall and reports good latencies; this error is known as *coordinated omission*.
//!
//! Every request is accounted for. A request that cannot start because [`limits::IN_FLIGHT_MAX`] others are in flight
//! is a failed request in the report; a response counts as ok only after its rows were checked ([`response`]); and the
//! generator's own lag is measured and printed with the rest. A closed loop is available on request, and the report
//! names it as such.
//!
//! Reading order: [`options`] (the validated settings of a run), [`task`] and [`workload`] (concurrent tasks and the
//! content of their requests), [`profile`] (request rate over time), [`arrival`] (intended starts), [`pace`] (requests
//! that are due), `generator` (sends requests and reads responses), [`exchange`] and [`response`] (one request),
//! [`run`](run()) (a whole run), [`record`] (statistics), [`slo`] and [`capacity`] (objectives, and the highest rate
//! that meets one), and [`report`]. [`drill`] defines fault injections under load and the expectations that are
//! checked afterwards.

pub mod arrival;
pub mod capacity;
pub mod client;
pub mod drill;
mod endpoint;
pub mod exchange;
pub mod find_capacity;
mod generator;
pub mod limits;
pub mod options;
pub mod pace;
pub mod profile;
pub mod record;
pub mod report;
pub mod response;
mod run;
mod scan;
pub mod slo;
pub mod task;
mod trust;
pub mod workload;

pub use options::{Options, RawOptions};
pub use record::{Mark, RunSnapshot};
pub use report::Report;
pub use run::{RunError, run};
