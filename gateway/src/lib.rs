//! Gateway library: the Pingora-based proxy in its two roles, which share most modules.
//!
//! * [`edge`] terminates client traffic. It authenticates the request, finds the deployment, determines the allowed
//!   regions, ranks them, and tries one region after another until one responds.
//! * [`ingress`] is the listener of a region. It rejects requests that violate residency, selects a replica, and
//!   reports to the gateways five times a second.
//!
//! Both are shells: `gateway_core` makes the decisions for a request, `scheduler_core::spoke` those for a region. In
//! reading order: `listener` accepts connections, `request_body` reads a body and `compress` decompresses it (large
//! ones on the threads of `cpu`). `upstream` sends the request to the next hop over HTTP/1.1 (`http1`) or HTTP/2
//! (`http2`), which [`hop`] wraps in TLS on the way to a region. `relay` forwards the response, `respond` writes
//! error responses, and `coalesce` combines small writes into one. `events` writes the log line and the `metrics` of
//! each event, `trace` has what the spans of both roles share, and [`receipts`] records the proof of each attempt. `tls` and [`tokens`] authenticate peers, and
//! `handover` passes the listening sockets to the next process during an upgrade.

pub mod config;
pub mod edge;
pub mod hop;
pub mod ingress;

mod body_memory;
mod circuits;
mod coalesce;
mod compress;
mod cpu;
mod events;
mod forward_traits;
mod handover;
mod http1;
mod http2;
mod idempotency_key;
mod job_lists;
mod listener;
mod metrics;
mod names;
pub mod openapi;
pub mod receipts;
mod relay;
mod request_body;
mod request_head;
mod respond;
mod socket_owner;
mod start_failure;
pub mod tls;
pub mod tokens;
mod trace;
mod upstream;
mod usage;

pub use events::ACCESS;
