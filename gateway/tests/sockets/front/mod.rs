//! The front of an edge as clients meet it: what is read and what is refused, over HTTP/1 and HTTP/2, plain and over TLS,
//! and how connections end.
//!
//! Everything is real but the hub and the region, which say what a case wants to hear.

mod ambiguous;
mod bodies;
mod body_memory;
mod bounds;
mod connections;
mod cpu;
mod drain;
mod early;
mod flood;
mod gzip;
mod half_close;
mod http2;
mod hubs;
mod limits;
mod reload;
mod rfc;
mod scene;
mod tls;
mod trailers;
mod trust;
