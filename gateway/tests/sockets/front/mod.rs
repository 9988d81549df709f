//! The front of an edge as clients meet it: what is read and what is refused, over HTTP/1 and HTTP/2, plain and over TLS,
//! and how connections end.
//!
//! Everything is real but the hub and the region, which say what a case wants to hear.

mod bodies;
mod bounds;
mod drain;
mod flood;
mod gzip;
mod http2;
mod hubs;
mod limits;
mod rfc;
mod scene;
mod tls;
