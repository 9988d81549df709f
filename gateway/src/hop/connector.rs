//! Connector to the next hop: opens connections of a gateway to regions, or of a spoke to the replicas of its region, and
//! verifies the identity of the peer.
//!
//! Every failure is counted, and only a change of the cause is logged: the status of each peer is polled five times a
//! second, and a log line for each failed poll would hide everything else.

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
use resolver::{ConnectError, Resolver};
use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use supervision::Mutex;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Minimum timeout of a handshake: the peer's kernel completes the TCP connect, but the handshake needs CPU time of its
/// process, beside replicas that use every core. A slow handshake delays no request: the request plan retries elsewhere
/// at its own deadline.
const HANDSHAKE_MIN: Duration = Duration::from_secs(1);
/// Maximum number of upstreams whose last failure is remembered: those that were removed while they failed stay until
/// then. Beyond it, the failures of all are logged once more.
const LAST_FAILURES_MAX: usize = 1024;
/// Offered protocols.
const HTTP1_ONLY: &[&[u8]] = &[HTTP1];
const HTTP2_FIRST: &[&[u8]] = &[HTTP2, HTTP1];

/// Opens connections to the next hop.
pub(crate) struct Connector {
    mode: Mode,
    /// Role of the peers.
    role: Role,
    /// Whether HTTP/2 is used where the peer supports it.
    http2: bool,
    /// Jurisdictions of the regions, and their names for logs.
    catalogue: Arc<Catalogue>,
    resolver: Resolver,
    failures: ConnectionFailures,
    /// Last logged failure of each upstream, removed when it responds again.
    last_failures: Mutex<BTreeMap<UpstreamKey, ConnectionFailureCause>>,
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
    /// Address of the peer: one of those of the upstream's name.
    pub(crate) remote: IpAddr,
}

enum Mode {
    Plaintext,
    /// Plaintext, to loopback addresses only.
    Loopback,
    Tls(Box<TlsClients>),
}

/// TLS clients by the protocols that they offer.
struct TlsClients {
    negotiated: TlsClient,
    /// Offers HTTP/1.1 only; `None` if the other one does as well.
    http1: Option<TlsClient>,
}

impl Connector {
    /// Creates a connector from a spoke to the replicas of its region. They have HTTP/1.1.
    pub(crate) fn to_replicas(
        transport: &Transport,
        catalogue: &Arc<Catalogue>,
        resolver: Resolver,
    ) -> Result<Connector, rustls::Error> {
        Connector::new(Role::Replica, transport, false, catalogue, resolver)
    }

    /// Creates a connector from a gateway to regions.
    pub(crate) fn to_regions(
        transport: &Transport,
        http2: bool,
        catalogue: &Arc<Catalogue>,
        resolver: Resolver,
    ) -> Result<Connector, rustls::Error> {
        Connector::new(Role::Spoke, transport, http2, catalogue, resolver)
    }

    fn new(
        role: Role,
        transport: &Transport,
        http2: bool,
        catalogue: &Arc<Catalogue>,
        resolver: Resolver,
    ) -> Result<Connector, rustls::Error> {
        let mode = match transport {
            Transport::Loopback => Mode::Loopback,
            Transport::Plaintext => Mode::Plaintext,
            Transport::Tls(identity) => {
                let client = |protocols| TlsClient::new(identity.clone(), protocols);
                let negotiated = client(if http2 { HTTP2_FIRST } else { HTTP1_ONLY })?;
                let http1 = http2.then(|| client(HTTP1_ONLY)).transpose()?;
                Mode::Tls(Box::new(TlsClients { negotiated, http1 }))
            }
        };
        let (catalogue, failures) = (catalogue.clone(), ConnectionFailures::default());
        let last_failures = Mutex::independent(BTreeMap::new());
        Ok(Connector { mode, role, http2, catalogue, resolver, failures, last_failures })
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
        self.connect_with(key, limit, self.http2).await
    }

    /// Opens a connection like [`Connector::connect`], over HTTP/1.1.
    pub(crate) async fn connect_http1(
        &self,
        key: &UpstreamKey,
        limit: Duration,
    ) -> Result<PeerConnection, AttemptFailure> {
        self.connect_with(key, limit, false).await
    }

    async fn connect_with(
        &self,
        key: &UpstreamKey,
        limit: Duration,
        http2: bool,
    ) -> Result<PeerConnection, AttemptFailure> {
        let UpstreamKey { region, address } = key;
        let (tcp, mut remote) = self.reach(key, limit).await?;
        let Mode::Tls(clients) = &self.mode else {
            // Plaintext has no handshake to negotiate the protocol.
            return Ok(PeerConnection {
                stream: TransportStream::Plaintext(tcp),
                peer: Peer::UNPROVEN,
                http2,
                remote,
            });
        };
        let tls = clients.http1.as_ref().filter(|_| !http2).unwrap_or(&clients.negotiated);
        let expected = ExpectedPeer { role: self.role, region: Some(*region) };
        let limit_tls = limit.max(HANDSHAKE_MIN);
        let mut connected = timeout(limit_tls, tls.resume(expected, tcp)).await;
        if matches!(connected, Ok(Ok(None))) {
            let (tcp, reached) = self.reach(key, limit).await?;
            remote = reached;
            let full = timeout(limit_tls, tls.connect(expected, tcp)).await;
            connected = full.map(|connected| connected.map(Some));
        }
        match connected {
            Ok(Ok(Some(connected))) => self.proven(tls, connected, key, remote),
            Ok(Ok(None)) => unreachable!("a full handshake resumes no session"),
            Ok(Err(error)) => match ConnectionFailureCause::of_io(&error) {
                Some(cause) => Err(self.failed(key, cause, &error)),
                None => {
                    // A region or replica closed the connection during the TLS handshake. The request fails over.
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
        remote: IpAddr,
    ) -> Result<PeerConnection, AttemptFailure> {
        let http2 = connected.protocol() == Some(HTTP2);
        let ConnectedPeer { stream, peer } = connected;
        match Peer::proven(self.role, &peer.id, tls.identity().own(), &self.catalogue) {
            Ok(peer) => {
                let stream = TransportStream::Tls(Box::new(stream));
                Ok(PeerConnection { stream, peer, http2, remote })
            }
            Err(wrong) => Err(self.failed(key, ConnectionFailureCause::WrongPeer, &wrong)),
        }
    }

    /// Opens a TCP connection to one of the addresses of an upstream, and returns which one it is.
    async fn reach(&self, key: &UpstreamKey, limit: Duration) -> Result<(TcpStream, IpAddr), AttemptFailure> {
        let loopback_only = matches!(self.mode, Mode::Loopback);
        let permitted = |address: IpAddr| !loopback_only || address.is_loopback();
        let reached = self.resolver.connect(&key.address, limit, permitted).await;
        let reached = reached.and_then(|tcp| {
            let remote = tcp.peer_addr()?.ip();
            Ok((tcp, remote))
        });
        reached.map_err(|error| match error {
            ConnectError::NotPermitted => {
                let error = "without [identity] requests are sent to loopback addresses only; configure an identity, or \
                             set insecure = true";
                self.failed(key, ConnectionFailureCause::PlaintextForbidden, &error)
            }
            error => {
                // No connection to a region or replica could be opened. The request fails over.
                tracing::debug!(address = %key.address, %error, "next hop unreachable");
                AttemptFailure::Unreachable
            }
        })
    }

    /// Returns whether this is still an address of the upstream, so that its connections may get new requests.
    pub(crate) fn is_current(&self, key: &UpstreamKey, remote: IpAddr) -> bool {
        self.resolver.is_current(&key.address, remote)
    }

    /// Returns the resolver of the upstreams' names.
    pub(crate) fn resolver(&self) -> &Resolver {
        &self.resolver
    }

    /// Records a response of the upstream: an earlier failure is over.
    pub(crate) fn mark_healthy(&self, key: &UpstreamKey) {
        if matches!(self.mode, Mode::Tls(_)) && self.last_failures().remove(key).is_some() {
            let (region, address) = (self.region_name(key.region), &key.address);
            // A region or replica to which connections had failed responds again.
            tracing::info!(peer = self.role.as_str(), region, %address, "connection restored");
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
        let is_new = {
            let mut last_failures = self.last_failures();
            if last_failures.len() >= LAST_FAILURES_MAX && !last_failures.contains_key(key) {
                last_failures.clear();
            }
            last_failures.insert(key.clone(), cause) != Some(cause)
        };
        let (role, region, address) = (self.role, self.region_name(key.region), &key.address);
        HopFailed { role, region, address, cause, error, is_new }.record(&self.failures);
        if cause == ConnectionFailureCause::WrongPeer {
            AttemptFailure::WrongPeer
        } else {
            AttemptFailure::Unreachable
        }
    }

    fn last_failures(&self) -> supervision::MutexGuard<'_, BTreeMap<UpstreamKey, ConnectionFailureCause>> {
        self.last_failures.lock()
    }

    /// Returns the name of a region for logs.
    pub(crate) fn region_name(&self, region: RegionIndex) -> &str {
        self.catalogue.region(region).id.as_str()
    }
}
