//! Connector of a gateway: opens connections to regions and verifies their identity.
//!
//! Every failure is counted, and only a change of the cause is logged: a gateway polls the report of each region five
//! times a second, and a log line for each failed poll would hide everything else.

use super::stream::TransportStream;
use super::verify::{Verifier, server_name};
use super::{Credentials, HTTP1, HTTP2, HopFailureCause, RegionTransport};
use crate::events::{HopFailed, HopFailures};
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::Peer;
use regions::HostPort;
use regions::catalogue::Catalogue;
use regions::set::RegionIndex;
use rustls::client::Resumption;
use rustls::pki_types::UnixTime;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, HandshakeKind, RootCertStore};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use supervision::{Mutex, RwLock};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Minimum timeout of a handshake: the peer's kernel completes the TCP connect, but the handshake needs CPU time of its
/// process, beside replicas that use every core. A slow handshake delays no request: the request plan retries elsewhere
/// at its own deadline.
const HANDSHAKE_MIN: Duration = Duration::from_secs(1);
/// Maximum number of resumable sessions, over all regions: eight for each of a hundred.
const SESSIONS_MAX: usize = 800;

/// Opens connections to the next hop.
pub(crate) struct Connector {
    mode: Mode,
    /// Whether HTTP/2 is used where the peer supports it.
    http2: bool,
    /// Names of the regions for logs; `None` within a region.
    catalogue: Option<Arc<Catalogue>>,
    failures: HopFailures,
    /// Last logged failure of each region, removed when the region responds again.
    last_failures: Mutex<BTreeMap<RegionIndex, HopFailureCause>>,
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

struct TlsClient {
    verifier: Verifier,
    http2: bool,
    connectors: RwLock<Arc<TlsConnectors>>,
}

/// TLS connectors for one set of own certificate and trusted authorities: the sessions are cached with them, because a
/// session continues with the certificate with which it began.
struct TlsConnectors {
    certificate: Arc<CertifiedKey>,
    roots: Arc<RootCertStore>,
    resuming: TlsConnector,
    /// Connector without session resumption.
    fresh: TlsConnector,
}

impl Connector {
    /// Creates a connector for replicas within a region.
    pub(crate) fn within_the_region() -> Connector {
        Connector::new(Mode::Plaintext, false, None)
    }

    /// Creates a connector from a gateway to regions.
    pub(crate) fn to_regions(
        regions: &RegionTransport,
        http2: bool,
        catalogue: &Arc<Catalogue>,
    ) -> Result<Connector, rustls::Error> {
        let mode = match regions {
            RegionTransport::Loopback => Mode::Loopback,
            RegionTransport::Plaintext => Mode::Plaintext,
            RegionTransport::Tls(credentials) => {
                Mode::Tls(Box::new(TlsClient::new(credentials.clone(), http2)?))
            }
        };
        Ok(Connector::new(mode, http2, Some(catalogue.clone())))
    }

    fn new(mode: Mode, http2: bool, catalogue: Option<Arc<Catalogue>>) -> Connector {
        let last_failures = Mutex::independent(BTreeMap::new());
        Connector { mode, http2, catalogue, failures: HopFailures::default(), last_failures }
    }

    /// Returns the failure counters.
    pub(crate) fn failures(&self) -> &HopFailures {
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
            let error = "without [region_tls] requests are sent to loopback addresses only; configure certificates, or \
                         set insecure = true";
            return Err(self.failed(key, HopFailureCause::PlaintextForbidden, &error));
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
        let connectors = tls.connectors();
        let limit_tls = limit.max(HANDSHAKE_MIN);
        let mut connected = timeout(limit_tls, tls.handshake(&connectors.resuming, *region, tcp)).await;
        if matches!(connected, Ok(Ok(None))) {
            let tcp = reach(address, limit).await?;
            connected = timeout(limit_tls, tls.handshake(&connectors.fresh, *region, tcp)).await;
        }
        match connected {
            Ok(Ok(Some(connected))) => Ok(connected),
            Ok(Ok(None)) => unreachable!("a new session is not resumed"),
            Ok(Err(error)) => match HopFailureCause::of_io(&error) {
                Some(cause) => Err(self.failed(key, cause, &error)),
                None => {
                    tracing::debug!(%address, %error, "next hop closed the connection during the handshake");
                    Err(AttemptFailure::Unreachable)
                }
            },
            Err(elapsed) => Err(self.failed(key, HopFailureCause::TimedOut, &elapsed)),
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
        if let Some(cause) = HopFailureCause::of_io(error) {
            self.failed(key, cause, error);
        }
    }

    fn failed(
        &self,
        key: &UpstreamKey,
        cause: HopFailureCause,
        error: &dyn std::fmt::Display,
    ) -> AttemptFailure {
        let is_new = self.last_failures().insert(key.region, cause) != Some(cause);
        let (region, address) = (self.region_name(key.region), &key.address);
        HopFailed { region, address, cause, error, is_new }.record(&self.failures);
        if cause == HopFailureCause::WrongPeer {
            AttemptFailure::WrongPeer
        } else {
            AttemptFailure::Unreachable
        }
    }

    fn last_failures(&self) -> supervision::MutexGuard<'_, BTreeMap<RegionIndex, HopFailureCause>> {
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

impl TlsClient {
    fn new(credentials: Arc<Credentials>, http2: bool) -> Result<TlsClient, rustls::Error> {
        let verifier = Verifier(credentials);
        let connectors = TlsConnectors::of(&verifier, http2)?;
        Ok(TlsClient { verifier, http2, connectors: RwLock::independent(Arc::new(connectors)) })
    }

    /// Returns connectors for the current certificate and authorities.
    fn connectors(&self) -> Arc<TlsConnectors> {
        let current = self.connectors.read().clone();
        if current.are_current(&self.verifier) {
            return current;
        }
        let renewed =
            TlsConnectors::of(&self.verifier, self.http2).expect("the same configuration was valid before");
        let renewed = Arc::new(renewed);
        *self.connectors.write() = renewed.clone();
        renewed
    }

    /// Performs the handshake and returns the proven identity of the peer. For a resumed session the library does not
    /// verify the certificate again; if it is no longer valid, the peer may have a newer one: `None`.
    async fn handshake(
        &self,
        connector: &TlsConnector,
        region: RegionIndex,
        tcp: TcpStream,
    ) -> io::Result<Option<PeerConnection>> {
        let stream = connector.connect(server_name(region), tcp).await?;
        let (_, session) = stream.get_ref();
        let chain = session.peer_certificates().unwrap_or_default();
        let Some((certificate, others)) = chain.split_first() else {
            return Err(io::Error::other(rustls::Error::NoCertificatesPresented));
        };
        let peer = match session.handshake_kind() {
            Some(HandshakeKind::Resumed) => {
                match self.verifier.region(certificate, others, region, UnixTime::now()) {
                    Ok(peer) => peer,
                    Err(_) => return Ok(None),
                }
            }
            // The handshake verified the chain.
            _ => self.verifier.named(certificate, region).map_err(io::Error::other)?,
        };
        let http2 = session.alpn_protocol() == Some(HTTP2);
        Ok(Some(PeerConnection { stream: TransportStream::Tls(Box::new(stream)), peer, http2 }))
    }
}

impl TlsConnectors {
    fn of(verifier: &Verifier, http2: bool) -> Result<TlsConnectors, rustls::Error> {
        let offered: &[&[u8]] = if http2 { &[HTTP2, HTTP1] } else { &[HTTP1] };
        let Credentials { identity, anchors, .. } = &*verifier.0;
        let (certificate, roots) = (identity.certified_key(), anchors.current().roots);
        let connector = |resumption| {
            let mut config = ClientConfig::builder_with_provider(anchors.provider().clone())
                .with_protocol_versions(&[&TLS13])?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier.clone()))
                .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certificate.clone())));
            config.alpn_protocols = offered.iter().map(|protocol| protocol.to_vec()).collect();
            config.resumption = resumption;
            config.enable_sni = false;
            Ok::<_, rustls::Error>(TlsConnector::from(Arc::new(config)))
        };
        let resuming = connector(Resumption::in_memory_sessions(SESSIONS_MAX))?;
        let fresh = connector(Resumption::disabled())?;
        Ok(TlsConnectors { certificate, roots, resuming, fresh })
    }

    fn are_current(&self, verifier: &Verifier) -> bool {
        let Credentials { identity, anchors, .. } = &*verifier.0;
        Arc::ptr_eq(&self.certificate, &identity.certified_key())
            && Arc::ptr_eq(&self.roots, &anchors.current().roots)
    }
}
