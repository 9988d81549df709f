//! Identity of a process, and mutual TLS 1.3 with the other processes of its fleet.
//!
//! A process has one certificate, which it uses as a client and as a server. It names the role of the process, its
//! region and its jurisdiction ([`regions::spiffe`]), and is issued by one of the authorities that the fleet trusts. Both
//! ends of a connection verify each other before a byte of a request is written, so an address may come from a source
//! that is not trusted: a peer at that address with another identity is rejected.
//!
//! ```text
//!  client                                          server
//!  TlsClient ───── TCP ── TLS 1.3 handshake ─────▶ ServerTls
//!    authority trusted? role and region expected?    authority trusted? role accepted here?
//!    revoked?                                        revoked?
//!  GuardedStream                                   GuardedStream, PeerIdentity
//! ```
//!
//! rustls implements TLS. Sessions are resumed where it matters: a new connection costs one more round trip than
//! plaintext, and no signature. A resumed session is verified like a new one, chain, validity, name and revocation,
//! because tickets outlive certificates.
//!
//! Certificates are replaced while a process runs: the files are read once a second ([`certificate`], [`authorities`],
//! [`revocation`]), valid changes are used for new connections, and invalid ones are logged and ignored. A revoked
//! certificate also ends the open connections of its owner.
//!
//! In reading order: [`section`] is the configuration, [`process`] the loaded identity, [`verify`] the rules for peers,
//! [`server`] and [`client`] the two ends, [`listener`], [`handshakes`] and `lost_peers` a listener with its limits, `operations` the
//! server of operations ports, which are plaintext, [`stream`] an open connection, [`cause`] and [`events`] its failures, [`expiry`]
//! the metrics of the certificate.

pub mod authorities;
pub mod cause;
pub mod certificate;
pub mod client;
pub mod events;
pub mod expiry;
pub mod handshakes;
pub mod listener;
mod lost_peers;
#[cfg(feature = "axum")]
pub mod operations;
pub mod process;
mod reload;
pub mod revocation;
pub mod section;
pub mod server;
pub mod stream;
pub mod verify;

pub use cause::ConnectionFailureCause;
pub use client::{ConnectedPeer, TlsClient};
pub use events::{ConnectionFailures, ConnectionRejected};
pub use expiry::{CertificateMetrics, CertificateValidity};
pub use listener::{
    AcceptedStream, ClientIdentity, ConnectedClient, FIRST_REQUEST_MAX, PeerAcceptor, PeerListener,
};
pub use lost_peers::LOST_AFTER;
pub use process::{IdentityFiles, OwnName, ProcessIdentity, name_in_pem};
pub use revocation::{ConnectionGuard, RevocationList, SerialNumber};
pub use section::{IdentitySection, Transport};
pub use server::{AcceptedClient, ServerTls};
pub use stream::GuardedStream;
pub use verify::{AcceptedPeers, PeerIdentity, Verifier};
