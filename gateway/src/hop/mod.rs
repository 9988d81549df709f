//! Connections between gateway and region ("hop"): mutual TLS 1.3.
//!
//! Any network may lie between a gateway and a region, between clouds and across oceans, and a request contains a
//! tenant's text. So both ends authenticate before a byte of it is written: the region proves that it is the region the
//! request may be sent to, in the jurisdiction of the catalogue, and the gateway proves that it is a gateway.
//! Identities are SPIFFE IDs ([`regions::spiffe`]); the crate [`identity`] verifies them. The address of a region comes
//! from the hub, which need not be trusted: a peer at that address with another identity is rejected.
//!
//! ```text
//!  gateway                                       ingress of a region
//!  Connector ── TCP ── TLS 1.3 handshake ──────▶  GatewayAcceptor
//!     a trusted spoke? of the intended region?      a trusted gateway?
//!     in which jurisdiction?
//!  residency::send  ── request ─────────────────▶  Ingress
//! ```
//!
//! rustls implements TLS, below the HTTP clients ([`crate::http1`], [`crate::http2`]), which are unaware of it.
//! Connections are pooled and sessions resumed: a new connection costs one more round trip than plaintext, and no
//! signature. A resumed session is verified like a new one, chain, validity and name, because tickets outlive
//! certificates.
//!
//! The spoke that scales a region reaches the other spokes of the region in the same way ([`crate::ingress`]); their
//! connections carry no requests of clients.
//!
//! Beyond the ingress, requests are forwarded in plaintext to replicas of the same region.

mod connector;
mod gateway_acceptor;
mod stream;

use std::time::Duration;

pub(crate) use connector::{Connector, PeerConnection, UpstreamKey};
pub(crate) use gateway_acceptor::{AcceptedPeer, GatewayAcceptor};
pub(crate) use stream::TransportStream;

/// Idle timeout of a connection, over HTTP/1.1 and HTTP/2. Shorter than that of the peer, so that a request rarely meets a
/// closing connection.
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
const _: () = assert!(
    IDLE_TIMEOUT.as_millis() < identity::FIRST_REQUEST_MAX.as_millis(),
    "a replica does not close a connection that a spoke keeps for its first request"
);
/// ALPN protocols of the connection: HTTP/2 or HTTP/1.1.
const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

#[cfg(test)]
mod tests;
