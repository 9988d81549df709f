//! Traces: what a process decides about them, and what it records; filter of the log.
//!
//! - [`context`]: identifiers, and the headers `traceparent` and `tracestate` (W3C Trace Context).
//! - [`sampling`]: which traces are exported. The decision at the start of a request is in its header; at the end of the
//!   request, each process keeps errors, slow requests and failovers as well.
//! - [`request`]: trace of one request in one process.
//! - [`span`]: record of one operation. Names and attributes are closed sets, so that no text of a request becomes one.
//! - [`log_filter`]: which events are logged.
//!
//! The records are small, and are made when a request that is exported has ended: until then its trace is three
//! identifiers and two times. Randomness and time are arguments. `telemetry` exports the spans.

pub mod context;
pub mod log_filter;
pub mod request;
pub mod sampling;
pub mod span;
