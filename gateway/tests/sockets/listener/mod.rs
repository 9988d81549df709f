//! Client side of a gateway: accepted and rejected requests over HTTP/1 and HTTP/2, in plaintext and over TLS, and the
//! end of connections.
//!
//! Everything is real except the hub and the region, which are scripted.

mod ambiguous;
mod bodies;
mod body_memory;
mod bounds;
mod connections;
mod cpu;
mod drain;
mod early;
mod fixture;
mod flood;
mod gzip;
mod half_close;
mod http2;
mod hubs;
mod limits;
mod reload;
mod rfc;
mod tls;
mod trailers;
mod trust;
