//! TLS acceptor of a region: accepts gateways, and the other spokes of the region.
//!
//! Any host on the network can connect, so every failure is counted and at most one a second is logged.

use super::{HTTP1, HTTP2};
use identity::cause;
use identity::server::{HANDSHAKE_RECORD, recording, server_config};
use identity::{
    AcceptedPeers, ConnectionFailureCause, ConnectionFailures, ConnectionGuard, ConnectionRejected,
    ProcessIdentity, Verifier,
};
use pingora::listeners::tls::Acceptor;
use pingora::protocols::l4::stream::Stream;
use pingora::protocols::tls::TlsStream;
use pingora::protocols::{Peek, Ssl};
use regions::set::RegionIndex;
use regions::spiffe::Role;
use rustls::Error;
use rustls::pki_types::UnixTime;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

/// Peers of the listener of a region.
const PEERS: AcceptedPeers = AcceptedPeers { roles: &[Role::Gateway], same_region: &[Role::Spoke] };

/// Authenticated connection.
pub(crate) struct AcceptedPeer {
    pub(crate) stream: TlsStream<Stream>,
    /// Gateway, or spoke of the same region.
    pub(crate) role: Role,
    /// Region in its certificate.
    pub(crate) region: Option<RegionIndex>,
    /// Registration of the connection, which a revocation ends.
    pub(crate) guard: ConnectionGuard,
}

/// Accepts the TLS connections of gateways and of the other spokes of a region.
pub(crate) struct GatewayAcceptor {
    acceptor: Acceptor,
    verifier: Verifier,
    failures: Arc<ConnectionFailures>,
}

impl GatewayAcceptor {
    pub(crate) fn new(
        identity: &Arc<ProcessIdentity>,
        failures: Arc<ConnectionFailures>,
    ) -> Result<GatewayAcceptor, Error> {
        // Either protocol that the gateway offers; HTTP/2 if it offers both.
        let config = server_config(identity, PEERS, &[HTTP2, HTTP1])?;
        let acceptor = Acceptor::from_server_config(Arc::new(config));
        Ok(GatewayAcceptor { acceptor, verifier: Verifier::new(identity.clone()), failures })
    }

    /// Performs the handshake with the peer at `address` within `limit`; returns `None`, after logging, for a rejected
    /// connection.
    pub(crate) async fn accept(
        &self,
        stream: Stream,
        address: IpAddr,
        limit: Duration,
    ) -> Option<AcceptedPeer> {
        let handshake = tokio::time::timeout(limit, self.handshake(stream)).await.unwrap_or_else(|_| {
            Err((ConnectionFailureCause::TimedOut, format!("no complete handshake within {limit:?}")))
        });
        handshake.unwrap_or_else(|(cause, reason)| {
            ConnectionRejected { cause, peer: Some(address), reason: &reason }.record(&self.failures);
            None
        })
    }

    async fn handshake(
        &self,
        mut stream: Stream,
    ) -> Result<Option<AcceptedPeer>, (ConnectionFailureCause, String)> {
        let mut first = [0];
        if stream.try_peek(&mut first).await.is_err() {
            // Port check: the peer connected and disconnected.
            return Ok(None);
        }
        if first != [HANDSHAKE_RECORD] {
            return Err((
                ConnectionFailureCause::NotTls,
                "the peer sends plaintext, and this port expects TLS".to_owned(),
            ));
        }
        let (stream, rejected) = recording(self.acceptor.tls_handshake(stream)).await;
        let stream = stream.map_err(|error| match rejected {
            Some(rejected) => (ConnectionFailureCause::of(&rejected), cause::reason(&rejected)),
            None => (ConnectionFailureCause::Other, error.to_string()),
        })?;
        // For a resumed session the library does not verify the certificate again: verify that it is still valid.
        let chain = stream.get_ssl().and_then(|session| session.peer_cert_chain_der()).unwrap_or_default();
        let (certificate, others) = chain
            .split_first()
            .ok_or_else(|| (ConnectionFailureCause::Other, Error::NoCertificatesPresented.to_string()))?;
        let verified = self.verifier.client(certificate, others, PEERS, UnixTime::now());
        let failed = |error: Error| (ConnectionFailureCause::of(&error), cause::reason(&error));
        let peer = verified.map_err(failed)?;
        let guard = self.verifier.admit(&peer).map_err(failed)?;
        Ok(Some(AcceptedPeer { stream, role: peer.role(), region: peer.region, guard }))
    }
}
