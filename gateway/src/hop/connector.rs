//! Connector of a gateway: opens connections to regions and verifies their identity.
//!
//! Every failure is counted, and only a change of the cause is logged: a gateway polls the report of each region five
//! times a second, and a log line for each failed poll would hide everything else.

use super::stream::TransportStream;
use super::{HTTP1, HTTP2};
use crate::events::HopFailed;
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::Peer;
use identity::verify::ExpectedPeer;
use identity::{ConnectedPeer, ConnectionFailureCause, ConnectionFailures, TlsClient, Transport};
use regions::HostPort;
use regions::catalogue::Catalogue;
use regions::set::RegionIndex;
use regions::spiffe::Role;
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use supervision::Mutex;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Minimum timeout of a handshake: the peer's kernel completes the TCP connect, but the handshake needs CPU time of its
/// process, beside replicas that use every core. A slow handshake delays no request: the request plan retries elsewhere
/// at its own deadline.
const HANDSHAKE_MIN: Duration = Duration::from_secs(1);
/// Offered protocols.
const HTTP1_ONLY: &[&[u8]] = &[HTTP1];
const HTTP2_FIRST: &[&[u8]] = &[HTTP2, HTTP1];

/// Opens connections to the next hop.
pub(crate) struct Connector {
    mode: Mode,
    /// Whether HTTP/2 is used where the peer supports it.
    http2: bool,
    /// Names of the regions for logs; `None` within a region.
    catalogue: Option<Arc<Catalogue>>,
    failures: ConnectionFailures,
    /// Last logged failure of each region, removed when the region responds again.
    last_failures: Mutex<BTreeMap<RegionIndex, ConnectionFailureCause>>,
}

/// Upstream of a connection. The address alone is not sufficient: it may be reassigned to another region, to which open
/// connections do not lead.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct UpstreamKey {
    pub(crate) region: RegionIndex,
    pub(crate) address: HostPort,
}

/// Established connection, with the identity of the peer and the negotiated protocol.
pub(crate) struct PeerConnection {
    pub(crate) stream: TransportStream,
    pub(crate) peer: Peer,
    pub(crate) http2: bool,
}

enum Mode {
    Plaintext,
    /// Plaintext, to loopback addresses only.
    Loopback,
    Tls(Box<TlsClient>),
}

impl Connector {
    /// Creates a connector for replicas within a region.
    pub(crate) fn within_the_region() -> Connector {
        Connector::new(Mode::Plaintext, false, None)
    }

    /// Creates a connector from a gateway to regions.
    pub(crate) fn to_regions(
        transport: &Transport,
        http2: bool,
        catalogue: &Arc<Catalogue>,
    ) -> Result<Connector, rustls::Error> {
        let mode = match transport {
            Transport::Loopback => Mode::Loopback,
            Transport::Plaintext => Mode::Plaintext,
            Transport::Tls(identity) => {
                let protocols = if http2 { HTTP2_FIRST } else { HTTP1_ONLY };
                Mode::Tls(Box::new(TlsClient::new(identity.clone(), protocols)?))
            }
        };
        Ok(Connector::new(mode, http2, Some(catalogue.clone())))
    }

    fn new(mode: Mode, http2: bool, catalogue: Option<Arc<Catalogue>>) -> Connector {
        let last_failures = Mutex::independent(BTreeMap::new());
        Connector { mode, http2, catalogue, failures: ConnectionFailures::default(), last_failures }
    }

    /// Returns the failure counters.
    pub(crate) fn failures(&self) -> &ConnectionFailures {
        &self.failures
    }

    /// Opens a connection and authenticates the peer. `limit` applies to the TCP connect, and to the handshake with a
    /// minimum of [`HANDSHAKE_MIN`].
    pub(crate) async fn connect(
        &self,
        key: &UpstreamKey,
        limit: Duration,
    ) -> Result<PeerConnection, AttemptFailure> {
        let UpstreamKey { region, address } = key;
        if matches!(self.mode, Mode::Loopback) && !address.is_loopback() {
            let error = "without [identity] requests are sent to loopback addresses only; configure an identity, or \
                         set insecure = true";
            return Err(self.failed(key, ConnectionFailureCause::PlaintextForbidden, &error));
        }
        let tcp = reach(address, limit).await?;
        let Mode::Tls(tls) = &self.mode else {
            // Plaintext has no handshake to negotiate the protocol.
            return Ok(PeerConnection {
                stream: TransportStream::Plaintext(tcp),
                peer: Peer::UNPROVEN,
                http2: self.http2,
            });
        };
        let expected = ExpectedPeer { role: Role::Spoke, region: Some(*region) };
        let limit_tls = limit.max(HANDSHAKE_MIN);
        let mut connected = timeout(limit_tls, tls.resume(expected, tcp)).await;
        if matches!(connected, Ok(Ok(None))) {
            let tcp = reach(address, limit).await?;
            let full = timeout(limit_tls, tls.connect(expected, tcp)).await;
            connected = full.map(|connected| connected.map(Some));
        }
        match connected {
            Ok(Ok(Some(connected))) => self.proven(tls, connected, key),
            Ok(Ok(None)) => unreachable!("a full handshake resumes no session"),
            Ok(Err(error)) => match ConnectionFailureCause::of_io(&error) {
                Some(cause) => Err(self.failed(key, cause, &error)),
                None => {
                    tracing::debug!(%address, %error, "next hop closed the connection during the handshake");
                    Err(AttemptFailure::Unreachable)
                }
            },
            Err(elapsed) => Err(self.failed(key, ConnectionFailureCause::TimedOut, &elapsed)),
        }
    }

    /// Returns the connection with the proven region of the peer.
    fn proven(
        &self,
        tls: &TlsClient,
        connected: ConnectedPeer,
        key: &UpstreamKey,
    ) -> Result<PeerConnection, AttemptFailure> {
        let http2 = connected.protocol() == Some(HTTP2);
        let ConnectedPeer { stream, peer } = connected;
        let catalogue =
            self.catalogue.as_ref().expect("connections with TLS lead to regions of the catalogue");
        match Peer::proven(&peer.id, tls.identity().own(), catalogue) {
            Ok(peer) => Ok(PeerConnection { stream: TransportStream::Tls(Box::new(stream)), peer, http2 }),
            Err(wrong) => Err(self.failed(key, ConnectionFailureCause::WrongPeer, &wrong)),
        }
    }

    /// Records a response of the region: an earlier failure is over.
    pub(crate) fn mark_healthy(&self, region: RegionIndex) {
        if matches!(self.mode, Mode::Tls(_)) && self.last_failures().remove(&region).is_some() {
            tracing::info!(region = self.region_name(region), "connection to a region restored");
        }
    }

    /// Records a connection that failed before a response. A rejection of our certificate is only visible here: in TLS
    /// 1.3 the client completes its handshake before the server has verified the client's certificate.
    pub(crate) fn connection_failed(&self, key: &UpstreamKey, error: &io::Error) {
        if let Some(cause) = ConnectionFailureCause::of_io(error) {
            self.failed(key, cause, error);
        }
    }

    fn failed(
        &self,
        key: &UpstreamKey,
        cause: ConnectionFailureCause,
        error: &dyn std::fmt::Display,
    ) -> AttemptFailure {
        let is_new = self.last_failures().insert(key.region, cause) != Some(cause);
        let (region, address) = (self.region_name(key.region), &key.address);
        HopFailed { region, address, cause, error, is_new }.record(&self.failures);
        if cause == ConnectionFailureCause::WrongPeer {
            AttemptFailure::WrongPeer
        } else {
            AttemptFailure::Unreachable
        }
    }

    fn last_failures(&self) -> supervision::MutexGuard<'_, BTreeMap<RegionIndex, ConnectionFailureCause>> {
        self.last_failures.lock()
    }

    /// Returns the name of a region for logs.
    pub(crate) fn region_name(&self, region: RegionIndex) -> Option<&str> {
        self.catalogue.as_ref().map(|catalogue| catalogue.region(region).id.as_str())
    }
}

async fn reach(address: &HostPort, limit: Duration) -> Result<TcpStream, AttemptFailure> {
    let reached = async {
        let stream = timeout(limit, TcpStream::connect(address.to_string())).await??;
        stream.set_nodelay(true)?;
        Ok::<_, io::Error>(stream)
    };
    reached.await.map_err(|error| {
        tracing::debug!(%address, %error, "next hop unreachable");
        AttemptFailure::Unreachable
    })
}
