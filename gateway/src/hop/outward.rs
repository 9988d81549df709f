//! The edge's end: opens connections to regions, and knows who answered.
//!
//! What goes wrong is told once and counted every time: an edge asks each region for its report five times a second, and a
//! log that says so five times a second says nothing else.

use super::verify::{Verifier, server_name};
use super::{Cause, Credentials, HTTP1, HTTP2, Regions};
use crate::events::{HopFailed, HopFailures};
use crate::plain::{Stream, Way};
use gateway_core::outcome::AttemptFailure;
use gateway_core::residency::Peer;
use regions::set::RegionIndex;
use rustls::client::Resumption;
use rustls::pki_types::UnixTime;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, HandshakeKind, RootCertStore};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use supervision::{Mutex, RwLock};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// A handshake is given no less than this: to connect, the other side's kernel suffices, to greet, its process has to run,
/// beside replicas that take every core. Nobody waits for it in vain: whoever is late is left by its request's plan.
const HANDSHAKE_MIN: Duration = Duration::from_secs(1);
/// Sessions that can be resumed, over all regions: eight for each of a hundred.
const SESSIONS_MAX: usize = 800;

/// Opens connections to the next hop.
pub(crate) struct Outward {
    mode: Mode,
    /// Whether HTTP/2 is spoken where the other side does too.
    http2: bool,
    failures: HopFailures,
    /// What was told of each region, until it is well again.
    told: Mutex<BTreeMap<RegionIndex, Cause>>,
}

/// A connection, with who is at the other end and what is spoken.
pub(crate) struct Greeted {
    pub(crate) stream: Stream,
    pub(crate) peer: Peer,
    pub(crate) http2: bool,
}

enum Mode {
    Clear,
    /// In the clear, and not over a network.
    ClearOnThisMachine,
    Tls(Box<Tls>),
}

struct Tls {
    verifier: Verifier,
    http2: bool,
    connectors: RwLock<Arc<Connectors>>,
}

/// What is spoken with, as long as neither the own certificate nor those believed change: sessions are kept beside them, and
/// one that was begun with a certificate goes on with it.
struct Connectors {
    shown: Arc<CertifiedKey>,
    believed: Arc<RootCertStore>,
    resuming: TlsConnector,
    /// Begins every session anew.
    anew: TlsConnector,
}

impl Outward {
    /// Within a region, to its replicas.
    pub(crate) fn within_the_region() -> Outward {
        Outward::new(Mode::Clear, false)
    }

    /// From an edge to regions.
    pub(crate) fn to_regions(regions: &Regions, http2: bool) -> Result<Outward, rustls::Error> {
        let mode = match regions {
            Regions::OnThisMachine => Mode::ClearOnThisMachine,
            Regions::InTheClear => Mode::Clear,
            Regions::Tls(credentials) => Mode::Tls(Box::new(Tls::with(credentials.clone(), http2)?)),
        };
        Ok(Outward::new(mode, http2))
    }

    fn new(mode: Mode, http2: bool) -> Outward {
        Outward { mode, http2, failures: HopFailures::default(), told: Mutex::independent(BTreeMap::new()) }
    }

    /// What went wrong so far.
    pub(crate) fn failures(&self) -> &HopFailures {
        &self.failures
    }

    /// Opens a connection and finds out who is at the other end. A TCP connection may take `limit`, and so may the
    /// handshake, or a little more.
    pub(crate) async fn connect(&self, way: Way, limit: Duration) -> Result<Greeted, AttemptFailure> {
        let Way { region, address } = way;
        if matches!(self.mode, Mode::ClearOnThisMachine) && !address.ip().is_loopback() {
            let why = "without [region_tls] nothing is sent to another machine; give it certificates, or insecure = true";
            return Err(self.failed(way, Cause::InTheClear, &why));
        }
        let tcp = reach(address, limit).await?;
        let Mode::Tls(tls) = &self.mode else {
            // There is no handshake to agree in.
            return Ok(Greeted { stream: Stream::Clear(tcp), peer: Peer::UNPROVEN, http2: self.http2 });
        };
        let connectors = tls.connectors();
        let limit_tls = limit.max(HANDSHAKE_MIN);
        let mut greeted = timeout(limit_tls, tls.greet(&connectors.resuming, region, tcp)).await;
        if matches!(greeted, Ok(Ok(None))) {
            let tcp = reach(address, limit).await?;
            greeted = timeout(limit_tls, tls.greet(&connectors.anew, region, tcp)).await;
        }
        match greeted {
            Ok(Ok(Some(greeted))) => Ok(greeted),
            Ok(Ok(None)) => unreachable!("what is begun anew is not resumed"),
            Ok(Err(error)) => match Cause::of_io(&error) {
                Some(cause) => Err(self.failed(way, cause, &error)),
                None => {
                    tracing::debug!(%address, %error, "the next hop hung up in the handshake");
                    Err(AttemptFailure::Unreachable)
                }
            },
            Err(late) => Err(self.failed(way, Cause::TimedOut, &late)),
        }
    }

    /// An answer came from there: what was wrong is over.
    pub(crate) fn is_well(&self, region: RegionIndex) {
        if matches!(self.mode, Mode::Tls(_)) && self.told().remove(&region).is_some() {
            tracing::info!(region = region.as_usize(), "the hop to a region works again");
        }
    }

    /// A connection broke before an answer. That the other end does not take our certificate is heard only then: in TLS 1.3
    /// a client is through with its handshake before the server has looked at it.
    pub(crate) fn broke(&self, way: Way, error: &io::Error) {
        if let Some(cause) = Cause::of_io(error) {
            self.failed(way, cause, error);
        }
    }

    fn failed(&self, way: Way, cause: Cause, why: &dyn std::fmt::Display) -> AttemptFailure {
        let news = self.told().insert(way.region, cause) != Some(cause);
        HopFailed { region: way.region, address: way.address, cause, why, news }.record(&self.failures);
        if cause == Cause::WrongPeer { AttemptFailure::WrongPeer } else { AttemptFailure::Unreachable }
    }

    fn told(&self) -> supervision::MutexGuard<'_, BTreeMap<RegionIndex, Cause>> {
        self.told.lock()
    }
}

async fn reach(address: SocketAddr, limit: Duration) -> Result<TcpStream, AttemptFailure> {
    let reached = async {
        let stream = timeout(limit, TcpStream::connect(address)).await??;
        stream.set_nodelay(true)?;
        Ok::<_, io::Error>(stream)
    };
    reached.await.map_err(|error| {
        tracing::debug!(%address, %error, "the next hop cannot be reached");
        AttemptFailure::Unreachable
    })
}

impl Tls {
    fn with(credentials: Arc<Credentials>, http2: bool) -> Result<Tls, rustls::Error> {
        let verifier = Verifier(credentials);
        let connectors = Connectors::of(&verifier, http2)?;
        Ok(Tls { verifier, http2, connectors: RwLock::independent(Arc::new(connectors)) })
    }

    /// Those that fit what is shown and believed now.
    fn connectors(&self) -> Arc<Connectors> {
        let current = self.connectors.read().clone();
        if current.are_of(&self.verifier) {
            return current;
        }
        let made = Connectors::of(&self.verifier, self.http2)
            .expect("what could be set up once can be set up again");
        let made = Arc::new(made);
        *self.connectors.write() = made.clone();
        made
    }

    /// The handshake, and what the other end has proven by it. In a resumed session the library takes the certificate as it
    /// was; whether it still holds is looked at here, and where it does not, the other end may have a newer one: `None`.
    async fn greet(
        &self,
        connector: &TlsConnector,
        meant: RegionIndex,
        tcp: TcpStream,
    ) -> io::Result<Option<Greeted>> {
        let stream = connector.connect(server_name(meant), tcp).await?;
        let (_, session) = stream.get_ref();
        let shown = session.peer_certificates().unwrap_or_default();
        let Some((certificate, others)) = shown.split_first() else {
            return Err(io::Error::other(rustls::Error::NoCertificatesPresented));
        };
        let peer = match session.handshake_kind() {
            Some(HandshakeKind::Resumed) => {
                match self.verifier.region(certificate, others, meant, UnixTime::now()) {
                    Ok(peer) => peer,
                    Err(_) => return Ok(None),
                }
            }
            // Verified a moment ago.
            _ => self.verifier.named(certificate, meant).map_err(io::Error::other)?,
        };
        let http2 = session.alpn_protocol() == Some(HTTP2);
        Ok(Some(Greeted { stream: Stream::Tls(Box::new(stream)), peer, http2 }))
    }
}

impl Connectors {
    fn of(verifier: &Verifier, http2: bool) -> Result<Connectors, rustls::Error> {
        let offered: &[&[u8]] = if http2 { &[HTTP2, HTTP1] } else { &[HTTP1] };
        let Credentials { identity, anchors, .. } = &*verifier.0;
        let (shown, believed) = (identity.shown(), anchors.current().roots);
        let connector = |resumption| {
            let mut config = ClientConfig::builder_with_provider(anchors.provider().clone())
                .with_protocol_versions(&[&TLS13])?
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(verifier.clone()))
                .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(shown.clone())));
            config.alpn_protocols = offered.iter().map(|offered| offered.to_vec()).collect();
            config.resumption = resumption;
            config.enable_sni = false;
            Ok::<_, rustls::Error>(TlsConnector::from(Arc::new(config)))
        };
        let resuming = connector(Resumption::in_memory_sessions(SESSIONS_MAX))?;
        let anew = connector(Resumption::disabled())?;
        Ok(Connectors { shown, believed, resuming, anew })
    }

    fn are_of(&self, verifier: &Verifier) -> bool {
        let Credentials { identity, anchors, .. } = &*verifier.0;
        Arc::ptr_eq(&self.shown, &identity.shown()) && Arc::ptr_eq(&self.believed, &anchors.current().roots)
    }
}
