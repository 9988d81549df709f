//! The gateway: the one place that speaks Pingora, in two roles over the same parts.
//!
//! * [`edge`] stands where clients are. It authenticates, finds the deployment, decides which regions may see the
//!   request and which of them shall, and goes from one to the next until there is an answer.
//! * [`ingress`] stands at the door of a region. It refuses what may not be seen here, chooses a replica, and reports
//!   to the edges five times a second.
//!
//! Both are thin: `gateway_core` decides a request's fate, `scheduler_core::spoke` a region's, and the code here does
//! as it is told. In reading order: `listener` accepts, `intake` reads a body and `compress` unpacks it, large ones on the threads of `cpu`, `upstream` asks
//! the next hop over `plain` HTTP/1.1 or in `streams` of HTTP/2, which [`hop`] puts into TLS on its way to a region, `relay`
//! passes its answer on, `respond` refuses; `gathered` is how an answer leaves in one write. `events` tells what became of a request, to the log and to `metrics`, and [`receipts`] keeps the proof of
//! it. `tls` and [`tokens`] are about who is who, and `handover` lets the next process go on where this one ends.

pub mod config;
pub mod edge;
pub mod hop;
pub mod ingress;

mod circuits;
mod compress;
mod cpu;
mod events;
mod gathered;
mod handover;
mod intake;
mod listener;
mod metrics;
mod names;
pub mod openapi;
mod plain;
pub mod receipts;
mod relay;
mod respond;
mod socket_owner;
mod streams;
pub mod tls;
pub mod tokens;
mod upstream;

pub use events::ACCESS;
